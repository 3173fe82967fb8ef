# /// script
# requires-python = ">=3.10"
# dependencies = [
#   "liger-kernel==0.8.5",
#   "numpy==2.3.5",
#   "packaging==26.3",
#   "torch==2.11.0",
#   "triton==3.6.0",
# ]
# ///
"""Liger-Kernel's fused linear cross entropy gives wrong gradients in a second backward, and none to a head alone.

Symptoms, with reduction="mean" or "sum" and without an error or a warning:
- Go backward twice through one graph (retain_graph) with a gradient g != 1 of the loss, as a scaled loss has: the
  second gradients of input, weight and bias come out g times too large, and the tensors that the first call returned
  change with them. After one backward with 0 (a loss that is masked out), every later gradient is zero.
- Train the weight or the bias on a frozen input (a new head on a frozen model): both get no gradient at all.

Cause: forward makes the gradients in advance and saves them; backward multiplies them in place by g, in a Triton
kernel whose writes autograd cannot see, and returns the saved tensors themselves. And forward makes gradients only
where the input is trained.

Scope: first-order gradients of the fused linear cross entropy on its Triton path, through the module, the functional
form and the autograd function. reduction="none", which computes its gradients anew in backward, is the control of
everything below. What one ordinary backward costs must not grow: see `cost`. The contract of what the patch touches,
for BT tokens, H hidden, V classes (FACTORS has the values, CASES a pairwise covering set; a row that the pinned release
gets wrong is a defect check, every other a control):

    hidden [BT, H], weight [V, H], bias [V] or None    fp32, bf16, fp16, autocast; each trained or frozen; any strides
    labels [BT] int64                                  in 0..V-1, or ignore_index; any stride
    g, a scalar ([BT] with "none")                     also 0 and negative; two of them, with and without retain_graph,
                                                       and in some cases five, of which the last frees the graph
    what backward returns                              is the caller's: it stays, and he may write into it
    ce_weight [V] or None, ignore_index, lse_square_scale, label_smoothing, softcap, accum_dtype, use_token_scaling
    return_z_loss, return_token_accuracy, return_predicted_tokens    what comes beside the loss
    chunk_mem_const                                    how many logits are made at once

Besides: labels that are all ignored, whose gradients are 0; the function with no more arguments than it needs; losses
in inference mode; gradients with a graph of their own; 65541 columns; a Liger RMSNorm before the loss, which writes
into the gradient that it is given; a loss scale of 65536 in fp16; a PyTorch that does not say whether the graph is
retained; second-order gradients, which are right or refused.
Around the loss may stand torch.utils.checkpoint, of either kind, and hooks on what is saved, as
torch.autograd.graph.save_on_cpu has them: a backward asks for each saved tensor once.
`ce_impl`, which chooses another vendor's kernel for the loss, is left at its default.

What is kept for backward, in each reduction, with a trained and with a frozen hidden:

    hidden, weight, bias or labels changed in place    between forward and backward: PyTorch's error, or no difference;
                                                       no difference where hooks have copied what is saved
    ce_weight changed in place                         no difference where forward makes the gradients; not judged where
                                                       backward makes them, since the release keeps it where autograd
                                                       does not look, also with "none", and a fix may do the same
    a graph that is freed                              another backward is PyTorch's error, and the loss alone keeps
                                                       none of hidden, weight, bias, labels and gradients alive

Upstream: no thread on these lines is known; pack.toml has the neighbours. The same bug in another library:
https://github.com/Dao-AILab/quack/pull/209. For a checkout: PYTHONPATH=CHECKOUT/src uv run reproduce.py

Both sentinels without the runner, from a folder that holds the release's own liger_kernel-0.8.5.tar.gz, with PACK
set to the absolute path of this file's folder and with torch, triton, numpy and packaging installed. The second line
ends in BUG_REPRODUCED, the fourth in FIX_VALIDATED (the third keeps git from looking for a repository around it):

    tar xzf liger_kernel-0.8.5.tar.gz
    PYTHONPATH=liger_kernel-0.8.5/src python "$PACK/reproduce.py"
    GIT_CEILING_DIRECTORIES="$PWD" git -C liger_kernel-0.8.5 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=liger_kernel-0.8.5/src python "$PACK/reproduce.py"

On target cpu the probe adds to Triton's interpreter what it lacks: libdevice's tanh and rsqrt, each in a line of
Triton's own operations, and arguments that are floats as the fp32 scalars that they are on a GPU.

Errors are norms of the difference over norms of the float64 reference, which is plain autograd on the same rounded
inputs. The tolerances have these reasons:
- fp32: 8 * eps * sqrt(V). The longest sum has V terms, and rounding errors grow like its root; 8 leaves room for exp,
  log and the product that follows.
- bf16, fp16, autocast: 5 times the noise floor, which is this error of eager PyTorch in the same dtype that
  accumulates gradients over as many chunks as the kernel makes. The kernel rounds no element more than twice as often
  as eager (logits, their gradient, the product; and then g), and no rounding to nearest errs by more than 2.5 times its
  root mean square. Where a case is so small that its noise can be nothing by chance, 4 * eps of the dtype.
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
import itertools
import math
import time

FACTORS = {
    "reduction": ("mean", "sum", "none"),
    "dtype": ("float32", "bfloat16", "float16", "autocast"),  # autocast: hidden in bf16, weight and bias in fp32
    "shape": ((7, 5, 25), (1, 9, 7), (3, 3, 50), (6, 8, 24)),  # BT, H, V: in 4 chunks, the last short; 1; 3; 3
    "scales": ((2.0, 2.0), (1.0, 1.0), (1.0, 0.3), (-0.375, 3.0), (0.0, 1.0)),  # g of the first and second backward
    "trained": ("all", "no weight", "no bias", "no input", "weight", "bias", "hidden", "nothing"),
    "bias": (True, False),
    "backward": ("once", "retained once", "twice", "freed by the second", "each alone", "summed", "written into"),
    "layout": ("plain", "sliced input", "column-major input", "column-major weight", "strided labels"),
    "labels": ("some ignored", "none ignored", "all ignored"),
    "entry": ("module", "function", "functional"),
    "saved": ("plain", "copied", "offloaded"),  # hooks copy what is saved: once, or whenever backward asks for it
    "ce_weight": ("absent", "given", "strided"),
    "ignore_index": (-100, 2),
    "lse_square_scale": (0.0, 0.03),
    "label_smoothing": (0.0, 0.2),
    "softcap": (None, 16.0),
    "accum_dtype": (None, "float32"),
    "use_token_scaling": (False, True),
    "returns": ("loss", "z loss", "accuracy", "tokens", "all"),
    "chunk_mem_const": (1, 3),
}
EXCLUDED = [
    # no mean and no accuracy of no rows
    ("reduction", "mean", "labels", "all ignored"),
    ("labels", "all ignored", "returns", "accuracy"),
    ("labels", "all ignored", "returns", "all"),
    # nothing to go back through, and no bias to train or to freeze
    ("trained", "nothing", "backward", "retained once"),
    ("trained", "nothing", "backward", "twice"),
    ("trained", "nothing", "backward", "freed by the second"),
    ("trained", "nothing", "backward", "each alone"),
    ("trained", "nothing", "backward", "summed"),
    ("trained", "nothing", "backward", "written into"),
    ("trained", "bias", "bias", False),
    ("trained", "no bias", "bias", False),
    # the module has no such argument
    ("entry", "module", "chunk_mem_const", 3),
]
# fmt: off
CASES = [
    ("mean", "float32", (7, 5, 25), (2.0, 2.0), "all", True, "once", "plain", "some ignored", "module", "plain",
     "absent", -100, 0.0, 0.0, None, None, False, "loss", 1),
    ("sum", "bfloat16", (1, 9, 7), (1.0, 1.0), "no weight", False, "retained once", "sliced input", "none ignored",
     "function", "copied", "given", 2, 0.03, 0.2, 16.0, "float32", True, "z loss", 1),
    ("none", "float16", (3, 3, 50), (1.0, 0.3), "no bias", True, "twice", "column-major input", "all ignored",
     "functional", "offloaded", "strided", 2, 0.03, 0.0, 16.0, None, True, "tokens", 3),
    ("none", "autocast", (6, 8, 24), (-0.375, 3.0), "no input", False, "freed by the second", "column-major weight",
     "some ignored", "functional", "copied", "absent", -100, 0.0, 0.2, None, "float32", False, "accuracy", 3),
    ("sum", "autocast", (7, 5, 25), (0.0, 1.0), "weight", True, "each alone", "strided labels", "all ignored",
     "function", "plain", "strided", -100, 0.03, 0.2, None, "float32", True, "tokens", 1),
    ("mean", "float16", (6, 8, 24), (0.0, 1.0), "bias", True, "summed", "sliced input", "none ignored", "module",
     "offloaded", "given", -100, 0.0, 0.0, 16.0, None, False, "all", 1),
    ("mean", "bfloat16", (3, 3, 50), (-0.375, 3.0), "hidden", False, "written into", "strided labels",
     "some ignored", "module", "offloaded", "strided", 2, 0.0, 0.2, None, None, True, "all", 1),
    ("sum", "float32", (3, 3, 50), (1.0, 1.0), "nothing", False, "once", "column-major input", "all ignored",
     "function", "copied", "absent", 2, 0.0, 0.0, 16.0, "float32", False, "loss", 3),
    ("none", "float32", (1, 9, 7), (0.0, 1.0), "hidden", True, "freed by the second", "column-major weight",
     "none ignored", "functional", "plain", "given", 2, 0.03, 0.0, 16.0, None, True, "accuracy", 3),
    ("mean", "autocast", (1, 9, 7), (1.0, 0.3), "nothing", False, "once", "plain", "none ignored", "module",
     "offloaded", "strided", -100, 0.03, 0.2, None, "float32", False, "z loss", 1),
    ("none", "bfloat16", (7, 5, 25), (2.0, 2.0), "bias", True, "written into", "column-major input", "all ignored",
     "functional", "copied", "given", -100, 0.03, 0.2, None, "float32", False, "z loss", 3),
    ("sum", "float16", (6, 8, 24), (2.0, 2.0), "hidden", False, "each alone", "plain", "some ignored", "function",
     "copied", "absent", 2, 0.03, 0.2, 16.0, None, True, "all", 3),
    ("mean", "float16", (7, 5, 25), (1.0, 1.0), "no input", True, "retained once", "column-major weight",
     "none ignored", "module", "offloaded", "strided", 2, 0.0, 0.0, None, None, True, "accuracy", 1),
    ("none", "bfloat16", (6, 8, 24), (1.0, 0.3), "weight", False, "summed", "strided labels", "some ignored",
     "functional", "plain", "absent", 2, 0.0, 0.0, 16.0, None, False, "z loss", 3),
    ("sum", "autocast", (3, 3, 50), (2.0, 2.0), "all", False, "twice", "sliced input", "none ignored", "functional",
     "offloaded", "given", 2, 0.03, 0.2, None, "float32", True, "loss", 3),
    ("none", "float32", (6, 8, 24), (1.0, 1.0), "no weight", True, "twice", "strided labels", "some ignored",
     "module", "copied", "strided", -100, 0.0, 0.2, None, None, False, "tokens", 1),
    ("mean", "float32", (1, 9, 7), (-0.375, 3.0), "no bias", True, "each alone", "sliced input", "none ignored",
     "function", "offloaded", "absent", -100, 0.0, 0.0, None, "float32", False, "tokens", 3),
    ("sum", "bfloat16", (3, 3, 50), (0.0, 1.0), "no input", False, "summed", "plain", "all ignored", "module",
     "plain", "given", -100, 0.03, 0.2, None, "float32", True, "tokens", 1),
    ("none", "float16", (1, 9, 7), (-0.375, 3.0), "all", True, "retained once", "column-major input", "all ignored",
     "function", "plain", "strided", -100, 0.03, 0.2, 16.0, "float32", False, "loss", 3),
    ("sum", "autocast", (7, 5, 25), (1.0, 0.3), "no bias", True, "freed by the second", "column-major weight",
     "all ignored", "function", "copied", "given", -100, 0.03, 0.2, 16.0, None, False, "loss", 1),
    ("mean", "autocast", (1, 9, 7), (1.0, 1.0), "bias", True, "written into", "plain", "some ignored", "functional",
     "plain", "absent", 2, 0.03, 0.0, 16.0, "float32", True, "all", 1),
    ("mean", "bfloat16", (7, 5, 25), (-0.375, 3.0), "nothing", True, "once", "sliced input", "some ignored",
     "functional", "plain", "given", -100, 0.03, 0.2, None, None, True, "accuracy", 1),
    ("mean", "float32", (3, 3, 50), (1.0, 0.3), "no weight", True, "freed by the second", "column-major input",
     "some ignored", "module", "offloaded", "absent", -100, 0.03, 0.0, None, None, True, "all", 1),
    ("none", "float16", (6, 8, 24), (0.0, 1.0), "nothing", True, "once", "strided labels", "all ignored", "module",
     "copied", "absent", -100, 0.03, 0.2, None, None, True, "loss", 1),
    ("mean", "float32", (3, 3, 50), (2.0, 2.0), "weight", True, "retained once", "column-major weight",
     "some ignored", "module", "copied", "absent", -100, 0.03, 0.2, None, None, True, "tokens", 1),
    ("none", "bfloat16", (7, 5, 25), (0.0, 1.0), "no bias", True, "twice", "plain", "some ignored", "module",
     "plain", "absent", -100, 0.03, 0.2, None, None, True, "all", 1),
    ("sum", "bfloat16", (1, 9, 7), (2.0, 2.0), "no input", True, "each alone", "strided labels", "none ignored",
     "module", "plain", "given", -100, 0.03, 0.2, 16.0, None, True, "accuracy", 1),
    ("sum", "float32", (6, 8, 24), (-0.375, 3.0), "bias", True, "written into", "column-major weight",
     "none ignored", "function", "plain", "strided", -100, 0.03, 0.2, None, None, True, "accuracy", 1),
    ("mean", "float16", (6, 8, 24), (1.0, 0.3), "all", True, "written into", "sliced input", "some ignored",
     "module", "copied", "strided", -100, 0.03, 0.2, None, None, True, "tokens", 1),
    ("mean", "autocast", (7, 5, 25), (1.0, 1.0), "hidden", False, "summed", "column-major input", "none ignored",
     "function", "copied", "strided", -100, 0.03, 0.2, None, "float32", False, "loss", 1),
    ("mean", "bfloat16", (3, 3, 50), (1.0, 0.3), "bias", True, "each alone", "column-major weight", "some ignored",
     "functional", "copied", "absent", -100, 0.03, 0.2, None, None, True, "loss", 1),
    ("mean", "float16", (6, 8, 24), (-0.375, 3.0), "weight", True, "twice", "column-major input", "none ignored",
     "function", "offloaded", "given", -100, 0.03, 0.2, None, None, True, "accuracy", 1),
    ("none", "float16", (1, 9, 7), (2.0, 2.0), "no weight", True, "summed", "column-major weight", "all ignored",
     "functional", "plain", "strided", -100, 0.03, 0.2, None, None, True, "z loss", 3),
    ("none", "float32", (6, 8, 24), (0.0, 1.0), "no input", True, "retained once", "sliced input", "all ignored",
     "functional", "plain", "absent", -100, 0.03, 0.2, None, None, True, "z loss", 1),
    ("mean", "bfloat16", (1, 9, 7), (1.0, 1.0), "all", True, "freed by the second", "strided labels", "some ignored",
     "module", "plain", "strided", -100, 0.03, 0.2, None, None, True, "z loss", 1),
    ("mean", "autocast", (1, 9, 7), (0.0, 1.0), "no weight", True, "written into", "plain", "some ignored", "module",
     "plain", "absent", -100, 0.03, 0.2, None, None, True, "loss", 1),
    ("mean", "float32", (1, 9, 7), (-0.375, 3.0), "weight", True, "summed", "plain", "some ignored", "module",
     "plain", "absent", -100, 0.03, 0.2, None, None, True, "accuracy", 1),
    ("mean", "float16", (3, 3, 50), (1.0, 0.3), "no input", True, "freed by the second", "plain", "some ignored",
     "function", "plain", "absent", -100, 0.03, 0.2, None, None, True, "accuracy", 1),
    ("mean", "autocast", (1, 9, 7), (1.0, 1.0), "no bias", True, "retained once", "strided labels", "some ignored",
     "module", "plain", "absent", -100, 0.03, 0.2, None, None, True, "accuracy", 1),
    ("mean", "float16", (1, 9, 7), (2.0, 2.0), "nothing", True, "once", "column-major weight", "some ignored",
     "module", "plain", "absent", -100, 0.03, 0.2, None, None, True, "all", 1),
    ("mean", "float16", (1, 9, 7), (2.0, 2.0), "no bias", True, "freed by the second", "sliced input",
     "some ignored", "module", "plain", "absent", -100, 0.03, 0.2, None, None, True, "tokens", 1),
    ("mean", "float16", (1, 9, 7), (1.0, 1.0), "weight", True, "twice", "column-major weight", "some ignored",
     "module", "plain", "absent", -100, 0.03, 0.2, None, None, True, "loss", 1),
    ("mean", "float16", (6, 8, 24), (1.0, 0.3), "hidden", True, "retained once", "plain", "some ignored", "module",
     "plain", "absent", -100, 0.03, 0.2, None, None, True, "tokens", 1),
    ("mean", "float16", (6, 8, 24), (-0.375, 3.0), "no bias", True, "once", "plain", "some ignored", "module",
     "plain", "absent", -100, 0.03, 0.2, None, None, True, "z loss", 1),
    ("mean", "float16", (3, 3, 50), (0.0, 1.0), "all", True, "each alone", "column-major input", "some ignored",
     "module", "plain", "absent", -100, 0.03, 0.2, None, None, True, "z loss", 1),
    ("mean", "float16", (7, 5, 25), (-0.375, 3.0), "no weight", True, "once", "plain", "some ignored", "module",
     "plain", "absent", -100, 0.03, 0.2, None, None, True, "accuracy", 1),
    ("mean", "float16", (1, 9, 7), (1.0, 1.0), "nothing", True, "once", "plain", "some ignored", "module", "plain",
     "absent", -100, 0.03, 0.2, None, None, True, "tokens", 1),
    ("mean", "float16", (1, 9, 7), (1.0, 1.0), "bias", True, "retained once", "strided labels", "some ignored",
     "module", "plain", "absent", -100, 0.03, 0.2, None, None, True, "tokens", 1),
    ("none", "bfloat16", (3, 3, 50), (1.0, 0.3), "hidden", True, "twice", "sliced input", "all ignored",
     "functional", "plain", "absent", -100, 0.03, 0.0, 16.0, "float32", False, "z loss", 3),
    ("none", "float16", (7, 5, 25), (1.0, 1.0), "no input", True, "each alone", "column-major input", "some ignored",
     "functional", "offloaded", "strided", 2, 0.03, 0.2, 16.0, None, False, "all", 1),
    ("sum", "float16", (7, 5, 25), (2.0, 2.0), "weight", True, "freed by the second", "sliced input", "none ignored",
     "functional", "copied", "given", -100, 0.0, 0.2, 16.0, None, False, "all", 1),
    ("sum", "float32", (1, 9, 7), (2.0, 2.0), "all", True, "summed", "column-major weight", "none ignored", "module",
     "offloaded", "given", 2, 0.0, 0.0, None, "float32", True, "accuracy", 1),
    ("mean", "bfloat16", (6, 8, 24), (2.0, 2.0), "no input", False, "twice", "column-major input", "none ignored",
     "functional", "plain", "given", 2, 0.0, 0.0, 16.0, None, True, "loss", 3),
    ("mean", "bfloat16", (3, 3, 50), (2.0, 2.0), "all", False, "retained once", "strided labels", "some ignored",
     "functional", "offloaded", "absent", 2, 0.0, 0.2, 16.0, "float32", True, "all", 1),
    ("none", "float16", (7, 5, 25), (0.0, 1.0), "no input", True, "once", "column-major weight", "some ignored",
     "functional", "offloaded", "strided", 2, 0.0, 0.2, 16.0, None, False, "all", 1),
    ("sum", "autocast", (3, 3, 50), (-0.375, 3.0), "weight", False, "once", "column-major input", "none ignored",
     "module", "copied", "absent", 2, 0.0, 0.0, 16.0, "float32", False, "accuracy", 1),
    ("none", "float16", (1, 9, 7), (0.0, 1.0), "weight", True, "written into", "column-major input", "none ignored",
     "function", "copied", "absent", 2, 0.03, 0.0, 16.0, None, False, "all", 3),
    ("sum", "float16", (1, 9, 7), (1.0, 1.0), "no input", True, "written into", "plain", "all ignored", "module",
     "copied", "strided", -100, 0.0, 0.0, 16.0, None, True, "tokens", 1),
    ("sum", "autocast", (7, 5, 25), (1.0, 1.0), "bias", True, "freed by the second", "column-major input",
     "none ignored", "functional", "copied", "absent", 2, 0.03, 0.0, None, "float32", True, "tokens", 3),
    ("none", "float32", (6, 8, 24), (2.0, 2.0), "hidden", False, "once", "strided labels", "some ignored",
     "function", "plain", "given", 2, 0.03, 0.2, None, None, False, "tokens", 3),
    ("none", "autocast", (7, 5, 25), (-0.375, 3.0), "no bias", True, "summed", "column-major weight", "all ignored",
     "function", "offloaded", "absent", -100, 0.0, 0.2, 16.0, None, False, "tokens", 3),
    ("mean", "autocast", (1, 9, 7), (-0.375, 3.0), "no weight", True, "each alone", "plain", "some ignored",
     "function", "offloaded", "absent", -100, 0.0, 0.0, None, None, True, "tokens", 1),
    ("none", "float32", (3, 3, 50), (1.0, 1.0), "no bias", True, "written into", "sliced input", "some ignored",
     "functional", "copied", "strided", 2, 0.0, 0.0, 16.0, "float32", False, "z loss", 3),
    ("mean", "float16", (1, 9, 7), (1.0, 0.3), "bias", True, "once", "sliced input", "none ignored", "function",
     "plain", "absent", -100, 0.03, 0.0, None, "float32", False, "loss", 3),
    ("sum", "float32", (3, 3, 50), (0.0, 1.0), "bias", True, "twice", "sliced input", "none ignored", "module",
     "offloaded", "absent", 2, 0.0, 0.0, None, "float32", True, "accuracy", 1),
]
# fmt: on
OFTEN = {"backward": "often", "scales": (1.5, -0.7, -0.7, 2.5, 0.3)}  # no 0 and no 1; the same again, then another
OFTEN_CASES = [  # what a fix may treat apart; judge_form has the mean in fp32
    ("sum", "bfloat16", "no weight"),
    ("mean", "float16", "no input"),
    ("none", "float16", "no bias"),
]
DEFAULTS = {name: values[0] for name, values in FACTORS.items()}
OPTIONS = ("ignore_index", "lse_square_scale", "label_smoothing", "softcap", "use_token_scaling", "chunk_mem_const")
RETURNS = {"return_z_loss": "z loss", "return_token_accuracy": "accuracy", "return_predicted_tokens": "tokens"}
GRADIENTS = ("grad_input", "grad_weight", "grad_bias")
IN_PLACE = "modified by an inplace operation"  # what PyTorch says of a saved tensor that was changed
FREED = "backward through the graph a second time"  # of saved tensors that are freed
CHANGED = ("hidden", "weight", "bias", "labels")
KEPT = [(reduction, trained) for reduction in ("mean", "sum", "none") for trained in ("all", "no input")]
AROUND = ("on the CPU", "checkpointed", "reentrant")  # what stands around a loss
WIDE = 65541  # more columns than a block of any kernel here holds
SECOND_ORDER = ("does not require grad", "once_differentiable")


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
        rows = torch.rand(BT, generator=random).to(device) + 0.25  # what weighs the rows with "none"
        self.weights = rows if self["reduction"] == "none" else torch.ones(1, device=device).expand(BT)
        self.class_weights = (torch.rand(self.V, generator=random) + 0.5).to(device)
        step = 2 if self["ce_weight"] == "strided" else 1
        self.ce_weight = self.class_weights.repeat_interleave(step)[::step]  # what the code under test is given
        # A chunk of rows holds about chunk_mem_const x BT x H logits, the rows rounded up to a power of two.
        chunks = -(-self.V // (self["chunk_mem_const"] * H))
        self.rows = 1 << (-(-BT // chunks) - 1).bit_length()

    def __getitem__(self, name):
        """Return the value of a factor."""
        return self.factors[name]

    @property
    def trained(self):
        """Whether hidden, weight and bias are trained."""
        frozen = {
            "no weight": (1,),
            "no bias": (2,),
            "no input": (0,),
            "weight": (0, 2),
            "bias": (0, 1),
            "hidden": (1, 2),
            "nothing": (0, 1, 2),
        }.get(self["trained"], ())
        return [index not in frozen for index in range(len(self.tensors))]

    @property
    def role(self):
        """A defect check where the pinned release is wrong, else a control."""
        if self["reduction"] == "none" or not any(self.trained):
            return "control"
        if not self.trained[0]:
            return "defect"  # weight and bias get no gradient
        if self["labels"] == "all ignored" or self["saved"] == "offloaded":
            return "control"  # all gradients are 0, or every backward starts from what was saved
        first, second, *_ = self["scales"]
        found, wanted = {  # the factors of what the release returns in the end, and those that it should
            "twice": ((first * second, first * second), (first, second)),
            "freed by the second": ((first * second, first * second), (first, second)),
            "often": (math.prod(self["scales"]), self["scales"]),
            "each alone": (first ** sum(self.trained), first),
            "summed": (first + first * second, first + second),
            "written into": (0, second),
        }.get(self["backward"], (first, first))
        return "control" if found == wanted else "defect"

    @property
    def options(self):
        """The options that are not at their default, by their public names."""
        found = {name: self[name] for name in OPTIONS if self[name] != DEFAULTS[name]}
        found |= {name: True for name, value in RETURNS.items() if self["returns"] in (value, "all")}
        if self["accum_dtype"]:
            found["accum_dtype"] = getattr(self.torch, self["accum_dtype"])
        if self["ce_weight"] != "absent":
            found["ce_weight"] = self.ce_weight
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
        if self["returns"] == "loss" or isinstance(found, tuple):  # older releases return the loss and the z loss
            return [*found] if isinstance(found, tuple) else [found]
        return [getattr(found, name, None) for name in names]

    def forward(self, leaves, labels):
        """Call the code under test, under autocast and with hooks on what it saves where this case has them."""
        offloaded = self["saved"] == "offloaded"
        unpack = (lambda x: x.clone()) if offloaded else (lambda x: x)
        hooks = self.torch.autograd.graph.saved_tensors_hooks(lambda x: x.detach().clone(), unpack)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.torch.autocast(self.api.device, self.torch.bfloat16, enabled=self.autocast))
            if self["saved"] != "plain":
                stack.enter_context(hooks)
            return self.call(leaves, labels)

    def backward(self, loss, leaves, scale, *, retain):
        """Go backward with one factor; return the gradients of these leaves, None where there is none."""
        scale = self.torch.full((), scale, device=self.api.device)
        gradient = self.weights * scale if self["reduction"] == "none" else scale
        return self.torch.autograd.grad(loss, leaves, gradient, retain_graph=retain, allow_unused=True)

    def gradients(self, loss, leaves):
        """Go backward as this case says; return pairs of a factor and the trained leaves' gradients."""
        leaves = [x for x in leaves if x.requires_grad]
        if not loss.requires_grad:
            return [(1.0, leaves)] if leaves else []
        how, scales = self["backward"], self["scales"]
        if how == "often":
            retained = [(scale, self.backward(loss, leaves, scale, retain=True)) for scale in scales[:-1]]
            return [*retained, (scales[-1], self.backward(loss, leaves, scales[-1], retain=False))]
        first, second = scales
        if how == "each alone":
            return [(first, [self.backward(loss, [x], first, retain=True)[0] for x in leaves])]
        if how == "summed":
            for scale, retain in ((first, True), (second, False)):
                factor = self.weights * scale if self["reduction"] == "none" else loss.new_full((), scale)
                loss.backward(factor, retain_graph=retain)
            return [(first + second, [x.grad for x in leaves])]
        found = self.backward(loss, leaves, first, retain=how != "once")
        if how in ("once", "retained once"):
            return [(first, found)]
        if how == "written into":
            for x in found:
                if x is not None:
                    x.zero_()
        again = self.backward(loss, leaves, second, retain=how == "twice")
        return [(second, again)] if how == "written into" else [(first, found), (second, again)]

    def gave_loss(self, outputs):
        """Whether there is a loss to go back through; older releases have none for some reductions."""
        return outputs[0] is not None and outputs[0].shape == (self.labels.shape if self["reduction"] == "none" else ())

    def measure(self):
        """Return what the code under test gives: outputs, pairs of factor and gradients, elements it changed."""
        leaves, labels = self.leaves(), self.labels.clone()
        if self["layout"] == "strided labels":
            labels = self.torch.stack((labels, labels), -1)[:, 0]
        outputs = self.forward(leaves, labels)
        if not self.gave_loss(outputs):
            return [None], [], 0  # there is nothing to go back through; errors says that the loss is wrong
        names = [name for name, x in zip(GRADIENTS, leaves, strict=False) if x.requires_grad]
        found = [(scale, dict(zip(names, x, strict=True))) for scale, x in self.gradients(outputs[0], leaves)]
        pairs = zip((*leaves, labels), (*self.tensors, self.labels), strict=True)
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

    @functools.cached_property
    def reference(self):
        """The losses, z losses, logits and gradients in float64."""
        return self.eager(self.torch.float64)

    def errors(self, outputs, found):
        """Return the errors of the losses and, of all backwards the largest, of the gradients."""
        loss, z_loss, _, gradients = self.reference
        reduced = self["reduction"] != "none"
        errors = {"loss": self.error(outputs[0], loss.sum() if reduced else loss)}
        if self.options.get("return_z_loss") and len(outputs) > 1:
            errors["z_loss"] = self.error(outputs[1], z_loss.sum() if reduced else z_loss)
        for scale, each in found:
            for name, x in each.items():
                errors[name] = max(errors.get(name, 0.0), self.error(x, gradients[name] * scale))
        return errors

    def error(self, x, want):
        """Return one error; infinite where there is no tensor, or one of another shape."""
        if x is None or x.shape != want.shape:
            return float("inf")
        error = x.double() - want
        norm = want.norm()  # zero where every row is ignored or weighted by 0: then so is the gradient, exactly
        found = float(error.norm() / norm.where(norm > 0, 1))
        return found if found == found else float("inf")  # noqa: PLR0124 - only NaN is not itself

    def tolerances(self, floor=0):
        """Return the tolerance of each error; the floor counts in eps of the dtype."""
        torch, names = self.torch, ("loss", "z_loss", *GRADIENTS)
        eps = torch.finfo(self.dtype).eps
        if self.dtype == torch.float32:
            return dict.fromkeys(names, 8 * eps * self.V**0.5)
        loss, _, _, found = self.eager()
        loss = loss if self["reduction"] == "none" else loss.sum()
        noise = {"z_loss": 0.0} | self.errors([loss], [(1.0, found)])
        return {name: max(5 * noise.get(name, 0.0), floor * eps) for name in names}

    def beside(self, outputs):
        """Count what is wrong in the token accuracy and the predicted tokens; a near tie may go either way."""
        *_, logits, _ = self.reference
        torch, wrong = self.torch, 0
        if outputs[0] is None:
            return 1
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


