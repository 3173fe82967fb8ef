"""Which dimensions the sparse-MLA kernels can have: lowered, compiled by nvcc, and run where there is a GPU.

    PYTHONPATH=PATCHED_TREE:COMPANIONS python measure_dims.py --target sm_90a [--run] [--workers N] [--seconds S]

Measured, never judged. A cell is a kernel (forward, backward) at a latent dimension, a RoPE dimension and a number of
heads. The kernel is built by the jit function itself, not by the interface, which refuses what it does not support;
the tree has fix.patch applied, since the release's forward asserts powers of two. Each cell runs in a process of its
own. Without --run it is lowered and compiled to a cubin for --target, and ptxas says registers and spills. With --run
it is compiled as tilelang does it, launched, and compared with float64. Results go to data/dims.json as they come,
and cells that are there already are not run again; --table writes data/dims.md and
data/dims.summary.json anew from them.
"""

import argparse
import concurrent.futures
import importlib
import importlib.util
import itertools
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).parent
OPERATORS = "megatron.core.transformer.experimental_attention_variant.ops"
ODD = (48, 16), (64, 16), (64, 48), (96, 32), (96, 64), (32, 32), (160, 64), (224, 64), (128, 16), (512, 16), (512, 48)
MORE = (80, 64), (128, 80), (576, 64), (512, 128), (64, 96), (128, 128), (256, 96), (448, 128), (384, 192), (512, 96)
SHAPES = [
    *itertools.product((64, 192, 512, 128, 256, 320, 384, 448), (64, 32), (64, 16)),
    *((*pair, heads) for pair in ODD for heads in (16, 64)),
    *((*pair, heads) for pair in MORE for heads in (64, 16)),
    *itertools.product((64, 192, 512), (32, 64), (32, 128)),
]
LENGTH, TOP_K, SCALE = 256, 128, 0.1
RIGHT = 0.01  # relative error in the Frobenius norm; operands and results in bf16 leave about 0.003
RESOURCES = {
    "registers": r"Used (\d+) registers",
    "spill_stores": r"(\d+) bytes spill stores",
    "spill_loads": r"(\d+) bytes spill loads",
}


def load():
    """Import the two modules of kernels; megatron.core itself is not executed, which would take seconds more."""
    for name in ("megatron.core", "megatron.core.transformer"):
        sys.modules.setdefault(name, importlib.util.module_from_spec(importlib.util.find_spec(name)))
    importlib.import_module("megatron.core.parallel_state")  # before megatron.core.utils, which imports it in a circle
    return [importlib.import_module(f"{OPERATORS}.tilelang_sparse_mla_{way}") for way in ("fwd", "bwd")]


def kernel(direction, dim, tail, heads):
    """Return the jit function of a kernel, and the arguments that upstream's interface would give it."""
    forward, backward = load()
    common = {"topk": TOP_K, "kv_group": 1, "sm_scale": SCALE}
    if direction == "forward":
        return forward.sparse_mla_fwd, {"heads": heads, "dim": dim, "tail_dim": tail, **common, "block_I": 64}
    return backward.bwd, {"H": heads, "D": dim, "D_tail": tail, **common, "max_block_h": 32}


