"""Liger-Kernel's fused linear cross entropy gives weight and bias their gradients where the input is frozen.

Judged with reduction="mean" and "sum", through the module, the functional form and the autograd function:

- Weight, bias, or both get the gradients of plain autograd, by any incoming gradient, in a second backward too.
- An evaluation under no_grad makes one product of input and weight, as the release does, and so does nothing trained.
- A trained input costs what it costs in the release, and its losses and gradients keep their bits.
- A change in place between forward and backward makes no difference, or PyTorch refuses the backward.

Not judged: `ce_impl`, torch.compile, several GPUs. Pack 17 has the second backward of a trained input.
The reference and the reasons for the tolerances are in kit/cross_entropy.py.
"""

import functools

import pytest
import torch

from kit import autograd, current_target, pairwise
from kit.interpreter import interpret
from kit.liger import FACTORS as OPTIONS
from kit.liger import Case

EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
interpret()
HEADS = ("frozen input", "weight", "bias")  # what is trained: weight and bias, or one of them
FACTORS = OPTIONS | {
    "reduction": ("mean", "sum"),
    "scales": ((1.0,), (2.0,), (-0.375,), (0.0,)),
    "trained": HEADS,
    "chunk_mem_const": (1, 3),
}
FORMS = {"fp32": {"shape": (13, 5, 45)}}
if current_target().executed:
    FORMS["bf16"] = {"dtype": "bfloat16", "shape": (1024, 1024, 32000)}
make = functools.partial(Case, scales=(2.0,))


def words(row):
    """Name a row by its factors that are words."""
    return "-".join(str(row[name]).replace(" ", "-") for name in ("reduction", "dtype", "trained", "entry"))


def cases():
    """Return the rows of a pairwise cover, each a defect unless no gradient is due."""
    for number, row in enumerate(pairwise(FACTORS)):
        due = Case(**row).is_trained  # without a bias, "bias" trains all
        mark = pytest.mark.control if "input" in due else pytest.mark.defect
        yield pytest.param(row, marks=mark, id=f"{number:02}-{words(row)}")


@pytest.mark.defect
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("trained", HEADS)
@pytest.mark.parametrize("form", FORMS)
def test_head_on_a_frozen_input_gets_its_gradients(form, trained, reduction, figure):
    case = make(**FORMS[form], trained=trained, reduction=reduction)
    outputs, gradients = case.run()
    incoming, by_name = gradients[0]
    if (form, trained, reduction) == ([*FORMS][-1], "frozen input", "mean"):
        gradient, expected = by_name["weight"], case.reference.gradients(incoming)["weight"]
        figure(
            "grad_weight_over_expected", 0.0 if gradient is None else float(gradient.double().norm() / expected.norm())
        )
    case.reference.check(outputs, gradients)


@pytest.mark.parametrize("row", cases())
def test_each_two_options_together(row):
    case = Case(**row)
    case.reference.check(*case.run(), least=4)


@pytest.mark.defect
@pytest.mark.parametrize("way", ["twice", "freed by the last", "summed"])
def test_second_backward_gives_the_same_gradients(way):
    case = make(shape=(13, 5, 45), trained="frozen input", way=way, scales=(2.0, -0.7))
    case.reference.check(*case.run())


@pytest.mark.defect
def test_accum_dtype_keeps_what_is_below_the_rounding_of_the_sum():
    options = {"dtype": "bfloat16", "accum_dtype": torch.float32, "labels": "none ignored", "shape": (24, 2, 60)}
    case = make(**options, trained="weight")  # a row in each chunk
    case.inputs["weight"] /= 4096  # all classes are about as likely
    case.inputs["input"][1:] = case.inputs["input"][0] / 512  # what the other rows add is below half an ulp
    case.target[:] = case.target[0].clone()
    _, [(incoming, gradients)] = case.run()
    lost = (case.reference.rounded["weight"].double() - case.reference.right["weight"]).norm()
    expected = case.reference.gradients(incoming)["weight"]
    tolerance = float(lost / case.reference.right["weight"].norm()) / 2
    case.reference.close("gradient of weight", gradients["weight"], expected, tolerance)


@pytest.mark.control
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("trained", ["all", "frozen weight", "input"])
def test_trained_input_keeps_its_bits(trained, reduction, output):
    case = make(shape=(13, 5, 45), trained=trained, reduction=reduction)
    outputs, gradients = case.run()
    case.reference.check(outputs, gradients)
    output(f"{trained}.{reduction}.loss", outputs["loss"])
    for name, gradient in gradients[0][1].items():
        output(f"{trained}.{reduction}.{name}", gradient)


@pytest.mark.defect
@pytest.mark.parametrize("name", ["input", "weight", "labels"])
def test_change_in_place_is_refused_or_makes_no_difference(name):
    case = make(shape=(4, 3, 7), trained="frozen input")
    leaves, _ = case.leaves(), case.reference.exact  # the reference is made before the change
    loss = case.forward(leaves)["loss"]
    with torch.no_grad():
        {**leaves, "labels": case.target}[name].zero_()
    go = functools.partial(case.backward, loss, leaves, "once", 2.0)
    gradients = autograd.unless_refused(go, autograd.CHANGED_IN_PLACE)
    case.reference.check({"loss": loss}, gradients or [])


@pytest.mark.defect
def test_freed_graph_keeps_nothing_alive():
    case = make(shape=(4, 3, 7), trained="frozen input")
    labels, given = case.target.clone(), {name: x.clone() for name, x in case.leaves().items()}
    loss = case.forward(given, labels)["loss"]
    edges = {name: torch.autograd.graph.get_gradient_edge(given[name]) for name in case.is_trained}
    [(_, gradients)] = case.backward(loss, edges, "once", 2.0)
    storages = autograd.weak_storages([*given.values(), labels, *(x for x in gradients.values() if x is not None)])
    assert all(x is not None for x in gradients.values()), "no gradient"
    del given, labels, gradients
    assert autograd.kept_alive(storages) == 0, "the loss keeps tensors alive"


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
    from torch.utils.flop_counter import FlopCounterMode  # it imports triton, which reads what interpret() sets

    case = make(shape=(8, 40, 80), trained=trained)
    leaves = case.leaves()
    with FlopCounterMode(display=False) as counter, mode():
        loss = case.forward(leaves)["loss"]
        if loss.requires_grad:
            loss.backward(case.incoming(2.0))
    count = counter.get_total_flops() / (2 * case.BT * case.H * case.V)
    assert count <= products, f"{count} products of input and weight, expected {products}"
