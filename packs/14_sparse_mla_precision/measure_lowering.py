"""What tilelang and nvcc make of the SparseMLA backward, by tilelang version, architecture and change. Never judged.

    python measure_lowering.py --release FOLDER --tree NAME=FOLDER... --dependencies FOLDER... [--targets ...]

No GPU is needed, nvcc is. --dependencies names merged dependency sets of pack.toml; the trees are the release, the
release with fix.patch, and the release with data/variant_NAME.patch. A cell is the backward kernel of one tree,
lowered at top-k 512 by one tilelang for one architecture, in a process of its own. The committed `patched` is
data/variant_both_subjects.patch. Results go to data/lowering.json
as they come, and cells that are there already are not run again; then data/lowering.md is written anew from them.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent
CELL = ("tree", "tilelang", "target", "heads", "options")
RESOURCES = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


def measure(folder, cell):
    """Lower the kernel, compile it, and return what is known of it. Runs in a child."""
    import reference as ref  # imports torch, which the parent does not need
    import tilelang

    _, backward = ref.load(cell["tree"], folder)
    sizes = (cell["heads"], ref.VALUES, ref.WIDTH - ref.VALUES, 512, 1, ref.SCALE)
    options = {getattr(name, "value", name): value for name, value in backward.bwd.pass_configs.items()}
    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": cell["target"]}, host="c")
    try:
        program = backward.bwd.get_tir(*sizes, **cell["options"])
        with tilelang.tvm.transform.PassContext(opt_level=3, config=options), arch:
            lowered = tilelang.lower(program, target=arch, enable_device_compile=False)
    except (AssertionError, RuntimeError, ValueError) as error:
        return {"lowers": False, "error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
    shared = re.search(r'"dyn_shared_memory_buf": (\d+)', lowered.device_mod.script())
    return {"lowers": True, "shared_bytes": int(shared[1]), **compiled(lowered.kernel_source, cell["target"])}


def compiled(source, target):
    """Compile the source to a cubin as tilelang does, and read what ptxas says of it."""
    from tilelang import env

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(source)
        command = [f"{env.CUDA_HOME}/bin/nvcc", "-cubin", "-O3", f"-arch={target}", "-std=c++17", "-Xptxas=-v", "-w"]
        command += [f"-I{env.TILELANG_TEMPLATE_PATH}", f"-I{env.CUTLASS_INCLUDE_DIR}", "-o", f"{file}bin", file]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line.split(": ", 1)[-1] for line in done.stderr.splitlines() if "error:" in line]
        return {"compiles": False, "error": errors[0].replace(folder, "")}
    found = {name: re.search(pattern, done.stderr) for name, pattern in RESOURCES.items()}
    return {"compiles": True, **{name: int(match[1]) for name, match in found.items() if match}}


def run_child(cell, folder, path):
    """Run one cell in a process of its own; a crash is a result too."""
    command = [sys.executable, __file__, "--cell", json.dumps([str(folder), cell])]
    environment = {**os.environ, "PYTHONPATH": path}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if lines:
        return json.loads(lines[-1].removeprefix("RESULT "))
    last = (done.stderr.strip().splitlines() or [""])[-1]
    return {"lowers": False, "error": f"exit status {done.returncode}: {last}"}


def table(cells):
    """Markdown: a row per cell, and the errors once below it."""
    errors = {}
    lines = ["| tree | tilelang | target | heads | registers | spills, stored / loaded | shared memory |"]
    lines.append("|" + " --- |" * 7)
    for cell in cells:
        options, result = ", ".join(f"{name}={value}" for name, value in cell["options"].items()), cell["result"]
        name = f"{cell['tree']}, {options}" if options else cell["tree"]
        line = f"| {name} | {cell['tilelang']} | {cell['target']} | {cell['heads']} |"
        if result.get("compiles"):
            spills = f"{result['spill_stores']} / {result['spill_loads']} B"
            lines.append(f"{line} {result['registers']} | {spills} | {result['shared_bytes']} B |")
        else:
            number = errors.setdefault(result["error"], len(errors) + 1)
            lines.append(f"{line} not {'compiled' if result['lowers'] else 'lowered'}: error {number} | | |")
    return "\n".join([*lines, "", *(f"{number}. `{error}`" for error, number in errors.items())]) + "\n"


def cells(arguments):
    """List the cells that are asked for, with the dependency set of each."""
    for site in arguments.dependencies:
        (version,) = (re.fullmatch(r"tilelang-(.*)\.dist-info", x.name)[1] for x in site.glob("tilelang-*.dist-info"))
        for target in arguments.targets.split(","):
            for heads in map(int, arguments.heads.split(",")):
                for tree in arguments.tree:
                    values = tree.split("=", 1)[0], version, target, heads, json.loads(arguments.options)
                    yield dict(zip(CELL, values, strict=True)), site


def main():
    """Run what is missing, one cell after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cell", type=json.loads, help=argparse.SUPPRESS)
    parser.add_argument("--release", type=Path, help="the unpacked release; its megatron.core serves all trees")
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--dependencies", type=Path, nargs="*", default=[], help="merged dependency sets")
    parser.add_argument("--targets", default="sm_90a", help="architectures, separated by commas")
    parser.add_argument("--heads", default="64", help="numbers of heads, separated by commas")
    parser.add_argument("--options", default="{}", help="options of the kernel, as JSON")
    arguments = parser.parse_args()
    if arguments.cell:
        print("RESULT", json.dumps(measure(*arguments.cell)))
        return
    folders = dict(tree.split("=", 1) for tree in arguments.tree)
    output, document = HERE / "data" / "lowering.json", {"nvcc": "", "cells": []}
    if output.exists():
        document = json.loads(output.read_text())
    release = subprocess.run(["nvcc", "--version"], capture_output=True, text=True, check=True).stdout
    document["nvcc"] = re.search(r"release \S+, V(\S+)", release)[1]
    for cell, site in cells(arguments):
        if all({name: old[name] for name in CELL} != cell for old in document["cells"]):
            result = run_child(cell, folders[cell["tree"]], os.pathsep.join((str(arguments.release), str(site))))
            document["cells"].append({**cell, "result": result})
            output.write_text(json.dumps(document, indent=1) + "\n")
            print(cell, result, flush=True)
    output.with_suffix(".md").write_text(table(document["cells"]))


if __name__ == "__main__":
    main()
