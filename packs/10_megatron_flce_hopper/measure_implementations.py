"""Hold implementations of a vocabulary-parallel cross entropy against contract.py, on GPUs. Measured, never judged.

    export PYTHONPATH=TREE:DEPENDENCIES:REPOSITORY[:LIGER]
    TE_SOURCE=DIR python measure_implementations.py NAME...

A cell is right, with the largest relative error; wrong, by how much; or refused, with the exception's text. What
computes from logits gets those of Megatron's ColumnParallelLinear, so that gradients are those of hidden states and
weight in every row. The tolerances are those of contract.py.

TREE is Megatron-LM: dev with fix.patch for most, dev for "linear_dev", the head of #3345 for "pr_3345"; LIGER is an
unpacked wheel of liger-kernel 0.8.5; TE_SOURCE a checkout of TransformerEngine, of which the Triton kernels and their
wrapper are loaded, and nothing is built. Ranks talk by NCCL, each on a GPU of its own. What is measured under these
names goes into data/implementations.json, and data/implementations.md is written anew from all of it.
"""

import argparse
import dataclasses
import functools
import importlib
import json
import math
import os
import statistics
import sys
import types
from pathlib import Path

import contract
import torch
from contract import Case
from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.cross_entropy import vocab_parallel_cross_entropy
from megatron.core.tensor_parallel.layers import ColumnParallelLinear
from megatron.core.transformer.transformer_config import TransformerConfig

from kit.ranks import ranks
from kit.vocabulary import exact_losses

HERE = Path(__file__).resolve().parent
JSON = HERE / "data" / "implementations.json"
RIGHT, WRONG, REFUSED = "right", "wrong", "refused"
ROUNDS = 11


# What computes it: each takes what one rank has, and returns losses, flat, or one.


@functools.cache  # making it is not to be timed
def output_layer(case, group):
    """Return Megatron's output layer, without a weight of its own."""
    config = TransformerConfig(
        num_layers=1,
        hidden_size=case.hidden,
        num_attention_heads=case.ranks,
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=getattr(torch, case.dtype),
        tensor_model_parallel_size=case.ranks,
    )
    options = {"bias": False, "gather_output": False, "skip_bias_add": False, "skip_weight_param_allocation": True}
    options |= {"config": config, "init_method": lambda x: x, "tp_group": group}
    return ColumnParallelLinear(case.hidden, case.classes, **options)


def logits_of(calls, case, hidden, weight):
    """Return the logits [sequence, batch, classes of this rank]."""
    return output_layer(case, calls.group)(hidden, weight=weight)[0]


def linear(calls, case, hidden, weight, labels):
    """Call the fused linear cross entropy of the tree that is on the path."""
    return calls.loss(case, hidden, weight, labels)


def native(calls, case, hidden, weight, labels):
    """Call vocab_parallel_cross_entropy."""
    logits = logits_of(calls, case, hidden, weight)
    return vocab_parallel_cross_entropy(logits, labels, tp_group=calls.group).flatten()


def fused_native(calls, case, hidden, weight, labels):
    """Call fused_vocab_parallel_cross_entropy."""
    logits = logits_of(calls, case, hidden, weight)
    return fused_vocab_parallel_cross_entropy(logits, labels, calls.group).flatten()


def transformer_engine(calls, case, hidden, weight, labels):
    """Call TransformerEngine's parallel_cross_entropy."""
    source = Path(os.environ["TE_SOURCE"])
    for name in ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton"):  # found, and not executed
        package = types.ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(source / package.__name__.replace(".", "/"))]
        sys.modules.setdefault(package.__name__, package)
    function = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    logits = logits_of(calls, case, hidden, weight)
    return function(logits, labels, 0.0, False, calls.group, case.ignore_index).flatten()


def liger_vocab_parallel(calls, case, hidden, weight, labels):
    """Call LigerVocabParallelCrossEntropy."""
    module = importlib.import_module("liger_kernel.transformers.vocab_parallel_cross_entropy")
    layer = module.LigerVocabParallelCrossEntropy(ignore_index=case.ignore_index)
    return layer(logits_of(calls, case, hidden, weight), labels, calls.group).flatten()


