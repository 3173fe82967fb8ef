"""The words of scripts, verdicts and receipts."""

import re
from enum import IntEnum, StrEnum


class Kind(StrEnum):
    """What sort of claim a pack makes; printed beside every verdict."""

    WRONG_RESULT = "wrong-result"
    CRASH = "crash"
    CAPABILITY = "capability"
    SILENT_FALLBACK = "silent-fallback"
    PRECISION = "precision"
    CLEANUP = "cleanup"

    @property
    def what(self) -> str:
        """The noun for what a tree has: a cleanup is no bug."""
        return "the code" if self == Kind.CLEANUP else "the bug"


class Evidence(StrEnum):
    """How a verdict was obtained, the strongest first."""

    EXECUTED = "executed"
    INTERPRETED = "interpreted"
    COMPILED = "compiled"
    TRACED = "traced"

    @property
    def rank(self) -> int:
        """0 for the strongest evidence; a larger number is weaker."""
        return list(Evidence).index(self)


class Role(StrEnum):
    """The role of a check: wrong while the bug is there, or right in every tree."""

    DEFECT = "defect"
    CONTROL = "control"


class LaneName(StrEnum):
    """Which of the two trees a lane runs on."""

    PRISTINE = "pristine"
    PATCHED = "patched"

    @property
    def label(self) -> str:
        """Its name for people; JSON and the names of logs have the value."""
        return "unpatched" if self is LaneName.PRISTINE else "patched"


class LaneVerdict(StrEnum):
    """The verdict on one lane."""

    BUG_REPRODUCED = "BUG_REPRODUCED"
    FIX_VALIDATED = "FIX_VALIDATED"
    CONTROL_FAILED = "CONTROL_FAILED"
    FIX_INCOMPLETE = "FIX_INCOMPLETE"
    UNSUPPORTED = "UNSUPPORTED"
    ERROR = "ERROR"


class Verdict(StrEnum):
    """The verdict on a pack, by its lanes."""

    CONFIRMED = "CONFIRMED"
    REPRODUCED = "REPRODUCED"
    VALIDATED = "VALIDATED"
    FIXED_UPSTREAM = "FIXED_UPSTREAM"
    FIX_INEFFECTIVE = "FIX_INEFFECTIVE"
    FIX_INCOMPLETE = "FIX_INCOMPLETE"
    PATCH_BREAKS = "PATCH_BREAKS"
    PATCH_STALE = "PATCH_STALE"
    CONTROL_FAILED = "CONTROL_FAILED"
    UNSUPPORTED = "UNSUPPORTED"
    UNAVAILABLE = "UNAVAILABLE"
    ERROR = "ERROR"


class Fix(StrEnum):
    """The fix of a pack: a patch of the pinned tree, or none (its source cannot be built here)."""

    PATCH = "patch"
    NONE = "none"


class ActionKind(StrEnum):
    """What is to be done with a pack: report it, wait for the answer, or nothing more."""

    FILE = "file"
    FILED = "filed"
    FIXED = "fixed"
    NOTHING = "nothing"


class ThreadState(StrEnum):
    """The state of an upstream's issue or pull request when it was read."""

    OPEN = "open"
    MERGED = "merged"
    CLOSED = "closed"


class SuiteVerdict(StrEnum):
    """The verdict of upstream's own tests on a patch."""

    UNBROKEN = "UNBROKEN"
    BREAKS_TESTS = "BREAKS_TESTS"
    NEW_TEST_WRONG = "NEW_TEST_WRONG"
    PATCH_STALE = "PATCH_STALE"
    UNSUPPORTED = "UNSUPPORTED"
    ERROR = "ERROR"


class TestResult(StrEnum):
    """How one test of a suite ended."""

    __test__ = False  # it is no test itself

    PASSED = "passed"
    FAILED = "failed"
    BROKE = "error"
    SKIPPED = "skipped"
    EXPECTED = "xfailed"
    MISSING = "missing"


class Exit(IntEnum):
    """Exit statuses of the runner."""

    AS_EXPECTED = 0
    DEVIATES = 1
    WRONG_CALL = 2
    NOTHING_JUDGED = 5
    INTERRUPTED = 130


#: The verdicts of a cell that was not judged.
UNJUDGED = frozenset({Verdict.UNSUPPORTED, Verdict.UNAVAILABLE})
#: Stands beside a verdict on a target that pack.toml does not list.
NO_EXPECTATION = "no expectation"
#: The claim that only the runner makes, from the outputs of both lanes.
BITWISE_IDENTICAL = "BITWISE_IDENTICAL"

TARGET_PATTERN = re.compile(r"cpu|sm_(?:[78]\d|(?:9\d|1[0-9]\d)a)")


def is_target(text: str) -> bool:
    """Whether `text` names a target: ``cpu``, ``sm_80``, and with the suffix from sm_90 on ``sm_90a``."""
    return TARGET_PATTERN.fullmatch(text) is not None
