"""OSV records of the bugs that packs prove, in ``advisories/``: which versions were judged, and what came of it.

A version is listed as affected only where a lane judged exactly that version: by a committed receipt of the pinned
release, or by a row of ``data/history.TARGET.json``, of `runner.py versions --record`. A range says no more: it
begins at the last wrong version and ends at the right one that follows it in the package index.
"""

from __future__ import annotations

import datetime as dt
import itertools
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.audit.records import PREFIX, State
from harness.core import files, strict_json
from harness.core.errors import HarnessError
from harness.core.words import Evidence, Kind, LaneName, LaneVerdict, Role, Verdict
from harness.pack import judges
from harness.pack.model import Pack
from harness.receipt import receipt, staleness
from harness.receipt.receipt import Receipt
from harness.report import links
from harness.verdict import pack_verdict
from harness.versions import timeline
from harness.versions.timeline import RIGHT, WRONG, Entry, History, Period

#: Of the OSV schema; the records use nothing that is newer.
SCHEMA_VERSION = "1.7.0"
#: Kinds of bug that no error and no warning tells the user of.
SILENT = frozenset({Kind.WRONG_RESULT, Kind.SILENT_FALLBACK, Kind.PRECISION})
#: Digits of a commit that a sentence shows.
SHOWN = 12
#: The last paragraph of every record.
SCOPE = (
    "The versions listed were judged one by one, each by a test that runs on that release; a version that is not "
    "listed, also one between two that are, was not found affected, and may not have been judged at all: "
    "database_specific.judged has every one that was."
)


@dataclass(frozen=True)
class Lane:
    """What one lane said of one version: the verdict, on what evidence, and why that is not of today's pack."""

    version: str
    verdict: LaneVerdict
    target: str
    evidence: Evidence
    reason: str = ""
    gpu: str = ""
    outdated: tuple[str, ...] = ()

    @property
    def text(self) -> str:
        """How it was shown, in words."""
        where = f"{self.target}, {self.gpu}" if self.gpu else self.target
        behind = f" ({'; '.join(self.outdated)} since)" if self.outdated else ""
        return f"{self.evidence} on {where}{behind}"


@dataclass(frozen=True)
class Known:
    """All that is known of the versions of one package with respect to one bug."""

    lanes: dict[str, tuple[Lane, ...]]  # by version, as the package index writes it, the oldest first
    #: neighbours in one history. Where their verdicts differ, the package index has no other final release between them
    #: that is not yanked, also where the history comes from a bisection.
    adjacent: frozenset[tuple[str, str]] = field(default_factory=frozenset)

    @property
    def rows(self) -> list[Entry]:
        """One verdict for each version, the oldest first."""
        return [Entry(version, "", decisive(lanes).verdict) for version, lanes in self.lanes.items()]


def decisive(lanes: Iterable[Lane]) -> Lane:
    """Return the lane that counts for a version.

    What was judged comes before what was not, today's test before an older one, and wrong before right: a bug that one
    target shows is there.
    """
    return min(lanes, key=lambda one: (one.verdict not in (WRONG, RIGHT), bool(one.outdated), one.verdict != WRONG))


def _history(path: Path) -> History:
    found = receipt.load_as(path, History, "runner.py versions --record")
    for row in found.rows if found.over == "release" else ():
        try:
            Version(row.label)
        except InvalidVersion as error:
            raise HarnessError(f"{path.name}: {error}. Next: runner.py versions --record") from None
    return found


def _of_history(pack: Pack, found: History) -> list[Lane]:
    same = pack.probe.exists() and judges.sha256(pack) == found.probe
    outdated = () if same else (judges.CHANGED,)
    return [
        Lane(row.label, row.verdict, found.target, found.evidence, row.reason, outdated=outdated) for row in found.rows
    ]


def _of_receipt(pack: Pack, one: Receipt) -> list[Lane]:
    """Return what a receipt says of the pinned release."""
    verdict = pack_verdict.PRISTINE.get(one.verdict)
    if verdict is None or one.upstream.origin != "pinned" or pack.definition.upstream.is_commit:
        return []  # a commit is no release that anybody could have installed
    outdated = tuple(staleness.reasons(pack, one))
    return [Lane(one.upstream.version, verdict, one.target, one.evidence, "", one.host.gpu, outdated)]


