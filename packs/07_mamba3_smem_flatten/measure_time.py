"""Time of both kernels and of the whole backward on a GPU: the release, and fix.patch with TMA off, on, and in one.

    PYTHONPATH=COMPANIONS:../.. python measure_time.py --tree PRISTINE_TREE --output data/time.json

COMPANIONS is the dependency set "default", merged into one folder. A copy of the tree gets fix.patch. With --build
sm_90a it compiles the six kernels and stops, which needs no GPU and takes minutes; where TILELANG_CACHE_DIR is kept,
the timing itself takes about a minute. The variants:

    release     as it ships, TMA off
    off         fix.patch, TMA off, as the file has it
    on          fix.patch, TMA and warp specialisation in both kernels
    mixed       fix.patch, both in bwd_fwd and neither in bwd_bwd (the whole backward alone: its kernels are these)

All are asked in turn, so that a change of clocks meets them alike; a sample is one call between two CUDA events.
data/time.md is written beside the results, after every shape; what hangs is ended after five minutes, and what was
measured before it is kept. Measured, never judged.
"""

import argparse
import concurrent.futures
import contextlib
import functools
import importlib
import json
import multiprocessing
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import unittest.mock
from pathlib import Path

import contract

HERE = Path(__file__).parent
SHAPES = {"B=4 S=2048 H=16": (4, 2048, 16), "B=1 S=4096 H=32": (1, 4096, 32), "B=16 S=2048 H=32": (16, 2048, 32)}
VARIANTS = {"release": ("pristine", False, False), "off": ("patched", False, False)}  # tree, TMA in bwd_fwd, in bwd_bwd
VARIANTS |= {"on": ("patched", True, True), "mixed": ("patched", True, False)}
BUILDS = [("patched", True), ("pristine", False), ("patched", False)]  # each with both kernels
TIMED = {"bwd_fwd": ("release", "off", "on"), "bwd_bwd": ("release", "off", "on"), "backward": tuple(VARIANTS)}
ROUNDS, SAMPLES, WARM_UP = 5, 10, 3


def load(tree):
    """Import the module under test from this tree, whatever was imported from another one."""
    for name in [name for name in sys.modules if name.partition(".")[0] == "mamba_ssm"]:
        del sys.modules[name]
    with unittest.mock.patch.object(sys, "path", [str(tree), *sys.path]):
        importlib.invalidate_caches()
        module = contract.load()
    if not Path(module.__file__).is_relative_to(tree):
        raise SystemExit(f"{module.__file__} is not of {tree}")
    return module


def compile_one(kernel, tree, tma, target):
    """In a process of its own: compile a kernel into TileLang's cache. Return what the contract found."""
    with unittest.mock.patch.object(sys, "path", [str(tree), *sys.path]):
        return contract.build("full", kernel, tma, target)


def kernels_again(module, target, arguments, tma):
    """Run one backward, and return what runs each kernel again on the same tensors."""
    again = {}

    def factory(kernel, original, *args, **kwargs):
        compiled = original(*args, **kwargs)

        def run(*tensors):
            again[kernel] = functools.partial(compiled, *tensors)
            return compiled(*tensors)

        return run

    with contextlib.ExitStack() as stack:
        for kernel in contract.KERNELS:
            wrapped = functools.partial(factory, kernel, contract.variant(module, kernel, target, tma))
            stack.enter_context(unittest.mock.patch.object(module, f"mamba_mimo_{kernel}", wrapped))
        module.mamba_mimo_bwd_combined(**arguments)
    module.torch.cuda.synchronize()
    return again


def samples(torch, run):
    """Milliseconds of single calls."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(WARM_UP + SAMPLES)]
    for begin, end in events:
        begin.record()
        run()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) for begin, end in events[WARM_UP:]]


def measure(modules, target, shape):
    """Time everything at one shape."""
    torch = modules["pristine"].torch
    batch, length, heads = shape
    case = contract.LARGE._replace(batch=batch, length=length, heads=heads)
    arguments, _ = contract.example(case, "cuda")
    runs = {}
    for variant, (tree, fwd, bwd) in VARIANTS.items():
        signal.alarm(300)
        runs["backward", variant] = functools.partial(
            contract.backward, modules[tree], target, arguments, fwd=fwd, bwd=bwd
        )
        if fwd == bwd:
            again = kernels_again(modules[tree], target, arguments, fwd)
            runs |= {(kernel, variant): run for kernel, run in again.items()}
    times = {key: [] for key in runs}
    for _ in range(ROUNDS):
        signal.alarm(300)
        for key, run in runs.items():
            times[key] += samples(torch, run)
    signal.alarm(0)
    result = {name: {} for name in TIMED}
    for (name, variant), values in times.items():
        low, middle, high = statistics.quantiles(values, n=4)
        result[name][variant] = {"median_ms": middle, "interquartile_range_ms": high - low}
    for found in result.values():
        for variant in found:
            found[variant]["over_release"] = found[variant]["median_ms"] / found["release"]["median_ms"]
    return result


def cell(found, variant):
    """One cell: the median, and its part of the release's."""
    if variant not in found:
        return "-"
    time = f"{found[variant]['median_ms']:.2f}"
    if variant == "release" or "release" not in found:
        return time
    return f"{time} ({found[variant]['over_release']:.3f})"


