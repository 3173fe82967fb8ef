"""Time and memory of the fused loss, pristine against patched. Measured, never judged.

    python measure_backward.py --pristine TREE/src --patched PATCHED_TREE/src --output data/backward.json

Each tree has a child process of its own; the parent asks them in turn, so that a change of clocks meets both alike. A
sample is one forward and one backward in bf16, timed by CUDA events; in the mode `twice` the graph is retained and a
second backward follows. A peak is what a step allocates at most beyond hidden, weight and labels. `--device cpu` is a
smoke test with tiny shapes under Triton's interpreter; its numbers mean nothing.
"""

import argparse
import hashlib
import importlib.util
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
# reduction, factor of the loss, are hidden and weight trained, how many backwards
MODES = {
    "mean": ("mean", 1.0, (True, True), 1),
    "mean_scaled": ("mean", 0.375, (True, True), 1),
    "sum_scaled": ("sum", 0.375, (True, True), 1),
    "mean_scaled_frozen_weight": ("mean", 0.375, (True, False), 1),
    "mean_frozen_input": ("mean", 0.375, (False, True), 1),
    "mean_twice": ("mean", 0.375, (True, True), 2),
}
ROUNDS, SAMPLES, WARM_UP = {"cuda": 5, "cpu": 1}, 6, 3


class Steps:
    """One shape on one device: what a child repeats."""

    def __init__(self, device, shape):
        import torch

        BT, H, V = shape
        self.torch, self.cuda = torch, device == "cuda"
        random = torch.Generator(device).manual_seed(9)
        options = {"generator": random, "device": device}
        self.hidden = torch.randn(BT, H, **options).to(torch.bfloat16).requires_grad_()
        self.weight = (torch.randn(V, H, **options) * H**-0.5).to(torch.bfloat16).requires_grad_()
        self.labels = torch.randint(V, (BT,), **options)

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

    def sample(self, reduction, factor, trained, times):
        """Do one step: its times in ms, and its peak in MiB where that can be known."""
        self.hidden.grad = self.weight.grad = None
        self.hidden.requires_grad_(trained[0])
        self.weight.requires_grad_(trained[1])
        before = 0
        if self.cuda:
            self.torch.cuda.synchronize()
            self.torch.cuda.reset_peak_memory_stats()
            before = self.torch.cuda.memory_allocated()
        start = self.mark()
        loss = self.fused(reduction)
        middle = self.mark()
        for number in range(times):
            loss.backward(self.torch.full_like(loss, factor), retain_graph=number + 1 < times)
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


def serve(device):
    """Answer each line [shape, mode] on stdin with the samples of it."""
    import torch
    import triton

    about = {"torch": torch.__version__, "triton": triton.__version__, "device": device, "cuda": torch.version.cuda}
    if device == "cuda":
        about["device"] = torch.cuda.get_device_name()
    spec = importlib.util.find_spec("liger_kernel.ops.fused_linear_cross_entropy")
    about["sha256"] = hashlib.sha256(Path(spec.origin).read_bytes()).hexdigest()
    print(json.dumps(about), flush=True)
    now, steps = None, None
    for line in sys.stdin:
        shape, mode = json.loads(line)
        if shape != now:
            steps = None  # frees the other shape's tensors first
            now, steps = shape, Steps(device, SHAPES[device][shape])
        for _ in range(WARM_UP):
            steps.sample(*MODES[mode])
        print(json.dumps([steps.sample(*MODES[mode]) for _ in range(SAMPLES)]), flush=True)


def start(device, source):
    """Start the child of one tree."""
    env = dict(os.environ, TRITON_INTERPRET=str(int(device == "cpu")))
    env["PYTHONPATH"] = os.pathsep.join(filter(None, (str(source.resolve()), env.get("PYTHONPATH"))))
    command = [sys.executable, "-P", __file__, "--device", device, "--serve"]
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
    result["weight_mib"] = {shape: round(V * H * 2 / 2**20, 1) for shape, (_, H, V) in SHAPES[device].items()}
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
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    parser.add_argument("--device", choices=SHAPES, default="cuda")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.device)
        return
    if None in (arguments.pristine, arguments.patched, arguments.output):
        parser.error("--pristine, --patched and --output are needed")
    result = measure(arguments.device, {"pristine": arguments.pristine, "patched": arguments.patched})
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in result.items()]
    arguments.output.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    print(json.dumps(result["patched_over"], indent=1))


if __name__ == "__main__":
    main()
