"""The speed of the MIMO backward with grouped heads, and what mamba3_mimo itself does. Measured, never judged.

    PYTHONPATH=COMPANIONS:../.. python measure_speed.py --pristine TREE --patched TREE [--head TREE] --output X.json

Needs a GPU. Writes the raw numbers, and the table of README.md beside them (speed.md). Each tree has a child process of
its own, one after the other; its kernels are compiled by several processes at once. The patch leaves the kernels alone,
so that the patched tree finds the pristine tree's in TileLang's cache. The shape is that of a layer with headdim 64,
d_state 128, MIMO rank 4 and chunks of 16 steps, with z and D, in bfloat16: B=2, S=4096, 128 heads. Triton's small
kernels are pinned to one configuration, as in the contract.

The release makes new symbols for B, S, H and G in every call, and TileLang then traces both kernels again, which the
default branch no longer does (#968). So there are two times: that of a call as it stands (on the clock), and, with the
symbols kept, that of the work on the GPU (by CUDA events), from which the rate follows.

A rate counts the multiplications and additions of the matrix products that stand in the two backward kernels: per head
and chunk, with F = 64 fused rows, 5 F F N + 4 F F P + 6 F N P multiply-adds. It says nothing of other ways to count.
"""

import argparse
import contextlib
import functools
import importlib.metadata
import io
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
B, S, H, P, N, F, CHUNK = 2, 4096, 128, 64, 128, 64, 16
GROUPS = (1, 8, 128)
TREES = ("pristine", "patched", "head")
WARM_UP, SAMPLES = 5, 30
TERA_OPERATIONS = 2 * (5 * F * F * N + 4 * F * F * P + 6 * F * N * P) * B * H * (S / CHUNK) / 1e12


def timed(function):
    """Return milliseconds per call, by CUDA events: the median and the quartiles."""
    import torch

    samples = []
    for _ in range(WARM_UP + SAMPLES):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        events[0].record()
        function()
        events[1].record()
        torch.cuda.synchronize()
        samples.append(events[0].elapsed_time(events[1]))
    low, middle, high = statistics.quantiles(samples[WARM_UP:], n=4)
    return {"median": middle, "low": low, "high": high}