def repeated(probe, form, case, tolerances):
    """Judge one backward; its bits must be those of the other lane, where they are the same twice in this one."""
    (outputs, found, _), (again, found_again, _) = case.measure(), case.measure()
    pairs = {"loss": (outputs[0], again[0])}
    for (_, gradients), (_, others) in zip(found, found_again, strict=True):
        pairs |= {name: (x, others[name]) for name, x in gradients.items()}
    for name, (x, y) in pairs.items():
        if x is None or y is None:
            continue  # close says so
        probe.output(f"{form}.{case['reduction']}.{name}", x, must_match=case.torch.equal(x, y))
    return close(case, tolerances)


def leading(probe, case, tolerances, *, tell):
    """Judge two backwards with 2, and say how many times too large the second is: the figures of the report."""
    leaves = case.leaves()
    loss = case.forward(leaves, case.labels)[0]
    case.backward(loss, leaves, 2.0, retain=True)
    for name, x in zip(GRADIENTS, case.backward(loss, leaves, 2.0, retain=True), strict=True):
        if tell and x is not None:
            value = float(x.double().norm() / (2 * case.reference[3][name]).norm())
            probe.say("FIGURE", name=f"{name}_second_over_expected", value=value, unit="1", spread=None)
    return close(case, tolerances)


