"""What tilelang and nvcc make of the SparseMLA backward on sm_90a, by threads and tilelang version. Never judged.

    python measure_lowering.py --release FOLDER --float32 FOLDER --dependencies FOLDER...

No GPU is needed, nvcc is. The trees are the release, and the release with data/variant_float32_buffers.patch. A folder
of dependencies has one tilelang. Each cell is lowered at top-k 512 in a process of its own. Writes data/lowering.json
and data/lowering.md.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

DATA = Path(__file__).parent / "data"
RESOURCES = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}
#: Heads and threads of the release's kernel with the pinned tilelang.
PINNED, SHAPES = "0.1.8", ((64, 128), (64, 256), (16, 128), (16, 256))


def lower(heads, threads):
    """Lower the kernel of the tree on the path and compile it; return the figures, or the error."""
    import tilelang
    from megatron.core.transformer.experimental_attention_variant.ops import tilelang_sparse_mla_bwd as backward

    options = {getattr(name, "value", name): value for name, value in backward.bwd.pass_configs.items()}
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c")
    try:
        program = backward.bwd.get_tir(heads, 512, 64, 512, 1, 576**-0.5, threads=threads)
        with tilelang.tvm.transform.PassContext(opt_level=3, config=options), target:
            lowered = tilelang.lower(program, target=target, enable_device_compile=False)
    except (AssertionError, RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[-1]}"}
    return compiled(lowered.kernel_source)


def compiled(source):
    """Compile a CUDA source to a cubin as tilelang does; return what ptxas says of it."""
    from tilelang import env

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(source)
        command = [f"{env.CUDA_HOME}/bin/nvcc", "-cubin", "-O3", "-arch=sm_90a", "-std=c++17", "-Xptxas=-v", "-w"]
        command += [f"-I{env.TILELANG_TEMPLATE_PATH}", f"-I{env.CUTLASS_INCLUDE_DIR}", "-o", f"{file}bin", file]
        output = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return {name: int(re.search(pattern, output)[1]) for name, pattern in RESOURCES.items()}


def in_child(tree, site, shape):
    """Lower one cell in a process of its own."""
    command = [sys.executable, __file__, "--shape", *map(str, shape)]
    environment = {**os.environ, "PYTHONPATH": f"{tree}{os.pathsep}{site}"}
    child = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(child.stdout.splitlines()[-1])


def tilelang_of(site):
    """Return the version of tilelang in a folder of dependencies."""
    (folder,) = site.glob("tilelang-*.dist-info")
    return folder.name.removeprefix("tilelang-").removesuffix(".dist-info")


def table(cells):
    """Markdown: a row per cell."""
    lines = ["| kernel | registers | spills, stored / loaded |", "| --- | --- | --- |"]
    for name, cell in cells.items():
        spills = f"{cell['spill_stores']} / {cell['spill_loads']} B" if "registers" in cell else ""
        registers = cell.get("registers", f"not lowered: `{cell.get('error')}`")
        lines.append(f"| {name} | {registers} | {spills} |")
    return "\n".join(lines) + "\n"


def main():
    """Lower every cell, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--release", type=Path)
    parser.add_argument("--float32", type=Path)
    parser.add_argument("--dependencies", type=Path, nargs="+", default=[])
    arguments = parser.parse_args()
    if arguments.shape:
        print(json.dumps(lower(*arguments.shape)))
        return
    sites = {tilelang_of(site): site for site in arguments.dependencies}
    cells = {}
    for heads, threads in SHAPES:
        cell = in_child(arguments.release, sites[PINNED], (heads, threads))
        cells[f"release, {heads} heads, {threads} threads"] = cell
    for version, site in sites.items():
        cells[f"float32 buffers, tilelang {version}"] = in_child(arguments.float32, site, SHAPES[0])
    (DATA / "lowering.json").write_text(json.dumps(cells, indent=1) + "\n")
    (DATA / "lowering.md").write_text(table(cells))


if __name__ == "__main__":
    main()
