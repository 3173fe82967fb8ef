"""The example of the probe with jit_fuser on and inductor behind it, as users run it, tree by tree. Never judged.

    python measure_compiled.py pristine=TREE patched=PATCHED_TREE --output data/compiled.json

Each tree has a child process of its own, on the CPU, which forks the probe's four ranks. The numbers are norms of the
difference from float64 over norms of what float64 gives.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import types
import unittest.mock
from pathlib import Path

import reproduce

DTYPES = ("float32", "float16", "bfloat16")
SECONDS = 500


def measure():
    """Print the errors of the tree on the path."""
    import torch

    torch.set_num_threads(1)
    reproduce.SECONDS = SECONDS
    silent = unittest.mock.Mock()  # nothing is said to a runner
    doors = reproduce.load(silent, torch)
    shapes = {count: (63, 2, 1024 // count) for count in (1, 2, 4)}
    cases = {
        f"{dtype}.{count}": reproduce.Case(
            torch, dtype, count, shape, "any", "mean", "normal", "linear", "function", hidden=32
        )
        for dtype in DTYPES
        for count, shape in shapes.items()
    }
    jobs = [(name, case["ranks"], reproduce.both, case) for name, case in cases.items()]
    work = types.SimpleNamespace(doors=doors, tested=[], jobs=jobs, fuser=torch.compile)
    with tempfile.TemporaryDirectory() as folder, reproduce.ranks(work, reproduce.RANKS, folder) as wait:
        results = wait()
    found = {}
    for name, case in cases.items():
        mine = [each[name] for each in results if name in each]
        errors = reproduce.judge_case(mine, silent, name, case, "fused")[1]["measured"]
        dtype, _, count = name.partition(".")
        kept = {key: errors[key] for key in ("loss", "gradient", "dX", "dW") if key in errors}
        found.setdefault(dtype, {})[f"ranks_{count}"] = kept
    print(json.dumps(found))


def main():
    """Parse the arguments, ask a child for each tree, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="NAME=TREE")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    if not arguments.trees:
        measure()
        return
    result = {}
    for tree in arguments.trees:
        name, _, source = tree.partition("=")
        paths = os.pathsep.join(filter(None, (str(Path(source).resolve()), os.environ.get("PYTHONPATH"))))
        with tempfile.TemporaryDirectory() as cache:
            environment = dict(os.environ, PYTHONPATH=paths, CUDA_VISIBLE_DEVICES="", TORCHINDUCTOR_CACHE_DIR=cache)
            environment["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
            child = subprocess.run(
                [sys.executable, "-B", __file__], env=environment, capture_output=True, text=True, check=True
            )
        result[name] = json.loads(child.stdout.splitlines()[-1])
    text = json.dumps(result, indent=2) + "\n"
    if arguments.output:
        arguments.output.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
