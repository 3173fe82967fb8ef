"""mamba3_siso_bwd_kernel_dqkv computes V @ dO^T, and the causal decay on it, once for each chunk.

The contract counts in the IR that Triton's frontend emits: each tt.dot of blocks of V and dO, and each mask on its
result. It follows operands back to the kernel's parameters, so that text and names play no part. The kernel's cubin is
an output.

Right with and without the patch: what RIGHT says of the IR. The seven gradients of compute_dqkv agree with float64, in
Triton's interpreter or on a GPU of the target. Each value is written, inputs stay as they were, and results have memory
of their own. No line of compute_dqkv waits for the device.

Not judged: 26 of the kernel's 27 autotune configurations. Every launch and compilation is pinned to the other one.

Tolerances, of the largest error over the largest value: 2^-16 in float32, where sums have a few hundred terms, each
rounded to 2^-24. 2^-6 in bf16, where scores, states and results are rounded one after another, to 2^-8 at most.
"""

import math
import re
import sys
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from functools import partial, partialmethod
from itertools import accumulate, pairwise, permutations
from types import SimpleNamespace
from typing import NamedTuple
from unittest import mock

import pytest
import torch

from kit import current_target
from kit.compiled import import_below
from kit.cuda_source import in_processes
from kit.interpreter import interpret

EVIDENCE_WITHOUT_GPU = dict.fromkeys(("sm_80", "sm_90a", "sm_100a", "sm_120a"), "compiled") | {"cpu": "interpreted"}
TARGET = current_target()
RUNS = TARGET.executed or TARGET.name == "cpu"
if TARGET.name == "cpu":
    interpret()
    sys.modules["torch._dynamo"] = SimpleNamespace(disable=lambda function, *_, **__: function)  # slow to import

