"""What one run of upstream's tests showed, read strictly from the file that its plugin wrote."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

from harness.core import structure
from harness.core.words import LaneVerdict, Role, TestResult
from harness.lane.transcript import CheckLine

#: Statuses of pytest after which it says what each test gave: all right, or some wrong.
TOLD = {0, 1}
NOTHING_COLLECTED = 5
RED = {TestResult.FAILED, TestResult.BROKE, TestResult.MISSING}


@dataclass(frozen=True)
class Module:
    """A file that could not be collected (failed), or that skips itself."""

    name: str
    outcome: str
    reason: str


@dataclass(frozen=True)
class Collected:
    """The tests that are going to run."""

    tests: tuple[str, ...]


@dataclass(frozen=True)
class Phase:
    """How the setup, the call or the teardown of a test ended; `expected`: its failure was."""

    test: str
    when: str
    outcome: str
    expected: bool
    reason: str


@dataclass(frozen=True)
class Ended:
    """Pytest has returned."""

    status: int


KINDS: dict[str, type] = {"module": Module, "collected": Collected, "phase": Phase, "ended": Ended}


@dataclass
class Report:
    """The lines of a report by kind; `problem` is empty only where they could all be read."""

    modules: list[Module] = field(default_factory=list)
    collected: list[Collected] = field(default_factory=list)
    phases: list[Phase] = field(default_factory=list)
    ended: list[Ended] = field(default_factory=list)
    problem: str = ""

    @property
    def tests(self) -> tuple[str, ...]:
        """The tests that were collected."""
        return self.collected[-1].tests if self.collected else ()


def read(text: str) -> Report:
    """Read the lines of a report."""
    found = Report()
    places = {Module: found.modules, Collected: found.collected, Phase: found.phases, Ended: found.ended}
    try:
        for line in text.splitlines():
            document = json.loads(line)
            kind = KINDS[document.pop("kind")]
            places[kind].append(structure.structure(document, kind))  # type: ignore[attr-defined] # by kind
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        found.problem = f"what the tests reported cannot be read: {type(error).__name__}: {error}"
    return found


def problem(report: Report, status: int, *, listed_only: bool = False) -> str:
    """Say why a run says nothing of the tests; empty where it does.

    Args:
        report: what its plugin wrote.
        status: the exit status of its process, which exited by itself.
        listed_only: the tests were only collected.

    """
    broken = [f"{one.name or 'the collection'}: {one.reason}" for one in report.modules if one.outcome == "failed"]
    if report.problem or not report.ended:
        return report.problem or f"it ended with status {status} before pytest did"
    if broken:
        return f"cannot be collected: {'; '.join(broken)}"
    if len(report.ended) > 1 or report.ended[0].status != status:
        return f"pytest said status {report.ended[0].status}, the process ended with {status}"
    if listed_only:
        return "" if status in (0, NOTHING_COLLECTED) else f"pytest ended with status {status}"
    return _incomplete(report, status)


def _incomplete(report: Report, status: int) -> str:
    """Say which tests did not run, or how their ends contradict pytest's own status."""
    if not report.tests and status in (0, NOTHING_COLLECTED):
        skipped = "; ".join(f"{one.name}: {one.reason}" for one in report.modules)
        return "no test was collected" + (f" (skipped: {skipped})" if skipped else "")
    if status not in TOLD:
        return f"pytest ended with status {status}"
    missing = sorted(set(report.tests) - {one.test for one in report.phases})
    if missing:
        return f"{len(missing)} of {len(report.tests)} tests did not run, the first of them {missing[0]}"
    red = any(check.measured in RED for check in checks(report))
    if red != (status == 1):
        return f"pytest ended with status {status}, and {'a' if red else 'no'} test failed"
    return ""


def checks(report: Report) -> tuple[CheckLine, ...]:
    """Return the tests as checks, in their order; each must be right in every tree, as a control must.

    A module that skips itself stands there by its own name.
    """
    by_test: dict[str, list[Phase]] = {}
    for one in report.phases:
        by_test.setdefault(one.test, []).append(one)
    left_out = [
        CheckLine(
            one.name, Role.CONTROL, None, measured=str(TestResult.SKIPPED), reason=one.reason or "no reason given"
        )
        for one in report.modules
        if one.outcome == "skipped"
    ]
    return (*(_check(name, by_test.get(name, [])) for name in dict.fromkeys(report.tests)), *left_out)


def _check(name: str, phases: list[Phase]) -> CheckLine:
    result, reason = _result(phases)
    ok = {TestResult.SKIPPED: None}.get(result, result not in RED)
    return CheckLine(name, Role.CONTROL, ok, measured=str(result), reason=reason)


def _result(phases: list[Phase]) -> tuple[TestResult, str]:
    """Say how a test ended: one whose setup or teardown failed broke, whatever its call did."""
    for one in phases:
        if one.outcome == "failed":
            return (TestResult.FAILED if one.when == "call" else TestResult.BROKE), one.reason
    for one in phases:
        if one.outcome == "skipped":
            return (TestResult.EXPECTED if one.expected else TestResult.SKIPPED), one.reason or "no reason given"
    calls = [one for one in phases if one.when == "call"]
    if not calls:
        return TestResult.MISSING, "its call never ended"
    return (TestResult.UNEXPECTED if calls[-1].expected else TestResult.PASSED), ""


def verdict(found: tuple[CheckLine, ...]) -> LaneVerdict:
    """Say what the tests show together, in the words of a lane."""
    judged = [check.ok for check in found if check.ok is not None]
    if not judged:
        return LaneVerdict.UNSUPPORTED
    return LaneVerdict.FIX_VALIDATED if all(judged) else LaneVerdict.CONTROL_FAILED