def older_torch(case, tolerances):
    """Judge two backwards in a PyTorch that does not say whether the graph is retained."""
    private = case.torch._C._autograd  # noqa: SLF001 - where newer ones have the function
    name = "_get_current_graph_task_keep_graph"
    kept = getattr(private, name, None)
    if kept is None:
        return close(case, tolerances)
    delattr(private, name)
    try:
        return close(case, tolerances)
    finally:
        setattr(private, name, kept)


def after_norm(case):
    """Judge two backwards with 1 through the loss and Liger's RMSNorm, which writes into its incoming gradient."""
    torch, (hidden, weight, _) = case.torch, case.leaves()
    scale = torch.linspace(0.5, 1.5, hidden.shape[1], device=hidden.device).requires_grad_()
    loss = case.forward([case.api.norm(hidden, scale, 1e-6), weight], case.labels)[0]
    found = [case.backward(loss, (hidden, scale, weight), 1.0, retain=True) for _ in range(2)]
    leaves = [x.detach().double().requires_grad_() for x in (hidden, scale, weight)]
    normal = leaves[0] * (leaves[0].square().mean(-1, keepdim=True) + 1e-6).rsqrt() * leaves[1]
    want = torch.nn.functional.cross_entropy(normal @ leaves[2].t(), case.labels, ignore_index=case["ignore_index"])
    wants = torch.autograd.grad(want, leaves)
    names = ("input", "norm_weight", "weight")
    pairs = [(name, x, y) for each in found for name, x, y in zip(names, each, wants, strict=True)]
    errors = {name: max(case.error(x, y) for other, x, y in pairs if other == name) for name in names}
    tolerance = 2 * case.tolerances()["loss"]  # two layers
    ok = max(errors.values()) <= tolerance
    return ok, {"measured": errors, "tolerance": tolerance, "unit": "relative error"}


