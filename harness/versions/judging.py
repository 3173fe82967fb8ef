"""Judging other trees than the pinned one: a pristine lane for each, several at once, or by bisection.

Bisection finds where the verdict changes in about log2(n) lanes. It assumes one change between two ends. A release that
cannot be judged is skipped, and is never the answer.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import Version

from harness.core import Cache, Evidence, Exit, HarnessError, LaneName, LaneVerdict, Role, Verdict
from harness.host.eligibility import Planned
from harness.lane import Cell, LaneEnd, LaneRecord, check_names, results
from harness.lane.script import NO_SENTINEL, last_exception
from harness.pack.model import Pack
from harness.receipt import figures
from harness.schedule import lanes
from harness.schedule.lanes import Account
from harness.schedule.selection import Request, cell_of
from harness.schedule.session import Session
from harness.upstream import download
from harness.upstream.download import ReleaseFile
from harness.verdict import pack_verdict
from harness.verdict.change import Side
from harness.verdict.lane_verdict import FAILED
from harness.versions.timeline import RIGHT, WRONG, Entry

#: The verdicts of a lane that ran all of its checks.
WHOLE = (WRONG, RIGHT, LaneVerdict.CONTROL_FAILED)


@dataclass(frozen=True)
class Judging:
    """One pack on one target, for any number of releases."""

    session: Session
    pack: Pack
    target: str
    evidence: Evidence
    timeout: float | None = None

    def is_pinned(self, release: ReleaseFile) -> bool:
        """Whether pack.toml pins a release."""
        pinned = self.pack.definition.upstream.version  # empty where a commit is pinned
        return bool(pinned) and Version(release.version) == Version(pinned)

    def every(self, releases: list[ReleaseFile]) -> tuple[list[Entry], bool]:
        """Judge releases; return the entries of those whose lanes ended, and whether the user interrupted."""
        cells = [self._cell(release) for release in releases]
        account = lanes.run(self.session, cells, receipts=False)
        sides = [side_of(self.session, cell, account) for cell in cells]
        pairs = zip(releases, sides, strict=True)
        return [self._entry(release, side) for release, side in pairs if side is not None], account.interrupted

    def _cell(self, release: ReleaseFile) -> Cell:
        planned = Planned(self.target, self.evidence)
        if not release.file:
            planned = Planned(self.target, None, "no file of it that this interpreter could read")
        source = None if self.is_pinned(release) else f"{release.package}=={release.version}"
        request = Request(source, (), (LaneName.PRISTINE,), self.timeout)
        cell = cell_of(self.pack, planned, request, self.session.host, self.session.cache)
        return replace(cell, column=release.version)

    def _entry(self, release: ReleaseFile, side: Side) -> Entry:
        definition = self.pack.definition
        verdict, reason, record, figure = side.verdict, side.reason, side.record, ""
        if record is not None:
            figure = figures.leading(definition.leading_figure, record, None)
            if definition.versions.checks:
                verdict, reason = _by_checks(side, record, definition.versions.checks)
            elif side.verdict in (WRONG, RIGHT):
                reason = ""  # it only lists the checks
        return Entry(release.version, release.date, verdict, figure, reason, record.seconds if record else 0.0)


def side_of(session: Session, cell: Cell, account: Account) -> Side | None:
    """Return the result of the only lane of a cell; None where the user interrupted it."""
    outcome = account.results.get(cell.name)
    if outcome is None:
        return None if account.interrupted else Side(LaneVerdict.ERROR, account.reason_not_run(cell))
    if outcome.runs:
        return _side(session, outcome.last[0])
    is_unsupported = outcome.judgement.verdict == Verdict.UNSUPPORTED
    return Side(LaneVerdict.UNSUPPORTED if is_unsupported else LaneVerdict.ERROR, outcome.judgement.reason)


def _side(session: Session, end: LaneEnd) -> Side:
    """Return the result of a lane on another tree than the pinned one.

    An exception of the script, or of the contract before its first test, is UNSUPPORTED here: that tree may have
    another API.
    """
    record = end.record
    if record is None:
        return Side(LaneVerdict.ERROR, "its lane did not begin", end.version)
    verdict, reason, has_failed = record.verdict, record.reason, record.verdict == LaneVerdict.ERROR
    if has_failed and reason.startswith(results.NOT_COLLECTED):
        verdict = LaneVerdict.UNSUPPORTED
    elif has_failed and reason.startswith(NO_SENTINEL) and record.exit_status in FAILED and end.log is not None:
        text = (session.folder / end.log.file).read_text(encoding="utf-8", errors="replace")
        verdict, reason = LaneVerdict.UNSUPPORTED, last_exception(text) or reason
    return Side(verdict, reason, end.version, record)


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
    for role in (Role.CONTROL, Role.DEFECT):
        if not any(line.role == role for line in judged):
            return LaneVerdict.UNSUPPORTED, f"no {role} check among {', '.join(globs)} could be judged"
    others = (line for line in record.checks if line.name not in names)
    unrelated = check_names(others, Role.CONTROL, ok=False)
    remark = f"; controls of other options are wrong: {', '.join(unrelated)}" if unrelated else ""
    is_right = all(line.ok for line in judged)
    return RIGHT if is_right else WRONG, f"by {len(judged)} of {len(record.checks)} checks{remark}"


def releases(cache: Cache, pack: Pack, within: str) -> list[ReleaseFile]:
    """List the releases of a pack's upstream in a range such as ``>=0.5``, the oldest first.

    An empty range holds every final release. Pre-releases are listed only where the range names one.
    """
    upstream = pack.definition.upstream
    try:
        specifiers = SpecifierSet(within)
    except InvalidSpecifier:
        raise HarnessError(f"--range {within!r}: no version range. Next: --range '>=0.5,<0.9'") from None
    available = download.releases(cache, upstream.package, wheels_only=upstream.is_wheel)
    inside = set(specifiers.filter(release.version for release in available))
    if not inside:
        newest = ", ".join(release.version for release in available[-8:])
        raise HarnessError(f"--range {within!r}: no release of {upstream.package} lies in it. The newest: {newest}")
    return [release for release in available if release.version in inside]


def search(judge: Callable[[int], Entry], end: int, anchor: int) -> None:
    """Judge what decides where, between `anchor` and `end`, the bug of `anchor` begins or ends.

    Until a right release is found, one that cannot be judged counts as the edge of what can be judged.
    """
    step = 1 if end > anchor else -1
    untried = list(range(anchor + step, end + step, step))
    place, is_bounded = len(untried) - 1, False
    while untried:
        entry = judge(untried[place])
        if entry.verdict == WRONG:
            untried = untried[place + 1 :]
        elif entry.is_judged or not is_bounded:
            is_bounded = is_bounded or entry.is_judged
            untried = untried[:place]
        else:
            del untried[place]
        place = len(untried) // 2


def bisect(judging: Judging, releases: list[ReleaseFile]) -> tuple[list[Entry], bool]:
    """Judge what decides where the bug of the pinned release, or else of the newest, begins and ends.

    Return the entries in the order of the releases, and whether the user interrupted.
    """
    entries: dict[int, Entry] = {}

    def judge(index: int) -> Entry:
        if index not in entries:
            judged, is_interrupted = judging.every([releases[index]])
            if is_interrupted:
                raise KeyboardInterrupt
            entries[index] = judged[0]
        return entries[index]

    last = len(releases) - 1
    anchor = next((index for index, release in enumerate(releases) if judging.is_pinned(release)), last)
    is_interrupted = False
    try:
        if judge(anchor).verdict != WRONG:
            raise HarnessError(
                f"--bisect starts from {judge(anchor).label}, which gives {judge(anchor).verdict}. "
                "Next: the same without --bisect",
                status=Exit.DEVIATES,
            )
        search(judge, 0, anchor)
        search(judge, last, anchor)
    except KeyboardInterrupt:
        is_interrupted = True
    return [entries[index] for index in sorted(entries)], is_interrupted