MODULE = "mamba_ssm.ops.triton.mamba3.mamba3_siso_bwd"
KERNEL = "mamba3_siso_bwd_kernel_dqkv"
PINNED = {"num_warps": 8, "num_stages": 1}  # one of the kernel's own configurations; its shared memory suffices
INPUTS = ("q", "k", "v", "da_cs", "da_cs_sum", "qk_dot", "SSM_States", "do")
RESULTS = ("dQ", "dK", "dV", "dADT", "dQK_dot", "dD", "d_issm_state")
FLOAT32 = ("dADT", "dQK_dot", "dD")  # whatever the inputs are
INTERPRETED_CHUNK = 16  # in float32: bf16 takes the interpreter longer
TOLERANCE = 2**-6 if TARGET.executed else 2**-16
# Tokens of each sequence, heads, heads of Q and K and their size, size of V's heads, chunk; on a GPU, the tokens, sizes
# and the chunk are four times as large. Words in a name:
# bare: no D, no gradient of the last state, none asked of the first; d_ov_state: a gradient of the last V; fused: V and
# dO are cut out of wider tensors; 16-bit D: D is in bf16; padded: the rows of da_cs and of qk_dot are cut out of longer
# ones; no last: no gradient of the last state, though one is asked of the first; strong decay: the last token of each
# sequence forgets all before it and, where packed, cu_seqlens is a column of a table.
CASES = {
    "dense B=2 S=40": ((40, 40), 2, 1, 16, 32, 16),
    "varlen S=16+0+7+17": ((16, 0, 7, 17), 2, 1, 16, 32, 16),
    "dense B=3 S=21 d_ov_state fused": ((21, 21, 21), 1, 1, 16, 16, 16),
    "varlen S=18+5 d_ov_state": ((18, 5), 4, 2, 16, 16, 16),
    "dense B=1 S=37 bare": ((37,), 3, 3, 16, 16, 16),
    "varlen S=3+19 bare": ((3, 19), 1, 1, 16, 16, 16),
    "varlen S=11+5 strong decay": ((11, 5), 2, 1, 16, 16, 16),
    "dense B=2 S=19 DV=24 16-bit D padded": ((19, 19), 2, 1, 16, 24, 16),
    "varlen S=7+20 DV=24 16-bit D padded": ((7, 20), 2, 2, 16, 24, 16),
    "dense B=1 S=18 no last": ((18,), 1, 1, 16, 16, 16),
    "varlen S=5+0+17 no last": ((5, 0, 17), 1, 1, 16, 16, 16),
}
# Cases in which the kernel is launched with RECOMPUTE_MASK=True, too, which compute_dqkv never passes.
RECOMPUTED = " RECOMPUTE_MASK=True"
RECOMPUTING = ("dense B=2 S=40", "varlen S=3+19 bare", "varlen S=11+5 strong decay")
TUNED = ("dense B=3 S=21 d_ov_state fused", "varlen S=3+19 bare")
WAITED = ("varlen d_ov_state", "varlen strong d_ov_state padded", "dense d_ov_state fused")
# What is compiled: words, a shape, and RECOMPUTE_MASK.
COMPILED = {
    "RECOMPUTE_MASK=False": ("dense", ((256, 256), 8, 1, 64, 64, 64), False),
    "RECOMPUTE_MASK=True": ("dense", ((256, 256), 8, 1, 64, 64, 64), True),
    "varlen bare": ("varlen bare", ((100, 1, 155), 6, 3, 64, 64, 64), False),
}
# Values rounded to 16 bits of which the release makes each result: what a dot takes, and what is stored in 16 bits.
ROUNDINGS = {"dQ": 2, "dK": 4, "dV": 4, "dADT": 2, "dQK_Dot": 1, "dD": 1, "d_ISSM_State": 1}
# What the IR says, right with and without the patch.
RIGHT = {
    "masked product reaches": ["dADT", "dK", "dQ"],  # and so no product hides from the count
    "product in float32 reaches": ["dADT"],  # the others are dots of it, which take it in the inputs' dtype
    "results rounded more often": {},
    "narrow integers": [],  # packed sequences may begin after more than 32,767 tokens
    "floats summed by atomics": 0,  # their order is another one in each run
    "TMA blocks out of place": [],  # of V and dO, which are cut out of wider tensors
}
# Operations that hand on a block, or a pointer to it; that do so without a rounding; and those on each element.
MOVES = {"load", "descriptor_load", "make_tensor_descriptor", "addptr", "splat", "broadcast", "trans"}
EXACT = {f"tt.{name}" for name in MOVES | {"expand_dims", "reshape"}} | {"arith.select", "arith.negf"}
ELEMENTWISE = {"arith.mulf", "arith.select", "arith.truncf", "arith.extf", "tt.trans", "tt.broadcast"}
LOADS = {"tt.load", "tt.descriptor_load"}


def short(name):
    """Return an id: "dense B=2 S=40" becomes dense-B2-S40."""
    return re.sub(r"=(?=\d)", "", name).replace("=", "-").replace(" ", "-")


# What Triton's frontend emits


class Operation(NamedTuple):
    """An operation of MLIR, such as tt.dot: its name, and the values that it takes."""

    name: str
    operands: list


def dataflow(module):
    """Return a module's operations, the one that made each value, and the values of 8 or 16 floating-point bits.

    What a loop carries is made, by "scf.yield", of its first value and of the value that the loop yields.
    """
    nodes, made, narrow = [], {}, set()
    module.walk(nodes.append)  # an operation follows what lies in it, so that a loop follows its yield
    operations = [Operation(x.get_name(), [x.get_operand(i).id() for i in range(x.get_num_operands())]) for x in nodes]
    for number, operation in enumerate(operations):
        results = [nodes[number].get_result(i) for i in range(nodes[number].get_num_results())]
        made |= {value.id(): operation for value in results}
        narrow |= {value.id() for value in results if re.search(r"(b?f16|f8\w+)>?$", str(value.get_type()))}
        if operation.name == "scf.for":
            block, ends = nodes[number - 1].get_block(), operations[number - 1].operands
            for i, pair in enumerate(zip(operation.operands[3:], ends, strict=True)):
                made[results[i].id()] = made[block.arg(i + 1).id()] = Operation("scf.yield", [*pair])
    return operations, made, narrow


