"""Time and memory of the fused dispatch, with bf16 and with FP8 inputs, by tree. Never judged; needs a GPU.

    PYTHONPATH=REPOSITORY python measure_speed.py --tree pristine=FOLDER --tree patched=FOLDER \
        --dependencies FOLDER [--out FOLDER]

--dependencies is the merged folder of pack.toml's set `library`. Each tree is measured in a process of its own, at
sizes of DeepSeek V3.2's sparse attention. A time is the median of 20 calls of fused_sparse_mla_absorbed, without
gradients; peak is what a call allocates above its inputs, outputs included. Then the same with gradients: what is kept
between forward and backward, besides the output, and the most that is allocated in backward, above the inputs. Results
go to data/speed.json and data/speed.md.
"""

import json
import statistics
from pathlib import Path

import contract
import trees

HERE = Path(__file__).resolve().parent
SIZES = [(1, 4096, 8192, heads, 2048) for heads in (64, 128)]  # batch, queries, keys, heads, top-k


def milliseconds(torch, call):
    """Return the quartiles of 20 calls."""
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(25)]
    for begin, end in events:
        begin.record(), call(), end.record()
    torch.cuda.synchronize()
    return statistics.quantiles([begin.elapsed_time(end) for begin, end in events[5:]], n=4)


def training(torch, dsa, pair, indices):
    """Return what is kept for backward, and the most that is allocated in it, in MiB above the inputs."""
    pair = [x.detach().requires_grad_() for x in pair]
    torch.cuda.synchronize()
    start = torch.cuda.memory_allocated()
    output = dsa.fused_sparse_mla_absorbed(*pair, indices, contract.SCALE, contract.DV)
    torch.cuda.synchronize()
    kept = torch.cuda.memory_allocated() - start - output.nbytes
    gradient = torch.ones_like(output)
    torch.cuda.reset_peak_memory_stats()
    torch.autograd.grad(output, pair, gradient)
    torch.cuda.synchronize()
    return {"kept_mib": kept / 2**20, "backward_peak_mib": (torch.cuda.max_memory_allocated() - start) / 2**20}


def measure():
    """Return one row for each size and kind of input. Runs in a child."""
    import torch

    lab = contract.load()
    tensors, dsa = lab.tensors, lab.dsa
    rows = []
    for batch, queries, keys, heads, top in SIZES:
        random = torch.Generator("cuda").manual_seed(5)
        plain = [
            torch.randn(length, batch, count, contract.D, generator=random, device="cuda").bfloat16()
            for length, count in ((queries, heads), (keys, 1))
        ]
        indices = torch.randint(keys, (batch, queries, top), generator=random, device="cuda", dtype=torch.int32)
        for kind in ("bf16", "float8", "blockwise"):
            pair = [contract.wrap(tensors, kind, x) for x in plain]

            def call(pair=pair, indices=indices):
                return dsa.fused_sparse_mla_absorbed(*pair, indices, contract.SCALE, contract.DV)

            call()
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            peak = torch.cuda.max_memory_allocated() - before
            low, middle, high = milliseconds(torch, call)
            row = {"heads": heads, "kind": kind, "ms": middle, "spread_ms": high - low, "peak_mib": peak / 2**20}
            rows.append(row | training(torch, dsa, pair, indices))
    return rows


def table(results):
    """Write a Markdown table, trees beside each other."""
    trees = list(results)
    titles = [f"{tree}: ms | peak MiB | kept | in backward" for tree in trees]
    lines = [f"| heads | input | {' | '.join(titles)} |", "| --- | --- |" + " --- | --- | --- | --- |" * len(trees)]
    for index, row in enumerate(results[trees[0]]):
        found = [results[tree][index] for tree in trees]
        sizes = [[one[name] for name in ("peak_mib", "kept_mib", "backward_peak_mib")] for one in found]
        cells = [f"{x['ms']:.2f} | {' | '.join(f'{y:.0f}' for y in mib)}" for x, mib in zip(found, sizes, strict=True)]
        lines.append(f"| {row['heads']} | {row['kind']} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main():
    """Measure every tree, and write the results."""
    parser = trees.parser(__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=HERE / "data")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure()))
        return
    results = trees.results(__file__, options)
    (options.out / "speed.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "speed.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
