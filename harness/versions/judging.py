"""Judging other trees than the pinned one: a pristine lane for each, several at once."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.core.words import Evidence, LaneName, LaneVerdict, Role, Verdict
from harness.host.eligibility import Planned
from harness.lane.cell import Cell
from harness.lane.record import LaneEnd, LaneRecord, check_names
from harness.lane.script import NO_SENTINEL, last_exception
from harness.pack.model import Pack
from harness.receipt import figures
from harness.schedule import lanes
from harness.schedule.account import Account
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.upstream import download
from harness.verdict import pack_verdict
from harness.verdict.change import Side
from harness.verdict.lane_verdict import FAILED
from harness.versions.timeline import RIGHT, WRONG, Entry

#: The verdicts of a lane that ran all of its checks.
WHOLE = (WRONG, RIGHT, LaneVerdict.CONTROL_FAILED)


@dataclass(frozen=True)
class Candidate:
    """A release or a commit to judge."""

    label: str  # its name in the table
    upstream: str | None = None  # for ``--upstream``; None is the pinned release
    date: str = ""  # of its upload to the index, or empty
    reason: str = ""  # why it cannot be judged at all, or empty
    is_pinned: bool = False  # whether pack.toml pins it
    sha256: str = ""  # of its archive, where that is known: the journal finds a lane of an earlier run by it


@dataclass(frozen=True)
class Judging:
    """One pack on one target, for any number of candidates."""

    session: Session
    pack: Pack
    target: str
    evidence: Evidence
    timeout: float | None = None
    about: tuple[str, ...] = ()  # the globs of the checks that decide; empty: all checks

    def every(self, candidates: list[Candidate]) -> tuple[list[Entry], Account]:
        """Judge candidates; return the entries of those whose lanes ended, in their order, and the account."""
        cells = [self._cell(candidate) for candidate in candidates]
        account = lanes.run(self.session, [cell for cell in cells if isinstance(cell, Cell)], receipts=False)
        entries = [self._entry(candidate, cell, account) for candidate, cell in zip(candidates, cells, strict=True)]
        return [entry for entry in entries if entry is not None], account

    def judge(self, candidate: Candidate) -> Entry:
        """Judge one candidate. KeyboardInterrupt: the user interrupted. HarnessError: its lane was not run."""
        entries, account = self.every([candidate])
        if account.interrupted:
            raise KeyboardInterrupt
        if not entries:
            raise HarnessError(next(iter(account.not_run.values()), "a lane did not end"))
        return entries[0]

    def _cell(self, candidate: Candidate) -> Cell | Side:
        """Return the cell of a candidate, or the side of one that cannot be judged."""
        if candidate.reason:
            return Side(LaneVerdict.UNSUPPORTED, candidate.reason)
        request = Request(candidate.upstream, (), (LaneName.PRISTINE,), self.timeout)
        planned = Planned(self.target, self.evidence)
        try:
            cell = cell_of(self.pack, planned, request, self.session.host, self.session.cache)
        except UnavailableError as error:
            return Side(LaneVerdict.ERROR, str(error))
        return replace(cell, column=re.sub(r"[^\w.-]+", "_", candidate.label), tree=cell.tree or candidate.sha256)

    def _entry(self, candidate: Candidate, cell: Cell | Side, account: Account) -> Entry | None:
        side = cell if isinstance(cell, Side) else side_of(self.session, cell, account)
        if side is None:
            return None
        verdict, reason, record, figure = side.verdict, side.reason, side.record, ""
        if record is not None:
            figure = figures.leading(self.pack.definition.leading_figure, record, None)
            if self.about:
                verdict, reason = _by_checks(side, record, self.about)
            elif side.verdict in (WRONG, RIGHT):
                reason = ""  # it only lists the checks
        return Entry(candidate.label, candidate.date, verdict, figure, reason, record.seconds if record else 0.0)


def side_of(session: Session, cell: Cell, account: Account) -> Side | None:
    """Return the result of the only lane of a cell; None where it did not end."""
    outcome = account.results.get(cell.name)
    if outcome is None or outcome.runs:
        return _side(session, outcome.last[0]) if outcome else None
    is_unsupported = cell.evidence is not None and outcome.judgement.verdict == Verdict.UNSUPPORTED
    return Side(LaneVerdict.UNSUPPORTED if is_unsupported else LaneVerdict.ERROR, outcome.judgement.reason)


def _side(session: Session, end: LaneEnd) -> Side:
    """Return the result of a lane on another tree than the pinned one.

    An exception of the script is UNSUPPORTED here, since that tree may have another API.
    """
    record = end.record
    if record is None:
        return Side(LaneVerdict.ERROR, "its lane did not begin", end.version)
    has_raised = record.verdict == LaneVerdict.ERROR and record.reason.startswith(NO_SENTINEL)
    if end.log is None or not has_raised or record.exit_status not in FAILED:
        return Side(record.verdict, record.reason, end.version, record)
    text = (session.folder / end.log.file).read_text(encoding="utf-8", errors="replace")
    return Side(LaneVerdict.UNSUPPORTED, last_exception(text) or record.reason, end.version, record)


def _by_checks(side: Side, record: LaneRecord, globs: tuple[str, ...]) -> tuple[LaneVerdict, str]:
    """Return the verdict of the checks that the globs name, and the reason, with the other controls that are wrong.

    One named control has to be judged, and none may be wrong: where nothing works, nothing shows the bug. The verdict
    of the whole lane stays where it did not run all of its checks.
    """
    if side.verdict not in WHOLE:
        return side.verdict, side.reason
    names = pack_verdict.matching_names((line.name for line in record.checks), globs)
    judged = [line for line in record.checks if line.name in names and line.ok is not None]
    if wrong_controls := check_names(judged, Role.CONTROL, ok=False):
        return LaneVerdict.CONTROL_FAILED, ", ".join(wrong_controls)
    if not any(line.role == Role.CONTROL for line in judged):
        return LaneVerdict.UNSUPPORTED, f"no control among {', '.join(globs)} could be judged"
    defects = [line.ok for line in judged if line.role == Role.DEFECT]
    if not defects:
        return LaneVerdict.UNSUPPORTED, f"no defect check among {', '.join(globs)} could be judged"
    others = (line for line in record.checks if line.name not in names)
    unrelated = check_names(others, Role.CONTROL, ok=False)
    remark = f"; controls of other options are wrong: {', '.join(unrelated)}" if unrelated else ""
    return RIGHT if all(defects) else WRONG, f"by {len(judged)} of {len(record.checks)} checks{remark}"


def releases(cache: Cache, pack: Pack, within: str) -> list[Candidate]:
    """List the releases of a pack's upstream in a range such as ``>=0.5``, the oldest first.

    An empty range holds every final release. Pre-releases are listed only where the range names one.
    """
    upstream = pack.definition.upstream
    package, pinned = upstream.package, upstream.version
    try:
        specifiers = SpecifierSet(within)
    except InvalidSpecifier:
        raise HarnessError(f"--range {within!r}: no version range. Next: --range '>=0.5,<0.9'") from None
    available = download.releases(cache, package, wheels_only=upstream.is_wheel)
    inside = set(specifiers.filter(release.version for release in available))
    if not inside:
        newest = ", ".join(release.version for release in available[-8:])
        raise HarnessError(f"--range {within!r}: no release of {package} lies in it. The newest: {newest}")
    candidates = []
    for release in available:
        if release.version not in inside:
            continue
        is_pinned = bool(pinned) and Version(release.version) == Version(pinned)  # empty where a commit is pinned
        source = None if is_pinned else f"{package}=={release.version}"
        reason = "" if release.file else "no file of it that this interpreter could read"
        candidates.append(Candidate(release.version, source, release.date, reason, is_pinned, release.sha256))
    return candidates