def second_order(case):
    """Judge the gradient of a squared gradient: right, or refused as PyTorch refuses it."""
    torch, leaves = case.torch, case.leaves()
    factor = torch.full((), 0.75, device=case.api.device).requires_grad_()
    loss = case.forward(leaves, case.labels)[0] * factor
    try:
        (gradient,) = torch.autograd.grad(loss, leaves[0], create_graph=True)
        gradient.square().sum().backward()  # leaves out in silence what grad would refuse
    except RuntimeError as error:
        if not any(text in str(error) for text in SECOND_ORDER):
            raise
        return True, {"measured": "refused"}
    wide = [x.detach().double().requires_grad_() for x in (*leaves, factor)]
    logits = torch.nn.functional.linear(*wide[:3])
    loss = torch.nn.functional.cross_entropy(logits, case.labels, ignore_index=case["ignore_index"]) * wide[3]
    (gradient,) = torch.autograd.grad(loss, wide[0], create_graph=True)
    wants = torch.autograd.grad(gradient.square().sum(), (wide[0], wide[3]))
    errors = [case.error(x.grad, y) for x, y in zip((leaves[0], factor), wants, strict=True)]
    tolerance = case.tolerances()["loss"]
    return max(errors) <= tolerance, {"measured": errors, "tolerance": tolerance, "unit": "relative error"}


