"""Which dimensions tilelang lowers the sparse-MLA kernels for, and the shared memory that they take. Never judged.

    PYTHONPATH=TREE:DEPENDENCIES python measure_dims.py [TARGET]

No GPU is needed. TREE is the release with fix.patch, whose forward asserts no powers of two. The jit functions are
asked, and not the interfaces, which refuse what the guard refuses. Writes data/dims.md.
"""

import importlib
import importlib.util
import multiprocessing
import re
import sys
from pathlib import Path

OPERATORS = "megatron.core.transformer.experimental_attention_variant.ops"
ALLOWED = (512, 64, 64), (64, 64, 16), (192, 32, 64), (320, 32, 32)  # latent and RoPE dimension, heads
DECLINED = (96, 32, 16), (64, 48, 64), (64, 16, 16), (64, 0, 16), (32, 32, 16), (80, 64, 16)


def kernel(way, shape):
    """Return a jit function, and the arguments that upstream's interface gives it."""
    for name in ("megatron.core", "megatron.core.transformer"):  # found, not executed: that would take seconds
        sys.modules.setdefault(name, importlib.util.module_from_spec(importlib.util.find_spec(name)))
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils, which imports it in a circle
    module = importlib.import_module(f"{OPERATORS}.tilelang_sparse_mla_{way}")
    names = ("heads", "dim", "tail_dim") if way == "fwd" else ("H", "D", "D_tail")
    latent, rope, heads = shape
    sizes = dict(zip(names, (heads, latent, rope), strict=True)) | {"topk": 128, "kv_group": 1, "sm_scale": 0.1}
    if way == "fwd":
        return module.sparse_mla_fwd, {**sizes, "block_I": 64}
    return module.bwd, {**sizes, "max_block_h": 32}


def lowered(shape, way, target):
    """Lower a kernel; return its bytes of shared memory, or the line of the error that says why it is not lowered."""
    import tilelang

    function, arguments = kernel(way, shape)
    options = {getattr(key, "value", key): value for key, value in (function.pass_configs or {}).items()}
    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    try:
        with tilelang.tvm.transform.PassContext(opt_level=3, config=options), arch:
            program = tilelang.lower(function.get_tir(**arguments), target=arch, enable_device_compile=False)
    except Exception as error:  # whatever tilelang raises is the result
        lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
        wanted = [line for line in lines if re.search(r"error|must|cannot|failed", line, re.IGNORECASE)] or lines
        return f"not lowered: `{type(error).__name__}: {wanted[-1][:160]}`"
    return re.search(r'"dyn_shared_memory_buf": (\d+)', program.device_mod.script())[1] + " B"


def main(target="sm_90a"):
    """Lower each kernel in a process of its own, and write the table."""
    shapes = [*ALLOWED, *DECLINED]
    cells = [(shape, way, target) for shape in shapes for way in ("fwd", "bwd")]
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        found = pool.starmap(lowered, cells, chunksize=1)
    lines = ["| latent + RoPE | heads | forward | backward |", "|" + " --- |" * 4]
    for (latent, rope, heads), forward, backward in zip(shapes, found[::2], found[1::2], strict=True):
        lines.append(f"| {latent} + {rope} | {heads} | {forward} | {backward} |")
    Path(__file__).with_name("data").joinpath("dims.md").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
