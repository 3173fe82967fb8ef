"""What the measure_*.py scripts share: inputs, a float64 reference, and both trees' kernels beside each other.

The contract has its own, shorter copy of the formulas: it imports nothing from here.
"""

import importlib
import importlib.util
import itertools
import math
import sys
import types
import unittest.mock
from contextlib import contextmanager
from pathlib import Path

import torch

WIDTH, VALUES = 576, 512  # of a query and of a key; the first 512 columns of a key are its value
SCALE = WIDTH**-0.5
LOG2E = 1 / math.log(2)
POSTPROCESS = "_get_postprocess_kernel"
OPERATORS = "megatron/core/transformer/experimental_attention_variant/ops"


def load(name, tree):
    """Import a tree's folder of kernels as package `name`, so that several trees can be loaded at once.

    What they need of megatron.core comes from the release on the path. Its __init__ would import all of Megatron.
    """
    for parent in ("megatron.core", "megatron.core.transformer"):
        if parent not in sys.modules:
            sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils: each imports the other
    package = types.ModuleType(name)
    package.__path__ = [str(Path(tree, OPERATORS))]
    sys.modules[name] = package
    return importlib.import_module(f"{name}.sparse_mla"), importlib.import_module(f"{name}.tilelang_sparse_mla_bwd")


@contextmanager
def recorded_buffer(backward):
    """Yield a list that gets the fp32 accumulation buffer of dKV from each call of sparse_mla_bwd."""
    buffers, build = [], getattr(backward, POSTPROCESS)

    def building(*args):
        kernel = build(*args)
        return lambda buffer: buffers.append(buffer) or kernel(buffer)

    with unittest.mock.patch.object(backward, POSTPROCESS, building):
        yield buffers


def chosen_keys(tokens, topk, random, usage="uniform"):
    """Choose for each query `topk` different keys among those up to itself, int32 [tokens, topk], -1 where too few.

    uniform: at random, one from each of topk strata of the past; window: the last ones, so that a key is used by at
    most topk queries; sinks: half of them are the first topk/2 keys, which all queries use, the others at random.
    """
    device = random.device
    n = torch.arange(1, tokens + 1, device=device)[:, None]
    j = torch.arange(topk, device=device)[None]
    if usage == "window":
        keys = n - 1 - j
        return torch.where(keys >= 0, keys, -1).int()
    first = topk // 2 if usage == "sinks" else 0
    k, past = topk - first, (n - first).clamp_min(0)
    low, high = (j[:, :k] * past) // k, ((j[:, :k] + 1) * past) // k
    drawn = torch.rand(tokens, k, generator=random, device=device)
    keys = first + torch.minimum(low + (drawn * (high - low)).long(), high - 1)
    keys = torch.where(past < k, torch.where(j[:, :k] < past, first + j[:, :k], -1), keys)
    if first:
        keys = torch.cat([torch.where(j[:, :first] < n, j[:, :first], -1), keys], 1)
    return keys.int()


def example(sizes, seed, score=1.0, usage="uniform", gradient="normal"):
    """Make bf16 q [S, H, 576], kv [S, 576], dO [S, H, 512] and indices from `sizes` = (S, H, topk).

    `score` is the standard deviation of the scaled scores.
    """
    (tokens, heads, topk), device = sizes, "cuda" if torch.cuda.is_available() else "cpu"
    random = torch.Generator(device).manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=random, device=device)

    q, kv, grad = normal(tokens, heads, WIDTH) * score, normal(tokens, WIDTH), normal(tokens, heads, VALUES)
    if gradient == "tokens":  # one token in a hundred has a gradient a hundred times as large
        grad *= 1 + 99 * (torch.rand(tokens, 1, 1, generator=random, device=device) < 0.01)
    elif gradient == "channels":  # four channels have
        grad[..., :4] *= 100
    indices = chosen_keys(tokens, topk, random, usage)
    return q.bfloat16(), kv.bfloat16(), grad.bfloat16(), indices


