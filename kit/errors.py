"""Error norms of tensors, and the rounding units that tolerances are multiples of."""

from __future__ import annotations

import math

import torch


def relative_error(tensor: torch.Tensor, reference: torch.Tensor) -> float:
    """Return the Frobenius norm of the difference over that of the reference, computed in float64.

    It is 0.0 where both tensors are zero, infinity where the reference alone is, and nan where one is not finite.
    ValueError: the shapes differ.
    """
    if tensor.shape != reference.shape:
        raise ValueError(f"shape {tuple(tensor.shape)}, and the reference has {tuple(reference.shape)}")
    exact = reference.detach().double()
    difference = float(torch.linalg.vector_norm(tensor.detach().double().to(exact.device) - exact))
    norm = float(torch.linalg.vector_norm(exact))
    if norm == 0.0:
        return difference if difference == 0.0 or math.isnan(difference) else math.inf
    return difference / norm


def unit_roundoff(dtype: torch.dtype) -> float:
    """Return the largest relative error of one rounding to nearest in `dtype`: half of torch.finfo's eps."""
    return torch.finfo(dtype).eps / 2
