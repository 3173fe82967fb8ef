"""The receipt of upstream's tests without and with a pack's patch: ``receipts/upstream_tests.json``."""

from dataclasses import dataclass
from pathlib import Path

from harness.core.words import SuiteVerdict
from harness.host.host import Host
from harness.pack.model import TESTS, Pack
from harness.receipt import receipt, staleness
from harness.receipt.receipt import SUITE, DependencyRecord, PatchRecord, UpstreamRecord
from harness.suites.comparison import CaseRow
from harness.upstream.source import parse_source

SCHEMA = 1


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
    patch: PatchRecord
    test_patch: PatchRecord | None  # upstream_test.patch, applied in both lanes; None where the pack has none
    dependencies: DependencyRecord
    host: Host
    before: dict[str, int]  # the number of tests by result, without the patch
    after: dict[str, int]  # with it
    tests: tuple[CaseRow, ...]  # whose change is not `SAME`
    command: str  # makes the receipt anew
    started: str  # in UTC
    seconds: float  # of all lanes together


def load(folder: Path) -> SuiteReceipt | None:
    """Read the receipt in a folder of receipts, if it is there; HarnessError: it cannot be read."""
    path = folder / SUITE
    return receipt.load_as(path, SuiteReceipt, "runner.py upstream-tests --record") if path.exists() else None


def reasons(pack: Pack, recorded: SuiteReceipt) -> list[str]:
    """Say why a recorded receipt is stale; nothing where it is fresh."""
    upstream, suite = pack.definition.upstream, pack.definition.upstream_tests
    if suite is None:
        return ["pack.toml has no [upstream_tests]"]
    origin = parse_source(suite.origin, pack.definition).value if suite.origin else upstream.sha256 or upstream.commit
    stated = (suite.files, suite.arguments, suite.environment)
    changed = {
        "[upstream_tests]": stated != (recorded.files, recorded.arguments, recorded.environment),
        "its tree": origin not in (recorded.upstream.commit, recorded.upstream.sha256),
        "the patch": staleness.patch_changed(pack.suite_patch, recorded.patch),
        "upstream_test.patch": staleness.patch_changed(pack.upstream_test_patch, recorded.test_patch),
    }
    changes = [f"{name} changed" for name, is_changed in changed.items() if is_changed]
    return changes + staleness.dependency_reasons(pack, TESTS, recorded.dependencies, recorded.host.python)
