"""Liger-Kernel's fused linear cross entropy with reduction="none" rounds no weight of a token before the product.

The incoming gradient [BT] is float32. Each token's gradient is multiplied by its weight, and rounded once after that.
Weights that bf16 or fp16 hold exactly give the gradients of float64 autograd, and so do all weights in float32.

Not judged: `ce_impl`, torch.compile, several GPUs. Pack 09 has the weights themselves.
The reference and the reasons for the tolerances are in kit/liger.py.
"""

import pytest
import torch

from kit.liger import DEVICE, FORMS, Case, covering
from kit.liger import FACTORS as OPTIONS

EVIDENCE_WITHOUT_GPU = {"cpu": "interpreted"}
FACTORS = OPTIONS | {
    "weights": ("eighths", "signed", "large"),
    "trained": ("all", "frozen weight", "frozen input", "bias"),
}


def make(**factors):
    """Return a case whose rows have weights that every dtype holds exactly."""
    case = Case(**{"reduction": "none", "weights": "eighths"} | factors)
    rows = torch.arange(case.BT, device=DEVICE)
    case.rows = {
        "eighths": (rows % 9) / 8,  # 0 to 1
        "signed": rows % 7 - 3.0,  # -3 to 3
        "large": 2.0 ** (rows % 5),  # 1 to 16
    }[case.weights]
    return case


@pytest.mark.control
@pytest.mark.parametrize(
    "row", [pytest.param(row, id=f"{n:02}-{row['dtype']}-{row['weights']}") for n, row in enumerate(covering(FACTORS))]
)
def test_weights_that_every_dtype_holds(row):
    make(**row).judge(least=4)


@pytest.mark.control
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("form", FORMS)
def test_losses_and_gradients_keep_their_bits(form, reduction, output):
    case = make(**FORMS[form], reduction=reduction)
    if reduction != "none":
        case.rows = torch.ones_like(case.rows)
    case.check_bits(f"{form}.{reduction}", output)


@pytest.mark.defect
def test_weights_may_be_larger_than_any_number_of_fp16():
    case = Case(reduction="none", dtype="float16", shape=(24, 2, 60), ce_weight="given")
    # Such weights a GradScaler begins with. The classes weigh so little that no gradient is too large for fp16.
    case.rows, case.class_weights = case.rows * 2**17, case.class_weights / 64
    case.judge(least=4)


@pytest.mark.defect
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "autocast"])
def test_no_weight_is_rounded_before_the_product(dtype, figure):
    """Judge the mean over the entries of a gradient, of rows that are alike.

    Each weight is just below 7/16 of a step of bf16 above a number of bf16, and just below half a step of fp16 above
    one of fp16. Rounded to either it errs downwards, and so does every entry; roundings of products err both ways.
    Each gradient is that of one row of weight 1, times the row's weight or the sum of the weights. The rounding of
    logits and of their gradient is in both. No entry is a difference: no weight is negative, the label's are 0.
    """
    case = Case(reduction="none", dtype=dtype, shape=(3, 400, 750), bias=dtype != "autocast", labels="none ignored")
    hidden, weight = case.inputs["input"], case.inputs["weight"]
    hidden += hidden.sign() / 4  # no entry is near 0, where fp16 is coarser
    weight.abs_()
    weight[0] = 0
    steps = torch.randint(128, 256, (3,), generator=torch.Generator().manual_seed(11)).to(DEVICE)
    weights = (steps + 7 / 16 - 2**-10) / 128  # 1 to 2
    gradients = []
    for case.rows in (torch.ones_like(weights[:1]), weights):
        case.BT = len(case.rows)
        case.inputs["input"] = hidden[:1].repeat(case.BT, 1)
        case.target = torch.zeros(case.BT, dtype=torch.int64, device=DEVICE)
        gradients.append(case.run()[1][0][1])
    # A weight that was rounded to the dtype errs by 0.3 eps in the mean (7/16 * log 2): half of that is too much. A
    # rounding to nearest errs by 0.2 eps (root mean square). Of the bias's entries, the fewest, as many err alike as
    # bf16 has numbers to 1 in 128, and each goes through four roundings at most: 0.2 * 2 / sqrt(128) = 0.04 eps.
    tolerance, errors = 0.15, {}
    for name, plain in gradients[0].items():
        factor = weights.double()[:, None] if name == "input" else weights.double().sum()
        ratio = float((gradients[1][name].double() / (plain.double() * factor)).mean())
        errors[name] = abs(ratio - 1) / torch.finfo(case.torch_dtype).eps
    figure(f"weight_rounding_{dtype}", max(errors.values()), "eps")
    assert max(errors.values()) <= tolerance, f"the means of gradients err by {errors} eps, tolerance {tolerance} eps"
