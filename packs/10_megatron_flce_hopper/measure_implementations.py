"""Hold implementations of a vocabulary-parallel cross entropy against contract.py: a table.

Nothing here is judged. Every cell is measured, in ranks (gloo on the CPU, NCCL with one GPU each):
right, with the largest relative error; wrong, by how much; refused, with the exception's text; or not there, where the
interface has no such argument. What computes from logits gets those of Megatron's ColumnParallelLinear, so that
gradients are those of hidden states and weight in every row. The tolerances are those of contract.py.

    export PYTHONPATH=TREE:DEPENDENCIES:REPOSITORY[:LIGER]
    TE_SOURCE=DIR python measure_implementations.py TARGET NAME... [--times]

TREE is Megatron-LM: dev with fix.patch for most, dev for "linear_dev", the head of #3345 for "pr_3345"; LIGER is an
unpacked wheel of liger-kernel 0.8.5; TE_SOURCE a checkout of TransformerEngine, of which the Triton kernels and their
wrapper are loaded, and nothing is built. On the CPU Triton's interpreter runs kernels. What is measured under these
names on TARGET goes into data/implementations.json, and data/implementations.TARGET.md is written anew from all of it.
"""

import argparse
import dataclasses
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

from kit.ranks import ranks
from kit.vocabulary import Storages, watching

HERE = Path(__file__).resolve().parent
JSON = HERE / "data" / "implementations.json"
RIGHT, WRONG, REFUSED, NOT_THERE = "right", "wrong", "refused", "not there"
LOSS, GRADIENT = contract.FLOAT32_LOSS, contract.FLOAT32_GRADIENT
TIMED = Case(shape=(4096, 1), classes=131072, hidden=4096, dtype="bfloat16", above="ones")
BIG = Case(shape=(1024, 2), classes=24576, hidden=64, dtype="bfloat16")
SLAB_PART = 0.5  # of the elements, or in fp32 the bytes, of all logits
BF16_ALONE, SHARD = ("pr_3345",), 640
ROUNDS = 11
MEMORY_ROW = "memory: largest tensor, all together, in parts of the logits in fp32 (right: at most half)"


class NotThereError(Exception):
    """The interface has no such argument."""


# What computes it: each takes what one rank has, and returns losses, flat, or one.


def logits_of(upstream, case, hidden, weight):
    """Return the logits [sequence, batch, classes of this rank] of Megatron's output layer."""
    layer = upstream.layer(dataclasses.replace(case, entry="native"), contract.ColumnParallelLinear)
    return layer(hidden, weight=weight)[0]


def unreduced(case, *, ignores=True):
    """Refuse what an interface without a reduction, or without an ignored label, cannot be asked for."""
    if case.reduction != "none":
        raise NotThereError("reduction")
    if not ignores and case.ignore_index != contract.IGNORED:
        raise NotThereError("ignore_index")


def linear(upstream, case, hidden, weight, labels):
    """Call LinearCrossEntropyModule with the implementation "linear" of the tree that is on the path."""
    return upstream.losses(dataclasses.replace(case, entry="module"), hidden, weight, labels)


def native(upstream, case, hidden, weight, labels):
    """Call vocab_parallel_cross_entropy."""
    unreduced(case, ignores=False)
    logits = logits_of(upstream, case, hidden, weight)
    return contract.vocab_parallel_cross_entropy(logits, labels, tp_group=upstream.group(case)).flatten()


def fused_native(upstream, case, hidden, weight, labels):
    """Call fused_vocab_parallel_cross_entropy."""
    unreduced(case, ignores=False)
    logits = logits_of(upstream, case, hidden, weight)
    function = importlib.import_module("megatron.core.fusions.fused_cross_entropy").fused_vocab_parallel_cross_entropy
    return function(logits, labels, upstream.group(case)).flatten()


def transformer_engine(upstream, case, hidden, weight, labels):
    """Call TransformerEngine's parallel_cross_entropy."""
    source = Path(os.environ["TE_SOURCE"])
    for name in ("", ".common", ".common.triton", ".pytorch", ".pytorch.triton"):  # found, and not executed
        package = types.ModuleType(f"transformer_engine{name}")
        package.__path__ = [str(source / package.__name__.replace(".", "/"))]
        sys.modules.setdefault(package.__name__, package)
    if case.reduction == "sum":
        raise NotThereError("reduction")
    function = importlib.import_module("transformer_engine.pytorch.cross_entropy").parallel_cross_entropy
    logits = logits_of(upstream, case, hidden, weight)
    group = upstream.group(case)
    found = function(logits, labels, 0.0, case.reduction == "mean", group, case.ignore_index)
    return found.flatten() if case.reduction == "none" else found.reshape(())  # it has one element


