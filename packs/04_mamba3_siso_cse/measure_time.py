"""Time compute_dqkv of both trees on a GPU, by turns in one process, and the pristine tree against itself.

Nothing here is judged. Each call is captured many times into one CUDA graph; the graphs of the pristine tree, of the
pristine tree once more and of the patched tree are replayed by turns, so that a drift of the clock meets all three.
Every launch has the configuration that contract.py pins. PRISTINE is the unpacked sdist, PATCHED a copy of it with
fix.patch applied; the pack's dependencies must be importable, and `kit`, which is in the root of this repository:

    PYTHONPATH=../.. python measure_time.py PRISTINE PATCHED

Written is data/time.ARCHITECTURE.json: median and quartiles of each, and of the relative difference to the pristine
tree round by round. It takes about a minute on an H200.
"""

import argparse
import json
import statistics
import sys
from functools import partial
from pathlib import Path

import contract
import torch
import triton

HERE = Path(__file__).resolve().parent
ROUNDS, WARM_UP, GRAPH_MS = 60, 5, 20.0
CASES = {
    "dense B=2 S=256 NH=8 D=64": ((256, 256), 8, 1, 64, 64, 64),
    "dense B=1 S=2048 NH=32 D=128": ((2048,), 32, 1, 128, 128, 64),
    "dense B=1 S=4096 NH=24 DQK=64 DV=128": ((4096,), 24, 1, 64, 128, 64),
    "varlen S=1000+1+3095 NH=24 DQK=64 DV=128": ((1000, 1, 3095), 24, 1, 64, 128, 64),
    "dense B=3 S=200 NH=6 D=64 d_ov_state": ((200,) * 3, 6, 2, 64, 64, 64),
    "varlen S=100+1+155 NH=6 D=64 bare": ((100, 1, 155), 6, 3, 64, 64, 64),
    "varlen S=75+0+21 NH=2 D=64 strong decay": ((75, 0, 21), 2, 2, 64, 64, 64),
    "dense B=2 S=200 NH=4 DV=96 16-bit D padded": ((200, 200), 4, 2, 64, 96, 64),
    "dense B=2 S=90 NH=2 D=64 no last": ((90, 90), 2, 1, 64, 64, 64),
    "varlen S=70+0+33 NH=2 D=64 no last": ((70, 0, 33), 2, 1, 64, 64, 64),
}


def load(tree):
    """Import the kernel's module from one tree, beside the other tree's, and pin its configuration."""
    for name in [name for name in sys.modules if name.split(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    sys.path.insert(0, str(tree.resolve()))
    module = contract.import_below(contract.MODULE)
    sys.path.pop(0)
    if not Path(module.__file__).is_relative_to(tree.resolve()):
        raise SystemExit(f"{tree}: the kernel came from {module.__file__}")
    kernel = getattr(module, contract.KERNEL)
    kernel.configs = [next(x for x in kernel.configs if contract.PINNED.items() <= x.all_kwargs().items())]
    return module


def milliseconds(graph):
    """Replay a graph once between two events."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end)


def captured(call, repeats):
    """Capture so many calls into one graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(repeats):
            call()
    return graph


def quartiles(values):
    """Return median and quartiles, rounded to what the clock resolves."""
    low, median, high = statistics.quantiles(values, n=4)
    return {"median": round(median, 5), "lower quartile": round(low, 5), "upper quartile": round(high, 5)}


def measure(modules, case, shape):
    """Time one case: milliseconds per call, and the difference to the pristine tree in percent."""
    passed, named, _ = contract.problem(case, shape, "cuda")
    calls = {name: partial(module.compute_dqkv, *passed, **named) for name, module in modules.items()}
    for call in calls.values():
        call()  # compiles
    repeats = max(1, int(GRAPH_MS / milliseconds(captured(calls["pristine"], 1))))
    graphs = {name: captured(call, repeats) for name, call in calls.items()}
    times = {name: [] for name in graphs}
    for number in range(WARM_UP + ROUNDS):
        for name in sorted(graphs, reverse=bool(number % 2)):
            value = milliseconds(graphs[name]) / repeats
            if number >= WARM_UP:
                times[name].append(value)
    pairs = {name: zip(values, times["pristine"], strict=True) for name, values in times.items()}
    percent = {name: quartiles([100 * (a / b - 1) for a, b in pairs[name]]) for name in times if name != "pristine"}
    return {"milliseconds": {name: quartiles(values) for name, values in times.items()}, "percent": percent}


def main():
    """Read the command line, time every dense and varlen case, write the file."""
    parser = argparse.ArgumentParser(description="Time both trees by turns on this host's GPU.")
    parser.add_argument("pristine", type=Path)
    parser.add_argument("patched", type=Path)
    arguments = parser.parse_args()
    pristine, patched = load(arguments.pristine), load(arguments.patched)
    modules = {"pristine": pristine, "pristine again": pristine, "patched": patched}
    cases = {case: measure(modules, case, shape) for case, shape in CASES.items()}
    host = {"GPU": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__}
    found = {**host, "configuration": contract.PINNED, "rounds": ROUNDS, "cases": cases}
    lines = ["| case | pristine, ms | pristine again | patched |", "| --- | --- | --- | --- |"]
    for case, result in cases.items():
        time, parts = result["milliseconds"]["pristine"], []
        for name in ("pristine again", "patched"):
            low, median, high = (result["percent"][name][x] for x in ("lower quartile", "median", "upper quartile"))
            parts.append(f"{median:+.2f} % ({low:+.2f} .. {high:+.2f})")
        spread = f"{time['lower quartile']:.4f} .. {time['upper quartile']:.4f}"
        lines.append(f"| {case} | {time['median']:.4f} ({spread}) | {parts[0]} | {parts[1]} |")
    capability = torch.cuda.get_device_capability()
    target = "sm_{}{}".format(*capability) + "a" * (capability >= (9, 0))
    data = HERE / "data"
    data.mkdir(exist_ok=True)
    (data / f"time.{target}.json").write_text(json.dumps(found, indent=1) + "\n")
    (data / f"time.{target}.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
