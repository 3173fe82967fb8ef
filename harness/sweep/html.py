"""index.html: a sweep as one file that needs no network and no script."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import jinja2

from harness.core import markdown
from harness.core.words import Verdict
from harness.receipt.figures import number
from harness.sweep import text_outputs
from harness.sweep.results import FLAKY, NOT_HERE, NOT_RUN, CellRow, LaneRow, Results

TEMPLATE, STYLE = (Path(__file__).with_name(name) for name in ("index.html.j2", "html.css"))
#: Of each log, its last bytes go into the page, of many logs fewer of each; the whole ones lie beside it.
LOG_BYTES, LOGS_BYTES = 8 * 1024, 640 * 1024
#: Characters: beyond this a patch is cut, of many patches each sooner; packs have minimal ones.
PATCH_LENGTH, PATCHES_LENGTH = 64 * 1024, 480 * 1024
#: One character for each verdict, so that it is told apart without colour.
LETTERS = {
    "CONFIRMED": "C",
    "REPRODUCED": "R",
    "VALIDATED": "V",
    "FIXED_UPSTREAM": "F",
    "FIX_INEFFECTIVE": "I",
    "FIX_INCOMPLETE": "P",
    "PATCH_BREAKS": "B",
    "PATCH_STALE": "S",
    "CONTROL_FAILED": "X",
    "UNSUPPORTED": "U",
    "UNAVAILABLE": "N",
    "ERROR": "E",
    FLAKY: "~",
    NOT_RUN: "-",
    NOT_HERE: ".",
}
CALM = {Verdict.CONFIRMED, Verdict.FIXED_UPSTREAM, Verdict.REPRODUCED, Verdict.VALIDATED}


@dataclass(frozen=True)
class Page:
    """Writes the page of one sweep.

    Attributes:
        results: of the sweep.
        folder: of the run, where the logs lie.
        patches: the patch of each pack.

    """

    results: Results
    folder: Path
    patches: dict[str, Path]

    def pieces(self) -> Iterator[str]:
        """Yield the page piece by piece: a sweep of many packs need not fit into memory."""
        environment = jinja2.Environment(
            autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
        )
        environment.filters |= {"plain": markdown.plain, "number": number, "id": _anchor}
        template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))
        yield from template.generate(page=self, results=self.results, style=STYLE.read_text(encoding="utf-8"))

    @property
    def headline(self) -> str:
        """The sweep in one line."""
        return text_outputs.headline(self.results)

    @property
    def changes(self) -> list[str]:
        """What changed or needs attention, a line each."""
        return text_outputs.change_lines(self.results)

    @property
    def calm(self) -> str:
        """What is said where nothing changed."""
        return text_outputs.calm(self.results)

    @property
    def gpus(self) -> str:
        """The GPUs in one line."""
        return ", ".join(f"{gpu.place}: {gpu.name}" for gpu in self.results.gpus) or "no GPU"

    @functools.cached_property
    def rows(self) -> list[CellRow]:
        """The cells that are shown: without targets of which this host can judge nothing, which lost nothing either."""
        rows = self.results.cells
        here = {row.target for row in rows if row.verdict != NOT_HERE or row.needs_attention}
        return [row for row in rows if row.target in here]

    @property
    def absent(self) -> str:
        """Name the targets and the packs that are not shown; empty where all are."""
        shown = {row.target for row in self.rows} | {row.pack for row in self.rows}
        names = [name for row in self.results.cells for name in (row.target, row.pack) if name not in shown]
        return ", ".join(sorted(set(names)))

    @functools.cached_property
    def targets(self) -> list[str]:
        """The columns: every target that is shown, cpu first."""
        return sorted({row.target for row in self.rows}, key=lambda name: (name != "cpu", len(name), name))

    @functools.cached_property
    def packs(self) -> list[list[CellRow]]:
        """The cells of each pack."""
        found: dict[str, list[CellRow]] = {}
        for row in self.rows:
            found.setdefault(row.pack, []).append(row)
        return list(found.values())

    @functools.cached_property
    def verdicts(self) -> list[str]:
        """The verdicts that occur."""
        return list(dict.fromkeys(row.verdict for row in self.rows))

    @property
    def legend(self) -> str:
        """Say what the letters of the matrix stand for."""
        return ", ".join(f"{LETTERS.get(verdict, '?')} {verdict}" for verdict in sorted(self.verdicts))

    def letter(self, row: CellRow) -> str:
        """Return the letter of a cell's verdict."""
        return LETTERS.get(row.verdict, "?")

    def kinds(self, row: CellRow) -> str:
        """Return the classes by which a cell is filtered: its target, its verdict, whether it needs attention."""
        names = f"t{self.targets.index(row.target)} v{self.verdicts.index(row.verdict)}"
        return f"{names} attention" if row.needs_attention else names

    @functools.cached_property
    def log_bytes(self) -> int:
        """How much of each log goes into the page."""
        logs = sum(bool(lane.log) for row in self.rows for lane in row.lanes)
        return min(LOG_BYTES, LOGS_BYTES // max(logs, 1))

    def mood(self, row: CellRow) -> str:
        """Return the class of a cell."""
        return _colour(row.verdict, worse=row.needs_attention)

    def log(self, lane: LaneRow) -> str:
        """Return the end of a lane's log; empty where there is none."""
        path = self.folder / lane.log
        if not lane.log or not path.is_file():
            return ""
        return markdown.tail(markdown.plain(path.read_text(encoding="utf-8", errors="replace")), self.log_bytes)

    def patch(self, pack: str) -> str:
        """Return a pack's patch, cut where it is very long; empty where there is none."""
        path = self.patches.get(pack)
        if path is None or not path.is_file():
            return ""
        text = path.read_text(encoding="utf-8", errors="replace")
        most = min(PATCH_LENGTH, PATCHES_LENGTH // max(len(self.packs), 1))
        return markdown.plain(text if len(text) <= most else text[:most] + "\n[... cut here ...]")


def _colour(verdict: str, *, worse: bool) -> str:
    if worse:
        return "bad"
    if verdict in (NOT_HERE, NOT_RUN, Verdict.UNAVAILABLE):
        return "none"
    return "good" if verdict in CALM else "warn"


def _anchor(name: str) -> str:
    """Return the id of a cell's element: no name in an address needs escapes."""
    return name.replace("/", ".").replace("@", ".")
