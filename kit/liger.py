"""Liger-Kernel's fused linear cross entropy: its options, a call, its reference, and what four contracts ask of it.

Sizes are BT tokens, H hidden and V classes. The reference is plain autograd in float64 on the same rounded inputs.
Tolerances of the relative error:

- fp32: 8 * eps * sqrt(n) for the longest sum of n terms, as rounding errors grow like its root. 8 leaves room for exp,
  log and the product that follows.
- bf16, fp16, autocast: 5 times the error of eager PyTorch in the same dtype, which accumulates gradients over as many
  chunks as the kernel makes. The kernel rounds no element more than twice as often as eager, and no rounding to nearest
  errs by more than 2.5 times its root mean square. A small case may have no noise by chance, and at least `least` eps.
"""
# ruff: noqa: S101 - contracts assert through this

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from kit import autograd, current_target, pairwise
from kit.errors import relative_error
from kit.interpreter import interpret

interpret()  # before upstream is imported
DEVICE, EXECUTED = current_target().device, current_target().executed
NAMES = ("input", "weight", "bias")
OUTPUTS = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
OPTIONS: dict[str, tuple[Any, ...]] = {
    "ignore_index": (-100, 2),
    "lse_square_scale": (0.0, 0.03),
    "label_smoothing": (0.0, 0.2),
    "softcap": (None, 16.0),
    "accum_dtype": (None, torch.float32),
    "use_token_scaling": (False, True),
}
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16", "autocast"),  # autocast: input in bf16, weight and bias in fp32
    "shape": ((7, 5, 25), (1, 9, 7), (3, 3, 50), (6, 8, 24)),  # BT, H, V: in 4 chunks, the last short; 1; 3; 3
    "bias": (True, False),
    "layout": ("plain", "column-major input", "column-major weight"),
    "labels": ("some ignored", "none ignored", "all ignored"),
    "ce_weight": ("absent", "given"),
    **OPTIONS,
    "returns": ("loss", "z_loss", "all"),
}
FORMS: dict[str, dict[str, Any]] = {"fp32": {}}
if EXECUTED:
    FORMS["bf16"] = {"dtype": "bfloat16", "shape": (1024, 1024, 32000)}


