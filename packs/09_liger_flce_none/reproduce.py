# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "liger-kernel==0.8.1",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.11.0",
#   "triton==3.6.0",
# ]
# ///
"""Liger-Kernel scales every gradient of a reduction="none" loss by the first token's weight.

Symptom: LigerFusedLinearCrossEntropyLoss(reduction="none") returns right per-token losses. Weight them by token
(a loss mask, document boundaries, a scale per sample) and call backward: the gradients of input, weight and bias are
those of the *unweighted* sum, times the weight of token 0, with neither error nor warning. Where token 0 is masked
out, all of them are zero.

Cause: forward makes the gradients in advance, and backward multiplies them by grad_output in a kernel that loads one
scalar; of a vector that is the first element. The rows of grad_input could still be scaled afterwards; grad_weight
and grad_bias are sums over tokens by then and could not.

Scope: first-order gradients of liger_kernel.transformers.LigerFusedLinearCrossEntropyLoss on its Triton path. Losses,
uniform weights, "mean" and "sum" are right with and without the bug: they are the controls. So is the usual
workaround, "mean" times the number of labels that are not ignored: it is exact for the mask `labels != ignore_index`
and for no other, and the check workaround_limit shows that with the mask 0, 0.5, 1. A release that refuses "none", or
reduces it to one number, is UNSUPPORTED: that is neither the bug nor the fix.

Upstream: https://github.com/linkedin/Liger-Kernel/issues/968 reports it; mended by
https://github.com/linkedin/Liger-Kernel/pull/1298, first released in 0.8.2. See also issues 338, 488 and 872 and pull
requests 496, 879, 1126 and 1182. For a checkout: PYTHONPATH=CHECKOUT/src uv run reproduce.py

Both sentinels without the runner, from a folder that holds the release's own liger_kernel-0.8.1.tar.gz, with PACK
set to the absolute path of this file's folder and with torch, triton, numpy and packaging installed. The second line
ends in BUG_REPRODUCED, the fourth in FIX_VALIDATED (the third keeps git from looking for a repository around it):

    tar xzf liger_kernel-0.8.1.tar.gz
    PYTHONPATH=liger_kernel-0.8.1/src python "$PACK/reproduce.py"
    GIT_CEILING_DIRECTORIES="$PWD" git -C liger_kernel-0.8.1 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=liger_kernel-0.8.1/src python "$PACK/reproduce.py"

Errors are norms of the difference over norms of the float64 reference, which is plain autograd on the same rounded
inputs. The tolerances have these reasons:
- fp32: 8 * eps * sqrt(V). The longest sum has V terms, and rounding errors grow like its root; 8 leaves room for exp,
  log and the product that follows.
- bf16: 5 times the noise floor, which is this error of eager PyTorch in bf16 that accumulates gradients over as many
  chunks as the kernel makes. The kernel rounds no element more than twice as often as eager (logits, their gradient,
  the product; and then the row's weight, the scalar factor), and no rounding to nearest errs by more than 2.5 times
  its root mean square.
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, ctypes, hashlib, json, sys
from pathlib import Path
class Probe:
    """Prints the lines that a runner reads, and draws the verdict from the checks among them."""
    def __init__(self):
        self.judged = {}  # (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # an accused module, as it was really loaded
        sha256 = hashlib.sha256(Path(module.__file__).read_bytes()).hexdigest()
        self.say("UPSTREAM", module=module.__name__, file=module.__file__, sha256=sha256)
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        target, reason = parser.parse_args().target, "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            sys.excepthook(*sys.exc_info())
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import importlib.util
import os

NAMES = ("loss", "grad_input", "grad_weight", "grad_bias")


class Case:
    """One shape and dtype: the inputs, the loss under test and its reference."""

    def __init__(self, torch, loss_class, dtype, device, shape):
        BT, H, V = shape
        self.torch, self.loss_class, self.dtype, self.BT, self.V = torch, loss_class, dtype, BT, V
        random = torch.Generator().manual_seed(9)
        normal = [torch.randn(size, generator=random) for size in ((BT, H), (V, H), (V,))]
        # Logits of about unit variance at any H, so that the softmax is neither flat nor a spike.
        self.tensors = [(x * scale).to(device, dtype) for x, scale in zip(normal, (1, H**-0.5, 0.1), strict=True)]
        self.labels = torch.randint(V, (BT,), generator=random).to(device)
        self.labels[3::7] = -100  # ignored rows among the others
        self.valid = (self.labels != -100).float()
        self.random = (torch.rand(BT, generator=random) + 0.25).to(device)
        self.mask = (torch.arange(BT, device=device) % 3) / 2  # 0, 0.5, 1: the first row's weight is 0
        # The kernel's chunks of rows hold about BT x H logits, the rows rounded up to a power of two.
        self.noisy = self.eager(self.random, dtype, 1 << (-(-BT // -(-V // H)) - 1).bit_length())

    def eager(self, weights, dtype, rows):
        """Weighted losses and gradients of plain PyTorch, the gradients accumulated over chunks of rows."""
        hidden, *linear = leaves = [x.to(dtype, copy=True).requires_grad_() for x in self.tensors]
        losses = []
        for x, labels, weight in zip(hidden.split(rows), self.labels.split(rows), weights.split(rows), strict=True):
            logits = self.torch.nn.functional.linear(x, *linear)
            logits = logits.to(self.torch.promote_types(dtype, self.torch.float32))  # the losses are never bf16
            losses.append(weight * self.torch.nn.functional.cross_entropy(logits, labels, reduction="none"))
            losses[-1].sum().backward(retain_graph=True)
        return [self.torch.cat(losses).detach(), *(x.grad for x in leaves)]

    def liger(self, reduction, weights, trained=3, repeats=1):
        """Weighted losses and gradients of the code under test; of hidden, weight and bias the first are trained."""
        hidden, weight, *bias = leaves = [x.clone().requires_grad_(i < trained) for i, x in enumerate(self.tensors)]
        loss = self.loss_class(reduction=reduction)(weight, hidden, self.labels, *bias)
        if reduction == "none" and loss.shape != self.labels.shape:
            raise NotImplementedError(f'this release gives a loss of shape {[*loss.shape]} for reduction="none"')
        for _ in range(repeats):
            for leaf in leaves:
                leaf.grad = None
            loss.backward(weights.expand_as(loss), retain_graph=True)
        return [loss.detach() * weights, *(x.grad for x in leaves[:trained])]

    def errors(self, got, weights, *, peak=False):
        """Norms of the errors against float64, relative to the reference's norm; or the largest error as it is."""
        wants = self.eager(weights.double(), self.torch.float64, self.BT)
        wants[0] = wants[0] if got[0].shape else wants[0].sum()
        pairs = [(x.double() - want, want) for x, want in zip(got, wants, strict=False)]
        values = (error.abs().max() if peak else error.norm() / want.norm() for error, want in pairs)
        return dict(zip(NAMES, map(float, values), strict=False))


