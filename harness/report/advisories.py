"""OSV records of the bugs that packs prove, in ``advisories/``: the versions that were judged, and their verdicts.

A version is listed as affected only where a lane judged exactly that version. The verdict stands in a committed receipt
of the pinned release, or in a row of ``data/history.TARGET.json``, of `runner.py versions --record`. A range claims no
more: it begins at the last wrong version and ends at the right version that follows in the package index.
"""

import datetime as dt
import fnmatch
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.core import Evidence, HarnessError, Kind, LaneName, LaneVerdict, Role, Verdict, structure
from harness.pack import Pack, judges
from harness.receipt import staleness
from harness.receipt.receipt import load_all, load_as, to_json
from harness.report import links
from harness.upstream.source import SourceKind
from harness.verdict import pack_verdict
from harness.versions import timeline
from harness.versions.timeline import RIGHT, WRONG, History, Period

#: OSV reserves ``x_`` for databases that it does not collect.
PREFIX = "x_WRONG-NUMERICS-"
#: The version of the OSV schema; the records use nothing newer.
SCHEMA_VERSION = "1.7.0"
#: Kinds of bug that raise no error and no warning.
SILENT = frozenset({Kind.WRONG_RESULT, Kind.SILENT_FALLBACK, Kind.PRECISION})
#: The last paragraph of every record.
SCOPE = (
    "The versions listed were judged one by one, each by a test that runs on that release; a version that is not "
    "listed, also one between two that are, was not found affected, and may not have been judged at all: "
    "database_specific.judged has every one that was."
)


class State(StrEnum):
    """What lanes showed of a version. It is NOT_JUDGED also where a lane ran and could not judge it."""

    AFFECTED = "affected"
    UNAFFECTED = "not affected"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Lane:
    """What one lane showed of one version; `outdated` says why it was not judged by today's pack."""

    verdict: LaneVerdict
    target: str
    evidence: Evidence
    reason: str = ""
    gpu: str = ""
    outdated: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """The evidence in words."""
        place = f"{self.target}, {self.gpu}" if self.gpu else self.target
        changes = f" ({'; '.join(self.outdated)} since)" if self.outdated else ""
        return f"{self.evidence} on {place}{changes}"


#: The lanes of each version, as the package index writes it, the oldest version first.
Lanes = dict[str, list[Lane]]
#: Neighbours in one history. Where their verdicts differ, no other final release lies between them in the package
#: index, except yanked releases. This holds for a history from a bisection, too.
Adjacent = set[tuple[str, str]]


def decisive(lanes: Iterable[Lane]) -> Lane:
    """Return the lane that counts for a version.

    A judged lane comes before an unjudged lane, a lane by today's pack before an outdated lane, and wrong before right:
    a bug that one target shows is in the version.
    """
    return min(lanes, key=lambda lane: (lane.verdict not in (WRONG, RIGHT), bool(lane.outdated), lane.verdict != WRONG))


def known_versions(pack: Pack) -> tuple[Lanes, Adjacent]:
    """Gather what the committed receipts and histories of a pack say about releases."""
    lanes: Lanes = defaultdict(list)
    adjacent: Adjacent = set()
    for receipt in load_all(pack.receipts, lanes=False):
        verdict = pack_verdict.PRISTINE.get(receipt.verdict)
        is_release = receipt.upstream.origin == SourceKind.PINNED and not pack.definition.upstream.is_commit
        if verdict is not None and is_release:
            outdated = tuple(staleness.reasons(pack, receipt))
            lane = Lane(verdict, receipt.target, receipt.evidence, "", receipt.host.gpu, outdated)
            lanes[receipt.upstream.version].append(lane)
    for path in sorted((pack.folder / "data").glob("history.*.json")):
        history = load_as(path, History, "runner.py versions --record")
        rows = history.rows if history.over == "release" else ()  # nobody installs a commit
        adjacent |= set(itertools.pairwise(row.label for row in rows))
        outdated = (judges.CHANGED,) if judges.changed(pack, history.probe, history.meaning) else ()
        for row in rows:
            lanes[row.label].append(Lane(row.verdict, history.target, history.evidence, row.reason, "", outdated))
    try:
        return {version: lanes[version] for version in sorted(lanes, key=Version)}, adjacent
    except InvalidVersion as error:
        raise HarnessError(f"{pack.name}/data: {error}. Next: runner.py versions --record") from None


def _describe_period(pack: Pack, adjacent: Adjacent, period: Period) -> dict[str, str]:
    """Say where a stretch of wrong versions begins and ends, as exactly as the verdicts allow."""
    first, last, definition = period.first, period.last, pack.definition
    since, head = f"since {first}", definition.head
    if (period.before, first) not in adjacent:
        since += f" or earlier{f', after {period.before}' if period.before else ''}"
    if period.after:
        fixed = f"fixed in {period.after}"
        fixed += "" if (last, period.after) in adjacent else f" or earlier, after {last}"
    elif definition.fixed_in:
        fixed = f"fixed in {definition.fixed_in}, as the pack states"
    elif head is not None and head.verdict == Verdict.FIXED_UPSTREAM:
        fixed = f"fixed on the default branch by {head.fixed_by[:12]}, in no release that was judged"
    else:
        fixed = f"not fixed in {last}"
    return {"first_affected": first, "last_affected": last, "since": since, "fixed": fixed}


