"""summary.md and junit.xml: the sweep for a pull request's page and for a build server."""

from __future__ import annotations

import re
from collections import Counter
from xml.etree import ElementTree as ET

from harness.core import markdown
from harness.core.words import Verdict
from harness.sweep.baseline import OF_VERDICT
from harness.sweep.results import NOT_HERE, NOT_RUN, CellRow, Results

#: What XML 1.0 has no way to write.
NOT_XML = re.compile("[^\t\n\r\u0020-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def headline(results: Results) -> str:
    """Say the sweep in one line."""
    rows = results.cells
    counts = Counter(row.verdict for row in rows)
    worse = sum(row.needs_attention for row in rows) + sum(bool(gpu.reason) for gpu in results.gpus)
    worse += len(results.notes)
    known = sum(bool(row.known) for row in rows)
    state = f"{worse} need{'s' * (worse == 1)} attention" if worse else "nothing needs attention"
    state += f", {known} known" if known else ""
    said = ", ".join(f"{count} {verdict}" for verdict, count in counts.most_common())
    return f"{state}; {len(rows)} cells: {said}" + ("" if results.finished else "; INTERRUPTED")


def change_lines(results: Results) -> list[str]:
    """List what changed or needs attention, the worst first, a line each."""
    faults = [
        f"{gpu.place} ({gpu.name}) left the pool after {gpu.task}: {gpu.reason}" for gpu in results.gpus if gpu.reason
    ]
    worse: list[str] = []
    good: list[str] = []
    for row in results.cells:
        if row.known:
            good.insert(0, f"{row.name}: KNOWN {row.known}: {_deviates(row)}")
            continue
        for change in row.changes:
            line = f"{row.name}: {change.kind.upper()}: {change.text}"
            (worse if change.worse else good).append(line if not change.worse else f"{line}{_because(row)}")
            if row.bisected and change.kind in OF_VERDICT:
                (worse if change.worse else good).append(f"{row.name}: {row.bisected}")
        if row.deviation and not any(change.worse for change in row.changes):
            worse.append(f"{row.name}: STILL {row.says}: {row.deviation}")
    return [*results.notes, *faults, *worse, *good]


def calm(results: Results) -> str:
    """Say what stands where no change is listed."""
    return "Nothing changed." if results.has_judged else "Nothing was judged."


def _deviates(row: CellRow) -> str:
    worse = [f"{change.kind.upper()}: {change.text}" for change in row.changes if change.worse]
    return "; ".join(worse) or f"{row.says}: {row.deviation}"


def _because(row: CellRow) -> str:
    return f" ({row.reason})" if row.reason and all(row.reason not in change.text for change in row.changes) else ""


def summary(results: Results) -> str:
    """Write summary.md: first what changed, then every cell."""
    host = results.host
    lines = change_lines(results)
    changed = "\n".join(f"- {markdown.escaped(markdown.plain(line))}" for line in lines) or calm(results)
    header = ["pack", "target", "release", "evidence", "verdict", "figure", "seconds", "remark"]
    rows = [
        [row.pack, row.target, _release(row), row.evidence, row.says, row.figure, _seconds(row), _remark(row)]
        for row in results.cells
    ]
    here = f"Python {host.python}, torch {host.torch}, triton {host.triton}"
    gpus = ", ".join(gpu.name for gpu in results.gpus) or "no GPU"
    return (
        f"# Sweep {results.run}: {headline(results)}\n\n"
        f"{results.lanes_run} lanes in {results.seconds:.0f} s on {gpus}; {here}. "
        f"Compared with {results.baseline}.\n\n## Changed\n\n{changed}\n\n## Cells\n\n"
        f"{markdown.table(header, rows)}"
    )


def _release(row: CellRow) -> str:
    moving = "" if row.release == "pinned" else f" ({row.release}{f', as of {row.as_of}' if row.as_of else ''})"
    return f"{row.upstream} {row.version}{moving}"


def _seconds(row: CellRow) -> str:
    return f"{row.seconds:.1f}" if row.runs else ""


def _remark(row: CellRow) -> str:
    return "" if row.verdict in (Verdict.CONFIRMED, Verdict.FIXED_UPSTREAM) and not row.reason else row.reason


def junit(results: Results) -> str:
    """Write junit.xml: a suite for each pack, a case for each target and release."""
    root = ET.Element("testsuites", name=f"sweep {results.run}", time=f"{results.seconds:.3f}")
    packs = dict.fromkeys(row.pack for row in results.cells)
    for pack in packs:
        rows = [row for row in results.cells if row.pack == pack]
        cases = [_case(row) for row in rows]
        count = Counter(child.tag for case in cases for child in case)
        suite = ET.SubElement(root, "testsuite", name=pack, timestamp=results.started.partition("+")[0])
        suite.set("tests", str(len(rows)))
        suite.set("time", f"{sum(row.seconds for row in rows):.3f}")
        for plural, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
            suite.set(plural, str(count[tag]))
        suite.extend(cases)
    ET.indent(root, " ")
    return '<?xml version="1.0" encoding="UTF-8"?>\n' + ET.tostring(root, encoding="unicode") + "\n"


def _case(row: CellRow) -> ET.Element:
    name = " ".join(text for text in (row.target, row.evidence, "" if row.release == "pinned" else row.release) if text)
    case = ET.Element("testcase", classname=row.pack, name=name, time=f"{row.seconds:.3f}")
    worse = [f"{change.kind}: {change.text}" for change in row.changes if change.worse]
    message = _xml("; ".join([*worse, *([row.deviation] if row.deviation else [])]))
    if row.needs_attention:
        tag = "error" if row.verdict == Verdict.ERROR else "failure"
        ET.SubElement(case, tag, message=message, type=row.verdict).text = _xml(row.reason)
    elif row.known:
        ET.SubElement(case, "skipped", message=_xml(f"{row.verdict}, known {row.known}"))
    elif row.verdict in (NOT_RUN, NOT_HERE, Verdict.UNSUPPORTED):
        ET.SubElement(case, "skipped", message=_xml(f"{row.verdict}: {row.reason}"))
    return case


def _xml(text: str) -> str:
    return NOT_XML.sub("", markdown.plain(text))
