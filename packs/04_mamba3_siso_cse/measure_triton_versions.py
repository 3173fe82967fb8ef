"""Compile the kernel of both trees with many Triton releases: what the compiler leaves of the three products.

Nothing here is judged. Each (release, tree, target) is compiled in a process of its own, with no GPU and an empty
cache, by the functions of contract.py and in its pinned configuration. Needed are the two trees (the unpacked sdist,
and a copy with fix.patch applied), the dependencies of pack.toml as one folder, and Triton's wheels for this Python:

    python measure_triton_versions.py PRISTINE PATCHED --dependencies DIR --wheels DIR

Written are data/triton_versions.json (everything), data/triton_versions.md (one row per release) and data/targets.md
(one row per target and mode, with the release that the receipts were made with). Seven releases take twelve minutes.
"""

import argparse
import contextlib
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
TARGETS = ("sm_80", "sm_90a", "sm_100a", "sm_120a")
MODES = ("RECOMPUTE_MASK=False", "RECOMPUTE_MASK=True")
RECEIPTS = "3.6.0"  # the Triton that the receipts were made with
MMA = ("mma.sync", "wgmma.mma_async", "tcgen05.mma")  # PTX
USED = re.compile(
    r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?Used (\d+) registers", re.DOTALL
)


def one(target):
    """Compile for one target with the Triton that is on the path; print one JSON object as the last line."""
    os.environ |= {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_DUMP_PTXAS_LOG": "1", "REPRODUCER_TARGET": target}
    import contract
    import torch
    import triton

    torch.set_num_threads(1)
    with tempfile.TemporaryFile("w+") as log, contextlib.redirect_stdout(log):
        found = contract.compiled(target)
        log.seek(0)
        used = USED.findall(log.read())
    result = {"triton": triton.__version__, "torch": torch.__version__}
    for (mode, emitted), (stack, stores, loads, registers) in zip(found.items(), used, strict=True):
        left, assembly = emitted["left"], emitted["assembly"]
        result[mode] = {
            "products": emitted["products"],
            "products after CSE": left["products"],
            "dots": emitted["dots"],
            "dots after CSE": left["dots"],
            "MMA instructions": sum(map(assembly["ptx"].count, MMA)),
            "registers": int(registers),
            "stack frame": int(stack),
            "spill stores": int(stores),
            "spill loads": int(loads),
            "shared memory": emitted["shared"],
            "cubin": hashlib.sha256(assembly["cubin"]).hexdigest(),
        }
    print(json.dumps(result))


def compile_in_child(target, paths):
    """Return what `one` printed, or the last line of its error."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON")}
        environment |= {"PYTHONPATH": os.pathsep.join(map(str, paths)), "TRITON_CACHE_DIR": cache}
        command = [sys.executable, "-P", __file__, "--one", target]
        done = subprocess.run(command, env=environment, capture_output=True, check=False, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["no message"])[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def measure(arguments):
    """Compile everything; return results by release, target and tree."""
    trees = {"pristine": arguments.pristine, "patched": arguments.patched}
    tag = f"cp{sys.version_info.major}{sys.version_info.minor}-"
    results = {}
    for wheel in sorted(arguments.wheels.glob(f"triton-*{tag}*.whl")):
        version = wheel.name.split("-")[1]
        with tempfile.TemporaryDirectory() as site:
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(site)
            for tool in Path(site, "triton/backends/nvidia/bin").iterdir():
                tool.chmod(0o755)
            for target in TARGETS:
                for name, tree in trees.items():
                    paths = [tree.resolve(), site, arguments.dependencies.resolve(), HERE, HERE.parents[1]]
                    result = compile_in_child(target, paths)
                    results.setdefault(version, {}).setdefault(target, {})[name] = result
                    print(version, target, name, result.get("error", "compiled"), file=sys.stderr)
    return results


def version_table(results):
    """One row per release; a cell tells the products before and after CSE, and whether the machine code is the same."""
    lines = ["| Triton | mode | " + " | ".join(TARGETS) + " |", "| --- | --- |" + " --- |" * len(TARGETS)]
    for version, targets in results.items():
        lines += [
            f"| {version} | {mode} | " + " | ".join(_cell(targets[x], mode) for x in TARGETS) + " |" for mode in MODES
        ]
    return "\n".join(lines) + "\n"


def _cell(trees, mode):
    if errors := [f"{name}: {result['error']}" for name, result in trees.items() if "error" in result]:
        return "; ".join(errors).replace("|", "\\|")
    pristine, patched = (trees[name][mode] for name in ("pristine", "patched"))
    left = " / ".join(f"{x['products']} -> {x['products after CSE']}" for x in (pristine, patched))
    return f"{left}, {'same' if pristine['cubin'] == patched['cubin'] else 'DIFFERENT'} cubin"


def target_table(targets):
    """One row per target and mode with one release: pristine / patched."""
    columns = (
        "dots",
        "dots after CSE",
        "MMA instructions",
        "registers",
        "spill stores",
        "spill loads",
        "shared memory",
    )
    lines = ["| target | mode | " + " | ".join(columns) + " |", "| --- | --- |" + " --- |" * len(columns)]
    for target, trees in targets.items():
        for mode in MODES:
            pairs = [(trees["pristine"][mode][name], trees["patched"][mode][name]) for name in columns]
            lines.append(f"| {target} | {mode} | " + " | ".join(f"{a} / {b}" for a, b in pairs) + " |")
    return "\n".join(lines) + "\n"


def main():
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Compile both trees with many Triton releases.")
    parser.add_argument("pristine", type=Path, nargs="?")
    parser.add_argument("patched", type=Path, nargs="?")
    parser.add_argument("--dependencies", type=Path)
    parser.add_argument("--wheels", type=Path)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        one(arguments.one)
        return
    results, data = measure(arguments), HERE / "data"
    data.mkdir(exist_ok=True)
    found = {"receipts": RECEIPTS, "releases": results}
    (data / "triton_versions.json").write_text(json.dumps(found, indent=1) + "\n")
    (data / "triton_versions.md").write_text(version_table(results))
    (data / "targets.md").write_text(target_table(results[RECEIPTS]))


if __name__ == "__main__":
    main()
