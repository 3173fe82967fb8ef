"""Liger-Kernel's fused linear cross entropy gives weight and bias their gradients where the input is frozen.

Judged with reduction="mean" and "sum", through the module:

- Weight, bias, or both get the gradients of plain autograd, for any incoming gradient, in every backward.
- Under no_grad, and where nothing is trained, a loss makes one product of input and weight, as in the release.
- A trained input costs what it costs in the release, and its losses and gradients keep their bits.
- A change in place between forward and backward makes no difference, or PyTorch refuses the backward.
- Hooks on saved tensors, torch.utils.checkpoint, a freed graph, and gradients with a graph are as PyTorch has them.

Not judged: `ce_impl`, torch.compile, several GPUs. Pack 17 has the second backward of a trained input.
The reference and the reasons for the tolerances are in kit/liger.py.
"""

import functools
import itertools

import pytest
import torch

from kit.errors import relative_error
from kit.liger import FACTORS as OPTIONS
from kit.liger import FORMS, Case, covering, liger

EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
HEADS = ("frozen input", "weight", "bias")  # what is trained: weight and bias, or one of them
FACTORS = OPTIONS | {
    "reduction": ("mean", "sum"),
    "scales": ((1.0,), (2.0,), (-0.375,), (0.0,)),
    "trained": HEADS,
}
make = functools.partial(Case, scales=(2.0,), trained="frozen input")
reduced = pytest.mark.parametrize("reduction", ["mean", "sum"])


def cases():
    """Return the rows of a pairwise cover, each a defect unless no gradient is due."""
    for number, row in enumerate(covering(FACTORS)):
        words = "-".join(row[name] for name in ("reduction", "dtype", "trained")).replace(" ", "-")
        is_right = "input" in Case(**row).is_trained  # without a bias, "bias" trains all
        mark = pytest.mark.control if is_right else pytest.mark.defect
        yield pytest.param(row, marks=mark, id=f"{number:02}-{words}")


@pytest.mark.defect
@pytest.mark.parametrize(
    ("form", "trained", "reduction"),
    [*itertools.product(["fp32"], HEADS, ["mean", "sum"]), *((form, "frozen input", "mean") for form in [*FORMS][1:])],
)
def test_head_on_a_frozen_input_gets_its_gradients(form, trained, reduction, figure):
    case = make(**FORMS[form], trained=trained, reduction=reduction)
    outputs, pairs = case.run()
    if (form, trained, reduction) == ([*FORMS][-1], "frozen input", "mean"):
        [(scale, gradients)] = pairs
        gradient, expected = gradients["weight"], case.right["weight"].norm() * scale
        figure("grad_weight_over_expected", 0.0 if gradient is None else float(gradient.double().norm() / expected))
    case.check(outputs, pairs)


@pytest.mark.parametrize("row", [*cases()])
def test_each_two_options_together(row):
    Case(**row).judge(least=4)


@pytest.mark.defect
@reduced
def test_loss_scale_may_be_larger_than_any_number_of_fp16(reduction):
    case = make(dtype="float16", ce_weight="given", reduction=reduction, scales=(65536.0,))
    case.class_weights /= 64 if reduction == "sum" else 1  # or a sum over the rows is too large for fp16
    case.judge()


@pytest.mark.defect
@reduced
def test_ignored_labels_alone_give_gradients_of_zero(reduction):
    make(labels="all ignored", reduction=reduction).judge()


@pytest.mark.defect
@reduced
@pytest.mark.parametrize("way", ["twice", "freed by the last", "with a graph"])
def test_every_backward_gives_the_same_gradients(way, reduction):
    make(way=way, reduction=reduction, scales=(2.0, -0.7, 1.5)).judge()


@pytest.mark.defect
def test_accum_dtype_keeps_what_is_below_the_rounding_of_the_sum():
    options = {"dtype": "bfloat16", "accum_dtype": torch.float32, "labels": "none ignored", "shape": (24, 2, 60)}
    case = make(**options, trained="weight")  # a row in each chunk
    case.inputs["weight"] /= 4096  # all classes are about as likely
    case.inputs["input"][1:] = case.inputs["input"][0] / 512  # what the other rows add is below half an ulp
    case.target[:] = case.target[0].clone()
    _, [(scale, gradients)] = case.run()
    tolerance = relative_error(case.rounded["weight"], case.right["weight"]) / 2  # half of what eager PyTorch loses
    case.close("gradient of weight", gradients["weight"], case.right["weight"] * scale, tolerance)


@pytest.mark.defect
@pytest.mark.parametrize(("trained", "bias"), [("frozen input", True), ("frozen input", False), ("weight", False)])
def test_function_takes_the_arguments_that_it_needs_alone(trained, bias):
    case = make(trained=trained, bias=bias)
    leaves = case.leaves()
    tensors = [leaves["input"], leaves["weight"], case.target, *([leaves["bias"]] if bias else [])]
    loss = liger().LigerFusedLinearCrossEntropyFunction.apply(*tensors)[0]
    case.check({"loss": loss}, case.backward(loss, leaves, "once", 2.0))


@pytest.mark.control
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trained", ["all", "frozen weight", "input"])
def test_trained_input_keeps_its_bits(trained, reduction, output):
    make(trained=trained, reduction=reduction).check_bits(f"{trained}.{reduction}", output)


@pytest.mark.control
@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@reduced
def test_losses_without_gradients(reduction, mode):
    case = make(reduction=reduction)
    for made_inside in (False, True):
        leaves, labels = case.leaves(), case.target
        with mode():
            if made_inside:  # as a model makes its last hidden state there; its head is from before
                leaves["input"], labels = leaves["input"].clone(), labels.clone()
            outputs = case.forward(leaves, labels)
        case.check(outputs, [])


@pytest.mark.defect
@pytest.mark.parametrize("name", ["input", "weight", "labels"])
def test_change_in_place_is_refused_or_makes_no_difference(name):
    make().check_change(name)


@pytest.mark.defect
@pytest.mark.parametrize("saved", ["copied", "copied at each use", "checkpointed", "checkpointed reentrant"])
def test_hooks_and_checkpoints_around_the_loss(saved):
    make(saved=saved, way="summed", scales=(2.0, -0.7)).judge()


@pytest.mark.defect
@reduced
def test_freed_graph_keeps_nothing_alive_and_refuses_another_backward(reduction):
    make(reduction=reduction).check_freed()


@pytest.mark.control
@pytest.mark.parametrize(
    ("trained", "mode", "products"),
    [
        ("all", torch.enable_grad, 3),
        ("frozen weight", torch.enable_grad, 2),
        ("frozen input", torch.enable_grad, 4),  # as with reduction="none", which makes the logits again
        ("bias", torch.enable_grad, 3),
        ("nothing", torch.enable_grad, 1),
        ("frozen input", torch.no_grad, 1),  # an evaluation: its weight is a parameter
    ],
)
def test_step_makes_at_most_so_many_products(trained, mode, products):
    with mode():
        count = make(trained=trained).products()
    assert count <= products, f"{count} products of input and weight, expected {products}"
