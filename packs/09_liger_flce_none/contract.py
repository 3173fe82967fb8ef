"""Liger-Kernel's fused linear cross entropy with reduction="none" weighs the gradients of each token by its own weight.

What is promised for first-order gradients through the module:

- With "none", the gradients of input, weight and bias are those of the sum of the weighted losses. Weights may have any
  sign, sum and stride, any backward may come before, and any of the three may be trained. accum_dtype=float32 is as
  precise as it is meant to be.
- No logits of [BT, V] are made or held at once. The incoming gradient stays as it was.
- A tensor that is changed in place between forward and backward makes no difference, or PyTorch refuses the backward.
- Several losses may wait for their backward at once. Each keeps its own options, labels and inputs.
- With "mean" and "sum", one backward of a trained input and of row-major tensors is right, and its bits stay.
- The workaround, "mean" times the number of labels that are not ignored, is exact for the mask labels != ignore_index.

FACTORS has the options that the patch touches, for BT tokens, H hidden and V classes.

Not judged: a weight's rounding to 16 bits before the product (pack 25), and a release that refuses "none" or reduces
it to one number. With "mean" and "sum": a second backward, a frozen input, and column-major tensors (pack 17).

The reference and the reasons for the tolerances are in kit/liger.py.
"""

import gc
import inspect
import re

import pytest
import torch

from kit import autograd
from kit.errors import relative_error
from kit.liger import DEVICE, FORMS, NAMES, Case, covering, liger
from kit.liger import FACTORS as OPTIONS

EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
FACTORS = OPTIONS | {
    "weights": ("ones", "constant", "mask", "random", "signed"),  # of the rows; the factor of a reduced loss
    "trained": ("all", "frozen weight", "frozen input", "bias", "nothing"),
    "way": ("once", "twice", "summed", "written into"),
    "saved": ("plain", "copied"),  # hooks copy what is saved for backward, as offloading does
}
# Other values with "mean" and "sum" are other bugs, or no factor of a reduced loss.
REDUCED = {
    "reduction": ("mean", "sum"),
    "weights": ("ones", "constant"),
    "trained": ("all", "frozen weight", "nothing"),
    "way": ("once",),
    "layout": ("plain",),
}
ROWS = [*covering(FACTORS | {"reduction": ("none",)}), *covering(FACTORS | REDUCED)]


