"""Megatron's fused sparse MLA takes every latent and RoPE dimension that its kernels can have.

`fused_sparse_mla_absorbed`, the hook before it, and the interfaces of forward and backward hand both dimensions to the
kernels. They decline (None) or refuse (an exception) what the kernels cannot have, before they ask for a kernel. The
first time that a hook declines is a warning.

Without a GPU, a float32 stand-in replaces each kernel and refuses the shapes, dtypes and layouts that the kernel
refuses. The builders run up to tilelang's program ("cpu"), or are lowered for the target ("compiled"). On a GPU, all
kernels are compiled, launched and compared with float64, and the memory of the user's path is measured.

Not judged: the results of a program that is not launched; convergence; tilelang releases other than 0.1.8. One
exception: from 0.1.11 on, the forward lacks a barrier below 64 heads, and such a shape must be declined there.

Tolerance: 0.01, relative, in the Frobenius norm. P, dP and the results are rounded to bfloat16 (2**-9 each). A wrong
row is 0.06.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
import itertools
import logging
import os
import sys
import types
from pathlib import Path
from typing import NamedTuple
from unittest import mock

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.checkpoint import checkpoint

from kit import current_target
from kit.autograd import CHANGED_IN_PLACE, unless_refused
from kit.capture import host_waits, peak_memory
from kit.cuda_source import attempt, in_processes, lower, options_of, remembered
from kit.errors import relative_error
from kit.sparse_attention import attend, bare_megatron, counted, marked, name_of, share_compiled_kernels, stand_in

TARGET = current_target()
EVIDENCE_WITHOUT_GPU = "traced" if TARGET.name == "cpu" else "compiled"
VARIANT = "megatron.core.transformer.experimental_attention_variant"
FILES = {"forward": "tilelang_sparse_mla_fwd", "backward": "tilelang_sparse_mla_bwd", "function": "sparse_mla"}
FILES |= {"dispatcher": "tilelang_dsa"}
KERNELS = {"bwd": ("D", "D_tail"), "sparse_mla_fwd": ("dim", "tail_dim")}  # the builders, and their dimensions
KERNELS |= {"preprocess": ("D",), "postprocess": ("D", "D_tail")}
DEEPSEEK = (512, 64, 64)  # latent dimension, RoPE dimension, heads
SHAPES = (DEEPSEEK, (64, 64, 16), (192, 32, 64))  # the reported ones
SCALE, TOP_K, LENGTH, LONG, TOLERANCE = 0.1, 128, 256, 4096, 0.01
BUCKET, BLOCK = "MCORE_DSA_TILELANG_SEQ_BUCKET", "MCORE_DSA_TILELANG_BWD_MAX_BLOCK_H"
WAYS = ("forward", "forward_3d", "backward", "backward_3d")  # the interfaces, with or without a batch dimension
H200, BLACKWELL = 232448, 101376  # bytes of shared memory that a block can have there; the second: sm_120
CONFIGURED = (  # latent, RoPE, heads (5 are padded to 16, 128 are two blocks of 64), top-k, softmax scale
    *((*shape, TOP_K, SCALE) for shape in SHAPES),
    (64, 96, 16, 64, None),  # a RoPE dimension above the latent one
    (512, 64, 5, 64, None),  # one over the root of the width
    (64, 32, 128, 192, 0.125),
)
LAUNCHED = CONFIGURED[:4]  # on a GPU, where each shape is compiled for a minute


class Case(NamedTuple):
    """One call: of the dispatcher, or of the interfaces with or without a batch dimension."""

    kernel: tuple
    entry: str = "dispatch"
    batch: int = 1
    lengths: tuple = (3, 70)  # queries, keys: multiples or not of the bucket
    indices: str = "int64"  # or int32 with some -1, or rows of -1 alone; no key twice
    layout: str = "dense"
    frozen: str = "none"  # what needs no gradient
    bucket: int | None = 16  # MCORE_DSA_TILELANG_SEQ_BUCKET, or its default, 256


FORMS = (  # of each kernel
    ("dispatch", 2, (4, 4), "some", "strided", "none", None),
    ("dispatch", 1, (3, 70), "int64", "dense", "query", 16),
    ("dispatch", 2, (6, 33), "rows", "dense", "key", 16),
    ("interface", 2, (3, 70), "rows", "dense", "none", 16),
    ("interface_3d", 1, (6, 33), "some", "dense", "none", None),
)
# The interfaces know no autograd, pad no heads, and take contiguous int32.
CASES = [Case(one, *form) for one in CONFIGURED for form in FORMS if one[2] >= 16 or "interface" not in form[0]]
# Shapes that cannot be had: tilelang 0.1.8 lowers one of the kernels with none of these (data/dims.md), a dimension is
# none, or the heads would need padding that the kernels do not have.
REFUSED = ((96, 32, 16), (64, 48, 64), (64, 16, 16), (64, 0, 16))  # by the interfaces, too
DECLINED = (*REFUSED, (32, 32, 16), (0, 64, 16), (-64, 128, 16), (64, 64, 24), (192, 32, 96), (64, 64, 192))
# Bytes of shared memory that ptxas names for the forward kernel of a shape (data/dims.md); one byte less is too little.
NEEDED = {(512, 64, 64): 231424, (64, 64, 16): 40960, (64, 64, 5): 40960, (192, 32, 64): 96256, (320, 32, 32): 118784}
NEEDED |= {(192, 32, 128): 96256}  # two blocks of 64 heads
ASKED = [  # entry, shape, groups, bytes of shared memory that a block can have, and whether a kernel is asked for
    *(("dispatch", shape, 1, H200, False) for shape in DECLINED),
    *((way, shape, 1, H200, False) for way in WAYS for shape in REFUSED),
    *(("dispatch", shape, 1, size - less, not less) for shape, size in NEEDED.items() for less in (0, 1)),
    *((way, (192, 32, 64), 1, size, size == 96256) for way in WAYS for size in (96256, 96255)),
    *((way, (64, 64, 32), 2, 40960, True) for way in WAYS),
    ("forward", (64, 64, 5), 1, 40959, False),
    ("forward", (512, 96, 40), 1, H200, False),  # a block of heads is rounded up: it takes what 64 heads do
    ("forward", (256, 64, 20), 1, BLACKWELL, False),
    ("dispatch", (512, 64, 64), 1, BLACKWELL, False),
    ("dispatch", (512, 96, 64), 1, H200, False),  # the launch fails there with 64 heads, and works with 16
    ("dispatch", (512, 96, 16), 1, H200, True),
]
RELEASES = (  # tilelang's, a shape, and whether the shape is right there as it is
    ("0.1.9", (64, 64, 16), True),
    ("0.1.9.post1", (64, 64, 16), True),
    ("0.1.11rc1", (64, 64, 16), False),
    ("0.1.15", (512, 96, 16), False),  # the same places and barriers as 64 + 64, which is wrong
    ("0.1.11", (512, 32, 32), False),
    ("0.1.13", (448, 128, 16), False),
    ("0.1.15", (192, 32, 64), True),
    ("0.1.15", (512, 64, 16), True),
)


class AskedError(Exception):
    """Raised in a kernel's place, where only what is asked for counts."""