def known(pack: Pack) -> Known:
    """Gather what the committed receipts and histories of a pack say of releases.

    HarnessError is raised where one of the files cannot be read; the text names it.
    """
    histories = [_history(path) for path in sorted((pack.folder / "data").glob("history.*.json"))]
    of_releases = [one for one in histories if one.over == "release"]
    pairs = (itertools.pairwise(row.label for row in one.rows) for one in of_releases)
    adjacent = frozenset(itertools.chain.from_iterable(pairs))
    from_receipts = [lane for one in receipt.load_all(pack.receipts, lanes=False) for lane in _of_receipt(pack, one)]
    by_version: dict[str, list[Lane]] = defaultdict(list)
    for lane in [*from_receipts, *(lane for one in of_releases for lane in _of_history(pack, one))]:
        by_version[lane.version].append(lane)
    return Known({version: tuple(by_version[version]) for version in sorted(by_version, key=Version)}, adjacent)


def _period(pack: Pack, found: Known, period: Period) -> dict[str, str]:
    """Say where a stretch of wrong versions begins and ends, as exactly as the verdicts allow."""
    labels, definition = [row.label for row in found.rows], pack.definition
    first, last = labels[period.first], labels[period.last]
    since, head = f"since {first}", definition.head
    if period.before is None:
        since += " or earlier"
    elif (labels[period.before], first) not in found.adjacent:
        since += f" or earlier, after {labels[period.before]}"
    if period.after is not None:
        fixed = f"fixed in {labels[period.after]}"
        fixed += "" if (last, labels[period.after]) in found.adjacent else f" or earlier, after {last}"
    elif definition.fixed_in:
        fixed = f"fixed in {definition.fixed_in}, as the pack states"
    elif head is not None and head.verdict == Verdict.FIXED_UPSTREAM:
        fixed = f"fixed on the default branch by {head.fixed_by[:SHOWN]}, in no release that was judged"
    else:
        fixed = f"not fixed in {last}"
    return {"first_affected": first, "last_affected": last, "since": since, "fixed": fixed}


def _ranges(found: Known, stretches: list[Period]) -> list[dict[str, object]]:
    """Write the range of each stretch whose end is known: from its last version to the next one, which is right."""
    labels = [row.label for row in found.rows]
    ends = [(labels[one.last], labels[one.after]) for one in stretches if one.after is not None]
    return [
        {"type": "ECOSYSTEM", "events": [{"introduced": last}, {"fixed": fixed}]}
        for last, fixed in ends
        if (last, fixed) in found.adjacent
    ]


def _judged(lanes: tuple[Lane, ...]) -> dict[str, object]:
    chosen = decisive(lanes)
    if chosen.verdict not in (WRONG, RIGHT):
        return {"state": State.NOT_JUDGED.value, "evidence": [], "reason": f"{chosen.verdict} {chosen.reason}".strip()}
    same = sorted((one.evidence.rank, one.target, one.text) for one in lanes if one.verdict == chosen.verdict)
    state = State.AFFECTED if chosen.verdict == WRONG else State.UNAFFECTED
    return {"state": state.value, "evidence": list(dict.fromkeys(text for _, _, text in same)), "reason": ""}


def workaround(pack: Pack) -> str:
    """Return what a user can do meanwhile, and on which release a check has shown that; empty where there is nothing.

    HarnessError is raised where no receipt shows that it works.
    """
    stated = pack.definition.workaround
    if stated is None:
        return ""
    for found in receipt.load_all(pack.receipts):
        lane = found.lanes.get(LaneName.PRISTINE)
        checks = lane.checks if lane is not None else ()
        controls = [one for one in checks if one.role == Role.CONTROL and one.ok is not None]
        named = [[one for one in controls if fnmatchcase(one.name, pattern)] for pattern in stated.checks]
        if all(some and all(one.ok for one in some) for some in named):
            return f"{stated.text} (shown on {found.upstream.version})"
    raise HarnessError(
        f"{pack.name}/pack.toml: workaround.checks: no receipt has a control named {', '.join(stated.checks)} "
        f"that is right. Next: runner.py run {pack.name} --record"
    )


def identity(pack: Pack) -> str:
    """Return the id of a pack's record, which is the stem of its file."""
    return PREFIX + pack.name.partition("_")[0]


