"""The reference of a linear cross entropy: plain autograd in float64 on the same rounded inputs.

Tolerances of the relative error:

- fp32: 8 * eps * sqrt(n) for the longest sum of n terms, as rounding errors grow like its root. 8 leaves room for exp,
  log and the product that follows.
- bf16, fp16, autocast: 5 times the error of eager PyTorch in the same dtype, which accumulates gradients over as many
  chunks as the kernel makes. The kernel rounds no element more than twice as often as eager, and no rounding to nearest
  errs by more than 2.5 times its root mean square. A small case may have no noise by chance, and at least `least` eps.
"""
# ruff: noqa: S101 - contracts assert through this

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.functional import linear

from kit.errors import relative_error


class Reference:
    """Losses and gradients of a case, which has what kit.liger.Case has: inputs, target, rows and factors."""

    def __init__(self, case: SimpleNamespace) -> None:
        self.case = case

    def _losses(self, logits: torch.Tensor, labels: torch.Tensor) -> list[torch.Tensor]:
        """Return the loss and the z loss of each row, of logits [rows, V] and labels [rows]."""
        case = self.case
        valid, every = labels != case.ignore_index, case.target != case.ignore_index
        picked = labels.where(valid, 0)
        classes = case.class_weights.to(logits.dtype)
        if case.ce_weight == "absent":
            classes = torch.ones_like(classes)
        log_p = logits.log_softmax(-1)
        log_p_label = log_p.gather(1, picked[:, None])[:, 0]
        loss = (case.label_smoothing - 1) * classes[picked] * log_p_label
        loss = loss - case.label_smoothing / case.V * (log_p * classes).sum(-1)
        z_loss = case.lse_square_scale * logits.logsumexp(-1) ** 2
        if case.reduction == "mean":
            loss, z_loss = loss / classes[case.target[every]].sum().clamp(min=1e-9), z_loss / every.sum().clamp(min=1)
        loss = loss + z_loss
        if case.use_token_scaling:
            loss, z_loss = (x * log_p_label.exp().detach() for x in (loss, z_loss))
        return [loss.where(valid, 0), z_loss.where(valid, 0)]

    def _eager(self, leaves: dict[str, torch.Tensor], rows: slice = slice(None)) -> list[torch.Tensor]:
        """Return logits, loss and z loss of some rows by plain PyTorch; the losses are never in 16 bits."""
        low = self.case.autocast and leaves["input"].dtype != torch.float64
        with torch.autocast(leaves["input"].device.type, torch.bfloat16, enabled=low):
            logits = linear(leaves["input"][rows], leaves["weight"], leaves.get("bias"))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.case.softcap:
            logits = self.case.softcap * (logits / self.case.softcap).tanh()
        return [logits, *self._losses(logits, self.case.target[rows])]

    def _reduced(self, losses: torch.Tensor) -> torch.Tensor:
        """Return the losses of rows as the reduction has them."""
        return losses if self.case.reduction == "none" else losses.sum()

    @functools.cached_property
    def exact(self) -> SimpleNamespace:
        """Leaves by name, logits [BT, V], loss and z_loss in float64."""
        leaves = {name: x.double().requires_grad_() for name, x in self.case.inputs.items()}
        logits, loss, z_loss = self._eager(leaves)
        return SimpleNamespace(leaves=leaves, logits=logits, loss=self._reduced(loss), z_loss=self._reduced(z_loss))

    def gradients(self, incoming: torch.Tensor, *, create_graph: bool = False) -> dict[str, torch.Tensor]:
        """Return the gradients in float64 of all inputs by name."""
        leaves, keep = self.exact.leaves, {"retain_graph": True, "create_graph": create_graph}
        gradients = torch.autograd.grad(self.exact.loss, [*leaves.values()], incoming.double(), **keep)
        return dict(zip(leaves, gradients, strict=True))

    @functools.cached_property
    def right(self) -> dict[str, torch.Tensor]:
        """loss, z_loss and the gradients of the case's incoming gradient, in float64."""
        return {"loss": self.exact.loss, "z_loss": self.exact.z_loss} | self.gradients(self.case.incoming())

    @functools.cached_property
    def rounded(self) -> dict[str, torch.Tensor]:
        """The same of eager PyTorch in the case's dtype, which accumulates gradients over the chunks of the kernel."""
        case = self.case
        step = 1 << (-(-case.BT // -(-case.V // case.H)) - 1).bit_length()  # rows of a chunk
        leaves, incoming = {name: x.clone().requires_grad_() for name, x in case.inputs.items()}, case.incoming()
        gradients, losses = {name: torch.zeros_like(x) for name, x in leaves.items()}, []
        for rows in (slice(start, start + step) for start in range(0, case.BT, step)):
            _, *both = self._eager(leaves, rows)
            weighted = both[0] * (incoming[rows] if case.reduction == "none" else incoming)
            for name, x in zip(leaves, torch.autograd.grad(weighted.sum(), [*leaves.values()]), strict=True):
                gradients[name] += x
            losses.append([x.detach() for x in both])
        loss, z_loss = (self._reduced(torch.cat(x)) for x in zip(*losses, strict=True))
        return {"loss": loss, "z_loss": z_loss} | gradients

    def tolerance(self, name: str, least: float = 0.0) -> float:
        """Return the tolerance of "loss", "z_loss" or a gradient; in 16 bits it is at least so many eps."""
        eps = torch.finfo(self.case.torch_dtype).eps
        if self.case.dtype == "float32":
            return float(8 * eps * max(self.case.shape) ** 0.5)
        return max(5 * relative_error(self.rounded[name], self.right[name]), least * eps)

    def close(self, name: str, tensor: Any, right: torch.Tensor, tolerance: float) -> None:  # noqa: ANN401 - also None
        """Check one tensor."""
        assert getattr(tensor, "shape", None) == right.shape, f"{name} is no tensor of {right.shape}: {tensor}"
        error = relative_error(tensor, right)
        assert error <= tolerance, f"{name}: relative error {error:.2e}, tolerance {tolerance:.2e}"

    def check(self, outputs: dict[str, Any], backwards: list[Any], *, least: float = 0.0) -> None:
        """Check losses, pairs of an incoming gradient and gradients by name, and what comes beside the loss."""
        case, exact, no_rows = self.case, self.exact, self.case.labels == "all ignored"
        for name in ("loss", "z_loss") if "return_z_loss" in case.options else ("loss",):
            if not (no_rows and case.reduction == "mean"):  # no rows have no mean
                self.close(name, outputs[name], getattr(exact, name), self.tolerance(name, least))
        for incoming, gradients in backwards:
            right = self.gradients(incoming)
            for name, x in gradients.items():
                self.close(f"gradient of {name}", x, right[name], self.tolerance(name, least))
        valid = case.target != case.ignore_index
        slack = 16 * torch.finfo(case.torch_dtype).eps * exact.logits.abs().amax(-1, keepdim=True)
        possible = exact.logits >= exact.logits.amax(-1, keepdim=True) - slack  # [BT, V]: a near tie may go either way
        if "return_predicted_tokens" in case.options:
            tokens = outputs["predicted_tokens"]
            assert possible.gather(1, tokens.where(valid, 0)[:, None])[:, 0][valid].all(), f"predicted tokens {tokens}"
            assert (tokens[~valid] == -1).all(), f"predicted tokens {tokens} of ignored rows"
        if "return_token_accuracy" in case.options and not no_rows:
            may = possible.gather(1, case.target.where(valid, 0)[:, None])[:, 0] & valid
            must, count = may & (possible.sum(-1) == 1), 1 if case.reduction == "none" else valid.sum()
            low, high, accuracy = *(self._reduced(x.double()) / count for x in (must, may)), outputs["token_accuracy"]
            assert ((low - 1e-6 <= accuracy) & (accuracy <= high + 1e-6)).all(), f"accuracy {accuracy}, {low} to {high}"