def dims(shape) -> str:
    """Name a shape's dimensions."""
    return f"{shape[0]}+{shape[1]}"


def is_known(shape) -> bool:
    """Say whether a shape has the dimensions that the release takes."""
    return tuple(shape[:2]) == DEEPSEEK[:2]


def each(shapes, name=dims):
    """Parametrise a test by shapes; those of DeepSeek's dimensions are controls."""
    return pytest.mark.parametrize("shape", [marked(one, name=name(one), control=is_known(one)) for one in shapes])


@pytest.fixture(scope="module")
def up():
    """Import upstream, and tilelang first: Megatron swallows what goes wrong there."""
    return load()


def load():
    """Import what is judged."""
    torch.set_num_threads(1)  # what runs on the CPU is small, and other lanes want the other cores
    modules = {name: importlib.import_module(name) for name in ("tilelang", "tilelang.language")}
    if TARGET.executed:  # with all of Megatron, which its unfused path needs
        share_compiled_kernels()
    else:
        bare_megatron()
    modules |= {key: importlib.import_module(f"{VARIANT}.ops.{name}") for key, name in FILES.items()}
    modules["hook"] = importlib.import_module(f"{VARIANT}.dsa_tilelang_kernels")
    return types.SimpleNamespace(**modules)


@contextlib.contextmanager
def kernels(up, note=lambda *_: None):
    """Let stand-ins take the place of the kernels; note(name, arguments) is told of each build."""

    def build(name, signature, *args, **kwargs):
        bound = signature.bind(*args, **kwargs)
        note(name, dict(bound.arguments))
        bound.apply_defaults()
        return functools.partial(stand_in, name, dict(bound.arguments))

    with contextlib.ExitStack() as stack:
        for module in (up.forward, up.backward):
            found = (name for name in KERNELS if hasattr(module, name))
            builders = {name: functools.partial(build, name, getattr(module, name).signature) for name in found}
            stack.enter_context(mock.patch.multiple(module, **builders))
            for cache in [one for one in vars(module).values() if isinstance(one, collections.OrderedDict)]:
                stack.enter_context(mock.patch.dict(cache, clear=True))  # what was there is put back
        yield


