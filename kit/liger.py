"""Liger-Kernel's fused linear cross entropy: its options, a call, and what four contracts ask of it.

Sizes are BT tokens, H hidden and V classes.
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
from torch.utils.checkpoint import checkpoint

from kit import autograd, current_target, pairwise
from kit.cross_entropy import Reference

DEVICE, EXECUTED = current_target().device, current_target().executed
NAMES = ("input", "weight", "bias")
OUTPUTS = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
FACTORS: dict[str, tuple[Any, ...]] = {
    "dtype": ("float32", "bfloat16", "float16", "autocast"),  # autocast: input in bf16, weight and bias in fp32
    "shape": ((7, 5, 25), (1, 9, 7), (3, 3, 50), (6, 8, 24)),  # BT, H, V: in 4 chunks, the last short; 1; 3; 3
    "bias": (True, False),
    "layout": ("plain", "sliced input", "column-major input", "column-major weight", "strided labels"),
    "labels": ("some ignored", "none ignored", "all ignored"),
    "entry": ("module", "function", "functional"),
    "ce_weight": ("absent", "given", "strided"),
    "ignore_index": (-100, 2),
    "lse_square_scale": (0.0, 0.03),
    "label_smoothing": (0.0, 0.2),
    "softcap": (None, 16.0),
    "accum_dtype": (None, torch.float32),
    "use_token_scaling": (False, True),
    "returns": ("loss", "z_loss", "token_accuracy", "predicted_tokens", "all"),
}
OPTIONS = ("ignore_index", "lse_square_scale", "label_smoothing", "softcap", "accum_dtype", "use_token_scaling")
FORMS: dict[str, dict[str, Any]] = {"fp32": {}}
if EXECUTED:
    FORMS["bf16"] = {"dtype": "bfloat16", "shape": (1024, 1024, 32000)}


def covering(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows that cover each pair of values. On a GPU, where a row is a kernel to compile, each value alone."""
    return pairwise(factors)[: max(map(len, factors.values())) if EXECUTED else None]


@functools.cache
def liger() -> SimpleNamespace:
    """Import the release that is on the path: its module, autograd function and functional form, and their options."""
    # The parent package imports the transformers library in older releases: it is found, not executed.
    parent = "liger_kernel.transformers"
    specification = importlib.util.find_spec(parent)
    assert specification is not None
    sys.modules[parent] = importlib.util.module_from_spec(specification)
    public = importlib.import_module(f"{parent}.fused_linear_cross_entropy")
    function = public.LigerFusedLinearCrossEntropyFunction
    return SimpleNamespace(
        module=public.LigerFusedLinearCrossEntropyLoss,
        function=function,
        functional=importlib.import_module(f"{parent}.functional").liger_fused_linear_cross_entropy,
        parameters=dict([*inspect.signature(function.forward).parameters.items()][1:]),  # without ctx
    )