def liger_vocab_parallel(upstream, case, hidden, weight, labels):
    """Call LigerVocabParallelCrossEntropy."""
    unreduced(case)
    module = importlib.import_module("liger_kernel.transformers.vocab_parallel_cross_entropy")
    layer = module.LigerVocabParallelCrossEntropy(ignore_index=case.ignore_index)
    return layer(logits_of(upstream, case, hidden, weight), labels, upstream.group(case)).flatten()


def liger_linear(upstream, case, hidden, weight, labels):
    """Call LigerFusedLinearScaledCrossEntropyTPFunction."""
    unreduced(case)
    function = importlib.import_module("liger_kernel.ops").LigerFusedLinearScaledCrossEntropyTPFunction
    given = (hidden.flatten(0, -2), weight, labels.flatten(), upstream.group(case))
    return function.apply(*given, 1.0, case.ignore_index)


def liger_linear_fallback(upstream, case, hidden, weight, labels):
    """Call the fallback of the same by itself: the public function wants CUDA."""
    unreduced(case)
    module = importlib.import_module("liger_kernel.ops.fused_linear_scaled_cross_entropy")
    given = (
        hidden.flatten(0, -2),
        weight,
        labels.flatten(),
        1.0,
        case.ignore_index,
        upstream.group(case),
    )
    return module._apply_tp_fallback(*given[:5], False, given[5])  # noqa: SLF001


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

INTERPRETED = ("transformer_engine", "liger_vocab_parallel")  # on the CPU

# The properties: a case, and what of it is looked at.

EVERYTHING = ("loss", "hidden", "weight")
PROPERTIES = {
    "1 rank, fp32": (Case(shape=(7, 3), classes=40), EVERYTHING),
    "2 ranks": (Case(ranks=2, shape=(7, 3), classes=40), EVERYTHING),
    "4 ranks": (Case(ranks=4, shape=(7, 3), classes=40), EVERYTHING),
    "sequence parallel, 2 ranks": (Case(ranks=2, shape=(6, 3), sequence_parallel=True), EVERYTHING),
    "sequence parallel, 4 ranks": (Case(ranks=4, shape=(8, 3), sequence_parallel=True), EVERYTHING),
    "all labels on the first of 2 ranks": (Case(ranks=2, shape=(6, 2), labels="first rank"), EVERYTHING),
    "all labels on the last of 4 ranks": (Case(ranks=4, shape=(6, 2), labels="last rank", classes=32), EVERYTHING),
    "ignored labels (-100): loss": (Case(ranks=2, shape=(9, 2), labels="some ignored"), ("loss",)),
    "ignored labels (-100): gradients": (Case(ranks=2, shape=(9, 2), labels="some ignored"), ("hidden", "weight")),
    "an ignored class": (Case(ranks=2, shape=(20, 2), ignore_index=4), EVERYTHING),
    "mean over tokens that count, 2 ranks": (
        Case(ranks=2, shape=(18, 2), labels="some ignored", reduction="mean"),
        EVERYTHING,
    ),
    "mean, 8 times as many of them on one of 2 ranks": (
        Case(ranks=2, shape=(18, 2), labels="uneven", reduction="mean", sequence_parallel=True),
        EVERYTHING,
    ),
    "mean, 8 times as many of them on one of 4 ranks": (
        Case(ranks=4, shape=(36, 2), labels="uneven", reduction="mean", sequence_parallel=True),
        EVERYTHING,
    ),
    "labels below the padding, padding among the classes": (
        Case(ranks=2, shape=(9, 2), classes=64, labelled=37),
        EVERYTHING,
    ),
    "padding left out of the softmax": (Case(ranks=2, shape=(9, 2), classes=64, labelled=37), ("without padding",)),
    "large logits, 2 ranks": (Case(ranks=2, shape=(12, 2), hidden=8, scale=60.0), EVERYTHING),
    "bf16: loss": (Case(ranks=2, shape=(17, 2), hidden=64, classes=1000, dtype="bfloat16"), ("loss",)),
    "bf16: gradients": (Case(ranks=2, shape=(17, 2), hidden=64, classes=1000, dtype="bfloat16"), ("hidden", "weight")),
    "bf16: sums of 40000 classes": (
        Case(shape=(3, 2), hidden=8, classes=40000, bias=3.0, dtype="bfloat16", above="ones"),
        ("hidden",),
    ),
    "bf16: the loss is fp32": (Case(shape=(5, 2), dtype="bfloat16"), ("dtype",)),
    "a gradient of one value, expanded": (Case(shape=(7, 1), above="expanded"), EVERYTHING),
    "backward twice": (Case(ranks=2, shape=(7, 3), classes=40), ("twice",)),
    "hidden states, weight and labels are kept": (Case(ranks=2, shape=(7, 3), labels="some ignored"), ("kept",)),
}