def draw(case, device="cpu"):
    """Make query, key [S, B, heads, dims], distinct top-k indices [B, S, K], and dO, each as its factor says."""
    latent, rope, heads, top_k, _ = case.kernel
    (length, keys), random = case.lengths, torch.Generator().manual_seed(11 + case.batch)
    apart = 2 if case.layout == "strided" else 1
    query = torch.randn(case.batch, length, heads, apart * (latent + rope), generator=random).bfloat16()
    key = torch.randn(keys, case.batch, apart, latent + rope, generator=random).bfloat16()
    d_out = torch.randn(latent, heads, case.batch, length, generator=random).bfloat16().permute(3, 2, 1, 0)
    order = torch.rand(case.batch, length, keys, generator=random).topk(min(top_k, keys)).indices
    indices = torch.nn.functional.pad(order, (0, top_k - order.shape[-1]), value=-1)
    indices = indices.flip(-1) if case.indices == "rows" else indices  # -1 comes first, too
    if case.indices != "int64":
        indices[torch.rand(indices.shape, generator=random) < 0.2] = -1
        indices = indices.int()
    if case.indices == "rows":
        indices[-1, 1::3] = -1
    query = query[..., ::apart].transpose(0, 1)
    query = query if case.layout == "strided" else query.contiguous()
    return [x.to(device) for x in (query, key[:, :, :1], indices, d_out)]


def leaves(case, *pair):
    """Return query and key, of which one may be frozen; the others need gradients."""
    return [x.detach().requires_grad_(case.frozen != name) for name, x in zip(("query", "key"), pair, strict=True)]


def prepared(shape, **factors):
    """Make the case of a shape, query and key that may need gradients, indices and dO."""
    case = Case((*shape, 64, SCALE), **factors)
    query, key, indices, d_out = draw(case)
    return case, leaves(case, query, key), indices, d_out


def exactly(case, inputs):
    """Return in float64 the output, the gradients that are wanted, and the log-sum-exp."""
    query, key, indices, d_out = (x.double() if x.is_floating_point() else x.long() for x in inputs)
    pair = leaves(case, query, key)
    both = pair[0].transpose(0, 1), pair[1][:, :, 0].transpose(0, 1)
    found = attend(*both, counted(indices, len(key)), case.kernel[4], case.kernel[0])
    out, sums = (x.transpose(0, 1) for x in found)
    wanted = [x for x in pair if x.requires_grad]
    return out.detach(), [*torch.autograd.grad(out, wanted, d_out)], sums.detach()


def assert_close(found, wanted, latent):
    """Assert that bfloat16 tensors are right; latent and RoPE columns of a gradient are compared apart."""
    errors = {}
    for index, (x, y) in enumerate(zip(found, wanted, strict=True)):
        dtype = torch.float32 if y.ndim == 3 else torch.bfloat16  # the log-sum-exp, or any other
        assert x is not None, f"result {index} is None"
        assert (x.shape, x.dtype) == (y.shape, dtype), f"result {index} is {[*x.shape]} {x.dtype}, not {[*y.shape]}"
        parts = [slice(latent), slice(latent, None)] if y.ndim == 4 and y.shape[-1] > latent else [slice(None)]
        errors |= {(index, n): relative_error(x[..., part], y[..., part]) for n, part in enumerate(parts)}
    wrong = {name: error for name, error in errors.items() if not error <= TOLERANCE}  # a nan is wrong, too
    assert not wrong, f"relative errors by result and part {wrong}, tolerance {TOLERANCE}"


