"""Liger-Kernel's fused linear cross entropy gives the gradients of plain autograd, whatever backward follows another.

What is promised of a trained input, with reduction="mean" and "sum" as with "none":

- Every backward through a graph gives the gradients of its own incoming gradient g, whichever went before. g may be 0
  or negative. What a backward returned stays as it is, and the caller may write into it.
- Hooks on saved tensors are called for each tensor once a backward. torch.utils.checkpoint works, of either kind.
- Another backward through a freed graph is refused. The loss alone keeps no tensor alive.
- Gradients with a graph of their own are right. Their second order is right or refused.
- An ordinary step makes no more products and copies than release 0.8.5 does.

FACTORS has what the saved gradients depend on, for BT tokens, H hidden and V classes.
Not judged: a frozen input (pack 24), `ce_impl`, torch.compile, and several GPUs.
The reference and the reasons for the tolerances are in kit/liger.py.
"""

import functools
import math

import pytest
import torch

from kit import autograd
from kit.liger import DEVICE, FORMS, Case, covering
from kit.liger import FACTORS as OPTIONS

EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
FACTORS = {
    "dtype": OPTIONS["dtype"],
    "shape": ((3, 2, 4), (1, 9, 7)),  # BT, H, V: in 2 chunks, the last short; 1
    "bias": (True, False),
    "layout": OPTIONS["layout"],
    "reduction": ("mean", "sum"),
    "scales": ((2.0, 2.0), (1.0, 1.0), (1.0, 0.3), (-0.375, 3.0), (0.0, 1.0)),  # of the first and second gradient
    "trained": ("all", "frozen weight", "frozen bias", "input"),
    "way": ("once", "twice", "freed by the last", "summed", "written into"),
    "saved": ("plain", "copied", "copied at each use"),
}
make = functools.partial(Case, scales=(2.0, 2.0), shape=FACTORS["shape"][0])
# No 0 and no 1; the same again.
FIVE_TIMES = {"shape": (5, 3, 11), "way": "freed by the last", "scales": (1.5, -0.7, -0.7, 2.5, 0.3)}
CHECKPOINT = {"saved": "checkpointed", "way": "summed", "scales": (2.0, -0.7)}  # it makes anew what was saved
BACKWARDS = {
    "sum twice": {"reduction": "sum", "way": "twice"},
    "first result stays": {"way": "freed by the last", "scales": (1.0, 2.0)},
    "after zero": {"way": "twice", "scales": (0.0, 1.0)},
    "summed": {"way": "summed"},
    "five times": FIVE_TIMES,
    "none twice": {"reduction": "none", "way": "twice"},
    "65541 columns": {"shape": (2, 65541, 3), "way": "twice"},  # more than a block of any kernel holds
    "five times bfloat16": {"dtype": "bfloat16", "reduction": "sum", "trained": "frozen weight", **FIVE_TIMES},
    "five times none": {"dtype": "float16", "reduction": "none", "trained": "frozen bias", **FIVE_TIMES},
    "checkpointed": CHECKPOINT,
    "checkpointed sum": CHECKPOINT | {"reduction": "sum", "trained": "frozen weight"},
    "checkpointed reentrant": CHECKPOINT | {"saved": "checkpointed reentrant"},
}
# What PyTorch says of second-order gradients that a function does not have.
NO_SECOND_ORDER = ("does not require grad", "once_differentiable")
reduced = pytest.mark.parametrize("reduction", ["mean", "sum"])
forms = pytest.mark.parametrize("form", FORMS)


def param(name, factors):
    """Return a parameter: a defect where release 0.8.5 is wrong, else a control."""
    case = make(**factors)
    first, last, product = case.scales[0], case.scales[-1], math.prod(case.scales)
    actual, right = {  # the factors of what the release returns in the end, and those that it should
        "twice": ({product}, {*case.scales}),
        "freed by the last": ({product}, {*case.scales}),
        "summed": (first + first * last, first + last),
        "written into": (None, last) if case.saved == "plain" else (0, last),  # autograd refuses what is written into
    }.get(case.way, (first, first))
    is_right = case.reduction == "none" or case.saved not in ("plain", "copied") or actual == right
    mark = pytest.mark.control if is_right else pytest.mark.defect
    return pytest.param(case, id=name.replace(" ", "-"), marks=mark)


@pytest.mark.control
@pytest.mark.parametrize(("reduction", "scale"), [("mean", 2.0), ("sum", 0.3)])
@forms
def test_one_backward_gives_the_same_bits(form, reduction, scale, output):
    make(**FORMS[form], reduction=reduction, scales=(scale,)).check_bits(f"{form}.{reduction}", output)


