"""The error of dKV by length, flash attention's beside it, and the backward kernel's time. Never judged.

    PYTHONPATH=TREE:DEPENDENCIES python measure_error.py NAME

Needs a GPU. NAME is `release`, or `patched` for the tree with fix.patch. Each run adds its part to data/error.json.
A relative error is the norm of the difference to float64 over the norm of the float64 gradient.
"""

import itertools
import json
import math
import statistics
import sys
from pathlib import Path

import torch
from megatron.core.transformer.experimental_attention_variant.ops import sparse_mla, tilelang_sparse_mla_bwd
from torch.nn.attention import SDPBackend, sdpa_kernel

DATA = Path(__file__).parent / "data" / "error.json"
WIDTH, VALUES, HEADS, TOPK = 576, 512, 64, 512  # the first 512 columns of a key are its value
SCALE = WIDTH**-0.5
LENGTHS = (512, 4096, 16384, 65536)
TIMED = 4096
FLASH = (2, 128)  # heads and width of causal self-attention


def normal(*shape):
    """Return bf16 normal numbers on the GPU."""
    return torch.randn(shape, device="cuda").bfloat16()


def relative_error(result, exact):
    """Return the relative error of a gradient."""
    return float((result - exact).norm() / exact.norm())


def example(tokens):
    """Return q [S, 64, 576], kv [S, 576], the gradient of the output [S, 64, 512], and indices [S, 512].

    A query has one key at random from each of 512 parts of the past, or all keys up to itself; -1 fills the rest.
    """
    torch.manual_seed(tokens)
    past, column = torch.arange(1, tokens + 1, device="cuda")[:, None], torch.arange(TOPK, device="cuda")
    spread = ((column + torch.rand(tokens, TOPK, device="cuda")) * past / TOPK).long().minimum(past - 1)
    few = torch.where(column < past, column, -1)
    indices = torch.where(past < TOPK, few, spread).int()
    return normal(tokens, HEADS, WIDTH), normal(tokens, WIDTH), normal(tokens, HEADS, VALUES), indices


def exact_dkv(q, kv, grad, indices):
    """Return dKV [S, 576] in float64."""
    dkv = torch.zeros_like(kv, dtype=torch.float64)
    for rows in torch.arange(len(q), device="cuda").split(128):
        valid, index = indices[rows] >= 0, indices[rows].long().clamp_min(0)
        query, key, up = q[rows].double(), kv.double()[index], grad[rows].double()
        p = (query @ key.mT * SCALE).masked_fill(~valid[:, None], -math.inf).softmax(-1)
        dp = up @ key[..., :VALUES].mT
        product = (p * (dp - (p * dp).sum(-1, keepdim=True)) * SCALE).mT @ query
        product[..., :VALUES] += p.mT @ up
        dkv.index_add_(0, index.flatten(), product.masked_fill(~valid[..., None], 0).flatten(0, 1))
    return dkv


def dkv_error(tokens):
    """Return the error of the bf16 dKV that SparseMLA returns."""
    q, kv, grad, indices = example(tokens)
    leaf = kv[None, :, None].requires_grad_()
    output, _ = sparse_mla.SparseMLA.apply(q[None].requires_grad_(), leaf, indices[None, :, None], SCALE)
    (dkv,) = torch.autograd.grad(output, leaf, grad[None])
    return relative_error(dkv[0, :, 0], exact_dkv(q, kv, grad, indices))


def flash_dk_error(tokens):
    """Return the error of the bf16 dK of PyTorch's flash attention."""
    torch.manual_seed(tokens)
    heads, width = FLASH
    q, k, v, grad = (normal(heads, tokens, width) for _ in range(4))
    leaf = k[None].requires_grad_()
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        output = torch.nn.functional.scaled_dot_product_attention(q[None], leaf, v[None], is_causal=True)
    (dk,) = torch.autograd.grad(output, leaf, grad[None])
    exact, key, value = torch.zeros_like(k, dtype=torch.float64), k.double(), v.double()
    for rows in torch.arange(tokens, device="cuda").split(512):
        query, up = q[:, rows].double(), grad[:, rows].double()
        later = torch.arange(tokens, device="cuda") > rows[:, None]
        p = (query @ key.mT * width**-0.5).masked_fill(later, -math.inf).softmax(-1)
        dp = up @ value.mT
        exact += (p * (dp - (p * dp).sum(-1, keepdim=True)) * width**-0.5).mT @ query
    return relative_error(dk[0], exact)


def timed(threads):
    """Return the median, least and most milliseconds of the backward kernel, and the error of its dKV in bf16."""
    inputs = q, kv, grad, indices = example(TIMED)
    keys, index = kv[None, :, None], indices[None, :, None]
    output, lse = sparse_mla.sparse_mla_fwd_interface(q[None], keys, index, sm_scale=SCALE)
    delta = sparse_mla.sparse_mla_delta(output, grad[None])
    kernel = tilelang_sparse_mla_bwd.bwd(HEADS, VALUES, WIDTH - VALUES, TOPK, 1, SCALE, threads=threads)

    def launch():
        buffer = torch.zeros(1, TIMED, 1, WIDTH, device="cuda")
        kernel(q[None], keys, grad[None], index, lse, delta, buffer)
        return buffer

    error = relative_error(launch()[0, :, 0].bfloat16(), exact_dkv(*inputs))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(29)]
    for event in events:
        event.record()
        launch()
    torch.cuda.synchronize()
    times = [first.elapsed_time(second) for first, second in itertools.pairwise(events)]
    return {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times), "error": error}


def by_length(measure):
    """Return the errors by length, the least and the largest."""
    errors = {str(tokens): measure(tokens) for tokens in LENGTHS}
    return errors | {"least": min(errors.values()), "most": max(errors.values())}


def main():
    """Measure one tree, and flash attention again."""
    document = json.loads(DATA.read_text()) if DATA.exists() else {}
    document |= {"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "flash": by_length(flash_dk_error)}
    document[sys.argv[1]] = by_length(dkv_error) | {f"threads_{threads}": timed(threads) for threads in (128, 256)}
    DATA.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main()
