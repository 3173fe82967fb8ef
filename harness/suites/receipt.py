"""The record of upstream's tests without and with a pack's patch: ``receipts/upstream_tests.json``."""

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
from harness.upstream.source import commit_of, of_git

SCHEMA = 1


@dataclass(frozen=True)
class PatchRecord:
    """A patch of the pack: its file, the hash of its bytes, and the hash of what it means, which is what counts."""

    name: str
    sha256: str = field(compare=False)
    meaning: str


@dataclass(frozen=True)
class SuiteReceipt:
    """What upstream's tests said of a patch."""

    schema: int
    pack: str
    verdict: SuiteVerdict
    reason: str
    upstream: UpstreamRecord  # the tree, without any patch
    files: tuple[str, ...]  # of the suite
    arguments: tuple[str, ...]  # that pytest got from pack.toml
    environment: dict[str, str]  # that the suite got from pack.toml
    patch: PatchRecord | None
    test_patch: PatchRecord | None  # on top in both lanes; None where the pack has none
    dependencies: DependencyRecord
    host: HostRecord
    before: dict[str, int]  # how many tests ended how without the patch, by result
    after: dict[str, int]
    tests: tuple[CaseRow, ...]  # those that differ, are red or skipped, or are new
    command: str  # that makes it anew
    started: str  # in UTC
    seconds: float  # of all lanes together


def _patch(path: Path) -> PatchRecord | None:
    """Record a patch; None where there is none."""
    if not path.exists():
        return None
    of = receipt.hashed(path)
    return PatchRecord(path.name, of.sha256, of.meaning)


def document(suite: Suite, found: Comparison, started: dt.datetime, command: str) -> dict[str, Any]:
    """Return the receipt of a suite as a JSON document with nothing private in it.

    PrivateTextError is raised where a field still looks private.
    """
    pack, prepared, session = suite.cell.pack, suite.prepared, suite.session
    members, tree = prepared.dependency_set, prepared.pristine
    kind, package = suite.cell.source.kind, pack.definition.upstream.package
    one = SuiteReceipt(
        schema=SCHEMA,
        pack=pack.name,
        verdict=found.verdict,
        reason=found.reason,
        upstream=UpstreamRecord(package, tree.version, kind, tree.sha256, commit_of(tree.version)),
        files=suite.tests.files,
        arguments=suite.tests.arguments,
        environment=suite.tests.environment,
        patch=_patch(pack.suite_patch(suite.tests)),
        test_patch=_patch(pack.upstream_test_patch),
        dependencies=DependencyRecord(members.name, members.sha256, members.versions),
        host=writer.host_record(session.host, tuple(device.gpu for device in suite.devices)),
        before=found.counts("before"),
        after=found.counts("after"),
        tests=tuple(row for row in found.rows if row.change != Change.SAME),
        command=command,
        started=started.isoformat(timespec="milliseconds"),
        seconds=round((dt.datetime.now(dt.UTC) - started).total_seconds(), 3),
    )
    scrub = writer.scrubber(pack, session.cache, session.host, members, {})
    return dict(scrub.document(asdict(one), "upstream_tests", writer.without_lane_folders))


def load(folder: Path) -> SuiteReceipt | None:
    """Read the receipt in a folder of receipts; None where there is none.

    HarnessError is raised where it cannot be read.
    """
    path = folder / SUITE
    return receipt.load_as(path, SuiteReceipt, "runner.py upstream-tests --record") if path.exists() else None


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
    found += ["the patch changed"] if _patch(pack.suite_patch(suite)) != one.patch else []
    found += ["upstream_test.patch changed"] if _patch(pack.upstream_test_patch) != one.test_patch else []
    return found + staleness.dependency_reasons(pack, suite.dependencies, one.dependencies, one.host.python)