def differentiate(out, wanted, d_out):
    """Return the gradients of out, and keep its graph; fail where there is none."""
    assert out.requires_grad, "the output has no graph"
    return torch.autograd.grad(out, wanted, d_out, retain_graph=True, allow_unused=True)


def enter(up, case, query, key, indices):
    """Call the dispatcher."""
    out = up.dispatcher.fused_sparse_mla_absorbed(query, key, indices, case.kernel[4], case.kernel[0])
    assert out is not None, "the answer is None"
    return out


def applied(up, *arguments):
    """Call SparseMLA.apply."""
    try:
        return up.function.SparseMLA.apply(*arguments)
    except TypeError as error:  # an argument is missing: the call does not get as far as upstream's own lines
        raise AssertionError(f"SparseMLA.apply raises {error}") from error


def run_interfaces(up, case, inputs):
    """Call the interfaces of forward and backward; return out, dQ, dKV and the log-sum-exp as the dispatcher's."""
    latent, *_, scale = case.kernel
    query, key, d_out = (inputs[place].transpose(0, 1).contiguous() for place in (0, 1, 3))
    operands = query, key, inputs[2][:, :, None].contiguous(), d_out
    flat = case.entry == "interface_3d"
    query, key, indices, d_out = (x[0].contiguous() for x in operands) if flat else operands
    out, sums = up.forward.sparse_mla_fwd_interface(query, key, indices, sm_scale=scale, d_v=latent)
    extra = (None, up.backward.sparse_mla_delta(out, d_out)) if case.bucket else (out, None)
    found = up.backward.sparse_mla_bwd(query, key, extra[0], d_out, indices, sums, sm_scale=scale, delta=extra[1])
    return [(x[None] if flat else x).transpose(0, 1) for x in (out, *found, sums)]


def run_dispatcher(up, case, inputs):
    """Call the dispatcher, and backward twice, which shows that nothing was used up; return output and gradients."""
    kept, (query, key, indices, d_out) = [], inputs
    pair = leaves(case, query, key)

    def keep(x):
        kept.append(x.numel() if x.is_floating_point() else 0)
        return x.clone()  # as a hook that moves it elsewhere gives it back

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x.clone()):
        out = enter(up, case, *pair, indices)
    wanted = [x for x in pair if x.requires_grad]
    found = [x for _ in range(2) for x in differentiate(out, wanted, d_out)]
    # Query and key pass through the hooks, with 16 heads or more. The output does not: backward computes it again.
    whole = query.numel() * max(1, 16 / query.shape[-2]) + key.numel()
    assert query.numel() + key.numel() <= sum(kept) <= whole, f"{sum(kept)} elements are saved as autograd saves them"
    return [out.detach(), *found]


@functools.cache
def asked_for(kernel) -> dict:
    """Return what the dispatcher builds for a kernel's dimensions, by builder; of the release little or nothing."""
    up, asked, case = load(), {}, Case(kernel, *FORMS[0])
    query, key, indices, d_out = draw(case)
    failures = AssertionError, RuntimeError, TypeError, ValueError  # of calls that are judged apart
    with contextlib.suppress(*failures), kernels(up, asked.__setitem__):
        enter(up, case, *leaves(case, query, key), indices).backward(d_out)
    return asked


# What reaches the kernels, and comes back


@pytest.fixture(scope="module")
def reached(figure):
    """Say for each reported shape what the dispatcher asks for."""
    found = {shape: asked_for((*shape, TOP_K, SCALE)) for shape in SHAPES}
    figure("other_dimensions_fused", sum("bwd" in found[shape] for shape in SHAPES[1:]), "of 2")
    return found


@each(SHAPES, lambda shape: f"{dims(shape)}-{shape[2]}heads")
def test_dispatcher_hands_its_dimensions_to_each_kernel(reached, shape):
    asked = reached[shape]
    found = {name: [asked.get(name, {}).get(each) for each in names] for name, names in KERNELS.items()}
    assert found == {name: [*shape[: len(names)]] for name, names in KERNELS.items()}


