"""Condense the CSV files in data/: tables, figures for the report, and two plots. Never judged.

    python summarise.py

Reads context.csv, drift.csv and flash_norm.csv, and writes summary.json, context.md, flash_norm.md, drift.md,
context.svg and drift.svg beside them. Needs nothing but Python.
"""

import csv
import json
import math
import statistics
from html import escape
from pathlib import Path

DATA = Path(__file__).parent / "data"
CASE = ("tokens", "topk", "heads", "usage", "score", "gradient")
BASE = {"tokens": 4096.0, "topk": 512.0, "heads": 64.0, "usage": "uniform", "score": 1.0, "gradient": "normal"}
FLASH_DIM = 256
SERIES = (  # column, tree, colour, dashes, label
    ("output", "pristine", "#c0392b", "", "bf16 dKV, release"),
    ("output", "patched", "#2471a3", "", "bf16 dKV, patched"),
    ("floor_cast", "pristine", "#555555", "2 3", "float64 dKV, rounded once to bf16"),
    ("buffer", "pristine", "#c0392b", "7 4", "float32 buffer, release"),
    ("buffer", "patched", "#2471a3", "7 4", "float32 buffer, patched"),
    ("floor_exact_p", "pristine", "#555555", "7 2 2 2", "exact P and dP, the kernel's delta"),
)


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


def drift_table(rows):
    """Markdown: errors of sums over microbatches, averaged over seeds."""
    lines = ["| microbatches | buffer: release | patched | bf16 dKV: release | patched |", "|" + " --- |" * 5]
    for (number,), group in grouped(rows, ["microbatches"]).items():
        trees = grouped(group, ["tree"])
        both = [e(mean(trees[tree,], name)) for name in ("buffer", "output") for tree in ("pristine", "patched")]
        lines.append(f"| {number:.0f} | {' | '.join(both)} |")
    return "\n".join(lines) + "\n"


def ranges(rows, name):
    """Return the least, the largest and the mean value of a column."""
    values = [row[name] for row in rows]
    return {"least": min(values), "most": max(values), "mean": statistics.fmean(values)}


def summary(context, flash, drift):
    """Collect the figures that the report cites."""
    found = {}
    only = {
        "length": lambda row: all(row[key] == value for key, value in BASE.items() if key not in ("tokens", "topk")),
        "all": lambda _: True,
    }
    for name, wanted in only.items():
        for tree in ("pristine", "patched"):
            rows = [row for row in context if row["tree"] == tree and wanted(row)]
            columns = ("buffer", "buffer_tail", "output", "output_tail", "dq", "floor_cast", "floor_exact_p")
            found[f"{name}_{tree}"] = {column: ranges(rows, column) for column in columns}
    for tree in ("pristine", "patched"):
        rows = [row for row in context if row["tree"] == tree and all(row[key] == BASE[key] for key in CASE)]
        columns = ("buffer", "buffer_tail", "output", "dq", "floor_exact_p", "floor_cast", "ms")
        found[f"base_{tree}"] = {column: mean(rows, column) for column in columns}
    times = [found[f"base_{tree}"]["ms"] for tree in ("patched", "pristine")]
    found["base_time_change_percent"] = 100 * (times[0] / times[1] - 1)
    pairs = {key: {row["tree"]: row for row in group} for key, group in grouped(context, (*CASE, "seed")).items()}
    change = [pair["patched"]["ms"] / pair["pristine"]["ms"] - 1 for pair in pairs.values()]
    found["time_change_percent"] = {"least": 100 * min(change), "most": 100 * max(change)}
    found["dq_differs"] = sum(pair["patched"]["dq"] != pair["pristine"]["dq"] for pair in pairs.values())
    found["cases"] = len(pairs)
    for score, group in grouped([row for row in context if row["tree"] == "pristine"], ["score"]).items():
        at_base = [row for row in group if row["tokens"] == BASE["tokens"] and row["heads"] == BASE["heads"]]
        at_base = [row for row in at_base if row["usage"] == "uniform" and row["gradient"] == "normal"]
        at_base = [row for row in at_base if row["topk"] == BASE["topk"]]
        found[f"score_{score[0]:g}".replace(".", "_")] = {"output": mean(at_base, "output"), "dq": mean(at_base, "dq")}
    for (score,), group in grouped([row for row in flash if row["tokens"] == BASE["tokens"]], ["score"]).items():
        errors = {name: ranges(group, name) for name in ("dk", "dv", "dq")}
        found[f"flash_score_{score:g}".replace(".", "_")] = errors
    flat = [row for row in flash if row["score"] == 1]
    found["flash"] = {name: ranges(flat, name) for name in ("dk", "dv", "dq")}
    for (tree, number), group in grouped(drift, ("tree", "microbatches")).items():
        found[f"drift_{tree}_{number:.0f}"] = {name: mean(group, name) for name in ("buffer", "output")}
    return found