def said(error):
    """Return the line of an error that says what is wrong."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [""]
    wanted = [line for line in lines if re.search(r"error|must|cannot|failed", line, re.IGNORECASE)] or lines
    return f"{type(error).__name__}: {re.sub(r'0x[0-9a-f]+', '0x..', wanted[-1])[:240]}"


def lowered(function, target, *sizes, **named):
    """Lower what a jit function makes of its arguments."""
    import tilelang

    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    configs = {getattr(key, "value", key): value for key, value in (function.pass_configs or {}).items()}
    with tilelang.tvm.transform.PassContext(opt_level=3, config=configs), arch:
        return tilelang.lower(function.get_tir(*sizes, **named), target=arch, enable_device_compile=False)


def compiled(direction, shape, target):
    """Lower a kernel, compile it to a cubin, and return what ptxas says of it."""
    import tilelang

    function, arguments = kernel(direction, *shape)
    try:
        program = lowered(function, target, **arguments)
    except Exception as error:  # whatever tilelang raises is the result
        return {"stage": "not lowered", "error": said(error)}
    shared = [int(size) for size in re.findall(r'"dyn_shared_memory_buf": (\d+)', program.device_mod.script())]
    result = {"stage": "compiled", "shared_bytes": max(shared, default=0)}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cu")
        file.write_text(program.kernel_source)
        command = [f"{tilelang.env.CUDA_HOME}/bin/nvcc", "-cubin", "-O3", f"-arch={target}", "-std=c++17", "-w"]
        command += ["--use_fast_math", "-Xptxas=-v", f"-I{tilelang.env.TILELANG_TEMPLATE_PATH}"]
        command += [f"-I{tilelang.env.CUTLASS_INCLUDE_DIR}", "-o", f"{file}bin", str(file)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        errors = [line.split(": ", 1)[-1] for line in done.stderr.splitlines() if "error" in line] or [""]
        return {**result, "stage": "not compiled", "error": errors[0].replace(folder, "")}
    found = {name: re.search(pattern, done.stderr) for name, pattern in RESOURCES.items()}
    return {**result, **{name: int(match[1]) for name, match in found.items() if match}}


def example(torch, dim, tail, heads):
    """Make q, kv, dO in bf16, indices (of the past, the rest -1), and what float64 makes of them."""
    random = torch.Generator("cuda").manual_seed(7)
    width = dim + tail

    def normal(*sizes):
        return torch.randn(1, LENGTH, *sizes, generator=random, device="cuda").to(torch.bfloat16)

    q, kv, d_out = normal(heads, width), normal(1, width), normal(heads, dim)
    scores = torch.rand(LENGTH, LENGTH, generator=random, device="cuda").tril().topk(TOP_K, dim=1)
    indices = scores.indices.masked_fill(scores.values == 0, -1)
    chosen = torch.zeros(LENGTH, LENGTH + 1, dtype=torch.bool, device="cuda").scatter(1, indices % (LENGTH + 1), True)
    exact_q, exact_kv = (x[0].double().requires_grad_() for x in (q, kv))
    logits = torch.einsum("shd,td->sht", exact_q, exact_kv[:, 0]) * SCALE
    logits = logits.masked_fill(~chosen[:, None, :LENGTH], -torch.inf)
    out = logits.softmax(-1) @ exact_kv[:, 0, :dim]
    gradients = torch.autograd.grad(out, (exact_q, exact_kv), d_out[0].double())
    lse = logits.logsumexp(-1).div(torch.log(torch.tensor(2.0))).float()[None]  # the kernel's is to the base of two
    indices = indices.to(torch.int32)[None, :, None].contiguous()
    delta = (out * d_out[0].double()).sum(-1).float()[None]
    return (q, kv, d_out, indices, lse.detach(), delta.detach()), (out.detach(), *gradients)


def executed(direction, shape, _):
    """Compile, launch and compare a kernel on the GPU."""
    import torch

    function, arguments = kernel(direction, *shape)
    try:
        run = function(**arguments)
    except Exception as error:  # whatever tilelang raises is the result
        nvcc = type(error) is RuntimeError  # tilelang's own errors are subclasses, or others
        return {"stage": "not compiled" if nvcc else "not lowered", "error": said(error)}
    (q, kv, d_out, indices, lse, delta), (out, dq, dkv) = example(torch, *shape)
    errors = {}
    try:
        if direction == "forward":
            got = {"out": (run(q, kv, indices)[0], out)}
        else:
            buffer = torch.zeros_like(kv, dtype=torch.float32)
            got = {"dq": (run(q, kv, d_out, indices, lse, delta, buffer), dq), "dkv": (buffer, dkv)}
        torch.cuda.synchronize()
    except Exception as error:
        return {"stage": "not launched", "error": said(error)}
    for name, (mine, exact) in got.items():
        errors[name] = float((mine[0].double() - exact).norm() / exact.norm())
    right = all(error <= RIGHT for error in errors.values())
    return {"stage": "right" if right else "wrong numbers", "relative_errors": errors}


def child(sender, evidence, cell):
    """Send what one cell gives."""
    sender.send({"compiled": compiled, "executed": executed}[evidence](*cell))


def alone(evidence, cell, seconds):
    """Run one cell in a process of its own, in which nothing has touched the GPU yet; a crash is a result too."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed.tensor"])
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=child, args=(sender, evidence, cell))
    process.start()
    sender.close()
    try:
        result = receiver.recv() if receiver.poll(seconds) else {"stage": "not finished", "error": f"{seconds} s"}
    except EOFError:
        process.join()
        result = {"stage": "crashed", "error": f"exit status {process.exitcode}"}
    process.kill()
    process.join()
    return result