@pytest.mark.parametrize(
    ("case", "launched"),
    [
        marked(one, launched, name=name_of(one) + "-launched" * launched, control=is_known(one.kernel))
        for launched in ((False, True) if TARGET.executed else (False,))
        for one in CASES
        if not launched or one.kernel in LAUNCHED
    ],
)
def test_output_and_gradients_are_right(up, request, case, launched):
    if launched:
        request.getfixturevalue("built")  # many kernels at once: one after another takes minutes
    inputs = draw(case, TARGET.device if launched else "cpu")
    out, gradients, sums = exactly(case, inputs)
    bucket = mock.patch.dict(os.environ, {} if case.bucket is None else {BUCKET: str(case.bucket)})
    with bucket, contextlib.nullcontext() if launched else kernels(up):
        if case.entry == "dispatch":
            results, wanted = run_dispatcher(up, case, inputs), [out, *gradients, *gradients]
        else:
            results, wanted = run_interfaces(up, case, inputs), [out, *gradients, sums]
    assert_close(results, wanted, case.kernel[0])


@pytest.mark.defect
def test_two_layers_in_one_graph_keep_their_dimensions(up):
    layers = []  # of one width: nothing but its latent dimension tells a layer, or a kernel that is kept
    with kernels(up):
        for latent, rope in ((512, 64), (448, 128)):
            case, pair, indices, d_out = prepared((latent, rope, 16), bucket=None)
            layers.append((case, enter(up, case, *pair, indices), pair, d_out))
        for case, out, pair, d_out in reversed(layers):
            found, (exact, gradients, _) = differentiate(out, pair, d_out), exactly(case, draw(case))
            assert_close([out.detach(), *found], [exact, *gradients], case.kernel[0])


# What a user is told, and how the hook is called


def warned(caplog, hook, calls, *args, **kwargs):
    """Call a hook of DSAttention some times, as the first in its process; return answers, warnings, debug messages."""
    with mock.patch.dict(sys.modules), mock.patch.dict(os.environ, RANK="0"):  # else Megatron warns that it knows none
        sys.modules.pop(f"{VARIANT}.dsa_kernels", None)
        hooks = importlib.import_module(f"{VARIANT}.dsa_kernels")
        config = types.SimpleNamespace(dsa_kernel_backend="tilelang")
        answers = [getattr(hooks, hook)(*args, config=config, **kwargs) for _ in range(calls)]
    said = [x for x in caplog.records if hook in x.getMessage()]
    told = [x.getMessage() for x in said if x.levelno >= logging.WARNING]
    return answers, told, len(said) - len(told)


@pytest.mark.parametrize(
    ("shape", "warnings"),
    [
        marked((80, 64, 16), 1, name="declined", control=False),
        marked(DEEPSEEK, 0, name="taken", control=True),
        marked(SHAPES[1], 0, name="taken_64+64", control=False),
    ],
)
def test_first_decline_of_a_hook_is_a_warning(up, caplog, shape, warnings):
    names = ("query", "key", "topk_indices")
    inputs = dict(zip(names, draw(Case((*shape, 64, SCALE))), strict=False))
    inputs |= {"softmax_scale": SCALE, "v_channels": shape[0]}
    caplog.set_level(logging.DEBUG)
    with kernels(up):
        answers, told, debugged = warned(caplog, "run_fused_absorbed_sparse_attention", 3, **inputs)
    assert [x is None for x in answers] == [warnings > 0] * 3
    assert len(told) == warnings, f"{len(told)} warnings: {told[:3]}"
    assert debugged == 3 * warnings, f"{debugged} debug messages, one of each decline is upstream's"


@pytest.mark.control
@pytest.mark.parametrize("backend", ["lacks_it", "declines"])
def test_hook_before_the_separate_ones_is_no_warning(up, caplog, backend):
    """TileLang has none for indexer and attention in one. Where a backend's declines, the separate hooks are tried."""
    name = "run_fused_dsa_attention"
    hook = getattr(importlib.import_module(f"{VARIANT}.dsa_kernels"), name)
    inputs = dict.fromkeys(set(inspect.signature(hook).parameters) - {"config"})
    declining = {} if backend == "lacks_it" else {name: lambda **_: None}
    with mock.patch.dict(vars(up.hook), declining):
        assert warned(caplog, name, 2, **inputs) == ([None, None], [], 0)


