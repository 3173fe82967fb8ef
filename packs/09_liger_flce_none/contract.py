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

Scope: first-order gradients of the fused linear cross entropy on its Triton path, through the module, the functional
form and the autograd function. With reduction="none" all of the table below is judged. With "mean" and "sum" one
backward is judged, of an input that is trained and of tensors that are stored by rows: a second backward, a frozen
input and column-major tensors are other bugs of those two modes, which this pack neither claims nor fixes. The
workaround, "mean" times the number of labels that are not ignored, is exact for the mask `labels != ignore_index` and
for no other: the check workaround_limit shows that with the mask 0, 0.5, 1. A release that refuses "none", or reduces
it to one number, is UNSUPPORTED: that is neither the bug nor the fix. An option that a release does not have yet is
not judged there.

The contract of what the patch touches, for BT tokens, H hidden, V classes (FACTORS has the values, CASES a pairwise
covering set; a row that the pinned release gets wrong is a defect check, every other a control):

    hidden [BT, H], weight [V, H], bias [V] or None    fp32, bf16, fp16, autocast; each trained or frozen; any strides
    labels [BT] int64                                  in 0..V-1, or ignore_index; any stride
    grad_output [BT], or a scalar                      any sign, sum, size and stride; backward once, again, for a leaf
    ce_weight [V] or None, ignore_index, lse_square_scale, label_smoothing, softcap, accum_dtype, use_token_scaling
    return_z_loss, return_token_accuracy, return_predicted_tokens    what comes beside the loss, without gradients

