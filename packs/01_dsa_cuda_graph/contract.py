"""A CUDA graph captures DSA's forward and backward: nothing makes the host wait for the GPU.

Each site below is a function of megatron.core's DSA, of RoPE for it, or of the Python around the fused kernels. It is
called in eager mode, and captured and replayed with other values in the same memory. Both are compared on every rank
with a reference in float64 or integers. No call or replay may write into its inputs. Wrong input is refused by the
exception that is due, and what needs no GPU is right with tensors on the host.

    site                                       what varies
    indexer_loss (FusedDSAIndexerLoss)         batch, heads, floats, strides, causal, additive, [start, end) masks, keys
                                               in another order, real rows, mean or sum, sparse, relu, frozen inputs,
                                               gradient of the loss; heads of the attention on two ranks; more rows than
                                               bfloat16 can count
    loss_scale (DSAIndexerLossAutoScaler)      unset, set, set again, set after a capture, then also in another type or
                                               shape or from the host; saved as autograd saves: hooks see the loss, one
                                               backward lets it go, a second is refused
    cudnn_backward                             rows with, without and promised to have keys; batch, padded heads, floats
    packed_positions, packed_reorder,          1 to 4 ranks, empty sequences, padded tails, int32 and int64, queries and
    indexer_layout, varlen                     keys of other lengths, with and without the size that the caller knows,
                                               batches of empty sequences, no rows, sizes and lengths that are refused
    equal_lengths, uneven                      uneven, empty and even ranks, two and four of them, with and without
                                               their group, two of four; lengths that are refused, or no more equal
    rope (on packed sequences)                 table of one sequence, of all, or longer; halves, pairs, MLA's order;
                                               mscale, columns, ranks, floats, strides; fewer rows, also where the table
                                               ends before the others; the deprecated keyword
    attention (DSAttention)                    forward and backward, plain and packed, one and two ranks
    reported                                   the sites of the public report; the bounds of an additive mask, on which
                                               releases do not agree, are compared between eager mode and replay alone

A function that the tree lacks, or that needs more GPUs than there are, is not judged. Cumulative lengths that step back
are no batch that DSA takes. For cuDNN's backward its formula stands, which gives not-a-number for a row without keys;
for Transformer Engine's linear layer a linear layer. The reference of DSAttention is DSAttention on one rank and one
sequence at a time. On the CPU tensors say that they are on a GPU (kit.pretended_gpu), and ranks talk through gloo; on
GPUs it is torch.cuda.graph and NCCL.

Tolerances, relative in the norm. float32: 1e-5, for sums of 64 terms at most, in another order (64 * 2**-24), and room
for a softmax. bfloat16: three roundings, 3 * 2**-8. Integers are equal.
"""
# ruff: noqa: PLR0917 - what a reference depends on

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import functools
import hashlib
import importlib
import importlib.util
import inspect
import itertools
import re
import sys
import time
import traceback
import types
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
from kit import current_target, pairwise, processes
from kit.capture import graph_capture, host_waits
from kit.pretended_gpu import plainly, pretended_gpu
from kit.ranks import Rank, ranks

TARGET = current_target()
EVIDENCE_WITHOUT_GPU = {"cpu": "traced"}
torch.set_num_threads(1)  # what runs on the CPU is small, and other lanes want the other cores
VARIANT = "megatron.core.transformer.experimental_attention_variant"
MODULES = [f"{VARIANT}.dsa{part}" for part in ("_layout", "_masking", "_cudnn_kernels", "")]
MODULES += ["megatron.core.models.common.embeddings.rope_utils"]
# Lengths are in units of 2 * ranks rows; a tail is rows that belong to no sequence, None is a caller who rules it out.
FACTORS = {
    "cp": ((1, 0), (2, 0), (2, 1), (3, 1), (4, 2), (4, 3)),
    "lengths": ((3, 0, 5), (0, 2, 0), (7,), (2, 1, 4)),
    "tail": (None, 0, 5),
    "integers": (32, 64),
    "table": ("one", "all", "long"),
    "rotation": ("half", "pairs", "mla"),
    "mscale": (1.0, 1.3),
    "columns": (6, 10),
    "floats": (32, 16),
    "batch": (1, 2, 3),
    "heads": (1, 3),
    "dense": (1, 0),
    "bounds": ("auto", "mask", "masks", "ends", "keys"),
    "rows": ("mean", "sum", "all", "half", "each", "none", "sumhalf"),
    "sparse": (0, 1),
    "relu": (1, 0),
    "frozen": (None, 0, 2),
    "attention_heads": (64, 4),
    "filled": ("some", "all", "none", "told"),
    "loss": (0, 3),
    "scale": (0, 1),
}
CASES = pairwise(FACTORS)
HOOKED = "a hook keeps no tensor"  # what the contract's own hook says, where autograd asks it
FULL = ([0, 8, 8, 24, 32], [0, 16, 20, 20, 32], [0, 0, 0, 0, 32])  # the whole attention: one graph, three batches
MANY = 53  # the batch of a case that is about the number of its rows, MANY * SQ
S, SQ, SK = 32, 20, 28  # rows of the whole attention; query and key rows of the indexer's loss
TOLERANCES = {32: 1e-5, 16: 3 * 2**-8}


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of upstream, its inputs, and what must come of them.

    Attributes:
        step: takes the tensors of a set, returns those to compare; None if the tree has no such function.
        sets: inputs; a graph is captured with the first set, and replayed with every set.
        wanted: one function a set; it takes what was found and returns the reference's tensors, computed on the host.
        tolerance: relative error in the norm that is right for the floating-point tensors; integers must be equal.
        captures: False for what only eager mode can do.
        replayed: how many of the last sets are only replayed, since eager mode gives something else for them.
        writes: the tensor of a set into which the call writes, None if none.
        prepare: what eager mode does before the call, and before its capture; it takes the tensors of a set.
        settle: what eager mode does between a capture and a replay, or after a call in eager mode.
        after: what eager mode does last; it returns more tensors to compare.

    """

    step: Callable | None
    sets: list
    wanted: list
    tolerance: float = 0.0
    captures: bool = True
    replayed: int = 0
    writes: int | None = None
    prepare: Callable = lambda *_: ()
    settle: Callable = lambda *_: ()
    after: Callable = lambda *_: ()


@dataclasses.dataclass(frozen=True)
class Refusal:
    """A call with wrong input, which has to raise.

    Attributes:
        call: takes nothing.
        told: whether it is told that it is captured.
        kinds: what it may raise.
        lengths: numbers, of which its message has to name one; none if it need not.

    """

    call: Callable
    told: bool = False
    kinds: tuple = (AssertionError, RuntimeError, ValueError)
    lengths: tuple = ()

    def fits(self, error):
        """Say whether this is what the call has to raise."""
        named = {int(x) for x in re.findall(r"\d+", str(error))}
        return isinstance(error, self.kinds) and (not self.lengths or not named.isdisjoint(self.lengths))

    def due(self):
        """Say what the call has to raise."""
        kinds = " or ".join(x.__name__ for x in self.kinds)
        return kinds + (f" that names one of {[*self.lengths]}" if self.lengths else "")


def need(module, name, **fixed):
    """Return upstream's function with some arguments fixed; None if this tree has none that takes them."""
    function = getattr(module, name, None)
    known = function is not None and fixed.keys() <= inspect.signature(function).parameters.keys()
    return functools.partial(function, **fixed) if known else None


def fake_group(size, rank=0):
    """Stand for a process group of which only size and rank are read."""
    return types.SimpleNamespace(size=lambda: size, rank=lambda: rank)


def cases(*names):
    """List the distinct values that the covering set has for these factors."""
    rows = [types.SimpleNamespace(**row) for row in CASES]
    return list({tuple(getattr(x, name) for name in names): x for x in rows}.values())