def _judgement(lanes: list[Lane]) -> dict[str, object]:
    decisive_lane = decisive(lanes)
    verdict = decisive_lane.verdict
    if verdict not in (WRONG, RIGHT):
        reason = f"{verdict} {decisive_lane.reason}".strip()
        return {"state": State.NOT_JUDGED.value, "evidence": [], "reason": reason}
    agreeing = [lane for lane in lanes if lane.verdict == verdict]
    fresh = {(lane.evidence, lane.target) for lane in agreeing if not lane.outdated}
    shown = (lane for lane in agreeing if not lane.outdated or (lane.evidence, lane.target) not in fresh)
    evidence = sorted((lane.evidence.rank, lane.target, lane.text) for lane in shown)
    state = State.AFFECTED if verdict == WRONG else State.UNAFFECTED
    return {"state": state.value, "evidence": list(dict.fromkeys(text for _, _, text in evidence)), "reason": ""}


def workaround(pack: Pack) -> str:
    """Return the workaround of pack.toml, and the release on which a check has shown it; empty without a workaround."""
    remedy = pack.definition.workaround
    if remedy is None:
        return ""
    for receipt in load_all(pack.receipts):
        checks = receipt.lanes[LaneName.PRISTINE].checks if LaneName.PRISTINE in receipt.lanes else ()
        right = {check.name: check.ok for check in checks if check.role == Role.CONTROL and check.ok is not None}
        groups = [fnmatch.filter(right, pattern) for pattern in remedy.checks]
        if all(group and all(right[name] for name in group) for group in groups):
            return f"{remedy.text} (shown on {receipt.upstream.version})"
    raise HarnessError(
        f"{pack.name}/pack.toml: workaround.checks: no receipt has a control named {', '.join(remedy.checks)} "
        f"that is right. Next: runner.py run {pack.name} --record"
    )


def _references(pack: Pack) -> list[dict[str, str]]:
    definition = pack.definition
    repository = definition.upstream.repository.removesuffix(".git").rstrip("/")
    references = [{"type": "PACKAGE", "url": repository}]
    report = links.page(f"packs/{pack.name}/README.md")
    references += [{"type": "EVIDENCE", "url": report}] if report else []
    head = definition.head
    if head is not None and head.fixed_by:
        references.append({"type": "FIX", "url": f"{repository}/commit/{head.fixed_by}"})
    return references + [{"type": "WEB", "url": thread.url} for thread in definition.threads]


def _details(pack: Pack, periods: list[dict[str, str]], remedy: str) -> str:
    note = "No error and no warning tells the user." if pack.definition.kind in SILENT else ""
    lines = [f"{pack.definition.kind}: {pack.definition.title}. {note}".strip()]
    lines += [f"{period['since']}; {period['fixed']}." for period in periods]
    lines += [f"Workaround: {remedy}." if remedy else "", SCOPE]
    return "\n\n".join(line[0].upper() + line[1:] for line in lines if line)


def document(pack: Pack) -> dict[str, Any] | None:
    """Return a pack's record without its times; None where the pack proves no bug of a release."""
    definition, (lanes, adjacent) = pack.definition, known_versions(pack)
    verdicts = {version: decisive(judged).verdict for version, judged in lanes.items()}
    wrong_versions = [version for version, verdict in verdicts.items() if verdict == WRONG]
    if definition.kind == Kind.CLEANUP or not definition.advisory or not wrong_versions:
        return None
    stretches, remedy = timeline.periods(verdicts), workaround(pack)
    periods = [_describe_period(pack, adjacent, stretch) for stretch in stretches]
    package = str(canonicalize_name(definition.upstream.package))
    affected: dict[str, Any] = {
        "package": {"ecosystem": "PyPI", "name": package, "purl": f"pkg:pypi/{package}"},
        "versions": wrong_versions,
    }
    ranges = [
        {"type": "ECOSYSTEM", "events": [{"introduced": stretch.last}, {"fixed": stretch.after}]}
        for stretch in stretches
        if (stretch.last, stretch.after) in adjacent
    ]
    report = f"packs/{pack.name}/README.md"
    return {
        "schema_version": SCHEMA_VERSION,
        "id": PREFIX + pack.name.partition("_")[0],
        "summary": definition.title,
        "details": _details(pack, periods, remedy),
        "affected": [affected | ({"ranges": ranges} if ranges else {})],
        "references": _references(pack),
        "database_specific": {
            "pack": pack.name,
            "kind": definition.kind.value,
            "silent": definition.kind in SILENT,
            "report": links.page(report) or report,
            "workaround": remedy,
            "periods": periods,
            "judged": {version: _judgement(judged) for version, judged in lanes.items()},
        },
    }


def _load_record(path: Path) -> dict[str, Any]:
    """Return the record at `path`; an empty dict where it is missing or cannot be read."""
    try:
        return dict(structure.loads(path.read_bytes()))
    except (OSError, TypeError, ValueError):
        return {}


@dataclass(frozen=True)
class Plan:
    """A change of one file: its new text, or None to delete it; `why` says what is wrong with the file."""

    path: Path
    why: str
    text: str | None


def plans(packs: list[Pack], folder: Path) -> list[Plan]:
    """List the records that are missing, differ from their packs, or have no pack."""
    stamp = dt.datetime.now(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    changes, names = [], set()
    for pack in packs:
        record = document(pack)
        if record is None:
            continue
        path = folder / f"{record['id']}.json"
        names.add(path.name)
        recorded = _load_record(path)
        times = {key: str(recorded.get(key, stamp)) for key in ("modified", "published")}
        if recorded != times | record:
            dated = dict.fromkeys(("schema_version", "id")) | times | {"modified": stamp} | record
            changes.append(Plan(path, "differs from its pack" if path.exists() else "is missing", to_json(dated)))
    orphans = [path for path in sorted(folder.glob(f"{PREFIX}*.json")) if path.name not in names]
    return changes + [Plan(path, "has no pack that proves a bug of a release", None) for path in orphans]
