"""Progress on a terminal."""

from __future__ import annotations

import io

import pytest

from harness.core.progress import Progress


class Terminal(io.StringIO):
    """A terminal as wide as the variable COLUMNS says."""

    def isatty(self) -> bool:
        return True


def test_times_are_whole_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "60")
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal()
    with Progress(terminal) as progress:
        progress.begin(2, 90.0)
        progress.tell("1/2 17_liger_flce_saved_gradients/cpu patched: FIX_VALIDATED, 125.7 s on cpu")
    assert "of about 1 min 30 s" in terminal.getvalue()
    assert "0:00:00" in terminal.getvalue().rpartition("patched:")[0].rpartition("1/2")[2]
    assert "FIX_VALIDATED" in terminal.getvalue(), "the text wraps"
