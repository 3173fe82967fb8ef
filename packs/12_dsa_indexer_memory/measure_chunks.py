"""Time the patched DSA with other sizes of a chunk than fix.patch has: on a GPU, as a table in CSV on stdout.

    PYTHONPATH=TREE python measure_chunks.py > data/chunks.sm_90a.csv

TREE is the release without or with fix.patch; without it there is one row a step, whose chunk is "all". Never judged.
"""

import csv, statistics, sys, types

import torch
from megatron.core.transformer.experimental_attention_variant import dsa

HEADS, WIDTH, ATTENTION, ATTENTION_WIDTH = 32, 128, 16, 192
STEPS = ((2, 4096), (1, 16384), (1, 1024), (1, 256))  # batch, tokens
CHUNKS = (32, 64, 128, 256, 512)  # rows
RUNS = 3


def inputs(b, s):
    """Make the tensors of a step."""
    shapes = {"q": (s, b, HEADS, WIDTH), "weights": (s, b, HEADS), "k": (s, b, WIDTH)}
    shapes |= {"query": (s, b, ATTENTION, ATTENTION_WIDTH), "key": (s, b, ATTENTION, ATTENTION_WIDTH)}
    made = {name: torch.randn(shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()}
    return {name: x.requires_grad_(name in ("q", "weights", "k")) for name, x in made.items()}


def steps(b, s):
    """Return what is timed: the top-k without a loss, the loss's forward, and forward with backward."""
    made, ends = inputs(b, s), torch.arange(1, s + 1, device="cuda")
    starts, group = torch.zeros_like(ends), types.SimpleNamespace(tp=types.SimpleNamespace(size=lambda: 1))

    def loss():
        rest = (ATTENTION_WIDTH**-0.5, 2048, 1.0, None, False, group, starts, ends, None, None, False, True)
        return dsa.FusedDSAIndexerLoss.apply(*made.values(), *rest)[1]

    def topk():
        with torch.no_grad():
            dsa.fused_qk_topk_naive(made["q"], made["k"], made["weights"], 2048, None, starts, ends)

    def forward():
        with torch.no_grad():
            loss()

    def step():
        torch.autograd.grad(loss(), [made["q"], made["weights"], made["k"]])

    return {"topk": topk, "forward": forward, "step": step}


def timed(run):
    """Return the median of the milliseconds that a run takes."""
    found = []
    for n in range(RUNS + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in "ab")
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        found += [begin.elapsed_time(end)] * (n > 1)
    return statistics.median(found)


def main():
    """Print one row for each step and size."""
    table = csv.writer(sys.stdout, lineterminator="\n")
    table.writerow(("chunk_rows", "batch", "tokens", "part", "ms", "peak_gib"))
    patched = hasattr(dsa, "_SCORE_CHUNK_ROWS")
    for b, s in STEPS:
        for part, run in steps(b, s).items():
            for chunk in CHUNKS if patched else ("all",):
                if patched:
                    dsa._SCORE_CHUNK_ROWS = chunk  # noqa: SLF001 - the size that is varied
                    dsa._SCORE_CHUNK_BYTES = 2**62  # noqa: SLF001 - which bounds it otherwise
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
                before = torch.cuda.memory_allocated()
                milliseconds = timed(run)
                peak = (torch.cuda.max_memory_allocated() - before) / 2**30
                table.writerow((chunk, b, s, part, f"{milliseconds:.3f}", f"{peak:.3f}"))


if __name__ == "__main__":
    main()
