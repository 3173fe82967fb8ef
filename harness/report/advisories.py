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
from harness.versions.timeline import RIGHT, WRONG, Entry, Period

#: Of the OSV schema; the records use nothing that is newer.
SCHEMA_VERSION = "1.7.0"
#: Kinds of bug that no error and no warning tells the user of.
SILENT = frozenset({Kind.WRONG_RESULT, Kind.SILENT_FALLBACK, Kind.PRECISION})
#: Failed controls that a sentence names.
MOST_NAMED = 3
#: Digits of a commit that a sentence shows.
SHOWN = 12
#: The last paragraph of every record.
SCOPE = (
    "The versions listed were judged one by one, each by a test that runs on that release; a version that is not "
    "listed, also one between two that are, was not found affected, and may not have been judged at all: "
    "database_specific.judged has every one that was."
)
#: Times of a record, which are no part of what it says.
TIMES = ("published", "modified")


@dataclass(frozen=True)
class History:
    """What `runner.py versions --record` keeps of a target; `checks`: by which alone it judged, if not by all."""

    schema: int
    pack: str
    target: str
    evidence: Evidence
    over: str
    line: str
    probe: str
    python: str
    torch: str
    triton: str
    command: str
    rows: tuple[Entry, ...]
    checks: tuple[str, ...] = ()


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


def _since(found: Known, period: Period) -> str:
    rows = found.rows
    first = rows[period.first].label
    if period.before is None:
        return f"since {first} or earlier"
    before = rows[period.before].label
    if (before, first) in found.adjacent:
        return f"since {first} ({before} is not affected)"
    return f"since {first} or earlier, after {before}, which is not affected (not judged between them)"


def _exact_fix(found: Known, period: Period) -> str:
    """Return the version that ends a period, where the one before it is the last wrong one; else nothing."""
    rows = found.rows
    if period.after is None:
        return ""
    after = rows[period.after].label
    return after if (rows[period.last].label, after) in found.adjacent else ""


def _fixed(pack: Pack, found: Known, period: Period) -> str:
    rows, definition = found.rows, pack.definition
    last = rows[period.last].label
    if period.after is not None:
        after = rows[period.after].label
        return f"fixed in {after}" if _exact_fix(found, period) else f"fixed in {after} or earlier, after {last}"
    if definition.fixed_in:
        return f"fixed in {definition.fixed_in} (stated by the pack, not judged)"
    head = definition.head
    if head is not None and head.verdict == Verdict.FIXED_UPSTREAM:
        return f"fixed on the default branch by {head.fixed_by[:SHOWN]}, in no release that was judged"
    return f"not fixed in {last}"


def _gives_way(one: Lane, lanes: list[Lane]) -> bool:
    """Whether another lane on the same target is by no weaker evidence and no older test, and better in one of them."""
    mine = (one.evidence.rank, bool(one.outdated))
    others = [(two.evidence.rank, bool(two.outdated)) for two in lanes if two.target == one.target]
    return any(rank <= mine[0] and outdated <= mine[1] and (rank, outdated) != mine for rank, outdated in others)


def _why_not(lane: Lane) -> str:
    if lane.verdict != LaneVerdict.CONTROL_FAILED:
        return lane.reason or f"the lane ended in {lane.verdict}"
    names = lane.reason.split(", ")
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    said = f" ({', '.join(names[:MOST_NAMED])}{more})" if lane.reason else ""
    return f"checks that are right in every sound release fail{said}, so that nothing can be said of the bug"


def _judged(lanes: tuple[Lane, ...]) -> dict[str, object]:
    chosen = decisive(lanes)
    if chosen.verdict not in (WRONG, RIGHT):
        return {"state": State.NOT_JUDGED.value, "evidence": [], "reason": _why_not(chosen)}
    same = [one for one in lanes if one.verdict == chosen.verdict]
    best = sorted((one for one in same if not _gives_way(one, same)), key=lambda one: (one.evidence.rank, one.target))
    state = State.AFFECTED if chosen.verdict == WRONG else State.UNAFFECTED
    return {"state": state.value, "evidence": list(dict.fromkeys(one.text for one in best)), "reason": ""}


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
    periods = [
        {
            "first_affected": rows[one.first].label,
            "last_affected": rows[one.last].label,
            "since": _since(found, one),
            "fixed": _fixed(pack, found, one),
        }
        for one in stretches
    ]
    ends = [(rows[one.last].label, _exact_fix(found, one)) for one in stretches]
    package = str(canonicalize_name(definition.upstream.package))
    affected: dict[str, Any] = {
        "package": {"ecosystem": "PyPI", "name": package, "purl": f"pkg:pypi/{package}"},
        "versions": wrong,
    }
    ranges = [
        {"type": "ECOSYSTEM", "events": [{"introduced": last}, {"fixed": fixed}]} for last, fixed in ends if fixed
    ]
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
        texts = {key: kept.pop(key, None) for key in TIMES}
        if kept == one and all(isinstance(text, str) for text in texts.values()):
            continue
        published = texts["published"] if isinstance(texts["published"], str) else stamp
        first = {key: one[key] for key in ("schema_version", "id")}
        timed = {**first, "modified": stamp, "published": published, **one}
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
