"""The record of upstream's tests without and with a pack's patch: ``receipts/upstream_tests.json``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core import files, structure
from harness.core.errors import HarnessError
from harness.core.words import SuiteVerdict
from harness.host.host import python_tag
from harness.pack.model import Pack
from harness.receipt import receipt, writer
from harness.receipt.receipt import SUITE, DependencyRecord, HostRecord, UpstreamRecord
from harness.receipt.writer import MadeBy
from harness.schedule.journal import LaneEnd
from harness.suites import comparison
from harness.suites.comparison import Change, Comparison, TestRow
from harness.suites.runner import AFTER, BEFORE, KNOWN, suite_of
from harness.upstream import dependencies
from harness.upstream.dependencies import DependencySet
from harness.upstream.source import commit_of, of_git
from harness.verdict.cell import Cell

SCHEMA = 1
#: Tests of these kinds are named; of the others it is enough to know how many there are.
NAMED = tuple(change for change in Change if change != Change.SAME)


@dataclass(frozen=True)
class PatchRecord:
    """A patch of the pack: its file, the hash of its bytes, and the hash of what it means."""

    name: str
    sha256: str
    meaning: str


@dataclass(frozen=True)
class SuiteReceipt:
    """What upstream's tests said of a patch.

    Attributes:
        schema: of this shape.
        pack: its name.
        verdict: on the patch.
        reason: empty where it needs none.
        upstream: the tree, without any patch.
        files: of the suite.
        arguments: that pytest got from pack.toml.
        environment: that the suite got from pack.toml.
        patch: that was judged.
        test_patch: on top in both lanes; None where the pack has none.
        dependencies: what the tests import.
        host: where they ran.
        before: how many tests ended how without the patch, by result.
        after: likewise with it.
        tests: those that differ, are red or skipped, or are new.
        command: that makes it anew.
        started: in UTC.
        seconds: of all lanes together.

    """

    schema: int
    pack: str
    verdict: SuiteVerdict
    reason: str
    upstream: UpstreamRecord
    files: tuple[str, ...]
    arguments: tuple[str, ...]
    environment: dict[str, str]
    patch: PatchRecord
    test_patch: PatchRecord | None
    dependencies: DependencyRecord
    host: HostRecord
    before: dict[str, int]
    after: dict[str, int]
    tests: tuple[TestRow, ...]
    command: str
    started: str
    seconds: float


def compared(ends: dict[str, LaneEnd]) -> Comparison:
    """Compare the lanes of a suite, by the columns of their cells."""
    before, after, known = ends[BEFORE], ends[AFTER], ends.get(KNOWN)
    stale = next((end.stale for end in (before, after) if end.stale), "")
    refused = comparison.failed(before.record, after.record, stale)
    if refused is None and known is not None:
        refused = comparison.failed(known.record, known.record, known.stale)
    if refused is not None or before.record is None or after.record is None:
        return refused or Comparison(SuiteVerdict.ERROR, "a lane did not run", ())
    names = None if known is None or known.record is None else frozenset(one.name for one in known.record.checks)
    return comparison.compare(before.record, after.record, names)


def _patch(path: Path) -> PatchRecord:
    of = receipt.hashed(path)
    return PatchRecord(path.name, of.sha256, of.meaning)


def build(
    cell: Cell, ends: dict[str, LaneEnd], found: Comparison, members: DependencySet, made: MadeBy
) -> SuiteReceipt:
    """Build the receipt of a suite.

    Args:
        cell: any of the suite's.
        ends: of its lanes, by the columns of their cells.
        found: what they say together.
        members: what the tests import.
        made: what ran them.

    """
    pack, suite, first = cell.pack, suite_of(cell.pack), ends[BEFORE]
    test_patch = pack.upstream_test_patch
    return SuiteReceipt(
        schema=SCHEMA,
        pack=pack.name,
        verdict=found.verdict,
        reason=found.reason,
        upstream=UpstreamRecord(
            pack.definition.upstream.package, first.version, cell.source.kind, first.tree, commit_of(first.version)
        ),
        files=suite.files,
        arguments=suite.arguments,
        environment=suite.environment,
        patch=_patch(pack.suite_patch(suite)),
        test_patch=_patch(test_patch) if test_patch.exists() else None,
        dependencies=DependencyRecord(members.name, members.sha256, members.versions),
        host=writer.host_record(made.host, first.gpus),
        before=found.counts("before"),
        after=found.counts("after"),
        tests=tuple(found.of(*NAMED)),
        command=made.command,
        started=min(end.started for end in ends.values()),
        seconds=round(sum(end.seconds for end in ends.values()), 3),
    )


def document_of(one: SuiteReceipt, pack: Pack, members: DependencySet, made: MadeBy) -> dict[str, object]:
    """Return a receipt as a JSON document with nothing private in it.

    Raises:
        PrivateTextError: a field still looks private.

    """
    scrub = writer.scrubber(pack, made.cache, made.host, members, {})
    clean = scrub.document(asdict(one), "upstream_tests", writer.without_lane_folders)
    assert isinstance(clean, dict)  # noqa: S101 - for the type checker: a document stays one
    return clean


def write(document: dict[str, object], folder: Path) -> Path:
    """Write a receipt into a folder of receipts and return its path."""
    path = folder / SUITE
    files.write_atomic(path, receipt.to_json(document))
    return path


def load(folder: Path) -> SuiteReceipt | None:
    """Read the receipt in a folder of receipts; None where there is none.

    Raises:
        HarnessError: it cannot be read.

    """
    path = folder / SUITE
    if not path.exists():
        return None
    try:
        return structure.structure(json.loads(path.read_text(encoding="utf-8")), SuiteReceipt)
    except (json.JSONDecodeError, structure.StructureError) as error:
        raise HarnessError(f"receipts/{SUITE}: {error}. Next: runner.py upstream-tests --record") from None


def _changed(path: Path, recorded: PatchRecord | None) -> bool:
    if recorded is None or not path.exists():
        return recorded is not None or path.exists()
    return path.name != recorded.name or _patch(path).meaning != recorded.meaning


def reasons(pack: Pack, one: SuiteReceipt) -> list[str]:
    """Say why a receipt no longer speaks of the pack beside it; nothing where it does."""
    definition, suite = pack.definition, pack.definition.upstream_tests
    if suite is None:
        return ["pack.toml has no [upstream_tests]"]
    found = []
    if (suite.files, suite.arguments, suite.environment) != (one.files, one.arguments, one.environment):
        found.append("[upstream_tests] changed")
    wanted = of_git(suite.origin).value if suite.origin else definition.upstream.sha256 or definition.upstream.commit
    if wanted not in (one.upstream.commit, one.upstream.sha256):
        found.append("its tree changed")
    found += ["the patch changed"] if _changed(pack.suite_patch(suite), one.patch) else []
    found += ["upstream_test.patch changed"] if _changed(pack.upstream_test_patch, one.test_patch) else []
    try:
        members = dependencies.named(definition, suite.dependencies, python_tag(one.host.python))
    except HarnessError:
        return [*found, "its dependency set is gone"]
    same = members.sha256 == one.dependencies.sha256 or members.versions == one.dependencies.packages
    return found if same else [*found, "the dependency set changed"]
