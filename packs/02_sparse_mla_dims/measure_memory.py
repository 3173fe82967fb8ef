"""Peak memory and time of fused sparse MLA against the unfused path that it replaces, over the sequence length.

    PYTHONPATH=PATCHED_TREE:COMPANIONS:REPOSITORY python measure_memory.py --output data/memory.json
    python measure_memory.py --table

Measured, never judged. The tree has fix.patch applied, since without it the dispatcher answers None at this shape.
Forward and backward, batch 1, latent + RoPE dimension 64 + 64, top-k 512 of the past; the unfused path is
_unfused_absorbed_dsa_fn, which dsa.py calls with the same arguments where the dispatcher answers None. Peak bytes are
those that PyTorch's allocator held above what the inputs take. Each length doubles until the unfused path does not
fit; the fused one goes on. --table writes data/memory.md from the results.
"""

import argparse
import importlib
import json
import os
import platform
import statistics
from pathlib import Path

import contract

HERE = Path(__file__).parent
LENGTHS = [1024 * 2**power for power in range(6)]
HEADS = (16, 64)
DIM, TAIL, TOP_K, ROUNDS = 64, 64, 512, 3
PATHS = ("fused", "unfused")


def example(torch, length, heads):
    """Make query, key, top-k indices and the output's gradient, without a matrix of length by length."""
    random = torch.Generator("cuda").manual_seed(7)
    sizes = ((length, 1, heads, DIM + TAIL), (length, 1, 1, DIM + TAIL), (length, 1, heads, DIM))
    query, key, d_out = (torch.randn(*size, generator=random, device="cuda").bfloat16() for size in sizes)
    rows = torch.arange(length, device="cuda")[:, None]
    spread = (rows + 1).clamp(min=TOP_K) / TOP_K  # evenly spaced keys of the past, all of them where there are fewer
    indices = (torch.arange(TOP_K, device="cuda") * spread).long()
    return query, key, indices.masked_fill(indices > rows, -1)[None], d_out


def measure(torch, attend, inputs):
    """Run forward and backward; return peak bytes above the inputs, and milliseconds, or that it does not fit."""
    times = []
    try:
        for _ in range(ROUNDS + 1):
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            contract.trained(attend, inputs)
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
    except torch.OutOfMemoryError as error:
        return {"fits": False, "error": str(error).split(". ")[0]}
    peak = torch.cuda.max_memory_allocated() - before
    return {"fits": True, "peak_bytes": peak, "median_ms": statistics.median(times[1:]), "runs_ms": times[1:]}


def text(found):
    """One cell of the table."""
    if found is None:
        return "not measured"
    return f"{found['peak_bytes'] / 2**20:,.0f} MiB, {found['median_ms']:.2f} ms" if found["fits"] else "does not fit"


def table(document):
    """Markdown: a row per number of heads and length."""
    lines = ["| heads | S | fused | unfused | fused / unfused, peak |", "|" + " --- |" * 5]
    for heads in HEADS:
        for length in LENGTHS:
            fused, unfused = (document["peaks"].get(f"{path} {heads} {length}") for path in PATHS)
            both = fused and unfused and fused["fits"] and unfused["fits"]
            ratio = f"{fused['peak_bytes'] / unfused['peak_bytes']:.4f}" if both else "-"
            lines.append(f"| {heads} | {length} | {text(fused)} | {text(unfused)} | {ratio} |")
    return "\n".join(lines) + "\n"


def main():
    """Measure length after length, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "data" / "memory.json")
    parser.add_argument("--table", action="store_true", help="only write the table")
    arguments = parser.parse_args()
    output = arguments.output
    if arguments.table:
        document = json.loads(output.read_text())
        output.with_suffix(".md").write_text(table(document))
        return
    torch = importlib.import_module("torch")
    modules = contract.load()
    unfused = importlib.import_module(f"{contract.VARIANT}.dsa")._unfused_absorbed_dsa_fn  # noqa: SLF001 - not public
    doors = dict(zip(PATHS, (modules.dispatcher.fused_sparse_mla_absorbed, unfused), strict=True))
    document = {"gpu": torch.cuda.get_device_name(), "memory_bytes": torch.cuda.get_device_properties(0).total_memory}
    document |= {"torch": torch.__version__, "python": platform.python_version(), "peaks": {}}
    document["tilelang"] = importlib.import_module("tilelang").__version__
    document["shape"] = {"batch": 1, "latent": DIM, "rope": TAIL, "top_k": TOP_K, "dtype": "bfloat16"}
    for heads in HEADS:
        fits = dict.fromkeys(PATHS, True)
        for length in LENGTHS:
            inputs = example(torch, length, heads)
            for path in (path for path in PATHS if fits[path]):
                found = measure(torch, doors[path], inputs)
                fits[path] = found["fits"]
                document["peaks"][f"{path} {heads} {length}"] = found
                partial = output.with_suffix(f".{os.getpid()}")
                partial.write_text(json.dumps(document, indent=1) + "\n")
                partial.replace(output)
                print(path, heads, length, json.dumps(found), flush=True)
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
