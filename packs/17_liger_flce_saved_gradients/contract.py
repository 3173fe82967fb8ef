"""Liger-Kernel's fused linear cross entropy gives the gradients of plain autograd, whatever backward follows another.

What is promised, with reduction="mean" and "sum" as with "none", through the module, the functional form and the
autograd function:

- Every backward through a graph gives the gradients of its own incoming gradient g, whichever went before. g may be 0
  or negative. What a backward returned stays as it is, and the caller may write into it.
- Each of input, weight and bias that is trained gets its gradient, whatever else is frozen.
- Hooks on saved tensors are asked for each tensor once a backward. torch.utils.checkpoint works, of either kind.
- A tensor that is changed in place between forward and backward makes no difference, or PyTorch refuses the backward.
- Another backward through a freed graph is refused, and the loss alone keeps no tensor alive.
- Gradients with a graph of their own are right; their second order is right or refused.
- An ordinary step makes no product and no copy more than release 0.8.5 does.

FACTORS has the options that the patch touches, for BT tokens, H hidden and V classes. Labels that are all ignored, a
loss scale of 65536 in fp16, 65541 columns, and a layer that writes into its incoming gradient are judged besides.

Not judged: `ce_impl`, which chooses another vendor's kernel, torch.compile, and several GPUs. A change of ce_weight is
not judged where backward makes the gradients: the release keeps it where autograd does not look, with "none" too.

The reference is plain autograd in float64 on the same rounded inputs. Tolerances of the relative error:

- fp32: 8 * eps * sqrt(n) for the longest sum of n terms, as rounding errors grow like its root. 8 leaves room for exp,
  log and the product that follows.
- bf16, fp16, autocast: 5 times the error of eager PyTorch in the same dtype, which accumulates gradients over as many
  chunks as the kernel makes. The kernel rounds no element more than twice as often as eager, and no rounding to nearest
  errs by more than 2.5 times its root mean square. Small cases may have no noise by chance: 4 * eps is the least there.
"""

import contextlib
import functools
import importlib.util
import inspect
import itertools
import math
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, linear
from torch.utils.checkpoint import checkpoint

from kit import autograd, current_target, pairwise
from kit.errors import relative_error
from kit.interpreter import interpret

EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
interpret()
DEVICE = current_target().device
FACTORS = {
    "reduction": ("mean", "sum", "none"),
    "dtype": ("float32", "bfloat16", "float16", "autocast"),  # autocast: input in bf16, weight and bias in fp32
    "shape": ((7, 5, 25), (1, 9, 7), (3, 3, 50), (6, 8, 24)),  # BT, H, V: in 4 chunks, the last short; 1; 3; 3
    "scales": ((2.0, 2.0), (1.0, 1.0), (1.0, 0.3), (-0.375, 3.0), (0.0, 1.0)),  # of the first and second gradient
    "trained": ("all", "frozen weight", "frozen bias", "frozen input", "weight", "bias", "input", "nothing"),
    "bias": (True, False),
    "way": ("once", "retained once", "twice", "freed by the last", "each alone", "summed", "written into"),
    "layout": ("plain", "sliced input", "column-major input", "column-major weight", "strided labels"),
    "labels": ("some ignored", "none ignored", "all ignored"),
    "entry": ("module", "function", "functional"),
    "saved": ("plain", "copied", "copied at each use"),
    "ce_weight": ("absent", "given", "strided"),
    "ignore_index": (-100, 2),
    "lse_square_scale": (0.0, 0.03),
    "label_smoothing": (0.0, 0.2),
    "softcap": (None, 16.0),
    "accum_dtype": (None, torch.float32),
    "use_token_scaling": (False, True),
    "returns": ("loss", "z_loss", "token_accuracy", "predicted_tokens", "all"),
    "chunk_mem_const": (1, 3),  # how many logits are made at once
}
NAMES = ("input", "weight", "bias")
OUTPUTS = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
OPTIONS = ("ignore_index", "lse_square_scale", "label_smoothing", "softcap", "accum_dtype", "use_token_scaling")


