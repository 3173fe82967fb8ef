"""The receipt of upstream's tests without and with a pack's patch: ``receipts/upstream_tests.json``."""

from __future__ import annotations

import datetime as dt
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from harness.core.words import SuiteVerdict
from harness.pack.model import Pack
from harness.receipt import receipt, staleness, writer
from harness.receipt.receipt import SUITE, DependencyRecord, HostRecord, UpstreamRecord
from harness.suites.comparison import CaseRow, Change, Comparison
from harness.suites.suite import Suite
from harness.upstream.source import commit_of, parse_git_source

SCHEMA = 1


@dataclass(frozen=True)
class PatchRecord:
    """A patch of the pack. Two records are equal where name and meaning are."""

    name: str  # of the file
    sha256: str = field(compare=False)  # of its bytes
    meaning: str  # the hash of what it does


@dataclass(frozen=True)
class SuiteReceipt:
    """The result of upstream's tests, and what was run."""

    schema: int
    pack: str
    verdict: SuiteVerdict
    reason: str
    upstream: UpstreamRecord  # the tree, without any patch
    files: tuple[str, ...]  # of the suite
    arguments: tuple[str, ...]  # of pytest, from pack.toml
    environment: dict[str, str]  # of the suite, from pack.toml
    patch: PatchRecord | None
    test_patch: PatchRecord | None  # upstream_test.patch, applied in both lanes; None where the pack has none
    dependencies: DependencyRecord
    host: HostRecord
    before: dict[str, int]  # the number of tests by result, without the patch
    after: dict[str, int]  # with it
    tests: tuple[CaseRow, ...]  # whose change is not `SAME`
    command: str  # makes the receipt anew
    started: str  # in UTC
    seconds: float  # of all lanes together


def _patch(path: Path) -> PatchRecord | None:
    if not path.exists():
        return None
    hashes = receipt.hashed(path)
    return PatchRecord(path.name, hashes.sha256, hashes.meaning)


def document(suite: Suite, comparison: Comparison, started: dt.datetime, command: str) -> dict[str, Any]:
    """Return the receipt of a suite as a scrubbed JSON document.

    PrivateTextError is raised where a field still looks private.
    """
    pack, prepared, session = suite.cell.pack, suite.prepared, suite.session
    members, tree = prepared.dependency_set, prepared.pristine
    kind, package = suite.cell.source.kind, pack.definition.upstream.package
    suite_receipt = SuiteReceipt(
        schema=SCHEMA,
        pack=pack.name,
        verdict=comparison.verdict,
        reason=comparison.reason,
        upstream=UpstreamRecord(package, tree.version, kind, tree.sha256, commit_of(tree.version)),
        files=suite.tests.files,
        arguments=suite.tests.arguments,
        environment=suite.tests.environment,
        patch=_patch(pack.suite_patch(suite.tests)),
        test_patch=_patch(pack.upstream_test_patch),
        dependencies=DependencyRecord(members.name, members.sha256, members.versions),
        host=writer.host_record(session.host, tuple(device.gpu for device in suite.devices)),
        before=comparison.counts("before"),
        after=comparison.counts("after"),
        tests=tuple(row for row in comparison.rows if row.change != Change.SAME),
        command=command,
        started=started.isoformat(timespec="milliseconds"),
        seconds=round((dt.datetime.now(dt.UTC) - started).total_seconds(), 3),
    )
    scrub = writer.scrubber(pack, session.cache, session.host, members, {})
    return dict(scrub.document(asdict(suite_receipt), "upstream_tests", writer.without_lane_folders))


def load(folder: Path) -> SuiteReceipt | None:
    """Read the receipt in a folder of receipts, if it is there. HarnessError is raised where it cannot be read."""
    path = folder / SUITE
    return receipt.load_as(path, SuiteReceipt, "runner.py upstream-tests --record") if path.exists() else None


def reasons(pack: Pack, recorded: SuiteReceipt) -> list[str]:
    """Say why a recorded receipt is stale; nothing where it is fresh."""
    definition, suite = pack.definition, pack.definition.upstream_tests
    if suite is None:
        return ["pack.toml has no [upstream_tests]"]
    changes = []
    if (suite.files, suite.arguments, suite.environment) != (recorded.files, recorded.arguments, recorded.environment):
        changes.append("[upstream_tests] changed")
    origin = (
        parse_git_source(suite.origin).value
        if suite.origin
        else definition.upstream.sha256 or definition.upstream.commit
    )
    if origin not in (recorded.upstream.commit, recorded.upstream.sha256):
        changes.append("its tree changed")
    changes += ["the patch changed"] if _patch(pack.suite_patch(suite)) != recorded.patch else []
    changes += ["upstream_test.patch changed"] if _patch(pack.upstream_test_patch) != recorded.test_patch else []
    return changes + staleness.dependency_reasons(pack, suite.dependencies, recorded.dependencies, recorded.host.python)
