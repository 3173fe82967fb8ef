"""Sparse MLA: the attention that its kernels compute, and stand-ins for the kernels where no GPU is.

Query is [batch, rows, heads, latent + rope], key [batch, keys, groups, latent + rope]; the value is the key's first
`latent` columns. Indices [batch, rows, groups, top-k] name the keys of a row, -1 none. The log-sum-exp is to base 2.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import pytest
import torch

from kit.capture import unseen


def bare_megatron() -> None:
    """Put bare packages in the place of two whose __init__ import all of Megatron, and let them be where they are."""
    for name in ("megatron.core", "megatron.core.transformer"):
        if name not in sys.modules:
            spec = importlib.util.find_spec(name)
            if spec is None:
                raise ImportError(f"no {name} on the path; give its source: PYTHONPATH=CHECKOUT")
            sys.modules[name] = importlib.util.module_from_spec(spec)
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils, which imports it in a circle


def share_compiled_kernels() -> None:
    """Let tilelang find on disk the kernels that other processes have compiled.

    tilelang 0.1.8 makes the negative numbers of a builder's out_idx positive, in place, with the first kernel of a
    process. Its cache has out_idx in the key: without this, a kernel has another key where it is not the first.
    """
    adapter, name = importlib.import_module("tilelang.jit.adapter.base").BaseKernelAdapter, "_legalize_result_idx"
    positive = getattr(adapter, name)
    setattr(adapter, name, lambda self, places: positive(self, copy.copy(places)))


def marked(*values: object, name: str, control: bool) -> Any:  # noqa: ANN401 - of pytest
    """Make a parameter set with its mark: what the release does right is a control."""
    return pytest.param(*values, id=name, marks=pytest.mark.control if control else pytest.mark.defect)


def name_of(values: Iterable[object]) -> str:
    """Name a case, or a row of a table, by its values in their order."""
    return "-".join("x".join(map(str, value)) if isinstance(value, tuple) else str(value) for value in values)


def counted(indices: torch.Tensor, keys: int) -> torch.Tensor:
    """Return how often each of the keys is named by indices [b, s, k] that are not -1: [b, s, keys], float32."""
    valid = (indices >= 0).float()
    return valid.new_zeros(*indices.shape[:2], keys).scatter_add(2, indices.clamp(min=0).long(), valid)


def attend(
    query: torch.Tensor, key: torch.Tensor, counts: torch.Tensor, scale: float | None, latent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in the precision of query [b, s, h, D] and key [b, t, D]; this can be differentiated.

    Args:
        query: of each row and head.
        key: of one group.
        counts: how often a row names a key [b, s, t].
        scale: of the scores; None is 1 / sqrt(D).
        latent: the leading columns of the key that are the value.

    Returns:
        The output [b, s, h, latent] and the log-sum-exp to base 2 [b, s, h]; both are 0 for a row without keys.

    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    alive = (counts.sum(-1) > 0)[:, :, None, None]
    scores = torch.einsum("bshd,btd->bsht", query, key) * scale + counts.to(query.dtype).log()[:, :, None]
    scores = torch.where(alive, scores, 0)
    output = torch.einsum("bsht,btd->bshd", scores.softmax(-1), key[..., :latent])
    return torch.where(alive, output, 0), torch.where(alive[..., 0], scores.logsumexp(-1) / math.log(2), 0)


def stand_in(name: str, built: Mapping[str, Any], *operands: torch.Tensor) -> Any:  # noqa: ANN401 - as many results as the kernel has
    """Do in float32 what the kernel does that a builder was asked for with these arguments, as `kit.capture.unseen`.

    Args:
        name: of the builder: sparse_mla_fwd, preprocess, bwd or postprocess.
        built: the builder's arguments by name, with its defaults.
        operands: what the kernel is launched with. FP8 operands of the forward come with two more, their scales.

    Raises:
        ValueError: the kernel has no such number of heads or keys, or takes other shapes, dtypes or layouts.

    """
    kernels: dict[str, Callable[..., Any]] = {
        "sparse_mla_fwd": _forward,
        "preprocess": _preprocess,
        "bwd": _backward,
        "postprocess": _postprocess,
    }
    with unseen():
        return kernels[name](built, *operands)


def _demand(kernel: str, **operands: tuple[torch.Tensor, tuple[int, ...], torch.dtype]) -> None:
    """Refuse an operand that has not the shape, dtype or layout that a kernel takes."""
    for name, (tensor, shape, dtype) in operands.items():
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or not tensor.is_contiguous():
            operand = f"{name} {list(tensor.shape)} {tensor.dtype}, contiguous: {tensor.is_contiguous()}"
            raise ValueError(f"{kernel} takes contiguous {dtype} {list(shape)}, not {operand}")


def _groups(
    query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor
) -> Iterator[tuple[int, slice, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield for each group its number, its heads, its queries and keys in float32, and its counts.

    Rows and keys after the last that is named are padding, and are left out.
    """
    share = query.shape[2] // indices.shape[2]
    named = (indices >= 0).flatten(2).any(-1).any(0).nonzero()  # of the batch, rows that name a key
    rows, keys = int(named.max()) + 1 if len(named) else 1, max(int(indices.max()) + 1, 1)
    for group in range(indices.shape[2]):
        heads = slice(group * share, (group + 1) * share)
        q, k = query[:, :rows, heads].float(), key[:, :keys, group].float()
        yield group, heads, q, k, counted(indices[:, :rows, group], keys)


