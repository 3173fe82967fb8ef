"""Condense the CSV files in data/: tables, and figures for the report. Never judged.

    python summarise.py

Reads context.csv and flash_norm.csv, and writes summary.json, context.md and flash_norm.md beside them. Needs nothing
but Python.
"""

import csv
import json
import statistics
from pathlib import Path

DATA = Path(__file__).parent / "data"
CASE = ("tokens", "topk", "heads", "usage", "score", "gradient")
BASE = {"tokens": 4096.0, "topk": 512.0, "heads": 64.0, "usage": "uniform", "score": 1.0, "gradient": "normal"}


def rows_of(name):
    """Read a CSV file; what looks like a number becomes one."""
    with (DATA / name).open(newline="") as file:
        return [{key: converted(value) for key, value in row.items()} for row in csv.DictReader(file)]


def converted(text):
    """Turn a text into a number if it is one."""
    try:
        return float(text)
    except ValueError:
        return text


def mean(rows, name):
    """Average a column."""
    return statistics.fmean(row[name] for row in rows)


def e(value):
    """Write an error in a table."""
    return f"{value:.2e}"


def grouped(rows, keys):
    """Group rows by the values of some columns, in the order in which these appear."""
    groups = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups


def context_table(rows):
    """Markdown: a row per case, averaged over seeds."""
    lines = ["| S | top-k | heads | keys | scores | dO | seeds | buffer: release | patched | exact P, dP |"]
    lines[0] += " bf16: release | patched | rounded once | dQ: release | patched | time: release | patched | |"
    lines.append("|" + " --- |" * 18)
    for (tokens, topk, heads, usage, score, gradient), group in grouped(rows, CASE).items():
        trees = grouped(group, ["tree"])
        one, two = trees["pristine",], trees["patched",]
        cells = [f"{tokens:.0f}", f"{topk:.0f}", f"{heads:.0f}", usage, f"{score:g}", gradient, str(len(one))]
        cells += [e(mean(one, "buffer")), e(mean(two, "buffer")), e(mean(one, "floor_exact_p"))]
        cells += [e(mean(one, "output")), e(mean(two, "output")), e(mean(one, "floor_cast"))]
        cells += [e(mean(one, "dq")), e(mean(two, "dq"))]
        times = mean(one, "ms"), mean(two, "ms")
        cells += [f"{times[0]:.3f} ms", f"{times[1]:.3f} ms", f"{times[1] / times[0] - 1:+.1%}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def flash_table(rows):
    """Markdown: PyTorch's flash backend by head dimension, score and length."""
    lines = ["| S | head dim | scores | seeds | dK | dV | dQ | dK rounded once | dV rounded once |", "|" + " --- |" * 9]
    for (head_dim, score, tokens), group in sorted(grouped(rows, ("head_dim", "score", "tokens")).items()):
        errors = [e(mean(group, name)) for name in ("dk", "dv", "dq", "floor_cast_dk", "floor_cast_dv")]
        lines.append(f"| {tokens:.0f} | {head_dim:.0f} | {score:g} | {len(group)} | {' | '.join(errors)} |")
    return "\n".join(lines) + "\n"


def ranges(rows, name):
    """Return the least, the largest and the mean value of a column."""
    values = [row[name] for row in rows]
    return {"least": min(values), "most": max(values), "mean": statistics.fmean(values)}


def summary(context, flash):
    """Collect the figures that the report cites: errors of the release over lengths, and of flash attention."""
    fixed = {key: value for key, value in BASE.items() if key not in ("tokens", "topk")}
    release = [row for row in context if row["tree"] == "pristine" and fixed.items() <= row.items()]
    flat = [row for row in flash if row["score"] == 1]
    return {
        "length_pristine": {"output": ranges(release, "output")},
        "flash": {name: ranges(flat, name) for name in ("dk", "dv", "dq")},
    }


def main():
    """Write everything anew."""
    context, flash = (rows_of(f"{name}.csv") for name in ("context", "flash_norm"))
    (DATA / "summary.json").write_text(json.dumps(summary(context, flash), indent=1) + "\n")
    (DATA / "context.md").write_text(context_table(context))
    (DATA / "flash_norm.md").write_text(flash_table(flash))


if __name__ == "__main__":
    main()
