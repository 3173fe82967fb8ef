"""index.html: the night as one file that needs no network and no script."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from html import escape
from pathlib import Path

from harness import markdown
from harness.summary import number
from harness.sweep import digest
from harness.sweep.history import History, Mark
from harness.sweep.results import NOT_HERE, NOT_RUN, CellRow, LaneRow, Results
from harness.words import Verdict

STYLE = Path(__file__).with_name("page.css")
#: Of each log, its last bytes go into the page; the whole one lies beside it.
LOG_BYTES = 8 * 1024
#: Beyond this a patch is cut: packs are asked for minimal ones.
PATCH_BYTES = 64 * 1024
CALM = {Verdict.CONFIRMED, Verdict.FIXED_UPSTREAM, Verdict.REPRODUCED, Verdict.VALIDATED}


@dataclass(frozen=True)
class Page:
    """Writes the page of one night.

    Attributes:
        results: of the night.
        history: of the nights before.
        folder: of the night, where the logs lie.
        patches: the patch of each pack.

    """

    results: Results
    history: History
    folder: Path
    patches: dict[str, Path]

    def pieces(self) -> Iterator[str]:
        """Yield the page piece by piece: a night of many packs need not fit into memory."""
        results = self.results
        yield (
            '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>Sweep {escape(results.night)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n"
            "</head>\n<body>\n"
        )
        yield from self._head()
        targets = _columns(results.cells)
        for pack in dict.fromkeys(row.pack for row in results.cells):
            rows = [row for row in results.cells if row.pack == pack]
            first = rows[0]
            yield f'<section id="{escape(pack)}">\n<h2>{escape(pack)}</h2>\n'
            yield f'<p class="soft">{escape(first.title)} [{escape(first.kind)}, {escape(first.upstream)}]</p>\n'
            yield f'<div class="cells" style="--columns: {len(targets)}">\n'
            for row in rows:
                yield from self._cell(row, targets.index(row.target) + 1)
            yield "</div>\n</section>\n"
        yield "</body>\n</html>\n"

    def _head(self) -> Iterator[str]:
        results, host = self.results, self.results.host
        lines = digest.change_lines(results)
        mood = "bad" if results.status else "good"
        gpus = ", ".join(f"{gpu.place}: {gpu.name}" for gpu in results.gpus) or "no GPU"
        yield f"<header>\n<h1>Night {escape(results.night)}</h1>\n"
        yield f'<p class="headline {mood}">{escape(digest.headline(results))}</p>\n'
        yield (
            f'<p class="soft">{results.lanes_run} lanes run, {results.lanes_resumed} resumed, '
            f"{results.seconds:.0f} s on {escape(gpus)} and {host.jobs} lane(s) on the cores; "
            f"Python {escape(host.python)}, torch {escape(host.torch)}, triton {escape(host.triton)}"
            f"{', driver ' + escape(host.driver) if host.driver else ''}. "
            f"Compared with {escape(results.baseline)}.</p>\n"
        )
        yield "".join(f'<p class="change bad">{escape(note)}</p>\n' for note in results.notes)
        yield "</header>\n<h2>Changed</h2>\n"
        yield _list(lines) if lines else "<p>Nothing changed.</p>\n"

    def _cell(self, row: CellRow, column: int) -> Iterator[str]:
        suffix = "" if row.release == "pinned" else f" {row.release} {row.version}"
        seen = f"{row.evidence}, {row.seconds:.1f} s" if row.runs else row.evidence
        yield f'<details class="cell {_mood(row)}" id="{escape(row.name)}" style="grid-column: {column}">\n<summary>'
        yield f'<span class="target">{escape(row.target + suffix)}</span> '
        yield f'<span class="verdict">{escape(row.says)}</span> <small>{escape(seen)}</small>'
        yield f'<span class="figure">{escape(row.figure)}</span>' if row.figure else ""
        yield self._strip(row)
        yield '</summary>\n<div class="body">\n'
        yield _list([f"{change.kind}: {change.text}" for change in row.changes])
        yield f"<p>{escape(row.reason)}</p>\n" if row.reason else ""
        yield f"<p>Claims: {escape(', '.join(row.claims))}</p>\n" if row.claims else ""
        yield _lanes(row)
        yield _figures(row)
        for lane in row.lanes:
            yield self._log(lane)
        yield self._patch(row)
        yield f'<p><a href="{escape(row.receipt)}">receipt</a></p>\n' if row.receipt else ""
        yield "</div>\n</details>\n"

    def _strip(self, row: CellRow) -> str:
        """Draw one bar for each night, tonight's last."""
        tonight = Mark(self.results.night, row.verdict, row.needs_a_person)
        marks = [*self.history.marks.get(row.name, []), tonight]
        bars = "".join(
            f'<i class="{_colour(mark.verdict, worse=mark.worse)}" title="{escape(mark.night)}: {mark.verdict}"></i>'
            for mark in marks
        )
        counts = ", ".join(f"{verdict} {count}" for verdict, count in _counts(marks).items())
        return f'<span class="strip" role="img" aria-label="{len(marks)} nights: {escape(counts)}">{bars}</span>'

    def _log(self, lane: LaneRow) -> str:
        path = self.folder / lane.log
        if not lane.log or not path.is_file():
            return ""
        text = markdown.tail(markdown.plain(path.read_text(encoding="utf-8", errors="replace")), LOG_BYTES)
        link = f'<a href="{escape(lane.log)}">whole log</a>'
        return _folded(f"log of the {lane.lane} lane", f"<p>{link}</p>\n<pre>{escape(text)}</pre>")

    def _patch(self, row: CellRow) -> str:
        path = self.patches.get(row.pack)
        if path is None or not path.is_file():
            return ""
        text = path.read_text(encoding="utf-8", errors="replace")
        shown = text if len(text) <= PATCH_BYTES else text[:PATCH_BYTES] + "\n[... cut here ...]"
        return _folded("patch", f"<pre>{escape(markdown.plain(shown))}</pre>")