def covering(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows that cover each pair of values. On a GPU, where a row is a kernel to compile, each value alone."""
    return pairwise(factors)[: max(map(len, factors.values())) if EXECUTED else None]


@functools.cache
def liger() -> Any:  # noqa: ANN401 - a module
    """Import the release that is on the path: the file of its public module and autograd function."""
    # The parent package imports the transformers library in older releases: it is found, not executed.
    specification = importlib.util.find_spec("liger_kernel.transformers")
    assert specification is not None
    sys.modules[specification.name] = importlib.util.module_from_spec(specification)
    return importlib.import_module(f"{specification.name}.fused_linear_cross_entropy")


class Case(SimpleNamespace):
    """A value of each factor: the inputs, the call of the code under test, its reference, and checks.

    Factors besides FACTORS are reduction, trained ("all", "nothing", one of NAMES, or "frozen " and one of them), way
    (see `backward`), scales (of the incoming gradients) and saved: "plain"; "copied" or "copied at each use", by hooks;
    "checkpointed" or "checkpointed reentrant".

    Attributes, which may be set before the case is run:
        inputs: input [BT, H], weight [V, H] and bias [V], rounded to the dtype; logits have about unit variance
        target: labels [BT] int64
        rows: what weighs the rows [BT] with reduction="none"; of a reduced loss, the first is its factor
        class_weights: weights [V] of the classes
    """

    reduction, trained, way, saved = "mean", "all", "once", "plain"
    scales: tuple[float, ...] = (1.0, 1.0)

    def __init__(self, **factors: Any) -> None:  # noqa: ANN401 - as many types as factors
        super().__init__(**{name: values[0] for name, values in FACTORS.items()} | factors)
        self.BT, self.H, self.V = self.shape
        self.autocast = self.dtype == "autocast"
        self.torch_dtype = torch.bfloat16 if self.autocast else getattr(torch, self.dtype)
        names = NAMES if self.bias else NAMES[:2]  # without a bias, "bias" and "frozen bias" are "all"
        self.is_trained = [name for name in names if self.trained not in (f"frozen {name}", "nothing")]
        self.is_trained = [self.trained] if self.trained in names else self.is_trained

        random = [torch.Generator().manual_seed(seed) for seed in (9, 10, 11, 12)]
        shapes = {"input": (self.BT, self.H), "weight": (self.V, self.H), "bias": (self.V,)}
        norms, self.inputs = {"input": 1.0, "weight": self.H**-0.5, "bias": 0.1}, {}
        for name in names:
            x = (torch.randn(shapes[name], generator=random[0]) * norms[name]).to(DEVICE, self.torch_dtype)
            x = x.t().contiguous().t() if self.layout == f"column-major {name}" else x
            self.inputs[name] = x.float() if self.autocast and name != "input" else x
        labels = torch.randint(self.V, (self.BT,), generator=random[1])
        labels[labels == self.ignore_index] = 0
        if self.labels != "none ignored":
            labels[slice(None) if self.labels == "all ignored" else slice(3, None, 7)] = self.ignore_index
        weights = torch.rand(self.BT, generator=random[2]) + 0.25
        classes = torch.rand(self.V, generator=random[3]) + 0.5
        self.target, self.class_weights = labels.to(DEVICE), classes.to(DEVICE)
        self.rows = (weights if self.reduction == "none" else torch.ones(self.BT)).to(DEVICE)

    @property
    def options(self) -> dict[str, Any]:
        """The reduction and the options that are not at their default, by their public names."""
        options = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) != OPTIONS[name][0]}
        options |= {f"return_{name}": True for name in OUTPUTS[1:] if self.returns in (name, "all")}
        options |= {} if self.ce_weight == "absent" else {"ce_weight": self.class_weights}
        return options | {"reduction": self.reduction}

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return copies of the inputs, with their strides."""
        return {name: x.clone().requires_grad_(name in self.is_trained) for name, x in self.inputs.items()}

    def forward(self, leaves: dict[str, torch.Tensor], labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Call the code under test; return its outputs by their names. Skips where a release lacks an option."""
        module = liger().LigerFusedLinearCrossEntropyLoss
        if missing := self.options.keys() - inspect.signature(module).parameters:
            pytest.skip(f"this release has no {', '.join(sorted(missing))}")
        hidden, weight, bias = (leaves.get(name) for name in NAMES)
        hooks = autograd.copies_of_saved(at_each_use=self.saved == "copied at each use")
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast)
        with autocast, hooks if self.saved.startswith("copied") else contextlib.nullcontext():
            call = module(**self.options)
            if self.saved.startswith("checkpointed"):
                call = functools.partial(checkpoint, call, use_reentrant=self.saved == "checkpointed reentrant")
            result = call(weight, hidden, self.target if labels is None else labels, bias)
        outputs = {"loss": result}
        if self.returns != "loss":
            outputs = {name: getattr(result, name, None) for name in OUTPUTS}
        shape = (self.BT,) if self.reduction == "none" else ()
        assert getattr(outputs["loss"], "shape", None) == shape, f"the loss has not the shape {shape}: {result}"
        return outputs

    def incoming(self, scale: float = 1.0) -> torch.Tensor:
        """Return a gradient of the loss: [BT] with reduction="none", else a scalar. By 1 its strides stay."""
        gradient = self.rows if self.reduction == "none" else self.rows[0]
        return gradient if scale == 1.0 else gradient * scale

    def backward(self, loss: torch.Tensor, leaves: dict[str, Any], way: str, *scales: float) -> list[Any]:
        """Go backward; return pairs of a scale and the gradients by name, None where there is none.

        "once" and "with a graph" use the first scale, the others all. "freed by the last" and "twice" differ in the
        last backward, which frees or retains the graph. "summed" accumulates in `grad`, as a reentrant checkpoint
        refuses autograd.grad. "written into" sets earlier results to 0, and returns the last.
        """
        assert loss.requires_grad, "the loss has no graph"
        trained, pairs = [leaves[name] for name in self.is_trained], list[Any]()
        scales = scales[:1] if way in ("once", "with a graph") else scales
        for number, scale in enumerate(scales, 1):
            retain = number < len(scales) or way in ("twice", "with a graph")
            if way == "summed":
                torch.autograd.backward(loss, self.incoming(scale), retain_graph=retain)
                pairs = [(sum(scales), [leaf.grad for leaf in trained])]
                continue
            if way == "written into" and pairs:
                for x in filter(torch.is_tensor, pairs.pop()[1]):
                    x.zero_()
            keep = {"retain_graph": retain, "create_graph": way == "with a graph", "allow_unused": True}
            pairs.append((scale, torch.autograd.grad(loss, trained, self.incoming(scale), **keep)))
        return [(scale, dict(zip(self.is_trained, gradients, strict=True))) for scale, gradients in pairs]

    def run(self) -> tuple[dict[str, Any], list[Any]]:
        """Go forward and backward; return outputs, and pairs as of `backward`. The arguments must not be changed."""
        leaves = self.leaves()
        arguments = {**leaves, "labels": self.target, "incoming gradient": self.rows}
        before = {name: x.detach().clone() for name, x in arguments.items()}
        outputs = self.forward(leaves)
        pairs = self.backward(outputs["loss"], leaves, self.way, *self.scales) if self.is_trained else []
        for name, x in arguments.items():
            assert torch.equal(x, before[name]), f"{name} was changed"
        return outputs, pairs

    def plain(self, *, exact: bool) -> SimpleNamespace:
        """Return leaves by name, logits [BT, V], losses and z_losses [BT] of plain PyTorch, in float64 or rounded."""
        leaves = {name: (x.double() if exact else x.clone()).requires_grad_() for name, x in self.inputs.items()}
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast and not exact):
            logits = linear(leaves["input"], leaves["weight"], leaves.get("bias"))
        logits = logits if exact else logits.float()  # the losses are never in 16 bits
        if self.softcap:
            logits = self.softcap * (logits / self.softcap).tanh()
        valid = self.target != self.ignore_index
        classes = torch.ones_like(logits[0]) if self.ce_weight == "absent" else self.class_weights.to(logits.dtype)
        options = {"ignore_index": self.ignore_index, "label_smoothing": self.label_smoothing, "reduction": "none"}
        losses = cross_entropy(logits, self.target, classes, **options)
        z_losses = (self.lse_square_scale * logits.logsumexp(-1) ** 2).where(valid, 0)
        if self.reduction == "mean":
            losses = losses / classes[self.target[valid]].sum().clamp(min=1e-9)
            z_losses = z_losses / valid.sum().clamp(min=1)
        losses = losses + z_losses
        if self.use_token_scaling:
            scale = logits.detach().softmax(-1).gather(1, self.target.where(valid, 0)[:, None])[:, 0]
            losses, z_losses = losses * scale, z_losses * scale
        return SimpleNamespace(leaves=leaves, logits=logits, losses=losses, z_losses=z_losses)

    def reference(self, *, exact: bool) -> dict[str, torch.Tensor]:
        """Return logits, loss, z_loss and gradients of plain PyTorch; rounded gradients accumulate over chunks."""
        plain = self.plain(exact=exact)
        step = 1 << (-(-self.BT // -(-self.V // self.H)) - 1).bit_length()  # rows of a chunk of the kernel
        for weighted in (plain.losses * self.incoming()).split(self.BT if exact else step):
            weighted.sum().backward(retain_graph=True)
        both = (x.detach() if self.reduction == "none" else x.detach().sum() for x in (plain.losses, plain.z_losses))
        gradients = {name: x.grad for name, x in plain.leaves.items()}
        return {"logits": plain.logits.detach(), **dict(zip(OUTPUTS, both, strict=False)), **gradients}

    @functools.cached_property
    def right(self) -> dict[str, torch.Tensor]:
        """The reference in float64."""
        return self.reference(exact=True)

    @functools.cached_property
    def rounded(self) -> dict[str, torch.Tensor]:
        """The reference in the case's dtype."""
        return self.reference(exact=False)

    def tolerance(self, name: str, least: float = 0.0) -> float:
        """Return the tolerance of "loss", "z_loss" or a gradient; in 16 bits it is at least so many eps."""
        eps = torch.finfo(self.torch_dtype).eps
        if self.dtype == "float32":
            return float(8 * eps * max(self.shape) ** 0.5)
        return max(5 * relative_error(self.rounded[name], self.right[name]), least * eps)

    def close(self, name: str, tensor: Any, right: torch.Tensor, tolerance: float) -> None:  # noqa: ANN401 - also None
        """Check one tensor."""
        assert getattr(tensor, "shape", None) == right.shape, f"{name} is no tensor of {right.shape}: {tensor}"
        error = relative_error(tensor, right)
        assert error <= tolerance, f"{name}: relative error {error:.2e}, tolerance {tolerance:.2e}"

    def check(self, outputs: dict[str, Any], backwards: list[Any], *, least: float = 0.0) -> None:
        """Check losses, pairs of a scale and gradients by name, and what comes beside the loss."""
        valid = self.target != self.ignore_index
        has_mean = bool(valid.any())  # no rows have no mean
        for name in OUTPUTS[:1] if self.returns == "loss" else OUTPUTS[:2]:
            if has_mean or self.reduction != "mean":
                self.close(name, outputs[name], self.right[name], self.tolerance(name, least))
        for scale, gradients in backwards:
            for name, x in gradients.items():
                self.close(f"gradient of {name}", x, self.right[name] * scale, self.tolerance(name, least))
        if self.returns == "all":
            tokens, logits = outputs["predicted_tokens"], self.right["logits"]
            best, second = logits.topk(2).values.T
            slack = 16 * torch.finfo(self.torch_dtype).eps * logits.abs().amax(-1)
            right, is_near_tie = logits.argmax(-1).where(valid, -1), valid & (best - second <= slack)
            assert (is_near_tie | (tokens == right)).all(), f"predicted tokens {tokens}, expected {right}"
            hits = (tokens == self.target).float()
            if has_mean:
                accuracy = hits if self.reduction == "none" else hits.sum() / valid.sum()
                self.close("token accuracy", outputs["token_accuracy"], accuracy, 1e-6)

    def judge(self, least: float = 0.0) -> None:
        """Run the case, and check what it returned."""
        self.check(*self.run(), least=least)

    def check_bits(self, name: str, output: Callable[..., None]) -> None:
        """Check one backward, and record its tensors: where a second run gives the same, both lanes have to."""
        runs = self.run(), self.run()
        self.check(*runs[0])
        tensors, again = ({"loss": outputs["loss"]} | pairs[0][1] for outputs, pairs in runs)
        for key, x in tensors.items():
            output(f"{name}.{key}", x, must_match=torch.equal(x, again[key]))

    def check_change(self, name: str) -> None:
        """Check that a change of a tensor in place makes no difference, or that PyTorch refuses the backward."""
        leaves, _ = self.leaves(), self.right  # the reference is made before the change
        outputs = self.forward(leaves)
        with torch.no_grad():
            (leaves | {"labels": self.target})[name].zero_()
        go = functools.partial(self.backward, outputs["loss"], leaves, "once", *self.scales)
        self.check(outputs, autograd.unless_refused(go, autograd.CHANGED_IN_PLACE) or [])

    def check_freed(self) -> None:
        """Check that a freed graph keeps nothing alive, and refuses another backward."""
        leaves, labels = self.leaves(), self.target.clone()
        copies = {name: x.clone() for name, x in leaves.items()}
        loss = self.forward(copies, labels)["loss"]
        go = functools.partial(self.backward, loss, leaves, "once", *self.scales)
        pairs = go()
        self.check({"loss": loss}, pairs)
        storages = autograd.weak_storages([*copies.values(), labels, *pairs[0][1].values()])
        refused = autograd.unless_refused(go, "backward through the graph a second time") is None
        assert refused, "another backward is not refused"
        del copies, labels, pairs
        alive = autograd.kept_alive(storages)
        assert alive == 0, f"the loss keeps {alive} of {len(storages)} tensors alive"

    def products(self) -> float:
        """Return how many products of the size of input times weight a step makes; an evaluation has no backward."""
        from torch.utils.flop_counter import FlopCounterMode  # noqa: PLC0415 - it imports triton, after interpret()

        leaves = self.leaves()
        with FlopCounterMode(display=False) as counter:
            loss = self.forward(leaves)["loss"]
            if loss.requires_grad:
                loss.backward(self.incoming(self.scales[0]))
        return float(counter.get_total_flops() / (2 * self.BT * self.H * self.V))