@each(SHAPES)
@pytest.mark.parametrize("mode", ["no_grad", "inference_mode", "reentrant_checkpoint", "checkpoint"])
def test_every_mode_of_autograd_gives_the_same_and_the_host_waits_for_no_value(up, shape, mode):
    case, pair, indices, d_out = prepared(shape, batch=2, indices="some")
    call = functools.partial(enter, up, case)
    with kernels(up), host_waits("cpu") as waits:
        with torch.inference_mode() if mode == "inference_mode" else torch.no_grad():
            results = [call(*pair, indices)]
        # Only what was answered is checkpointed: PyTorch 2.11 keeps the hooks of a checkpoint whose function raises.
        if "checkpoint" in mode:
            again = checkpoint(call, *pair, indices, use_reentrant=mode.startswith("reentrant"))
            again.backward(d_out)
            results += [again.detach(), *(x.grad for x in pair)]
    assert not waits, f"the host waits for {waits}"
    out, gradients, _ = exactly(case, draw(case))
    assert_close(results, [out, out, *gradients][: len(results)], shape[0])


@each(SHAPES[:2])
def test_output_may_be_changed_in_place(up, shape):
    case, pair, indices, d_out = prepared(shape)
    with kernels(up):
        out = enter(up, case, *pair, indices)
        with torch.no_grad():
            out.mul_(-2)
        gradients = unless_refused(lambda: torch.autograd.grad(out, pair, d_out), CHANGED_IN_PLACE)
    if gradients:  # PyTorch may refuse, which is right, too
        assert_close(gradients, exactly(case, draw(case))[1], shape[0])


@pytest.mark.parametrize(
    ("rope", "batched"),
    [
        marked(rope, batched, name=f"512+{rope}" + "-unbatched" * (not batched), control=rope == DEEPSEEK[1])
        for rope, batched in ((64, True), (64, False), (32, True), (128, True))
    ],
)
def test_apply_alone_has_512_latent_dimensions_and_leaves_the_gradient_as_it_was(up, rope, batched):
    case = Case((512, rope, 64, 64, SCALE), indices="rows")
    query, key, indices, d_out = draw(case)
    given = [x.transpose(0, 1).contiguous() for x in (query, key, d_out)]
    given = [x if batched else x[0].contiguous() for x in (*given, indices[:, :, None].contiguous())]
    pair, d_out = [x.requires_grad_() for x in given[:2]], given[2]  # contiguous: it is the caller's own tensor
    before = d_out.clone()
    with kernels(up):
        out = applied(up, *pair, given[3], SCALE)[0]
        found = [up.forward.sparse_mla_fwd_interface(*(x.detach() for x in pair), given[3], sm_scale=SCALE)[0]]
        found += [out.detach(), *differentiate(out, pair, d_out)]
    exact, gradients, _ = exactly(case, draw(case))
    assert_close([x.transpose(0, 1) if batched else x[:, None] for x in found], [exact, exact, *gradients], 512)
    assert torch.equal(d_out, before), "backward writes into the gradient that it is given"


@pytest.mark.control
@pytest.mark.parametrize(("asked", "heads"), [(None, 32), (16, 16), (64, 64)])
def test_backward_has_blocks_of_as_many_heads_as_are_asked_for(up, asked, heads):
    built, (case, pair, indices, d_out) = {}, prepared(DEEPSEEK)
    with mock.patch.dict(os.environ, {} if asked is None else {BLOCK: str(asked)}), kernels(up, built.__setitem__):
        enter(up, case, *pair, indices).backward(d_out)
    assert built["bwd"].get("max_block_h", 32) == heads


# What is declined


