"""Upstream's tests without and with a patch, compared test by test."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from enum import StrEnum

from harness.core.words import LaneVerdict, SuiteVerdict, TestResult
from harness.lane.record import LaneRecord

GREEN = {TestResult.PASSED, TestResult.EXPECTED, TestResult.UNEXPECTED}
RED = {TestResult.FAILED, TestResult.BROKE, TestResult.MISSING}


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
class TestRow:
    """One test: its id, how it ended without and with the patch, what that means, and the reason that was given."""

    __test__ = False  # it is no test itself

    test: str
    before: TestResult
    after: TestResult
    change: Change
    reason: str = ""


@dataclass(frozen=True)
class Comparison:
    """What upstream's tests say of a patch; `rows` are all tests, in their order."""

    verdict: SuiteVerdict
    reason: str
    rows: tuple[TestRow, ...]

    def counts(self, lane: str) -> dict[str, int]:
        """Count the tests of the lane ``before`` or ``after`` by how they ended."""
        return dict(sorted(Counter(str(getattr(row, lane)) for row in self.rows).items()))

    def of(self, *changes: Change) -> list[TestRow]:
        """List the tests that a patch does one of these things to."""
        return [row for row in self.rows if row.change in changes]


def function_of(test: str) -> str:
    """Return the id of a test without its parameters."""
    return test.partition("[")[0]


def _results(record: LaneRecord) -> dict[str, tuple[TestResult, str]]:
    return {check.name: (TestResult(str(check.measured)), check.reason) for check in record.checks}


def _change(before: TestResult, after: TestResult) -> Change:
    """Say what a patch does to a test that upstream has already."""
    if before in RED:
        return Change.MENDED if after in GREEN else Change.RED
    gone = before == TestResult.SKIPPED and after == TestResult.MISSING
    if (after in RED and not gone) or (before in GREEN and after == TestResult.SKIPPED):
        return Change.BROKEN
    return Change.SKIPPED if before == after == TestResult.SKIPPED else Change.SAME


def _new(rows: dict[str, tuple[TestResult, TestResult]], new: set[str]) -> dict[str, Change]:
    """Judge the new tests, those of one function together: one case at least red before, every one green after."""
    found: dict[str, Change] = {}
    for function in {function_of(name) for name in new}:
        cases = [name for name in new if function_of(name) == function]
        red = any(rows[name][0] in RED for name in cases)
        for name in cases:
            good = red and rows[name][1] in GREEN
            found[name] = Change.NEW if good else Change.NEW_WRONG
    return found


def compare(before: LaneRecord, after: LaneRecord, known: frozenset[str] | None) -> Comparison:
    """Compare two lanes that told of their tests.

    Args:
        before: without the patch.
        after: with it.
        known: the tests that upstream has already; None where the pack adds none.

    """
    first, second = _results(before), _results(after)
    nothing = (TestResult.MISSING, "not collected")
    names = list(dict.fromkeys([*first, *second]))
    pairs = {name: (first.get(name, nothing)[0], second.get(name, nothing)[0]) for name in names}
    changes = _new(pairs, set(names) - known) if known is not None else {}
    rows = tuple(
        TestRow(
            name,
            *pairs[name],
            changes.get(name) or _change(*pairs[name]),
            second.get(name, nothing)[1] or first.get(name, nothing)[1],
        )
        for name in names
    )
    found = Comparison(SuiteVerdict.UNBROKEN, "", rows)
    verdict, reason = _verdict(found, adds=known is not None)
    return Comparison(verdict, reason, rows)


def _verdict(found: Comparison, *, adds: bool) -> tuple[SuiteVerdict, str]:
    broken, wrong = found.of(Change.BROKEN), found.of(Change.NEW_WRONG)
    if broken:
        return SuiteVerdict.BREAKS_TESTS, f"{len(broken)} broken by the patch, the first of them {broken[0].test}"
    if adds and wrong:
        said = f"{wrong[0].test} ({wrong[0].before} before, {wrong[0].after} after)"
        return SuiteVerdict.NEW_TEST_WRONG, f"a new test is red before the patch and green with it: not {said}"
    if adds and not found.of(Change.NEW, Change.MENDED):
        return SuiteVerdict.NEW_TEST_WRONG, "upstream_test.patch adds no test, and mends none"
    if all(TestResult.SKIPPED in (row.before, row.after) for row in found.rows):
        return SuiteVerdict.UNSUPPORTED, f"every test is skipped here: {found.rows[0].reason}"
    return SuiteVerdict.UNBROKEN, ""


def failed(before: LaneRecord | None, after: LaneRecord | None, stale: str) -> Comparison | None:
    """Say why two lanes cannot be compared; None where they can."""
    if stale:
        return Comparison(SuiteVerdict.PATCH_STALE, stale, ())
    for name, record in (("without the patch", before), ("with the patch", after)):
        if record is None:
            return Comparison(SuiteVerdict.ERROR, f"{name}: it did not run", ())
        if record.verdict == LaneVerdict.ERROR:
            return Comparison(SuiteVerdict.ERROR, f"{name}: {record.reason}", ())
    return None
