"""Measure time and memory of a DSA training step without fused kernels, on a GPU. Measured, never judged.

    PYTHONPATH=TREE python measure_steps.py release data/steps.json    # TREE is the release
    PYTHONPATH=TREE python measure_steps.py patched data/steps.json    # TREE is the release with fix.patch

Each call writes its numbers into the file under the name that it is given: for each part and number of tokens the
median of the milliseconds, and the peak of the GPU memory above the inputs, in GiB. The largest step of the release
needs 105 GiB.
"""

import json
import statistics
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from megatron.core.transformer.experimental_attention_variant import dsa

HEADS, WIDTH, ATTENTION, ATTENTION_WIDTH, TOPK = 32, 128, 16, 192, 2048
STEPS = ((2, 4096), (1, 16384))  # batch, tokens
WARM_UP, RUNS = 2, 7


def parts(batch, tokens):
    """Return what is measured: the top-k without a loss, and the loss's forward and backward."""
    shapes = {"q": (HEADS, WIDTH), "weights": (HEADS,), "k": (WIDTH,)}
    shapes |= {"query": (ATTENTION, ATTENTION_WIDTH), "key": (ATTENTION, ATTENTION_WIDTH)}
    inputs = {
        name: torch.randn(tokens, batch, *shape, device="cuda", dtype=torch.bfloat16) for name, shape in shapes.items()
    }
    trained = [inputs[name].requires_grad_() for name in ("q", "weights", "k")]
    ends = torch.arange(1, tokens + 1, device="cuda")  # causal bounds of the keys
    starts, one_rank = torch.zeros_like(ends), SimpleNamespace(tp=SimpleNamespace(size=lambda: 1))

    def topk():
        with torch.no_grad():
            dsa.fused_qk_topk_naive(inputs["q"], inputs["k"], inputs["weights"], TOPK, None, starts, ends)

    def step():
        options = (ATTENTION_WIDTH**-0.5, TOPK, 1.0, None, False, one_rank, starts, ends, None, None, False, True)
        torch.autograd.grad(dsa.FusedDSAIndexerLoss.apply(*inputs.values(), *options)[1], trained)

    return {"topk": topk, "step": step}


def measure(run):
    """Return the median milliseconds and the peak in GiB of a call."""
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, milliseconds = torch.cuda.memory_allocated(), []
    for _ in range(WARM_UP + RUNS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        torch.cuda.synchronize()
        milliseconds.append(begin.elapsed_time(end))
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30
    return {"ms": round(statistics.median(milliseconds[WARM_UP:]), 1), "peak_gib": round(peak, 2)}


def main(tree, file):
    """Measure the tree that is on the path, and write its numbers under its name into a JSON file."""
    path = Path(file)
    document = json.loads(path.read_text()) if path.exists() else {}
    document["gpu"], document["torch"] = torch.cuda.get_device_name(), torch.__version__
    document[tree] = {
        f"{name} {tokens}": measure(run) for batch, tokens in STEPS for name, run in parts(batch, tokens).items()
    }
    path.write_text(json.dumps(document, indent=1) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