def squared(case, trained):
    """Return the gradients of the sum of the squares of the trained leaves' gradients, in float64."""
    torch = case.torch
    leaves = [x.double().requires_grad_(on) for x, on in zip(case.tensors, case.trained, strict=True)]
    loss, _ = case.formula(torch.nn.functional.linear(*leaves), case.labels)
    found = torch.autograd.grad((loss * case.weights).sum(), trained(leaves), create_graph=True)
    return torch.autograd.grad(sum(x.square().sum() for x in found), trained(leaves))


def with_graph(make):
    """Judge gradients that are asked for with a graph of their own: they are right, and it is right or refused."""
    measured, tolerance = {}, 2 * make().tolerances()["loss"]  # the rounding of two gradients

    def trained(leaves):
        return [x for x in leaves if x.requires_grad]

    for (reduction, kind), bias in itertools.product(KEPT, (True, False)):
        case = make(reduction=reduction, trained=kind, bias=bias)
        leaves = case.leaves()
        loss = case.forward(leaves, case.labels)[0]
        names = [name for name, x in zip(GRADIENTS, leaves, strict=False) if x.requires_grad]
        above = case.weights if reduction == "none" else None
        found = case.torch.autograd.grad(loss, trained(leaves), above, create_graph=True, allow_unused=True)
        errors = case.errors([loss.detach()], [(1.0, dict(zip(names, found, strict=True)))])
        try:
            squares = [x.square().sum() for x in found if x is not None]
            again = case.torch.autograd.grad(sum(squares, case.torch.zeros(())), trained(leaves))
        except RuntimeError as error:
            if not any(text in str(error) for text in SECOND_ORDER):
                raise
        else:
            errors["second order"] = max(map(case.error, again, squared(case, trained)))
        measured[f"{reduction}, {kind}{', bias' * bias}"] = max(errors.values())
    return max(measured.values()) <= tolerance, {"measured": measured, "tolerance": tolerance, "unit": "relative error"}


