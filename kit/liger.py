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
# V >> H makes several chunks, 13 rows no multiple of a chunk's 2; H and V are no powers of two.
FORMS: dict[str, dict[str, Any]] = {"fp32": {"shape": (13, 5, 45)}}
if EXECUTED:
    FORMS["bf16"] = {"dtype": "bfloat16", "shape": (1024, 1024, 32000)}


def covering(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows that cover each pair of values. On a GPU, where most are kernels to compile, the first rows alone."""
    return pairwise(factors)[: 12 if EXECUTED else None]


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
    (of autograd.WAYS), scales (of the incoming gradients), saved ("plain", "copied" or "copied at each use" by hooks)
    and chunk_mem_const. An attribute may be set before it is first used.
    """

    def __init__(self, **factors: Any) -> None:  # noqa: ANN401 - as many types as factors
        usual = {"reduction": "mean", "trained": "all", "way": "once", "scales": (1.0, 1.0), "saved": "plain"}
        first = {name: values[0] for name, values in FACTORS.items()}
        super().__init__(**usual | {"chunk_mem_const": 1} | first | factors)
        self.BT, self.H, self.V = self.shape
        self.autocast = self.dtype == "autocast"
        self.torch_dtype = torch.bfloat16 if self.autocast else getattr(torch, self.dtype)
        if self.entry == "module":
            self.chunk_mem_const = 1  # it has no such argument
        given = NAMES if self.bias else NAMES[:2]  # without a bias, "bias" and "frozen bias" are "all"
        self.is_trained = [name for name in given if self.trained not in (f"frozen {name}", "nothing")]
        self.is_trained = [self.trained] if self.trained in given else self.is_trained

    @functools.cached_property
    def inputs(self) -> dict[str, torch.Tensor]:
        """Input [BT, H], weight [V, H] and bias [V], rounded to the dtype; logits have about unit variance."""
        random = torch.Generator().manual_seed(9)
        sizes = zip(NAMES, ((self.BT, self.H), (self.V, self.H), (self.V,)), (1, self.H**-0.5, 0.1), strict=True)
        found = {name: torch.randn(size, generator=random) * scale for name, size, scale in sizes}
        found = {name: x.to(DEVICE, self.torch_dtype) for name, x in found.items() if name != "bias" or self.bias}
        return {name: x.float() if self.autocast and name != "input" else x for name, x in found.items()}

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
        found = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) != FACTORS[name][0]}
        found |= {f"return_{name}": True for name in OUTPUTS[1:] if self.returns in (name, "all")}
        found |= {"chunk_mem_const": self.chunk_mem_const} if self.chunk_mem_const != 1 else {}
        return found | ({} if self.ce_weight == "absent" else {"ce_weight": self.class_weights})

    def leaves(self) -> dict[str, torch.Tensor]:
        """Return copies of the inputs, with this case's strides."""
        found = {name: x.clone() for name, x in self.inputs.items()}
        if self.layout == "sliced input":
            found["input"] = torch.stack((found["input"], found["input"]), -1)[..., 0]
        elif self.layout.startswith("column-major"):
            name = self.layout.split()[-1]
            found[name] = found[name].t().contiguous().t()
        return {name: x.requires_grad_(name in self.is_trained) for name, x in found.items()}

    def call(self, leaves: dict[str, torch.Tensor], labels: torch.Tensor) -> dict[str, Any]:
        """Call the code under test; return its outputs by their names. Skips where a release lacks an option."""
        hidden, weight, bias = (leaves.get(name) for name in NAMES)
        options = self.options | {"reduction": self.reduction}
        if missing := [name for name in options if name not in liger().parameters]:
            pytest.skip(f"this release has no {', '.join(missing)}")
        if self.entry == "function":
            values = {name: each.default for name, each in liger().parameters.items()}
            values |= {"_input": hidden, "weight": weight, "target": labels, "bias": bias} | options
            found = liger().function.apply(*values.values())
        elif self.entry == "functional":
            found = liger().functional(hidden, weight, labels, bias, **options)
        else:
            found = liger().module(**options)(weight, hidden, labels, bias)
        if not isinstance(found, torch.Tensor | tuple):  # older releases return the loss and the z loss
            found = [getattr(found, name, None) for name in OUTPUTS]
        return dict(zip(OUTPUTS, [found] if isinstance(found, torch.Tensor) else found, strict=False))

    def forward(self, leaves: dict[str, torch.Tensor], labels: torch.Tensor | None = None) -> dict[str, Any]:
        """Call the code under test, under autocast and with hooks on what it saves where this case has them."""
        hooks = autograd.copies_of_saved(at_each_use=self.saved == "copied at each use")
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast)
        with autocast, hooks if self.saved != "plain" else contextlib.nullcontext():
            found = self.call(leaves, self.target if labels is None else labels)
        shape = (self.BT,) if self.reduction == "none" else ()
        assert getattr(found["loss"], "shape", None) == shape, f"the loss has not the shape {shape}: {found['loss']}"
        return found

    def incoming(self, scale: float = 1.0) -> torch.Tensor:
        """Return a gradient of the loss: [BT] with reduction="none", else a scalar. By 1 its strides stay."""
        found = self.rows if self.reduction == "none" else self.rows[0]
        return found if scale == 1.0 else found * scale

    def backward(self, loss: torch.Tensor, leaves: dict[str, Any], way: str, *scales: float) -> list[Any]:
        """Go backward, or "into leaves"; return pairs of an incoming gradient and gradients by name."""
        assert loss.requires_grad, "the loss has no graph"
        go = autograd.backward_into_leaves if way == "into leaves" else functools.partial(autograd.backward, way=way)
        found = go(loss, [leaves[name] for name in self.is_trained], [self.incoming(scale) for scale in scales])
        return [(each, dict(zip(self.is_trained, gradients, strict=True))) for each, gradients in found]

    def run(self) -> tuple[dict[str, Any], list[Any]]:
        """Go forward and backward; return outputs, and pairs as of `backward`. What is given has to stay as it was."""
        leaves, labels, rows = self.leaves(), self.target.clone(), self.rows.clone()
        if self.layout == "strided labels":
            labels = torch.stack((labels, labels), -1)[:, 0]
        outputs = self.forward(leaves, labels)
        found = self.backward(outputs["loss"], leaves, self.way, *self.scales) if self.is_trained else []
        pairs = {name: (x, self.inputs[name]) for name, x in leaves.items()}
        for name, (x, y) in (pairs | {"target": (labels, self.target), "gradient": (self.rows, rows)}).items():
            assert torch.equal(x, y), f"{name} was changed"
        return outputs, found

    def check_bits(self, name: str, output: Callable[..., None]) -> None:
        """Check one backward, and record its tensors: where a second run gives the same, both lanes have to."""
        (outputs, found), (again, others) = self.run(), self.run()
        tensors, same = ({"loss": x["loss"]} | pairs[0][1] for x, pairs in ((outputs, found), (again, others)))
        for key, x in tensors.items():
            output(f"{name}.{key}", x, must_match=torch.equal(x, same[key]))
        self.reference.check(outputs, found)

    def check_change(self, *names: str) -> None:
        """Check that a change in place of these tensors makes no difference, or that PyTorch refuses the backward."""
        leaves, _ = self.leaves(), self.reference.exact  # the reference is made before the change
        loss = self.forward(leaves)["loss"]
        with torch.no_grad():
            for name in names:
                (leaves | {"labels": self.target})[name].zero_()
        go = functools.partial(self.backward, loss, leaves, "once", self.scales[0])
        for incoming, gradients in autograd.unless_refused(go, autograd.CHANGED_IN_PLACE) or ():
            right = self.reference.gradients(incoming)
            for name, x in gradients.items():
                self.reference.close(f"gradient of {name}", x, right[name], self.reference.tolerance(name))

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
        [(_, gradients)] = self.backward(loss, edges, "once", self.scales[0])
        assert all(x is not None for x in gradients.values()), f"no gradient: {gradients}"
        storages = autograd.weak_storages([*copies.values(), labels, *gradients.values()])
        go = functools.partial(self.backward, loss, edges, "once", self.scales[0])
        assert autograd.unless_refused(go, autograd.GRAPH_FREED) is None, "another backward is not refused"
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