class Case(SimpleNamespace):
    """A value of each factor: the inputs, the call of the code under test, and its reference.

    Factors besides FACTORS are reduction, trained ("all", "nothing", one of NAMES, or "frozen " and one of them), way
    (see `backward`), scales (of the incoming gradients) and saved ("plain", "copied" or "copied at each use" by hooks).
    An attribute may be set before it is first used.
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

    @functools.cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Input [BT, H], weight [V, H] and bias [V], rounded to the dtype; logits have about unit variance."""
        random = torch.Generator().manual_seed(9)
        hidden, weight = torch.randn(self.BT, self.H, generator=random), torch.randn(self.V, self.H, generator=random)
        tensors = {"input": hidden, "weight": weight * self.H**-0.5}
        if self.bias:
            tensors["bias"] = torch.randn(self.V, generator=random) * 0.1
        tensors = {name: x.to(DEVICE, self.torch_dtype) for name, x in tensors.items()}
        return {name: x.float() if self.autocast and name != "input" else x for name, x in tensors.items()}

    @functools.cached_property
    def target(self) -> torch.Tensor:
        """Labels [BT] int64."""
        labels = torch.randint(self.V, (self.BT,), generator=torch.Generator().manual_seed(10))
        labels[labels == self.ignore_index] = 0
        if self.labels != "none ignored":
            labels[slice(None) if self.labels == "all ignored" else slice(3, None, 7)] = self.ignore_index
        return labels.to(DEVICE)

    @functools.cached_property
    def rows(self) -> torch.Tensor:
        """What weighs the rows [BT] with reduction="none"; of a reduced loss, the first is its factor."""
        weights = torch.rand(self.BT, generator=torch.Generator().manual_seed(11)) + 0.25
        return (weights if self.reduction == "none" else torch.ones(self.BT)).to(DEVICE)

    @functools.cached_property
    def class_weights(self) -> torch.Tensor:
        """Weights [V] of the classes, with the strides that the code under test is given."""
        weights = torch.rand(self.V, generator=torch.Generator().manual_seed(12)).to(DEVICE) + 0.5
        return torch.stack((weights, weights), 1)[:, 0] if self.ce_weight == "strided" else weights

    @functools.cached_property
    def reference(self) -> Reference:
        """Losses and gradients in float64."""
        return Reference(self)

    @property
    def options(self) -> dict[str, Any]:
        """The options that are not at their default, by their public names."""
        options = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) != FACTORS[name][0]}
        options |= {f"return_{name}": True for name in OUTPUTS[1:] if self.returns in (name, "all")}
        return options | ({} if self.ce_weight == "absent" else {"ce_weight": self.class_weights})

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return copies of the inputs, with this case's strides."""
        leaves = {name: x.clone() for name, x in self.inputs.items()}
        if self.layout == "sliced input":
            leaves["input"] = torch.stack((leaves["input"], leaves["input"]), -1)[..., 0]
        elif self.layout.startswith("column-major"):
            name = self.layout.split()[-1]
            leaves[name] = leaves[name].t().contiguous().t()
        return {name: x.requires_grad_(name in self.is_trained) for name, x in leaves.items()}

    def call(self, leaves: dict[str, torch.Tensor], labels: torch.Tensor) -> dict[str, Any]:
        """Call the code under test; return its outputs by their names. Skips where a release lacks an option."""
        hidden, weight, bias = (leaves.get(name) for name in NAMES)
        options = self.options | {"reduction": self.reduction}
        if missing := [name for name in options if name not in liger().parameters]:
            pytest.skip(f"this release has no {', '.join(missing)}")
        if self.entry == "function":
            arguments = {name: parameter.default for name, parameter in liger().parameters.items()}
            arguments |= {"_input": hidden, "weight": weight, "target": labels, "bias": bias} | options
            outputs = liger().function.apply(*arguments.values())
        elif self.entry == "functional":
            outputs = liger().functional(hidden, weight, labels, bias, **options)
        else:
            outputs = liger().module(**options)(weight, hidden, labels, bias)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        elif not isinstance(outputs, tuple):  # older releases return a tuple of the loss and the z loss
            outputs = [getattr(outputs, name, None) for name in OUTPUTS]
        return dict(zip(OUTPUTS, outputs, strict=False))

    def forward(self, leaves: dict[str, torch.Tensor], labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Call the code under test, under autocast and with hooks on what it saves where this case has them."""
        hooks = autograd.copies_of_saved(at_each_use=self.saved == "copied at each use")
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast)
        with autocast, hooks if self.saved != "plain" else contextlib.nullcontext():
            outputs = self.call(leaves, self.target if labels is None else labels)
        shape = (self.BT,) if self.reduction == "none" else ()
        assert getattr(outputs["loss"], "shape", None) == shape, f"the loss has not the shape {shape}: {outputs}"
        return outputs

    def incoming(self, scale: float = 1.0) -> torch.Tensor:
        """Return a gradient of the loss: [BT] with reduction="none", else a scalar. By 1 its strides stay."""
        gradient = self.rows if self.reduction == "none" else self.rows[0]
        return gradient if scale == 1.0 else gradient * scale

    def backward(self, loss: torch.Tensor, leaves: dict[str, Any], way: str, *scales: float) -> list[Any]:
        """Go backward; return pairs of an incoming gradient and the gradients by name, None where there is none.

        "once", "retained once" and "each alone", one leaf at a time, use the first scale. "twice" uses all and retains
        the graph to the end; "freed by the last" does not, and "into leaves" does the same by way of `grad`, as a
        reentrant checkpoint refuses autograd.grad. "summed" accumulates the first and the last in `grad`. "written
        into" sets the first results to 0 before the last backward.
        """
        assert loss.requires_grad, "the loss has no graph"
        trained = [leaves[name] for name in self.is_trained]
        incoming = [self.incoming(scale) for scale in (scales[:1] if "once" in way else scales)]
        first, last = incoming[0], incoming[-1]

        def grad(gradient: torch.Tensor, *, retain: bool, of: Any = trained) -> list[torch.Tensor | None]:  # noqa: ANN401
            return [*torch.autograd.grad(loss, of, gradient, retain_graph=retain, allow_unused=True)]

        if way == "each alone":
            pairs = [(first, [x for leaf in trained for x in grad(first, retain=True, of=leaf)])]
        elif way == "summed":
            torch.autograd.backward(loss, first, retain_graph=True)
            torch.autograd.backward(loss, last)
            pairs = [(first.double() + last.double(), [leaf.grad for leaf in trained])]
        elif way == "written into":
            for x in filter(torch.is_tensor, grad(first, retain=True)):
                x.zero_()
            pairs = [(last, grad(last, retain=False))]
        elif way == "into leaves":
            pairs = []
            for number, gradient in enumerate(incoming, 1):
                for leaf in trained:
                    leaf.grad = None
                torch.autograd.backward(loss, gradient, retain_graph=number < len(incoming))
                pairs.append((gradient, [leaf.grad for leaf in trained]))
        else:
            pairs = [(gradient, grad(gradient, retain=True)) for gradient in incoming[:-1]]
            pairs.append((last, grad(last, retain=way in ("retained once", "twice"))))
        return [(gradient, dict(zip(self.is_trained, gradients, strict=True))) for gradient, gradients in pairs]

    def run(self) -> tuple[dict[str, Any], list[Any]]:
        """Go forward and backward; return outputs, and pairs as of `backward`. The arguments must not be changed."""
        leaves, labels, rows = self.leaves(), self.target.clone(), self.rows.clone()
        if self.layout == "strided labels":
            labels = torch.stack((labels, labels), -1)[:, 0]
        outputs = self.forward(leaves, labels)
        pairs = self.backward(outputs["loss"], leaves, self.way, *self.scales) if self.is_trained else []
        for name, x in self.inputs.items():
            assert torch.equal(leaves[name], x), f"{name} was changed"
        assert torch.equal(labels, self.target), "the labels were changed"
        assert torch.equal(self.rows, rows), "the incoming gradient was changed"
        return outputs, pairs

    def check_bits(self, name: str, output: Callable[..., None]) -> None:
        """Check one backward, and record its tensors: where a second run gives the same, both lanes have to."""
        (outputs, pairs), (outputs_again, pairs_again) = self.run(), self.run()
        self.reference.check(outputs, pairs)
        again = {"loss": outputs_again["loss"]} | pairs_again[0][1]
        for key, x in ({"loss": outputs["loss"]} | pairs[0][1]).items():
            output(f"{name}.{key}", x, must_match=torch.equal(x, again[key]))

    def check_change(self, name: str) -> None:
        """Check that a change of a tensor in place makes no difference, or that PyTorch refuses the backward."""
        leaves, _ = self.leaves(), self.reference.exact  # the reference is made before the change
        loss = self.forward(leaves)["loss"]
        with torch.no_grad():
            (leaves | {"labels": self.target})[name].zero_()
        go = functools.partial(self.backward, loss, leaves, "once", *self.scales)
        for incoming, gradients in autograd.unless_refused(go, autograd.CHANGED_IN_PLACE) or ():
            right = self.reference.gradients(incoming)
            for trained, x in gradients.items():
                self.reference.close(f"gradient of {trained}", x, right[trained], self.reference.tolerance(trained))

    def check_around(self, around: str) -> None:
        """Check all backwards of a loss with "on the CPU" (what is saved), "checkpointed" or "reentrant" around it."""
        leaves, asked = self.leaves(), list[int]()

        def call(*tensors: torch.Tensor) -> Any:  # noqa: ANN401 - the loss
            return self.forward(dict(zip(leaves, tensors, strict=True)))["loss"]

        if around == "on the CPU":
            with autograd.offloaded() as asked:
                loss = call(*leaves.values())
        else:
            loss = checkpoint(call, *leaves.values(), use_reentrant=around == "reentrant")
        self.reference.check({"loss": loss}, self.backward(loss, leaves, "into leaves", *self.scales))
        uses = len(self.scales)
        assert max(asked, default=0) <= uses, f"in {uses} backwards saved tensors were asked for {asked} times"

    def check_freed(self) -> None:
        """Check that a freed graph keeps nothing alive, and refuses another backward."""
        labels, copies = self.target.clone(), {name: x.clone() for name, x in self.leaves().items()}  # it keeps leaves
        loss = self.forward(copies, labels)["loss"]
        edges = {name: torch.autograd.graph.get_gradient_edge(copies[name]) for name in self.is_trained}
        go = functools.partial(self.backward, loss, edges, "once", *self.scales)
        [(_, gradients)] = go()
        assert all(x is not None for x in gradients.values()), f"no gradient: {gradients}"
        storages = autograd.weak_storages([*copies.values(), labels, *gradients.values()])
        refused = autograd.unless_refused(go, "backward through the graph a second time") is None
        assert refused, "another backward is not refused"
        del copies, labels, gradients
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
