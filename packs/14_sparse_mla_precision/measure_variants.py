"""Errors and time of other ways to make dKV in the SparseMLA backward. Never judged.

    PYTHONPATH=RELEASE:COMPANIONS python measure_variants.py --tree pristine=FOLDER --tree NAME=FOLDER...

Needs a GPU. A variant is a tree and options of its `bwd`: the release, and the release with fix.patch (`patched`) or
with data/variant_NAME.patch. All get the same input and the release's own lse and delta. Kernels are timed in turns,
so that all of them see the same clock. Writes variants.json and variants.md into --data.

What it wrote is committed as data/variants_by_script.json; `patched` there is data/variant_both_subjects.patch, and the
kernel of today's fix.patch is `two_parts`: their CUDA sources differ in the name of one variable. data/variants.json
was made before, from the same trees and more options, by one that launched kernels compiled beforehand, as the file
says; it has their registers and spills too, and `terms`: what float64 dKV lacks when one thing in it is replaced by
what the kernel has or does.
--table writes variants.md from the file that is there.
"""

import argparse
import json
import multiprocessing
import statistics
from pathlib import Path

import reference as ref
import torch

HERE = Path(__file__).parent
SIZES = (4096, 64, 512)
ONE, TWO, TALL = {"num_stages": 1}, {"threads": 256}, {"max_block_h": 64, "threads": 256, "num_stages": 1}
VARIANTS = [("pristine", options) for options in ({}, TWO, ONE, TWO | ONE, TALL)]
VARIANTS += [("patched", {}), *(("two_parts", options) for options in ({}, TWO, ONE, {"num_stages": 0}, TALL))]
VARIANTS += [(name, options) for name in ("p_only", "dp_only") for options in ({}, TWO)]
VARIANTS += [("two_column_chunks", {}), ("four_column_chunks", {})]
VARIANTS += [("two_parts_in_two_column_chunks", {}), ("two_parts_in_two_column_chunks", TWO)]
VARIANTS += [("two_parts_in_four_column_chunks", {}), ("fp16_operands", ONE), ("tf32_operands", {})]


def kernel(name, tree, options):
    """Compile one variant's backward kernel, or load it from tilelang's cache."""
    _, backward = ref.load(name, tree)
    _, heads, topk = SIZES
    return backward.bwd(heads, ref.VALUES, ref.WIDTH - ref.VALUES, topk, 1, ref.SCALE, **options)


def build(name, tree, options):
    """In a process of its own: compile one kernel, or say why it cannot be."""
    try:
        kernel(name, tree, options)
    except (AssertionError, RuntimeError, ValueError) as error:
        return str(error).strip().splitlines()[-1]
    return ""


def table(rows):
    """Markdown: a row per variant, the time compared with that of the release at as many heads."""
    lines = ["| tree | options | heads | dKV, buffer | its tail | dKV, bf16 | dQ | time (least .. most) | | spills |"]
    lines.append("|" + " --- |" * 10)
    first = {row["heads"]: row["ms"] for row in reversed(rows) if row["tree"] == "pristine" and not row["options"]}
    for row in rows:
        options = ", ".join(f"{name}={value}" for name, value in row["options"].items())
        start = f"| {row['tree']} | {options} | {row['heads']} |"
        if row["refused"]:
            lines.append(f"{start} | | | | {row['refused']} | | |")
            continue
        errors = " | ".join(f"{row[name]:.3e}" for name in ("buffer", "buffer_tail", "output", "dq"))
        spread = f"{row['ms']:.3f} ms ({row['ms_min']:.3f} .. {row['ms_max']:.3f})"
        spills = f"{row['spill_stores']} / {row['spill_loads']} B" if "spill_stores" in row else ""
        lines.append(f"{start} {errors} | {spread} | {row['ms'] / first[row['heads']] - 1:+.1%} | {spills} |")
    return "\n".join(lines) + "\n"


def main():
    """Compile in parallel, compare each with float64, then time all of them in turns."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--table", action="store_true", help="measure nothing")
    parser.add_argument("--data", type=Path, default=HERE / "data")
    arguments = parser.parse_args()
    if arguments.table:
        rows = json.loads((arguments.data / "variants.json").read_text())["variants"]
        (arguments.data / "variants.md").write_text(table(rows))
        return
    trees = dict(tree.split("=", 1) for tree in arguments.tree)
    wanted = [(name, trees[name], options) for name, options in VARIANTS if name in trees]
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        refused = pool.starmap(build, wanted)
    inputs = ref.example(SIZES, 0)
    lse, delta, *_ = ref.run(*ref.load("pristine", trees["pristine"]), inputs)
    exact, exact_dq, exact_lse, exact_delta, left = ref.reference(inputs, lse, delta)
    tail, rows, kernels = exact[:, ref.VALUES :], [], []
    for (name, _, options), reason in zip(wanted, refused, strict=True):
        rows.append({"tree": name, "options": options, "heads": SIZES[1], "refused": reason})
    for (name, tree, options), row in zip(wanted, rows, strict=True):
        if row["refused"]:
            continue
        launch = kernel(name, tree, options)
        try:
            dq, buffer = ref.launched(launch, inputs, lse, delta)
        except RuntimeError as error:  # more shared memory than a block can have
            row["refused"] = str(error).strip().splitlines()[-1]
            continue
        kernels.append((row, launch))
        row |= {"buffer": ref.error(buffer, exact), "buffer_tail": ref.error(buffer[:, ref.VALUES :], tail)}
        row |= {"output": ref.error(buffer.bfloat16(), exact), "dq": ref.error(dq, exact_dq)}
        _, buffer = ref.launched(launch, inputs, exact_lse.float(), exact_delta.float())
        row |= {"buffer_with_exact_lse_and_delta": ref.error(buffer, exact), "times": []}
    for _ in range(4):
        for row, launch in kernels:
            row["times"] += ref.milliseconds(launch, inputs, lse, delta)
    for row, _ in kernels:
        times = row.pop("times")
        row |= {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
    floors = {"floor_exact_p": ref.error(left, exact), "floor_cast": ref.error(exact.bfloat16(), exact)}
    floors["floor_exact_p_and_lse"] = ref.error(ref.reference(inputs, exact_lse, delta)[-1], exact)
    floors["floor_exact_p_and_delta"] = ref.error(ref.reference(inputs, lse, exact_delta)[-1], exact)
    document = {"gpu": torch.cuda.get_device_name(), "tokens_heads_topk": SIZES, **floors, "variants": rows}
    (arguments.data / "variants.json").write_text(json.dumps(document, indent=1) + "\n")
    (arguments.data / "variants.md").write_text(table(rows))


if __name__ == "__main__":
    main()
