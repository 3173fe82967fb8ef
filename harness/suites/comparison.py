"""Two runs of a suite, read from pytest's ``--junitxml`` and compared test by test."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from harness.core.words import SuiteVerdict, TestResult

GREEN = {TestResult.PASSED, TestResult.EXPECTED, TestResult.UNEXPECTED}
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


@dataclass(frozen=True)
class Comparison:
    """The verdict of upstream's tests on a patch; `rows` are all tests, in their order."""

    verdict: SuiteVerdict
    reason: str
    rows: tuple[CaseRow, ...] = ()

    def counts(self, lane: str) -> dict[str, int]:
        """Count the tests of the lane ``before`` or ``after`` by their results."""
        return dict(sorted(Counter(str(getattr(row, lane)) for row in self.rows).items()))


def read(report: Path, tree: Path) -> tuple[dict[str, CaseEnd], dict[str, CaseEnd]]:
    """Read a report of pytest: the end of each test, and of each module that pytest did not collect.

    ET.ParseError is raised where the report is cut off.
    """
    tests: dict[str, CaseEnd] = {}
    modules: dict[str, CaseEnd] = {}
    for case in ET.parse(report).iter("testcase"):  # noqa: S314 - expat refuses to expand entities without bound
        owner, name, end = case.get("classname", ""), case.get("name", ""), _end(case)
        ends, key = (tests, f"{_node(owner, tree)}::{name}") if owner else (modules, _node(name, tree))
        if key not in ends or end.result in RED:  # the report has a test twice that fails, and then breaks in teardown
            ends[key] = end
    return tests, modules


def _node(owner: str, tree: Path) -> str:
    """Return pytest's id of a module or class from its dotted name in the report."""
    parts = owner.split(".")
    for count in range(len(parts), 0, -1):
        file = f"{'/'.join(parts[:count])}.py"
        if (tree / file).is_file():
            return "::".join([file, *parts[count:]])
    return owner


def _end(case: ET.Element) -> CaseEnd:
    for tag, result in TAGS.items():
        if (element := case.find(tag)) is not None:
            message = element.get("message", "")
            if message.startswith("collection "):  # the reason is in the text: a traceback, or the repr of a skip
                message = (element.text or "").strip().rpartition("\n")[2].rpartition("Skipped: ")[2].rstrip("\"')")
            reason = message.strip().partition("\n")[0][:LONGEST]
            return CaseEnd(TestResult.EXPECTED if element.get("type") == "pytest.xfail" else result, reason)
    return CaseEnd(TestResult.PASSED)


def _change(before: TestResult, after: TestResult) -> Change:
    """Say what a patch does to a test that upstream has already."""
    if before in RED:
        return Change.MENDED if after in GREEN else Change.RED
    still_unrun = before == TestResult.SKIPPED and after == TestResult.MISSING
    is_excused = after == TestResult.SKIPPED or (before == TestResult.PASSED and after == TestResult.EXPECTED)
    if (after in RED and not still_unrun) or (before in GREEN and is_excused):
        return Change.BROKEN
    return Change.SKIPPED if before == after == TestResult.SKIPPED else Change.SAME


def _function(test: str) -> str:
    """Return the id of a test without its parameters."""
    return test.partition("[")[0]


def compare(
    upstream_tests: Mapping[str, CaseEnd], before: Mapping[str, CaseEnd], after: Mapping[str, CaseEnd], *, adds: bool
) -> Comparison:
    """Compare the runs without and with the patch; `upstream_tests` are those without upstream_test.patch.

    `adds` says that both runs hold tests of the pack. Of each such test function at least one case has to be red
    before, and every case green after.
    """
    missing = CaseEnd(TestResult.MISSING, "not collected")
    ran = {_function(name) for name in (*before, *after)}
    lost = [name for name in upstream_tests if _function(name) not in ran]
    if lost:
        return Comparison(SuiteVerdict.ERROR, f"{len(lost)} tests did not run, the first of them {lost[0]}")
    proven = {_function(name) for name, end in before.items() if name not in upstream_tests and end.result in RED}
    rows = []
    for name in dict.fromkeys([*upstream_tests, *before, *after]):
        end_before, end_after = before.get(name, missing), after.get(name, missing)
        change = _change(end_before.result, end_after.result)
        if adds and name not in upstream_tests:
            is_right = _function(name) in proven and end_after.result in GREEN
            change = Change.NEW if is_right else Change.NEW_WRONG
        rows.append(CaseRow(name, end_before.result, end_after.result, change, end_after.reason or end_before.reason))
    return Comparison(*_verdict(rows, adds=adds), tuple(rows))


def _verdict(rows: list[CaseRow], *, adds: bool) -> tuple[SuiteVerdict, str]:
    broken = [row.test for row in rows if row.change == Change.BROKEN]
    if broken:
        return SuiteVerdict.BREAKS_TESTS, f"{len(broken)} broken by the patch, the first of them {broken[0]}"
    wrong = next((row for row in rows if row.change == Change.NEW_WRONG), None)
    if wrong:
        case = f"{wrong.test} ({wrong.before} before, {wrong.after} after)"
        return SuiteVerdict.NEW_TEST_WRONG, f"a new test is red before the patch and green with it: not {case}"
    if adds and {Change.NEW, Change.MENDED}.isdisjoint(row.change for row in rows):
        return SuiteVerdict.NEW_TEST_WRONG, "upstream_test.patch adds no test, and mends none"
    if all(TestResult.SKIPPED in (row.before, row.after) for row in rows):
        return SuiteVerdict.UNSUPPORTED, f"every test is skipped here: {rows[0].reason}"
    return SuiteVerdict.UNBROKEN, ""
