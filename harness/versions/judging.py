"""Judging candidates: one pristine lane each, several at once, through the one scheduler."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.core import tracebacks
from harness.core.errors import HarnessError, UnavailableError
from harness.core.words import Evidence, Exit, LaneName, LaneVerdict, Verdict
from harness.host.eligibility import Planned
from harness.lane.record import LaneRecord
from harness.lane.script import NO_SENTINEL
from harness.pack.model import Pack
from harness.receipt import figures
from harness.receipt.receipt import LogRecord
from harness.schedule.journal import LaneEnd
from harness.schedule.scheduler import Account
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.schedule.workers import Failure, failure_of
from harness.upstream import download
from harness.upstream.source import SourceKind
from harness.verdict.cell import Cell
from harness.verdict.lane_verdict import FAILED
from harness.versions import candidates, narrowed, release_bisect
from harness.versions.candidates import Candidate
from harness.versions.timeline import Entry

Seen = Callable[[Entry], None]


class InterruptedJudgingError(Exception):
    """The user interrupted; `found` is what was judged until then, by index."""

    def __init__(self, found: dict[int, Entry]) -> None:
        super().__init__("interrupted")
        self.found = found


class LaneNotRunError(HarnessError):
    """A lane on which the next step depends was not run: the budget ended, or nothing could take it."""


@dataclass(frozen=True)
class Judging:
    """One pack, one target, any number of candidates.

    `about` names the checks that a candidate is judged by; empty: all of them, as a sweep judges.
    """

    session: Session
    pack: Pack
    target: str
    evidence: Evidence
    timeout: float | None = None
    about: tuple[str, ...] = ()

    def every(self, wanted: list[Candidate]) -> tuple[list[Entry], bool]:
        """Judge candidates; return what was judged, in their order, and whether the user interrupted."""
        found, account = self._judge(dict(enumerate(wanted)))
        return [found[index] for index in sorted(found)], account.interrupted

    def bisected(self, wanted: list[Candidate]) -> tuple[list[Entry], bool]:
        """Judge only what decides where the bug of the pinned release (or of the newest) begins and ends.

        Raises:
            HarnessError: that release does not have the bug, so there is nothing to search from.

        """
        last = len(wanted) - 1
        anchor = next((index for index, one in enumerate(wanted) if one.is_pinned), last)
        known: dict[int, Entry] = {}

        def judge(indices: set[int]) -> dict[int, Entry]:
            return self.needed({index: wanted[index] for index in indices})

        try:
            known |= judge({anchor})
            if known[anchor].verdict != LaneVerdict.BUG_REPRODUCED:
                raise HarnessError(
                    f"--bisect starts from {known[anchor].label}, which gives {known[anchor].verdict}. "
                    "Next: the same without --bisect",
                    status=Exit.DEVIATES,
                )
            release_bisect.drive([release_bisect.search(end, anchor) for end in (0, last)], known, judge)
        except InterruptedJudgingError as error:
            known |= error.found
            return [known[index] for index in sorted(known)], True
        return [known[index] for index in sorted(known)], False

    def one(self, candidate: Candidate) -> Entry:
        """Judge a single candidate.

        Raises:
            KeyboardInterrupt: the user interrupted.
            LaneNotRunError: its lane was not run.

        """
        try:
            return self.needed({0: candidate})[0]
        except InterruptedJudgingError:
            raise KeyboardInterrupt from None

    def needed(self, wanted: dict[int, Candidate]) -> dict[int, Entry]:
        """Judge candidates all of whose verdicts the next step needs.

        Raises:
            InterruptedJudgingError: the user interrupted.
            LaneNotRunError: one of the lanes was not run.

        """
        found, account = self._judge(wanted)
        if account.interrupted:
            raise InterruptedJudgingError(found)
        if len(found) < len(wanted):
            raise LaneNotRunError(next(iter(account.not_run.values()), "a lane did not end"))
        return found

    def _judge(self, wanted: dict[int, Candidate]) -> tuple[dict[int, Entry], Account]:
        found = {index: _refused(one, one.reason) for index, one in wanted.items() if one.reason}
        cells: dict[int, Cell] = {}
        for index, one in wanted.items():
            if not one.reason:
                try:
                    cells[index] = self._cell(one)
                except UnavailableError as error:
                    found[index] = _refused(one, str(error), LaneVerdict.ERROR)
        account = self.session.run(cells.values(), receipts=False)
        for index, cell in cells.items():
            try:
                entry = self._judged(wanted[index], cell, account.failed.get(cell.name))
            except Exception as error:  # noqa: BLE001 - what goes wrong with one candidate leaves the others' rows
                entry = _refused(wanted[index], failure_of(error, cell).reason, LaneVerdict.ERROR)
            if entry is not None:
                found[index] = entry
        return found, account

    def _judged(self, one: Candidate, cell: Cell, failure: Failure | None) -> Entry | None:
        """Say what came of a candidate; None where the user interrupted."""
        if cell.evidence is None:
            return _refused(one, cell.reason, LaneVerdict.ERROR)
        if failure is not None:
            refused = failure.verdict == Verdict.UNSUPPORTED
            return _refused(one, failure.reason, LaneVerdict.UNSUPPORTED if refused else LaneVerdict.ERROR)
        judged = self.session.judge.judged(cell)
        return self._entry(one, cell, judged.runs[-1].ends[0]) if judged is not None else None

    def _cell(self, one: Candidate) -> Cell:
        request = Request(one.upstream, one.dependencies, (LaneName.PRISTINE,), self.timeout)
        cell = cell_of(self.pack, Planned(self.target, self.evidence), request, self.session.host, self.session.cache)
        return replace(cell, column=re.sub(r"[^\w.-]+", "_", one.label), tree=cell.tree or one.sha256)

    def _entry(self, one: Candidate, cell: Cell, end: LaneEnd) -> Entry:
        """Say what a lane showed."""
        record = end.record
        if record is None:
            raise ValueError(f"{end.task} did not begin")
        verdict, reason = verdict_of(self.session, record, end.log)
        if self.about:
            verdict, reason = narrowed.by_checks(record, verdict, reason, self.about)
        elif verdict in (LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED):
            reason = ""  # the probe's own, which lists its checks
        return Entry(
            label=one.label,
            date=one.date or self._date(cell, end),
            verdict=verdict,
            figure=figures.leading(self.pack.definition.leading_figure, record, None),
            reason=reason,
            seconds=record.seconds,
        )

    def _date(self, cell: Cell, end: LaneEnd) -> str:
        """Return the date of the newest file in the release's archive, where the index stated none."""
        if cell.source.kind not in (SourceKind.PINNED, SourceKind.RELEASE):
            return ""
        package = self.pack.definition.upstream.package
        if cell.source.is_pinned and self.pack.definition.upstream.is_commit:
            return str(self.pack.definition.upstream.date)
        try:
            return candidates.date_in(download.fetch(self.session.cache, package, None, end.tree))
        except (HarnessError, OSError, ValueError):
            return ""


def _refused(one: Candidate, reason: str, verdict: LaneVerdict = LaneVerdict.UNSUPPORTED) -> Entry:
    return Entry(one.label, one.date, verdict, reason=reason)


def verdict_of(session: Session, record: LaneRecord, log: LogRecord | None) -> tuple[LaneVerdict, str]:
    """Return what a lane on another tree than the pinned one says, and why.

    A surprise inside the probe, such as a name that this tree does not have, is UNSUPPORTED here, never the bug.
    """
    surprised = record.verdict == LaneVerdict.ERROR and record.reason.startswith(NO_SENTINEL)
    if log is None or not surprised or record.exit_status not in FAILED:
        return record.verdict, record.reason
    text = (session.folder / log.file).read_text(encoding="utf-8", errors="replace")
    return LaneVerdict.UNSUPPORTED, tracebacks.last_exception(text) or record.reason
