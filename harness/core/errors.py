"""The errors that end in one line for the user."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable

from harness.core.terminal import visible
from harness.core.words import Exit

#: How many near names a message suggests, and how many choices it lists beside them.
NEAR_NAMES, SHORT_LIST = 3, 8
#: A password or a token in a URL is whoever's who typed it.
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


class HarnessError(Exception):
    """Something that a user can fix; its text is one line that names the culprit and the next step."""

    def __init__(self, message: str, *, status: Exit = Exit.WRONG_CALL) -> None:
        """Keep the message on one line, visible whatever it quotes, and free of the passwords in URLs."""
        super().__init__(without_credentials(" ".join(visible(message).split())))
        self.status = status


class UnavailableError(HarnessError):
    """Something from outside cannot be had: no network, no such release, no room, a damaged file."""

    def __init__(self, message: str) -> None:
        """Set the status: a pack that meets this ends in ERROR, a command that only fetches in DEVIATES."""
        super().__init__(message, status=Exit.DEVIATES)


class UnreachableError(UnavailableError):
    """A git host cannot be reached from here."""


class NoRoomError(UnavailableError):
    """A file system is full or cannot be written: that is never a property of the release that was wanted."""


class UnsupportedHereError(HarnessError):
    """A pack cannot be judged on this host: it ends in UNSUPPORTED, with this reason."""


def unknown(what: str, given: str, valid: Iterable[str], next_command: str) -> HarnessError:
    """Build the error for a name of a `what`, such as ``pack``, that is none of the valid ones."""
    choices = sorted(valid)
    holding = [name for name in choices if given and given.lower() in name.lower()]
    near = (holding or difflib.get_close_matches(given, choices))[:NEAR_NAMES]
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    listed = f" Choices: {', '.join(choices) or 'none'}." if len(choices) <= SHORT_LIST else ""
    return HarnessError(f"no {what} {given!r}{hint}{listed} Next: {next_command}")