def no_labels(make):
    """Judge a batch whose labels are all ignored: each gradient is 0, of a frozen hidden, too."""
    measured = {}
    for reduction, kind in KEPT:
        case = make(reduction=reduction, trained=kind, labels="all ignored")
        leaves = case.leaves()
        loss = case.forward(leaves, case.labels)[0]
        found = case.backward(loss, [x for x in leaves if x.requires_grad], 2.0, retain=True)
        nonzero = [math.inf if x is None else int((x != 0).sum()) for x in found]
        measured[f"{reduction}, {kind}"] = max(nonzero)
    return not any(measured.values()), {"measured": measured, "tolerance": 0, "unit": "elements that are not 0"}


def by_position(make):
    """Judge the autograd function with the arguments that it needs, alone: hidden, weight, labels, and a bias."""
    measured, tolerance = {}, make().tolerances()["loss"]
    for reduction, kind, bias in (("mean", "all", False), ("mean", "no input", False), ("mean", "no input", True)):
        case = make(reduction=reduction, trained=kind, bias=bias)
        leaves = case.leaves()
        hidden, weight, *rest = leaves
        loss = case.api.function.apply(hidden, weight, case.labels, *rest)[0]
        names = [name for name, x in zip(GRADIENTS, leaves, strict=False) if x.requires_grad]
        found = case.backward(loss, [x for x in leaves if x.requires_grad], 2.0, retain=False)
        errors = case.errors([loss.detach()], [(2.0, dict(zip(names, found, strict=True)))])
        measured[f"{kind}{', bias' * bias}"] = max(errors.values())
    return max(measured.values()) <= tolerance, {"measured": measured, "tolerance": tolerance, "unit": "relative error"}


def evaluated(make):
    """Judge the loss in inference mode, whose tensors have no versions, and without gradients."""
    torch, measured, tolerance = make().torch, {}, make().tolerances()["loss"]
    for (reduction, kind), mode in itertools.product(KEPT, (torch.inference_mode, torch.no_grad)):
        case = make(reduction=reduction, trained=kind)
        for made in ("outside", "inside"):
            (hidden, *head), labels = case.leaves(), case.labels
            with mode():
                if made == "inside":  # as a model makes hidden there; its head is from before
                    hidden, labels = hidden.clone(), labels.clone()
                loss = case.forward([hidden, *head], labels)[0]
            measured[f"{reduction}, {kind}, {mode.__name__}, made {made}"] = max(case.errors([loss], []).values())
    return max(measured.values()) <= tolerance, {"measured": measured, "tolerance": tolerance, "unit": "relative error"}