Besides: a weight is not rounded to the 16 bits of the logits before the product with it (a finer rounding is less than
the product's, and passes); accum_dtype=float32 is as precise as it is meant to be; [BT, V] logits are neither made nor
held at once; create_graph=True gives the same gradients; and a tensor that is changed in place between forward and
backward makes no difference or is an error, as in PyTorch. Gradients of two backwards are kept side by side;
torch.utils.checkpoint gives out once what was saved; the gradient from above stays as it was. Of several losses that
wait for their backward at once, each keeps its own options, labels and inputs, whichever goes backward first.

Upstream: https://github.com/linkedin/Liger-Kernel/issues/968 reports it; fixed by
https://github.com/linkedin/Liger-Kernel/pull/1298, first released in 0.8.2; pack.toml has the other threads.
For a checkout: PYTHONPATH=CHECKOUT/src uv run reproduce.py

Both sentinels without the runner, from a folder that holds the release's own liger_kernel-0.8.1.tar.gz, with PACK
set to the absolute path of this file's folder and with torch, triton, numpy and packaging installed. The second line
ends in BUG_REPRODUCED, the fourth in FIX_VALIDATED (the third keeps git from looking for a repository around it):

    tar xzf liger_kernel-0.8.1.tar.gz
    PYTHONPATH=liger_kernel-0.8.1/src python "$PACK/reproduce.py"
    GIT_CEILING_DIRECTORIES="$PWD" git -C liger_kernel-0.8.1 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=liger_kernel-0.8.1/src python "$PACK/reproduce.py"

On target cpu the probe adds to Triton's interpreter two things that it lacks: libdevice's tanh, in one line of Triton's
own operations, and arguments that are floats as the fp32 scalars that they are on a GPU.

Errors are norms of the difference over norms of the float64 reference, which is plain autograd on the same rounded
inputs. The tolerances have these reasons:
- fp32: 8 * eps * sqrt(V). The longest sum has V terms, and rounding errors grow like its root; 8 leaves room for exp,
  log and the product that follows.
- bf16, fp16, autocast: 5 times the noise floor, which is this error of eager PyTorch in the same dtype that
  accumulates gradients over as many chunks as the kernel makes. The kernel rounds no element more than twice as often
  as eager (logits, their gradient, the product; and then the row's weight, the scalar factor), and no rounding to
  nearest errs by more than 2.5 times its root mean square. Where a case is so small that its noise can be nothing by
  chance, 4 * eps of the dtype.
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, contextlib, ctypes, fnmatch, hashlib, json, os, sys, traceback
from pathlib import Path
class Probe:  # prints the lines that a runner reads, and draws the verdict from the checks among them
    def __init__(self):
        self.judged, self.tested, self.only = {}, [], None  # judged: (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # a module under test, as it was really loaded
        name, file, package = module.__name__, Path(module.__file__), module.__name__.partition(".")[0]
        self.tested.append(next((str(folder) for folder in file.parents if folder.name == package), str(file)))
        self.say("UPSTREAM", module=name, file=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def judge(self, name, role, measure, *given):  # measure(*given) returns ok, and by name what it measured
        try:
            wanted = fnmatch.fnmatchcase(name, self.only or "*")
            ok, values = measure(*given) if wanted else (None, {"reason": "--only leaves it out"})
        except Exception as error:  # code under test that raises is wrong; a fault of the probe or the host is not
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            host = isinstance(error, (ImportError, MemoryError, OSError)) or "out of memory" in str(error)
            refused = "returned an in" in str(error)  # autograd says: an invalid gradient, an incorrect number of them
            if host or not (refused or any(file.startswith(tuple(self.tested)) for file in files)):
                raise
            traceback.print_exc()
            ok, values = False, {"reason": f"it raised {type(error).__name__}: {error}"[:400]}
        self.check(name, role, ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    @contextlib.contextmanager
    def alone(self):  # around launches that are timed: no other lane of the runner uses this GPU meanwhile
        gate = Path(os.environ.get("REPRODUCER_GPU_GATE", os.devnull))  # a named pipe, where lanes share a GPU
        try:
            yield gate.read_text()  # ends when the other lanes are off it
        finally:
            gate.read_text()  # ends when they may use it again
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        parser.add_argument("--only", metavar="CHECK", help="run this check alone (a name or a glob): no verdict")
        target, self.only = vars(parser.parse_args()).values()
        reason = f"only {self.only} was run" if self.only else "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            traceback.print_exc()
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged and not self.only), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import functools
import gc
import importlib.util
import inspect

FACTORS = {
    "reduction": ("none", "mean", "sum"),
    "dtype": ("float32", "bfloat16", "float16", "autocast"),  # autocast: hidden in bf16, weight and bias in fp32
    "shape": ((7, 5, 25), (1, 9, 7), (3, 3, 50), (6, 8, 24)),  # BT, H, V: in 4 chunks, the last short; 1; 3; 3
    "weights": ("ones", "constant", "mask", "random", "signed"),  # of the rows; the factor of a reduced loss
    "trained": ("all", "no weight", "no input", "bias", "nothing"),
    "bias": (True, False),
    "backward": ("once", "twice", "each alone"),
    "layout": ("plain", "sliced input", "column-major input", "column-major weight", "strided labels"),
    "labels": ("some ignored", "none ignored", "all ignored"),
    "entry": ("module", "function", "functional"),
    "saved": ("plain", "hooks"),  # hooks: what is saved for backward is copied, as offloading does
    "ce_weight": ("absent", "given", "strided"),
    "ignore_index": (-100, 2),
    "lse_square_scale": (0.0, 0.03),
    "label_smoothing": (0.0, 0.2),
    "softcap": (None, 16.0),
    "accum_dtype": (None, "float32"),
    "use_token_scaling": (False, True),
    "returns": ("loss", "z loss", "accuracy", "tokens", "all"),
}
EXCLUDED = [
    # a reduced loss has one factor, not one a row
    ("reduction", "mean", "weights", "mask"),
    ("reduction", "mean", "weights", "random"),
    ("reduction", "mean", "weights", "signed"),
    ("reduction", "sum", "weights", "mask"),
    ("reduction", "sum", "weights", "random"),
    ("reduction", "sum", "weights", "signed"),
    # bugs of these two modes that are not this pack's
    ("reduction", "mean", "trained", "no input"),
    ("reduction", "mean", "trained", "bias"),
    ("reduction", "mean", "backward", "twice"),
    ("reduction", "mean", "backward", "each alone"),
    ("reduction", "mean", "layout", "column-major input"),
    ("reduction", "mean", "layout", "column-major weight"),
    ("reduction", "sum", "trained", "no input"),
    ("reduction", "sum", "trained", "bias"),
    ("reduction", "sum", "backward", "twice"),
    ("reduction", "sum", "backward", "each alone"),
    ("reduction", "sum", "layout", "column-major input"),
    ("reduction", "sum", "layout", "column-major weight"),
    # no mean and no accuracy of no rows
    ("reduction", "mean", "labels", "all ignored"),
    ("labels", "all ignored", "returns", "accuracy"),
    ("labels", "all ignored", "returns", "all"),
    # nothing to go back through, and no bias to train
    ("trained", "nothing", "backward", "twice"),
    ("trained", "nothing", "backward", "each alone"),
    ("trained", "bias", "bias", False),
]
# fmt: off
CASES = [
    ("none", "float32", (6, 8, 24), "random", "all", False, "each alone", "sliced input", "some ignored",
     "function", "hooks", "given", 2, 0.0, 0.2, None, "float32", True, "all"),
    ("none", "float16", (3, 3, 50), "mask", "bias", True, "twice", "plain", "all ignored",
     "functional", "plain", "strided", -100, 0.03, 0.0, 16.0, None, False, "loss"),
    ("mean", "bfloat16", (1, 9, 7), "ones", "no weight", False, "once", "strided labels", "none ignored",
     "module", "plain", "absent", -100, 0.0, 0.2, 16.0, "float32", False, "tokens"),
    ("sum", "autocast", (7, 5, 25), "constant", "nothing", True, "once", "strided labels", "some ignored",
     "module", "hooks", "strided", 2, 0.03, 0.0, None, None, True, "z loss"),
    ("none", "bfloat16", (1, 9, 7), "signed", "no input", True, "twice", "column-major weight", "none ignored",
     "function", "hooks", "absent", 2, 0.03, 0.0, None, None, True, "accuracy"),
    ("none", "autocast", (7, 5, 25), "mask", "no input", False, "each alone", "column-major input", "all ignored",
     "function", "plain", "given", -100, 0.0, 0.2, 16.0, "float32", False, "z loss"),
    ("sum", "float16", (3, 3, 50), "constant", "nothing", False, "once", "plain", "none ignored",
     "functional", "plain", "given", 2, 0.0, 0.2, 16.0, "float32", True, "accuracy"),
    ("none", "float32", (6, 8, 24), "ones", "no weight", True, "each alone", "column-major input", "all ignored",
     "functional", "hooks", "given", -100, 0.03, 0.0, None, None, True, "tokens"),
    ("none", "float32", (6, 8, 24), "signed", "bias", True, "twice", "column-major weight", "some ignored",
     "module", "plain", "given", -100, 0.0, 0.2, 16.0, "float32", False, "loss"),
    ("mean", "float16", (7, 5, 25), "constant", "all", True, "once", "sliced input", "none ignored",
     "functional", "hooks", "absent", -100, 0.03, 0.0, 16.0, None, False, "all"),
    ("mean", "autocast", (3, 3, 50), "ones", "no weight", False, "once", "plain", "some ignored",
     "function", "hooks", "strided", 2, 0.03, 0.0, None, "float32", True, "loss"),
    ("none", "float16", (3, 3, 50), "random", "all", False, "each alone", "column-major weight", "all ignored",
     "module", "plain", "strided", 2, 0.0, 0.0, None, None, False, "tokens"),
    ("none", "bfloat16", (1, 9, 7), "mask", "bias", True, "once", "column-major input", "none ignored",
     "module", "hooks", "strided", 2, 0.03, 0.2, None, "float32", True, "all"),
    ("sum", "float32", (1, 9, 7), "constant", "nothing", False, "once", "sliced input", "all ignored",
     "function", "plain", "absent", -100, 0.0, 0.0, 16.0, "float32", False, "loss"),
    ("none", "autocast", (6, 8, 24), "random", "bias", True, "twice", "strided labels", "none ignored",
     "functional", "plain", "absent", -100, 0.03, 0.0, 16.0, "float32", False, "accuracy"),
    ("none", "bfloat16", (1, 9, 7), "signed", "all", False, "each alone", "plain", "some ignored",
     "functional", "hooks", "given", -100, 0.03, 0.2, 16.0, None, True, "z loss"),
    ("none", "float32", (7, 5, 25), "signed", "no weight", False, "twice", "sliced input", "some ignored",
     "module", "hooks", "strided", -100, 0.0, 0.0, None, None, False, "accuracy"),
    ("none", "float16", (6, 8, 24), "constant", "no input", False, "once", "plain", "some ignored",
     "function", "plain", "strided", 2, 0.03, 0.0, None, "float32", True, "tokens"),
    ("none", "float32", (3, 3, 50), "mask", "bias", True, "each alone", "strided labels", "none ignored",
     "function", "plain", "absent", 2, 0.03, 0.2, None, "float32", True, "z loss"),
    ("none", "autocast", (3, 3, 50), "signed", "no input", False, "twice", "column-major input", "some ignored",
     "functional", "plain", "absent", 2, 0.03, 0.0, None, "float32", True, "all"),
    ("none", "bfloat16", (7, 5, 25), "random", "nothing", True, "once", "column-major weight", "all ignored",
     "functional", "plain", "strided", 2, 0.0, 0.0, 16.0, "float32", False, "loss"),
    ("mean", "bfloat16", (6, 8, 24), "ones", "nothing", False, "once", "sliced input", "none ignored",
     "function", "hooks", "given", -100, 0.0, 0.2, 16.0, "float32", False, "z loss"),
    ("none", "float16", (6, 8, 24), "signed", "no input", True, "once", "strided labels", "all ignored",
     "module", "plain", "given", -100, 0.0, 0.2, None, None, False, "loss"),
    ("none", "autocast", (3, 3, 50), "mask", "all", False, "twice", "sliced input", "some ignored",
     "function", "plain", "strided", -100, 0.03, 0.0, None, "float32", True, "tokens"),
    ("sum", "float16", (1, 9, 7), "ones", "no weight", True, "once", "plain", "none ignored",
     "module", "plain", "absent", 2, 0.0, 0.0, 16.0, None, True, "all"),
    ("none", "bfloat16", (3, 3, 50), "constant", "all", True, "each alone", "column-major input", "none ignored",
     "functional", "plain", "absent", 2, 0.03, 0.0, 16.0, "float32", True, "loss"),
    ("none", "autocast", (1, 9, 7), "random", "no weight", False, "twice", "column-major weight", "none ignored",
     "functional", "hooks", "absent", -100, 0.03, 0.2, 16.0, None, False, "z loss"),
    ("mean", "float32", (7, 5, 25), "ones", "all", False, "once", "plain", "some ignored",
     "module", "hooks", "strided", -100, 0.0, 0.0, None, "float32", True, "accuracy"),
    ("none", "float16", (6, 8, 24), "mask", "no weight", False, "each alone", "column-major input", "none ignored",
     "module", "hooks", "absent", -100, 0.0, 0.0, 16.0, "float32", True, "accuracy"),
    ("none", "float32", (7, 5, 25), "ones", "bias", True, "twice", "column-major weight", "some ignored",
     "function", "hooks", "absent", -100, 0.0, 0.0, 16.0, None, False, "tokens"),
    ("sum", "bfloat16", (6, 8, 24), "constant", "all", True, "once", "strided labels", "some ignored",
     "functional", "hooks", "given", -100, 0.03, 0.0, None, None, True, "tokens"),
    ("none", "float16", (6, 8, 24), "mask", "nothing", False, "once", "column-major weight", "none ignored",
     "function", "hooks", "absent", 2, 0.03, 0.2, 16.0, None, False, "all"),
    ("none", "bfloat16", (6, 8, 24), "signed", "nothing", True, "once", "column-major input", "all ignored",
     "functional", "plain", "given", -100, 0.03, 0.2, 16.0, "float32", False, "tokens"),
    ("none", "float16", (7, 5, 25), "constant", "bias", True, "twice", "column-major weight", "all ignored",
     "module", "hooks", "strided", -100, 0.0, 0.2, None, None, True, "z loss"),
    ("none", "float32", (3, 3, 50), "random", "no input", True, "once", "column-major input", "some ignored",
     "function", "plain", "strided", 2, 0.0, 0.0, 16.0, "float32", False, "all"),
    ("none", "float16", (3, 3, 50), "ones", "no input", False, "each alone", "sliced input", "some ignored",
     "functional", "plain", "given", -100, 0.0, 0.0, 16.0, "float32", True, "accuracy"),
    ("none", "float32", (6, 8, 24), "constant", "no weight", False, "once", "strided labels", "some ignored",
     "functional", "hooks", "absent", 2, 0.0, 0.2, 16.0, "float32", True, "all"),
    ("none", "autocast", (6, 8, 24), "constant", "bias", True, "once", "sliced input", "some ignored",
     "module", "plain", "strided", 2, 0.03, 0.0, 16.0, None, True, "accuracy"),
    ("none", "autocast", (6, 8, 24), "random", "nothing", True, "once", "plain", "some ignored",
     "functional", "plain", "absent", -100, 0.0, 0.0, 16.0, "float32", False, "accuracy"),
]
# fmt: on
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}
OPTIONS = ("ignore_index", "lse_square_scale", "label_smoothing", "softcap", "use_token_scaling")
RETURNS = {"return_z_loss": "z loss", "return_token_accuracy": "accuracy", "return_predicted_tokens": "tokens"}
GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
# Losses that wait for their backward at once, in the order of their forwards. Those of equal dtype, shape and training
# share hidden, weight and bias, and those in LIVE_SHAPE the labels. Each option has other values before and behind it.
LIVE_SHAPE = (3, 3, 50)
ALIKE = {"dtype": "bfloat16", "shape": (12, 2, 24), "labels": "none ignored"}  # see `alike`
LIVE = [
    {"weights": "random"},
    ALIKE,
    {"ignore_index": 2, "label_smoothing": 0.2, "softcap": 16.0, "ce_weight": "given", "use_token_scaling": True},
    ALIKE | {"accum_dtype": "float32"},
    {"ignore_index": 5, "lse_square_scale": 0.03, "ce_weight": "flipped", "weights": "signed", "layout": "flipped"},
    {"reduction": "mean", "lse_square_scale": 0.1},
    {"softcap": 32.0, "use_token_scaling": True, "weights": "mask", "bias": False, "entry": "function"},
    {"trained": "no weight", "label_smoothing": 0.1, "weights": "signed", "entry": "functional"},
    {"trained": "no input", "softcap": 16.0, "ce_weight": "given", "weights": "random"},
    {"dtype": "autocast", "ignore_index": 2, "weights": "random"},
    {"dtype": "float16", "lse_square_scale": 0.1, "ce_weight": "given", "weights": "signed"},
    ALIKE,
    {"label_smoothing": 0.3, "weights": "signed", "layout": "flipped", "returns": "all"},
]
IN_PLACE = "modified by an inplace operation"  # what PyTorch says of a saved tensor that was changed


class Case:
    """One value of each factor: the inputs, the call of the code under test, and its reference."""

    def __init__(self, api, **factors):
        self.api, self.torch, self.factors = api, api.torch, DEFAULTS | factors
        torch, device, (BT, H, self.V) = api.torch, api.device, self["shape"]
        self.autocast = self["dtype"] == "autocast"
        self.dtype = torch.bfloat16 if self.autocast else getattr(torch, self["dtype"])
        random = torch.Generator().manual_seed(9)
        normal = api.normal.get(self["shape"])
        if normal is None:
            normal = [torch.randn(size, generator=random) for size in ((BT, H), (self.V, H), (self.V,))]
            api.normal[self["shape"]] = normal  # the large shape takes its time
        random = torch.Generator().manual_seed(10)
        # Logits of about unit variance at any H, so that the softmax is neither flat nor a spike.
        scaled = [(x * scale).to(device, self.dtype) for x, scale in zip(normal, (1, H**-0.5, 0.1), strict=True)]
        scaled[1:] = [x.float() if self.autocast else x for x in scaled[1:]]
        self.tensors = scaled[: 2 + self["bias"]]
        labels = torch.randint(self.V, (BT,), generator=random)
        labels[labels == self["ignore_index"]] = 0
        if self["labels"] != "none ignored":
            labels[3::7] = self["ignore_index"]  # ignored rows among the others
        if self["labels"] == "all ignored":
            labels[:] = self["ignore_index"]
        self.labels, self.valid = labels.to(device), (labels != self["ignore_index"]).to(device)
        values, rows = torch.rand(BT, generator=random).to(device), torch.arange(BT, device=device)
        self.weights = {
            "ones": torch.ones(1, device=device).expand(BT),
            "constant": torch.full((1,), 0.375, device=device).expand(BT),
            "mask": (rows % 3) / 2,  # 0, 0.5, 1: the first row's weight is 0
            "random": torch.stack((values + 0.25, values), 1)[:, 0],  # 0.25 to 1.25, not contiguous
            "signed": (6 * values - 3) * (rows % 4 != 2),  # -3 to 3, and some are 0
            "cancelling": (values[rows // 2 * 2] + 0.25) * (1 - 2 * (rows % 2)),  # each pair of rows adds up to 0
        }[self["weights"]]
        self.class_weights = (torch.rand(self.V, generator=random) + 0.5).to(device)
        # The kernel's chunks of rows hold about BT x H logits, the rows rounded up to a power of two.
        self.rows = 1 << (-(-BT // -(-self.V // H)) - 1).bit_length()

    def __getitem__(self, name):
        """Return the value of a factor."""
        return self.factors[name]

    @property
    def trained(self):
        """Whether hidden, weight and bias are trained."""
        frozen = {"no weight": (1,), "no input": (0,), "bias": (0, 1), "nothing": (0, 1, 2)}.get(self["trained"], ())
        return [index not in frozen for index in range(len(self.tensors))]

    @property
    def role(self):
        """A defect check where the pinned release is wrong, else a control."""
        if self["reduction"] != "none" or self["trained"] == "nothing":
            return "control"
        uneven = self["weights"] in ("mask", "random", "signed") and self["shape"][0] > 1
        strided = self["layout"].startswith("column-major") and self["weights"] != "ones"
        wrong = (uneven or strided or self["backward"] != "once") and self["labels"] != "all ignored"
        return "defect" if wrong or self["trained"] in ("no input", "bias") else "control"

    @property
    def options(self):
        """The options that are not at their default, by their public names."""
        found = {name: self[name] for name in OPTIONS if self[name] != DEFAULTS[name]}
        found |= {name: True for name, value in RETURNS.items() if self["returns"] in (value, "all")}
        if self["accum_dtype"]:
            found["accum_dtype"] = getattr(self.torch, self["accum_dtype"])
        if self["ce_weight"] != "absent":
            step = 2 if self["ce_weight"] == "strided" else 1
            found["ce_weight"] = self.class_weights.repeat_interleave(step)[::step]
        return found

    def leaves(self):
        """Return copies of hidden, weight and bias, with this case's strides."""
        hidden, weight, *bias = (x.clone() for x in self.tensors)
        if self["layout"] == "sliced input":
            hidden = self.torch.stack((hidden, hidden), -1)[..., 0]
        elif self["layout"] == "column-major input":
            hidden = hidden.t().contiguous().t()
        elif self["layout"] == "column-major weight":
            weight = weight.t().contiguous().t()
        return [x.requires_grad_(on) for x, on in zip((hidden, weight, *bias), self.trained, strict=True)]

    def call(self, leaves, labels):
        """Call the code under test; return the loss, z loss, token accuracy and predicted tokens, or some of them."""
        hidden, weight, *bias = leaves
        options = self.options | {"reduction": self["reduction"]}
        if self["entry"] == "function":
            given = dict(zip(("_input", "weight", "target", "bias"), (hidden, weight, labels, *bias), strict=False))
            values = {name: each.default for name, each in self.api.parameters.items()} | given | options
            return self.api.function.apply(*values.values())
        if self["entry"] == "functional":
            found = self.api.functional(hidden, weight, labels, *bias, **options)
        else:
            found = self.api.module(**options)(weight, hidden, labels, *bias)
        names = ("loss", "z_loss", "token_accuracy", "predicted_tokens")
        return [found] if self["returns"] == "loss" else [getattr(found, name, None) for name in names]

    def forward(self, leaves, labels):
        """Call the code under test, under autocast and with hooks on what it saves where this case has them."""
        hooks = self.torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.torch.autocast(self.api.device, self.torch.bfloat16, enabled=self.autocast))
            if self["saved"] == "hooks":
                stack.enter_context(hooks)
            outputs = self.call(leaves, labels)
        if self["reduction"] == "none" and outputs[0].shape != labels.shape:
            raise NotImplementedError(f'this release gives a loss of shape {[*outputs[0].shape]} for reduction="none"')
        return outputs

    def gradients(self, loss, leaves):
        """Go backward as this case says; return the gradients, None where there is none."""
        weights = self.weights if self["reduction"] == "none" else self.weights[0]
        if self["backward"] == "each alone":
            alone = {"retain_graph": True, "allow_unused": True}
            return [x.requires_grad and self.torch.autograd.grad(loss, x, weights, **alone)[0] for x in leaves]
        for _ in range(1 + (self["backward"] == "twice")):
            for leaf in leaves:
                if leaf.grad is not None:
                    leaf.grad.zero_()  # in place, as an optimizer may
            if loss.requires_grad:
                loss.backward(weights, retain_graph=True)
        return [x.grad for x in leaves]

    def measure(self):
        """Return what the code under test gives: its outputs, the gradients, and how many elements it changed."""
        leaves, labels, weights = self.leaves(), self.labels.clone(), self.weights.clone()
        if self["layout"] == "strided labels":
            labels = self.torch.stack((labels, labels), -1)[:, 0]
        outputs = self.forward(leaves, labels)
        found = dict(zip(GRADIENTS, self.gradients(outputs[0], leaves), strict=False))
        pairs = zip((*leaves, labels, self.weights), (*self.tensors, self.labels, weights), strict=True)
        return [x if x is None else x.detach() for x in outputs], found, sum(int((x != y).sum()) for x, y in pairs)

    def formula(self, logits, labels):
        """Return the loss and the z loss of each row, of wide logits [rows, V] and labels [rows]."""
        valid, total = labels != self["ignore_index"], self.valid.sum()
        picked = labels.where(valid, 0)
        classes = self.class_weights.to(logits.dtype)
        if self["ce_weight"] == "absent":
            classes = self.torch.ones_like(classes)
        log_p = logits.log_softmax(-1)
        log_p_label = log_p.gather(1, picked[:, None])[:, 0]
        loss = (self["label_smoothing"] - 1) * classes[picked] * log_p_label
        loss = loss - self["label_smoothing"] / self.V * (log_p * classes).sum(-1)
        z_loss = self["lse_square_scale"] * logits.logsumexp(-1) ** 2
        if self["reduction"] == "mean":
            loss, z_loss = loss / classes[self.labels[self.valid]].sum(), z_loss / total
        loss = loss + z_loss
        if self["use_token_scaling"]:
            loss, z_loss = (x * log_p_label.exp().detach() for x in (loss, z_loss))
        return loss.where(valid, 0), z_loss.where(valid, 0)

    def eager(self, dtype=None):
        """Plain PyTorch: losses, z losses, logits, gradients of weighted losses. In float64 whole, else by chunks."""
        torch, whole = self.torch, dtype == self.torch.float64
        leaves = [x.to(dtype or x.dtype, copy=True).requires_grad_() for x in self.tensors]
        sums = [torch.zeros_like(x) for x in leaves]
        rows = len(self.labels) if whole else self.rows
        chunks = []
        for hidden, labels, weights in zip(
            leaves[0].split(rows), self.labels.split(rows), self.weights.split(rows), strict=True
        ):
            with torch.autocast(self.api.device, torch.bfloat16, enabled=self.autocast and not whole):
                logits = torch.nn.functional.linear(hidden, *leaves[1:])
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))  # the losses are never bf16
            if self["softcap"]:
                logits = self["softcap"] * (logits / self["softcap"]).tanh()
            loss, z_loss = self.formula(logits, labels)
            chunks.append([x.detach() for x in (loss, z_loss, logits)])
            for index, gradient in enumerate(torch.autograd.grad((loss * weights).sum(), leaves)):
                sums[index] += gradient
        return *(torch.cat(x) for x in zip(*chunks, strict=True)), dict(zip(GRADIENTS, sums, strict=False))

    def errors(self, outputs, found, *, peak=False):
        """Return the errors of a loss and gradients: norms over norms of the reference, or the largest as it is."""
        loss, z_loss, _, gradients = self.eager(self.torch.float64)
        reduced = not outputs[0].shape
        pairs = {"loss": (outputs[0], loss.sum() if reduced else loss)}
        if self.options.get("return_z_loss") and len(outputs) > 1:
            pairs["z_loss"] = (outputs[1], z_loss.sum() if reduced else z_loss)
        trained = dict(zip(GRADIENTS, self.trained, strict=False))
        pairs |= {name: (x, gradients[name]) for name, x in found.items() if trained[name]}
        return {name: self.error(x, want, peak=peak) for name, (x, want) in pairs.items()}

    def error(self, x, want, *, peak=False):
        """Return one error; infinite where there is no tensor, one of another shape, or a NaN: max() would lose it."""
        if x is None or x.shape != want.shape or bool(x.isnan().any()):
            return float("inf")
        error = x.double() - want
        norm = want.norm()  # zero where every row is ignored or weighted by 0: then so is the gradient, exactly
        return float(error.abs().max() if peak else error.norm() / norm.where(norm > 0, 1))

    def tolerances(self, floor=0):
        """Return the tolerance of each error; the floor counts in eps of the dtype."""
        torch, names = self.torch, ("loss", "z_loss", *GRADIENTS)
        eps = torch.finfo(self.dtype).eps
        if self.dtype == torch.float32:
            return dict.fromkeys(names, 8 * eps * self.V**0.5)
        loss, _, _, found = self.eager()
        loss = loss if self["reduction"] == "none" else loss.sum()
        noise = {"z_loss": 0.0} | self.errors([loss], found)
        return {name: max(5 * noise.get(name, 0.0), floor * eps) for name in names}

    def beside(self, outputs):
        """Count what is wrong in the token accuracy and the predicted tokens; a near tie may go either way."""
        *_, logits, _ = self.eager(self.torch.float64)
        torch, wrong = self.torch, 0
        slack = 16 * torch.finfo(self.dtype).eps * logits.abs().amax(-1, keepdim=True)
        possible = logits >= logits.amax(-1, keepdim=True) - slack  # [BT, V]
        if self.options.get("return_predicted_tokens"):
            tokens = outputs[3].where(self.valid, 0)
            wrong += int((~possible.gather(1, tokens[:, None])[:, 0] & self.valid).sum())
            wrong += int((outputs[3] != -1)[~self.valid].sum())
        if self.options.get("return_token_accuracy"):
            may = possible.gather(1, self.labels.where(self.valid, 0)[:, None])[:, 0] & self.valid
            must = may & (possible.sum(-1) == 1)
            low, high = (x.double() if self["reduction"] == "none" else x.sum() / self.valid.sum() for x in (must, may))
            wrong += int(((outputs[2] < low - 1e-6) | (outputs[2] > high + 1e-6)).sum())
        return wrong


def contract(case):
    """Judge one row of CASES."""
    missing = [name for name in case.options if name not in case.api.parameters]
    if missing:
        return None, {"reason": f"this release has no {', '.join(missing)}"}
    outputs, found, changed = case.measure()
    errors, tolerances = case.errors(outputs, found), case.tolerances(floor=4)
    errors |= {"inputs_changed": changed, "beside_the_loss_wrong": case.beside(outputs)}
    tolerances |= {"inputs_changed": 0, "beside_the_loss_wrong": 0}
    ok = all(error <= tolerances[name] for name, error in errors.items())
    return ok, {"measured": errors, "tolerance": {name: tolerances[name] for name in errors}, "unit": "relative error"}


def close(case, tolerances):
    """Judge a case by the loss and the gradients."""
    outputs, found, _ = case.measure()
    errors = case.errors(outputs, found)
    ok = all(error <= tolerances[name] for name, error in errors.items())
    return ok, {"measured": errors, "tolerance": {name: tolerances[name] for name in errors}, "unit": "relative error"}


def losses(case):
    """Judge the losses by token; a release that refuses the mode, or has another, is not judged at all."""
    try:
        outputs = case.forward(case.leaves(), case.labels)
    except (AssertionError, TypeError) as error:
        if "reduction" not in str(error) and "positional arguments" not in str(error):
            raise
        raise NotImplementedError(f"this release refuses the call: {type(error).__name__}: {error}") from error
    errors, tolerance = case.errors([outputs[0].detach()], {}), case.tolerances()["loss"]
    return errors["loss"] <= tolerance, {"measured": errors, "tolerance": tolerance, "unit": "relative error"}


def repeated(probe, form, case, tolerances):
    """Judge a reduced loss; its bits must be those of the other lane, where they are the same twice in this one."""
    (outputs, found, _), (again, found_again, _) = case.measure(), case.measure()
    pairs = {"loss": (outputs[0], again[0])} | {name: (x, found_again[name]) for name, x in found.items()}
    for name, (x, y) in pairs.items():
        if x is None:
            continue  # close says so
        probe.output(f"{form}.{case['reduction']}.{name}", x, must_match=case.torch.equal(x, y))
    return close(case, tolerances)


def workaround(case, reference, tolerances, *, wrong=False):
    """Judge "mean" times the number of labels, against a "none" with weights that it is meant to give."""
    case.weights = case.valid.sum().float().expand(len(case.labels))
    outputs, found, _ = case.measure()
    errors = reference.errors([outputs[0] * case.weights[0]], found)
    ok = all((errors[name] <= tolerances[name]) != wrong for name in found)
    unit = "relative error" + wrong * ", which must exceed the tolerance"
    return ok, {"measured": errors, "tolerance": tolerances, "unit": unit}


def alike(case):
    """Make all rows the first one, which weighs 512; return the limits of the sums that accum_dtype=float32 makes."""
    # What later chunks add is below half an ulp of the sum, in bf16.
    case.tensors[0][:], case.labels[:] = case.tensors[0][0].clone(), case.labels[0].clone()
    case.weights = case.weights.clone()
    case.weights[0] = 512
    loss, _, _, found = case.eager()
    coarse = case.errors([loss], found)
    return {name: coarse[name] / 2 for name in GRADIENTS[1:]}  # rounded logits err by less than a quarter of that


def accumulated(case):
    """Judge accum_dtype=float32, where eager PyTorch that accumulates in bf16 loses what later chunks add."""
    limits = alike(case)
    outputs, found, _ = case.measure()
    errors = case.errors(outputs, found)
    return all(errors[name] <= limit for name, limit in limits.items()), {"measured": errors, "tolerance": limits}


def live_cases(api):
    """Make the cases of LIVE, each with its tolerances."""
    labels, found = api.torch.tensor([31, 2, 5], device=api.device), []  # who ignores 2 counts 5, and the reverse
    for number, factors in enumerate(LIVE):
        case, limits = Case(api, **{"shape": LIVE_SHAPE} | factors), {}
        if set(case.options) - set(api.parameters):
            continue  # this release has no such option
        if case["shape"] == LIVE_SHAPE:
            case.labels = labels.flip(0) if case["layout"] == "flipped" else labels
            case.valid = case.labels != case["ignore_index"]
            if case["ce_weight"] == "flipped":
                case.class_weights = case.class_weights.flip(0)
        elif case["accum_dtype"]:
            limits = alike(case)
        else:  # one row is enough of it
            case.tensors[0] = case.tensors[0][:1]
            case.labels, case.valid, case.weights = case.labels[:1], case.valid[:1], case.weights[:1]
        found.append((number, case, case.tolerances(floor=4) | limits))
    return found


def live_losses(api):
    """Judge losses that wait for their backward at once: each keeps what is its own, first come and last first."""
    shared, calls, measured = {}, [], {}
    for number, case, tolerances in live_cases(api):
        leaves = [
            shared.setdefault((index, x.shape, case["dtype"], case["trained"]), x)
            for index, x in enumerate(case.leaves())
        ]
        calls.append((number, case, tolerances, leaves, case.forward(leaves, case.labels)))
    for turn, each in (("first", calls), ("last", calls[::-1])):
        for number, case, tolerances, leaves, outputs in each:
            trained = [x for x in leaves if x.requires_grad]
            names = [name for name, x in zip(GRADIENTS, leaves, strict=False) if x.requires_grad]
            above = case.weights if case["reduction"] == "none" else case.weights[0]
            given = case.torch.autograd.grad(outputs[0], trained, above, retain_graph=True, allow_unused=True)
            found = dict(zip(names, given, strict=True))
            errors = case.errors([x if x is None else x.detach() for x in outputs], found)
            measured[f"{number}, {turn} first"] = max(error / tolerances[name] for name, error in errors.items())
    return max(measured.values()) <= 1, {"measured": measured, "tolerance": 1, "unit": "errors over their tolerances"}


def with_graph(case):
    """Judge gradients that are asked for with a graph of their own, as a penalty on them is: these are no other."""
    leaves = case.leaves()
    outputs = case.forward(leaves, case.labels.clone())
    found = case.torch.autograd.grad(outputs[0], leaves, case.weights, create_graph=True)
    errors, tolerances = case.errors([outputs[0].detach()], dict(zip(GRADIENTS, found, strict=True))), case.tolerances()
    ok = all(error <= tolerances[name] for name, error in errors.items())
    return ok, {"measured": errors, "tolerance": tolerances["loss"], "unit": "relative error"}


def changed_in_place(case):
    """Judge an in-place change between forward and backward: no difference, or the error that PyTorch has for it."""
    errors = {}
    for index, name in enumerate(("hidden", "weight", "bias", "labels")):
        leaves, labels = case.leaves(), case.labels.clone()
        outputs = case.forward(leaves, labels)
        with case.torch.no_grad():
            (*leaves, labels)[index].mul_(0)
        try:
            found = dict(zip(GRADIENTS, case.gradients(outputs[0], leaves), strict=True))
        except RuntimeError as error:
            if IN_PLACE not in str(error):
                raise
            errors[name] = "refused"
        else:
            errors[name] = max(case.errors([outputs[0].detach()], found).values())
    tolerance = case.tolerances()["loss"]
    return all(x == "refused" or x <= tolerance for x in errors.values()), {"measured": errors, "tolerance": tolerance}


def kept_gradients(case):
    """Judge two backwards through one graph, with other weights, whose gradients are both kept to the end."""
    leaves, other = case.leaves(), case.weights.flip(0).contiguous()
    outputs = case.forward(leaves, case.labels.clone())
    first = case.torch.autograd.grad(outputs[0], leaves, case.weights, retain_graph=True)
    second = case.torch.autograd.grad(outputs[0], leaves, other)
    errors = {"first": case.errors([outputs[0].detach()], dict(zip(GRADIENTS, first, strict=False)))}
    case.weights = other
    errors["second"] = case.errors([outputs[0].detach()], dict(zip(GRADIENTS, second, strict=False)))
    errors, tolerances = {name: max(x.values()) for name, x in errors.items()}, case.tolerances()
    tolerance = tolerances["loss"]
    return all(x <= tolerance for x in errors.values()), {"measured": errors, "tolerance": tolerance}


def checkpointed(case):
    """Judge a call within torch.utils.checkpoint, which makes what was saved again, and gives it out once."""
    from torch.utils.checkpoint import checkpoint

    leaves = case.leaves()

    def call(*leaves):
        return case.forward(leaves, case.labels.clone())[0]

    loss = checkpoint(call, *leaves, use_reentrant=False)
    found = dict(zip(GRADIENTS, case.gradients(loss, leaves), strict=False))
    errors, tolerances = case.errors([loss.detach()], found), case.tolerances()
    ok = all(error <= tolerances[name] for name, error in errors.items())
    return ok, {"measured": errors, "tolerance": tolerances["loss"], "unit": "relative error"}


def largest_tensor(case):
    """Judge how many bytes a step holds for backward, and makes at once: never [BT, V] logits, nor half of them."""
    from torch.utils._python_dispatch import TorchDispatchMode

    torch, sizes, saved = case.torch, [0], []

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            found = function(*args, **(kwargs or {}))
            several = found if isinstance(found, tuple | list) else (found,)
            sizes.extend(x.nbytes for x in several if isinstance(x, torch.Tensor))
            return found

    def alive():
        return sum(x.untyped_storage().nbytes() for x in gc.get_objects() if type(x) is torch.Tensor)

    gc.collect()
    leaves, before = case.leaves(), alive()
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x)
    with Sizes(), hooks:
        outputs = case.forward(leaves, case.labels)
        held = sum(saved) + alive() - before
        case.gradients(outputs[0], leaves)
    found, limit = {"held": held, "made": max(sizes)}, len(case.labels) * case.V * case.dtype.itemsize // 2
    return max(found.values()) <= limit, {"measured": found, "tolerance": limit, "unit": "bytes"}


def leading(probe, case, mean, tolerances, *, tell):
    """Judge random weights, and say the figures of the report."""
    masked, noisy = Case(case.api, **case.factors | {"weights": "mask"}), case.eager()
    outputs, found, _ = case.measure()
    figures = {f"{name}_max_abs_error": x for name, x in case.errors(outputs, found, peak=True).items()}
    figures |= {f"{name}_noise": x for name, x in case.errors([noisy[0]], noisy[3], peak=True).items()}
    mean.weights = mean.valid.sum().float().expand(len(mean.labels))
    outputs, found, _ = mean.measure()
    figures |= {f"{name}_workaround": x for name, x in masked.errors(outputs, found).items() if name != "loss"}
    for name, value in figures.items() if tell else ():
        probe.say("FIGURE", name=name, value=value, unit="1", spread=None)
    return close(case, tolerances)


def beyond_half(api):
    """Make a case in fp16 with the weights that a GradScaler begins with: larger than any number that fp16 has.

    The classes weigh so little that no gradient is too large for it.
    """
    case = Case(api, dtype="float16", shape=(24, 2, 60), weights="random", ce_weight="given")
    case.weights, case.class_weights = case.weights * 2**17, case.class_weights / 64
    return case


def weighted_once(case):
    """Judge that no weight is rounded before the product with it, by the mean over the entries of a gradient.

    Each weight is just below 7/16 of a step of bf16 above a number of bf16, and just below half a step of fp16 above
    one of fp16. Rounded to either it errs downwards, and so does every entry; roundings of products err both ways.
    All rows are alike. So each gradient is that of one row of weight 1 times the row's weight, or times the sum of the
    weights; the rounding of logits and their gradient is in both (Triton's interpreter rounds bf16 towards 0). No
    entry is a difference: no class has a negative weight, and the label's row of it, which counts negatively, is 0.
    """
    torch, (hidden, weight, *_) = case.torch, case.tensors
    hidden += hidden.sign() / 4  # no entry is near 0, where fp16 is coarser
    weight.abs_()
    weight[0] = 0
    steps = torch.randint(128, 256, case.weights.shape, generator=torch.Generator().manual_seed(11))
    weights = (steps.to(hidden.device) + 7 / 16 - 2**-10) / 128  # 1 to 2

    def gradients(weights):
        case.tensors[0], case.weights = hidden[:1].repeat(len(weights), 1), weights
        case.labels = torch.zeros_like(weights, dtype=torch.int64)
        return case.measure()[1]

    plain, found, errors = gradients(torch.ones_like(weights[:1])), gradients(weights), {}
    factors = dict.fromkeys(GRADIENTS, weights.double().sum()) | {"grad_input": weights.double()[:, None]}
    for name, x in found.items():
        if x is None or plain[name] is None:
            errors[name] = float("inf")
            continue
        ratios = x.double() / (plain[name].double() * factors[name])
        errors[name] = abs(float(ratios.mean()) - 1)
    # A weight that was rounded to the dtype errs by 0.3 eps in the mean (7/16 * log 2): half of that is too much. A
    # rounding to nearest errs by 0.2 eps (root mean square). Of the bias's entries, the fewest, as many err alike as
    # bf16 has numbers to 1 in 128, and each goes through four roundings at most: 0.2 * 2 / sqrt(128) = 0.04 eps.
    tolerance = 0.15 * torch.finfo(case.dtype).eps
    ok = all(error <= tolerance for error in errors.values())
    return ok, {"measured": errors, "tolerance": tolerance, "unit": "relative error of the mean"}


def judge_form(probe, form, api, *, tell, **factors):
    """Make the leading checks on one shape and dtype; their names begin with its form."""

    def make(**more):
        return Case(api, **factors | more)

    def judge(name, role, function, *given, **named):
        probe.judge(f"{form}.{name}", role, functools.partial(function, **named), *given)

    tolerances, mean = make(weights="random").tolerances(), make(reduction="mean")
    judge("none_losses", "control", losses, make())
    judge("none_mask", "defect", close, make(weights="mask"), tolerances)
    judge("none_random", "defect", leading, probe, make(weights="random"), mean, tolerances, tell=tell)
    frozen = make(weights="random", trained="no weight", bias=False)
    judge("none_frozen_weight", "defect", close, frozen, tolerances)
    judge("none_cancelling", "defect", close, make(weights="cancelling"), tolerances)
    judge("none_ones", "control", close, make(), tolerances)
    judge("mean", "control", repeated, probe, form, make(reduction="mean"), tolerances)
    judge("sum", "control", repeated, probe, form, make(reduction="sum", weights="constant"), tolerances)
    # Twice with another factor than 1 is wrong in the release too: pack 17.
    judge("mean_twice", "control", close, make(reduction="mean", backward="twice"), tolerances)
    judge("sum_twice", "control", close, make(reduction="sum", backward="twice"), tolerances)
    valid = make()
    valid.weights = valid.valid.float()
    judge("workaround", "control", workaround, mean, valid, tolerances)
    judge("workaround_limit", "control", workaround, mean, make(weights="mask"), tolerances, wrong=True)


def complete_interpreter():
    """Give Triton's interpreter what it lacks of a GPU: libdevice's tanh, and floats as arguments that are tensors."""
    import numpy as np
    import triton.language as tl
    from triton.language.extra import libdevice
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt  # noqa: SLF001 - there is no public door

    def scalar(x):
        if not isinstance(x, float):
            return convert(x)
        return tl.tensor(interpreter.TensorHandle(np.array([x], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = scalar  # noqa: SLF001
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1


def load(probe, target, torch):
    """Load the release that is on the path; return its three entries and their options."""
    # The parent package imports the transformers library in older releases: it is found, not executed.
    parent = "liger_kernel.transformers"
    sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    if target == "cpu":
        complete_interpreter()
    from liger_kernel.transformers import functional
    from liger_kernel.transformers import fused_linear_cross_entropy as public

    function = public.LigerFusedLinearCrossEntropyFunction
    names = {public.__name__, functional.__name__, function.__module__}
    names |= {f"liger_kernel.ops.{name}" for name in ("fused_linear_cross_entropy", "cross_entropy", "utils")}
    for name in sorted(names & set(sys.modules)):
        probe.upstream(sys.modules[name])
    parameters = dict(list(inspect.signature(function.forward).parameters.items())[1:])  # without ctx
    return argparse.Namespace(
        torch=torch,
        device="cpu" if target == "cpu" else "cuda",
        module=public.LigerFusedLinearCrossEntropyLoss,
        function=function,
        functional=functional.liger_fused_linear_cross_entropy,
        parameters=parameters,
        normal={},
    )


def judge(probe, target):
    """Judge the release that is on the path."""
    os.environ["TRITON_INTERPRET"] = str(int(target == "cpu"))  # read when triton is imported
    import torch

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if target not in ("cpu", f"sm_{major}{minor}" + "a" * (major >= 9)):
        raise NotImplementedError(f"{target} is neither cpu nor the architecture of a GPU of this host")
    name, evidence = ("cpu", "interpreted") if target == "cpu" else (torch.cuda.get_device_name(), "executed")
    probe.say("TARGET", target=target, evidence=evidence, device=name)
    torch.backends.cuda.matmul.allow_tf32 = False
    api = load(probe, target, torch)
    # V >> H makes several chunks, 13 rows no multiple of a chunk's 2; H and V are no powers of two.
    judge_form(probe, "fp32", api, shape=(13, 5, 45), tell=target == "cpu")
    if target != "cpu":
        judge_form(probe, "bf16", api, dtype="bfloat16", shape=(2 * 512, 1024, 32000), tell=True)
    for number, values in enumerate(CASES):
        case = Case(api, **dict(zip(FACTORS, values, strict=True)))
        probe.judge(f"case{number:02}", case.role, contract, case)
    many = Case(api, dtype="bfloat16", shape=(24, 2, 60), labels="none ignored", accum_dtype="float32")
    probe.judge("none_accum_dtype", "defect", accumulated, many)
    probe.judge("none_beyond_half", "defect", contract, beyond_half(api))
    for dtype in ("bfloat16", "float16", "autocast"):  # with a bias, autocast's logits are fp32
        alike = Case(api, dtype=dtype, shape=(3, 400, 750), bias=dtype != "autocast", labels="none ignored")
        probe.judge(f"none_weighted_once_{dtype}", "defect", weighted_once, alike)
    probe.judge("none_create_graph", "defect", with_graph, Case(api))
    probe.judge("none_in_place", "control", changed_in_place, Case(api))
    probe.judge("none_kept_gradients", "defect", kept_gradients, Case(api, weights="signed"))
    probe.judge("none_checkpoint", "defect", checkpointed, Case(api, weights="signed"))
    probe.judge("none_live_losses", "defect", live_losses, api)
    probe.judge("none_largest_tensor", "control", largest_tensor, Case(api, shape=(48, 2, 48)))


if __name__ == "__main__":
    Probe().run(judge)
