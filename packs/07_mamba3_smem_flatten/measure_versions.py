"""What tilelang and nvcc make of both kernels, by tilelang version, architecture and compile options. Never judged.

    python measure_versions.py --tree pristine=FOLDER --tree patched=FOLDER --dependencies FOLDER... [--targets ...]

--dependencies names merged dependency sets of pack.toml. No GPU is needed, nvcc is. A cell is one kernel of one tree,
lowered by one tilelang for one architecture at the sizes of contract.py; it runs in a process of its own, and takes
a minute or more. Results go to data/versions.json as they come, and cells that are there already are not run again;
at the end data/versions.md is written anew from them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import contract

HERE = Path(__file__).parent
OPTIONS = {"off": (True, True), "TMA": (False, True), "TMA+WS": (False, False)}  # what is disabled: TMA lowering, WS
EXAMPLE = contract.EXAMPLE
RESOURCES = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


def measure(kernel, target, options):
    """Lower one kernel, compile it, and return what is known of it. Runs in a child."""
    module = contract.load()
    tilelang = module.tilelang
    arguments, _ = contract.example(EXAMPLE, "cpu")
    args, kwargs, _ = contract.requested(module, [arguments])[0][kernel]
    function = getattr(module, f"mamba_mimo_{kernel}")
    no_tma, no_specialisation = OPTIONS[options]
    key = tilelang.PassConfigKey
    configs = {**function.pass_configs, key.TL_DISABLE_TMA_LOWER: no_tma}
    configs[key.TL_DISABLE_WARP_SPECIALIZED] = no_specialisation
    configs = {getattr(name, "value", name): value for name, value in configs.items()}
    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    program = function.get_tir(*args, **kwargs)
    try:
        with tilelang.tvm.transform.PassContext(opt_level=3, config=configs), arch:
            lowered = tilelang.lower(program, target=arch, enable_device_compile=False)
    except RuntimeError as error:
        return {"lowers": False, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
    source = lowered.kernel_source
    shared = [int(size) for size in re.findall(r'"dyn_shared_memory_buf": (\d+)', lowered.device_mod.script())]
    counts = {f"tma_{way}": len(re.findall(rf"\btl::tma_{way}\b", source)) for way in ("load", "store")}
    return {"lowers": True, **counts, "dynamic_shared_bytes": max(shared, default=None), **compiled(source, target)}


def compiled(source, target):
    """Compile the source to a cubin as tilelang does, and read what ptxas says of it."""
    from tilelang import env

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(source)
        command = [f"{env.CUDA_HOME}/bin/nvcc", "-cubin", "-O3", f"-arch={target}", "-std=c++17", "--use_fast_math"]
        command += ["-Xptxas=-v", "-w", f"-I{env.TILELANG_TEMPLATE_PATH}", f"-I{env.CUTLASS_INCLUDE_DIR}"]
        done = subprocess.run([*command, "-o", f"{file}bin", file], capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line.split(": ", 1)[-1] for line in done.stderr.splitlines() if ": error" in line or "error:" in line]
        return {"compiles": False, "error": errors[0].replace(folder, "")}
    found = {name: re.search(pattern, done.stderr) for name, pattern in RESOURCES.items()}
    return {"compiles": True, **{name: int(match[1]) if match else None for name, match in found.items()}}


def run_child(cell, trees, site):
    """Run one cell in a process of its own; a crash is a result too."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (trees[cell["tree"]], site, HERE.parents[1])))}
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return json.loads(lines[-1].removeprefix("RESULT "))
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {"lowers": False, "error": f"exit status {done.returncode}: {last}"}


def text(result, errors):
    """One cell of the table; its error is added to `errors`, and stands below the table once."""
    error = "" if result.get("compiles") else f"error {errors.setdefault(result['error'], len(errors) + 1)}"
    if not result["lowers"]:
        return f"not lowered, {error}"
    counts = f"{result['tma_load']} / {result['tma_store']}"
    if not result["compiles"]:
        return f"{counts}; not compiled, {error}"
    spills = f"{result['spill_stores']} / {result['spill_loads']}"
    return f"{counts}; {result['registers']} reg, spills {spills} B, {result['dynamic_shared_bytes']} B shared"


def table(cells):
    """Markdown: one table per kernel; a row per tilelang, architecture and options, a column per tree."""
    errors, lines, trees = {}, [], list(dict.fromkeys(cell["tree"] for cell in cells))
    for kernel in sorted({cell["kernel"] for cell in cells}, reverse=True):
        lines += [f"`mamba_mimo_{kernel}`:", "", f"| tilelang | target | options | {' | '.join(trees)} |"]
        lines.append("|" + " --- |" * (3 + len(trees)))
        rows = {}
        for cell in (cell for cell in cells if cell["kernel"] == kernel):
            key = (tuple(map(int, cell["tilelang"].split("."))), cell["tilelang"], cell["target"], cell["options"])
            rows.setdefault(key, {})[cell["tree"]] = text(cell["result"], errors)
        for key in sorted(rows, key=lambda key: (key[0], len(key[2]), key[2], list(OPTIONS).index(key[3]))):
            found = [rows[key].get(tree, "not measured") for tree in trees]
            lines.append(f"| {' | '.join((*key[1:], *found))} |")
        lines.append("")
    return "\n".join([*lines, *(f"{number}. `{error}`" for error, number in errors.items())]) + "\n"


def main():
    """Run what is missing, one cell after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER", help="an unpacked release")
    parser.add_argument("--dependencies", type=Path, nargs="*", default=[], help="merged dependency sets")
    parser.add_argument("--targets", default="sm_90a", help="architectures, separated by commas")
    parser.add_argument("--options", default="TMA+WS", help=f"some of {', '.join(OPTIONS)}, separated by commas")
    parser.add_argument("--output", type=Path, default=HERE / "data" / "versions.json")
    arguments = parser.parse_args()
    if arguments.cell:
        cell = json.loads(arguments.cell)
        print("RESULT", json.dumps(measure(cell["kernel"], cell["target"], cell["options"])))
        return
    document = {"nvcc": "", "sizes": {}, "cells": []}
    if arguments.output.exists():
        document = json.loads(arguments.output.read_text())
    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    document["nvcc"] = re.search(r"release \S+, V(\S+)", release)[1]
    build = contract.BUILDS[EXAMPLE.build]
    sizes = {"N": build.N, "P": build.P, "R": build.R, "chunk": build.chunk}
    document["sizes"] = sizes
    trees = dict(tree.split("=", 1) for tree in arguments.tree)
    for site in arguments.dependencies:
        (version,) = (path.name.split("-")[1].removesuffix(".dist") for path in site.glob("tilelang-*.dist-info"))
        for target in arguments.targets.split(","):
            for options in arguments.options.split(","):
                for tree in trees:
                    for kernel in contract.KERNELS:
                        cell = {"kernel": kernel, "tilelang": version.removesuffix(".dist-info")}
                        cell |= {"target": target, "options": options, "tree": tree}
                        if any({**old, "result": 0} == {**cell, "result": 0} for old in document["cells"]):
                            continue
                        document["cells"].append({**cell, "result": run_child(cell, trees, site)})
                        arguments.output.write_text(json.dumps(document, indent=1) + "\n")
                        print(cell, document["cells"][-1]["result"], flush=True)
    arguments.output.with_suffix(".md").write_text(table(document["cells"]))


if __name__ == "__main__":
    main()
