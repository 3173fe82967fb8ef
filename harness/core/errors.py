"""The errors that end in one line for the user."""

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.terminal import visible
from harness.core.words import Exit

#: Similar names that a message suggests, and the longest list of choices that it prints.
NEAR_NAMES, SHORT_LIST = 3, 8
#: The user, with a password or a token, in a URL.
CREDENTIALS = re.compile(r"(?P<scheme>\w://)[^\s/@]+@")
#: A parameter of a URL whose value is a secret that is not masked yet.
PARAMETER = re.compile(
    r"(?P<name>[?&;](?:[\w-]*[_-])?"
    r"(?:token|secret|password|passwd|pwd|api_?key|signature|sig|auth|credential)=)"
    r"(?!\*{3}(?:[\s&#\"']|$))[^\s&#\"']{4,}",
    re.IGNORECASE,
)


def mask_credentials(text: str) -> str:
    """Return a text whose URLs name no user, no password and no token."""
    return PARAMETER.sub(r"\g<name>***", CREDENTIALS.sub(r"\g<scheme>***@", text))


class HarnessError(Exception):
    """An error that a user can fix; its text is one line that names the cause and the next step."""

    def __init__(self, message: str, *, status: Exit = Exit.WRONG_CALL) -> None:
        """Put the message on one line, without invisible characters and without passwords of URLs."""
        super().__init__(mask_credentials(" ".join(visible(message).split())))
        self.status = status


class UnavailableError(HarnessError):
    """Something external is not available: no network, no such release, no room, a damaged file."""

    def __init__(self, message: str) -> None:
        """Set the status of a command that only fetches; a pack ends in ERROR."""
        super().__init__(message, status=Exit.DEVIATES)


class UnreachableError(UnavailableError):
    """A git host cannot be reached from here."""


class NoRoomError(UnavailableError):
    """A file system is full or cannot be written, which says nothing about the requested release."""


class UnsupportedHereError(HarnessError):
    """A pack cannot be judged on this host: it ends in UNSUPPORTED, with this reason."""


@dataclass(frozen=True)
class Finding:
    """A rule of `check` that a pack breaks; a warning does not make `check` fail."""

    text: str
    is_warning: bool = False


def unknown_name(noun: str, name: str, valid: Iterable[str], next_command: str) -> HarnessError:
    """Build the error for the name of a `noun`, such as ``pack``, that is not among the valid ones."""
    choices = sorted(valid)
    containing = [choice for choice in choices if name and name.lower() in choice.lower()]
    similar = (containing or difflib.get_close_matches(name, choices))[:NEAR_NAMES]
    hint = f"; did you mean {' or '.join(similar)}?" if similar else "."
    listing = f" Choices: {', '.join(choices) or 'none'}." if len(choices) <= SHORT_LIST else ""
    return HarnessError(f"no {noun} {name!r}{hint}{listing} Next: {next_command}")