def judge_case(probe, form, case, *, tell):
    """Make every check on one case; their names begin with its form."""
    torch = case.torch
    tolerance = {name: 5 * error for name, error in case.errors(case.noisy, case.random).items()}
    if case.dtype == torch.float32:
        tolerance = dict.fromkeys(NAMES, 8 * torch.finfo(torch.float32).eps * case.V**0.5)

    def check(name, role, got, weights, *, wrong=False):
        errors = case.errors(got, weights)
        ok = all((error <= tolerance[key]) != wrong for key, error in errors.items())
        unit = "relative error" + wrong * ", which must exceed the tolerance"
        probe.check(f"{form}.{name}", role, ok, measured=errors, tolerance=tolerance, unit=unit)

    ones, n_valid = torch.ones_like(case.random), case.valid.sum()
    # One element that is expanded, and backward twice.
    check("none_ones", "control", case.liger("none", ones[:1], repeats=2), ones)
    # backward leaves the gradients alone where the factor is 1, and scales them where it is not
    for reduction, factor, weight in (("mean", ones[0], 1 / n_valid), ("sum", ones[0] * 0.375, 0.375)):
        got, again = (case.liger(reduction, factor) for _ in range(2))
        check(reduction, "control", got, case.valid * weight)
        for name, x, y in zip(NAMES, got, again, strict=True):
            probe.output(f"{form}.{reduction}.{name}", x, must_match=torch.equal(x, y))
    workaround = case.liger("mean", n_valid)
    check("workaround", "control", workaround, case.valid)
    check("workaround_limit", "control", workaround, case.mask, wrong=True)

    masked = case.liger("none", case.mask)
    check("none_mask", "defect", masked, case.mask)
    weighted = case.liger("none", torch.stack((case.random, ones), 1)[:, 0])  # not contiguous
    check("none_random", "defect", weighted, case.random)
    if tell:
        figures = {f"{name}_max_abs_error": x for name, x in case.errors(weighted, case.random, peak=True).items()}
        figures |= {f"{name}_noise": x for name, x in case.errors(case.noisy, case.random, peak=True).items()}
        figures |= {f"{name}_workaround": x for name, x in case.errors(workaround, case.mask).items()}
        figures["masked_grad_weight_norm"] = float(masked[2].norm())
        for name, value in figures.items():
            probe.say("FIGURE", name=name, value=value, unit="1", spread=None)
    case.tensors.pop()  # the usual head has no bias, and an adapter trains nothing but the input
    check("none_frozen_weight", "defect", case.liger("none", case.random, trained=1), case.random)


def judge(probe, target):
    """Load the release that is on the path, and judge it on each case."""
    os.environ["TRITON_INTERPRET"] = str(int(target == "cpu"))  # read when triton is imported
    import torch

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if target not in ("cpu", f"sm_{major}{minor}" + "a" * (major >= 9)):
        raise NotImplementedError(f"{target} is neither cpu nor the architecture of a GPU of this host")
    name, evidence = ("cpu", "interpreted") if target == "cpu" else (torch.cuda.get_device_name(), "executed")
    probe.say("TARGET", target=target, evidence=evidence, device=name)
    # The parent package imports the transformers library in older releases: it is found, not executed.
    parent = "liger_kernel.transformers"
    sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    from liger_kernel.transformers import fused_linear_cross_entropy as public

    names = {public.__name__, public.LigerFusedLinearCrossEntropyFunction.__module__}
    names |= {f"liger_kernel.ops.{name}" for name in ("fused_linear_cross_entropy", "cross_entropy", "utils")}
    for name in sorted(names & set(sys.modules)):
        probe.upstream(sys.modules[name])
    torch.backends.cuda.matmul.allow_tf32 = False
    place = (torch, public.LigerFusedLinearCrossEntropyLoss)
    try:
        # V >> H makes several chunks, 13 rows no multiple of a chunk's 2; H and V are no powers of two.
        device = "cpu" if target == "cpu" else "cuda"
        judge_case(probe, "fp32", Case(*place, torch.float32, device, (13, 5, 45)), tell=target == "cpu")
        if target != "cpu":
            judge_case(probe, "bf16", Case(*place, torch.bfloat16, device, (2 * 512, 1024, 32000)), tell=True)
    except (AssertionError, TypeError) as error:
        if "reduction" not in str(error) and "positional arguments" not in str(error):
            raise
        raise NotImplementedError(f"this release refuses the call: {type(error).__name__}: {error}") from error


if __name__ == "__main__":
    Probe().run(judge)