def asked_first(up, entry, shape, groups=1, limit=H200):
    """Return by its name the arguments of the kernel that an entry point asks for first, on a GPU of so much memory.

    Empty: the dispatcher declines, or an interface refuses. No bucket makes 256 queries and keys longer.
    """
    (latent, rope, heads), size, asked = shape, (LENGTH,) if entry.endswith("_3d") else (1, LENGTH), {}

    def note(name, arguments):
        asked[name] = arguments
        raise AskedError

    device = types.SimpleNamespace(shared_memory_per_block_optin=limit, major=9, minor=0, name="a device")
    named = mock.patch.object(torch.cuda, "get_device_properties", return_value=device)
    with named, FakeTensorMode(), kernels(up, note), contextlib.suppress(AskedError):
        made = functools.partial(torch.zeros, *size, dtype=torch.bfloat16, device="cuda")
        query, key = (made(count, latent + rope) for count in (heads, groups))
        indices, row = made(groups, 64, dtype=torch.int32), made(heads, dtype=torch.float32)
        calls = {
            "dispatch": lambda: up.dispatcher.fused_sparse_mla_absorbed(
                query.transpose(0, 1), key.transpose(0, 1), indices.flatten(2), SCALE, latent
            ),
            "forward": lambda: up.forward.sparse_mla_fwd_interface(query, key, indices, SCALE, latent),
            "backward": lambda: up.backward.sparse_mla_bwd(
                query, key, None, made(heads, latent), indices, row, SCALE, row
            ),
        }
        call = calls[entry.removesuffix("_3d")]
        if entry == "dispatch":
            assert call() is None, "it answers without a kernel"
        else:
            with pytest.raises((AssertionError, NotImplementedError, RuntimeError, ValueError)):
                call()
    return asked


# The release asks for DeepSeek's dimensions alone: what it asks for there, and what nobody may ask for, are controls.
@pytest.mark.parametrize(
    ("entry", "shape", "groups", "limit", "fits"),
    [marked(*one, name=name_of(one), control=one[4] == is_known(one[1])) for one in ASKED],
)
def test_kernels_are_asked_for_what_they_can_have_and_no_more(up, entry, shape, groups, limit, fits):  # noqa: PLR0917
    assert bool(asked_first(up, entry, shape, groups, limit)) == fits


@pytest.mark.parametrize(
    ("version", "shape", "safe"),
    [
        marked(version, shape, safe, name=f"{version}-{dims(shape)}-{shape[2]}heads", control=safe == is_known(shape))
        for version, shape, safe in RELEASES
    ],
)
def test_shape_is_declined_where_a_tilelang_release_lacks_the_barrier(up, version, shape, safe):
    """From 0.1.11 on, S_shared of the forward lies where the row sums are reduced, and no barrier stands between.

    Below 64 heads small dimensions then have wrong numbers: the shape is declined, or the kernel waits.
    """
    with mock.patch.object(up.tilelang, "__version__", version):
        asked = asked_first(up, "dispatch", shape)
    if safe:
        assert asked, "the shape is declined"
    elif asked:
        program = str(up.forward.sparse_mla_fwd.get_tir(**asked["sparse_mla_fwd"]))
        assert "storage_sync" in program, "the kernel is asked for, and does not wait"


# The programs of the kernels, which are lowered for another target than the CPU


def source(kernel, name):
    """Return what a builder makes of what is asked for, or None and why: CUDA source, or a program on the CPU."""
    up, arguments = load(), asked_for(kernel).get(name)
    if arguments is None:
        return None, "no kernel is asked for"
    module = up.forward if hasattr(up.forward, name) else up.backward
    function = getattr(module, name)
    if TARGET.executed:
        return attempt(lambda: function(**arguments).get_kernel_source())
    if TARGET.name == "cpu":
        return attempt(lambda: str(function.get_tir(**arguments)))

    def lowered():
        made, error = attempt(lambda: lower(function.get_tir(**arguments), TARGET.name, options_of(function)))
        return (made.source or None, made.error) if made else (None, error)

    return remembered((Path(module.__file__).read_text(), arguments, TARGET.name), lowered)


NAMES, BUILT = [*KERNELS], LAUNCHED
if not TARGET.executed:  # only lowering depends on the target: 512 + 64 is lowered once, for sm_90a
    NAMES = [*KERNELS] if TARGET.name == "cpu" else ["bwd", "sparse_mla_fwd"]
    BUILT = {"cpu": CONFIGURED, "sm_90a": CONFIGURED[:3]}.get(TARGET.name, CONFIGURED[1:3])


@pytest.fixture(scope="module")
def built():
    """Build all kernels, each in a process of its own where that takes long; return what is made, and the reasons."""
    tasks = [(one, name) for name in NAMES for one in BUILT]
    made = itertools.starmap(source, tasks) if TARGET.name == "cpu" else in_processes(source, tasks)
    return dict(zip(tasks, made, strict=True))