def _columns(rows: Iterable[CellRow]) -> list[str]:
    return sorted({row.target for row in rows}, key=lambda name: (name != "cpu", len(name), name))


def _colour(verdict: str, *, worse: bool) -> str:
    if worse:
        return "bad"
    if verdict in (NOT_HERE, NOT_RUN):
        return "none"
    return "good" if verdict in CALM else "warn"


def _mood(row: CellRow) -> str:
    return _colour(row.verdict, worse=row.needs_a_person)


def _counts(marks: list[Mark]) -> dict[str, int]:
    found: dict[str, int] = {}
    for mark in marks:
        found[mark.verdict] = found.get(mark.verdict, 0) + 1
    return found


def _list(lines: list[str]) -> str:
    items = "".join(f"<li>{escape(markdown.plain(line))}</li>\n" for line in lines)
    return f'<ul class="changes">\n{items}</ul>\n' if lines else ""


def _folded(title: str, body: str) -> str:
    return f"<details>\n<summary>{escape(title)}</summary>\n{body}\n</details>\n"


def _table(header: list[str], rows: list[list[str]]) -> str:
    head = "".join(f"<th>{escape(text)}</th>" for text in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(text)}</td>" for text in row) + "</tr>\n" for row in rows)
    return f'<div class="wide"><table>\n<tr>{head}</tr>\n{body}</table></div>\n'


def _lanes(row: CellRow) -> str:
    rows = [[lane.lane, ", ".join(lane.verdicts), f"{lane.seconds:.1f}", lane.place] for lane in row.lanes]
    return _table(["lane", "verdict", "seconds", "on"], rows) if rows else ""


def _figures(row: CellRow) -> str:
    def text(value: object, spread: object) -> str:
        return "-" if value is None else number(value) + ("" if spread is None else f" (spread {number(spread)})")

    rows = [
        [line.name, text(line.pristine, line.spread_pristine), text(line.patched, line.spread_patched), line.unit]
        for line in row.figures
    ]
    return _table(["figure", "pristine", "patched", "unit"], rows) if rows else ""
