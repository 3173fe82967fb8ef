"""Runs pytest, and writes what happens to a file as it happens, one JSON object a line.

Run as a script in a lane: ``python -P pytest_main.py REPORT ARGUMENTS...``. The last line is written when pytest has
returned, with its status, which is then the exit status: a file without that line is of a run that was cut off.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

LONGEST = 400


def _reason(report: Any) -> str:  # noqa: ANN401 - pytest's reports of tests and of collection
    """Return why a test or a module ended as it did: the reason of a skip, or the message of what was raised."""
    text = report.longrepr
    if isinstance(text, tuple):
        return str(text[-1]).removeprefix("Skipped: ")[:LONGEST]
    crash = getattr(text, "reprcrash", None)
    lines = [line for line in str(crash.message if crash else text or "").splitlines() if line.strip()]
    return (lines[0] if crash else lines[-1])[:LONGEST] if lines else ""


class Recorder:
    """A plugin that writes down what is collected, how each phase of each test ends, and what cannot be collected."""

    def __init__(self, report: Path) -> None:
        """Open the file."""
        self._stream = report.open("a", encoding="utf-8")

    def say(self, kind: str, **values: object) -> None:
        """Write one line at once."""
        self._stream.write(json.dumps({"kind": kind, **values}) + "\n")
        self._stream.flush()

    def pytest_collectreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's
        """Note a module that cannot be collected, or that skips itself."""
        if report.outcome != "passed":
            self.say("module", name=report.nodeid, outcome=report.outcome, reason=_reason(report))

    def pytest_collection_finish(self, session: Any) -> None:  # noqa: ANN401 - pytest's
        """Note the tests that are going to run."""
        self.say("collected", tests=[item.nodeid for item in session.items])

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - pytest's
        """Note how one phase of a test ended."""
        expected = hasattr(report, "wasxfail")
        reason = str(report.wasxfail) if expected else _reason(report)
        self.say(
            "phase", test=report.nodeid, when=report.when, outcome=report.outcome, expected=expected, reason=reason
        )


def main() -> int:
    """Run pytest with the arguments of the command line."""
    recorder = Recorder(Path(sys.argv[1]))
    status = int(pytest.main(sys.argv[2:], plugins=[recorder]))
    recorder.say("ended", status=status)
    return status


if __name__ == "__main__":
    sys.exit(main())
