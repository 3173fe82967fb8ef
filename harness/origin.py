"""Where a tree comes from: what ``--upstream`` accepts."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

from harness.definition import Definition
from harness.errors import HarnessError

FORMS = "PACKAGE==VERSION, latest, head, path:DIR, git+URL@COMMIT, installed"
GIT_PATTERN = re.compile(r"git\+(?P<url>.+)@(?P<commit>[0-9a-fA-F]{7,40}|[\w./-]+)")


class Kind(StrEnum):
    """The sorts of origin."""

    PINNED = "pinned"
    RELEASE = "release"
    LATEST = "latest"
    PATH = "path"
    GIT = "git"
    INSTALLED = "installed"


@dataclass(frozen=True)
class Origin:
    """One origin; `value` is a version, a folder or a commit, `url` a repository."""

    kind: Kind
    value: str = ""
    url: str = ""

    @property
    def is_pinned(self) -> bool:
        """Whether pack.toml states what this origin must give."""
        return self.kind == Kind.PINNED


def parse(text: str | None, definition: Definition) -> Origin:
    """Parse an ``--upstream`` specification for one pack; None is the pinned release.

    Raises:
        HarnessError: the text is of none of the forms, or names another package than the pack's.

    """
    upstream = definition.upstream
    if text is None:
        return Origin(Kind.PINNED, upstream.version)
    if text in (Kind.LATEST, Kind.INSTALLED):
        return Origin(Kind(text))
    if text == "head":
        if definition.head is None:
            raise HarnessError("--upstream head: pack.toml names no head commit. Next: --upstream git+URL@COMMIT")
        return Origin(Kind.GIT, definition.head.commit, upstream.repository)
    if text.startswith("path:") and text != "path:":
        return Origin(Kind.PATH, text.removeprefix("path:"))
    if match := GIT_PATTERN.fullmatch(text):
        return Origin(Kind.GIT, match["commit"], match["url"])
    return _release(text, upstream.package, upstream.version)


def _release(text: str, package: str, pinned: str) -> Origin:
    try:
        requirement = Requirement(text)
        specifier = next(iter(requirement.specifier))
    except (InvalidRequirement, StopIteration):
        raise HarnessError(f"--upstream {text!r} is none of {FORMS}. Next: --upstream {package}=={pinned}") from None
    if canonicalize_name(requirement.name) != canonicalize_name(package):
        raise HarnessError(
            f"--upstream {text}: this pack's package is {package}. Next: --upstream {package}{requirement.specifier}"
        )
    if specifier.operator != "==" or len(requirement.specifier) != 1 or "*" in specifier.version:
        raise HarnessError(f"--upstream {text}: name one version. Next: --upstream {package}==VERSION")
    if specifier.version == pinned:
        return Origin(Kind.PINNED, pinned)
    return Origin(Kind.RELEASE, specifier.version)