@each(BUILT, lambda one: f"{dims(one)}-{one[2]}heads-top{one[3]}")
@pytest.mark.parametrize("name", NAMES)
def test_kernel_is_built_for_the_target(built, output, shape, name):
    text, reason = built[shape, name]
    assert text, reason
    if shape == CONFIGURED[0] and TARGET.name != "cpu":  # the same in both trees
        output(f"source.{dims(shape)}.{name}", torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))


# Launches, through the user's entry point


def whole(shape, queries, keys):
    """Return the case of a shape that fills its bucket, and make its inputs."""
    case = Case((*shape, TOP_K, SCALE), lengths=(queries, keys), bucket=None)
    return case, draw(case, "cuda")


def trained(attend_with, inputs):
    """Return output, dQ and dKV of a path."""
    query, key, indices, d_out = inputs
    pair = [x.detach().requires_grad_() for x in (query, key)]
    out = attend_with(*pair, indices, SCALE, d_out.shape[-1])
    assert out is not None, "the answer is None"
    return [out.detach(), *torch.autograd.grad(out, pair, d_out)]


if TARGET.executed:

    @pytest.fixture(scope="module")
    def unfused():
        """Return the path that is taken where the dispatcher answers None."""
        return vars(importlib.import_module(f"{VARIANT}.dsa"))["_unfused_absorbed_dsa_fn"]

    @pytest.mark.parametrize(
        ("path", "shape"),
        [
            marked(
                path, shape, name=f"{path}-{dims(shape)}-{shape[2]}heads", control=path == "unfused" or is_known(shape)
            )
            for path in ("fused", "unfused")
            for shape in SHAPES
        ],
    )
    def test_example_is_right(up, unfused, figure, path, shape):
        case, (query, key, _, d_out) = whole(shape, LENGTH, LENGTH)
        weights = torch.rand(LENGTH, LENGTH, generator=torch.Generator().manual_seed(7)).tril().topk(TOP_K)
        indices = weights.indices.masked_fill(weights.values == 0, -1)  # of the past, as the unfused path has them
        inputs = query, key, indices[None].to(query.device), d_out
        results = trained(up.dispatcher.fused_sparse_mla_absorbed if path == "fused" else unfused, inputs)
        out, gradients, _ = exactly(case, inputs)
        for name, result, exact in zip(("out", "dq", "dkv"), results, (out, *gradients), strict=True):
            figure(f"{path}.{dims(shape)}.{name}", relative_error(result, exact), "relative error")
        assert_close(results, [out, *gradients], shape[0])

    @pytest.mark.control
    def test_rows_of_their_own_give_the_same_bits(up, output):
        """No row of dKV gets more than two sums, since no two queries name the same key: any order gives one result."""
        case, (query, key, _, d_out) = whole(DEEPSEEK, 64, 64 * TOP_K)
        random = torch.Generator("cuda").manual_seed(7)
        indices = torch.randperm(len(key), generator=random, device="cuda").view(1, 64, TOP_K)
        inputs = query, key, indices, d_out
        results, (out, gradients, _) = trained(up.dispatcher.fused_sparse_mla_absorbed, inputs), exactly(case, inputs)
        assert_close(results, [out, *gradients], DEEPSEEK[0])
        _, sums = applied(up, query.transpose(0, 1), key.transpose(0, 1), indices[:, :, None].int(), SCALE)
        for name, tensor in zip(("out", "dq", "dkv", "lse"), (*results, sums), strict=True):
            output(f"{name}.512+64", tensor)

    @pytest.mark.defect
    def test_users_path_needs_less_than_one_matrix_of_scores(up, unfused, figure, claim):
        fused, (_, inputs) = up.dispatcher.fused_sparse_mla_absorbed, whole(SHAPES[1], LONG, LONG)
        matrix = 4 * SHAPES[1][2] * LONG**2  # [B, H, S, S] of float32

        def users(*arguments):
            return unfused(*arguments) if (out := fused(*arguments)) is None else out

        mine, theirs = (peak_memory(functools.partial(trained, path, inputs)) for path in (users, unfused))
        figure("peak_over_unfused", mine / theirs)
        if mine < min(matrix, theirs):
            claim("MEMORY_SAVE_VERIFIED")
        assert mine < matrix, f"{mine} bytes, and a matrix of scores has {matrix}"
