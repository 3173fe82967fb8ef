"""What Python's tracebacks say."""

from __future__ import annotations

import re

#: How a traceback names the exception that ended a program.
EXCEPTION = re.compile(r"(?m)^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")


def last_exception(text: str) -> str:
    """Return the line of the last exception that a log names; empty where it names none."""
    said = EXCEPTION.findall(text)
    return said[-1].strip() if said else ""
