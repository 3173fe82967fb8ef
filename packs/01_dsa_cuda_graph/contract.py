"""A CUDA graph captures DSA's forward and backward: nothing makes the host wait for the GPU.

SITES lists functions of megatron.core's DSA, of its RoPE, and of the Python around the fused kernels. Each is called in
eager mode, then captured, and replayed with other values in the same memory. Every rank compares both results with a
reference in float64 or integers. No call and no replay may write into its inputs. Wrong input raises the exception that
is due. What needs no GPU is right for tensors on the host.

A function is not judged where the tree lacks it, or where it needs more GPUs than there are. DSA takes no cumulative
lengths that decrease, but for zeros after the last sequence, where there are several ranks. Stand-ins: the formula of
cuDNN's backward, which gives nan for a row without keys, and a linear layer of torch for Transformer Engine's. The
reference of DSAttention is DSAttention on one rank and one sequence. On the CPU, tensors say that they are on a GPU
(kit.pretended_gpu), and ranks use gloo. On GPUs, graphs and NCCL are real.

Tolerances, relative, in the norm. float32: 1e-5, for sums of at most 64 terms in another order (64 * 2**-24) and for a
softmax. bfloat16: 3 * 2**-8, three roundings. Integers are equal.
"""
# ruff: noqa: PLR0917 - what upstream and a reference take

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import math
import traceback
import types
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from kit import current_target, pairwise, processes
from kit.autograd import kept_alive, weak_storages
from kit.capture import host_waits, unseen
from kit.errors import relative_error
from kit.plugin import HOST_FAULTS
from kit.pretended_gpu import pretended_gpu
from kit.ranks import ranks

TARGET = current_target()
EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
torch.set_num_threads(1)  # what runs on the CPU is small, and other lanes want the other cores
VARIANT = "megatron.core.transformer.experimental_attention_variant"
MODULES = [f"{VARIANT}.dsa{part}" for part in ("_layout", "_masking", "_cudnn_kernels", "")]
MODULES += ["megatron.core.models.common.embeddings.rope_utils"]
# Lengths are in units of 2 * ranks rows; a tail is rows that belong to no sequence, None is a caller who rules it out.
FACTORS = {
    "cp": ((1, 0), (2, 0), (2, 1), (3, 1), (4, 3)),
    "lengths": ((3, 0, 5), (0, 2, 0), (7,), (2, 1, 4)),
    "tail": (None, 0, 5),
    "integers": (32, 64),
    "table": ("one", "all", "long"),
    "rotation": ("half", "pairs", "mla"),
    "mscale": (1.0, 1.3),
    "floats": (32, 16),
    "batch": (1, 2, 3),
    "rows": ("mean", "sum", "all", "half", "each", "none"),
    "sparse": (0, 1),
    "attention_heads": (64, 4),
    "filled": ("some", "all", "none", "told"),
    "loss": (0, 1, 3),
    "scale": (0, 1),
}
HOOKED = "a hook keeps no tensor"  # what the contract's own hook says, where autograd asks it
MANY = 53  # the batch of a case that is about the number of its rows, MANY * SQ
S, SQ, SK = 32, 20, 28  # rows of the whole attention; query and key rows of the indexer's loss
COLUMNS = 6  # of ten, which RoPE turns
TOLERANCES = {32: 1e-5, 16: 3 * 2**-8}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of upstream, its inputs, and what must come of them."""

    step: Callable  # takes the tensors of a set, returns those to compare
    sets: list  # inputs; a graph is captured with the first set, and replayed with every set
    expected: list  # the reference's tensors for each set, on the host
    tolerance: float = 0.0  # relative error in the norm that is right for floating-point tensors; integers are equal
    captures: bool = True  # False for what only eager mode can do
    replayed: int = 0  # how many of the last sets are only replayed, since eager mode gives something else for them
    prepare: Callable = lambda *_: ()  # what eager mode does before the call, and before its capture; it takes a set
    settle: Callable = lambda *_: ()  # what eager mode does between a capture and a replay, or after an eager call
    after: Callable = lambda *_: ()  # what eager mode does last; it returns more tensors to compare


def need(module, name, *arguments):
    """Return upstream's function; nothing is judged where this tree has none that takes these arguments."""
    function = getattr(module, name, None)
    if function is None or not takes(function, *arguments):
        pytest.skip(f"this tree has no {name}({', '.join(arguments)})")
    return function


def takes(function, *arguments):
    """Say whether a function has these arguments."""
    return {*arguments} <= inspect.signature(function).parameters.keys()


def fake_group(size, rank=0):
    """Stand for a process group of which only size and rank are read."""
    return types.SimpleNamespace(size=lambda: size, rank=lambda: rank)


def cases(*names):
    """Cover each two values of these factors; any other factor has its first value."""
    usual = {name: values[0] for name, values in FACTORS.items()}
    return [types.SimpleNamespace(**usual | row) for row in pairwise({name: FACTORS[name] for name in names})]


