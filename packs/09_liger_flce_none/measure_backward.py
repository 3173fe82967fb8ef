"""Time and memory of the fused loss, pristine against patched and against eager PyTorch. Measured, never judged.

    python measure_backward.py --pristine TREE/src --patched PATCHED_TREE/src [--release RELEASE/src]
        --output data/backward.json

Each tree, and eager PyTorch, has a child process of its own; the parent asks them in turn, so that a change of clocks
meets all of them alike. A sample is one forward and one backward in bf16, timed by CUDA events. A peak is what a step
allocates at most beyond hidden, weight, labels and the weights of the rows. `--device cpu` is a smoke test with tiny
shapes under Triton's interpreter; its numbers mean nothing.
"""

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

SHAPES = {  # BT, H, V
    "cuda": {"public": (2 * 512, 1024, 32000), "large": (8192, 4096, 32000)},
    "cpu": {"public": (8, 4, 20), "large": (13, 5, 45)},
}
# reduction, factor of a reduced loss, is the weight trained
MODES = {
    "none": ("none", None, True),
    "none_frozen_weight": ("none", None, False),
    "mean": ("mean", 1.0, True),
    "sum": ("sum", 0.375, True),
}
ROUNDS, SAMPLES, WARM_UP = {"cuda": 5, "cpu": 1}, 6, 3


class Steps:
    """One shape on one device: what a child repeats."""

    def __init__(self, device, shape, *, eager):
        import torch

        BT, H, V = shape
        self.torch, self.cuda = torch, device == "cuda"
        random = torch.Generator(device).manual_seed(9)
        options = {"generator": random, "device": device}
        self.hidden = torch.randn(BT, H, **options).to(torch.bfloat16).requires_grad_()
        self.weight = (torch.randn(V, H, **options) * H**-0.5).to(torch.bfloat16).requires_grad_()
        self.labels = torch.randint(V, (BT,), **options)
        self.rows = torch.rand(BT, **options)
        self.loss = self.eager if eager else self.fused

    def eager(self, reduction):
        """Make the loss that materialises all logits."""
        functional = self.torch.nn.functional
        logits = functional.linear(self.hidden, self.weight).float()
        return functional.cross_entropy(logits, self.labels, reduction=reduction)

    def fused(self, reduction):
        """Make the loss of the tree that is on the path."""
        from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused

        return Fused.apply(self.hidden, self.weight, self.labels, None, None, -100, 0.0, 0.0, reduction)[0]

    def mark(self):
        """Return this moment on the device's own clock."""
        if not self.cuda:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self, start, end):
        """Return the time between two marks."""
        return start.elapsed_time(end) if self.cuda else (end - start) * 1000

    def sample(self, reduction, factor, trained):
        """Do one step: its times in ms, and its peak in MiB where that can be known."""
        self.hidden.grad = self.weight.grad = None
        self.weight.requires_grad_(trained)
        before = 0
        if self.cuda:
            self.torch.cuda.synchronize()
            self.torch.cuda.reset_peak_memory_stats()
            before = self.torch.cuda.memory_allocated()
        start = self.mark()
        loss = self.loss(reduction)
        middle = self.mark()
        loss.backward(self.rows if factor is None else self.torch.full_like(loss, factor))
        end = self.mark()
        peak = None
        if self.cuda:
            self.torch.cuda.synchronize()
            peak = (self.torch.cuda.max_memory_allocated() - before) / 2**20
        return {
            "total_ms": self.milliseconds(start, end),
            "backward_ms": self.milliseconds(middle, end),
            "peak_mib": peak,
        }


