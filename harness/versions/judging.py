"""Judging other trees than the pinned one: a pristine lane each, several at once, through the one scheduler."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.core.words import Evidence, LaneName, LaneVerdict, Role, Verdict
from harness.host.eligibility import Planned
from harness.lane.cell import Cell
from harness.lane.record import CheckLine, LaneEnd, LaneRecord
from harness.lane.script import NO_SENTINEL, last_exception
from harness.pack.model import Pack
from harness.receipt import figures
from harness.schedule import lanes
from harness.schedule.scheduler import Account
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.upstream import download, uv
from harness.verdict import pack_verdict
from harness.verdict.change import Side
from harness.verdict.lane_verdict import FAILED
from harness.versions.timeline import RIGHT, WRONG, Entry

#: What a lane says that went through all of its checks. In any other its checks are not all there.
WHOLE = (WRONG, RIGHT, LaneVerdict.CONTROL_FAILED)


@dataclass(frozen=True)
class Candidate:
    """One thing to judge."""

    label: str  # what the table calls it
    upstream: str | None = None  # for ``--upstream``; None is the pinned release
    date: str = ""  # when the index took it in, or empty
    reason: str = ""  # why it cannot be judged at all; empty where it can be tried
    is_pinned: bool = False  # whether it is what pack.toml states
    sha256: str = ""  # of a release's archive, where it is known: by it a lane that ended before is found again


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

    def every(self, wanted: list[Candidate]) -> tuple[list[Entry], Account]:
        """Judge candidates; return what was judged, in their order, and what came of the lanes."""
        cells = [self._cell(candidate) for candidate in wanted]
        account = lanes.run(self.session, [cell for cell in cells if isinstance(cell, Cell)], receipts=False)
        entries = [self._entry(candidate, cell, account) for candidate, cell in zip(wanted, cells, strict=True)]
        return [entry for entry in entries if entry is not None], account

    def one(self, candidate: Candidate) -> Entry:
        """Judge a single candidate. KeyboardInterrupt: the user interrupted. HarnessError: its lane was not run."""
        entries, account = self.every([candidate])
        if account.interrupted:
            raise KeyboardInterrupt
        if not entries:
            raise HarnessError(next(iter(account.not_run.values()), "a lane did not end"))
        return entries[0]

    def _cell(self, candidate: Candidate) -> Cell | Side:
        """Return the cell of a candidate, or why it has none."""
        if candidate.reason:
            return Side(LaneVerdict.UNSUPPORTED, candidate.reason)
        request = Request(candidate.upstream, self._of_its_day(candidate), (LaneName.PRISTINE,), self.timeout)
        planned = Planned(self.target, self.evidence)
        try:
            cell = cell_of(self.pack, planned, request, self.session.host, self.session.cache)
        except UnavailableError as error:
            return Side(LaneVerdict.ERROR, str(error))
        return replace(cell, column=re.sub(r"[^\w.-]+", "_", candidate.label), tree=cell.tree or candidate.sha256)

    def _of_its_day(self, candidate: Candidate) -> tuple[str, ...]:
        """Return what a script that a stranger wrote wants beside another release, as of the day after that release.

        Nothing where no wheels meet it: then that release is tried with the pack's own dependencies.
        """
        script, cache = self.pack.definition.script, self.session.cache
        if script is None or not script.requires or candidate.upstream is None or cache.offline:
            return ()
        after = dt.date.fromisoformat(candidate.date) + dt.timedelta(days=2) if candidate.date else ""
        package, *others = script.requires
        asked = "\n".join([f"{package}=={candidate.label}", *others])
        cache.tell(f"resolving what {package} {candidate.label} requires")
        try:
            pinned = uv.compiled(asked, self.session.host.python, f"{after}T00:00:00Z" if after else "")
        except uv.UvError:
            return ()
        own = canonicalize_name(self.pack.definition.upstream.package)
        return tuple(pin for pin in uv.PIN.findall(pinned) if canonicalize_name(pin.partition("==")[0]) != own)

    def _entry(self, candidate: Candidate, cell: Cell | Side, account: Account) -> Entry | None:
        """Say what came of a candidate; None where its lane did not end."""
        side = cell if isinstance(cell, Side) else side_of(self.session, cell, account)
        if side is None:
            return None
        verdict, reason, record, figure = side.verdict, side.reason, side.record, ""
        if record is not None:
            figure = figures.leading(self.pack.definition.leading_figure, record, None)
            if self.about:
                verdict, reason = by_checks(record, verdict, reason, self.about)
            elif side.verdict in (WRONG, RIGHT):
                reason = ""  # the script's own, which lists its checks
        return Entry(candidate.label, candidate.date, verdict, figure, reason, record.seconds if record else 0.0)


def side_of(session: Session, cell: Cell, account: Account) -> Side | None:
    """Say what came of the one lane of a cell; None where the user interrupted, or it was not run."""
    outcome = account.results.get(cell.name)
    if outcome is None or outcome.runs:
        return _side(session, outcome.last[0]) if outcome else None
    is_unsupported = cell.evidence is not None and outcome.judgement.verdict == Verdict.UNSUPPORTED
    return Side(LaneVerdict.UNSUPPORTED if is_unsupported else LaneVerdict.ERROR, outcome.judgement.reason)


def _side(session: Session, end: LaneEnd) -> Side:
    """Say what came of a lane on another tree than the pinned one.

    A surprise inside the script, such as a name that this tree does not have, is UNSUPPORTED here, never the bug.
    """
    record = end.record
    if record is None:
        return Side(LaneVerdict.ERROR, "its lane did not begin", end.version)
    surprised = record.verdict == LaneVerdict.ERROR and record.reason.startswith(NO_SENTINEL)
    if end.log is None or not surprised or record.exit_status not in FAILED:
        return Side(record.verdict, record.reason, end.version, record)
    text = (session.folder / end.log.file).read_text(encoding="utf-8", errors="replace")
    return Side(LaneVerdict.UNSUPPORTED, last_exception(text) or record.reason, end.version, record)


def by_checks(record: LaneRecord, verdict: LaneVerdict, reason: str, about: tuple[str, ...]) -> tuple[LaneVerdict, str]:
    """Return the verdict of the checks that `about` names, and why, with the other controls that are wrong.

    One control among them has to be right: a release in which nothing works has no bug of its own. `verdict` and
    `reason` are what the lane says as a whole, and stay where it did not go through all of its checks.
    """
    if verdict not in WHOLE:
        return verdict, reason
    names = pack_verdict.chosen((line.name for line in record.checks), about)
    judged = [line for line in record.checks if line.name in names and line.ok is not None]
    if wrong := _wrong_controls(judged):
        return LaneVerdict.CONTROL_FAILED, ", ".join(wrong)
    if not any(line.role == Role.CONTROL for line in judged):
        return LaneVerdict.UNSUPPORTED, f"no control among {', '.join(about)} could be judged"
    defects = [line.ok for line in judged if line.role == Role.DEFECT]
    if not defects:
        return LaneVerdict.UNSUPPORTED, f"no defect check among {', '.join(about)} could be judged"
    others = _wrong_controls(line for line in record.checks if line.name not in names)
    beside = f"; controls of other options are wrong: {', '.join(others)}" if others else ""
    found = LaneVerdict.FIX_VALIDATED if all(defects) else LaneVerdict.BUG_REPRODUCED
    return found, f"by {len(judged)} of {len(record.checks)} checks{beside}"


def _wrong_controls(lines: Iterable[CheckLine]) -> list[str]:
    return [line.name for line in lines if line.role == Role.CONTROL and line.ok is False]


def releases(cache: Cache, pack: Pack, wanted: str) -> list[Candidate]:
    """List the releases of a pack's upstream that lie in a range such as ``>=0.5``, the oldest first.

    Pre-releases are listed only where the range names one. An empty range is every final release.
    """
    upstream = pack.definition.upstream
    package, pinned = upstream.package, upstream.version
    try:
        specifier = SpecifierSet(wanted)
    except InvalidSpecifier:
        raise HarnessError(f"--range {wanted!r}: no version range. Next: --range '>=0.5,<0.9'") from None
    listed = download.releases(cache, package, wheels_only=upstream.is_wheel)
    inside = set(specifier.filter(one.version for one in listed))
    if not inside:
        every = ", ".join(one.version for one in listed[-8:])
        raise HarnessError(f"--range {wanted!r}: no release of {package} lies in it. The newest: {every}")
    found = []
    for one in (one for one in listed if one.version in inside):
        is_pinned = bool(pinned) and Version(one.version) == Version(pinned)  # no release is where a commit is pinned
        named = None if is_pinned else f"{package}=={one.version}"
        reason = "" if one.file else "no file of it that this interpreter could read"
        found.append(Candidate(one.version, named, one.date, reason, is_pinned, one.sha256))
    return found
