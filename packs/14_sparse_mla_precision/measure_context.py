"""Errors and time of the SparseMLA backward by context length, top-k, heads, usage, scores and gradient. Never judged.

    PYTHONPATH=RELEASE:COMPANIONS python measure_context.py --tree pristine=FOLDER --tree patched=FOLDER

Needs a GPU. Each case is one input: forward, delta and backward of each tree as SparseMLA.backward calls them, and a
float64 reference computed in chunks of queries. A row per case and tree is appended to data/context.csv as soon as it
is measured, and what is there already is not measured again: a run that was cut off goes on where it stopped.
The committed rows of `patched` are of data/variant_both_subjects.patch: fix.patch and more threads, so their errors are
fix.patch's and their times are not.
"""

import argparse
import csv
import itertools
import multiprocessing
import statistics
import time
from pathlib import Path

import reference as ref

HERE = Path(__file__).parent
CASE = ("tokens", "topk", "heads", "usage", "score", "gradient", "seed", "tree")
ERRORS = ("buffer", "buffer_tail", "output", "output_tail", "dq", "floor_cast", "floor_cast_dq", "floor_exact_p")
ERRORS += ("floor_exact_p_tail", "lse", "delta")
TIMES = ("ms", "ms_min", "ms_max")
TAIL = ref.WIDTH - ref.VALUES
BASE = {"tokens": 4096, "topk": 512, "heads": 64, "usage": "uniform", "score": 1.0, "gradient": "normal", "seed": 0}


def grid():
    """List the cases: the base case, varied in one respect at a time, and context length by top-k."""
    for topk, tokens, seed in itertools.product((512, 2048), (512 << i for i in range(7)), (0, 1, 2)):
        if seed == 0 or tokens * topk <= 16384 * 512:  # more seeds where they are cheap
            yield BASE | {"tokens": tokens, "topk": topk, "seed": seed}
    for seed in (0, 1, 2):
        for heads in (16, 128):
            yield BASE | {"heads": heads, "seed": seed}
        for usage in ("window", "sinks"):
            yield BASE | {"usage": usage, "seed": seed}
            yield BASE | {"usage": usage, "seed": seed, "tokens": 16384}
        for score in (0.1, 0.5, 2.0, 4.0, 8.0):
            yield BASE | {"score": score, "seed": seed}
        for gradient in ("tokens", "channels"):
            yield BASE | {"gradient": gradient, "seed": seed}
    for heads in (16, 128):
        yield BASE | {"heads": heads, "tokens": 32768}
    for topk in (512, 2048):
        yield BASE | {"topk": topk, "tokens": 65536}


def build(name, tree, heads, topk):
    """In a process of its own: compile both kernels of a shape into tilelang's cache on disk."""
    ref.run(*ref.load(name, tree), ref.example((256, heads, topk), 0))


def measure(case, trees):
    """Measure one case on the given trees. Return a row for each."""
    sizes, settings = (case["tokens"], case["heads"], case["topk"]), (case["score"], case["usage"], case["gradient"])
    inputs = ref.example(sizes, case["seed"], *settings)
    exact, rows = None, []
    for name, (sparse, backward) in trees.items():
        lse, delta, dq, dkv, buffer = ref.run(sparse, backward, inputs)
        if exact is None:  # forward and delta are the same in both trees
            exact, exact_dq, exact_lse, exact_delta, left = ref.reference(inputs, lse, delta)
            tail = exact[:, ref.VALUES :]
            floors = {"floor_cast": ref.error(exact.bfloat16(), exact), "floor_exact_p": ref.error(left, exact)}
            floors["floor_cast_dq"] = ref.error(exact_dq.bfloat16(), exact_dq)
            floors["floor_exact_p_tail"] = ref.error(left[:, ref.VALUES :], tail)
        found = {"buffer": ref.error(buffer, exact), "buffer_tail": ref.error(buffer[:, ref.VALUES :], tail)}
        found |= {"output": ref.error(dkv, exact), "output_tail": ref.error(dkv[:, ref.VALUES :], tail)}
        found |= {"dq": ref.error(dq, exact_dq), "lse": float((lse - exact_lse).abs().max())}
        found |= {"delta": ref.error(delta, exact_delta)}
        kernel = backward._get_bwd_kernel(sizes[1], ref.VALUES, TAIL, sizes[2], 1, ref.SCALE, 32)  # noqa: SLF001
        times = ref.milliseconds(kernel, inputs, lse, delta)
        times = {"ms": statistics.median(times), "ms_min": min(times), "ms_max": max(times)}
        rows.append({**case, "tree": name, **floors, **found, **times})
    return rows


def shown(value):
    """Write a value as the CSV files have it."""
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def lookup(known, keys):
    """Return a function that tells whether a row with a case's values of `keys` is known."""
    done = {tuple(row[key] for key in keys) for row in known}
    return lambda case: tuple(shown(case[key]) for key in keys) in done


def left(known, names):
    """Yield the cases of which the known rows lack some tree, and the names of these trees."""
    has = lookup(known, CASE)
    for case in grid():
        if missing := [name for name in names if not has(case | {"tree": name})]:
            yield case, missing


def appended(path, fields):
    """Return the rows of a CSV file and a function that appends one; a file that is not there gets its header."""
    if not path.exists():
        path.write_text(",".join(fields) + "\n")
    with path.open(newline="") as file:
        known = list(csv.DictReader(file))

    def append(row):
        with path.open("a", newline="") as file:
            texts = {key: shown(value) for key, value in row.items()}
            csv.DictWriter(file, fields, lineterminator="\n").writerow(texts)

    return known, append


def main():
    """Compile what is needed in parallel, then measure case after case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tree", action="append", required=True, metavar="NAME=FOLDER")
    parser.add_argument("--data", type=Path, default=HERE / "data", help="where the CSV files are")
    parser.add_argument("--seconds", type=float, default=500, help="begin no new case after that time")
    arguments = parser.parse_args()
    end = time.monotonic() + arguments.seconds
    folders = dict(tree.split("=", 1) for tree in arguments.tree)
    known, append = appended(arguments.data / "context.csv", CASE + ERRORS + TIMES)
    cases = list(left(known, folders))
    shapes = {(case["heads"], case["topk"]) for case, _ in cases}
    with multiprocessing.get_context("spawn").Pool(8) as pool:
        pool.starmap(build, [(name, tree, *shape) for name, tree in folders.items() for shape in sorted(shapes)])
    trees = {name: ref.load(name, tree) for name, tree in folders.items()}
    for case, missing in cases:
        if time.monotonic() < end:
            for row in measure(case, {name: trees[name] for name in missing}):
                append(row)
                print(row, flush=True)


if __name__ == "__main__":
    main()