def _references(pack: Pack) -> list[dict[str, str]]:
    definition = pack.definition
    repository = definition.upstream.repository.removesuffix(".git").rstrip("/")
    found = [{"type": "PACKAGE", "url": repository}]
    report = links.page(f"packs/{pack.name}/README.md")
    found += [{"type": "EVIDENCE", "url": report}] if report else []
    head = definition.head
    if head is not None and head.fixed_by:
        found.append({"type": "FIX", "url": f"{repository}/commit/{head.fixed_by}"})
    return found + [{"type": "WEB", "url": thread.url} for thread in definition.threads]


def _details(pack: Pack, periods: list[dict[str, str]], work: str) -> str:
    silent = "No error and no warning tells the user." if pack.definition.kind in SILENT else ""
    lines = [f"{pack.definition.kind}: {pack.definition.title}. {silent}".strip()]
    lines += [f"{one['since']}; {one['fixed']}." for one in periods]
    lines += [f"Workaround: {work}." if work else ""]
    lines.append(SCOPE)
    return "\n\n".join(line[0].upper() + line[1:] for line in lines if line)


def document(pack: Pack) -> dict[str, Any] | None:
    """Return a pack's record without its times; None where it proves no bug of a release.

    HarnessError is raised where a receipt, a history or the workaround cannot be used.
    """
    definition, found = pack.definition, known(pack)
    rows = found.rows
    wrong = [row.label for row in rows if row.verdict == WRONG]
    if definition.kind == Kind.CLEANUP or not definition.advisory or not wrong:
        return None
    stretches, work = timeline.periods(rows), workaround(pack)
    periods = [_period(pack, found, one) for one in stretches]
    package = str(canonicalize_name(definition.upstream.package))
    affected: dict[str, Any] = {
        "package": {"ecosystem": "PyPI", "name": package, "purl": f"pkg:pypi/{package}"},
        "versions": wrong,
    }
    ranges = _ranges(found, stretches)
    report = f"packs/{pack.name}/README.md"
    return {
        "schema_version": SCHEMA_VERSION,
        "id": identity(pack),
        "summary": definition.title,
        "details": _details(pack, periods, work),
        "affected": [affected | ({"ranges": ranges} if ranges else {})],
        "references": _references(pack),
        "database_specific": {
            "pack": pack.name,
            "kind": definition.kind.value,
            "silent": definition.kind in SILENT,
            "report": links.page(report) or report,
            "workaround": work,
            "periods": periods,
            "judged": {version: _judged(lanes) for version, lanes in found.lanes.items()},
        },
    }


def _kept(path: Path) -> dict[str, Any]:
    """Return the record that lies there; an empty one where none does, or none that can be read."""
    try:
        found = strict_json.loads(path.read_bytes())
    except (OSError, strict_json.StrictJsonError):
        return {}
    return found if isinstance(found, dict) else {}


@dataclass(frozen=True)
class Plan:
    """What is to be done with one file: its new text, or None where it has to go; `why` says what is wrong with it."""

    path: Path
    why: str
    text: str | None


def plans(packs: list[Pack], folder: Path, now: dt.datetime) -> list[Plan]:
    """List the records that are missing, differ from their packs, or have no pack; nothing where all are fresh.

    HarnessError is raised where a pack's files cannot be used.
    """
    stamp = now.astimezone(dt.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    found, wanted = [], set()
    for pack in packs:
        one = document(pack)
        if one is None:
            continue
        path = folder / f"{identity(pack)}.json"
        wanted.add(path.name)
        kept = _kept(path)
        times = {key: str(kept.get(key, stamp)) for key in ("modified", "published")}
        if kept != times | one:
            timed = dict.fromkeys(("schema_version", "id")) | times | {"modified": stamp} | one
            found.append(Plan(path, "differs from its pack" if path.exists() else "is missing", receipt.to_json(timed)))
    gone = [path for path in sorted(folder.glob(f"{PREFIX}*.json")) if path.name not in wanted]
    return found + [Plan(path, "has no pack that proves a bug of a release", None) for path in gone]


def carry_out(found: list[Plan]) -> None:
    """Write and delete files as planned."""
    for one in found:
        if one.text is None:
            one.path.unlink(missing_ok=True)
        else:
            files.write_atomic(one.path, one.text)
