"""What a step of the fused linear cross entropy costs on a GPU, without and with the patch. Measured, never judged.

    python measure_time.py --pristine TREE --patched TREE --output data/time.json

TREE is a source tree of the release (the folder above `src`). The shape is BT=8192, H=4096, V=32000 in bfloat16,
without a bias. Each round starts a child process of its own for either tree, the trees in turn, so that a GPU which
grows warmer or slower meets both. A step is forward and backward, timed by CUDA events after a warm-up; its memory is
the peak that PyTorch's allocator counts above the inputs. The table beside the numbers (time.md) has, over all rounds,
the median of the steps and their quartiles in milliseconds, and the largest peak in MiB.
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
MEBIBYTE = 2**20
#: What is trained, and how often one goes backward through the same graph; none is an evaluation.
STEP_KINDS = {
    "all trained, one backward": ("input", "weight"),
    "all trained, graph retained": ("input", "weight"),
    "weight frozen, one backward": ("input",),
    "input frozen, one backward": ("weight",),
    "evaluation under no_grad": (),
}


def step(torch, loss_of, tensors, kind):
    """Run one step; an evaluation has no backward."""
    if kind.startswith("evaluation"):
        with torch.no_grad():
            return loss_of(tensors["weight"], tensors["input"], tensors["labels"])
    loss = loss_of(tensors["weight"], tensors["input"], tensors["labels"])
    return torch.autograd.grad(
        loss,
        [x for x in tensors.values() if x.requires_grad],
        retain_graph=kind.endswith("retained"),
        allow_unused=True,  # the release gives a weight none where the input is frozen
    )


def measure():
    """Measure every kind of step on the tree that is on the path; print them as JSON."""
    import torch

    parent = "liger_kernel.transformers"  # found, not executed: it would import the transformers library
    sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    from liger_kernel.transformers.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyLoss

    torch.manual_seed(17)
    made = {
        "input": torch.randn(ROWS, WIDTH, device="cuda", dtype=torch.bfloat16),
        "weight": torch.randn(CLASSES, WIDTH, device="cuda", dtype=torch.bfloat16) * WIDTH**-0.5,
        "labels": torch.randint(CLASSES, (ROWS,), device="cuda"),
    }
    loss_of, found = LigerFusedLinearCrossEntropyLoss(reduction="mean"), {}
    for kind, trained in STEP_KINDS.items():
        tensors = {name: x.detach().requires_grad_(name in trained) for name, x in made.items()}
        milliseconds = []
        for number in range(WARM_UP + STEPS):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if number == WARM_UP:
                torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            begin.record()
            got = step(torch, loss_of, tensors, kind)
            end.record()
            torch.cuda.synchronize()
            milliseconds.append(begin.elapsed_time(end))
            none = isinstance(got, tuple) and any(x is None for x in got)
            del got
        peak = torch.cuda.max_memory_allocated() - held
        found[kind] = {"milliseconds": milliseconds[WARM_UP:], "peak": peak, "no_gradient": none}
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "kinds": found}))


def rounds(trees):
    """Measure the trees in turn, ROUNDS times, each in a process of its own."""
    found = {name: [] for name in trees}
    for number in range(ROUNDS):
        for name in list(trees)[:: 1 if number % 2 == 0 else -1]:
            path = os.pathsep.join([str(trees[name] / "src"), os.environ.get("PYTHONPATH", "")])
            ended = subprocess.run(
                [sys.executable, __file__],
                env=os.environ | {"PYTHONPATH": path},
                capture_output=True,
                text=True,
                check=False,
            )
            if ended.returncode:
                sys.exit(f"{name}: exit status {ended.returncode}\n{ended.stderr[-2000:]}")
            found[name].append(json.loads(ended.stdout.splitlines()[-1]))
    return found


def summary(found, kind):
    """Return the median and the quartiles of a kind of step in ms, and its peak in MiB."""
    every = [value for each in found for value in each["kinds"][kind]["milliseconds"]]
    low, middle, high = statistics.quantiles(every, n=4)
    peak = max(each["kinds"][kind]["peak"] for each in found) / MEBIBYTE
    return {
        "median": middle,
        "low": low,
        "high": high,
        "peak": peak,
        "no_gradient": found[0]["kinds"][kind]["no_gradient"],
    }


def as_text(one):
    """Write one cell of the table."""
    none = ", and no gradient" if one["no_gradient"] else ""
    return f"{one['median']:.2f} ms ({one['low']:.2f} to {one['high']:.2f}), {one['peak']:.0f} MiB{none}"


def main():
    """Measure both trees and write the numbers with their table; a child of this measures one."""
    if len(sys.argv) == 1:
        return measure()
    parser = argparse.ArgumentParser(description="Time and memory of a step, without and with the patch.")
    for name in ("pristine", "patched", "output"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    given = parser.parse_args()
    found = rounds({"pristine": given.pristine, "patched": given.patched})
    one = found["pristine"][0]
    table = {name: {kind: summary(found[name], kind) for kind in STEP_KINDS} for name in found}
    document = {"gpu": one["gpu"], "torch": one["torch"], "rows": ROWS, "width": WIDTH, "classes": CLASSES}
    given.output.write_text(json.dumps(document | {"steps": ROUNDS * STEPS, **table}, indent=1) + "\n")
    lines = ["| step | pristine | patched |", "| --- | --- | --- |"]
    lines += [
        f"| {kind} | {as_text(table['pristine'][kind])} | {as_text(table['patched'][kind])} |" for kind in STEP_KINDS
    ]
    given.output.with_suffix(".md").write_text("\n".join(lines) + "\n")
    return None


if __name__ == "__main__":
    main()