def changed(case, names):
    """Change tensors in place after forward; count the refused ones of two backwards, and take the others' error."""
    leaves, labels = case.leaves(), case.labels.clone()
    outputs = case.forward(leaves, labels)
    if not case.gave_loss(outputs):
        return {"error": float("inf"), "refused": 0}
    loss = outputs[0]
    tensors = dict(zip((*CHANGED, "ce_weight"), (*leaves, labels, case.ce_weight), strict=True))
    with case.torch.no_grad():
        for name in names:
            tensors[name].mul_(0)
    gradients = [each for each, x in zip(GRADIENTS, leaves, strict=True) if x.requires_grad]
    found, refused, trained = [], 0, [x for x in leaves if x.requires_grad]
    for scale, retain in zip(case["scales"], (True, False), strict=True):
        try:
            found.append((scale, dict(zip(gradients, case.backward(loss, trained, scale, retain=retain), strict=True))))
        except RuntimeError as error:
            if IN_PLACE not in str(error):
                raise
            refused += 1
    return {"error": max(case.errors([loss.detach()], found).values()), "refused": refused}


def changed_in_place(make, wanted):
    """Judge an in-place change between forward and backward: no difference, or the error that PyTorch has for it."""
    measured, tolerance, ok = {}, make().tolerances()["loss"], True
    for reduction, trained in wanted:
        each = functools.partial(make, reduction=reduction, trained=trained)
        runs = [(each(), [name]) for name in CHANGED]
        if reduction == "none" or trained == "no input":  # backward makes the gradients
            runs.append((each(saved="copied"), CHANGED))
        elif "ce_weight" in each().api.parameters:  # older releases have no such argument
            runs.append((each(ce_weight="given"), ["ce_weight"]))
        for case, names in runs:
            found = changed(case, names)
            measured[f"{reduction}, {trained}, {case['saved']}, {' '.join(names)}"] = found
            ok &= found["error"] <= tolerance and (case["saved"] == "plain" or not found["refused"])
    return ok, {"measured": measured, "tolerance": tolerance, "unit": "relative error, refused backwards"}


def around(case, how):
    """Go backward twice through a loss with something around it; return its errors, and how often hooks are asked."""
    from torch.utils.checkpoint import checkpoint

    torch, leaves, asked = case.torch, case.leaves(), []
    on_cpu = torch.autograd.graph.save_on_cpu()

    def pack(x):
        asked.append(0)
        return len(asked) - 1, on_cpu.pack_hook(x)

    def unpack(packed):
        asked[packed[0]] += 1
        return on_cpu.unpack_hook(packed[1])

    def call(*leaves):
        return case.forward(leaves, case.labels)[0]

    if how == "on the CPU":
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            loss = call(*leaves)
    else:
        loss = checkpoint(call, *leaves, use_reentrant=how == "reentrant")
    names = [name for name, x in zip(GRADIENTS, leaves, strict=False) if x.requires_grad]
    trained, found, too_often = [x for x in leaves if x.requires_grad], [], 0
    for number, scale in enumerate(case["scales"], 1):
        for x in trained:
            x.grad = None
        above = case.weights * scale if case["reduction"] == "none" else loss.new_full((), scale)
        loss.backward(above, retain_graph=number < len(case["scales"]))  # a reentrant checkpoint refuses autograd.grad
        found.append((scale, dict(zip(names, [x.grad for x in trained], strict=True))))
        too_often = max(too_often, *(count - number for count in asked), 0)
    return max(case.errors([loss.detach()], found).values()), too_often


def hooked(make, wanted):
    """Judge losses with something around them, whose gradients are those that they have without."""
    measured, tolerance = {}, make().tolerances()["loss"]
    for (reduction, trained), how in itertools.product(wanted, AROUND):
        case = make(reduction=reduction, trained=trained)
        error, too_often = around(case, how)
        measured[f"{reduction}, {trained}, {how}"] = {"error": error, "too_often": too_often}
    ok = all(x["error"] <= tolerance and not x["too_often"] for x in measured.values())
    return ok, {"measured": measured, "tolerance": tolerance, "unit": "relative error, times too often"}


def freed(make):
    """Judge graphs that are freed: another backward is refused, and their losses keep no tensor alive."""
    from torch.multiprocessing.reductions import StorageWeakRef

    losses, kept, refused = [], {}, {}
    for reduction, trained in KEPT:
        case, name = make(reduction=reduction, trained=trained), f"{reduction}, {trained}"
        labels, given = case.labels.clone(), [x.clone() for x in case.leaves()]  # a graph keeps its leaves, not these
        outputs = case.forward(given, labels)
        if not case.gave_loss(outputs):
            return False, {"reason": f"{name}: there is no loss"}
        loss = outputs[0]
        edges = [case.torch.autograd.graph.get_gradient_edge(x) for x in given if x.requires_grad]
        found = [x for x in case.backward(loss, edges, 2.0, retain=False) if x is not None]
        kept[name] = [StorageWeakRef(x.untyped_storage()) for x in (*given, labels, *found)]
        losses.append(loss)
        try:
            case.backward(loss, edges, 2.0, retain=False)
            refused[name] = False
        except RuntimeError as error:
            if FREED not in str(error):
                raise
            refused[name] = True
    del labels, given, outputs, found
    gc.collect()  # Triton's interpreter keeps the arguments of a launch in a cycle of references
    until = time.monotonic() + 10  # on a GPU the thread that ran the backward may be some time behind this one
    while any(not x.expired() for each in kept.values() for x in each) and time.monotonic() < until:
        time.sleep(0.01)
    alive = {name: sum(not x.expired() for x in each) for name, each in kept.items()}
    ok = all(refused.values()) and not any(alive.values())
    return ok, {"measured": {"refused": refused, "alive": alive}, "unit": "tensors"}


def interpreting():
    """Whether Triton's interpreter is the caller: it copies every tensor to the host and back, which no GPU does."""
    frame, found = sys._getframe(), False  # noqa: SLF001 - the documented way to a caller
    while frame and not found:
        found, frame = f"triton{os.sep}runtime" in frame.f_code.co_filename, frame.f_back
    return found


class Made(contextlib.ExitStack):
    """Counts, while it is entered, the bytes of new tensors that operators return, and the largest of them."""

    def __init__(self, torch):
        from torch.utils._python_dispatch import TorchDispatchMode

        super().__init__()
        self.total, self.largest, made = 0, 0, self

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, function, types, args=(), kwargs=None):
                given = [*args, *(kwargs or {}).values()]
                old = {x.untyped_storage().data_ptr() for x in given if isinstance(x, torch.Tensor)}
                found = function(*args, **(kwargs or {}))
                for x in found if isinstance(found, tuple | list) else (found,):
                    if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in old and not interpreting():
                        made.total, made.largest = made.total + x.nbytes, max(made.largest, x.nbytes)
                return found

        self.enter_context(Mode())