def excluded(row):
    """Whether a row of factors, or the beginning of one, makes no sense."""
    no_rows = row.get("labels") == "all ignored"  # they have no mean and no accuracy
    return (
        (no_rows and (row.get("reduction") == "mean" or row.get("returns") in ("token_accuracy", "all")))
        or (row.get("trained") == "nothing" and row.get("way", "once") != "once")
        or (row.get("trained") in ("bias", "frozen bias") and row.get("bias") is False)
        or (row.get("entry") == "module" and row.get("chunk_mem_const") == 3)  # it has no such argument
    )


@functools.cache
def liger():
    """Import the release that is on the path."""
    # The parent package imports the transformers library in older releases: it is found, not executed.
    parent = "liger_kernel.transformers"
    sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    from liger_kernel.transformers import functional
    from liger_kernel.transformers import fused_linear_cross_entropy as public

    function = public.LigerFusedLinearCrossEntropyFunction
    return SimpleNamespace(
        module=public.LigerFusedLinearCrossEntropyLoss,
        function=function,
        functional=functional.liger_fused_linear_cross_entropy,
        parameters=dict([*inspect.signature(function.forward).parameters.items()][1:]),  # without ctx
    )


class Case(SimpleNamespace):
    """A value of each factor: the inputs, the call of the code under test, and the reference."""

    def __init__(self, **factors):
        super().__init__(**{name: values[0] for name, values in FACTORS.items()} | factors)
        self.BT, self.H, self.V = self.shape
        self.autocast = self.dtype == "autocast"
        self.torch_dtype = torch.bfloat16 if self.autocast else getattr(torch, self.dtype)

    @functools.cached_property
    def inputs(self):
        """Input [BT, H], weight [V, H] and bias [V], rounded to the dtype; logits have about unit variance."""
        random = torch.Generator().manual_seed(9)
        sizes = zip(NAMES, ((self.BT, self.H), (self.V, self.H), (self.V,)), (1, self.H**-0.5, 0.1), strict=True)
        found = {name: torch.randn(size, generator=random) * scale for name, size, scale in sizes}
        found = {name: x.to(DEVICE, self.torch_dtype) for name, x in found.items() if name != "bias" or self.bias}
        return {name: x.float() if self.autocast and name != "input" else x for name, x in found.items()}

    @functools.cached_property
    def target(self):
        """Labels [BT] int64."""
        labels = torch.randint(self.V, (self.BT,), generator=torch.Generator().manual_seed(10))
        labels[labels == self.ignore_index] = 0
        if self.labels != "none ignored":
            labels[slice(None) if self.labels == "all ignored" else slice(3, None, 7)] = self.ignore_index
        return labels.to(DEVICE)

    @functools.cached_property
    def class_weights(self):
        """Weights [V] of the classes, with the strides that the code under test is given."""
        weights = torch.rand(self.V, generator=torch.Generator().manual_seed(12)).to(DEVICE) + 0.5
        return torch.stack((weights, weights), 1)[:, 0] if self.ce_weight == "strided" else weights

    @functools.cached_property
    def is_trained(self):
        """Names of what is trained."""
        given = NAMES if self.bias else NAMES[:2]
        if self.trained in given:
            return [self.trained]
        return [name for name in given if self.trained not in (f"frozen {name}", "nothing")]

    @property
    def role(self):
        """A defect where release 0.8.5 is wrong, else a control."""
        if self.reduction == "none" or not self.is_trained:
            return pytest.mark.control
        if "input" not in self.is_trained:
            return pytest.mark.defect  # weight and bias get no gradient
        if self.labels == "all ignored" or self.saved == "copied at each use":
            return pytest.mark.control  # every gradient is 0, or every backward starts from what was saved
        first, last, product = self.scales[0], self.scales[-1], math.prod(self.scales)
        found, right = {  # the factors of what the release returns in the end, and those that it should
            "twice": ({product}, {*self.scales}),
            "freed by the last": ({product}, {*self.scales}),
            "each alone": (first ** len(self.is_trained), first),
            "summed": (first + first * last, first + last),
            "written into": (0, last),
        }.get(self.way, (first, first))
        return pytest.mark.control if found == right else pytest.mark.defect

    @property
    def options(self):
        """The options that are not at their default, by their public names."""
        found = {name: getattr(self, name) for name in (*OPTIONS, "chunk_mem_const")}
        found = {name: value for name, value in found.items() if value != FACTORS[name][0]}
        found |= {f"return_{name}": True for name in OUTPUTS[1:] if self.returns in (name, "all")}
        return found | ({} if self.ce_weight == "absent" else {"ce_weight": self.class_weights})

    def leaves(self):
        """Return copies of the inputs, with this case's strides."""
        found = {name: x.clone() for name, x in self.inputs.items()}
        if self.layout == "sliced input":
            found["input"] = torch.stack((found["input"], found["input"]), -1)[..., 0]
        elif self.layout.startswith("column-major"):
            name = self.layout.split()[-1]
            found[name] = found[name].t().contiguous().t()
        return {name: x.requires_grad_(name in self.is_trained) for name, x in found.items()}

    def call(self, leaves, labels):
        """Call the code under test; return its outputs by their names."""
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

    def forward(self, leaves, labels=None):
        """Call the code under test, under autocast and with hooks on what it saves where this case has them."""
        hooks = {"copied": autograd.copies_of_saved(), "copied at each use": autograd.copies_of_saved(at_each_use=True)}
        autocast = torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast)
        with autocast, hooks.get(self.saved, contextlib.nullcontext()):
            found = self.call(leaves, self.target if labels is None else labels)
        shape = (self.BT,) if self.reduction == "none" else ()
        assert getattr(found["loss"], "shape", None) == shape, f"the loss has not the shape {shape}: {found['loss']}"
        return found

    def incoming(self, scale=1.0):
        """Return a gradient of the loss: a scalar, or [BT] with reduction="none"."""
        rows = torch.rand(self.BT, generator=torch.Generator().manual_seed(11)) + 0.25
        return ((rows if self.reduction == "none" else torch.ones(())) * scale).to(DEVICE)

    def run(self):
        """Go forward and backward; return the outputs, and pairs of an incoming gradient and gradients by name."""
        leaves, labels = self.leaves(), self.target.clone()
        if self.layout == "strided labels":
            labels = torch.stack((labels, labels), -1)[:, 0]
        outputs = self.forward(leaves, labels)
        found = []
        if self.is_trained:
            assert outputs["loss"].requires_grad, "the loss has no graph"
            found = self.backward(outputs["loss"], leaves, self.way, *self.scales)
        for name, x in (leaves | {"target": labels}).items():
            assert torch.equal(x, (self.inputs | {"target": self.target})[name]), f"{name} was changed"
        return outputs, found

    def backward(self, loss, leaves, way, *scales):
        """Go backward; return pairs of an incoming gradient and gradients by name."""
        incoming = [self.incoming(scale) for scale in scales]
        go = autograd.backward_into_leaves if way == "into leaves" else functools.partial(autograd.backward, way=way)
        found = go(loss, [leaves[name] for name in self.is_trained], incoming)
        return [(each, dict(zip(self.is_trained, gradients, strict=True))) for each, gradients in found]

    def formula(self, logits, labels):
        """Return the loss and the z loss of each row, of logits [rows, V] and labels [rows]."""
        valid, every = labels != self.ignore_index, self.target != self.ignore_index
        picked = labels.where(valid, 0)
        classes = self.class_weights.to(logits.dtype)
        if self.ce_weight == "absent":
            classes = torch.ones_like(classes)
        log_p = logits.log_softmax(-1)
        log_p_label = log_p.gather(1, picked[:, None])[:, 0]
        loss = (self.label_smoothing - 1) * classes[picked] * log_p_label
        loss = loss - self.label_smoothing / self.V * (log_p * classes).sum(-1)
        z_loss = self.lse_square_scale * logits.logsumexp(-1) ** 2
        if self.reduction == "mean":
            loss, z_loss = loss / classes[self.target[every]].sum(), z_loss / every.sum()
        loss = loss + z_loss
        if self.use_token_scaling:
            loss, z_loss = (x * log_p_label.exp().detach() for x in (loss, z_loss))
        return loss.where(valid, 0), z_loss.where(valid, 0)

    def eager(self, leaves, rows=slice(None)):
        """Return logits, loss and z loss of some rows by plain PyTorch; the losses are never in 16 bits."""
        low = leaves["input"].dtype != torch.float64
        with torch.autocast(DEVICE, torch.bfloat16, enabled=self.autocast and low):
            logits = linear(leaves["input"][rows], leaves["weight"], leaves.get("bias"))
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        if self.softcap:
            logits = self.softcap * (logits / self.softcap).tanh()
        return logits, *self.formula(logits, self.target[rows])

    def reduced(self, losses):
        """Return the losses of rows as the reduction has them."""
        return losses if self.reduction == "none" else losses.sum()

    @functools.cached_property
    def exact(self):
        """Leaves, logits and losses in float64."""
        leaves = {name: x.double().requires_grad_() for name, x in self.inputs.items()}
        logits, loss, z_loss = self.eager(leaves)
        return SimpleNamespace(leaves=leaves, logits=logits, loss=self.reduced(loss), z_loss=self.reduced(z_loss))

    def gradients(self, incoming, **how):
        """Return the gradients in float64 of all inputs by name."""
        leaves = self.exact.leaves
        found = torch.autograd.grad(self.exact.loss, [*leaves.values()], incoming.double(), retain_graph=True, **how)
        return dict(zip(leaves, found, strict=True))

    @functools.cached_property
    def noise(self):
        """Relative errors of eager PyTorch, which accumulates gradients over the chunks that the kernel makes."""
        chunks = -(-self.V // (self.chunk_mem_const * self.H))
        step = 1 << (-(-self.BT // chunks) - 1).bit_length()  # the rows of a chunk: a power of two
        leaves, incoming = {name: x.clone().requires_grad_() for name, x in self.inputs.items()}, self.incoming()
        sums, losses = {name: torch.zeros_like(x) for name, x in leaves.items()}, []
        for rows in (slice(start, start + step) for start in range(0, self.BT, step)):
            _, *both = self.eager(leaves, rows)
            weighted = both[0] * (incoming[rows] if self.reduction == "none" else incoming)
            for name, x in zip(leaves, torch.autograd.grad(weighted.sum(), [*leaves.values()]), strict=True):
                sums[name] += x
            losses.append([x.detach() for x in both])
        loss, z_loss = (self.reduced(torch.cat(x)) for x in zip(*losses, strict=True))
        found = {name: relative_error(sums[name], x) for name, x in self.gradients(incoming).items()}
        errors = {"loss": (loss, self.exact.loss), "z_loss": (z_loss, self.exact.z_loss)}
        return found | {name: relative_error(*pair) for name, pair in errors.items()}

    def tolerance(self, name, least=0):
        """Return the tolerance of the relative error of a loss or of a gradient; at least so many eps."""
        eps = torch.finfo(self.torch_dtype).eps
        if self.dtype == "float32":
            return 8 * eps * max(self.shape) ** 0.5
        return max(5 * self.noise[name], least * eps)

    def close(self, name, found, reference, tolerance):
        """Check one tensor against its reference."""
        assert getattr(found, "shape", None) == reference.shape, f"{name} is no tensor of {reference.shape}: {found}"
        error = relative_error(found, reference)
        assert error <= tolerance, f"{name}: relative error {error:.2e}, tolerance {tolerance:.2e}"

    def check(self, outputs, found, *, least=0):
        """Check the losses, the gradients against those of their incoming gradients, and what comes beside them."""
        self.close("loss", outputs["loss"], self.exact.loss, self.tolerance("loss", least))
        if "return_z_loss" in self.options:
            self.close("z loss", outputs["z_loss"], self.exact.z_loss, self.tolerance("z_loss", least))
        for incoming, gradients in found:
            right = self.gradients(incoming)
            for name, x in gradients.items():
                self.close(f"gradient of {name}", x, right[name], self.tolerance(name, least))
        logits, valid = self.exact.logits, self.target != self.ignore_index
        slack = 16 * torch.finfo(self.torch_dtype).eps * logits.abs().amax(-1, keepdim=True)
        possible = logits >= logits.amax(-1, keepdim=True) - slack  # [BT, V]: a near tie may go either way
        if "return_predicted_tokens" in self.options:
            tokens = outputs["predicted_tokens"]
            assert possible.gather(1, tokens.where(valid, 0)[:, None])[:, 0][valid].all(), f"predicted tokens {tokens}"
            assert (tokens[~valid] == -1).all(), f"predicted tokens {tokens} of ignored rows"
        if "return_token_accuracy" in self.options:
            may = possible.gather(1, self.target.where(valid, 0)[:, None])[:, 0] & valid
            must = may & (possible.sum(-1) == 1)
            low, high = (
                self.reduced(x.double()) / (1 if self.reduction == "none" else valid.sum()) for x in (must, may)
            )
            accuracy = outputs["token_accuracy"]
            assert ((low - 1e-6 <= accuracy) & (accuracy <= high + 1e-6)).all(), f"accuracy {accuracy}, {low} to {high}"


@pytest.fixture
def case(request):
    return Case(**request.param)


def param(*words, role=None, **factors):
    """Return a parameter that carries its role; it is named by these words, or by its factors that are words."""
    named = words or [x for x in factors.values() if isinstance(x, str)] + ["no bias"] * (not factors.get("bias", True))
    return pytest.param(factors, id="-".join(named).replace(" ", "-"), marks=role or Case(**factors).role)


cases = functools.partial(pytest.mark.parametrize, "case", indirect=True)
# V >> H makes several chunks, 13 rows no multiple of a chunk's 2; H and V are no powers of two.
FORMS = {"fp32": {"shape": (13, 5, 45)}}
if current_target().executed:
    FORMS["bf16"] = {"dtype": "bfloat16", "shape": (1024, 1024, 32000)}
SMALL = {"shape": (4, 3, 7)}  # two chunks, the second with an ignored row
FIVE_TIMES = {"way": "freed by the last", "scales": (1.5, -0.7, -0.7, 2.5, 0.3)}  # no 0 and no 1; the same again
SCALED = {"way": "freed by the last", "scales": (2.0, -0.7)}
BY_ONE = {"way": "freed by the last", "scales": (1.0, 1.0)}
KEPT = [
    {"reduction": reduction, "trained": trained}
    for reduction, trained in itertools.product(FACTORS["reduction"], ("all", "frozen input"))
]
BACKWARDS = {
    "sum twice": {"reduction": "sum", "way": "twice"},
    "first result stays": {"way": "freed by the last", "scales": (1.0, 2.0)},
    "after zero": {"way": "twice", "scales": (0.0, 1.0)},
    "summed": {"way": "summed"},
    "five times": FIVE_TIMES,
    "frozen input": {"trained": "frozen input"},
    "sum frozen input": {"reduction": "sum", "trained": "frozen input", "scales": (0.3,)},
    "bias alone": {"trained": "bias"},
    "none twice": {"reduction": "none", "way": "twice"},
    "none frozen input": {"reduction": "none", "trained": "frozen input"},
}


@pytest.mark.parametrize(("reduction", "scale"), [("mean", 2.0), ("sum", 0.3)])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.control
def test_one_backward_gives_the_same_bits(form, reduction, scale, output):
    case = Case(**FORMS[form], reduction=reduction, scales=(scale,))
    (outputs, found), (others, again) = case.run(), case.run()
    pairs = {"loss": (outputs["loss"], others["loss"])}
    pairs |= {f"grad_{name}": (x, again[0][1][name]) for name, x in found[0][1].items()}
    for name, (x, y) in pairs.items():
        output(f"{form}.{reduction}.{name}", x, must_match=torch.equal(x, y))
    case.check(outputs, found)


@pytest.mark.defect
@pytest.mark.parametrize("form", FORMS)
def test_second_backward_gives_the_same_gradients(form, figure):
    case = Case(**FORMS[form], way="twice")
    outputs, [_, (incoming, second)] = case.run()
    if form == [*FORMS][-1]:
        for name, right in case.gradients(incoming).items():
            figure(f"grad_{name}_second_over_expected", float(second[name].double().norm() / right.norm()))
    case.check(outputs, [(incoming, second)])


@pytest.mark.defect
@pytest.mark.parametrize("form", FORMS)
def test_second_backward_in_a_torch_that_does_not_tell_whether_the_graph_is_retained(form, monkeypatch):
    monkeypatch.delattr("torch._C._autograd._get_current_graph_task_keep_graph", raising=False)
    case = Case(**FORMS[form], way="twice")
    case.check(*case.run())


@cases(
    [
        *(param(form, name, **FORMS[form], **factors) for form in FORMS for name, factors in BACKWARDS.items()),
        param("fp16 scaled by 65536", dtype="float16", shape=(13, 5, 45), trained="frozen input", scales=(65536.0,)),
        param("65541 columns", shape=(2, 65541, 3), **SCALED | {"way": "twice"}),
    ]
)  # more columns than a block of any kernel holds
def test_backward_gives_the_gradients_of_plain_autograd(case):
    case.check(*case.run())


@cases(
    [
        *(
            param(f"{number:02}", row["reduction"], row["dtype"], row["trained"], row["way"], **row)
            for number, row in enumerate(pairwise(FACTORS, excluded))
        ),
        param(reduction="sum", dtype="bfloat16", trained="frozen weight", shape=(5, 4, 11), **FIVE_TIMES),
        param(reduction="mean", dtype="float16", trained="frozen input", shape=(5, 4, 11), **FIVE_TIMES),
        param(reduction="none", dtype="float16", trained="frozen bias", shape=(5, 4, 11), **FIVE_TIMES),
    ]
)
def test_each_two_options_together(case):
    case.check(*case.run(), least=4)


@cases(
    [
        param(trained="all", bias=False),
        param(trained="frozen input", bias=False),
        param(trained="frozen input"),
    ]
)
def test_function_takes_the_arguments_that_it_needs_alone(case):
    leaves = case.leaves()
    bias = [leaves["bias"]] if case.bias else []
    loss = liger().function.apply(leaves["input"], leaves["weight"], case.target, *bias)[0]
    case.check({"loss": loss}, case.backward(loss, leaves, "once", 2.0))


@pytest.mark.defect
def test_accum_dtype_of_a_head_alone_keeps_what_is_below_the_rounding_of_the_sum():
    head = {"trained": "weight", "dtype": "bfloat16", "accum_dtype": torch.float32, "labels": "none ignored"}
    case = Case(**head, shape=(24, 2, 60), way="once")  # a row in each chunk
    case.inputs["weight"] /= 4096  # all classes are about as likely
    case.inputs["input"][1:] = case.inputs["input"][0] / 512  # what the other rows add is below half an ulp
    case.target[:] = case.target[0].clone()
    _, [(incoming, found)] = case.run()
    # The roundings of a right sum err by a tenth of what a sum in bf16 loses.
    case.close("gradient of weight", found["weight"], case.gradients(incoming)["weight"], case.noise["weight"] / 2)


@pytest.mark.defect
def test_layer_before_the_loss_may_write_into_its_incoming_gradient():
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    case = Case(shape=(13, 5, 45), bias=False)
    leaves, scale = case.leaves(), torch.linspace(0.5, 1.5, 5, device=DEVICE).requires_grad_()
    tensors = {**leaves, "norm": scale}
    loss = case.forward(leaves | {"input": LigerRMSNormFunction.apply(leaves["input"], scale, 1e-6)})["loss"]
    found = autograd.backward(loss, [*tensors.values()], [torch.ones_like(loss)] * 2, "twice")
    hidden, weight, scale = wide = [x.detach().double().requires_grad_() for x in tensors.values()]
    normal = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
    right = torch.autograd.grad(cross_entropy(normal @ weight.T, case.target, ignore_index=case.ignore_index), wide)
    for _, each in found:
        for name, x, y in zip(tensors, each, right, strict=True):
            case.close(f"gradient of {name}", x, y, 2 * case.tolerance(name))  # two layers


@cases([param(**factors, labels="all ignored") for factors in KEPT])
def test_ignored_labels_alone_give_gradients_of_zero(case):
    leaves = case.leaves()
    [(_, found)] = case.backward(case.forward(leaves)["loss"], leaves, "retained once", 2.0)
    for name, x in found.items():
        assert x is not None, f"no gradient of {name}"
        assert not x.any(), f"{int((x != 0).sum())} elements of the gradient of {name} are not 0"


@cases([param(**factors, bias=bias, scales=(1.0,), **SMALL) for factors in KEPT for bias in (True, False)])
def test_gradients_with_a_graph_are_right_and_their_second_order_is_right_or_refused(case):
    def squared(gradients, of):
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), of, allow_unused=True)

    leaves, incoming, names = case.leaves(), case.incoming(), [*case.is_trained]
    trained, right = ([tensors[name] for name in names] for tensors in (leaves, case.exact.leaves))
    factor = torch.full((), 0.75, device=DEVICE)  # of the loss; "none" of the release refuses one that is trained
    wide = factor.double()
    if case.reduction != "none":
        names, trained, right = [*names, "factor"], [*trained, factor.requires_grad_()], [*right, wide.requires_grad_()]
    loss, graph = case.forward(leaves)["loss"], {"create_graph": True, "allow_unused": True}
    found = torch.autograd.grad(loss * factor, trained[: len(case.is_trained)], incoming, **graph)
    case.check({"loss": loss}, [(incoming * factor.detach(), dict(zip(case.is_trained, found, strict=True)))])
    again = autograd.unless_refused(lambda: squared(found, trained), *autograd.NO_SECOND_ORDER)
    exact = case.gradients(incoming * wide, create_graph=True)
    right = squared([exact[name] for name in case.is_trained], right)
    for name, x, y in zip(names, again or (), right, strict=again is not None):
        case.close(f"second order of {name}", x, y, 2 * case.tolerance("input"))  # the rounding of two gradients


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@cases([param(**kept, **SMALL, role=pytest.mark.control) for kept in KEPT])
def test_losses_without_gradients(case, mode):
    for made_inside in (False, True):
        leaves, labels = case.leaves(), case.target
        with mode():
            if made_inside:  # as a model makes its last hidden state there; its head is from before
                leaves["input"], labels = leaves["input"].clone(), labels.clone()
            case.check(case.forward(leaves, labels), [])


def changes():
    """Yield what is changed in place, and in which case."""
    for factors in (*(kept | SCALED for kept in KEPT), KEPT[0] | BY_ONE, KEPT[2] | BY_ONE):
        words = [factors["reduction"], factors["trained"], "by one" if factors["scales"] == (1.0, 1.0) else "scaled"]
        for name in (*NAMES, "labels"):
            yield param(*words, name, **factors, **SMALL, changed=[name])
        if factors["reduction"] == "none" or factors["trained"] != "all":  # backward makes the gradients
            yield param(*words, "copied", **factors, **SMALL, saved="copied", changed=[*NAMES, "labels"])
        else:
            yield param(*words, "ce_weight", **factors, **SMALL, ce_weight="given", changed=["ce_weight"])


@cases([*changes()])
def test_change_in_place_is_refused_or_makes_no_difference(case):
    leaves, _ = case.leaves(), case.exact  # the reference is made before the change
    loss = case.forward(leaves)["loss"]
    tensors = {**leaves, "labels": case.target, "ce_weight": case.class_weights}
    with torch.no_grad():
        for name in case.changed:
            tensors[name].zero_()
    for scale, way in zip(case.scales, ("retained once", "once"), strict=True):
        go = functools.partial(case.backward, loss, leaves, way, scale)
        found = autograd.unless_refused(go, autograd.CHANGED_IN_PLACE)
        assert found or case.saved == "plain", "what hooks have copied is refused"
        case.check({"loss": loss}, found or [])


def wrapped():
    """Yield losses with something around them."""
    right = [("sum", "all"), ("mean", "frozen weight"), ("none", "all")]
    wrong = [("mean", "all"), ("mean", "input"), ("mean", "frozen input"), ("sum", "weight"), ("mean", "bias")]
    for (reduction, trained), around in itertools.product(right + wrong, ("on the CPU", "checkpointed", "reentrant")):
        factors = {"reduction": reduction, "trained": trained, **(BY_ONE if (reduction, trained) in right else SCALED)}
        # A checkpoint makes anew what was saved, and so does a GPU with what is kept on the CPU.
        same = around == "on the CPU" and DEVICE == "cpu"
        role = Case(**factors, saved="plain" if same else "copied at each use").role
        yield param(**factors, around=around, shape=(2, 3, 5), role=role)


@cases([*wrapped()])
def test_hooks_and_checkpoints_around_the_loss(case):
    leaves, asked = case.leaves(), []

    def call(*tensors):
        return case.forward(dict(zip(leaves, tensors, strict=True)))["loss"]

    if case.around == "on the CPU":
        with autograd.offloaded() as asked:
            loss = call(*leaves.values())
    else:
        loss = checkpoint(call, *leaves.values(), use_reentrant=case.around == "reentrant")
    case.check({"loss": loss}, case.backward(loss, leaves, "into leaves", *case.scales))
    assert max(asked, default=0) <= len(case.scales), f"in two backwards saved tensors were asked for {asked} times"


@cases([param(**kept, **SMALL, role=pytest.mark.control) for kept in KEPT])
def test_freed_graph_keeps_nothing_alive_and_refuses_another_backward(case):
    labels, given = case.target.clone(), {name: x.clone() for name, x in case.leaves().items()}  # a graph keeps leaves
    loss = case.forward(given, labels)["loss"]
    edges = {name: torch.autograd.graph.get_gradient_edge(given[name]) for name in case.is_trained}
    [(_, found)] = case.backward(loss, edges, "once", 2.0)
    storages = autograd.weak_storages([*given.values(), labels, *(x for x in found.values() if x is not None)])
    again = autograd.unless_refused(lambda: case.backward(loss, edges, "once", 2.0), autograd.GRAPH_FREED)
    assert again is None, "another backward through a freed graph is not refused"
    del given, labels, found
    alive = autograd.kept_alive(storages)
    assert alive == 0, f"the loss keeps {alive} of {len(storages)} tensors alive"


@pytest.mark.control
@pytest.mark.parametrize(
    ("trained", "mode", "products"),
    [
        ("all", torch.enable_grad, 3),
        ("frozen weight", torch.enable_grad, 2),
        ("frozen input", torch.enable_grad, 4),  # as with reduction="none", which keeps the inputs for backward
        ("nothing", torch.enable_grad, 1),
        ("frozen input", torch.no_grad, 1),  # an evaluation: its weight is a parameter
    ],
)
def test_step_makes_no_product_and_no_copy_more_and_keeps_the_gradients_alone(trained, mode, products):
    from torch.utils.flop_counter import FlopCounterMode  # it imports triton, which reads what interpret() sets

    for scale in (1.0, 2.0):
        case = Case(shape=(8, 40, 80), bias=False, trained=trained)
        leaves, new, limit = case.leaves(), autograd.NewTensors(), case.inputs["weight"].nbytes // 2
        with FlopCounterMode(display=False) as counter, mode(), autograd.saved_sizes() as kept, new:
            loss = case.forward(leaves)["loss"]
            if loss.requires_grad:
                new.total = 0  # what forward makes is due
                loss.backward(case.incoming(scale))
        count = counter.get_total_flops() / (2 * case.BT * case.H * case.V)
        assert count <= products, f"{count} products of input and weight, expected {products}"
        if products != 4:
            assert new.total <= limit, f"{new.total} bytes are made, half a weight has {limit}"
            size = sum(x.nbytes for x in leaves.values())
            assert sum(kept) <= size, f"{sum(kept)} bytes are kept for backward, the gradients have {size}"