def ancestors(made, value, stops=LOADS, only=None):
    """Return a value and all that it is computed from: up to operations in `stops`, or by those in `only` alone."""
    found, left = set(), [value]
    while left:
        value = left.pop()
        found.add(value)
        name, operands = made.get(value, ("", ()))
        if name in only if only else name not in stops:
            left += [x for x in operands if x not in found]
    return found


def census(module, names):
    """Count the products of V and dO in a kernel's IR, and the masks on them; tell which results they reach.

    `names` are those of the kernel's parameters. A value is told by what made it, back to the kernel's parameters.
    """
    function, (operations, made, narrow) = module.get_function(module.get_entry_func_name()), dataflow(module)
    parameters = {function.args(i).id(): name for i, name in enumerate(names)}

    def origin(value):  # the parameter that a block was loaded from
        name, operands = made.get(value, ("", ()))
        return origin(operands[0]) if name.removeprefix("tt.") in MOVES else parameters.get(value, "")

    def results_of(values, stops=LOADS):
        return sorted({place for place, x in stored if ancestors(made, x, stops) & values})

    by_name = defaultdict(set)
    for value, operation in made.items():
        by_name[operation.name].add(value)
    products = {x for x in by_name["tt.dot"] if {origin(y) for y in made[x].operands[:2]} == {"V", "dO"}}
    element = {x: ancestors(made, x, only=ELEMENTWISE) for x in made}
    factors = [(x, a, b) for x in by_name["arith.mulf"] for a, b in permutations(element[y] for y in made[x].operands)]
    decayed = {x for x, a, b in factors if a & products and b & by_name["math.exp2"] and not b & products}
    selects = by_name["arith.select"]
    masked = {x for x in decayed | selects if element[x] & decayed and element[x] & selects}
    stores = [each.operands for each in operations if each.name in ("tt.store", "tt.descriptor_store")]
    stored = [(origin(place), x) for place, *values in stores for x in values]
    loaded = set().union(*(by_name[name] for name in LOADS))
    rounded = {x for x in narrow if made[x].name not in EXACT and ancestors(made, x) & loaded}  # no constants
    roundings = defaultdict(set)
    for place, x in stored:
        roundings[place] |= ancestors(made, x) & rounded
    more = {place: len(values) for place, values in roundings.items() if len(values) > ROUNDINGS.get(place, 0)}
    described = {origin(each.operands[0]) for each in operations if each.name == "tt.make_tensor_descriptor"}
    found = {"products": len(products), "masks": len(masked), "described": described}
    found |= {"masked product reaches": results_of(masked), "results rounded more often": more}
    found["product in float32 reaches"] = results_of(products, LOADS | {"arith.truncf"})
    found["narrow integers"] = sorted(set(re.findall(r"(?<!\w)(?:\d+x)*(i(?:8|16))\b", str(module))))
    return found | {"floats summed by atomics": len(re.findall(r"tt\.atomic_rmw fadd", str(module)))}