class Panel:
    """One pair of logarithmic axes in a plot, as SVG."""

    def __init__(self, left, title, xs, y_range):
        """Place the panel; x runs over powers of two."""
        self.left, self.top, self.width, self.height = left, 46, 400, 300
        self.xs, self.low, self.high = xs, *map(math.log10, y_range)
        self.parts = [f'<text x="{left}" y="{self.top - 12}" font-weight="bold">{escape(title)}</text>']
        for x in xs:
            label = f"{x:.0f}" if x < 1024 else f"{x / 1024:.0f}k"
            self.parts.append(f'<text x="{self.x(x)}" y="{self.top + 318}" text-anchor="middle">{label}</text>')
        for exponent in range(math.floor(self.low), math.ceil(self.high)):
            for digit in (1, 2, 5):
                if self.low <= math.log10(value := digit * 10.0**exponent) <= self.high:
                    y = self.y(value)
                    self.parts.append(f'<path d="M{left} {y}h{self.width}" stroke="#dddddd"/>')
                    text = f"{digit}e{exponent}"
                    self.parts.append(f'<text x="{left - 6}" y="{y + 4}" text-anchor="end">{text}</text>')

    def x(self, value):
        """Place a value on the x axis."""
        first, last = math.log2(self.xs[0]), math.log2(self.xs[-1])
        return round(self.left + 14 + (math.log2(value) - first) / (last - first) * (self.width - 28), 1)

    def y(self, value):
        """Place a value on the y axis."""
        return round(self.top + (self.high - math.log10(value)) / (self.high - self.low) * self.height, 1)

    def line(self, points, colour, dashes=""):
        """Draw a line with a mark at each point."""
        path = "L".join(f"{self.x(x)} {self.y(y)}" for x, y in points)
        self.parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"')
        self.parts[-1] += f' stroke-dasharray="{dashes}"/>' if dashes else "/>"
        for x, y in points:
            self.parts.append(f'<circle cx="{self.x(x)}" cy="{self.y(y)}" r="2.5" fill="{colour}"/>')


def svg(panels, legend, below):
    """Join panels and a legend to a picture."""
    width, lines, columns = 500 * len(panels) + 20, [], 1 if len(panels) == 1 else 3
    for number, (colour, dashes, label) in enumerate(legend):
        x, y = 60 + number % columns * 310, 410 + number // columns * 22
        dash = f' stroke-dasharray="{dashes}"' if dashes else ""
        lines.append(f'<path d="M{x} {y - 4}h34" stroke="{colour}" stroke-width="2"{dash}/>')
        lines.append(f'<text x="{x + 42}" y="{y}">{escape(label)}</text>')
    height = 425 + 22 * ((len(legend) - 1) // columns)
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    )
    opening += ' font-family="sans-serif" font-size="12">'
    labels = [
        f'<text x="{panel.left + panel.width / 2}" y="386" text-anchor="middle">{below}</text>' for panel in panels
    ]
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    return (
        "\n".join([opening, background, *(part for panel in panels for part in panel.parts), *labels, *lines, "</svg>"])
        + "\n"
    )


def context_plot(context, flash):
    """Draw errors of dKV by context length, for both top-k, and flash attention's dK beside them."""
    panels = []
    alike = [row for row in context if all(row[key] == BASE[key] for key in CASE if key not in ("tokens", "topk"))]
    for (topk,), rows in grouped(alike, ["topk"]).items():
        lengths = sorted({row["tokens"] for row in rows})
        panels.append(Panel(60 + 500 * len(panels), f"relative error of dKV, top-k {topk:.0f}", lengths, (8e-5, 4e-3)))
        for column, tree, colour, dashes, _ in SERIES:
            groups = grouped([row for row in rows if row["tree"] == tree], ["tokens"])
            panels[-1].line([(x, mean(groups[x,], column)) for x in lengths], colour, dashes)
        groups = grouped([row for row in flash if row["score"] == 1 and row["head_dim"] == FLASH_DIM], ["tokens"])
        panels[-1].line([(x, mean(groups[x,], "dk")) for x in lengths if (x,) in groups], "#27ae60", "")
    legend = [(colour, dashes, label) for _, _, colour, dashes, label in SERIES]
    legend.append(("#27ae60", "", f"bf16 dK, PyTorch flash, head dim {FLASH_DIM}"))
    return svg(panels, legend, "context length S")


def drift_plot(drift):
    """Draw errors of sums of dKV over microbatches."""
    numbers = sorted({row["microbatches"] for row in drift})
    panel, legend = Panel(60, "relative error of dKV summed over microbatches", numbers, (8e-5, 4e-3)), []
    for column, tree, colour, dashes, label in SERIES:
        if column in ("buffer", "output"):
            groups = grouped([row for row in drift if row["tree"] == tree], ["microbatches"])
            panel.line([(x, mean(groups[x,], column)) for x in numbers], colour, dashes)
            legend.append((colour, dashes, label))
    return svg([panel], legend, "microbatches")


def main():
    """Write everything anew."""
    context, flash, drift = (rows_of(f"{name}.csv") for name in ("context", "flash_norm", "drift"))
    (DATA / "summary.json").write_text(json.dumps(summary(context, flash, drift), indent=1) + "\n")
    (DATA / "context.md").write_text(context_table(context))
    (DATA / "flash_norm.md").write_text(flash_table(flash))
    (DATA / "drift.md").write_text(drift_table(drift))
    (DATA / "context.svg").write_text(context_plot(context, flash))
    (DATA / "drift.svg").write_text(drift_plot(drift))


if __name__ == "__main__":
    main()