def table(shapes):
    """Markdown: a row per shape and what was timed."""
    titles = ("release", "TMA off", "TMA on", "on in bwd_fwd alone")
    lines = [f"| shape | ms (of the release's) | {' | '.join(titles)} |", "|" + " --- |" * 6]
    for shape, result in shapes.items():
        for name in TIMED:
            cells = [cell(result[name], variant) for variant in VARIANTS]
            lines.append(f"| {shape} | {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def patched(tree, folder):
    """Copy the package into a folder, and apply fix.patch there."""
    shutil.copytree(tree / "mamba_ssm", folder / "mamba_ssm")
    file = "mamba_ssm/ops/tilelang/mamba3/mamba3_mimo_bwd.py"
    (folder / file).chmod(0o755)
    environment = os.environ | {"GIT_CEILING_DIRECTORIES": str(folder.parent)}
    subprocess.run(["git", "apply", "-p1", str(HERE / "fix.patch")], cwd=folder, check=True, env=environment)
    if (folder / file).read_bytes() == (tree / file).read_bytes():
        raise SystemExit("fix.patch changed nothing")  # git apply does so below another repository
    return folder


def build_all(trees, target):
    """Compile six kernels side by side, into TileLang's cache."""
    tasks = [(kernel, tree, tma) for kernel in contract.KERNELS for tree, tma in BUILDS]
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(min(len(tasks), os.cpu_count()), mp_context=context) as pool:
        built = [pool.submit(compile_one, kernel, trees[tree], tma, target) for kernel, tree, tma in tasks]
    return [
        {"kernel": kernel, "tree": tree, "tma": tma, **one.result()}
        for (kernel, tree, tma), one in zip(tasks, built, strict=True)
    ]


def time_all(trees, output):
    """Build what is not built, then time it."""
    modules = {name: load(tree) for name, tree in trees.items()}
    first = modules["pristine"]
    # Upstream makes new symbols for every call, which tilelang takes for new arguments, so it elaborates both kernels
    # anew each time, for seconds. That has nothing to do with TMA, and is kept out of the times.
    first.T.dynamic = functools.cache(first.T.dynamic)
    target = "sm_{}{}a".format(*first.torch.cuda.get_device_capability())
    document = {"gpu": first.torch.cuda.get_device_name(), "builds": build_all(trees, target)}
    document |= {"torch": first.torch.__version__, "cuda": first.torch.version.cuda}
    document |= {"python": platform.python_version(), "tilelang": first.tilelang.__version__, "shapes": {}}
    build = contract.BUILDS["full"]
    document["sizes"] = {"N": build.N, "P": build.P, "R": build.R, "chunk": build.chunk}
    output.write_text(json.dumps(document, indent=1) + "\n")
    for name, shape in SHAPES.items():
        document["shapes"][name] = measure(modules, target, shape)
        output.write_text(json.dumps(document, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(document["shapes"]))
        print(name, json.dumps(document["shapes"][name]), flush=True)


def main():
    """Lay out the patched tree beside the pristine one, and time both."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", type=Path, required=True, help="the release, unpacked")
    parser.add_argument("--output", type=Path, default=HERE / "data" / "time.json")
    parser.add_argument("--build", metavar="TARGET", help="compile for it, and time nothing: no GPU is needed")
    given = parser.parse_args()
    tree = given.tree.resolve()
    with tempfile.TemporaryDirectory() as folder:
        trees = {"pristine": tree, "patched": patched(tree, Path(folder).resolve())}
        if given.build:
            print(json.dumps(build_all(trees, given.build), indent=1))
        else:
            time_all(trees, given.output)


if __name__ == "__main__":
    main()