def reference(inputs, lse=None, delta=None):
    """Return float64 dKV [S, 576], dQ, base-2 lse, delta, and dKV with the given lse and delta instead of the exact.

    The last is what exact P and dP would leave: everything else in the kernel's products is exact or float32.
    """
    q, kv, grad, indices = inputs
    tokens, heads, _ = q.shape
    topk, keys = indices.shape[1], kv.double()
    dkv, left, dq = torch.zeros_like(keys), torch.zeros_like(keys), torch.empty_like(q, dtype=torch.float64)
    exact_lse, exact_delta = (torch.empty(tokens, heads, dtype=torch.float64, device=q.device) for _ in range(2))
    step = max(1, 65536 // topk)
    for rows in (slice(start, start + step) for start in range(0, tokens, step)):
        valid, index = indices[rows] >= 0, indices[rows].long().clamp_min(0)
        key, query, up = keys[index], q[rows].double(), grad[rows].double()
        scores = (query @ key.mT * (SCALE * LOG2E)).masked_fill(~valid[:, None], -math.inf)
        exact_lse[rows] = torch.logsumexp(scores / LOG2E, -1) * LOG2E
        inner = up @ key[..., :VALUES].mT
        p = torch.exp2(scores - exact_lse[rows][..., None])
        exact_delta[rows] = (p * inner).sum(-1)
        dp = p * (inner - exact_delta[rows][..., None]) * SCALE
        dq[rows] = dp @ key
        where = index.flatten()
        dkv.index_add_(0, where, products(p, dp, query, up).masked_fill_(~valid[..., None], 0).flatten(0, 1))
        if lse is not None:
            p = torch.exp2(scores - lse[rows].double()[..., None])
            dp = p * (inner - delta[rows].double()[..., None]) * SCALE
            left.index_add_(0, where, products(p, dp, query, up).masked_fill_(~valid[..., None], 0).flatten(0, 1))
    return dkv, dq, exact_lse, exact_delta, left


def run(sparse, backward, inputs):
    """Do what SparseMLA.backward does, in a batch of one. Return lse, delta, dQ, dKV, and the fp32 buffer of dKV."""
    q, kv, grad, indices = (x[None] for x in inputs)
    kv, indices = kv[:, :, None], indices[:, :, None]
    out, lse = sparse.sparse_mla_fwd_interface(q, kv, indices, sm_scale=SCALE)
    delta = sparse.sparse_mla_delta(out, grad)
    with recorded_buffer(backward) as buffers:
        dq, dkv = sparse.sparse_mla_bwd(q, kv, None, grad, indices, lse, sm_scale=SCALE, delta=delta)
    return lse[0], delta[0], dq[0], dkv[0, :, 0], buffers[0][0, : kv.shape[1], 0]


def launched(kernel, inputs, lse, delta):
    """Launch a backward kernel on a buffer of zeros. Return dQ and that buffer."""
    q, kv, grad, indices = inputs
    buffer = torch.zeros(1, kv.shape[0], 1, WIDTH, device=q.device)
    dq = kernel(q[None], kv[None, :, None], grad[None], indices[None, :, None], lse[None], delta[None], buffer)
    return dq[0], buffer[0, :, 0]


def milliseconds(kernel, inputs, lse, delta):
    """Time a backward kernel alone: seven launches after a warm one."""
    q, kv, grad, indices = inputs
    buffer = torch.zeros(1, kv.shape[0], 1, WIDTH, device=q.device)
    given = (q[None], kv[None, :, None], grad[None], indices[None, :, None], lse[None], delta[None], buffer)
    events = [torch.cuda.Event(enable_timing=True) for _ in range(8)]
    for event in events:
        kernel(*given)
        event.record()
    torch.cuda.synchronize()
    return [first.elapsed_time(second) for first, second in itertools.pairwise(events)]


def products(p, dp, query, up):
    """dP^T Q + P^T dO, the latter in the value columns only."""
    both = dp.mT @ query
    both[..., :VALUES] += p.mT @ up
    return both


def error(found, wanted):
    """Relative error: Euclidean norm of the difference over that of the float64 reference."""
    return float((found - wanted).norm() / wanted.norm())