def whole(contract, G, heads):
    """Run mamba3_mimo forward and backward, as a user does."""
    import torch

    case = contract.Case("dense", "public", 4, z=True, D=True, MIMO_Out=True, N=N, ends=(128,))
    x, dout = contract.make(case, G, heads)
    wide = x | {name: x[name].repeat_interleave(heads // G, 3) for name in "QK"}
    leaves = {name: value.clone().requires_grad_() for name, value in x.items()}
    contract.load(contract.ANGLES)
    mamba3_mimo = contract.load(contract.PUBLIC).mamba3_mimo
    options = {"chunk_size": CHUNK, "rotary_dim_divisor": 4, "dtype": torch.bfloat16}
    expected, printed = mamba3_mimo(**wide, **options), io.StringIO()  # compiles, before what is said counts
    with warnings.catch_warnings(record=True) as caught, contextlib.redirect_stdout(printed):
        warnings.simplefilter("always")
        out = mamba3_mimo(**leaves, **options)
    equal = torch.equal(out, expected)
    raised = ""
    try:
        out.backward(dout)
    except ValueError as error:
        raised = f"{type(error).__name__}: {error}"
    said = [*(str(one.message) for one in caught), *printed.getvalue().splitlines()]
    finite = not raised and all(bool(one.grad.isfinite().all()) for one in leaves.values())
    return {"said": said, "forward_equals_repeated": equal, "raised": raised, "gradients_finite": finite}


@contextlib.contextmanager
def kept_symbols(contract):
    """Make a symbol of one name once, so that TileLang finds the kernel that it traced before."""
    language = contract.load(f"{contract.PUBLIC}_bwd").T
    original = language.dynamic
    language.dynamic = functools.cache(original)
    try:
        yield
    finally:
        language.dynamic = original


def speed(contract, G):
    """Time the backward wrapper for G groups."""
    import torch

    case = contract.Case("dense", "wrapper", 4, z=True, D=True, MIMO_Out=True, N=N, ends=(S,))
    x, dout = contract.make(case, G, H)
    seconds = []
    try:
        for _ in range(4):
            torch.cuda.synchronize()
            start = time.perf_counter()
            contract.call(case, x, dout)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - start)
        with kept_symbols(contract):
            milliseconds = timed(lambda: contract.call(case, x, dout))
    except ValueError as error:
        return {"raised": f"{type(error).__name__}: {error}"}
    rate = TERA_OPERATIONS / (milliseconds["median"] / 1e3)
    spread = TERA_OPERATIONS * 1e3 * (1 / milliseconds["low"] - 1 / milliseconds["high"])
    return {"call_ms": min(seconds[1:]) * 1e3, "milliseconds": milliseconds, "tflops": rate, "tflops_spread": spread}


def compile_one(left_out, G):
    """Compile one kernel into the cache on disk, in a process of its own; the other kernel is left out."""
    import contract

    case = contract.Case("dense", "wrapper", 4, z=True, D=True, MIMO_Out=True, N=N, ends=(S,))
    setattr(contract.load(f"{contract.PUBLIC}_bwd"), left_out, lambda *_, **__: lambda *_: None)
    with contextlib.suppress(ValueError):
        contract.call(case, *contract.make(case, G, H))


def child(*, also_whole):
    """Measure the tree on the path."""
    import contract
    import torch

    jobs = itertools.product(("mamba_mimo_bwd_fwd", "mamba_mimo_bwd_bwd"), GROUPS)
    with ProcessPoolExecutor(6, multiprocessing.get_context("spawn"), max_tasks_per_child=1) as pool:
        list(pool.map(compile_one, *zip(*jobs, strict=True)))
    packages = ("torch", "triton", "tilelang", "apache-tvm-ffi")
    result = {
        "gpu": torch.cuda.get_device_name(),
        "versions": {name: importlib.metadata.version(name) for name in packages},
        "backward": {f"g{G}": speed(contract, G) for G in GROUPS},
    }
    if also_whole:
        result["mamba3_mimo"] = {f"g{G}_h{heads}": whole(contract, G, heads) for G, heads in ((2, 16), (8, H))}
    print(json.dumps(result))


def measure(name, tree):
    """Return what a child measures on one tree; the head's kernels are compiled for each shape, which takes long."""
    path = os.pathsep.join([str(Path(tree).resolve()), str(HERE), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-P", __file__, "--child", name]
    environment = os.environ | {"PYTHONPATH": path}
    answer = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(answer.splitlines()[-1])


def cell(one):
    """Write one measurement."""
    if "raised" in one:
        return one["raised"]
    text = "{median:.2f} ms ({low:.2f} to {high:.2f})".format(**one["milliseconds"])
    return f"{text}, {one['tflops']:.1f} TFLOP/s; the call {one['call_ms']:.0f} ms"


def table(result):
    """Write the speeds as a Markdown table: a row for each number of groups, a column for each tree."""
    trees = [name for name in TREES if name in result]
    lines = [f"| groups | {' | '.join(trees)} |", "| --- |" + " --- |" * len(trees)]
    rows = ([f"{G}", *(cell(result[name]["backward"][f"g{G}"]) for name in trees)] for G in GROUPS)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


def main():
    """Measure both trees and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pristine", help="the unpacked release")
    parser.add_argument("--patched", help="the same with fix.patch")
    parser.add_argument("--output", type=Path, default=HERE / "data" / "speed.json")
    parser.add_argument("--head", help="the default branch, at the commit of pack.toml")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(also_whole=arguments.child != "head")
        return
    trees = {name: getattr(arguments, name) for name in TREES if getattr(arguments, name)}
    shape = {"B": B, "S": S, "H": H, "P": P, "N": N, "R": F // CHUNK, "chunk": CHUNK}
    result = {"shape": shape, "tera_operations": TERA_OPERATIONS}
    result |= {name: measure(name, tree) for name, tree in trees.items()}
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    arguments.output.write_text(json.dumps(result, indent=1) + "\n")
    arguments.output.with_suffix(".md").write_text(table(result))


if __name__ == "__main__":
    main()