def make(**factors):
    """Return a case whose rows are weighted as its factor says."""
    case = Case(**{"reduction": "none", "weights": "ones"} | factors)
    values = torch.rand(case.BT, generator=torch.Generator().manual_seed(11)).to(DEVICE)
    rows = torch.arange(case.BT, device=DEVICE)
    case.rows = {
        "ones": torch.ones(1, device=DEVICE).expand(case.BT),
        "constant": torch.full((1,), 1 / 3, device=DEVICE).expand(case.BT),
        "loss scale": torch.full((1,), 65536.0, device=DEVICE).expand(case.BT),  # more than fp16 holds
        "mask": (rows % 3) / 2,  # 0, 0.5, 1: the first row's weight is 0
        "random": torch.stack((values + 0.25, values), 1)[:, 0],  # 0.25 to 1.25, not contiguous
        "signed": (6 * values - 3) * (rows % 4 != 2),  # -3 to 3, and some are 0
        "cancelling": (values[rows // 2 * 2] + 0.25) * (1 - 2 * (rows % 2)),  # a pair adds up to 0
        "valid": (case.target != case.ignore_index).float(),
    }[case.weights]
    return case


def role(case):
    """Return a defect where release 0.8.1 is wrong, else a control: it multiplies by the first weight, in place."""
    if case.reduction != "none" or not case.is_trained:
        return pytest.mark.control
    if "input" not in case.is_trained:
        return pytest.mark.defect  # weight and bias get no gradient
    if case.way == "written into" and case.saved == "plain":
        return pytest.mark.defect  # what is written into is what was saved, and autograd refuses it
    if case.labels == "all ignored":
        return pytest.mark.control
    weight, name = float(case.rows[0]), case.layout.split()[-1]
    actual, right = {  # the factors of what the release returns in the end, and those that it should
        "twice": (weight**2, weight),
        "summed": (weight + weight**2, 2 * weight),
        "written into": (0, weight),
    }.get(case.way, (weight, weight))
    # Its kernel takes each tensor for row-major.
    strided = case.layout.startswith("column-major") and name in case.is_trained and min(case.inputs[name].shape) > 1
    uneven = bool((case.rows != weight).any())
    wrong = uneven or (strided and weight != 1) or actual != right
    return pytest.mark.defect if wrong else pytest.mark.control


@pytest.fixture(scope="module", autouse=True)
def mode():
    """Leave out a release that refuses reduction="none", or that reduces it to one number."""
    case = make()
    try:
        loss = liger().LigerFusedLinearCrossEntropyLoss(reduction="none")(
            case.inputs["weight"], case.inputs["input"], case.target
        )
    except Exception as error:
        refused = re.search("reduction|positional arguments|transformers.functional", str(error))
        if refused and isinstance(error, (AssertionError, TypeError, ImportError)):
            pytest.skip(f"this release refuses the call: {type(error).__name__}: {error}")
        return  # the checks make the same call, and fail
    knows_none = '"none"' in inspect.getsource(inspect.getmodule(liger().LigerFusedLinearCrossEntropyFunction))
    if loss.shape != case.target.shape and not knows_none:
        pytest.skip(f'this release gives a loss of shape {[*loss.shape]} for reduction="none", and knows no such word')


def param(*words, **factors):
    """Return a parameter that is named by these words, and carries its role."""
    case = make(**factors)
    return pytest.param(case, id="-".join(words).replace(" ", "-"), marks=role(case))


WEIGHTED = {
    "mask": {"weights": "mask"},
    "random frozen weight": {"weights": "random", "trained": "frozen weight", "bias": False},
    "cancelling": {"weights": "cancelling"},
    "ones": {},
    "mean twice by one": {"reduction": "mean", "way": "twice"},  # by another factor the release is wrong: pack 17
    "sum twice by one": {"reduction": "sum", "way": "twice"},
    "mean with a loss scale": {"dtype": "float16", "reduction": "mean", "weights": "loss scale"},
}


OTHER_BACKWARDS = {
    "two side by side": {"way": "twice", "scales": (1.0, -0.5)},
    "with a graph": {"way": "with a graph"},
    "checkpointed": {"saved": "checkpointed"},
    "checkpointed without bias": {"saved": "checkpointed", "bias": False},
}


@pytest.mark.parametrize("case", [param("fp32", name, **x) for name, x in WEIGHTED.items()])
def test_each_token_has_its_own_weight(case):
    case.judge()


@pytest.mark.parametrize("case", [param(name, weights="signed", **x) for name, x in OTHER_BACKWARDS.items()])
def test_other_backwards(case):
    case.judge()


@pytest.mark.defect
@pytest.mark.parametrize("form", FORMS)
def test_each_token_has_its_own_random_weight(form, figure):
    case = make(**FORMS[form], weights="random")
    outputs, pairs = case.run()
    [(_, gradients)] = pairs
    for name, x in (gradients | outputs).items() if form == [*FORMS][-1] else ():
        figure_name = name if name in outputs else f"grad_{name}"
        for word, y in (("max_abs_error", x), ("noise", case.rounded[name])):
            figure(f"{figure_name}_{word}", float((y.double() - case.right[name]).abs().max()))
    case.check(outputs, pairs)


@pytest.mark.control
@pytest.mark.parametrize(("reduction", "weights"), [("mean", "ones"), ("sum", "constant")])
@pytest.mark.parametrize("form", FORMS)
def test_reduced_loss_keeps_its_bits(form, reduction, weights, output):
    make(**FORMS[form], reduction=reduction, weights=weights).check_bits(f"{form}.{reduction}", output)


@pytest.mark.control
@pytest.mark.parametrize("form", FORMS)
def test_workaround_is_exact_for_the_mask_of_valid_labels_and_for_no_other(form, figure):
    mean, mask = make(**FORMS[form], reduction="mean"), make(**FORMS[form], weights="mask")
    valid = make(**FORMS[form], weights="valid")
    mean.rows = valid.rows.sum().expand(mean.BT)
    outputs, [(_, gradients)] = mean.run()
    valid.close("loss", outputs["loss"] * mean.rows[0], valid.right["loss"].sum(), valid.tolerance("loss"))
    for name, x in gradients.items():
        valid.close(f"gradient of {name}", x, valid.right[name], valid.tolerance(name))
        error, tolerance = relative_error(x, mask.right[name]), mask.tolerance(name)
        assert error > tolerance, f"gradient of {name}: relative error {error:.2e}, not above {tolerance:.2e}"
        if form == [*FORMS][-1]:
            figure(f"grad_{name}_workaround", error)


@pytest.mark.parametrize(
    "case",
    [
        param(f"{number:02}", row["reduction"], row["dtype"], row["weights"], row["trained"], row["way"], **row)
        for number, row in enumerate(ROWS)
    ],
)
def test_each_two_options_together(case):
    case.judge(least=4)


@pytest.mark.defect
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_accum_dtype_keeps_what_is_below_the_rounding_of_the_sum(dtype):
    case = make(dtype=dtype, labels="none ignored", shape=(24, 2, 60), accum_dtype=torch.float32)
    case.inputs["input"][:], case.target[:] = case.inputs["input"][0].clone(), case.target[0].clone()
    case.rows = case.rows.clone()
    case.rows[0] = 4 / torch.finfo(case.torch_dtype).eps  # what later chunks add is below half an ulp
    leaves = case.leaves()
    loss, other = case.forward(leaves)["loss"], make(dtype=dtype, shape=case.shape)
    other.forward(other.leaves())  # a loss without accum_dtype, before the backward
    [(_, gradients)] = case.backward(loss, leaves, "once", 1.0)
    for name in ("weight", "bias"):  # half of what eager PyTorch loses; rounded logits err by less than a quarter of it
        limit = relative_error(case.rounded[name], case.right[name]) / 2
        case.close(f"gradient of {name}", gradients[name], case.right[name], limit)


@pytest.mark.control
@pytest.mark.parametrize("changed", [*NAMES, "labels"])
def test_change_in_place_is_refused_or_makes_no_difference(changed):
    make().check_change(changed)


# Losses on one head that wait for their backward at once, in the order of their forwards.
LIVE = [
    {"weights": "random"},
    {"ignore_index": 2, "label_smoothing": 0.2, "softcap": 16.0, "ce_weight": "given", "use_token_scaling": True},
    {"ignore_index": 5, "lse_square_scale": 0.03, "weights": "signed"},
    {"reduction": "mean", "lse_square_scale": 0.1},
    {"softcap": 32.0, "use_token_scaling": True, "weights": "mask"},
    {"label_smoothing": 0.3, "weights": "signed", "returns": "all"},
]


@pytest.mark.defect
@pytest.mark.parametrize("order", [1, -1], ids=["first-loss-first", "last-loss-first"])
def test_losses_that_wait_at_once_keep_their_own(order):
    leaves, labels = make(shape=(3, 3, 50)).leaves(), torch.tensor([31, 2, 5], device=DEVICE)
    calls = []
    for factors in LIVE:
        case = make(shape=(3, 3, 50), **factors)
        case.target = labels  # one that ignores 2 counts 5, and the reverse
        calls.append((case, case.forward(leaves)))
    for case, outputs in calls[::order]:
        case.check(outputs, case.backward(outputs["loss"], leaves, "once", 1.0))


@pytest.mark.control
def test_logits_are_neither_made_nor_held_at_once():
    def alive():
        return sum(x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is torch.Tensor)

    case = make(shape=(48, 2, 48))
    gc.collect()
    leaves, incoming, before = case.leaves(), case.incoming(), alive()
    with autograd.NewTensors() as new, autograd.saved_sizes() as saved:
        loss = case.forward(leaves)["loss"]
        held = sum(saved) + alive() - before
        loss.backward(incoming)
    limit = case.BT * case.V * case.torch_dtype.itemsize // 2
    assert held <= limit, f"{held} bytes are held for backward, half of the logits has {limit}"
    assert new.largest <= limit, f"a tensor of {new.largest} bytes is made, half of the logits has {limit}"