def positions(cu, size, rank, count=None):
    """List a rank's rows of packed sequences, the front and the back piece of each, and then those of no sequence."""
    pieces = [(a, b, (b - a) // (2 * size)) for a, b in itertools.pairwise(cu)]
    rows = [x for a, b, n in pieces for c in (a + rank * n, b - rank * n - n) for x in range(c, c + n)]
    return rows + [cu[-1] + rank * (count or 0) + x for x in range((count or 0) - len(rows))]


def batches(case, size, *, other_totals=False):
    """List the cumulative lengths of one graph: the same number of sequences, and the same total if it has to be."""
    lengths = [2 * size * x for x in case.lengths]
    orders = [lengths, lengths[::-1]]
    orders += [[0] * (len(lengths) - 1) + [sum(lengths)]] if case.table != "one" else []
    orders += [[x // (4 * size) * 2 * size for x in lengths], [0, *lengths[1:]]] if other_totals else []
    return [list(itertools.accumulate(x, initial=0)) for x in orders if any(x)]


def differentiated(function, leaves, frozen=None):
    """Make a step of forward and backward; the last tensor is the upstream gradient of the first result."""

    def step(*tensors):
        *tensors, gradient = tensors
        leaf = [x.detach().requires_grad_(n != frozen) for n, x in enumerate(tensors[:leaves])]
        found = function(*leaf, *tensors[leaves:])
        first, *others = found if isinstance(found, tuple) else (found,)
        trained = [x for x in leaf if x.requires_grad]
        return first, *torch.autograd.grad(first, trained, gradient.to(first.dtype)), *others

    return step


def exactly(*tensors):
    """Return float64 copies."""
    return [x.double() if x.is_floating_point() else x for x in tensors]


def numbers(*rows):
    """Return the reference of integers, which are int64 everywhere."""
    return lambda _: [torch.tensor(x, dtype=torch.int64) for x in rows]


def cumulative(case, rows):
    """Make the cumulative lengths of packed sequences as upstream gets them."""
    return torch.tensor(rows, dtype=torch.int32 if case.integers == 32 else torch.int64)


def drawn(case, *shape):
    """Draw a tensor of a case's type; not every one is contiguous."""
    found = torch.randn(shape, dtype=torch.float32 if case.floats == 32 else torch.bfloat16)
    return found if case.dense or len(shape) < 2 else found.transpose(0, 1).contiguous().transpose(0, 1)


def packed_positions(up, _):
    """Build the rows of one rank of packed sequences."""
    build = need(up.dsa_layout, "build_packed_allgather_cp_local_positions", cu_seqlens_cover_output=True)
    for case in cases("cp", "lengths", "tail", "integers"):
        (size, rank), cover = case.cp, case.tail is None
        lists = batches(case, size, other_totals=not cover and size > 1)
        count = lists[0][-1] // size + (case.tail or 0)
        sets = [[cumulative(case, cu)] for cu in lists]
        wanted = [numbers(positions(cu, size, rank, count) if size > 1 else range(count)) for cu in lists]
        options = {"cp_size": size, "cp_rank": rank, "output_size": count, "cu_seqlens_cover_output": cover}
        step = build and (lambda cu, options=options: build(cu, device=up.device, **options))
        # A graph's shape cannot depend on the lengths: there the rows of a batch of empty sequences are padding.
        empty = [0] * (len(case.lengths) + 1)
        if not cover and size > 1:
            sets.append([cumulative(case, empty)])
            wanted.append(numbers(positions(empty, size, rank, count)))
            none = numbers([])
            yield Call(step, [sets[-1], sets[0], sets[-1]], [none, wanted[0], none], captures=False)
            # There nobody looks at the lengths: what fills no two pieces a rank is padding.
            if up.device.type == "cuda":
                odd = [[a + n * more for n, a in enumerate(lists[0])] for more in (1, 2 * size - 1)]
                given = [[cumulative(case, cu)] for cu in odd]
                yield Call(step, given, [numbers(positions(cu, size, rank, count)) for cu in odd])
        yield Call(step, sets, wanted, replayed=int(not cover and size > 1))
        if size > 1:
            step = build and (lambda cu, options=options | {"output_size": 0}: build(cu, device=up.device, **options))
            yield Call(step, [[cumulative(case, cu)] for cu in (lists[0], empty)], [numbers([])] * 2)
        unsized = options | {"output_size": None}
        step = build and (lambda cu, options=unsized: build(cu, device=up.device, **options))
        full = [numbers(positions(cu, size, rank) if size > 1 else range(cu[-1])) for cu in lists]
        yield Call(step, sets[: len(full)], full, captures=False)


def packed_reorder(up, _):
    """Build the rows of one rank and the order of all gathered keys, where queries and keys have other lengths."""
    build = need(up.dsa_layout, "build_packed_allgather_cp_query_positions_and_key_reorder")
    for case in cases("cp", "lengths", "tail", "integers"):
        (size, rank), tail = case.cp, case.tail or 0
        lists = batches(case, size, other_totals=case.tail is not None and size > 1)
        rows = lists[0][-1] // size
        options = {"cp_size": size, "cp_rank": rank, "local_output_size": rows + tail}
        options |= {"query_cu_seqlens_cover_output": not tail and case.tail is None}
        options |= {"key_cu_seqlens_cover_output": False, "key_local_output_size": rows + 2 * tail}
        options |= {"global_output_size": size * (rows + 2 * tail)}

        def wanted(queries, keys, size=size, rank=rank, rows=rows, tail=tail):
            count = rows + 2 * tail
            gathered = [positions(keys, size, each, count) if size > 1 else [*range(count)] for each in range(size)]
            gathered = [x for each in gathered for x in each]
            mine = positions(queries, size, rank, rows + tail) if size > 1 else range(rows + tail)
            return numbers(mine, sorted(range(len(gathered)), key=gathered.__getitem__))

        pairs = list(zip(lists, lists[::-1], strict=True))
        sets = [[cumulative(case, cu) for cu in pair] for pair in pairs]
        step = build and (lambda q, kv, options=options: build(q, kv, device=up.device, **options))
        yield Call(step, sets, [wanted(*pair) for pair in pairs])


def indexer_layout(up, _):
    """Build the segments of fused indexers over packed sequences."""
    build = need(up.dsa_layout, "build_packed_cp_indexer_layout")
    for case in cases("cp", "lengths", "integers"):
        size, rank = case.cp

        def wanted(queries, keys, local, size=size, rank=rank):
            both = [[b - a for a, b in itertools.pairwise(cu)] for cu in (queries, keys)]
            halves = [[x // (2 * size) for x in each] for each in both]
            if local is not None:
                halves, q = [[local // 2]], [local // 2] * 2
                k, starts = [local // 2, local], [0, 0]
            else:
                q = [x for x in halves[0] for _ in range(2)]
                k = [y for x, n in zip(halves[1], both[1], strict=True) for y in ((rank + 1) * x, n - rank * x)]
                starts = [x for x in keys[:-1] for _ in range(2)]
            source = [begin + x for begin, n in zip(starts, k, strict=True) for x in range(n)]
            sums = [list(itertools.accumulate(x, initial=0)) for x in (q, k)]
            return numbers(q, k, *sums, starts, source)

        if size == 1:
            continue
        kinds = (False, True) if len(case.lengths) == 1 else (False,)
        empty = [[0] * (len(case.lengths) + 1)]
        # Local keys are as many as key_size says, whatever the cumulative lengths count.
        some = [(local, x) for local in kinds for x in (batches(case, size, other_totals=local), empty)]
        for (local, lists), more in itertools.product(some, (0, 6)):
            if more and not local:
                continue
            rows = lists[0][-1] // (size if local else 1) + more
            options = {"cp_size": size, "cp_rank": rank, "key_size": rows, "local_key_layout": local}
            step = build and (lambda q, kv, options=options: build(q, kv, **options))
            pairs = list(zip(lists, lists[::-1], strict=True))
            sets = [[cumulative(case, cu) for cu in pair] for pair in pairs]
            yield Call(step, sets, [wanted(*pair, rows if local else None) for pair in pairs])


def varlen_whole(up, _):
    """Bound the keys of every row of packed sequences; the number of rows is data, unless the caller can say it."""
    plain = need(up.dsa_masking, "generate_varlen_mask_params")
    for case in cases("lengths", "integers"):
        lists = batches(case, 1)
        told = need(up.dsa_masking, "generate_varlen_mask_params", output_size=lists[0][-1]) or plain
        sets = [[cumulative(case, cu)] for cu in lists]
        starts = [[a for a, b in itertools.pairwise(cu) for _ in range(a, b)] for cu in lists]
        wanted = [numbers(x, range(1, len(x) + 1)) for x in starts]
        yield Call(told, sets, wanted)
        yield Call(plain, sets, wanted, captures=False)
        yield Call(plain, [[cumulative(case, [0, 0])]], [numbers([], [])], captures=False)


def varlen_positions(up, _):
    """Bound the keys of a rank's rows of packed sequences."""
    build = need(up.dsa_masking, "generate_varlen_mask_params_for_positions")
    for case in cases("cp", "lengths", "integers"):
        lists = batches(case, case.cp[0])
        rows = [positions(cu, *case.cp) for cu in lists]
        sets = [[cumulative(case, cu), torch.tensor(x)] for cu, x in zip(lists, rows, strict=True)]
        starts = [[max(a for a in cu if a <= x) for x in y] for cu, y in zip(lists, rows, strict=True)]
        wanted = [numbers(a, [x + 1 for x in b]) for a, b in zip(starts, rows, strict=True)]
        yield Call(build, sets, wanted)


def turned(case, rows, t, freqs):
    """Turn the first columns of a rank's rows by the angles of their places in the table."""
    t, rest = t[..., : case.columns], t[..., case.columns :]
    angles = freqs[:, 0, 0].index_select(0, torch.tensor(rows))[:, None]
    t = torch.cat((t[..., 0::2], t[..., 1::2]), -1) if case.rotation == "mla" else t
    one, two = (t[..., 0::2], t[..., 1::2]) if case.rotation == "pairs" else t.chunk(2, -1)
    other = torch.stack((-two, one), -1).flatten(-2) if case.rotation == "pairs" else torch.cat((-two, one), -1)
    return torch.cat(((t * angles.cos() + other * angles.sin()) * case.mscale, rest), -1)


def rope(up, _):
    """Turn packed sequences: the table is as long as one sequence, as all of them, or longer than both.

    A graph is also replayed with fewer rows; what the rows beyond give is not compared.
    """
    factors = ("cp", "lengths", "integers", "table", "rotation", "mscale", "columns", "floats", "batch", "dense")
    for case in cases(*factors):
        size, rank = case.cp
        if case.rotation == "pairs":  # in eager mode 0.19.2 cannot turn pairs of a sequence without rows
            case.lengths = tuple(max(1, x) for x in case.lengths)
        lists = [
            x for x in batches(case, size) if case.rotation != "pairs" or all(a < b for a, b in itertools.pairwise(x))
        ]
        longest, total = max(b - a for cu in lists for a, b in itertools.pairwise(cu)), lists[0][-1]
        table = {"one": longest, "all": total, "long": total + 5}[case.table]
        config = {"apply_rope_fusion": False, "rotary_interleaved": case.rotation == "pairs", "mrope_section": None}
        options = {"config": types.SimpleNamespace(**config), "cp_group": fake_group(size, rank), "mscale": case.mscale}
        options |= {"mla_rotary_interleaved": case.rotation == "mla"}
        declared = table if table != total else table - 1  # a table that is longer holds the places of the whole batch
        apply = need(up.rope_utils, "apply_rotary_pos_emb", **options, max_seqlen=declared)
        # The deprecated keyword counts, where it is given.
        older = {name: options[name] for name in ("cp_group", "mscale")} | ({"max_seqlen": declared} if apply else {})
        older |= {"rotary_interleaved": case.rotation == "pairs", "mla_rotary_interleaved": case.rotation != "mla"}
        older |= {"multi_latent_attention": case.rotation == "mla"}
        older = need(up.rope_utils, "_apply_rotary_pos_emb_thd", **older)
        fewer = [[min(x, total - 2 * size) for x in lists[0]]] if table == total else []
        # Behind one sequence that fills the table, rows come that the table has no place for.
        fewer += [[0] * len(case.lengths) + [longest]] if longest < total else []
        # In eager mode a table holds the places of all where it is as long as they are, if nobody declares a length.
        whole = (lambda cu, x=table: x == cu[-1]) if apply is None else (lambda _, x=table == total: x)
        apply = apply or need(up.rope_utils, "apply_rotary_pos_emb", **options)

        def called(t, freqs, cu, real, apply=apply):
            return apply(t, freqs=freqs, cu_seqlens=cu) * real

        def wanted(cu, tensors, case=case, whole=whole):
            rows, starts = positions(cu, *case.cp), {x: a for a, b in itertools.pairwise(cu) for x in range(a, b)}
            t, freqs, _, real, gradient = exactly(*tensors)
            rows = [x if whole(cu) else x - starts[x] for x in rows] + [0] * (len(t) - len(rows))
            step = differentiated(lambda t, freqs: turned(case, rows, t, freqs) * real, 1)
            return step(t, freqs, gradient)

        shape, sets = (total // size, case.batch, 10), []
        for cu in lists + fewer:
            freqs, t = torch.randn(table, 1, 1, case.columns), drawn(case, *shape)
            real = (torch.arange(len(t)) < cu[-1] // size)[:, None, None].to(t.dtype)
            sets.append([t, freqs, cumulative(case, cu), real, drawn(case, *shape)])
        references = [
            functools.partial(lambda cu, x, _, wanted=wanted: wanted(cu, x), *x)
            for x in zip(lists + fewer, sets, strict=True)
        ]
        step = differentiated(called, 1)
        yield Call(step, sets, references, TOLERANCES[case.floats], replayed=len(fewer))
        if case.batch == 3:
            step = older and differentiated(functools.partial(called, apply=older), 1)
            yield Call(step, sets, references, TOLERANCES[case.floats], replayed=len(fewer))


def rope_slice(up, _):
    """Take a rank's part of a table; its index is copied from pinned memory, for which nobody has to wait."""
    for case in cases("cp", "columns", "dense"):
        size, rank = case.cp
        sets = [[drawn(types.SimpleNamespace(floats=32, dense=case.dense), 6 * size, case.columns)] for _ in "ab"]
        rows = positions([0, 6 * size], size, rank)
        wanted = [
            functools.partial(lambda x, _, rows: [x.index_select(0, rows)], *x, rows=torch.tensor(rows)) for x in sets
        ]
        yield Call(
            need(up.rope_utils, "get_pos_emb_on_this_cp_rank", seq_dim=0, cp_group=fake_group(size, rank)), sets, wanted
        )


def bounded(case):
    """Draw which keys a row may see; give upstream's arguments for that, their tensors, and the mask [b, sq, sk]."""
    none = -float("inf")
    rows, keys = torch.arange(SQ)[:, None], torch.arange(SK)
    seen = (keys <= rows).expand(case.batch, SQ, SK)
    if case.bounds == "auto":
        return (), [], seen
    if case.bounds in ("mask", "masks"):
        shape = (case.batch, SQ, SK) if case.bounds == "masks" else (SQ, SK)
        seen = (torch.rand(shape) < 0.7) & (rows != 3)  # the third row sees no key
        return ("mask",), [torch.zeros(shape).masked_fill(~seen, none)], seen.expand(case.batch, SQ, SK)
    starts = torch.randint(0, SK - 8, (SQ,))
    ends = (starts + torch.randint(0, 9, (SQ,))).int()
    places = torch.randperm(SK) if case.bounds == "keys" else keys
    seen = (places >= starts[:, None]) & (places < ends[:, None])
    names = ("varlen_starts", "varlen_ends", "key_positions")[: 2 + (case.bounds == "keys")]
    return names, [starts, ends, places][: len(names)], seen.expand(case.batch, SQ, SK)


def valid_rows(case):
    """Draw which query rows are real: None, or a mask [sq], [1, sq] or [b, sq]."""
    some = torch.rand(case.batch, SQ) < 0.5
    kinds = {"all": some[:1] | True, "half": some[0], "each": some, "none": some[0] & False}
    return kinds.get(case.rows.removeprefix("sum"))


def kullback_leibler(case, seen, valid, found, tensors):
    """Compute the indexer's loss in float64, and the keys that it selects; every head of every rank is there."""
    q, weights, k, query, key = tensors
    scores = torch.einsum("sbhd,tbd->sbht", q, k)
    scores = ((scores.relu() if case.relu else scores) * weights[..., None]).sum(2).transpose(0, 1)
    topk, none = found[-1], -float("inf")
    free = scores.detach() if case.bounds == "auto" else scores.detach().where(seen, none)
    best = free.topk(6).values.sort().values
    chosen = free.gather(-1, topk.clamp_min(0)).where(topk >= 0, none).sort().values
    # Keys of equal score are equally good. What upstream selected is believed if its scores are the best ones.
    topk = topk if torch.allclose(chosen, best, rtol=1e-4, atol=1e-4) else topk - 1
    picked = torch.zeros(seen.shape).scatter_reduce(-1, topk.clamp_min(0), (topk >= 0).float(), "amax") > 0
    seen = seen & picked if case.sparse else seen
    some = seen.any(-1, keepdim=True)
    attention = torch.einsum("sbnd,tbnd->bnst", query, key).mul(0.5).where(seen[:, None], none)
    attention = attention.where(some[:, None], 0).softmax(-1).where(seen[:, None], 0).sum(1)
    target = (attention / attention.sum(-1, keepdim=True).clamp_min(1e-10)).detach()
    predicted = scores.where(seen | ~some, none).log_softmax(-1).where(seen, 0)
    loss = (target * (target.clamp_min(1e-10).log() - predicted)).sum(-1)
    real = torch.ones(case.batch, SQ) if valid is None else valid.expand(case.batch, SQ).double()
    count = 1 if case.rows.startswith("sum") else real.sum().clamp_min(1)
    return (loss * real).sum() / count * 0.7, topk


def indexer_loss(up, group):
    """Call the indexer's loss with its backward; heads of the attention may lie on several ranks."""
    factors = ("batch", "heads", "dense", "floats", "bounds", "rows", "sparse", "relu", "frozen")
    parts = types.SimpleNamespace(tp=group)
    fewer, one = cases(*factors)[: None if group.size() == 1 else 8], cases(*factors)[0]
    # bfloat16 counts these 1060 rows as 1056; that is less than its rounding of one element, more than that of a norm.
    many = [types.SimpleNamespace(**vars(one) | {"batch": MANY, "floats": 16, "rows": x}) for x in ("mean", "all")]
    for case in fewer + many:
        shapes = (SQ, case.batch, case.heads, 5), (SQ, case.batch, case.heads), (SK, case.batch, 5)
        both = [(rows, case.batch, 2 * group.size(), 3) for rows in (SQ, SK)]
        sets, wanted = [], []
        for _ in range(2):
            names, given, seen = bounded(case)
            valid = valid_rows(case)
            whole = [drawn(case, *shape) for shape in (*shapes, *both)]
            mine = whole[:3] + [x[:, :, 2 * group.rank() :][:, :, :2] for x in whole[3:]]
            gradient = torch.randn(())
            sets.append([*mine, *given, *([] if valid is None else [valid]), gradient])

            def reference(found, case=case, seen=seen, valid=valid, whole=whole, gradient=gradient):
                def loss(*tensors):
                    return kullback_leibler(case, seen, valid, found, tensors)

                return measured(case, differentiated(loss, 3, case.frozen)(*exactly(*whole, gradient)))

            wanted.append(reference)
        names = (*names, *([] if valid is None else ["query_valid_rows"]))
        tolerance = 2**-10 if case.batch == MANY else TOLERANCES[case.floats]
        yield Call(loss_of(up, case, parts, names), sets, wanted, tolerance)


def loss_of(up, case, parts, names):
    """Call upstream's loss, whose arguments have an order and no names."""
    order = ("mask", "sparse_loss", "pg_collection", "varlen_starts", "varlen_ends", "key_positions")
    order += ("query_valid_rows", "calculate_per_token_loss", "use_relu")
    flags = {"sparse_loss": bool(case.sparse), "calculate_per_token_loss": case.rows.startswith("sum")}
    flags |= {"pg_collection": parts, "use_relu": bool(case.relu)}

    def loss(*tensors):
        given = flags | dict(zip(names, tensors[5:], strict=True))
        topk, found = up.dsa.FusedDSAIndexerLoss.apply(*tensors[:5], 0.5, 6, 0.7, *(given.get(x) for x in order))
        return found, topk

    step = differentiated(loss, 3, case.frozen)
    return lambda *tensors: measured(case, step(*tensors))


def measured(case, found):
    """Give results as they are; of many rows the gradients' norms [], in which the elements' roundings cancel."""
    loss, *gradients, topk = found
    return loss, *(x.double().norm() if case.batch == MANY else x for x in gradients), topk


def losses(*factors):
    """List cases of the scaler: its loss is a number, several, or several of which there is only one."""
    ones = cases(*factors)
    for case in ones:
        case.loss = 1
    return cases("loss", *factors) + ones


def loss_scale(up, _, *, first):
    """Scale the loss's gradient: by what was set, twice, or by 1 as long as nothing was set."""
    scaler = up.dsa.DSAIndexerLossAutoScaler
    backward = functools.partial(scaled, up)
    for case in losses("scale", "floats", "batch"):

        def given(output, loss, gradient, one, two):
            scaler.main_loss_backward_scale = None
            scaler.set_loss_scale(one)
            before = backward(output, loss, gradient)
            scaler.set_loss_scale(two)
            return *before, *backward(output, loss, gradient)

        def unset(output, loss, gradient, value):
            scaler.main_loss_backward_scale = None
            before = [x for _ in range(2) for x in backward(output, loss, gradient)]
            scaler.set_loss_scale(value)
            return *before, *backward(output, loss, gradient)

        sets, wanted = [], []
        for scale in (0.3, 5.0):
            shape = (1,) if case.scale and not first else ()
            scales = [torch.full(shape, x * scale) for x in ((1,) if first else (1, 2))]
            output, gradient = (drawn(case, 7, case.batch) for _ in "ab")
            loss = drawn(case, *([case.loss] if case.loss else []))
            sets.append([output, loss, gradient, *scales])
            factors = (1, 1, scale) if first else (scale, 2 * scale)
            found = [y for x in factors for y in (output, gradient, torch.full_like(loss, x))]
            wanted.append(lambda _, x=found: x)
        step, writes = (unset, None) if first else (given, 3)  # the second scale is copied into the first
        yield Call(step, sets, wanted, TOLERANCES[case.floats], writes=writes)
    output, loss, gradient, scale = torch.randn(7, 2), torch.randn(()), torch.randn(7, 2), torch.tensor(2.0)
    freed = [output, gradient, torch.tensor(1.0 if first else 2.0), torch.tensor([0])]
    given = [output, loss, gradient, *([] if first else [scale])]
    yield Call(functools.partial(let_go, up), [given], [lambda _: freed], TOLERANCES[32], captures=False)
    yield from scale_after_capture(up, first=first)


def scaled(up, output, loss, gradient, *_):
    """Attach a loss to an output, and go backward through both."""
    leaf = [x.detach().requires_grad_() for x in (output, loss)]
    found = up.dsa.DSAIndexerLossAutoScaler.apply(*leaf)
    return found, *torch.autograd.grad(found, leaf, gradient)


def let_go(up, output, loss, gradient, *scale):
    """Go backward through a loss that nothing else holds; tell whether it is still there, though its graph is."""
    scaler = up.dsa.DSAIndexerLossAutoScaler
    scaler.main_loss_backward_scale = None
    _ = [scaler.set_loss_scale(x.clone()) for x in scale]
    leaf = [x.detach().requires_grad_() for x in (output, loss)]
    attached = leaf[1] * 1  # a leaf would be held by the graph itself
    left = weakref.ref(attached)
    found = scaler.apply(leaf[0], attached)
    del attached
    gradients = torch.autograd.grad(found, leaf, gradient)
    until = time.monotonic() + 3
    while left() is not None and time.monotonic() < until:  # a thread that goes backward on a GPU may hold it a moment
        time.sleep(0.05)
    return found, *gradients, torch.full((1,), int(left() is not None), device=up.device)


def backward_again(up, leaf):
    """Go backward twice through one graph, which nobody asked to keep."""
    found = up.dsa.DSAIndexerLossAutoScaler.apply(*leaf)
    for _ in range(2):
        torch.autograd.grad(found, leaf, found.detach())


def backward_hooked(up, leaf, pack, unpack):
    """Go backward while whoever wants to keep saved tensors elsewhere is asked about each."""
    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        found = up.dsa.DSAIndexerLossAutoScaler.apply(*leaf)
        torch.autograd.grad(found, leaf, found.detach())


def kept_by_autograd(up):
    """List backwards that have to fail if the indexer's loss is saved as autograd saves tensors; as refusals()."""

    def refuse(x):
        if not isinstance(x, torch.Tensor) or x.dim() == 0:  # the loss; the output has rows
            raise RuntimeError(HOOKED)
        return x

    leaf = [x.requires_grad_() for x in up.put([torch.ones(7, 2), torch.ones(())])]
    again = functools.partial(backward_again, up, leaf)
    packed = functools.partial(backward_hooked, up, leaf, refuse, lambda x: x)
    unpacked = functools.partial(backward_hooked, up, leaf, lambda x: x, refuse)
    return [Refusal(again, kinds=(RuntimeError,))] + [Refusal(x, kinds=(RuntimeError,)) for x in (packed, unpacked)]


def scale_after_capture(up, *, first):
    """Set the scale after the capture: replays read it, unless none was set then; eager mode reads it afterwards.

    It is copied into the one that was set before, also from the host, from another type, or as a number into a [1].
    """
    scaler = up.dsa.DSAIndexerLossAutoScaler
    renewals = (torch.Tensor.double, torch.Tensor.bfloat16, lambda x: x.reshape(()), lambda x: x.cpu())

    def prepare(*tensors):
        scaler.main_loss_backward_scale = None
        _ = None if first else scaler.set_loss_scale(tensors[-1].clone())

    renewed = [(case, renew) for case in cases("scale") for renew in renewals]
    for case, renew in [*((case, torch.clone) for case in losses("scale", "floats")), *renewed]:

        def settle(*tensors, renew=renew):
            scaler.set_loss_scale(renew(tensors[-1].clone()))

        sets, wanted = [], []
        for scale in (0.375, 5.0):  # exact in bfloat16
            output, gradient = (drawn(case, 7, 2) for _ in "ab")
            loss = drawn(case, *([case.loss] if case.loss else []))
            sets.append([output, loss, gradient, torch.full((1,) if case.scale and not first else (), scale)])
            both = (1 if first else scale, scale)
            found = [y for x in both for y in (output, gradient, torch.full_like(loss, x))]
            wanted.append(lambda _, x=found: x)
        hooks = {"prepare": prepare, "settle": settle, "after": functools.partial(scaled, up)}
        yield Call(functools.partial(scaled, up), sets, wanted, TOLERANCES[case.floats], **hooks)


def sparse_kernel(heads):
    """Stand for cuDNN's backward of sparse attention: its formula, and not-a-number where a row has no key."""

    def kernel(q, kv, out, d_out, lse, sink, indices, *, softmax_scale, topk_length):
        if sink.shape != (heads,) or not all(x.is_contiguous() for x in (q, out, d_out, lse, indices, topk_length)):
            raise RuntimeError("cuDNN takes contiguous rows and one sink a head")
        kind, (q, kv, out, d_out) = q.dtype, (x.float() for x in (q, kv, out, d_out))
        picked, slots = kv[indices.long()], torch.arange(indices.size(1), device=q.device)
        lse = torch.logaddexp(lse, sink)  # a sink is one more score of each row, without a value
        p = (softmax_scale * torch.einsum("nhd,nkd->nhk", q, picked) - lse[..., None]).exp()
        p = torch.where(slots < topk_length[:, None, None], p, 0)
        values = picked[..., : out.size(-1)]
        d_p = torch.einsum("nhv,nkv->nhk", d_out, values) - (d_out * out).sum(-1, keepdim=True)
        d_s = p * d_p * softmax_scale
        d_keys = torch.einsum("nhk,nhd->nkd", d_s, q)
        d_values = torch.einsum("nhk,nhv->nkv", p, d_out)
        d_keys = d_keys + torch.nn.functional.pad(d_values, (0, kv.size(-1) - out.size(-1)))
        empty = torch.where(topk_length > 0, 0.0, float("nan"))[:, None, None]
        d_kv = torch.zeros_like(kv).index_add(0, indices.long().flatten(), (d_keys + empty).flatten(0, 1))
        return {"dq": (torch.einsum("nhk,nkd->nhd", d_s, picked) + empty).to(kind), "dkv": d_kv.to(kind)}

    return kernel


def sparse_forward(q, kv, sink, indices, length, scale):
    """Attend to the keys of each row in the precision of q: output [n, h, 8], and their log-sum-exp [n, h]."""
    slots = torch.arange(indices.size(1)) < length[:, None, None]
    picked = kv[indices.long()]
    scores = scale * torch.einsum("nhd,nkd->nhk", q, picked)
    scores = scores.where(slots, -float("inf"))
    sinks = sink[:, None].expand(*scores.shape[:2], 1)
    p = torch.cat((scores, sinks), -1).softmax(-1)[..., :-1]
    return torch.einsum("nhk,nkv->nhv", p, picked[..., :8]), scores.logsumexp(-1)


def cudnn_backward(up, _):
    """Call the backward around cuDNN's kernel, where rows may have no keys."""
    scale = 0.4
    for case in cases("batch", "attention_heads", "floats", "filled", "dense"):
        n, heads, skv, width = SQ * case.batch, case.attention_heads, SK, 12
        fixed = {"softmax_scale": scale, "sq": SQ, "b": case.batch, "num_heads": heads, "d": width, "skv": skv}
        fixed |= {"all_rows_nonempty": True} if case.filled == "told" else {}
        run = need(up.dsa_cudnn_kernels, "_run_sparse_attention_backward", **fixed)
        names = ("q_flat", "kv_flat", "out_flat", "grad_output", "lse", "attn_sink", "global_idxs", "topk_length")

        def backward(*tensors, run=run, names=names):
            kernel = sparse_kernel(64)  # the heads that FlashMLA pads to
            vars(up.dsa_cudnn_kernels)["_cudnn_dsa"] = types.SimpleNamespace(sparse_attention_backward_wrapper=kernel)
            return run(**dict(zip(names, tensors, strict=True)))

        sets, wanted = [], []
        for some in (torch.arange(n) % 7, (torch.arange(n) + 3) % 5 * 6 // 4):
            length = {"some": some, "none": some * 0}.get(case.filled, some % 6 + 1).int()
            indices = (
                torch.rand(n, skv * case.batch).argsort()[:, :6].masked_fill(torch.arange(6) >= length[:, None], 0)
            )
            q, kv = drawn(case, n, heads, width).contiguous(), drawn(case, skv * case.batch, width).contiguous()
            sink = torch.linspace(-1, 1, heads)
            out, lse = sparse_forward(*exactly(q, kv, sink), indices, length, scale)
            gradient = drawn(case, SQ, case.batch, heads * 8)
            sets.append([q, kv, out.to(q.dtype), gradient, lse.float(), sink, indices.int(), length])

            def reference(_, q=q, kv=kv, gradient=gradient, sink=sink, indices=indices, length=length, case=case):
                leaf = [x.requires_grad_() for x in exactly(q, kv)]
                out, _ = sparse_forward(*leaf, sink.double(), indices, length, scale)
                d_q, d_kv = torch.autograd.grad(out, leaf, exactly(gradient)[0].reshape(out.shape))
                return d_q.reshape(SQ, case.batch, *d_q.shape[1:]), d_kv.reshape(SK, case.batch, d_kv.size(-1))

            wanted.append(reference)
        yield Call(run and backward, sets, wanted, TOLERANCES[case.floats])


def attention(up, group, *, packed):
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
            found = torch.autograd.grad(out, [*leaf, *parameters], gradient.reshape(out.shape))
            means = [x / group.size() for x in found[3:]]  # the loss is a mean over a rank's rows
            if group.size() > 1:
                _ = [torch.distributed.all_reduce(x, group=group) for x in means]
            return out, *found[:3], *means

        return step

    def reference(cu, *whole):
        pieces = [(a, b) for a, b in itertools.pairwise(cu) if a < b]
        alone = [on_host(build(fake_group(1))(*up.put(x[a:b] for x in whole))) for a, b in pieces]
        local, alone = torch.tensor(positions(cu, group.size(), group.rank())), list(zip(*alone, strict=True))
        shares = [(b - a) / S for a, b in pieces]
        trained = [sum(n * y for n, y in zip(shares, x, strict=True)) for x in alone[4:]]
        return [torch.cat(x).index_select(0, local) for x in alone[:4]] + trained

    sets, wanted = [], []
    for cu in FULL if packed else ([0, S], [0, S]):
        whole = [torch.randn(S, 1, *shape) for shape in ((2, 16), (2, 16), (2, 8), (16,), (32,), (16,))]
        local = torch.tensor(positions(cu, group.size(), group.rank()))
        mine, found = [x.index_select(0, local) for x in whole], reference(cu, *whole)
        sets.append(mine + [torch.tensor(cu, dtype=torch.int32)] * packed)
        wanted.append(lambda _, found=found: found)
    yield Call(build(group), sets, wanted, TOLERANCES[32])


def reported(up, _, *, name):
    """Call what the public report names: top-k into a mask, bounds of keys, rows of position ids."""
    masking = up.dsa_masking
    keys, ends, mask = torch.rand(2, S, S).argsort()[..., :6], torch.arange(1, S + 1), torch.zeros(S, S)
    mask = mask.masked_fill(ends > ends[:, None], -float("inf"))
    bounds = need(masking, "build_fused_indexer_varlen_bounds", sq=S, skv=S, key_positions=None)
    if name == "scatter_topk":
        topk = keys.masked_fill(keys % 3 == 0, -1), keys, keys * 0 - 1, (keys % 2).flip(-1) - 1, keys % 2 - 1
        scatter = need(masking, "scatter_topk_into_index_mask", seq_chunk_size=7)
        before = mask.expand(2, S, S).clone()

        def wanted(x, _):
            picked = torch.zeros(2, S, S).scatter_reduce(-1, x.clamp_min(0), (x >= 0).float(), "amax")
            return [before.masked_fill(picked > 0, 0)]

        references = [functools.partial(wanted, x) for x in topk]
        yield Call(scatter and (lambda m, x: (scatter(m, x), m)[1]), [[before, x] for x in topk], references, writes=0)
    elif name == "bounds_of_rows":
        sets = [[ends * 0, ends], [ends // 9 * 8, ends]]
        wanted = [lambda _, x=x: [y.int() for y in x] for x in sets]
        yield Call(lambda a, b: bounds(mask=None, varlen_starts=a, varlen_ends=b, device=up.device), sets, wanted)
    elif name == "position_ids":
        sets = [[(ends + x).expand(2, S).clone()] for x in (0, 7)]
        ids = need(up.dsa_layout, "extract_query_positions_from_position_ids", sq=S)
        yield Call(lambda x: ids(x, device=up.device), sets, [lambda _, x=x: [x[0][0]] for x in sets])
    else:  # what a mask's bounds are, releases do not agree on: a replay is compared with eager mode
        shape = (S, S) if name == "bounds_of_mask" else (2, S, S)
        sets = [[x.expand(shape).clone()] for x in (mask, mask[ends // 2])]
        none = {"varlen_starts": None, "varlen_ends": None}
        yield Call(lambda x: bounds(mask=x, device=up.device, **none), sets, [])


def equal_lengths(up, group):
    """Compare the lengths of the ranks, for the right key lengths; wrong ones are refused."""
    check = need(up.dsa, "_validate_nonpacked_cp_uniform_length")
    n, ends = group.size(), torch.arange(1, S + 1)
    for sq, skv, size, others in ((16, 16 * n, n, group), (13, 13, n, group), (7, 21, 3, group), (5, 10, 2, None)):
        given = {"sq": sq, "skv": skv, "cp_size": size, "cp_group": others}
        step = check and (lambda x, given=given: (check(**given, device=up.device), x + 1)[1])
        yield Call(step, [[ends], [-ends]], [lambda _, x=x: [x + 1] for x in (ends, -ends)])
    for pair in up.pairs:  # each has a length of its own
        sq = 16 + min(torch.distributed.get_process_group_ranks(pair))
        given = {"sq": sq, "skv": 2 * sq, "cp_size": 2, "cp_group": pair}
        step = check and (lambda x, given=given: (check(**given, device=up.device), x + 1)[1])
        yield Call(step, [[ends], [-ends]], [lambda _, x=x: [x + 1] for x in (ends, -ends)])


def uneven(up, group):
    """List the rows of a rank; it has as many as it likes, after those of the ranks before it."""
    place = need(up.dsa_layout, "get_cp_positions_from_layout")
    n, rank, ends = group.size(), group.rank(), torch.arange(1, S + 1)
    # In the third, every rank has a length that it had before, in a batch as long, but begins elsewhere.
    for lengths in ((8, 16, 2, 5)[:n], (2, 5, 8, 16)[:n], (8, 5, 2, 16)[:n], (1, 10, 6, 10)[:n], (0, 8, 0, 5)[:n]):
        sq, skv = lengths[rank], sum(lengths)
        for size, others in ((n, group), (n, None), (n + 1, group)):
            first = sum(lengths[:rank]) if size == n and others else rank * sq
            rows = range(first, first + sq)
            given = {"sq": sq, "skv": skv + (sq * size == skv), "cp_size": size, "cp_rank": rank, "cp_group": others}
            yield placed(up, place, given, rows, ends)
    for pair in up.pairs:
        # No rank has such a length elsewhere: one that remembers lengths would let the others wait for ever.
        length, mine = 20 + sum(torch.distributed.get_process_group_ranks(pair)), pair.rank()
        sizes = (length, length + 10)
        given = {"sq": sizes[mine], "skv": sum(sizes), "cp_size": 2, "cp_rank": mine, "cp_group": pair}
        first = sum(sizes[:mine])
        yield placed(up, place, given, range(first, first + sizes[mine]), ends)
    zigzag = {"sq": 6, "skv": 6 * n, "cp_size": n, "cp_rank": rank, "cp_group": group}
    yield placed(up, place, zigzag, positions([0, 6 * n], n, rank), ends)
    yield placed(up, place, zigzag | {"cp_size": 1, "skv": 9}, range(6), ends)


def placed(up, place, given, rows, ends):
    """Ask for the positions of queries and keys, beside a tensor that a replay has to change."""

    def step(x):
        return *place(**given, cp_comm_type="all_gather", device=up.device), x + 1

    wanted = [lambda _, x=x: [*numbers(rows, range(given["skv"]))(_), x + 1] for x in (ends, -ends)]
    return Call(place and step, [[ends], [-ends]], wanted)


SITES = {  # the call that the public report is about comes first; the names tell how many ranks there are
    "indexer_loss": indexer_loss,
    "loss_scale-given": functools.partial(loss_scale, first=False),
    "loss_scale-first": functools.partial(loss_scale, first=True),
    "cudnn_backward": cudnn_backward,
    "packed_positions": packed_positions,
    "packed_reorder": packed_reorder,
    "indexer_layout": indexer_layout,
    "varlen-whole": varlen_whole,
    "varlen-positions": varlen_positions,
    "rope": rope,
    "rope-slice": rope_slice,
    "attention-plain": functools.partial(attention, packed=False),
    "attention-packed": functools.partial(attention, packed=True),
    **{
        f"reported-{name}": functools.partial(reported, name=name)
        for name in ("scatter_topk", "bounds_of_rows", "bounds_of_mask", "bounds_of_masks", "position_ids")
    },
    "two_ranks-equal_lengths": equal_lengths,
    "two_ranks-uneven": uneven,
    "two_ranks-indexer_loss": indexer_loss,
    "two_ranks-attention-plain": functools.partial(attention, packed=False),
    "two_ranks-attention-packed": functools.partial(attention, packed=True),
    "four_ranks-equal_lengths": equal_lengths,
    "four_ranks-uneven": uneven,
}
HOST = ("packed_positions", "packed_reorder", "indexer_layout", "varlen-whole", "varlen-positions")  # need no GPU
RANKS = {name: {"two_ranks": 2, "four_ranks": 4}.get(name.partition("-")[0], 1) for name in SITES}


def hosted(**given):
    """Put cumulative lengths on the host; on a GPU repeat_interleave ends the process where a size is not their sum."""
    return {x: torch.tensor(y, dtype=torch.int32) for x, y in given.items()}


def misfits(up, name):
    """List calls with lengths that no ranks can share, and with sizes that are not those of the rows; as refusals().

    The message about a length has to name it. Two, the number of ranks, is none of them: it may be named by chance.
    """
    fixed = {"device": torch.device("cpu"), "cp_size": 2, "cp_rank": 1}
    # One wrong length; then two whose sum is right, alone, behind a right one and before one.
    wrong = [[0, 6], [0, 7], [0, 6, 16], [0, 7, 16], [0, 8, 14, 24], [0, 8, 15, 24], [0, 6, 16, 24], [0, 7, 16, 24]]
    if name == "packed_positions":
        function = need(up.dsa_layout, "build_packed_allgather_cp_local_positions", **fixed)
        calls = [(hosted(cu_seqlens=cu), bad_lengths(cu)) for cu in wrong]
        sizes = [{"output_size": x, "cu_seqlens_cover_output": cover} for x, cover in ((3, 0), (3, 1), (5, 1))]
        given = hosted(cu_seqlens=[0, 0, 8])  # 4 rows a rank
    else:
        function = need(up.dsa_layout, "build_packed_allgather_cp_query_positions_and_key_reorder", **fixed)
        right = [[0, cu[-1]] for cu in wrong[2:]]
        both = [*zip(wrong[2:], right, strict=True), *zip(right, wrong[2:], strict=True)]
        calls = [
            (hosted(cu_seqlens_q=q, cu_seqlens_kv=kv) | {"local_output_size": q[-1] // 2}, bad_lengths(q, kv))
            for q, kv in both
        ]
        sizes = [
            {"local_output_size": 3},
            {"local_output_size": 4, "key_local_output_size": 3},
            {"local_output_size": 5, "query_cu_seqlens_cover_output": True},
            {"local_output_size": 5, "key_cu_seqlens_cover_output": True},
            {"local_output_size": 4, "global_output_size": 10},
        ]
        given = hosted(cu_seqlens_q=[0, 0, 8], cu_seqlens_kv=[0, 0, 8])
    if not function:
        return []
    found = [Refusal(functools.partial(function, **x), kinds=(ValueError,), lengths=y) for x, y in calls]
    wrong = [(functools.partial(function, **given, **x), told) for x in sizes for told in (False, True)]
    return found + [Refusal(call, told, (RuntimeError,)) for call, told in wrong]


def bad_lengths(*lists):
    """List the lengths that two ranks cannot share in two pieces each."""
    return tuple(b - a for cu in lists for a, b in itertools.pairwise(cu) if (b - a) % 4)


def refusals(up, group, name):
    """List calls with wrong input."""
    layout, n, odd = up.dsa_layout, group.size(), group.rank() % 2
    function, calls, later, kinds = None, [], [], Refusal.kinds

    def tensor(rows):
        return up.put([torch.tensor(rows, dtype=torch.int32)])[0]

    if name in {"packed_positions", "packed_reorder"}:
        return misfits(up, name)
    if name == "loss_scale-given":
        return kept_by_autograd(up)
    if name == "rope" and not need(up.rope_utils, "apply_rotary_pos_emb", max_seqlen=8):
        # Rows that are in no sequence, and a table that ends before the sequence. What takes max_seqlen pads instead.
        config = types.SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=False, mrope_section=None)
        function = need(up.rope_utils, "apply_rotary_pos_emb", config=config, cp_group=fake_group(1))
        wrong = [up.put([torch.ones(a, 1, 4), torch.ones(b, 1, 1, 4)]) for a, b in ((9, 8), (8, 5))]
        calls = [({"t": t, "freqs": freqs, "cu_seqlens": tensor([0, 8])}, False) for t, freqs in wrong]
    elif name == "indexer_layout":
        given = {"cu_seqlens_q": tensor([0, 8]), "cu_seqlens_kv": tensor([0, 8]), "cp_rank": 0}
        function, kinds = need(layout, "build_packed_cp_indexer_layout", **given), (RuntimeError,)
        wrong = {"cp_size": 1, "key_size": 8}, {"cp_size": 2, "key_size": 6}
        wrong += ({"cp_size": 2, "key_size": 3, "local_key_layout": True},)
        both = hosted(cu_seqlens_q=[0, 8], cu_seqlens_kv=[0, 8])
        wrong += tuple(both | {"cp_size": 2, "key_size": x} for x in (4, 12))
        calls = [(x, told) for x in wrong for told in (False, True)]
    elif name == "varlen-whole":
        function, calls = up.dsa_masking.generate_varlen_mask_params, [({"cu_seqlens": tensor([0])}, False)]
        kinds = (AssertionError,)
    elif name == "reported-position_ids":
        function = need(layout, "extract_query_positions_from_position_ids", sq=S, device=up.device)
        calls = [({"position_ids": torch.tensor([[0], [6]])}, False)]  # looked at on the host
    elif name.endswith("equal_lengths"):
        function = need(up.dsa, "_validate_nonpacked_cp_uniform_length", cp_size=n, device=up.device)
        kinds = (RuntimeError,)
        wrong = [{"sq": 16, "skv": 16 * n + 1, "cp_group": x} for x in (None, group)]
        calls = [(x, told) for x in wrong for told in (False, True)]
        calls += [({"sq": 16 + odd, "skv": 16 * n, "cp_group": group}, False)]
        calls += [({"sq": 16 + x.rank(), "skv": 32, "cp_size": 2, "cp_group": x}, False) for x in up.pairs]
        later = [(functools.partial(lengths_that_were_equal, function, group, 18 + odd), False)] if function else []
    elif name.endswith("uneven"):
        given = {"sq": 6, "skv": 6 * n, "cp_size": n, "cp_rank": 0, "device": up.device}
        function = need(layout, "get_cp_positions_from_layout", **given)
        calls, kinds = [({"cp_comm_type": "p2p"}, told) for told in (False, True)], (NotImplementedError,)
    later = [(functools.partial(function, **given), told) for given, told in calls] + later if function else []
    return [Refusal(call, told, kinds) for call, told in later]


def lengths_that_were_equal(check, group, sq):
    """Compare lengths that all ranks had before, each of them once, where only some have them now."""
    n = group.size()
    for length in (18, 19, sq):  # no other call has these two, so that no rank waits for one that remembers them
        check(sq=length, skv=length * n, cp_group=group)


# How a site is called


class Gpu:
    """A GPU, as kit.pretended_gpu's counterpart; a capture stops by itself, so that nothing is noted."""

    events = ()

    @contextlib.contextmanager
    def capture(self, mode):
        """Capture a graph; give what replays it."""
        with graph_capture(mode) as replay:
            yield replay
        # Replays must not read host memory that was freed since.
        self.reused = [torch.zeros(2, dtype=torch.int64).pin_memory() for _ in range(99)]


quietly = contextlib.nullcontext if TARGET.executed else plainly  # around the contract's own operators


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
    up.device, up.pairs, up.count = torch.device(rank.device), [], rank.count
    up.put = lambda tensors: [x.to(up.device, copy=True) for x in tensors]
    up.group = torch.distributed.group.WORLD if rank.count > 1 else fake_group(1)
    if rank.count == 4:  # groups of neighbours and of every second rank: no formula of the rank in all fits both
        made = [(x, torch.distributed.new_group(x)) for x in ([0, 1], [2, 3], [0, 2], [1, 3])]
        up.pairs = [pair for members, pair in made if rank.number in members]
    return up


def tensors_of(found):
    """List the tensors that a call gave."""
    found = [*vars(found).values()] if hasattr(found, "__dataclass_fields__") else found
    found = found if isinstance(found, (tuple, list)) else [found]
    return [x for x in found if hasattr(x, "detach")]


def on_host(found):
    """Return copies, on the host, of the tensors that a call gave."""
    return [x.detach().cpu().clone() for x in tensors_of(found)]


def overwrite(found, given):
    """Invert the integers that a call gave, which are its caller's now: no other call may give them again."""
    kept = {x.untyped_storage().data_ptr() for x in given}
    for x in tensors_of(found):
        own = not x.is_floating_point() and x.untyped_storage().data_ptr() not in kept
        if own and 0 not in x.stride():
            x.bitwise_not_()


def hashed(tensors):
    """Return the types, shapes and values of tensors on the host as bytes."""
    whole = [x.contiguous() for x in tensors]
    values = [ctypes.string_at(x.data_ptr(), x.nbytes) if x.nbytes else b"" for x in whole]
    return b"".join([*(str((x.dtype, *x.shape)).encode() for x in whole), *values])


def distance(found, wanted):
    """Return the largest relative error, in the norm; infinity where shapes, kinds or integers differ."""
    if [x.shape for x in found] != [x.shape for x in wanted]:
        return float("inf")
    worst = 0.0
    for x, y in zip(found, wanted, strict=True):
        if not y.is_floating_point():
            worst = worst if x.dtype == y.dtype and torch.equal(x, y) else float("inf")
            continue
        one, two = x.double(), y.double()
        apart = torch.where(one == two, 0, one - two).norm()
        error = apart / two.where(two.isfinite(), 0).norm() if float(apart) else apart
        worst = max(worst, float(error.nan_to_num(float("inf"))) if x.is_floating_point() else float("inf"))
    return worst


def score(call, number, found, eager=None):
    """Return how far results are from the reference, in units of the call's tolerance; above 1 is wrong."""
    if eager is not None and distance(found, eager[0]) == 0:
        return eager[1]
    wanted = call.wanted[number](found) if call.wanted else found if eager is None else eager[0]
    error = distance(found, wanted)
    return error / call.tolerance if call.tolerance else error and float("inf")


def changed(call, after, before):
    """Say whether a call wrote into a tensor that is not its to write."""
    return not all(torch.equal(after[n], before[n]) for n in range(len(before)) if n != call.writes)


def eagerly(up, calls, waits, *, warm):
    """Make every call with every set; return the worst error, a hash of all results, and where those wait."""
    digest, worst, lines, results = hashlib.sha256(), 0.0, set(), []
    for call in calls:
        sets, found = call.sets[: len(call.sets) - call.replayed], []
        if warm:  # what only a first call does is no part of a graph
            call.prepare(*(given := up.put(sets[0])))
            on_host(call.step(*given))
        for number, tensors in enumerate(sets):
            given = up.put(tensors)
            call.prepare(*given)
            with waits() if number == 0 else contextlib.nullcontext([]) as events:
                result = call.step(*given)
            lines |= set(events) if call.captures else set()
            call.settle(*given)
            rest = call.after(*given)
            with quietly():
                both, left = on_host(result) + on_host(rest), on_host(given)
                digest.update(hashed(both))
                found.append((both, score(call, number, both)))
                wrote = changed(call, left, tensors)
                overwrite(result, given)
            worst = float("inf") if wrote else max(worst, found[-1][1])
        results.append(found)
    return {"error": worst, "sha256": digest.digest(), "waits": sorted(lines)}, results


def captured(up, gpu, call):
    """Make a call under capture, and replay it with every set.

    Return what each replay gave and whether it wrote into its inputs, and where a capture stops.
    """
    static, replays = up.put(call.sets[0]), []
    # NCCL has a thread of its own, and Megatron captures so too.
    mode = ("thread_local" if up.count > 1 else "global",) if TARGET.executed else ()
    try:
        call.prepare(*static)
        before = len(gpu.events)
        with gpu.capture(*mode) as replay:
            result = call.step(*static)
    except Exception as error:
        return [], [told(error)]
    if stuck := sorted(set(gpu.events[before:])):
        return [], stuck
    for tensors in call.sets:
        _ = [old.copy_(new) for old, new in zip(static, tensors, strict=True)]
        call.settle(*static)
        replay()
        rest = call.after(*static)
        with quietly():
            wrote = changed(call, on_host(static), tensors)
            replays.append((on_host(result) + on_host(rest), wrote))
    return replays, []


def told(error):
    """Return the text of an error that upstream or a capture made; raise any other, a fault of contract or host."""
    chain = [error, *([error.__context__] if error.__context__ else [])]
    frames = [frame.filename for x in chain for frame in traceback.extract_tb(x.__traceback__)]
    host = isinstance(error, (ImportError, MemoryError)) or "out of memory" in str(error)
    launched = any(x in str(error) for x in ("captur", "device-side assert", HOOKED))  # and told where somebody waits
    # Autograd itself refuses what upstream's functions gave it: a gradient of another shape, a result without one.
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    unfit = "/torch/autograd/" in last and "CUDA error" not in str(error)
    # A function that no longer takes the arguments which the release takes.
    names = str(error).partition("(")[0] if isinstance(error, TypeError) else ""
    strange = bool(names) and any(hasattr(sys.modules.get(x), names) for x in MODULES)
    if host or not (launched or unfit or strange or any("/megatron/" in x for x in frames)):
        raise error
    traceback.print_exception(error)
    return f"{type(error).__name__}: {error}".splitlines()[0][:400]


def replayed(up, gpu, calls, results):
    """Capture every call, on a GPU until one cannot be captured; return where that is, and a replay's worst error."""
    stuck, worst = [], 0.0
    for call, eager in zip(calls, results, strict=True):
        if not call.captures or (stuck and TARGET.executed):  # the CUDA context is broken then
            continue
        replays, lines = captured(up, gpu, call)
        stuck += [x for x in lines if x not in stuck]
        with quietly():
            for number, (found, wrote) in enumerate(replays):
                known = eager[number] if number < len(eager) else None
                worst = float("inf") if wrote else max(worst, score(call, number, found, known))
    return {"stuck": stuck, "stale": worst}


def refused(up, name):
    """Make the calls with wrong input; return what is wrong with what each raises, "" if nothing."""
    wrong = []
    for one in refusals(up, up.group, name):
        try:
            with mock.patch("torch.cuda.is_current_stream_capturing", return_value=one.told):
                one.call()
            wrong.append(f"nothing is raised; due is {one.due()}")
        except Exception as error:
            text = told(error)
            wrong.append("" if one.fits(error) else f"{text}; due is {one.due()}")
    return wrong


def on_this_host(up, name):
    """Make a site's calls with tensors on the host, while a GPU captures; return the worst error, or an exception."""
    device, up.device = up.device, torch.device("cpu")
    torch.manual_seed(1)
    try:
        calls = [x for x in SITES[name](up, up.group) if x.step]
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            return eagerly(up, calls, lambda: contextlib.nullcontext([]), warm=False)[0]["error"]
    except Exception as error:
        return told(error)
    finally:
        up.device = device


def watch(up, gpu, name, answer):
    """Make the calls of one site eagerly, then under capture, and replay them; return what is to be told."""

    @contextlib.contextmanager
    def noted():
        before = len(gpu.events)
        yield (events := [])
        events += gpu.events[before:]

    waits = functools.partial(host_waits, "cuda", "megatron") if TARGET.executed else noted
    torch.manual_seed(1)
    up.dsa.DSAIndexerLossAutoScaler.main_loss_backward_scale = None
    try:
        calls = [x for x in SITES[name](up, up.group) if x.step]
        eager, results = eagerly(up, calls, waits, warm=TARGET.executed)
        answer |= eager | {"calls": len(calls)}
    except Exception as error:
        return answer | {"raised": told(error)}
    try:
        return answer | replayed(up, gpu, calls, results)
    except Exception as error:
        return answer | {"stuck": [told(error)], "stale": 0.0}


def observe(up, name):
    """Answer for one rank of one site."""
    answer = {"refused": refused(up, name)}
    answer |= {"host": on_this_host(up, name)} if name in HOST else {}
    if TARGET.executed:
        return watch(up, Gpu(), name, answer)
    device = up.device
    with pretended_gpu("megatron") as gpu:
        up.device = gpu.device
        try:
            answer["refused"] += refused(up, name)
            return watch(up, gpu, name, answer)
        finally:
            up.device = device


def in_a_group(name):
    """Let the ranks of one site answer, on GPUs of which no other site has used the context."""
    if torch.cuda.device_count() < RANKS[name]:
        pytest.skip(f"needs {RANKS[name]} GPUs")
    with ranks(RANKS[name], begin, device="cuda", seconds=200) as group:
        return group.run(observe, name)


@pytest.fixture(scope="module")
def answers(request, figure):
    """Ask the sites that the selected tests need; give what the ranks of a site answer."""
    load()  # before ranks are forked
    names = list(dict.fromkeys(item.callspec.params["site"] for item in request.session.items))
    with contextlib.ExitStack() as stack:
        many, one = (stack.enter_context(concurrent.futures.ThreadPoolExecutor(n)) for n in (processes(), 1))
        if TARGET.executed:
            asked = {name: (many if RANKS[name] == 1 else one).submit(in_a_group, name) for name in names}
        else:
            groups = {count: stack.enter_context(ranks(count, begin)) for count in (2, 4)}
            here = begin(Rank(0, 1, "cpu"))
            ask = {
                name: groups[count].run if (count := RANKS[name]) > 1 else lambda *x: [x[0](here, x[1])]
                for name in names
            }
            asked = {name: one.submit(ask[name], observe, name) for name in names}
        yield lambda site: asked[site].result()
        done = {name: future for name, future in asked.items() if not future.cancel()}  # -x leaves some that wait
        found = {name: future.result() for name, future in done.items() if not future.exception()}
    found = {name: x for name, x in found.items() if all(y.get("calls") for y in x)}
    stopped = {name: x for name, x in found.items() if any(y["stuck"] for y in x)}
    lines = {line for x in stopped.values() for y in x for line in y["waits"]}
    counts = {"lines_that_stop_a_capture": lines, "calls_that_stop_a_capture": stopped, "calls_judged": found}
    for name, each in counts.items():
        figure(name, len(each), name.partition("_")[0])


def asked(answers, site):
    """Return what the ranks of a site answer; nothing is judged where the tree has no such function."""
    found = answers(site)
    if not all(x.get("calls", 1) for x in found):
        pytest.skip("this tree has no such function")
    return found


def assert_ran(found):
    """Fail where a rank's call raised in eager mode."""
    raised = [x["raised"] for x in found if "raised" in x]
    assert not raised, raised[0]


REFUSING = ("packed_positions", "packed_reorder", "indexer_layout", "varlen-whole", "loss_scale-given", "rope")
REFUSING += ("reported-position_ids", *(name for name in SITES if name.endswith(("equal_lengths", "uneven"))))


@pytest.mark.control
@pytest.mark.parametrize("site", SITES)
def test_eager_mode_is_right(answers, output, figure, site):
    found = asked(answers, site)
    assert_ran(found)
    exact = not TARGET.executed or not {"attention", "cudnn_backward"} & {*site.split("-")}  # these add by atomics
    digest = hashlib.sha256(b"".join(x["sha256"] for x in found)).digest()
    output(site, torch.frombuffer(bytearray(digest), dtype=torch.uint8), must_match=exact)
    figure(f"waits.{site}", sorted({y for x in found for y in x["waits"]}), "lines that wait in eager mode")
    error = max(x["error"] for x in found)
    assert error <= 1, f"the largest error of {found[0]['calls']} calls is {error:.2g} times the tolerance"


@pytest.mark.control
@pytest.mark.parametrize("site", REFUSING)
def test_wrong_input_is_refused(answers, site):
    found = asked(answers, site)
    if not any(x["refused"] for x in found):
        pytest.skip("this tree takes such input")
    wrong = {(rank, text) for rank, x in enumerate(found) for text in x["refused"] if text}
    assert not wrong, f"by rank: {sorted(wrong)}"


@pytest.mark.control
@pytest.mark.parametrize("site", HOST)
def test_tensors_on_the_host_are_right(answers, site):
    for found in asked(answers, site):
        assert not isinstance(found["host"], str), found["host"]
        assert found["host"] <= 1, f"the error is {found['host']:.2g} times the tolerance"


@pytest.mark.defect
@pytest.mark.parametrize("site", SITES)
def test_every_call_is_captured_and_replayed_with_other_values(answers, site):
    found = asked(answers, site)
    assert_ran(found)
    stuck = sorted({y for x in found for y in x["stuck"]})
    assert not stuck, f"the capture stops at {', '.join(stuck)}"
    stale = max(x["stale"] for x in found)
    assert stale <= 1, f"the error of a replay is {stale:.2g} times the tolerance"
