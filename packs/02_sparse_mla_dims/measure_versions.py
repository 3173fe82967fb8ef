"""The sparse-MLA kernels by tilelang release: launched, and compared with float64. Measured, never judged.

    python measure_versions.py --tree NAME=FOLDER... --set VERSION=FOLDER... --work FOLDER

Needs a GPU. A set is the merged folder of one of pack.toml's dependency sets; a tree is the release, or the release
with the dimensions passed on: `unsynchronized` with the kernels of fix.patch, and `patched` with T.sync_threads()
besides, before the forward stores the probabilities of fewer than 64 heads. Each pair is measured by
measure_dims.py, several at once, into a file of its own in --work; a run that was cut off goes on from these. Then
data/versions.md has a row for each tree, shape and kernel.
"""

import argparse
import concurrent.futures
import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
SHAPES = [*itertools.product((64,), (64,), (16, 32, 64)), (192, 32, 16), (192, 32, 64), (128, 128, 16)]
RELEASED = [(512, 64, 16), (512, 64, 32), (512, 64, 64)]  # the release's forward asserts powers of two


def measure(target, work, tree, version, folders):
    """Measure one tree with one set; return its cells."""
    output = work / f"{tree}-{version}.json"
    shapes = RELEASED if tree == "pristine" else SHAPES + RELEASED
    command = [sys.executable, str(HERE / "measure_dims.py"), "--run", "--target", target, "--workers", "4"]
    command += [f"--only={','.join(map(str, shape))}" for shape in shapes]
    settings = {"PYTHONPATH": os.pathsep.join(folders), "TILELANG_CACHE_DIR": str(work / f"{tree}-{version}")}
    with (work / f"{tree}-{version}.log").open("w") as log:
        command += ["--output", str(output)]
        subprocess.run(command, env=os.environ | settings, stdout=log, stderr=log, check=True)
    return [{"tree": tree, "tilelang": version, **cell} for cell in json.loads(output.read_text())["cells"]]


def seen(cell):
    """Say what became of one kernel."""
    result = cell["result"]
    errors = result.get("relative_errors")
    return f"{result['stage']} ({max(errors.values()):.4f})" if errors else result["stage"]


def table(cells):
    """Markdown: a row per tree, shape and kernel; a column per tilelang release."""
    versions = list(dict.fromkeys(cell["tilelang"] for cell in cells))
    rows = {}
    for cell in cells:
        rows.setdefault((cell["tree"], *cell["shape"], cell["direction"]), {})[cell["tilelang"]] = seen(cell)
    lines = [
        f"| tree | latent + RoPE | heads | kernel | {' | '.join(versions)} |",
        "|" + " --- |" * (4 + len(versions)),
    ]
    for (tree, dim, tail, heads, direction), found in sorted(rows.items()):
        shown = " | ".join(found.get(version, "not measured") for version in versions)
        lines.append(f"| {tree} | {dim}+{tail} | {heads} | {direction} | {shown} |")
    return "\n".join(lines) + "\n"


def main():
    """Measure every pair, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--set", action="append", default=[], dest="sets", metavar="VERSION=FOLDER")
    parser.add_argument("--target", default="sm_90a", help="this host's GPU")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=HERE / "data")
    arguments = parser.parse_args()
    trees, sets = ([pair.split("=", 1) for pair in pairs] for pairs in (arguments.tree, arguments.sets))
    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = [
            pool.submit(measure, arguments.target, arguments.work, tree, version, (folder, dependencies))
            for (tree, folder), (version, dependencies) in itertools.product(trees, sets)
        ]
    cells = [cell for future in futures for cell in future.result()]
    (arguments.data / "versions.md").write_text(table(cells))


if __name__ == "__main__":
    main()