def positions(cu, size, rank, count=0):
    """List a rank's rows of packed sequences, the front and the back piece of each, and then those of no sequence."""
    pieces = [(a, b, (b - a) // (2 * size)) for a, b in itertools.pairwise(cu)]
    rows = [x for a, b, n in pieces for c in (a + rank * n, b - rank * n - n) for x in range(c, c + n)]
    return rows + [cu[-1] + rank * count + x for x in range(count - len(rows))]


def batches(case, *, other_totals=False):
    """List the cumulative lengths of one graph: the same number of sequences, and the same total if it has to be."""
    size = case.cp[0]
    lengths = [2 * size * x for x in case.lengths]
    orders = [lengths, lengths[::-1]]
    orders += [[0] * (len(lengths) - 1) + [sum(lengths)]] if case.table != "one" else []
    orders += [[x // (4 * size) * 2 * size for x in lengths], [0, *lengths[1:]]] if other_totals else []
    return [list(itertools.accumulate(x, initial=0)) for x in orders if any(x)]


def differentiated(function, leaves):
    """Make a step of forward and backward; the last tensor is the gradient of the result."""

    def step(*tensors):
        *tensors, gradient = tensors
        leaf = [x.detach().requires_grad_() for x in tensors[:leaves]]
        result = function(*leaf, *tensors[leaves:])
        return result, *torch.autograd.grad(result, leaf, gradient.to(result.dtype))

    return step


def integers(*rows):
    """Return the reference of integers, which are int64 everywhere."""
    return [torch.tensor(x, dtype=torch.int64) for x in rows]


def cumulative(case, rows):
    """Make the cumulative lengths of packed sequences as upstream gets them."""
    return torch.tensor(rows, dtype=torch.int32 if case.integers == 32 else torch.int64)


def drawn(case, *shape):
    """Draw a tensor of a case's type."""
    return torch.randn(shape, dtype=torch.float32 if case.floats == 32 else torch.bfloat16)


def on_lengths(case, function, lists, rows, **how):
    """Call a function of cumulative lengths, which gives integers."""
    return Call(function, [[cumulative(case, cu)] for cu in lists], [integers(x) for x in rows], **how)


def packed_positions(up):
    """Build the rows of one rank of packed sequences."""
    build = need(up.dsa_layout, "build_packed_allgather_cp_local_positions", "cu_seqlens_cover_output")
    for case in cases("cp", "lengths", "tail", "integers", "table"):
        size, rank = case.cp
        padded, empty = case.tail is not None and size > 1, [0] * (len(case.lengths) + 1)
        lists = batches(case, other_totals=padded)
        count = lists[0][-1] // size + (case.tail or 0)
        options = {"cp_size": size, "cp_rank": rank, "cu_seqlens_cover_output": case.tail is None}
        call = functools.partial(build, device=up.device, **options)
        sized = functools.partial(call, output_size=count)
        # A graph's shape cannot depend on the lengths: there the rows of a batch of empty sequences are padding.
        both = lists + [empty] * padded
        yield on_lengths(case, sized, both, [positions(x, *case.cp, count) for x in both], replayed=int(padded))
        ended = lists + [[*lists[0], 0]] * (size > 1)  # with several ranks, a buffer may have zeros after the sequences
        unsized, rows = functools.partial(call, output_size=None), [positions(x, *case.cp) for x in ended]
        yield on_lengths(case, unsized, ended, rows, captures=False)
        if size > 1:
            yield on_lengths(case, functools.partial(call, output_size=0), [lists[0], empty], [[], []])
        if padded:
            rows = positions(lists[0], *case.cp, count)
            yield on_lengths(case, sized, [empty, lists[0], empty], [[], rows, []], captures=False)
        if padded and up.device.type == "cuda":
            # There nobody looks at the lengths: what fills no two pieces a rank is padding.
            odd = [[a + n * more for n, a in enumerate(lists[0])] for more in (1, 2 * size - 1)]
            yield on_lengths(case, sized, odd, [positions(x, *case.cp, count) for x in odd])


def indexer_layout(up):
    """Build the segments of fused indexers over the local keys of a sequence; key_size says how many there are."""
    build = need(up.dsa_layout, "build_packed_cp_indexer_layout", "local_key_layout")
    for case in cases("cp", "lengths", "integers", "table"):
        size, rank = case.cp
        if size == 1 or len(case.lengths) > 1:
            continue
        for lists, more in itertools.product((batches(case, other_totals=True), [[0, 0]]), (0, 6)):
            keys = lists[0][-1] // size + more
            half, options = keys // 2, {"cp_size": size, "cp_rank": rank, "key_size": keys, "local_key_layout": True}
            sets = [[cumulative(case, x) for x in pair] for pair in zip(lists, lists[::-1], strict=True)]
            # Lengths of queries and keys, their sums, where the keys begin, and all keys.
            q, k, both = [half, half], [half, keys], [[0, half, 2 * half], [0, half, half + keys]]
            expected = integers(q, k, *both, [0, 0], [*range(half), *range(keys)])
            yield Call(functools.partial(build, **options), sets, [expected] * len(sets))


def varlen(up):
    """Bound the keys of every row of packed sequences; the number of rows is data, unless the caller can say it."""
    build = need(up.dsa_masking, "generate_varlen_mask_params")
    for case in cases("lengths", "integers", "table"):
        lists = batches(case)
        options = {"output_size": lists[0][-1]} if takes(build, "output_size") else {}
        sets = [[cumulative(case, cu)] for cu in lists]
        starts = [[a for a, b in itertools.pairwise(cu) for _ in range(a, b)] for cu in lists]
        expected = [integers(x, range(1, len(x) + 1)) for x in starts]
        yield Call(functools.partial(build, **options), sets, expected)
        yield Call(build, sets, expected, captures=False)
        yield Call(build, [[cumulative(case, [0, 0])]], [integers([], [])], captures=False)


def turned(case, rows, t, freqs, real):
    """Turn the first columns of a rank's rows by the angles of their places in the table."""
    t, rest = t[..., :COLUMNS], t[..., COLUMNS:]
    angles = freqs[:, 0, 0].index_select(0, torch.tensor(rows))[:, None]
    t = torch.cat((t[..., 0::2], t[..., 1::2]), -1) if case.rotation == "mla" else t
    if case.rotation == "pairs":
        other = torch.stack((-t[..., 1::2], t[..., 0::2]), -1).flatten(-2)
    else:
        other = torch.cat((-t[..., COLUMNS // 2 :], t[..., : COLUMNS // 2]), -1)
    return torch.cat(((t * angles.cos() + other * angles.sin()) * case.mscale, rest), -1) * real


def rope(up):
    """Turn packed sequences: the table is as long as one sequence, as all of them, or longer than both.

    A graph is also replayed with fewer rows; what the rows beyond give is not compared.
    """
    function = need(up.rope_utils, "apply_rotary_pos_emb", "cp_group", "mscale", "mla_rotary_interleaved")
    declares = takes(function, "max_seqlen")

    def rotated(rotate, t, freqs, cu, real):
        return rotate(t, freqs=freqs, cu_seqlens=cu) * real  # rows of no sequence are not compared

    for case in cases("cp", "lengths", "integers", "table", "rotation", "mscale", "floats", "batch"):
        (size, rank), is_mla = case.cp, case.rotation == "mla"
        lists = batches(case)
        if case.rotation == "pairs":  # in eager mode 0.19.2 cannot turn pairs of a sequence without rows
            case.lengths = tuple(max(1, x) for x in case.lengths)
            lists = [x for x in batches(case) if sorted({*x}) == x]
        longest, total = max(b - a for cu in lists for a, b in itertools.pairwise(cu)), lists[0][-1]
        table = {"one": longest, "all": total, "long": total + 5}[case.table]
        options = {"cp_group": fake_group(size, rank), "mscale": case.mscale}
        # A table that is longer than declared holds the places of the whole batch.
        options |= {"max_seqlen": table if table != total else table - 1} if declares else {}
        interleaved = {"rotary_interleaved": case.rotation == "pairs"}
        config = types.SimpleNamespace(apply_rope_fusion=False, mrope_section=None, **interleaved)
        apply = functools.partial(function, config=config, mla_rotary_interleaved=is_mla, **options)
        # The deprecated keyword counts, where it is given.
        options |= interleaved | {"mla_rotary_interleaved": not is_mla, "multi_latent_attention": is_mla}
        older = functools.partial(need(up.rope_utils, "_apply_rotary_pos_emb_thd"), **options)
        fewer = [[min(x, total - 2 * size) for x in lists[0]]] if table == total else []
        # Behind one sequence that fills the table, rows come that the table has no place for.
        fewer += [[0] * len(case.lengths) + [longest]] if longest < total else []
        shape, sets, expected = (total // size, case.batch, 10), [], []
        for cu in lists + fewer:
            freqs, t, gradient = torch.randn(table, 1, 1, COLUMNS), drawn(case, *shape), drawn(case, *shape)
            real = (torch.arange(len(t)) < cu[-1] // size)[:, None, None].to(t.dtype)
            starts = {x: a for a, b in itertools.pairwise(cu) for x in range(a, b)}
            # Where no length is declared, eager mode takes a table for that of all where it is as long as they are.
            is_whole = table == (total if declares else cu[-1])
            rows = [x if is_whole else x - starts[x] for x in positions(cu, *case.cp)]
            rows += [0] * (len(t) - len(rows))
            sets.append([t, freqs, cumulative(case, cu), real, gradient])
            reference = differentiated(functools.partial(turned, case, rows), 1)
            expected.append(reference(*(x.double() for x in (t, freqs, real, gradient))))
        for rotate in (apply, older) if case.batch == 3 else (apply,):
            step = differentiated(functools.partial(rotated, rotate), 1)
            yield Call(step, sets, expected, TOLERANCES[case.floats], replayed=len(fewer))


def kullback_leibler(case, valid, q, weights, k, query, key):
    """Compute the indexer's loss in float64; every head of every rank is there."""
    seen = torch.arange(SK) <= torch.arange(SQ)[:, None]
    scores = torch.einsum("sbhd,tbd->sbht", q, k).relu()
    scores = (scores * weights[..., None]).sum(2).transpose(0, 1)
    attention = torch.einsum("sbnd,tbnd->bnst", query, key).mul(0.5).where(seen, -math.inf).softmax(-1).sum(1)
    target = (attention / attention.sum(-1, keepdim=True)).detach()
    predicted = scores.where(seen, -math.inf).log_softmax(-1).where(seen, 0)
    loss = (target * (target.clamp_min(1e-10).log() - predicted)).sum(-1)
    count = 1 if case.rows == "sum" else valid.sum().clamp_min(1)
    return (loss * valid).sum() / count * 0.7


def indexer_loss(up):
    """Call the indexer's loss with its backward; heads of the attention may lie on several ranks."""
    size, first = up.group.size(), 2 * up.group.rank()
    fewer = cases("batch", "floats", "rows", "sparse")[: None if size == 1 else 8]
    # bfloat16 counts these 1060 rows as 1056; that is less than its rounding of one element, more than that of a norm.
    many = [vars(fewer[0]) | {"batch": MANY, "floats": 16, "rows": rows} for rows in ("mean", "all")]
    for case in fewer + [types.SimpleNamespace(**x) for x in many]:
        shapes = (SQ, case.batch, 3, 5), (SQ, case.batch, 3), (SK, case.batch, 5)
        both = [(rows, case.batch, 2 * size, 3) for rows in (SQ, SK)]
        sets, expected = [], []
        for _ in range(2):
            some, gradient = torch.rand(case.batch, SQ) < 0.5, torch.randn(())
            kinds = {"all": some[:1] | True, "half": some[0], "each": some, "none": some[0] & False}
            valid_rows = [kinds[case.rows]] if case.rows in kinds else []
            whole = [drawn(case, *shape) for shape in (*shapes, *both)]
            sets.append([*whole[:3], *(x[:, :, first : first + 2] for x in whole[3:]), *valid_rows, gradient])
            valid = valid_rows[0].expand(case.batch, SQ).double() if valid_rows else torch.ones(case.batch, SQ)
            reference = differentiated(functools.partial(kullback_leibler, case, valid), 3)
            expected.append(measured(case, reference)(*(x.double() for x in (*whole, gradient))))
        step = differentiated(functools.partial(loss_of, up, case), 3)
        tolerance = 2**-10 if case.batch == MANY else TOLERANCES[case.floats]
        yield Call(measured(case, step), sets, expected, tolerance)


def loss_of(up, case, q, weights, k, query, key, valid=None):
    """Call upstream's loss, whose arguments have an order and no names; a sparse one has all keys."""
    parts, topk = types.SimpleNamespace(tp=up.group), SK if case.sparse else 6
    options = 0.5, topk, 0.7, None, bool(case.sparse), parts, None, None, None, valid, case.rows == "sum"
    return up.dsa.FusedDSAIndexerLoss.apply(q, weights, k, query, key, *options)[1]


def measured(case, step):
    """Give results as they are; of many rows the gradients' norms [], in which the elements' roundings cancel."""

    def norms(*tensors):
        loss, *gradients = step(*tensors)
        return loss, *(x.double().norm() if case.batch == MANY else x for x in gradients)

    return norms


def scaled(up, output, loss, gradient, *_):
    """Attach a loss to an output, and go backward through both."""
    leaf = [x.detach().requires_grad_() for x in (output, loss)]
    result = up.dsa.DSAIndexerLossAutoScaler.apply(*leaf)
    return result, *torch.autograd.grad(result, leaf, gradient)


def reset(up, *tensors):
    """Forget the scale of the indexer's loss, and set one that is given."""
    up.dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    renew(up, torch.clone, *tensors)


def renew(up, cast, *tensors):
    """Set the scale of the indexer's loss, if one is given, in another type or place."""
    for scale in tensors[3:]:
        up.dsa.DSAIndexerLossAutoScaler.set_loss_scale(cast(scale.clone()))


def loss_scale(up, *, first):
    """Scale the loss's gradient by what was set; set it after the capture, too. Unset it is 1, also in each replay.

    It is copied into the one that was set before, also from the host, from another type, or as a number into a [1].
    """
    casts = (torch.clone, torch.Tensor.double, torch.Tensor.bfloat16, lambda x: x.reshape(()), lambda x: x.cpu())
    for case, cast in itertools.product(cases("loss", "scale", "floats"), casts):
        sets, expected = [], []
        for scale in (0.375, 5.0):  # exact in bfloat16
            output, gradient = (drawn(case, 7, case.batch) for _ in "ab")
            loss = drawn(case, *([case.loss] if case.loss else []))
            sets.append([output, loss, gradient, torch.full((1,) if case.scale and not first else (), scale)])
            scales = (1 if first else scale, scale)
            expected.append([y for x in scales for y in (output, gradient, torch.full_like(loss, x))])
        hooks = {"settle": functools.partial(renew, up, cast), "after": functools.partial(scaled, up)}
        hooks["prepare"] = (lambda *_: reset(up)) if first else functools.partial(reset, up)
        yield Call(functools.partial(scaled, up), sets, expected, TOLERANCES[case.floats], **hooks)
    inputs = [torch.randn(7, 2), torch.randn(()), torch.randn(7, 2), *([] if first else [torch.tensor(2.0)])]
    freed = [inputs[0], inputs[2], torch.tensor(1.0 if first else 2.0), torch.tensor([0])]
    yield Call(functools.partial(let_go, up), [inputs], [freed], TOLERANCES[32], captures=False)


def let_go(up, output, loss, gradient, *scale):
    """Go backward through a loss that nothing else holds; tell whether it is still there, though its graph is."""
    reset(up, output, loss, gradient, *scale)
    leaf = [x.detach().requires_grad_() for x in (output, loss)]
    attached = leaf[1] * 1  # a leaf would be held by the graph itself
    memory = weak_storages([attached])
    result = up.dsa.DSAIndexerLossAutoScaler.apply(leaf[0], attached)
    del attached
    gradients = torch.autograd.grad(result, leaf, gradient)
    return result, *gradients, torch.full((1,), kept_alive(memory, seconds=3), device=up.device)


def sparse_kernel(q, kv, out, d_out, lse, sink, indices, *, softmax_scale, topk_length):
    """Stand for cuDNN's backward of sparse attention: its formula, and not-a-number where a row has no key."""
    contiguous = all(x.is_contiguous() for x in (q, out, d_out, lse, indices, topk_length))
    if not contiguous or sink.shape != (64,):
        raise RuntimeError("cuDNN takes contiguous rows and a sink of each of the 64 heads to which FlashMLA pads")
    chosen, slots = kv[indices.long()], torch.arange(indices.size(1), device=q.device)
    lse = torch.logaddexp(lse, sink)  # a sink is one more score of each row, without a value
    p = (softmax_scale * torch.einsum("nhd,nkd->nhk", q, chosen) - lse[..., None]).exp()
    p = torch.where(slots < topk_length[:, None, None], p, 0)
    d_p = torch.einsum("nhv,nkv->nhk", d_out, chosen[..., :8]) - (d_out * out).sum(-1, keepdim=True)
    d_s = p * d_p * softmax_scale
    d_values = torch.nn.functional.pad(torch.einsum("nhk,nhv->nkv", p, d_out), (0, kv.size(-1) - 8))
    d_keys = torch.einsum("nhk,nhd->nkd", d_s, q) + d_values
    empty = torch.where(topk_length > 0, 0.0, math.nan)[:, None, None]
    d_kv = torch.zeros_like(kv).index_add(0, indices.long().flatten(), (d_keys + empty).flatten(0, 1))
    return {"dq": torch.einsum("nhk,nkd->nhd", d_s, chosen) + empty, "dkv": d_kv}


def sparse_forward(q, kv, sink, indices, length, scale):
    """Attend to the keys of each row in the precision of q: output [n, h, 8], and their log-sum-exp [n, h]."""
    slots = torch.arange(indices.size(1)) < length[:, None, None]
    chosen = kv[indices.long()]
    scores = scale * torch.einsum("nhd,nkd->nhk", q, chosen)
    scores = scores.where(slots, -math.inf)
    sinks = sink[:, None].expand(*scores.shape[:2], 1)
    p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return torch.einsum("nhk,nkv->nhv", p, chosen[..., :8]), scores.logsumexp(-1)


def cudnn_backward(up):
    """Call the backward around cuDNN's kernel, where rows may have no keys."""
    run, scale = need(up.dsa_cudnn_kernels, "_run_sparse_attention_backward", "all_rows_nonempty"), 0.4
    names = ("q_flat", "kv_flat", "out_flat", "grad_output", "lse", "attn_sink", "global_idxs", "topk_length")
    vars(up.dsa_cudnn_kernels)["_cudnn_dsa"] = types.SimpleNamespace(sparse_attention_backward_wrapper=sparse_kernel)
    for case in cases("batch", "attention_heads", "filled"):
        n, heads, width = SQ * case.batch, case.attention_heads, 12
        options = {"softmax_scale": scale, "sq": SQ, "b": case.batch, "num_heads": heads, "d": width, "skv": SK}
        options |= {"all_rows_nonempty": True} if case.filled == "told" else {}
        sets, expected = [], []
        for some in (torch.arange(n) % 7, (torch.arange(n) + 3) % 5 * 6 // 4):
            length = {"some": some, "none": some * 0}.get(case.filled, some % 6 + 1).int()
            keys = torch.rand(n, SK * case.batch).argsort()[:, :6].masked_fill(torch.arange(6) >= length[:, None], 0)
            q, kv = torch.randn(n, heads, width), torch.randn(SK * case.batch, width)
            sink, gradient = torch.linspace(-1, 1, heads), torch.randn(SQ, case.batch, heads * 8)
            leaf = [x.double().requires_grad_() for x in (q, kv)]
            out, lse = sparse_forward(*leaf, sink.double(), keys, length, scale)
            d_q, d_kv = torch.autograd.grad(out, leaf, gradient.double().reshape(out.shape))
            sets.append([q, kv, out.detach().float(), gradient, lse.detach().float(), sink, keys.int(), length])
            expected.append([d_q.reshape(SQ, case.batch, heads, width), d_kv.reshape(SK, case.batch, width)])
        yield Call(functools.partial(by_name, run, names, options), sets, expected, TOLERANCES[32])


def by_name(function, names, options, *tensors):
    """Call a function that takes its tensors by name."""
    return function(**options | dict(zip(names, tensors, strict=True)))


def attention(up, *, packed):
    """Call the whole DSAttention with its indexer and loss; the references are single sequences on a single rank."""

    class Linear(torch.nn.Linear):  # Transformer Engine's, which specs name here
        def __init__(self, size_in, size_out, **_):
            super().__init__(size_in, size_out, bias=False, device=up.device)

        def forward(self, x):
            return super().forward(x), None

    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 2, "q_lora_rank": 16, "kv_lora_rank": 16}
    sizes |= {"qk_head_dim": 8, "qk_pos_emb_head_dim": 8, "v_head_dim": 8, "rope_type": "rope"}
    indexer = {"n_heads": 2, "head_dim": 16, "topk": 6, "loss_coeff": 0.1}
    indexer |= {"rotate_activation": False, "scoring_relu": False}
    sizes |= {"add_bias_linear": False} | {f"dsa_indexer_{name}": value for name, value in indexer.items()}
    parts = up.dsa.DSAIndexerSubmodules(Linear, Linear, torch.nn.Identity, Linear)
    spec = up.dsa.DSAttentionSubmodules(up.dsa.ModuleSpec(module=up.dsa.DSAIndexer, submodules=parts))
    kind = up.dsa.AttnMaskType.causal

    def build(group):
        torch.manual_seed(2)
        config = up.config.MLATransformerConfig(**sizes, context_parallel_size=group.size())
        groups = types.SimpleNamespace(tp=fake_group(1), cp=group)
        options = {"k_channels": 16, "cp_comm_type": "allgather", "pg_collection": groups}
        core = up.dsa.DSAttention(config, spec, 1, kind, "self", **options)
        parameters = [*core.parameters()]

        def step(query, key, value, gradient, x, qr, *cu):
            params = up.dsa.PackedSeqParams("thd", *cu, *cu, max_seqlen_q=S, max_seqlen_kv=S) if cu else None
            leaf = [x.detach().requires_grad_() for x in (query, key, value)]
            out = core(*leaf, None, x, qr, attn_mask_type=kind, packed_seq_params=params)
            gradients = torch.autograd.grad(out, [*leaf, *parameters], gradient.reshape(out.shape))
            means = [x / group.size() for x in gradients[3:]]  # the loss is a mean over a rank's rows
            if group.size() > 1:
                _ = [torch.distributed.all_reduce(x, group=group) for x in means]
            return out, *gradients[:3], *means

        return step

    def reference(cu, local, *whole):
        pieces = [(a, b) for a, b in itertools.pairwise(cu) if a < b]
        alone = [on_host(build(fake_group(1))(*put(up, [x[a:b] for x in whole]))) for a, b in pieces]
        shares, alone = [(b - a) / S for a, b in pieces], list(zip(*alone, strict=True))
        trained = [sum(n * y for n, y in zip(shares, x, strict=True)) for x in alone[4:]]
        return [torch.cat(x).index_select(0, local) for x in alone[:4]] + trained

    sets, expected = [], []
    lists = [0, 8, 8, 24, 32], [0, 16, 20, 20, 32], [0, 0, 0, 0, 32]
    for cu in lists if packed else ([0, S], [0, S]):
        whole = [torch.randn(S, 1, *shape) for shape in ((2, 16), (2, 16), (2, 8), (16,), (32,), (16,))]
        local = torch.tensor(positions(cu, up.group.size(), up.group.rank()))
        expected.append(reference(cu, local, *whole))
        sets.append([x.index_select(0, local) for x in whole] + [torch.tensor(cu, dtype=torch.int32)] * packed)
    yield Call(build(up.group), sets, expected, TOLERANCES[32])


def beside(function, rows, **options):
    """Call what takes no tensor, beside a tensor that a replay has to change."""
    ends = torch.arange(1, S + 1)

    def step(x):
        return *(function(**options) or ()), x + 1

    return Call(step, [[ends], [-ends]], [[*integers(*rows), x + 1] for x in (ends, -ends)])


def equal_lengths(up):
    """Compare the lengths of the ranks, for the right key lengths; wrong ones are refused."""
    check, n = need(up.dsa, "_validate_nonpacked_cp_uniform_length"), up.group.size()
    check = functools.partial(check, device=up.device)
    for sq, skv, size in ((16, 16 * n, n), (13, 13, n), (7, 21, 3)):
        yield beside(check, (), sq=sq, skv=skv, cp_size=size, cp_group=up.group)
    yield beside(check, (), sq=5, skv=10, cp_size=2, cp_group=None)


def uneven(up):
    """List the rows of a rank; it has as many as it likes, after those of the ranks before it."""
    function, n, rank = need(up.dsa_layout, "get_cp_positions_from_layout"), up.group.size(), up.group.rank()
    place = functools.partial(function, cp_comm_type="all_gather", device=up.device)
    # In the third, every rank has a length that it had before, in a batch as long, but begins elsewhere.
    for lengths in ((8, 16, 2, 5)[:n], (2, 5, 8, 16)[:n], (8, 5, 2, 16)[:n], (1, 10, 6, 10)[:n], (0, 8, 0, 5)[:n]):
        sq, skv = lengths[rank], sum(lengths)
        for size, group in ((n, up.group), (n, None), (n + 1, up.group)):
            start = sum(lengths[:rank]) if size == n and group else rank * sq
            keys = skv + (sq * size == skv)
            rows = range(start, start + sq), range(keys)
            yield beside(place, rows, sq=sq, skv=keys, cp_size=size, cp_rank=rank, cp_group=group)
    for pair in up.pairs:
        # No rank has such a length elsewhere: one that remembers lengths would let the others wait for ever.
        length, mine = 20 + sum(torch.distributed.get_process_group_ranks(pair)), pair.rank()
        sizes = (length, length + 10)
        rows = range(length * mine, length * mine + sizes[mine]), range(sum(sizes))
        yield beside(place, rows, sq=sizes[mine], skv=sum(sizes), cp_size=2, cp_rank=mine, cp_group=pair)
    zigzag = {"sq": 6, "cp_rank": rank, "cp_group": up.group}
    yield beside(place, (positions([0, 6 * n], n, rank), range(6 * n)), **zigzag, skv=6 * n, cp_size=n)
    yield beside(place, (range(6), range(9)), **zigzag, skv=9, cp_size=1)


SITES = {  # the call that the public report is about comes first; the names tell how many ranks there are
    "indexer_loss": indexer_loss,
    "loss_scale-given": functools.partial(loss_scale, first=False),
    "loss_scale-first": functools.partial(loss_scale, first=True),
    "cudnn_backward": cudnn_backward,
    "packed_positions": packed_positions,
    "indexer_layout": indexer_layout,
    "varlen-whole": varlen,
    "rope": rope,
    "attention-plain": functools.partial(attention, packed=False),
    "attention-packed": functools.partial(attention, packed=True),
    "two_ranks-equal_lengths": equal_lengths,
    "two_ranks-uneven": uneven,
    "four_ranks-uneven": uneven,
}
SITES |= {f"two_ranks-{name}": SITES[name] for name in ("indexer_loss", "attention-plain", "attention-packed")}
HOST = ("packed_positions", "indexer_layout", "varlen-whole")  # these need no GPU
RANKS = {name: {"two_ranks": 2, "four_ranks": 4}.get(name.partition("-")[0], 1) for name in SITES}


def refused_positions(up):
    """Give lengths that two ranks cannot share, and sizes that are not those of the rows.

    The lengths are on the host: on a GPU repeat_interleave ends the process where a size is not their sum. The message
    about a length has to name it. Two, the number of ranks, is none of them: it may be named by chance.
    """
    build = need(up.dsa_layout, "build_packed_allgather_cp_local_positions", "cu_seqlens_cover_output")
    build = functools.partial(build, device=torch.device("cpu"), cp_size=2, cp_rank=1)
    # One wrong length; then two whose sum is right, alone, behind a right one and before one.
    for cu in ([0, 6], [0, 7], [0, 6, 16], [0, 7, 16], [0, 8, 14, 24], [0, 8, 15, 24], [0, 6, 16, 24], [0, 7, 16, 24]):
        bad = "|".join(str(b - a) for a, b in itertools.pairwise(cu) if (b - a) % 4)
        yield ValueError, rf"\b({bad})\b", False, functools.partial(build, torch.tensor(cu, dtype=torch.int32))
    right = torch.tensor([0, 0, 8], dtype=torch.int32)  # 4 rows a rank
    for (size, cover), captured in itertools.product(((3, False), (3, True), (5, True)), (False, True)):
        options = {"output_size": size, "cu_seqlens_cover_output": cover}
        yield RuntimeError, "", captured, functools.partial(build, right, **options)


def refused_losses(up):
    """Go backward as has to fail where the indexer's loss is saved as autograd saves tensors."""

    def refuse(x):
        if not isinstance(x, torch.Tensor) or x.dim() == 0:  # the loss; the output has rows
            raise RuntimeError(HOOKED)
        return x

    def backward(times, pack, unpack):
        leaf = [x.requires_grad_() for x in put(up, [torch.ones(7, 2), torch.ones(())])]
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            result = up.dsa.DSAIndexerLossAutoScaler.apply(*leaf)
            for _ in range(times):
                torch.autograd.grad(result, leaf, result.detach())

    yield RuntimeError, "second time", False, lambda: backward(2, lambda x: x, lambda x: x)
    yield RuntimeError, HOOKED, False, lambda: backward(1, refuse, lambda x: x)
    yield RuntimeError, HOOKED, False, lambda: backward(1, lambda x: x, refuse)


def refused_rows(up):
    """Give rows that are in no sequence, and a table that ends before the sequence; max_seqlen lets upstream pad."""
    config = types.SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, mrope_section=None)
    function = need(up.rope_utils, "apply_rotary_pos_emb", "cp_group")
    cu = put(up, [torch.tensor([0, 8], dtype=torch.int32)])[0]
    for rows, table in ((9, 8), (8, 5)) if not takes(function, "max_seqlen") else ():
        t, freqs = put(up, [torch.ones(rows, 1, 4), torch.ones(table, 1, 1, 4)])
        call = functools.partial(function, t, freqs, config, cu_seqlens=cu, cp_group=fake_group(1))
        yield (AssertionError, RuntimeError, ValueError), "", False, call


def refused_lengths(up):
    """Give key lengths that fit no layout, and lengths in which the ranks differ, also where they once agreed."""
    check, n, odd = need(up.dsa, "_validate_nonpacked_cp_uniform_length"), up.group.size(), up.group.rank() % 2
    check = functools.partial(check, device=up.device)
    for group, captured in itertools.product((None, up.group), (False, True)):
        options = {"sq": 16, "skv": 16 * n + 1, "cp_size": n, "cp_group": group}
        yield RuntimeError, "", captured, functools.partial(check, **options)
    options = {"cp_size": n, "cp_group": up.group}
    yield RuntimeError, "", False, functools.partial(check, sq=16 + odd, skv=16 * n, **options)

    def seen_before():
        for length in (18, 19, 18 + odd):  # no other call has these, so that no rank waits for one that remembers them
            check(sq=length, skv=length * n, **options)

    yield RuntimeError, "", False, seen_before


REFUSED = {
    "packed_positions": refused_positions,
    "loss_scale-given": refused_losses,
    "rope": refused_rows,
    "two_ranks-equal_lengths": refused_lengths,
}


@contextlib.contextmanager
def capture():
    """Capture a graph on a GPU; give what replays it."""
    graph = torch.cuda.CUDAGraph()
    # NCCL has a thread of its own, and Megatron captures so too.
    mode = "thread_local" if torch.distributed.get_world_size() > 1 else "global"
    with torch.cuda.graph(graph, capture_error_mode=mode):
        yield graph.replay


GPU = types.SimpleNamespace(capture=capture, events=())  # a capture stops by itself, so that nothing is noted
quietly = contextlib.nullcontext if TARGET.executed else unseen  # around the contract's own operators


def load():
    """Import upstream; of what an older tree lacks there is an empty module."""
    up = types.SimpleNamespace(config=importlib.import_module("megatron.core.transformer.transformer_config"))
    for name in MODULES:
        optional = "cudnn" in name and not importlib.util.find_spec(name)
        setattr(up, name.split(".")[-1], types.SimpleNamespace() if optional else importlib.import_module(name))
    return up


def begin(rank):
    """Set one rank up; tensors go to `up.device`."""
    up = load()
    up.device, up.pairs = torch.device(rank.device), []
    up.group = torch.distributed.group.WORLD if rank.count > 1 else fake_group(1)
    if rank.count == 4:  # groups of neighbours and of every second rank: no formula of the rank in all fits both
        made = [(x, torch.distributed.new_group(x)) for x in ([0, 1], [2, 3], [0, 2], [1, 3])]
        up.pairs = [pair for members, pair in made if rank.number in members]
    return up


def put(up, tensors):
    """Copy tensors to the device."""
    return [x.to(up.device, copy=True) for x in tensors]


def tensors_of(result):
    """List the tensors that a call gave."""
    result = [*vars(result).values()] if hasattr(result, "__dataclass_fields__") else result
    result = result if isinstance(result, (tuple, list)) else [result]
    return [x for x in result if hasattr(x, "detach")]


def on_host(result):
    """Return copies, on the host, of the tensors that a call gave."""
    return [x.detach().cpu().clone() for x in tensors_of(result)]


def overwrite(result, inputs):
    """Invert the integers that a call gave, which are its caller's now: no other call may give them again."""
    kept = {x.untyped_storage().data_ptr() for x in inputs}
    for x in tensors_of(result):
        own = not x.is_floating_point() and x.untyped_storage().data_ptr() not in kept
        if own and 0 not in x.stride():
            x.bitwise_not_()


def complaints(results, expected, tolerance, left, inputs):
    """Say which results are not the reference's, and whether the call wrote into its inputs."""
    if len(results) != len(expected):
        return [f"{len(results)} results, not {len(expected)}"]
    wrong = [] if all(map(torch.equal, left, inputs)) else ["an input is written"]
    for number, (x, y) in enumerate(zip(results, expected, strict=True)):
        if x.shape != y.shape or not (x.is_floating_point() and y.is_floating_point()):
            error = 0.0 if x.dtype == y.dtype and torch.equal(x, y) else math.inf
        else:
            error = relative_error(x, y)
        wrong += [] if error <= tolerance else [f"result {number} has the error {error:.2g}, right is {tolerance:.2g}"]
    return wrong


@contextlib.contextmanager
def upstream_answers(*kinds):
    """Take for upstream's fault, though its frames do not show it, these exceptions and what a launch tells later."""
    try:
        yield
    except (IndexError, RuntimeError, TypeError) as error:
        is_upstreams = isinstance(error, kinds) or "device-side assert" in str(error)
        if isinstance(error, HOST_FAULTS) or "out of memory" in str(error) or not is_upstreams:
            raise
        raise AssertionError(f"{type(error).__name__}: {error}".splitlines()[0]) from error


@contextlib.contextmanager
def lines_that_wait(gpu):
    """Collect the lines of upstream at which the host waits."""
    before = len(gpu.events)
    with host_waits("cuda", "megatron") if TARGET.executed else contextlib.nullcontext([]) as lines:
        yield lines
    lines += gpu.events[before:]


def eagerly(up, gpu, call, answer):
    """Make a call with every set; add what is wrong and where it waits, and return its results."""
    results = []
    for number, tensors in enumerate(call.sets[: len(call.sets) - call.replayed]):
        inputs = put(up, tensors)
        call.prepare(*inputs)
        # A TypeError is that of a function that no longer takes the release's arguments.
        with upstream_answers(TypeError), lines_that_wait(gpu) as lines:
            result = call.step(*inputs)
        call.settle(*inputs)
        rest = call.after(*inputs)
        if number and call.captures:  # what only a first call does is no part of a graph
            answer["waits"] |= {*lines}
        with quietly(), upstream_answers():
            results.append(on_host(result) + on_host(rest))
            answer["wrong"] += complaints(results[-1], call.expected[number], call.tolerance, on_host(inputs), tensors)
            overwrite(result, inputs)
    return results


def captured(up, gpu, call):
    """Make a call under capture, and replay it with every set; return where that stops, and what is wrong."""
    static = put(up, call.sets[0])
    call.prepare(*static)
    before, wrong = len(gpu.events), []
    try:
        with gpu.capture() as replay:
            result = call.step(*static)
    except Exception as error:
        if isinstance(error, HOST_FAULTS) or "out of memory" in str(error):
            raise
        traceback.print_exc()
        return [f"the capture stops: {type(error).__name__}: {error}".splitlines()[0]]
    if lines := sorted({*gpu.events[before:]}):
        return [f"the capture stops at {line}" for line in lines]
    for number, tensors in enumerate(call.sets):
        _ = [old.copy_(new) for old, new in zip(static, tensors, strict=True)]
        call.settle(*static)
        with upstream_answers(IndexError, RuntimeError):
            replay()
        with upstream_answers():
            rest = call.after(*static)
            with quietly():
                results = on_host(result) + on_host(rest)
                told = complaints(results, call.expected[number], call.tolerance, on_host(static), tensors)
                wrong += [f"replay: {x}" for x in told]
    return wrong


def refused(up, site):
    """Make the calls with wrong input; return what is wrong with what each raises."""
    wrong = []
    for kinds, text, capturing, call in REFUSED[site](up) if site in REFUSED else ():
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=capturing):
            try:
                with pytest.raises(kinds, match=text):
                    call()
            except (AssertionError, pytest.fail.Exception) as error:
                wrong.append(f"capturing={capturing}: {error}".splitlines()[0])
    return wrong


def observe(up, site):
    """Answer for one rank of one site: what is wrong in eager mode, with tensors on the host, and with a capture."""
    answer, host = ({"wrong": [], "waits": set(), "captured": []} for _ in range(2))
    torch.manual_seed(1)
    up.dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    if site in HOST:
        here = types.SimpleNamespace(**vars(up) | {"device": torch.device("cpu")})
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            _ = [eagerly(here, GPU, call, host) for call in SITES[site](here)]
    with contextlib.nullcontext(GPU) if TARGET.executed else pretended_gpu("megatron") as gpu:
        up.device = getattr(gpu, "device", up.device)
        answer |= {"refused": refused(up, site), "host": host["wrong"]}
        calls = [*SITES[site](up)]
        results = [eagerly(up, gpu, call, answer) for call in calls]
        for call in calls:
            if call.captures and not (answer["captured"] and TARGET.executed):  # the CUDA context is broken then
                answer["captured"] += captured(up, gpu, call)
    texts = [(str(x.dtype), x.tolist()) for sets in results for tensors in sets for x in tensors]
    return answer | {"sha256": hashlib.sha256(repr(texts).encode()).hexdigest()}


def in_a_group(site):
    """Let the ranks of one site answer; on a GPU no other site has used their context."""
    if TARGET.executed and torch.cuda.device_count() < RANKS[site]:
        pytest.skip(f"needs {RANKS[site]} GPUs")
    with ranks(RANKS[site], begin, device=TARGET.device, seconds=200) as group:
        return group.run(observe, site)


@pytest.fixture(scope="module")
def answers(request, figure):
    """Ask the sites that the selected tests need; give what the ranks of a site answer."""
    load()  # before ranks are forked
    sites = dict.fromkeys(item.callspec.params["site"] for item in request.session.items)
    # On GPUs, three groups of two ranks at a time, beside those of one rank.
    pools = [concurrent.futures.ThreadPoolExecutor(n) for n in (3, processes())]
    with pools[0], pools[1]:
        asked = {x: pools[RANKS[x] == 1].submit(in_a_group, x) for x in sites if TARGET.executed}

        def ask(site):
            # On the CPU this thread forks the ranks: some that another thread forked beside it hung in a lock of libc.
            if site not in asked:
                asked[site] = concurrent.futures.Future()
                try:
                    asked[site].set_result(in_a_group(site))
                except (Exception, pytest.skip.Exception) as error:
                    asked[site].set_exception(error)
            return asked[site].result()

        yield ask
        for x in asked.values():
            x.cancel()  # -x leaves some that wait
    judged = [x.result() for x in asked.values() if not (x.cancelled() or x.exception())]
    stopped = [x for x in judged if any(y["captured"] for y in x)]
    figure("lines_that_stop_a_capture", len({line for x in stopped for y in x for line in y["waits"]}), "lines")
    figure("calls_that_stop_a_capture", len(stopped), "calls")
    figure("calls_judged", len(judged), "calls")


def assert_nothing_wrong(rank_answers, name):
    """Fail with what each rank says is wrong."""
    wrong = [f"rank {rank}: {text}" for rank, x in enumerate(rank_answers) for text in dict.fromkeys(x[name])]
    assert not wrong, "; ".join(wrong)


@pytest.mark.control
@pytest.mark.parametrize("site", SITES)
def test_eager_mode_is_right(answers, output, figure, site):
    rank_answers = answers(site)
    exact = not TARGET.executed or not {"attention", "cudnn_backward"} & {*site.split("-")}  # these add by atomics
    digest = hashlib.sha256("".join(x["sha256"] for x in rank_answers).encode()).digest()
    output(site, torch.frombuffer(bytearray(digest), dtype=torch.uint8), must_match=exact)
    figure(f"waits.{site}", sorted({y for x in rank_answers for y in x["waits"]}), "lines that wait in eager mode")
    assert_nothing_wrong(rank_answers, "wrong")


@pytest.mark.control
@pytest.mark.parametrize("site", REFUSED)
def test_wrong_input_is_refused(answers, site):
    assert_nothing_wrong(answers(site), "refused")


@pytest.mark.control
@pytest.mark.parametrize("site", HOST)
def test_tensors_on_the_host_are_right(answers, site):
    assert_nothing_wrong(answers(site), "host")


@pytest.mark.defect
@pytest.mark.parametrize("site", SITES)
def test_every_call_is_captured_and_replayed_with_other_values(answers, site):
    assert_nothing_wrong(answers(site), "captured")