def text(cells, way, shape, errors):
    """One cell of the table; an error is added to `errors`, and stands below the table once."""
    parts = []
    found = [cell for cell in cells if [*shape] == cell["shape"] and cell["direction"] == way]
    for cell in sorted(found, key=lambda cell: (cell["evidence"] != "executed", cell["target"])):
        result, stage = cell["result"], cell["result"]["stage"]
        where = "" if cell["evidence"] == "executed" else f"{cell['target']} "
        if "error" in result:
            parts.append(f"{where}{stage}, error {errors.setdefault(result['error'], len(errors) + 1)}")
        elif cell["evidence"] == "executed":
            parts.append(f"{stage} ({max(result['relative_errors'].values()):.4f})")
        else:
            spills = f"{result['spill_stores']} / {result['spill_loads']}"
            parts.append(f"{where}{result['registers']} reg, spills {spills} B, {result['shared_bytes']} B shared")
    return "; ".join(parts) or "not measured"


def table(cells):
    """Markdown: a row per shape, then the errors."""
    shapes, errors = sorted({tuple(cell["shape"]) for cell in cells}), {}
    lines = ["| latent + RoPE | heads | forward | backward |", "|" + " --- |" * 4]
    for dim, tail, heads in shapes:
        forward, backward = (text(cells, way, (dim, tail, heads), errors) for way in ("forward", "backward"))
        lines.append(f"| {dim}+{tail} | {heads} | {forward} | {backward} |")
    return "\n".join([*lines, "", *(f"{number}. `{error}`" for error, number in errors.items())]) + "\n"


def summary(cells):
    """Count what became of the kernels that the rule lets in (multiples of 64 and of 32), and of the others."""
    counts = {}
    for cell in cells:
        dim, tail, _ = cell["shape"]
        rule = "inside" if dim % 64 == 0 and tail % 32 == 0 else "outside"
        name = f"{rule} {cell['evidence']} {cell['result']['stage']}".replace(" ", "_")
        counts[name] = counts.get(name, 0) + 1
    return counts


def main():
    """Run what is missing, and write after every cell."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--run", action="store_true", help="launch the kernels: --target must be this host's GPU")
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1e9, help="start no cell after these")
    parser.add_argument("--only", type=lambda value: tuple(map(int, value.split(","))), action="append")
    parser.add_argument("--directions", default="backward,forward", help="one of these, or both")
    parser.add_argument("--output", type=Path, default=HERE / "data" / "dims.json")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    output, end = arguments.output, time.monotonic() + arguments.seconds
    document = json.loads(output.read_text()) if output.exists() else {"cells": []}
    if arguments.table:
        output.with_suffix(".md").write_text(table(document["cells"]))
        output.with_suffix(".summary.json").write_text(json.dumps(summary(document["cells"]), indent=1) + "\n")
        return
    evidence = "executed" if arguments.run else "compiled"
    known = {json.dumps({**cell, "result": 0}, sort_keys=True) for cell in document["cells"]}
    cells = []
    for shape, direction in itertools.product(arguments.only or SHAPES, arguments.directions.split(",")):
        cell = {"direction": direction, "shape": [*shape], "target": arguments.target, "evidence": evidence}
        if json.dumps({**cell, "result": 0}, sort_keys=True) not in known:
            cells.append(cell)

    def finished(cell):
        left = end - time.monotonic()
        if left <= 0:
            return cell, None
        return cell, alone(evidence, (cell["direction"], cell["shape"], cell["target"]), min(left + 30, 300))

    with concurrent.futures.ThreadPoolExecutor(arguments.workers) as pool:
        for future in concurrent.futures.as_completed([pool.submit(finished, cell) for cell in cells]):
            cell, result = future.result()
            if result is not None:
                document["cells"].append({**cell, "result": result})
                partial = output.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(document, indent=1) + "\n")
                partial.replace(output)
                print(json.dumps(document["cells"][-1]), flush=True)


if __name__ == "__main__":
    main()