def products(case, *, evaluate=False):
    """Count the products of hidden and weight of one step, and the bytes of new tensors in its backward."""
    from torch.utils.flop_counter import FlopCounterMode

    (BT, H), leaves = case.tensors[0].shape, case.leaves()
    with FlopCounterMode(display=False) as counter, case.torch.set_grad_enabled(not evaluate), Made(case.torch) as made:
        loss = case.forward(leaves, case.labels)[0]
        forward = made.total
        if loss.requires_grad:
            loss.backward(loss.new_full((), case["scales"][0]))
    found = {"products": counter.get_total_flops() / (2 * BT * H * case.V)}
    return found | {"largest": made.largest, "forward": forward, "backward": made.total - forward}


def cost(make):
    """Judge what one step costs without a retained graph: no copy of a saved gradient, and no product more."""
    weight = make().tensors[1].nbytes
    found, limits = {}, {}
    for scale in (1.0, 2.0):
        for trained, count in (("all", 3), ("no weight", 2)):
            name = f"{trained}, {scale}"
            found[name] = products(make(trained=trained, scales=(scale, scale)))
            limits[name] = {"products": count, "backward": weight // 2}
    found["frozen input"] = products(make(trained="no input"))
    limits["frozen input"] = {"products": 4}  # those of reduction="none"
    found["nothing"], limits["nothing"] = products(make(trained="nothing")), {"products": 1, "largest": weight - 1}
    frozen = products(make(trained="no input"), evaluate=True)  # a model that is evaluated: its weight is a parameter
    found["evaluation"], limits["evaluation"] = frozen, {"products": 1, "largest": weight - 1}
    ok = all(found[name][key] <= limit for name, each in limits.items() for key, limit in each.items())
    return ok, {"measured": found, "tolerance": limits, "unit": "products, bytes"}


def held(case):
    """Judge how many bytes a step holds for backward: the gradients that it saves."""
    saved, leaves = [], case.leaves()
    with case.torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.nbytes) or x, lambda x: x):
        case.forward(leaves, case.labels)
    limit = sum(x.nbytes for x in leaves)
    return sum(saved) <= limit, {"measured": sum(saved), "tolerance": limit, "unit": "bytes"}


def judge_form(probe, form, api, *, tell, **factors):
    """Make the leading checks on one shape and dtype; their names begin with its form."""

    def make(**more):
        return Case(api, **factors | more)

    def judge(name, role, function, *given, **named):
        probe.judge(f"{form}.{name}", role, functools.partial(function, **named), *given)

    tolerances = make().tolerances()
    judge("mean", "control", repeated, probe, form, make(), tolerances)
    judge("sum", "control", repeated, probe, form, make(reduction="sum", scales=(0.3, 0.3)), tolerances)
    judge("mean_twice", "defect", leading, probe, make(backward="twice"), tolerances, tell=tell)
    judge("sum_twice", "defect", close, make(reduction="sum", backward="twice"), tolerances)
    judge("mean_first_result", "defect", close, make(backward="freed by the second", scales=(1.0, 2.0)), tolerances)
    judge("mean_after_zero", "defect", close, make(backward="twice", scales=(0.0, 1.0)), tolerances)
    judge("mean_summed", "defect", close, make(backward="summed"), tolerances)
    judge("mean_often", "defect", close, make(**OFTEN), tolerances)
    judge("mean_frozen_input", "defect", close, make(trained="no input"), tolerances)
    judge("sum_frozen_input", "defect", close, make(reduction="sum", trained="no input", scales=(0.3, 0.3)), tolerances)
    judge("mean_bias_alone", "defect", close, make(trained="bias"), tolerances)
    none = make(reduction="none", backward="twice")
    judge("none_twice", "control", close, none, none.tolerances())
    judge("none_frozen_input", "control", close, make(reduction="none", trained="no input"), none.tolerances())
    judge("mean_older_torch", "defect", older_torch, make(backward="twice"), tolerances)


def complete_interpreter():
    """Give Triton's interpreter what it lacks: libdevice's tanh and rsqrt, and floats as arguments that are tensors."""
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
    libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)


def load(probe, target, torch):
    """Load the release that is on the path; return its three entries and their options."""
    # The parent package imports the transformers library in older releases: it is found, not executed.
    parent = "liger_kernel.transformers"
    sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    if target == "cpu":
        complete_interpreter()
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
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
        norm=LigerRMSNormFunction.apply,
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
    for reduction, dtype, trained in OFTEN_CASES:
        case = Case(api, reduction=reduction, dtype=dtype, trained=trained, shape=(5, 4, 11), **OFTEN)
        name = f"often.{reduction}_{dtype}_{trained.replace(' ', '_')}"
        probe.judge(name, case.role, contract, case)
    scaled = Case(api, dtype="float16", shape=(13, 5, 45), trained="no input", scales=(65536.0, 1.0))
    probe.judge("loss_scale_frozen_input", "defect", close, scaled, scaled.tolerances())
    probe.judge("after_norm", "defect", after_norm, Case(api, shape=(13, 5, 45)))
    probe.judge("second_order", "control", second_order, Case(api))
    wide = Case(api, shape=(2, WIDE, 3), backward="twice", scales=(2.0, -0.7))
    longest = 8 * torch.finfo(torch.float32).eps * WIDE**0.5  # its longest sums are those over hidden's columns
    probe.judge("wide", "defect", close, wide, dict.fromkeys(wide.tolerances(), longest))
    make = functools.partial(Case, api, shape=(4, 3, 7))  # two chunks, the second with an ignored row
    # Twice with 1 the release is right; with a frozen input it gives gradients with "none" alone.
    right = [x for x in KEPT if x[0] == "none" or x[1] == "all"]
    wrong = [("mean", "all"), ("mean", "no input"), ("sum", "no input")]
    probe.judge("in_place", "control", changed_in_place, functools.partial(make, scales=(1.0, 1.0)), right)
    probe.judge("in_place_scaled", "defect", changed_in_place, functools.partial(make, scales=(2.0, -0.7)), wrong)
    few = functools.partial(Case, api, shape=(2, 3, 5))  # two chunks
    right = [("sum", "all"), ("mean", "no weight"), ("none", "all")]
    wrong = [("mean", "all"), ("mean", "hidden"), ("mean", "no input"), ("sum", "weight"), ("mean", "bias")]
    probe.judge("hooked", "control", hooked, functools.partial(few, scales=(1.0, 1.0)), right)
    probe.judge("hooked_scaled", "defect", hooked, functools.partial(few, scales=(2.0, -0.7)), wrong)
    probe.judge("freed", "control", freed, make)
    probe.judge("with_graph", "defect", with_graph, make)
    probe.judge("no_labels", "defect", no_labels, make)
    probe.judge("by_position", "defect", by_position, make)
    probe.judge("evaluated", "control", evaluated, make)
    probe.judge("cost", "control", cost, functools.partial(Case, api, shape=(8, 40, 80), bias=False))
    probe.judge("held", "control", held, Case(api))


if __name__ == "__main__":
    Probe().run(judge)
