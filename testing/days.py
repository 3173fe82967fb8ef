"""The day of a look-up: a test that midnight interrupts finds either of two."""

from __future__ import annotations

import datetime as dt
import re
from pathlib import Path


def today() -> dt.date:
    """Return the day in UTC, as the harness dates what it looks up."""
    return dt.datetime.now(dt.UTC).date()


def since(begun: dt.date) -> set[str]:
    """Return the days from `begun` to today: what a child process that a test started since then may have written."""
    return {(begun + dt.timedelta(days=day)).isoformat() for day in range((today() - begun).days + 1)}


def replace(file: Path, day: str) -> None:
    """Let a file that holds what was looked up say that this was on another day."""
    text, found = re.subn(r'(?<="seen": ")\d{4}-\d\d-\d\d', day, file.read_text(encoding="utf-8"))
    assert found, text
    file.write_text(text, encoding="utf-8")
