"""What Python's tracebacks say."""

from __future__ import annotations

import re

#: How a traceback names the exception that ended a program.
EXCEPTION = re.compile(r"(?m)^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")


def last_exception(text: str, of: str = "") -> str:
    """Return the line of the last exception that a log names, of those with `of` in it if there are any; or nothing."""
    said = EXCEPTION.findall(text)
    wanted = [line for line in said if of in line] or said
    return wanted[-1].strip() if wanted else ""
