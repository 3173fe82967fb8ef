"""Hold implementations of a vocabulary-parallel cross entropy against contract.py: the tables in data.

Nothing here is judged. Every cell is measured, in ranks (gloo on the CPU, NCCL with one GPU each): right, with the
largest relative error; wrong, by how much; refused, with the exception's text; or not there, where the interface has no
such argument. What computes from logits gets those of Megatron's ColumnParallelLinear, so that gradients are those of
hidden states and weight in every row. The tolerances are those of contract.py.

    export PYTHONPATH=TREE:DEPENDENCIES:REPOSITORY[:LIGER]
    TE_SOURCE=DIR python measure_implementations.py TARGET NAME...

TREE is Megatron-LM: dev with fix.patch for most, dev for "linear_dev", the head of #3345 for "pr_3345"; LIGER is an
unpacked wheel of liger-kernel 0.8.5; TE_SOURCE a checkout of TransformerEngine, of which the Triton kernels and their
wrapper are loaded, and nothing is built. On the CPU Triton's interpreter runs kernels. What is measured under these
names on TARGET goes into data/implementations.json, and data/implementations.TARGET.md is written anew from all of it.
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

from kit.capture import watching
from kit.ranks import ranks
from kit.vocabulary import Storages, exact_losses

HERE = Path(__file__).resolve().parent
JSON = HERE / "data" / "implementations.json"
RIGHT, WRONG, REFUSED, NOT_THERE = "right", "wrong", "refused", "not there"
ROUNDS = 11


class NotThereError(Exception):
    """The interface has no such argument."""


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
        sequence_parallel=case.sequence_parallel and case.ranks > 1,
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


def unreduced(case):
    """Refuse what an interface without a reduction cannot be asked for."""
    if case.reduction != "none":
        raise NotThereError("reduction")


def native(calls, case, hidden, weight, labels):
    """Call vocab_parallel_cross_entropy."""
    unreduced(case)
    logits = logits_of(calls, case, hidden, weight)
    return vocab_parallel_cross_entropy(logits, labels, tp_group=calls.group).flatten()


def fused_native(calls, case, hidden, weight, labels):
    """Call fused_vocab_parallel_cross_entropy."""
    unreduced(case)
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
    found = function(logits, labels, 0.0, case.reduction == "mean", calls.group, case.ignore_index)
    return found.flatten() if case.reduction == "none" else found.reshape(())  # it has one element


def liger_vocab_parallel(calls, case, hidden, weight, labels):
    """Call LigerVocabParallelCrossEntropy."""
    unreduced(case)
    module = importlib.import_module("liger_kernel.transformers.vocab_parallel_cross_entropy")
    layer = module.LigerVocabParallelCrossEntropy(ignore_index=case.ignore_index)
    return layer(logits_of(calls, case, hidden, weight), labels, calls.group).flatten()


def liger_linear(calls, case, hidden, weight, labels):
    """Call LigerFusedLinearScaledCrossEntropyTPFunction."""
    unreduced(case)
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyTPFunction
    given = (hidden.flatten(0, -2), weight, labels.flatten(), calls.group)
    return function.apply(*given, 1.0, case.ignore_index)


def liger_linear_fallback(calls, case, hidden, weight, labels):
    """Call the fallback of the same by itself: the public function wants CUDA."""
    unreduced(case)
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    given = (hidden.flatten(0, -2), weight, labels.flatten(), 1.0, case.ignore_index)
    return module._apply_tp_fallback(*given, False, calls.group)  # noqa: SLF001


IMPLEMENTATIONS = {  # name: what is called, how the table names it
    "linear_dev": (linear, 'Megatron "linear", dev'),
    "linear_fixed": (linear, 'Megatron "linear" with fix.patch'),
    "pr_3345": (linear, 'Megatron "linear" of #3345, all in bf16'),
    "native": (native, "Megatron unfused"),
    "fused_native": (fused_native, 'Megatron "native"'),
    "transformer_engine": (transformer_engine, 'Transformer Engine ("te")'),
    "liger_vocab_parallel": (liger_vocab_parallel, "LigerVocabParallelCrossEntropy"),
    "liger_linear": (liger_linear, "LigerFusedLinearScaledCrossEntropyTPFunction"),
    "liger_linear_fallback": (liger_linear_fallback, "its fallback, called by itself"),
}

# The properties: a case, and what of it is looked at.

EVERYTHING = ("loss", "hidden", "weight")
MEMORY_ROW = "memory: largest tensor, all together, in parts of the logits in fp32 (right: at most half)"
TIME_ROW = "forward and backward of 4096 tokens, 131072 classes, 4096 hidden, bf16, 1 rank(s)"
PROPERTIES = {
    "4 ranks": (Case(ranks=4, shape=(7, 3), classes=40), EVERYTHING),
    "ignored labels (-100): loss": (Case(ranks=2, shape=(9, 2), labels="some ignored"), ("loss",)),
    "mean, 8 times as many of them on one of 4 ranks": (
        Case(ranks=4, shape=(36, 2), labels="uneven", reduction="mean", sequence_parallel=True),
        EVERYTHING,
    ),
    "padding left out of the softmax": (Case(ranks=2, shape=(9, 2), classes=64, labelled=37), ("without padding",)),
    "bf16: loss": (Case(ranks=2, shape=(17, 2), hidden=64, classes=1000, dtype="bfloat16"), ("loss",)),
    "a gradient of one value, expanded": (Case(shape=(7, 1), above="expanded"), EVERYTHING),
    MEMORY_ROW: (Case(shape=(1024, 2), classes=24576, hidden=64, dtype="bfloat16"), ("memory",)),
    TIME_ROW: (Case(shape=(4096, 1), classes=131072, hidden=4096, dtype="bfloat16", above="ones"), ("time",)),
}


def suited(name, case, looked):
    """Return a case as an implementation takes it: #3345 takes bf16 and 640 classes a rank or more."""
    if name != "pr_3345" or looked[0] in ("memory", "time"):
        return case
    classes = max(case.classes, 640 * case.ranks)
    labelled = case.labelled * classes // case.classes
    return dataclasses.replace(case, dtype="bfloat16", hidden=64, classes=classes, labelled=labelled)