def serve(device, *, eager):
    """Answer each line [shape, mode] on stdin with the samples of it."""
    import torch
    import triton

    about = {"torch": torch.__version__, "triton": triton.__version__, "device": device, "cuda": torch.version.cuda}
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name()
    if not eager:
        from liger_kernel.ops import fused_linear_cross_entropy as module_under_test

        about["sha256"] = hashlib.sha256(Path(module_under_test.__file__).read_bytes()).hexdigest()
    print(json.dumps(about), flush=True)
    now, steps = None, None
    for line in sys.stdin:
        shape, mode = json.loads(line)
        if shape != now:
            steps = None  # frees the other shape's tensors first
            now, steps = shape, Steps(device, SHAPES[device][shape], eager=eager)
        for _ in range(WARM_UP):
            steps.sample(*MODES[mode])
        print(json.dumps([steps.sample(*MODES[mode]) for _ in range(SAMPLES)]), flush=True)


def start(device, source):
    """Start the child of one tree; of eager PyTorch where there is no source."""
    env = dict(os.environ, TRITON_INTERPRET=str(int(device == "cpu")))
    if source is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source.resolve()), env.get("PYTHONPATH"))))
    command = [sys.executable, "-P", __file__, "--device", device, "--serve", "eager" if source is None else "tree"]
    return subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def ask(child, question=None):
    """Read one answer of a child, after one question where there is one."""
    if question is not None:
        child.stdin.write(json.dumps(question) + "\n")
        child.stdin.flush()
    line = child.stdout.readline()
    if not line:
        sys.exit(f"a child ended with status {child.wait()}")
    return json.loads(line)


def columns(samples):
    """Turn samples into one list of each quantity that was measured."""
    return {key: [round(x[key], 4) for x in samples] for key, value in samples[0].items() if value is not None}


def summary(samples):
    """Median and quartiles of each quantity."""
    found = {}
    for key, values in columns(samples).items():
        low, middle, high = (round(value, 4) for value in statistics.quantiles(values, n=4))
        found[key] = {"median": middle, "quartiles": [low, high]}
    return found


def measure(device, sources):
    """Ask all children in turn, and return the medians, the ratios and the raw samples."""
    children = {name: start(device, source) for name, source in sources.items()}
    try:
        result = {"about": {name: ask(child) for name, child in children.items()}, "shapes": SHAPES[device]}
        raw = {shape: {mode: {name: [] for name in children} for mode in MODES} for shape in SHAPES[device]}
        for shape in raw:
            for _ in range(ROUNDS[device]):
                for mode in MODES:
                    for name, child in children.items():
                        raw[shape][mode][name] += ask(child, [shape, mode])
    finally:
        for child in children.values():
            child.stdin.close()
            child.wait()
    result["median"] = {
        shape: {mode: {name: summary(found) for name, found in trees.items()} for mode, trees in modes.items()}
        for shape, modes in raw.items()
    }
    result["patched_over"] = {
        shape: {
            mode: {
                other: {key: round(value["median"] / trees[other][key]["median"], 3) for key, value in patched.items()}
                for other in trees
                if other != "patched"
            }
            for mode, trees in modes.items()
            for patched in (trees["patched"],)
        }
        for shape, modes in result["median"].items()
    }
    result["logits_mib"] = {shape: round(BT * V * 2 / 2**20, 1) for shape, (BT, _, V) in SHAPES[device].items()}
    result["samples"] = {
        shape: {mode: {name: columns(found) for name, found in trees.items()} for mode, trees in modes.items()}
        for shape, modes in raw.items()
    }
    return result


def main():
    """Parse the arguments and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pristine", type=Path, help="source root of the pristine tree")
    parser.add_argument("--patched", type=Path, help="source root of the patched tree")
    parser.add_argument("--release", type=Path, help="source root of a release that has upstream's own fix")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=SHAPES, default="cuda")
    parser.add_argument("--serve", choices=("tree", "eager"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.device, eager=arguments.serve == "eager")
        return
    if None in (arguments.pristine, arguments.patched, arguments.output):
        parser.error("--pristine, --patched and --output are needed")
    sources = {"pristine": arguments.pristine, "patched": arguments.patched, "eager": None}
    if arguments.release:
        sources["release"] = arguments.release
    result = measure(arguments.device, sources)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    arguments.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(json.dumps(result["patched_over"], indent=1))


if __name__ == "__main__":
    main()