def liger_linear(calls, case, hidden, weight, labels):
    """Call LigerFusedLinearScaledCrossEntropyTPFunction."""
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyTPFunction
    given = (hidden.flatten(0, -2), weight, labels.flatten(), calls.group)
    return function.apply(*given, 1.0, case.ignore_index)


IMPLEMENTATIONS = {  # name: what is called, how the table names it
    "linear_dev": (linear, 'Megatron "linear", dev'),
    "linear_fixed": (linear, 'Megatron "linear" with fix.patch'),
    "pr_3345": (linear, 'Megatron "linear" of #3345, all in bf16'),
    "native": (native, "Megatron unfused"),
    "fused_native": (fused_native, 'Megatron "native"'),
    "transformer_engine": (transformer_engine, 'Transformer Engine ("te")'),
    "liger_vocab_parallel": (liger_vocab_parallel, "LigerVocabParallelCrossEntropy"),
    "liger_linear": (liger_linear, "LigerFusedLinearScaledCrossEntropyTPFunction"),
}

# The properties: a case, and what of it is looked at.

EVERYTHING = ("loss", "hidden", "weight")
TIME_ROW = "forward and backward of 4096 tokens, 131072 classes, 4096 hidden, bf16, 1 rank(s)"
PROPERTIES = {
    "ignored labels (-100): loss": (Case(ranks=2, shape=(9, 2), labels="some ignored"), ("loss",)),
    "padding left out of the softmax": (Case(ranks=2, shape=(9, 2), classes=64, labelled=37), ("without padding",)),
    "bf16: loss": (Case(ranks=2, shape=(17, 2), hidden=64, classes=1000, dtype="bfloat16"), ("loss",)),
    "a gradient of one value, expanded": (Case(shape=(7, 1), above="expanded"), EVERYTHING),
    TIME_ROW: (Case(shape=(4096, 1), classes=131072, hidden=4096, dtype="bfloat16", above="ones"), ("time",)),
}


def suited(name, case, looked):
    """Return a case as an implementation takes it: #3345 takes bf16 and 640 classes a rank or more."""
    if name != "pr_3345" or "time" in looked:
        return case
    classes = max(case.classes, 640 * case.ranks)
    labelled = case.labelled * classes // case.classes
    return dataclasses.replace(case, dtype="bfloat16", hidden=64, classes=classes, labelled=labelled)


