"""The formula of sparse MLA in the kit against plain loops, and what stands in for the kernels against the formula."""

from __future__ import annotations

import math
import sys
import types

import pytest

pytest.importorskip("torch")
import torch

kit = pytest.importorskip("kit.sparse_attention")
SCALE, KEYS, LATENT, ROPE, HEADS = 0.07, 9, 64, 32, 32


@pytest.fixture
def tensors() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Make query [2, 4, 32, 96], key [2, 9, 2, 96] and indices [2, 4, 2, 64]; some keys are named several times."""
    torch.manual_seed(0)
    query = torch.randn(2, 4, HEADS, LATENT + ROPE).bfloat16()
    key = torch.randn(2, KEYS, 2, LATENT + ROPE).bfloat16()
    indices = torch.randint(-50, KEYS, (2, 4, 2, 64), dtype=torch.int32).clamp(min=-1)
    indices[:, 1] = -1
    return query, key, indices


def test_formula_is_that_of_plain_loops(tensors: tuple[torch.Tensor, ...]) -> None:
    query, key, indices = (x.double() if x.is_floating_point() else x for x in tensors)
    counts = kit.counted(indices[:, :, 0], KEYS)
    output, sums = kit.attend(query[:, :, :16], key[:, :, 0], counts, SCALE, LATENT)
    for b in range(2):
        for s in range(4):
            rows = [key[b, one, 0] for one in indices[b, s, 0].tolist() if one >= 0]
            for h in range(16):
                weights = torch.stack([row @ query[b, s, h] * SCALE for row in rows]).exp() if rows else None
                wanted = torch.zeros(LATENT).double() if weights is None else weights @ torch.stack(rows)[:, :LATENT]
                wanted = wanted if weights is None else wanted / weights.sum()
                assert torch.allclose(output[b, s, h], wanted, rtol=0, atol=1e-12)
                total = 0.0 if weights is None else math.log2(float(weights.sum()))
                assert abs(float(sums[b, s, h]) - total) < 1e-12


def test_stand_ins_are_right_in_each_group(tensors: tuple[torch.Tensor, ...]) -> None:
    query, key, indices = tensors
    exact = [x.double().requires_grad_() for x in (query, key)]
    found = [
        kit.attend(
            exact[0][:, :, 16 * g : 16 * (g + 1)], exact[1][:, :, g], kit.counted(indices[:, :, g], KEYS), SCALE, LATENT
        )
        for g in range(2)
    ]
    output, sums = (torch.cat(each, 2) for each in zip(*found, strict=True))
    upstream = torch.randn(output.shape).bfloat16()
    gradients = torch.autograd.grad(output, exact, upstream.double())
    sizes = {"sm_scale": SCALE, "topk": 64, "kv_group": 2}
    forward = sizes | {"heads": HEADS, "dim": LATENT, "tail_dim": ROPE, "block_I": 64}
    backward = sizes | {"H": HEADS, "D": LATENT, "D_tail": ROPE}
    made, total = kit.stand_in("sparse_mla_fwd", forward, query, key, indices)
    delta = kit.stand_in("preprocess", backward, made, upstream)
    key_gradient = torch.zeros(key.shape)
    query_gradient = kit.stand_in("bwd", backward, query, key, upstream, indices, total, delta, key_gradient)
    pairs = [(made, output), (total, sums), (query_gradient, gradients[0])]
    pairs += [(kit.stand_in("postprocess", backward, key_gradient), gradients[1])]
    for one, other in pairs:
        assert float((one.double() - other.detach()).norm() / other.detach().norm()) < 2**-7


def test_fp8_operands_are_read_with_their_scales() -> None:
    torch.manual_seed(0)
    query, key = (torch.randn(1, 3, heads, LATENT + ROPE).to(torch.float8_e4m3fn) for heads in (16, 1))
    indices = torch.randint(3, (1, 3, 1, 64), dtype=torch.int32)
    sizes = {"heads": 16, "dim": LATENT, "tail_dim": ROPE, "topk": 64, "kv_group": 1, "sm_scale": SCALE, "block_I": 64}
    scales = torch.tensor([3.0]), torch.tensor([5.0])
    made, _ = kit.stand_in("sparse_mla_fwd", sizes, query, key, indices, *scales)
    exact = query.double() * 3, key[:, :, 0].double() * 5
    wanted, _ = kit.attend(*exact, kit.counted(indices[:, :, 0], 3), SCALE, LATENT)
    assert float((made.double() - wanted).norm() / wanted.norm()) < 2**-8


def test_operand_that_no_kernel_takes_is_refused(tensors: tuple[torch.Tensor, ...]) -> None:
    query, key, indices = tensors
    sizes = {"heads": HEADS, "dim": LATENT, "tail_dim": ROPE, "topk": 64, "kv_group": 2, "sm_scale": 1, "block_I": 64}
    with pytest.raises(ValueError, match="query"):
        kit.stand_in("sparse_mla_fwd", sizes, query.half(), key, indices)
    with pytest.raises(ValueError, match="no bounds"):
        kit.stand_in("sparse_mla_fwd", sizes | {"heads": 24}, query[:, :, :24].contiguous(), key, indices)


def test_kernel_leaves_the_numbers_of_outputs_as_its_builder_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    class BaseKernelAdapter:
        def _legalize_result_idx(self, places: list[int]) -> list[int]:
            places[0] += 8
            return places

    base = types.SimpleNamespace(BaseKernelAdapter=BaseKernelAdapter)
    monkeypatch.setitem(sys.modules, "tilelang.jit.adapter.base", base)
    kit.share_compiled_kernels()
    places, legalize = [-2], getattr(BaseKernelAdapter(), "_legalize_result_idx")  # noqa: B009 - it is tilelang's own
    assert (legalize(places), places) == ([6], [-2])