def measure(calls, name, looked, case):
    """Measure one property of one implementation on one rank."""
    calls.enter(case)
    function = IMPLEMENTATIONS[name][0]
    given = memory if "memory" in looked else time if "time" in looked else values
    try:
        return given(calls, function, case)
    except NotThereError as error:
        return {"status": NOT_THERE, "text": f"no {error}"}
    except Exception as error:
        return {"status": REFUSED, "text": f"{type(error).__name__}: {error}".split("\n")[0][:200]}


def values(calls, function, case):
    """Return the loss and both gradients."""
    hidden, weight, labels, above = calls.parts(case)
    loss = function(calls, case, hidden, weight, labels)
    gradients = torch.autograd.grad(loss, (hidden, weight), above.view_as(loss).to(loss.dtype))
    return dict(zip(EVERYTHING, (loss.detach(), *gradients), strict=True))


def memory(calls, function, case):
    """Follow the tensors that a forward and its backward make; on a GPU also what its allocator handed out."""
    if calls.device.type == "cpu" and function in (transformer_engine, liger_vocab_parallel):
        return {"status": "not measured", "text": "Triton's interpreter copies"}
    hidden, weight, labels, above = calls.parts(case)
    storages, most = Storages(), {"largest": 0, "together": 0}

    def note(*noted):
        storages.note(*noted)
        living = storages.living()
        most["largest"] = max([most["largest"], *(math.prod(shape) for _, shape in living)])
        most["together"] = max(most["together"], sum(size for size, _ in living))

    def step():
        loss = function(calls, case, hidden, weight, labels)
        loss.backward(above.view_as(loss))
        hidden.grad = weight.grad = None

    step()  # kernels are compiled and tuned here; Triton's tuner allocates 256 MiB of its own
    with watching(note):
        step()
    if calls.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        start = torch.cuda.memory_allocated()
        step()
        most["together"] = max(most["together"], torch.cuda.max_memory_allocated() - start)
    return most


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
    if "memory" in looked:
        logits = math.prod(case.shape) * case.classes // case.ranks
        largest, together = (max(each[name] for each in found) / logits for name in ("largest", "together"))
        status = RIGHT if max(largest, together / 4) <= 1 / 2 else WRONG
        return {"status": status, "largest": largest, "together": together / 4}
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
        if name == "weight" or (name == "hidden" and case.sequence_parallel):
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
    if "largest" in one:
        return f"{one['status']}: {one['largest']:.2f}, {one['together']:.2f}"
    if "error" in one:
        error = one["error"]
        return f"**wrong** by {error:.1e}" if one["status"] == WRONG else f"right ({error:.0e})"
    return f"{one['status']} ({one['text']})"


def table(target, measured):
    """Return the table of one target: a row a property, a column an implementation."""
    columns = [name for name in IMPLEMENTATIONS if name in measured]
    lines = ["| property | " + " | ".join(IMPLEMENTATIONS[name][1] for name in columns) + " |"]
    lines.append("| --- |" + " --- |" * len(columns))
    for row in PROPERTIES:
        cells = [measured[name]["cells"].get(row) for name in columns]
        if any(cells):
            lines.append(f"| {row} | " + " | ".join(map(shown, cells)) + " |")
    device = " and ".join(sorted({each["device"] for each in measured.values()}))
    head = f"On {device} ({target}). In brackets: the largest relative error, or what was said.\n\n"
    return head + "\n".join(lines) + "\n"


def main():
    """Measure, add to the file, write the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("names", nargs="+", choices=IMPLEMENTATIONS)
    given = parser.parse_args()
    on_cpu = given.target == "cpu"
    if on_cpu:
        os.environ["TRITON_INTERPRET"] = "1"
    count = contract.CPU_RANKS if on_cpu else max(each for each in (1, 2, 4) if each <= torch.cuda.device_count())
    device = "the CPU" if on_cpu else f"{count} x {torch.cuda.get_device_name()}"
    everything = json.loads(JSON.read_text())
    with ranks(count, contract.Calls, device="cpu" if on_cpu else "cuda", seconds=500.0) as group:
        for name in given.names:
            cells = {}
            for row, (case, looked) in PROPERTIES.items():
                if case.ranks <= count and not (on_cpu and "time" in looked):
                    mine = suited(name, case, looked)
                    found = group.run(measure, name, looked, mine)[: case.ranks]
                    cells[row] = cell(found, mine, looked)
            everything[given.target][name] = {"device": device, "torch": torch.__version__, "cells": cells}
    JSON.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    for target, each in everything.items():
        (JSON.parent / f"implementations.{target}.md").write_text(table(target, each))


if __name__ == "__main__":
    main()