def compiled(target):
    """In a process of its own: compile the kernel as compute_dqkv launches it, for "sm_90a" or another name.

    Return, by mode, the counts or the refusal.
    """
    from triton._C.libtriton import ir
    from triton.backends.compiler import GPUTarget
    from triton.compiler import CompilationError, make_backend
    from triton.runtime import driver

    gpu, context = GPUTarget("cuda", int(target.strip("sm_a")), 32), ir.context()
    active = mock.Mock(get_current_target=lambda: gpu, get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    ir.load_dialects(context)
    make_backend(gpu).load_dialects(context)
    module, found = import_below(MODULE), {}
    kernel = getattr(module, KERNEL).fn
    for mode, (words, shape, recompute) in COMPILED.items():
        passed, named, _ = problem(f"{words} fused", shape, "cpu")
        with mock.patch.object(torch.Tensor, "is_cuda", new=True), mock.patch.object(module, KERNEL) as launched:
            module.compute_dqkv(*passed, **named)
        passed, named = launched.__getitem__.return_value.call_args
        try:
            with mock.patch.object(driver, "_active", active):
                binary = kernel.warmup(*passed, grid=(1,), **named | PINNED | {"RECOMPUTE_MASK": recompute})
        except (CompilationError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PassManager::run failed" not in str(error):
                raise
            found[mode] = {"refused": str(error)[-300:]}
            continue
        [source] = [path for name, path in binary.metadata_group.items() if name.endswith(".source")]  # before any pass
        names = [name for name, kind in binary.src.signature.items() if kind != "constexpr"]
        emitted = census(ir.parse_mlir_module(source, context), names)
        tensors = dict(zip(kernel.arg_names, passed, strict=False))
        described = sorted(emitted["described"] & tensors.keys())
        emitted["TMA blocks out of place"] = [x for x in described if not describable(tensors[x])]
        found[mode] = emitted | {"cubin": binary.asm["cubin"]}
    return found


@pytest.fixture(scope="module", autouse=True)
def compiling():
    """Compile beside the tests that compute; the function given waits for the counts."""
    architecture = "sm_90a" if TARGET.name == "cpu" else TARGET.name
    variables = {"REPRODUCER_TARGET": architecture, "TRITON_INTERPRET": "0"}
    variables["TRITON_DISABLE_LINE_INFO"] = "1"  # code that no line number changes
    with ThreadPoolExecutor(1) as thread:
        answer = thread.submit(in_processes, compiled, [(architecture,)], variables)
        yield lambda: answer.result()[0]


@pytest.fixture(params=COMPILED, ids=short)
def mode(request):
    return request.param


@pytest.fixture
def emitted(compiling, mode):
    found = compiling()[mode]
    assert "refused" not in found, found["refused"]
    return found


# What compute_dqkv computes


def recurrence(inputs):
    """Give o_t = a_t S_(t-1) q_t + (D + qk_dot_t) v_t and the last S_t = a_t S_(t-1) + v_t k_t^T, a_t = exp(adt_t)."""
    q, k, v, adt, qk_dot, D, state = inputs
    decay = adt.cumsum(-1)
    not_before = adt.new_ones(adt.shape[-1], adt.shape[-1]).triu().bool()
    between = (decay[..., None] - decay[:, None]).masked_fill(not_before, -math.inf).exp()
    out = (q @ k.mT * between) @ v + decay.exp()[..., None] * (q @ state.mT) + (D[:, None] + qk_dot)[..., None] * v
    whole = adt.sum(-1, keepdim=True)  # 0 for a sequence of no tokens
    return out, whole[..., None].exp() * state + (v * (whole - decay).exp()[..., None]).mT @ k


def scaled(case):
    """Return a case's shape: larger on a GPU, which has no tiles of 16 by 16 in bf16, and more time."""
    (lengths, H, G, *sizes), n = CASES[case], 4 if TARGET.executed else 1
    return tuple(n * length for length in lengths), H, G, *(n * size for size in sizes)


def cut_out(x, before=0, after=0):
    """Return what equals x, cut out of a tensor with so many more elements in its last dimension."""
    wide = torch.nn.functional.pad(x, (before, after))
    return wide[..., before : before + x.shape[-1]]


def describable(x):
    """Whether blocks of a tensor may be described to the TMA unit: rows of one stride, all at 16 bytes."""
    rows = [stride for stride, size in zip(x.stride()[:-1], x.shape, strict=False) if size > 1]
    return x.stride(-1) == 1 and not any(n % 16 for n in [x.data_ptr(), *(n * x.itemsize for n in rows)])


def problem(case, shape, device):  # noqa: C901 - each word of a name is a line
    """Make the arguments of compute_dqkv, and its right results: the derivatives of the recurrence in float64."""
    (lengths, H, G, DQK, DV, chunk), random = shape, torch.Generator().manual_seed(4)
    varlen, N, T = "varlen" in case, len(lengths), sum(lengths)
    sizes = [(G, T, DQK)] * 2 + [(H, T, DV)] * 2 + [(H, T)] * 2 + [(H,)] + [(N, H, DV, DQK)] * 2 + [(N, H, DV)]
    q, k, v, do, adt, qk_dot, D, first, d_last, d_v = (torch.randn(x, generator=random).to(device) for x in sizes)
    D *= "bare" not in case
    d_last *= "bare" not in case and "no last" not in case
    D = D.bfloat16().to(D.dtype) if "16-bit D" in case else D
    dtype = torch.float32 if chunk == INTERPRETED_CHUNK else torch.bfloat16
    q, k, v, do, adt = *(x.to(dtype) * x.shape[-1] ** -0.5 for x in (q, k, v, do)), -0.1 * adt.abs()
    ends, grads, da_cs = [0, *accumulate(lengths)], [], torch.zeros_like(adt)
    if "strong" in case:
        adt[:, torch.tensor(ends[1:]) - 1] = -200.0
    *tokens, d_out = (x.double().repeat_interleave(H // x.shape[0], 0) for x in (q, k, v, adt, qk_dot, do))
    states = d_out.new_zeros(N + T // chunk if varlen else N * -(-lengths[0] // chunk), H, DV, DQK)
    sums = adt.new_zeros(H, len(states))
    for n, (start, end) in enumerate(pairwise(ends)):
        inputs = [*(x[:, start:end] for x in tokens), D.double(), first[n].double()]
        out, last = recurrence([x.requires_grad_() for x in inputs])
        loss = (out * d_out[:, start:end]).sum() + (last * d_last[n]).sum()
        grads.append(torch.autograd.grad(loss, inputs))
        *fixed, state = (x.detach() for x in inputs)
        place = n + start // chunk if varlen else n * len(states) // N
        for begin in range(0, end - start, chunk):  # what the forward saves of each chunk
            part = [x[:, begin : begin + chunk] for x in fixed[:5]]
            decay, states[place] = part[3].cumsum(-1) / math.log(2), state
            da_cs[:, start + begin :][:, : decay.shape[-1]], sums[:, place] = decay, decay[:, -1]
            state, place = recurrence([*part, fixed[5], state])[1], place + 1

    def rows(x):  # [H, T, size] to [B, S, H, size], [H, T] to [B, H, S]
        return x.unflatten(1, (1 if varlen else N, -1)).movedim(0, x.dim() - 1).contiguous()

    *per_token, d_D, d_first = zip(*grads, strict=True)
    right = [*(rows(torch.cat(x, 1)) for x in per_token), sum(d_D), torch.stack(d_first)]
    states = states.to(dtype).unflatten(0, (1 if varlen else N, -1)).permute(0, 2, 3, 1, 4).flatten(3)
    passed = [*map(rows, (q, k, v, da_cs, sums, qk_dot)), states, rows(do)]
    named = {"d_ossm_state": d_last, "D": D, "chunk_size": chunk, "has_input_state": True}
    if varlen:
        named["Cu_Seqlens"] = torch.tensor(ends, dtype=torch.int32, device=device)
    if "d_ov_state" in case:
        named["d_ov_state"] = d_v
        right[2][(0, torch.tensor(ends[1:]) - 1) if varlen else (slice(None), -1)] += d_v
    if "bare" in case:
        right[5:] = None, None
        named |= {"D": None, "has_input_state": False}
    if "bare" in case or "no last" in case:
        named["d_ossm_state"] = None
    if "16-bit D" in case:
        named["D"] = named["D"].bfloat16()
    if "fused" in case and device == "cpu":  # rows and an offset that are no multiple of 16 bytes: a GPU may trap
        passed[2::5] = (cut_out(x.flatten(2), before=1).unflatten(-1, x.shape[2:]) for x in passed[2::5])
    if "padded" in case:
        passed[3], passed[5] = cut_out(passed[3], after=1), cut_out(passed[5], after=3)
    if "strong" in case and varlen:
        named["Cu_Seqlens"] = cut_out(named["Cu_Seqlens"][:, None], after=1)[:, 0]
    return passed, named, right


@pytest.fixture(scope="module")
def bwd():
    """Give the module under test. Its kernel has one configuration, and CPU tensors pass for a GPU's."""
    torch.set_num_threads(1)  # the matrices are too small for more
    module = import_below(MODULE)
    kernel = getattr(module, KERNEL)
    kernel.configs = [next(each for each in kernel.configs if PINNED.items() <= each.all_kwargs().items())]
    kernel.do_bench = lambda launch_it, quantiles: [launch_it() or 1.0 for _ in quantiles]  # one launch, untimed
    with mock.patch.object(torch.Tensor, "is_cuda", new=True):
        yield module


def without_values(x):
    """Return a tensor of the same form, which has no values that the host could wait for."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta") if torch.is_tensor(x) else x


def not_to_the_host(x, to, *where, **named):
    assert "cpu" not in [each for each in (*where, *named.values()) if isinstance(each, str)], "a copy to the host"
    return to(x, *where, **named)


class TestGradients:
    __test__ = RUNS  # where the kernel is compiled only, no gradient is judged

    @pytest.mark.control
    @pytest.mark.parametrize("case", [*CASES, *(case + RECOMPUTED for case in RECOMPUTING)], ids=short)
    def test_gradients_agree_with_float64(self, bwd, case, figure, output):
        passed, named, right = problem(case, scaled(case.removesuffix(RECOMPUTED)), TARGET.device)
        before = [(x, x.clone()) for x in (*passed, *named.values()) if torch.is_tensor(x)]
        call, run = partial(bwd.compute_dqkv, *passed, **named), getattr(bwd, KERNEL).run
        mask = {"RECOMPUTE_MASK": True} if RECOMPUTED in case else {}
        torch.set_deterministic_debug_mode("warn")  # fills what torch.empty returns with NaN
        with mock.patch.object(getattr(bwd, KERNEL), "run", lambda *given, **options: run(*given, **options | mask)):
            results = call()
        torch.set_deterministic_debug_mode("default")
        assert [x if x is None else x.shape for x in results] == [x if x is None else x.shape for x in right]
        pairs = {name: (x, y) for name, x, y in zip(RESULTS, results, right, strict=True) if x is not None}
        for name, (x, _) in pairs.items():
            output(f"{name}, {case}", x)
        errors = {name: float((x.double() - y).abs().max() / y.abs().max()) for name, (x, y) in pairs.items()}
        figure(f"largest error, {case}", max(errors.values()))
        assert all(x <= TOLERANCE for x in errors.values()), f"tolerance {TOLERANCE:.1e}, errors {errors}"
        assert [name for name, (x, _) in pairs.items() if name in FLOAT32 and x.dtype != torch.float32] == []
        assert [name for name, (x, _) in pairs.items() if x.untyped_storage().nbytes() != x.nbytes] == []
        assert all(torch.equal(x, y) for x, y in before), "an input was changed"

    @pytest.mark.control
    @pytest.mark.parametrize("case", TUNED, ids=short)
    def test_second_call_and_autotuning_change_no_bit(self, bwd, case):
        passed, named, _ = problem(case, scaled(case), TARGET.device)
        kernel = getattr(bwd, KERNEL)
        with mock.patch.multiple(kernel, configs=2 * kernel.configs, cache={}):
            tuned, again = bwd.compute_dqkv(*passed, **named), bwd.compute_dqkv(*passed, **named)
        assert [x is None for x in tuned] == [x is None for x in again]
        pairs = {name: (x, y) for name, x, y in zip(RESULTS, tuned, again, strict=True) if x is not None}
        assert [name for name, (x, y) in pairs.items() if not torch.equal(x, y)] == []
        assert [name for name, (x, y) in pairs.items() if x.data_ptr() == y.data_ptr()] == []  # the caller holds both

    @pytest.mark.control
    @pytest.mark.parametrize("layout", ["dense", "varlen"])
    def test_autotuner_keeps_one_entry(self, bwd, layout):
        kernel, two = getattr(bwd, KERNEL), (18, 18) if layout == "dense" else (3, 30)
        with mock.patch.multiple(kernel, configs=2 * kernel.configs, cache={}), mock.patch.object(kernel.fn, "run"):
            for lengths, heads in (((18,), 2), (two, 4), ((40,), 6)):
                passed, named, _ = problem(layout, (lengths, heads, 2, 16, 16, 16), TARGET.device)
                bwd.compute_dqkv(*passed, **named)
            assert len(kernel.cache) == 1, f"{len(kernel.cache)} entries for three lengths, batches and heads"

    @pytest.mark.control
    @pytest.mark.parametrize("case", WAITED, ids=short)
    def test_no_line_waits_for_the_device(self, bwd, case):
        passed, named, _ = problem(case, ((18,) if "dense" in case else (18, 5), 4, 2, 16, 16, 16), "cpu")
        passed, named = map(without_values, passed), {name: without_values(x) for name, x in named.items()}
        to = partialmethod(not_to_the_host, torch.Tensor.to)
        host = mock.patch.multiple(torch.Tensor, cpu=partialmethod(not_to_the_host, None, "cpu"), to=to)
        with host, mock.patch.object(bwd, KERNEL), torch.device("meta"):
            bwd.compute_dqkv(*passed, **named)

    @pytest.mark.control
    @pytest.mark.parametrize(
        "wrong", [*INPUTS, "d_ossm_state", "d_ov_state", "D", "two batches", "3 heads of q and k for 4"], ids=short
    )
    def test_shapes_that_do_not_agree_are_refused(self, bwd, wrong):
        passed, named, _ = problem("varlen d_ov_state", ((18, 5), 4, 2, 16, 16, 16), TARGET.device)
        given = dict(zip(INPUTS, passed, strict=True)) | named
        if wrong == "two batches":
            given |= {name: torch.cat([given[name]] * 2) for name in INPUTS}
        elif wrong in given:
            given[wrong] = torch.cat([given[wrong], given[wrong][:1]])
        else:
            given |= {name: torch.cat([given[name], given[name][:, :, :1]], 2) for name in "qk"}
        with mock.patch.object(bwd, KERNEL) as launched, pytest.raises((AssertionError, ValueError)):
            bwd.compute_dqkv(**given)
        assert not launched.mock_calls


# What the IR says


@pytest.mark.defect
def test_product_of_v_and_do_is_computed_once(emitted, mode, figure, output):
    figure(f"{mode} products before CSE", emitted["products"])
    if TARGET.name != "cpu":
        output(f"{mode} cubin", torch.frombuffer(bytearray(emitted["cubin"]), dtype=torch.uint8))
    assert emitted["products"] <= 1, f"{emitted['products']} products of V and dO"


@pytest.mark.defect
def test_decay_mask_is_applied_once(emitted):
    assert emitted["masks"] <= 1, f"{emitted['masks']} masks on products of V and dO"


@pytest.mark.control
@pytest.mark.parametrize("what", RIGHT, ids=short)
def test_ir_is_right(emitted, what):
    assert emitted[what] == RIGHT[what]
