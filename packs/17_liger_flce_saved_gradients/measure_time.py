"""What a step of the fused loss costs on a CUDA GPU, without and with the patch. Measured, never judged.

    python measure_time.py --pristine TREE --patched TREE --output data/time.json

TREE is a source tree of the release (the folder above `src`). BT=8192, H=4096, V=32000, bfloat16, without a bias.
The trees run in turn, each round in a process of its own. CUDA events time forward and backward, after a warm-up.
The numbers are, over all rounds, the quartiles in milliseconds and the largest peak above the tensors, in MiB.
"""

import argparse
import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

ROWS, WIDTH, CLASSES = 8192, 4096, 32000
ROUNDS, WARM_UP, STEPS = 3, 3, 10
KINDS = {"all trained, one backward": False, "all trained, graph retained": True}


def measure():
    """Measure each kind of step on the tree that is on the path; print the numbers as JSON."""
    import torch

    parent = "liger_kernel.transformers"  # found, not executed: it would import the transformers library
    sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    torch.manual_seed(17)
    hidden = torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    head = (torch.randn(CLASSES, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5).requires_grad_()
    labels = torch.randint(CLASSES, (ROWS,), device="cuda")
    loss_of, kinds = LigerFusedLinearCrossEntropyLoss(), {}
    for kind, retained in KINDS.items():
        milliseconds, peak = [], 0
        for _ in range(WARM_UP + STEPS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            begin.record()
            torch.autograd.grad(loss_of(head, hidden, labels), [hidden, head], retain_graph=retained)
            end.record()
            torch.cuda.synchronize()
            milliseconds.append(begin.elapsed_time(end))
            peak = max(peak, torch.cuda.max_memory_allocated() - held)
        kinds[kind] = {"milliseconds": milliseconds[WARM_UP:], "peak": peak}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "kinds": kinds}))


def run(tree):
    """Measure a tree in a process of its own; raises CalledProcessError where that fails."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tree / "src"), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, __file__]
    ended = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def summary(rounds, kind):
    """Return the quartiles of a kind of step, and its peak."""
    low, middle, high = statistics.quantiles([x for one in rounds for x in one["kinds"][kind]["milliseconds"]], n=4)
    return {"median": middle, "low": low, "high": high, "peak": max(x["kinds"][kind]["peak"] for x in rounds) / 2**20}


def main():
    """Measure both trees and write the numbers; a child of this measures one."""
    if len(sys.argv) == 1:
        return measure()
    parser = argparse.ArgumentParser(description="Time and memory of a step, without and with the patch.")
    for name in ("pristine", "patched", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    trees = {"pristine": given.pristine, "patched": given.patched}
    found = {name: [] for name in trees}
    for number in range(ROUNDS):
        for name in list(trees)[:: 1 if number % 2 == 0 else -1]:
            found[name].append(run(trees[name]))
    one = found["pristine"][0]
    document = {"gpu": one["gpu"], "torch": one["torch"], "rows": ROWS, "width": WIDTH, "classes": CLASSES}
    document["steps"] = ROUNDS * STEPS
    document |= {name: {kind: summary(rounds, kind) for kind in KINDS} for name, rounds in found.items()}
    given.output.write_text(json.dumps(document, indent=1) + "\n")
    return None


if __name__ == "__main__":
    main()