def _forward(
    built: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, *scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, latent, groups, topk = (built[name] for name in ("heads", "dim", "kv_group", "topk"))
    share, width, dtype = heads // groups, latent + built["tail_dim"], torch.float8_e4m3fn if scales else torch.bfloat16
    if share < 16 or share & (share - 1) or topk % built["block_I"]:  # noqa: PLR2004 - the smallest tile
        raise ValueError(f"the forward kernel has no bounds for {share} heads or {topk} keys")
    rows, keys = query.shape[:2], key.shape[:2]
    _demand(
        "the forward kernel",
        query=(query, (*rows, heads, width), dtype),
        key=(key, (*keys, groups, width), dtype),
        indices=(indices, (*rows, groups, topk), torch.int32),
    )
    output = torch.zeros(*rows, heads, latent, dtype=torch.bfloat16)
    sums = torch.zeros(*rows, heads)
    for _, part, q, k, counts in _groups(query, key, indices):
        if scales:
            q, k = q * scales[0], k * scales[1]  # noqa: PLW2901 - the values that are stored
        exact, total = attend(q, k, counts, built["sm_scale"], latent)
        output[:, : q.shape[1], part], sums[:, : q.shape[1], part] = exact.bfloat16(), total
    return output, sums


def _preprocess(built: Mapping[str, Any], output: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    shape = (*output.shape[:2], built["H"], built["D"])
    both = {"output": (output, shape, torch.bfloat16), "dO": (upstream, shape, torch.bfloat16)}
    _demand("the delta kernel", **both)
    return (output.float() * upstream.float()).sum(-1)


def _backward(built: Mapping[str, Any], *operands: torch.Tensor) -> torch.Tensor:
    query, key, upstream, indices, sums, delta, key_gradient = operands
    heads, latent, groups = (built[name] for name in ("H", "D", "kv_group"))
    rows, width = query.shape[:2], latent + built["D_tail"]
    _demand(
        "the backward kernel",
        query=(query, (*rows, heads, width), torch.bfloat16),
        key=(key, (*key.shape[:2], groups, width), torch.bfloat16),
        dO=(upstream, (*rows, heads, latent), torch.bfloat16),
        indices=(indices, (*rows, groups, built["topk"]), torch.int32),
        lse=(sums, (*rows, heads), torch.float32),
        delta=(delta, (*rows, heads), torch.float32),
        dKV=(key_gradient, tuple(key.shape), torch.float32),
    )
    scale = width**-0.5 if built["sm_scale"] is None else built["sm_scale"]
    gradient = torch.zeros_like(query)
    for group, part, q, k, counts in _groups(query, key, indices):
        upper, keys = q.shape[1], k.shape[1]
        times, d_out = counts[:, :, None], upstream[:, :upper, part].float()
        logits = torch.einsum("bshd,btd->bsht", q, k) * scale / math.log(2)
        once = torch.where(times > 0, torch.exp2(logits - sums[:, :upper, part, None]), 0)
        toward = torch.einsum("bshd,btd->bsht", d_out, k[..., :latent]) - delta[:, :upper, part, None]
        of_scores = (once * toward * scale).bfloat16() * times
        key_gradient[:, :keys, group] += torch.einsum("bsht,bshd->btd", of_scores, q)
        key_gradient[:, :keys, group, :latent] += torch.einsum("bsht,bshd->btd", once.bfloat16() * times, d_out)
        gradient[:, :upper, part] = torch.einsum("bsht,btd->bshd", of_scores, k).bfloat16()
    return gradient


def _postprocess(built: Mapping[str, Any], key_gradient: torch.Tensor) -> torch.Tensor:
    shape = (*key_gradient.shape[:2], built["kv_group"], built["D"] + built["D_tail"])
    _demand("the last kernel", dKV=(key_gradient, shape, torch.float32))
    return key_gradient.bfloat16()
