"""The receipt of upstream's tests without and with a pack's patch, from two runs that are compared test by test.

A run is read from pytest's ``--junitxml``; the receipt is ``receipts/upstream_tests.json``.
"""

import xml.etree.ElementTree as ET
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.core.errors import HarnessError, UnsupportedHereError
from harness.core.words import SuiteVerdict, TestResult
from harness.host.host import Host
from harness.lane.results import FAILED, STATUSES
from harness.pack.model import TESTS, Pack
from harness.receipt import receipt, staleness
from harness.receipt.receipt import SUITE, DependencyRecord, PatchRecord, UpstreamRecord
from harness.upstream.source import parse_source

SCHEMA = 1
GREEN = {TestResult.PASSED, TestResult.EXPECTED}
RED = {TestResult.FAILED, TestResult.BROKE, TestResult.MISSING}
#: The XML elements of a test that did not simply pass, the worst first.
TAGS = {"failure": TestResult.FAILED, "error": TestResult.BROKE, "skipped": TestResult.SKIPPED}
#: The most characters of a reason.
LONGEST = 400


class Change(StrEnum):
    """What a patch does to one test."""

    BROKEN = "broken"
    MENDED = "mended"
    RED = "red in both"
    SKIPPED = "skipped"
    NEW = "new"
    NEW_WRONG = "new, not red before and green after"
    SAME = "same"


@dataclass(frozen=True)
class CaseEnd:
    """How one test ended in one run, and the reason that pytest gave."""

    result: TestResult
    reason: str = ""


@dataclass(frozen=True)
class CaseRow:
    """One test: its id, its results without and with the patch, what the patch does to it, and pytest's reason."""

    test: str
    before: TestResult
    after: TestResult
    change: Change
    reason: str = ""


def read(report: Path, status: int, *, listing: bool) -> dict[str, CaseEnd]:
    """Read the report of a pytest that ended with `status`: how each test ended, and each module that skips itself.

    ValueError: the report is cut off, a module cannot be collected, report and status disagree, or no test ran, unless
    pytest only had to list them.
    """
    ends: dict[str, CaseEnd] = {}
    try:
        for case in ET.parse(report).iter("testcase"):  # noqa: S314 - expat refuses to expand entities without bound
            test, end = _test(case), _end(case)
            if test not in ends or end.result in RED:  # a test that fails, and then breaks in teardown, is there twice
                ends[test] = end
    except (OSError, ET.ParseError):
        raise ValueError(f"it ended with status {status} before pytest did") from None
    modules = {name: end for name, end in ends.items() if "::" not in name}
    if broken := [f"{name}: {end.reason}" for name, end in modules.items() if end.result in RED]:
        raise ValueError(f"cannot be collected: {'; '.join(broken)}")
    if status in STATUSES and len(modules) == len(ends) and not listing:
        skipped = "; ".join(f"{name}: {end.reason}" for name, end in modules.items())
        raise ValueError("no test was collected" + (f" (skipped: {skipped})" if skipped else ""))
    has_red = any(end.result in RED for end in ends.values())
    if status not in STATUSES or has_red != (status == FAILED):
        raise ValueError(f"pytest ended with status {status}, and {'a' if has_red else 'no'} test failed")
    return ends


def _test(case: ET.Element) -> str:
    """Return pytest's id of a module or a test; a test that is inherited from another file has the path of that one."""
    file, owner = case.get("file", ""), case.get("classname", "")
    classes = f"{owner}.".removeprefix(file.removesuffix("py").replace("/", ".")).split(".")[:-1]
    return "::".join([file, *classes, case.get("name", "")]) if owner else file


def _end(case: ET.Element) -> CaseEnd:
    for tag, result in TAGS.items():
        if (element := case.find(tag)) is not None:
            message = element.get("message", "")
            if message.startswith("collection "):  # the reason is in the text: a traceback, or the repr of a skip
                message = (element.text or "").strip().rpartition("\n")[2].rpartition("Skipped: ")[2].rstrip("\"')")
            reason = message.strip().partition("\n")[0][:LONGEST]
            return CaseEnd(TestResult.EXPECTED if element.get("type") == "pytest.xfail" else result, reason)
    return CaseEnd(TestResult.PASSED)


def compare(
    upstream_tests: Mapping[str, CaseEnd], before: Mapping[str, CaseEnd], after: Mapping[str, CaseEnd], *, adds: bool
) -> list[CaseRow]:
    """Compare the runs without and with the patch; `upstream_tests` are those without upstream_test.patch.

    `adds` says that both runs hold tests of the pack. Of each such test function at least one case has to be red
    before, and every case green after. HarnessError: a function of upstream did not run.
    """
    functions = {name: name.partition("[")[0] for name in (*upstream_tests, *before, *after)}
    ran = {functions[name] for name in (*before, *after)}
    if lost := [name for name in upstream_tests if functions[name] not in ran]:
        raise HarnessError(f"{len(lost)} tests did not run, the first of them {lost[0]}")
    new_tests = functions.keys() - upstream_tests.keys() if adds else set()
    proven = {functions[name] for name in new_tests if name in before and before[name].result in RED}
    missing, rows = CaseEnd(TestResult.MISSING, "not collected"), []
    for name, function in functions.items():
        old, new = before.get(name, missing), after.get(name, missing)
        change = _change(old.result, new.result)
        if name in new_tests:
            change = Change.NEW if function in proven and new.result in GREEN else Change.NEW_WRONG
        rows.append(CaseRow(name, old.result, new.result, change, new.reason or old.reason))
    return rows


def _change(before: TestResult, after: TestResult) -> Change:
    """Say what a patch does to a test that upstream has already."""
    if before in RED:
        return Change.MENDED if after in GREEN else Change.RED
    still_unrun = before == TestResult.SKIPPED and after == TestResult.MISSING
    is_excused = after == TestResult.SKIPPED or (before == TestResult.PASSED and after == TestResult.EXPECTED)
    if (after in RED and not still_unrun) or (before in GREEN and is_excused):
        return Change.BROKEN
    return Change.SKIPPED if before == after == TestResult.SKIPPED else Change.SAME


def verdict(rows: list[CaseRow], *, adds: bool) -> tuple[SuiteVerdict, str]:
    """Return the verdict and its reason; UnsupportedHereError: every test is skipped."""
    changes = [row.change for row in rows]
    if broken := changes.count(Change.BROKEN):
        first = rows[changes.index(Change.BROKEN)].test
        return SuiteVerdict.BREAKS_TESTS, f"{broken} broken by the patch, the first of them {first}"
    if Change.NEW_WRONG in changes:
        row = rows[changes.index(Change.NEW_WRONG)]
        case = f"{row.test} ({row.before} before, {row.after} after)"
        return SuiteVerdict.NEW_TEST_WRONG, f"a new test is red before the patch and green with it: not {case}"
    if adds and {Change.NEW, Change.MENDED}.isdisjoint(changes):
        return SuiteVerdict.NEW_TEST_WRONG, "upstream_test.patch adds no test, and mends none"
    if all(TestResult.SKIPPED in (row.before, row.after) for row in rows):
        raise UnsupportedHereError(f"every test is skipped here: {rows[0].reason}")
    return SuiteVerdict.UNBROKEN, ""


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
