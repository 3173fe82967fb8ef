"""Sparse MLA: the attention that its kernels compute, and stand-ins for the kernels where no GPU is.

Query is [batch, rows, heads, latent + rope], key [batch, keys, groups, latent + rope]; the value is the key's first
`latent` columns. Indices [batch, rows, groups, top-k] name the keys of a row, -1 none. The log-sum-exp is to base 2.
"""

from __future__ import annotations

import copy
import importlib.util
import math
import sys
from collections.abc import Callable, Iterable, Mapping
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
    """Return how often each of the keys is named by indices [..., k] that are not -1: [..., keys], float32."""
    valid = (indices >= 0).float()
    return valid.new_zeros(*indices.shape[:-1], keys).scatter_add(-1, indices.clamp(min=0).long(), valid)


def attend(
    query: torch.Tensor, key: torch.Tensor, counts: torch.Tensor, scale: float | None, latent: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend in the precision of query [..., s, h, D] and key [..., t, D], of one group; this can be differentiated.

    A row names a key `counts` [..., s, t] times. A scale of None is 1 / sqrt(D). The first `latent` columns of the key
    are the value. The results are the output [..., s, h, latent] and the log-sum-exp to base 2 [..., s, h]; both are 0
    for a row without keys.
    """
    scale = query.shape[-1] ** -0.5 if scale is None else scale
    alive = (counts.sum(-1) > 0)[..., None, None]
    scores = torch.einsum("...shd,...td->...sht", query, key) * scale + counts.to(query.dtype).log()[..., None, :]
    scores = torch.where(alive, scores, 0)
    output = torch.einsum("...sht,...td->...shd", scores.softmax(-1), key[..., :latent])
    return torch.where(alive, output, 0), torch.where(alive[..., 0], scores.logsumexp(-1) / math.log(2), 0)


def stand_in(name: str, built: Mapping[str, Any], *operands: torch.Tensor) -> Any:  # noqa: ANN401 - as many results as the kernel has
    """Do in float32 what the kernel does that a builder was asked for with these arguments, as `kit.capture.unseen`.

    Builders are sparse_mla_fwd, preprocess, bwd and postprocess; `built` has a builder's arguments by name, with its
    defaults. FP8 operands of the forward come with two more, their scales. ValueError: the kernel has no such number of
    heads or keys, or takes other shapes, dtypes or layouts.
    """
    kernel, names = KERNELS[name]
    heads, latent, tail = (built[key] if key in built else built.get(short, 0) for key, short in SIZES)
    groups, pair = built.get("kv_group"), torch.float8_e4m3fn if operands[len(names) :] else torch.bfloat16
    taken = {
        "query": (pair, heads, latent + tail),
        "key": (pair, groups, latent + tail),
        "indices": (torch.int32, groups, built.get("topk")),
        "output": (torch.bfloat16, heads, latent),
        "sums": (torch.float32, heads),
        "key_gradient": (torch.float32, groups, latent + tail),
    }
    for operand, x in zip(names, operands, strict=False):
        if (x.dtype, *x.shape[2:]) != taken[operand] or not x.is_contiguous():
            wrong = f"{x.dtype} {list(x.shape)} with strides {x.stride()}"
            raise ValueError(f"{name} takes contiguous {taken[operand]} as {operand}, not {wrong}")
    with unseen():
        return kernel(built, *operands)


def _by_group(x: torch.Tensor, groups: int) -> torch.Tensor:
    """View [b, s, heads, ...] as [b, groups, s, heads of a group, ...]."""
    return x.view(*x.shape[:2], groups, -1, *x.shape[3:]).transpose(1, 2)


def _named(query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return query [b, g, s, h, D] and key [b, g, t, D] in float32, and how often a row names a key [b, g, s, t].

    Rows and keys after the last that is named are padding, and are left out.
    """
    named = (indices >= 0).flatten(2).any(-1).any(0).nonzero()  # of the batch, rows that name a key
    rows, keys = int(named.max()) + 1 if len(named) else 1, max(int(indices.max()) + 1, 1)
    counts = counted(indices[:, :rows].transpose(1, 2), keys)
    return _by_group(query[:, :rows].float(), key.shape[2]), key[:, :keys].float().transpose(1, 2), counts


def _forward(
    built: Mapping[str, Any], query: torch.Tensor, key: torch.Tensor, indices: torch.Tensor, *scales: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    groups, share = built["kv_group"], built["heads"] // built["kv_group"]
    if share < 16 or share & (share - 1) or built["topk"] % built["block_I"]:  # noqa: PLR2004 - the smallest tile
        raise ValueError(f"the forward kernel has no bounds for {share} heads or {built['topk']} keys")
    q, k, counts = _named(query, key, indices)
    if scales:
        q, k = q * scales[0], k * scales[1]  # the values that are stored
    output, sums = torch.zeros(*query.shape[:3], built["dim"]).bfloat16(), torch.zeros(query.shape[:3])
    exact = attend(q, k, counts, built["sm_scale"], built["dim"])
    for whole, part in zip((output, sums), exact, strict=True):
        _by_group(whole, groups)[:, :, : q.shape[2]] = part
    return output, sums


def _preprocess(_: object, output: torch.Tensor, upstream: torch.Tensor) -> torch.Tensor:
    return (output.float() * upstream.float()).sum(-1)


def _backward(built: Mapping[str, Any], *operands: torch.Tensor) -> torch.Tensor:
    query, key, upstream, indices, *of_row, key_gradient = operands
    q, k, counts = _named(query, key, indices)
    (rows, keys), groups, latent = counts.shape[2:], built["kv_group"], built["D"]
    d_out, sums, delta = (_by_group(x, groups)[:, :, :rows].float() for x in (upstream, *of_row))
    scale, times = query.shape[-1] ** -0.5 if built["sm_scale"] is None else built["sm_scale"], counts[..., None, :]
    logits = torch.einsum("bgshd,bgtd->bgsht", q, k) * scale / math.log(2)
    once = torch.where(times > 0, torch.exp2(logits - sums[..., None]), 0)
    toward = torch.einsum("bgshd,bgtd->bgsht", d_out, k[..., :latent]) - delta[..., None]
    of_scores = (once * toward * scale).bfloat16() * times
    to_key = key_gradient[:, :keys].transpose(1, 2)
    to_key += torch.einsum("bgsht,bgshd->bgtd", of_scores, q)
    to_key[..., :latent] += torch.einsum("bgsht,bgshd->bgtd", once.bfloat16() * times, d_out)
    gradient = torch.zeros_like(query)
    _by_group(gradient, groups)[:, :, :rows] = torch.einsum("bgsht,bgtd->bgshd", of_scores, k)
    return gradient


#: What does a kernel's work, and its operands.
KERNELS: dict[str, tuple[Callable[..., Any], tuple[str, ...]]] = {
    "sparse_mla_fwd": (_forward, ("query", "key", "indices")),
    "preprocess": (_preprocess, ("output", "output")),
    "bwd": (_backward, ("query", "key", "output", "indices", "sums", "sums", "key_gradient")),
    "postprocess": (lambda _, key_gradient: key_gradient.bfloat16(), ("key_gradient",)),
}
SIZES = (("heads", "H"), ("dim", "D"), ("tail_dim", "D_tail"))  # builders of forward and backward name them so