def keep_layers(upstream):
    """Let every layer be built once: its own weight is not used, and making it is not to be timed."""
    build, kept = upstream.layer, {}

    def once(case, kind):
        key = (kind, case.ranks, case.hidden, case.classes, case.dtype, case.sequence_parallel, case.entry)
        if key not in kept:
            kept[key] = build(case, kind)
        return kept[key]

    upstream.layer, upstream.keeps_layers = once, True


def measure(upstream, name, properties, case):
    """Measure one property of one implementation on one rank."""
    if not hasattr(upstream, "keeps_layers"):
        keep_layers(upstream)
    if "memory" in properties:
        return memory(name, upstream, case)
    if "time" in properties:
        return time(name, upstream, case)
    hidden, weight, labels, above = upstream.parts(case)
    before = [each.detach().clone() for each in (hidden, weight, labels)]
    try:
        found = IMPLEMENTATIONS[name][0](upstream, case, hidden, weight, labels)
        once = torch.autograd.grad(found, (hidden, weight), above.view_as(found).to(found.dtype), retain_graph=True)
        record = {"loss": found.detach(), "dtype": str(found.dtype)}
        record |= {"towards_hidden": once[0].clone(), "towards_weight": once[1].clone()}
        record["kept"] = all(x.equal(y) for x, y in zip(before, (hidden, weight, labels), strict=True))
        if "twice" in properties:
            twice = torch.autograd.grad(found, (hidden, weight), above.view_as(found).to(found.dtype))
            record["twice"] = max(norm_error(x, y) for x, y in zip(twice, once, strict=True))
    except NotThereError as error:
        return {"status": NOT_THERE, "text": f"no {error}"}
    except Exception as error:
        return {"status": REFUSED, "text": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    return record


def memory(name, upstream, case):
    """Follow the tensors that a forward and its backward make; on a GPU also what its allocator handed out."""
    if upstream.device.type == "cpu" and name in INTERPRETED:
        return {"status": "not measured", "text": "Triton's interpreter copies"}
    hidden, weight, labels, above = upstream.parts(case)

    def go():
        found = IMPLEMENTATIONS[name][0](upstream, case, hidden, weight, labels)
        found.backward(above.view_as(found))
        hidden.grad = weight.grad = None

    try:
        go()  # kernels are compiled and tuned here; Triton's tuner allocates 256 MiB of its own
        seen = follow((hidden, weight, labels), go)
        if upstream.device.type == "cuda":
            cuda = torch.cuda
            cuda.reset_peak_memory_stats()
            start = cuda.memory_allocated()
            go()
            seen["allocated"] = cuda.max_memory_allocated() - start
    except NotThereError as error:
        return {"status": NOT_THERE, "text": f"no {error}"}
    except Exception as error:
        return {"status": REFUSED, "text": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    return seen


def time(name, upstream, case):
    """Time a forward and its backward on a GPU, and its peak memory: the median, in ms and MiB."""
    device, dtype = upstream.device, getattr(torch, case.dtype)
    torch.manual_seed(5)  # the same hidden states on every rank
    hidden = torch.randn(*case.shape, case.hidden, device=device, dtype=dtype).requires_grad_()
    labels = torch.randint(case.classes, case.shape, device=device)
    weight = torch.randn(case.classes // case.ranks, case.hidden, device=device, dtype=dtype)
    weight = (weight / case.hidden**0.5).requires_grad_()
    above = torch.ones(labels.numel(), device=device)
    spent = []
    try:
        for _ in range(ROUNDS + 2):
            torch.distributed.barrier(group=upstream.group(case))
            hidden.grad = weight.grad = None
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            found = IMPLEMENTATIONS[name][0](upstream, case, hidden, weight, labels)
            found.backward(above.view_as(found))
            end.record()
            torch.cuda.synchronize()
            spent.append(start.elapsed_time(end))
            peak = (torch.cuda.max_memory_allocated() - before) / 2**20
            del found
    except Exception as error:
        return {"status": REFUSED, "text": f"{type(error).__name__}: {error}".split("\n")[0][:200]}
    quartiles = statistics.quantiles(spent[2:], n=4)
    return {"ms": quartiles[1], "spread": quartiles[2] - quartiles[0], "peak_mib": peak}


def follow(given, function):
    """Call a function; return the most elements of a tensor that it makes, and the most bytes that live together."""
    storages, most = Storages(), {"largest": 0, "together": 0}

    def note(operator, arguments, found):
        storages.note(operator, arguments, found)
        living = storages.living(*given)
        most["largest"] = max([most["largest"], *(math.prod(shape) for _, shape in living)])
        most["together"] = max(most["together"], sum(size for size, _ in living))

    with watching(note):
        function()
    return most


# What is made of it.


def norm_error(found, wanted):
    """Return the norm of the difference over the norm of what is wanted: infinite where a nan is found."""
    error = float((found.double() - wanted).norm() / (wanted.norm() if bool(wanted.count_nonzero()) else 1.0))
    return math.inf if math.isnan(error) else error


def cell(found, case, looked):
    """Return one cell: its status, and the largest error or the text."""
    refused = [each for each in found if "status" in each]
    if refused:  # by one rank, too
        return refused[0]
    if "memory" in looked:
        return of_the_logits(found, case)
    if "time" in looked:
        return {"status": "measured", **max(found, key=lambda each: each["ms"])}
    if looked[0] in ("dtype", "kept"):
        ok = all(each["kept"] if "kept" in looked else each["dtype"] == "torch.float32" for each in found)
        return {"status": RIGHT if ok else WRONG, "text": found[0]["dtype"] if "dtype" in looked else ""}
    if "twice" in looked:
        error = max(each["twice"] for each in found)
        return {"status": RIGHT if error == 0 else WRONG, "error": error}
    errors = deviations(found, case, looked)
    wrong = [error for error, limit in errors if not error <= limit]
    return {"status": WRONG if wrong else RIGHT, "error": max(wrong or [error for error, _ in errors])}


def deviations(found, case, looked):
    """Return the errors of losses and gradients over all ranks, each with its tolerance."""
    given = contract.inputs_of(case)
    losses, towards_hidden, towards_weight = contract.reference(given, case)
    if "without padding" in looked:
        hidden, weight, labels, above = given
        losses = contract.reference((hidden, weight[: case.labelled], labels, above), case)[0]
    errors = []
    if "loss" in looked or "without padding" in looked:
        errors.append((max(norm_error(each["loss"], losses) for each in found), LOSS))
    limit = GRADIENT + (contract.BFLOAT16 if case.dtype == "bfloat16" else 0.0)
    for name, wanted in (("hidden", towards_hidden), ("weight", towards_weight)):
        if name in looked:
            split = name == "weight" or case.sequence_parallel
            parts = [each[f"towards_{name}"] for each in found]
            parts = [torch.cat(parts)] if split else parts
            errors.append((max(norm_error(part, wanted) for part in parts), limit))
    return errors


def of_the_logits(found, case):
    """Return the largest tensor, and the bytes that lived together, in parts of a rank's logits in fp32."""
    slab = case.shape[0] * case.shape[1] * case.classes // case.ranks
    together = max(max(each["together"], each.get("allocated", 0)) for each in found) / (4 * slab)
    largest = max(each["largest"] for each in found) / slab
    status = RIGHT if max(largest, together) <= SLAB_PART else WRONG
    return {"status": status, "largest": largest, "together": together}


def shown(one):
    """Return a cell as the table has it."""
    if one is None:
        return "not measured"
    if one["status"] == "measured":
        return f"{one['ms']:.1f} ms, {one['peak_mib']:.0f} MiB"
    if "largest" in one:
        return f"{one['status']}: {one['largest']:.2f}, {one['together']:.2f}"
    if one["status"] == WRONG and "error" in one:
        return f"**wrong** by {one['error']:.1e}"
    if one["status"] == RIGHT and "error" in one:
        return f"right ({one['error']:.0e})"
    return f"{one['status']}" + (f" ({one['text']})" if one.get("text") else "")


def table(target, measured):
    """Return the table of one target: a row a property, a column an implementation; refusals as notes below."""
    columns = [name for name in IMPLEMENTATIONS if name in measured]
    rows = list(dict.fromkeys(key for name in columns for key in measured[name]["cells"]))
    notes, lines = [], []
    lines.append("| property | " + " | ".join(IMPLEMENTATIONS[name][1] for name in columns) + " |")
    lines.append("| --- |" + " --- |" * len(columns))
    for row in rows:
        cells = []
        for name in columns:
            one = measured[name]["cells"].get(row)
            if one and one["status"] == REFUSED:
                if one["text"] not in notes:
                    notes.append(one["text"])
                cells.append(f"refused [{notes.index(one['text']) + 1}]")
            else:
                cells.append(shown(one))
        lines.append(f"| {row} | " + " | ".join(cells) + " |")
    device = " and ".join(sorted({each["device"] for each in measured.values()}))
    head = f"On {device} ({target}). In brackets: the largest relative error, or what was said.\n\n"
    return head + "\n".join(lines) + "\n\n" + "".join(f"{number}. `{text}`\n" for number, text in enumerate(notes, 1))


def properties(target, count, *, times):
    """Return what is measured: all properties that so many ranks can have, memory, and times on a GPU."""
    asked = {key: value for key, value in PROPERTIES.items() if value[0].ranks <= count}
    asked[MEMORY_ROW] = (BIG, ("memory",))
    if times and target != "cpu":
        for size in (1, 2, 4):
            if size <= count:
                name = f"forward and backward of 4096 tokens, 131072 classes, 4096 hidden, bf16, {size} rank(s)"
                asked[name] = (dataclasses.replace(TIMED, ranks=size), ("time",))
    return asked


def suited(name, case, looked):
    """Return a case as an implementation takes it: kernels that take bf16 alone get that, and one size of a shard."""
    if name not in BF16_ALONE or looked[0] in ("memory", "time"):
        return case
    classes = max(case.classes, SHARD * case.ranks)
    labelled = case.labelled * classes // case.classes
    return dataclasses.replace(case, dtype="bfloat16", hidden=64, classes=classes, labelled=labelled)


def main():
    """Measure, add to the file, write the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("target")
    parser.add_argument("names", nargs="+", choices=IMPLEMENTATIONS)
    parser.add_argument("--times", action="store_true")
    given = parser.parse_args()
    os.environ["TORCH_COMPILE_DISABLE"] = "1"
    if given.target == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"
    count, kind = contract.CPU_RANKS, "cpu"
    if given.target != "cpu":
        count, kind = max(size for size in (1, 2, 4) if size <= torch.cuda.device_count()), "cuda"
    device = "the CPU" if given.target == "cpu" else f"{count} x {torch.cuda.get_device_name()}"
    asked = {}
    for name in given.names:
        for key, (case, looked) in properties(given.target, count, times=given.times).items():
            asked[name, key] = (suited(name, case, looked), looked)
    with ranks(count, contract.Calls, device=kind, seconds=500.0) as group:
        results = {key: group.run(measure, key[0], looked, case) for key, (case, looked) in asked.items()}
    everything = json.loads(JSON.read_text()) if JSON.exists() else {}
    measured = everything.setdefault(given.target, {})
    for name in given.names:
        measured[name] = {"device": device, "torch": torch.__version__, "cells": {}}
    for (name, key), (case, looked) in asked.items():
        measured[name]["cells"][key] = cell(case.of_group(results[name, key]), case, looked)
    JSON.parent.mkdir(exist_ok=True)
    JSON.write_text(json.dumps(everything, indent=1, sort_keys=True) + "\n")
    for target, each in everything.items():
        (JSON.parent / f"implementations.{target}.md").write_text(table(target, each))


if __name__ == "__main__":
    main()
