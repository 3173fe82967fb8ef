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

The reference and the reasons for the tolerances are in kit/cross_entropy.py.
"""

import functools
import itertools
import math

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from kit import autograd, current_target, pairwise
from kit.errors import relative_error
from kit.interpreter import interpret
from kit.liger import DEVICE, NAMES, Case, liger
from kit.liger import FACTORS as OPTIONS

EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
interpret()
FACTORS = OPTIONS | {
    "reduction": ("mean", "sum", "none"),
    "scales": ((2.0, 2.0), (1.0, 1.0), (1.0, 0.3), (-0.375, 3.0), (0.0, 1.0)),  # of the first and second gradient
    "trained": ("all", "frozen weight", "frozen bias", "frozen input", "weight", "bias", "input", "nothing"),
    "way": ("once", "retained once", "twice", "freed by the last", "each alone", "summed", "written into"),
    "saved": ("plain", "copied", "copied at each use"),
    "chunk_mem_const": (1, 3),  # how many logits are made at once
}
make = functools.partial(Case, scales=(2.0, 2.0))


def role(case):
    """Return a defect where release 0.8.5 is wrong, else a control."""
    if case.reduction == "none" or not case.is_trained:
        return pytest.mark.control
    if "input" not in case.is_trained:
        return pytest.mark.defect  # weight and bias get no gradient
    if case.way == "written into" and case.saved == "plain":
        return pytest.mark.defect  # what is written into is what was saved, and autograd refuses it
    if case.labels == "all ignored" or case.saved == "copied at each use":
        return pytest.mark.control  # every gradient is 0, or every backward starts from what was saved
    first, last, product = case.scales[0], case.scales[-1], math.prod(case.scales)
    found, right = {  # the factors of what the release returns in the end, and those that it should
        "twice": ({product}, {*case.scales}),
        "freed by the last": ({product}, {*case.scales}),
        "each alone": (first ** len(case.is_trained), first),
        "summed": (first + first * last, first + last),
        "written into": (0, last),
    }.get(case.way, (first, first))
    return pytest.mark.control if found == right else pytest.mark.defect


@pytest.fixture
def case(request):
    return make(**request.param)


def param(*words, mark=None, **factors):
    """Return a parameter that carries its role; it is named by these words, or by its factors that are words."""
    named = words or [x for x in factors.values() if isinstance(x, str)] + ["no bias"] * (not factors.get("bias", True))
    return pytest.param(factors, id="-".join(named).replace(" ", "-"), marks=mark or role(make(**factors)))


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
    case = make(**FORMS[form], reduction=reduction, scales=(scale,))
    (outputs, found), (others, again) = case.run(), case.run()
    pairs = {"loss": (outputs["loss"], others["loss"])}
    pairs |= {f"grad_{name}": (x, again[0][1][name]) for name, x in found[0][1].items()}
    for name, (x, y) in pairs.items():
        output(f"{form}.{reduction}.{name}", x, must_match=torch.equal(x, y))
    case.reference.check(outputs, found)


@pytest.mark.defect
@pytest.mark.parametrize("form", FORMS)
def test_second_backward_gives_the_same_gradients(form, figure):
    case = make(**FORMS[form], way="twice")
    outputs, [_, (incoming, second)] = case.run()
    if form == [*FORMS][-1]:
        for name, right in case.reference.gradients(incoming).items():
            figure(f"grad_{name}_second_over_expected", float(second[name].double().norm() / right.norm()))
    case.reference.check(outputs, [(incoming, second)])


@pytest.mark.defect
@pytest.mark.parametrize("form", FORMS)
def test_second_backward_in_a_torch_that_does_not_tell_whether_the_graph_is_retained(form, monkeypatch):
    monkeypatch.delattr("torch._C._autograd._get_current_graph_task_keep_graph", raising=False)
    case = make(**FORMS[form], way="twice")
    case.reference.check(*case.run())


@cases(
    [
        *(param(form, name, **FORMS[form], **factors) for form in FORMS for name, factors in BACKWARDS.items()),
        param("fp16 scaled by 65536", dtype="float16", shape=(13, 5, 45), trained="frozen input", scales=(65536.0,)),
        param("65541 columns", shape=(2, 65541, 3), **SCALED | {"way": "twice"}),
    ]
)  # more columns than a block of any kernel holds
def test_backward_gives_the_gradients_of_plain_autograd(case):
    case.reference.check(*case.run())


@cases(
    [
        *(
            param(f"{number:02}", row["reduction"], row["dtype"], row["trained"], row["way"], **row)
            for number, row in enumerate(pairwise(FACTORS))
        ),
        param(reduction="sum", dtype="bfloat16", trained="frozen weight", shape=(5, 4, 11), **FIVE_TIMES),
        param(reduction="mean", dtype="float16", trained="frozen input", shape=(5, 4, 11), **FIVE_TIMES),
        param(reduction="none", dtype="float16", trained="frozen bias", shape=(5, 4, 11), **FIVE_TIMES),
    ]
)
def test_each_two_options_together(case):
    case.reference.check(*case.run(), least=4)


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
    case.reference.check({"loss": loss}, case.backward(loss, leaves, "once", 2.0))


@pytest.mark.defect
def test_accum_dtype_of_a_head_alone_keeps_what_is_below_the_rounding_of_the_sum():
    head = {"trained": "weight", "dtype": "bfloat16", "accum_dtype": torch.float32, "labels": "none ignored"}
    case = make(**head, shape=(24, 2, 60), way="once")  # a row in each chunk
    case.inputs["weight"] /= 4096  # all classes are about as likely
    case.inputs["input"][1:] = case.inputs["input"][0] / 512  # what the other rows add is below half an ulp
    case.target[:] = case.target[0].clone()
    _, [(incoming, found)] = case.run()
    lost = relative_error(case.reference.rounded["weight"], case.reference.right["weight"])
    # The roundings of a right sum err by a tenth of what a sum in bf16 loses.
    case.reference.close("gradient of weight", found["weight"], case.reference.gradients(incoming)["weight"], lost / 2)


@pytest.mark.defect
def test_layer_before_the_loss_may_write_into_its_incoming_gradient():
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction

    case = make(shape=(13, 5, 45), bias=False)
    leaves, scale = case.leaves(), torch.linspace(0.5, 1.5, 5, device=DEVICE).requires_grad_()
    tensors = {**leaves, "norm": scale}
    loss = case.forward(leaves | {"input": LigerRMSNormFunction.apply(leaves["input"], scale, 1e-6)})["loss"]
    found = autograd.backward(loss, [*tensors.values()], [torch.ones_like(loss)] * 2, "twice")
    hidden, weight, scale = wide = [x.detach().double().requires_grad_() for x in tensors.values()]
    normal = hidden * (hidden.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * scale
    right = torch.autograd.grad(cross_entropy(normal @ weight.T, case.target, ignore_index=case.ignore_index), wide)
    for _, each in found:
        for name, x, y in zip(tensors, each, right, strict=True):
            case.reference.close(f"gradient of {name}", x, y, 2 * case.reference.tolerance(name))  # two layers


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
    trained, right = ([tensors[name] for name in names] for tensors in (leaves, case.reference.exact.leaves))
    factor = torch.full((), 0.75, device=DEVICE)  # of the loss; "none" of the release refuses one that is trained
    wide = factor.double()
    if case.reduction != "none":
        names, trained, right = [*names, "factor"], [*trained, factor.requires_grad_()], [*right, wide.requires_grad_()]
    loss, graph = case.forward(leaves)["loss"], {"create_graph": True, "allow_unused": True}
    found = torch.autograd.grad(loss * factor, trained[: len(case.is_trained)], incoming, **graph)
    case.reference.check({"loss": loss}, [(incoming * factor.detach(), dict(zip(case.is_trained, found, strict=True)))])
    again = autograd.unless_refused(lambda: squared(found, trained), *autograd.NO_SECOND_ORDER)
    exact = case.reference.gradients(incoming * wide, create_graph=True)
    right = squared([exact[name] for name in case.is_trained], right)
    tolerance = 2 * case.reference.tolerance("input")  # the rounding of two gradients
    for name, x, y in zip(names, again or (), right, strict=again is not None):
        case.reference.close(f"second order of {name}", x, y, tolerance)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@cases([param(**kept, **SMALL, mark=pytest.mark.control) for kept in KEPT])
def test_losses_without_gradients(case, mode):
    for made_inside in (False, True):
        leaves, labels = case.leaves(), case.target
        with mode():
            if made_inside:  # as a model makes its last hidden state there; its head is from before
                leaves["input"], labels = leaves["input"].clone(), labels.clone()
            case.reference.check(case.forward(leaves, labels), [])


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
    leaves, _ = case.leaves(), case.reference.exact  # the reference is made before the change
    loss = case.forward(leaves)["loss"]
    tensors = {**leaves, "labels": case.target, "ce_weight": case.class_weights}
    with torch.no_grad():
        for name in case.changed:
            tensors[name].zero_()
    for scale, way in zip(case.scales, ("retained once", "once"), strict=True):
        go = functools.partial(case.backward, loss, leaves, way, scale)
        found = autograd.unless_refused(go, autograd.CHANGED_IN_PLACE)
        assert found or case.saved == "plain", "what hooks have copied is refused"
        case.reference.check({"loss": loss}, found or [])


def wrapped():
    """Yield losses with something around them."""
    right = [("sum", "all"), ("mean", "frozen weight"), ("none", "all")]
    wrong = [("mean", "all"), ("mean", "input"), ("mean", "frozen input"), ("sum", "weight"), ("mean", "bias")]
    for (reduction, trained), around in itertools.product(right + wrong, ("on the CPU", "checkpointed", "reentrant")):
        factors = {"reduction": reduction, "trained": trained, **(BY_ONE if (reduction, trained) in right else SCALED)}
        # A checkpoint makes anew what was saved, and so does a GPU with what is kept on the CPU.
        same = around == "on the CPU" and DEVICE == "cpu"
        mark = role(make(**factors, saved="plain" if same else "copied at each use"))
        yield param(**factors, around=around, shape=(2, 3, 5), mark=mark)


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
    case.reference.check({"loss": loss}, case.backward(loss, leaves, "into leaves", *case.scales))
    assert max(asked, default=0) <= len(case.scales), f"in two backwards saved tensors were asked for {asked} times"


@cases([param(**kept, **SMALL, mark=pytest.mark.control) for kept in KEPT])
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
        case = make(shape=(8, 40, 80), bias=False, trained=trained)
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
