"""Time of both kernels and of the whole backward on a GPU, TMA on against off. Measured, never judged.

    PYTHONPATH=PATCHED_TREE:COMPANIONS python measure_time.py --output data/time.json

The tree has fix.patch applied, since without it the kernels do not compile with TMA on. TMA off and on are asked in
turn, so that a change of clocks meets both alike; a sample is one call between two CUDA events. data/time.md is
written beside the results. A kernel that hangs is ended after five minutes, and what was measured before it is kept.
"""

import argparse
import concurrent.futures
import functools
import json
import multiprocessing
import platform
import signal
import statistics
import unittest.mock
from pathlib import Path

import reproduce

HERE = Path(__file__).parent
SHAPES = {"B=4 S=2048 H=16": (4, 2048, 16), "B=1 S=4096 H=32": (1, 4096, 32), "B=16 S=2048 H=32": (16, 2048, 32)}
OPTIONS = {"off": False, "on": True}
ROUNDS, SAMPLES, WARM_UP = 5, 20, 3


def captured(module, arguments):
    """Run one backward, and return what runs each kernel again on the same tensors, and the backward itself."""
    again = {"backward": functools.partial(module.mamba_mimo_bwd_combined, **arguments)}

    def factory(kernel, original, *args, **kwargs):
        compiled = original(*args, **kwargs)

        def run(*tensors):
            again[kernel] = functools.partial(compiled, *tensors)
            return compiled(*tensors)

        return run

    names = {kernel: f"mamba_mimo_{kernel}" for kernel in reproduce.KERNELS}
    wrapped = {name: functools.partial(factory, kernel, getattr(module, name)) for kernel, name in names.items()}
    functions = {name: getattr(module, name) for name in names.values()}
    with unittest.mock.patch.multiple(module, **wrapped):
        again["backward"]()
    module.torch.cuda.synchronize()

    def backward():  # the module's functions may have been switched in the meantime
        with unittest.mock.patch.multiple(module, **functions):
            module.mamba_mimo_bwd_combined(**arguments)

    return {**again, "backward": backward}


def samples(torch, run):
    """Milliseconds of single calls."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + SAMPLES)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[WARM_UP:]]


def measure(module, target, shape):
    """Time everything at one shape."""
    arguments, _ = reproduce.example(module.torch, shape, "cuda")
    runs = {}
    for option, tma in OPTIONS.items():
        signal.alarm(300)
        reproduce.switch(module, target, tma=tma)
        runs |= {(name, option): run for name, run in captured(module, arguments).items()}
    times = {key: [] for key in runs}
    for _ in range(ROUNDS):
        signal.alarm(300)
        for key, run in runs.items():
            times[key] += samples(module.torch, run)
    signal.alarm(0)
    result = {}
    for (name, option), values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result.setdefault(name, {})[option] = {"median_ms": middle, "interquartile_range_ms": high - low}
    for found in result.values():
        found["on_over_off"] = found["on"]["median_ms"] / found["off"]["median_ms"]
    return result


def table(shapes):
    """Markdown: a row per shape and what was timed."""
    lines = ["| shape | timed | TMA off, ms | TMA on, ms | on / off |", "|" + " --- |" * 5]
    for shape, result in shapes.items():
        for name in ("bwd_fwd", "bwd_bwd", "backward"):
            found = result[name]
            times = [f"{found[x]['median_ms']:.3f} ± {found[x]['interquartile_range_ms'] / 2:.3f}" for x in OPTIONS]
            lines.append(f"| {shape} | {name} | {' | '.join(times)} | {found['on_over_off']:.3f} |")
    return "\n".join(lines) + "\n"


def main():
    """Build four kernels side by side, then time them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "data" / "time.json")
    output = parser.parse_args().output
    module = reproduce.load()
    torch = module.torch
    target = "sm_{}{}a".format(*torch.cuda.get_device_capability())
    # Upstream makes new symbols for every call, which tilelang takes for new arguments, so it elaborates both kernels
    # anew each time, for seconds. That has nothing to do with TMA, and is kept out of the times.
    module.T.dynamic = functools.cache(module.T.dynamic)
    tasks = [(kernel, tma) for kernel in reproduce.KERNELS for tma in OPTIONS.values()]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(len(tasks), mp_context=context) as pool:
        built = [pool.submit(reproduce.build, *task, target) for task in tasks]
    builds = [{"kernel": kernel, "tma": tma, **one.result()} for (kernel, tma), one in zip(tasks, built, strict=True)]
    driver = torch.cuda.get_device_properties(0)
    document = {"gpu": driver.name, "torch": torch.__version__, "cuda": torch.version.cuda, "builds": builds}
    document |= {"python": platform.python_version(), "tilelang": module.tilelang.__version__, "shapes": {}}
    document["sizes"] = {"N": reproduce.N, "P": reproduce.P, "R": reproduce.R, "chunk": reproduce.CHUNK}
    output.write_text(json.dumps(document, indent=1) + "\n")
    for name, shape in SHAPES.items():
        document["shapes"][name] = measure(module, target, shape)
        output.write_text(json.dumps(document, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(document["shapes"]))
        print(name, json.dumps(document["shapes"][name]), flush=True)


if __name__ == "__main__":
    main()