@pytest.mark.defect
@forms
def test_second_backward_gives_the_same_gradients(form, figure):
    case = make(**FORMS[form], way="twice")
    outputs, [_, (scale, second)] = case.run()
    for name, x in second.items() if form == [*FORMS][-1] else ():
        assert x is not None, f"{name} has no gradient"
        figure(f"grad_{name}_second_over_expected", float(x.double().norm() / (case.right[name] * scale).norm()))
    case.check(outputs, [(scale, second)])


@pytest.mark.defect
@reduced
def test_second_backward_in_a_torch_that_does_not_tell_whether_the_graph_is_retained(reduction, monkeypatch):
    monkeypatch.delattr("torch._C._autograd._get_current_graph_task_keep_graph", raising=False)
    make(reduction=reduction, way="twice").judge()


@pytest.mark.parametrize("case", [param(name, factors) for name, factors in BACKWARDS.items()])
def test_backward_gives_the_gradients_of_plain_autograd(case):
    case.judge()


@pytest.mark.parametrize(
    "case",
    [
        param(f"{number:02}-{row['reduction']}-{row['dtype']}-{row['trained']}-{row['way']}", row)
        for number, row in enumerate(covering(FACTORS))
    ],
)
def test_each_two_options_together(case):
    case.judge(least=4)


@pytest.mark.defect
@reduced
def test_layer_before_the_loss_may_write_into_its_incoming_gradient(reduction):
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    case = make(reduction=reduction, scales=(1.0,))
    leaves, scale = case.leaves(), torch.linspace(0.5, 1.5, case.H, device=DEVICE).requires_grad_()
    tensors = {**leaves, "norm": scale}
    loss = case.forward(leaves | {"input": LigerRMSNormFunction.apply(leaves["input"], scale, 1e-6)})["loss"]
    gradients = torch.autograd.grad(loss, [*tensors.values()], retain_graph=True, allow_unused=True)
    assert all(x is not None for x in gradients), "a tensor has no gradient"
    first = [x.clone() for x in gradients]
    second = torch.autograd.grad(loss, [*tensors.values()], allow_unused=True)
    for name, x, y in zip(tensors, second, first, strict=True):
        case.close(f"second gradient of {name}", x, y, case.tolerance(name))


@pytest.mark.control
@pytest.mark.parametrize("bias", [True, False])
@reduced
def test_gradients_with_a_graph_are_right_and_their_second_order_is_right_or_refused(reduction, bias):
    def squared(gradients, *of):
        return torch.autograd.grad(sum(x.square().sum() for x in gradients), of, allow_unused=True)

    case = make(reduction=reduction, bias=bias)
    leaves, factor = case.leaves(), torch.full((), 0.75, device=DEVICE, requires_grad=True)
    loss, wide = case.forward(leaves)["loss"], factor.detach().double().requires_grad_()
    gradients = torch.autograd.grad(loss * factor, [*leaves.values()], create_graph=True, allow_unused=True)
    case.check({"loss": loss}, [(float(factor), dict(zip(leaves, gradients, strict=True)))])
    second = autograd.unless_refused(lambda: squared(gradients, factor, *leaves.values()), *NO_SECOND_ORDER)
    exact = case.plain(exact=True)
    of = [*exact.leaves.values()]
    right = squared(torch.autograd.grad(exact.losses.sum() * wide, of, create_graph=True), wide, *of)
    tolerance = 2 * case.tolerance("input")  # the rounding of two gradients
    for name, x, y in zip(("factor", *leaves), second or (), right, strict=second is not None):
        case.close(f"second order of {name}", x, y, tolerance)


@pytest.mark.control
@reduced
def test_freed_graph_keeps_nothing_alive_and_refuses_another_backward(reduction):
    make(reduction=reduction).check_freed()


@pytest.mark.control
@pytest.mark.parametrize(("trained", "products"), [("all", 3), ("frozen weight", 2)])
@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_step_makes_no_product_and_no_copy_more_and_keeps_the_gradients_alone(trained, products, scale):
    case = make(shape=(4, 160, 20), bias=False, trained=trained, scales=(scale,))
    count = case.products()
    assert count <= products, f"{count} products of input and weight, expected {products}"
    leaves, new, limit = case.leaves(), autograd.NewTensors(), case.inputs["weight"].nbytes // 2
    with autograd.saved_sizes() as kept, new:
        loss = case.forward(leaves)["loss"]
        new.total = 0  # what forward makes is due
        loss.backward(case.incoming(scale))
    assert new.total <= limit, f"{new.total} bytes are made, half of the weight has {limit}"
    size = sum(x.nbytes for x in leaves.values())
    assert sum(kept) <= size, f"{sum(kept)} bytes are kept for backward, the gradients have {size}"