def measure(calls, name, looked, case):
    """Measure one property of one implementation on one rank."""
    calls.enter(case)
    function = IMPLEMENTATIONS[name][0]
    given = time if "time" in looked else values
    try:
        return given(calls, function, case)
    except Exception as error:
        return {"status": REFUSED, "text": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


def values(calls, function, case):
    """Return the loss and both gradients."""
    hidden, weight, labels, above = calls.parts(case)
    loss = function(calls, case, hidden, weight, labels)
    gradients = torch.autograd.grad(loss, (hidden, weight), above.view_as(loss).to(loss.dtype))
    return dict(zip(EVERYTHING, (loss.detach(), *gradients), strict=True))


def time(calls, function, case):
    """Time a forward and its backward on a GPU, and its peak memory: the median, in ms and MiB."""
    torch.manual_seed(5)
    options = {"device": calls.device, "dtype": getattr(torch, case.dtype)}
    hidden = torch.randn(*case.shape, case.hidden, **options).requires_grad_()
    labels = torch.randint(case.classes, case.shape, device=calls.device)
    weight = (torch.randn(case.classes, case.hidden, **options) / case.hidden**0.5).requires_grad_()
    above = torch.ones(labels.numel(), device=calls.device)
    spent = []
    for _ in range(ROUNDS + 2):
        hidden.grad = weight.grad = None
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        loss = function(calls, case, hidden, weight, labels)
        loss.backward(above.view_as(loss))
        end.record()
        torch.cuda.synchronize()
        spent.append(start.elapsed_time(end))
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        del loss
    low, median, high = statistics.quantiles(spent[2:], n=4)
    return {"ms": median, "spread": high - low, "peak_mib": peak}


# What is made of it.


def norm_error(found, wanted):
    """Return the norm of the difference over the norm of what is wanted: infinite where a nan is found."""
    error = float((found.double() - wanted).norm() / (wanted.norm() if bool(wanted.count_nonzero()) else 1.0))
    return math.inf if math.isnan(error) else error


def cell(found, case, looked):
    """Return one cell of what the ranks of a group found: its status, and the largest error or the text."""
    refused = [each for each in found if "status" in each]
    if refused:  # by one rank, too
        return refused[0]
    if "time" in looked:
        return {"status": "measured", **max(found, key=lambda each: each["ms"])}
    errors = deviations(found, case, looked)
    wrong = [error for error, limit in errors if not error <= limit]
    return {"status": WRONG if wrong else RIGHT, "error": max(wrong or [error for error, _ in errors])}


def deviations(found, case, looked):
    """Return the errors of losses and gradients over all ranks, each with its tolerance."""
    hidden, weight, labels, above = contract.inputs_of(case)
    if "without padding" in looked:
        weight, looked = weight[: case.labelled], ("loss",)
    exact = exact_losses((hidden, weight, labels, above), case.reduction, case.ignore_index)
    expected = (exact.loss, exact.towards_hidden, exact.towards_weight)
    limit = contract.FLOAT32_GRADIENT + (contract.BFLOAT16 if case.dtype == "bfloat16" else 0.0)
    errors = []
    for name, wanted in zip(EVERYTHING, expected, strict=True):
        parts = [each[name] for each in found]
        if name == "weight":
            parts = [torch.cat(parts)]
        if name in looked:
            worst = max(norm_error(part, wanted) for part in parts)
            errors.append((worst, contract.FLOAT32_LOSS if name == "loss" else limit))
    return errors


def shown(one):
    """Return a cell as the table has it."""
    if one is None:
        return "not measured"
    if one["status"] == "measured":
        return f"{one['ms']:.1f} ms, {one['peak_mib']:.0f} MiB"
    if "error" in one:
        error = one["error"]
        return f"**wrong** by {error:.1e}" if one["status"] == WRONG else f"right ({error:.0e})"
    return f"{one['status']} ({one['text']})"


def table(measured):
    """Return the table: a row a property, a column an implementation."""
    columns = [name for name in IMPLEMENTATIONS if name in measured]
    lines = ["| property | " + " | ".join(IMPLEMENTATIONS[name][1] for name in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for row in PROPERTIES:
        cells = [measured[name]["cells"].get(row) for name in columns]
        lines.append(f"| {row} | " + " | ".join(map(shown, cells)) + " |")
    device = " and ".join(sorted({each["device"] for each in measured.values()}))
    return f"On {device}. In brackets: the largest relative error, or what was said.\n\n" + "\n".join(lines) + "\n"


def main():
    """Measure, add to the file, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("names", nargs="+", choices=IMPLEMENTATIONS)
    given = parser.parse_args()
    count = min(torch.cuda.device_count(), 2)
    everything = json.loads(JSON.read_text()) if JSON.exists() else {}
    with ranks(count, contract.Calls, device="cuda", seconds=500.0) as group:
        for name in given.names:
            cells = {}
            for row, (case, looked) in PROPERTIES.items():
                if case.ranks <= count:
                    mine = suited(name, case, looked)
                    cells[row] = cell(group.run(measure, name, looked, mine)[: case.ranks], mine, looked)
            device = f"{count} x {torch.cuda.get_device_name()}"
            everything[name] = {"device": device, "torch": torch.__version__, "cells": cells}
    JSON.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    JSON.with_suffix(".md").write_text(table(everything))


if __name__ == "__main__":
    main()
