# /// script
# requires-python = ">=3.11"
# dependencies = ["toykernel==1.0"]
# ///
"""Scaling by per-value weights uses the first weight for every value.

Cause: `scale` multiplies by `weights[0]`. Scope: this function, on lists of numbers.
Upstream: https://example.org/toykernel/issues/1

With the release unpacked and $PACK naming this folder, both sentinels without the runner:

    unzip -q toykernel-1.0.zip
    PYTHONPATH=toykernel-1.0/src python "$PACK/reproduce.py" --target cpu
    git -C toykernel-1.0 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=toykernel-1.0/src python "$PACK/reproduce.py" --target cpu
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


def judge(probe, target):
    """Compare `scale` with the products computed here."""
    if target != "cpu":
        raise NotImplementedError(f"no {target} here")
    probe.say("TARGET", target="cpu", evidence="traced", device="CPU")
    from toykernel import scale

    probe.upstream(scale)
    values, weights = [1.0, 2.0, 3.0], [1.0, 0.5, 0.0]
    error = max(
        abs(found - value * weight)
        for found, value, weight in zip(scale.scale(values, weights), values, weights, strict=True)
    )
    probe.check("ones", "control", scale.scale(values, [1.0] * 3) == values, tolerance=0.0)
    probe.check("total", "control", scale.total(values) == 6.0, tolerance=0.0)
    probe.check("weights", "defect", error == 0.0, measured=error, tolerance=0.0, unit="1")
    probe.say("FIGURE", name="max_error", value=error, unit="1", spread=None)
    probe.say("OUTPUT", name="total", dtype="float", shape=[], sha256=str(scale.total(values)), must_match=True)


if __name__ == "__main__":
    Probe().run(judge)
