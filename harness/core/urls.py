"""URLs as they may be shown: a password or a token in one is whoever's who typed it."""

from __future__ import annotations

import re

CREDENTIALS = re.compile(r"(?P<scheme>\w://)[^\s/@]+@")
#: A parameter of a URL whose value opens something; one that is masked already is none.
PARAMETER = re.compile(
    r"(?P<name>[?&;](?:[\w-]*[_-])?"
    r"(?:token|secret|password|passwd|pwd|api_?key|signature|sig|auth|credential)=)"
    r"(?!\*{3}(?:[\s&#\"']|$))[^\s&#\"']{4,}",
    re.IGNORECASE,
)


def without_credentials(text: str) -> str:
    """Return a text whose URLs name no user, no password and no token."""
    return PARAMETER.sub(r"\g<name>***", CREDENTIALS.sub(r"\g<scheme>***@", text))
