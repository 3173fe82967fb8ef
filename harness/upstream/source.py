"""The origin of a tree, as ``--upstream`` names it."""

import re
from dataclasses import dataclass
from enum import StrEnum

from packaging.utils import canonicalize_name

from harness.core.errors import HarnessError
from harness.pack import Definition, requirements

FORMS = "PACKAGE==VERSION, latest, head, ask, path:DIR, git+URL@COMMIT, installed"
#: The version of a tree that holds a commit unchanged.
COMMIT_VERSION = re.compile(r"(?:commit|path at) (?P<commit>[0-9a-f]{40})")
#: Neither the URL nor the commit may begin as an option of git does.
GIT_PATTERN = re.compile(r"git\+(?P<url>[^-].*)@(?P<commit>[0-9a-fA-F]{7,40}|\w[\w./-]*)")


class SourceKind(StrEnum):
    """The sorts of origin."""

    PINNED = "pinned"
    RELEASE = "release"
    LATEST = "latest"
    PATH = "path"
    GIT = "git"
    INSTALLED = "installed"


@dataclass(frozen=True)
class Source:
    """One origin; `value` is a version, a folder or a commit, `url` a repository."""

    kind: SourceKind
    value: str = ""
    url: str = ""

    @property
    def is_release(self) -> bool:
        """Whether its tree is unpacked from a file of the package index."""
        return self.kind in (SourceKind.RELEASE, SourceKind.LATEST) or (self.is_pinned and not self.url)

    @property
    def is_pinned(self) -> bool:
        """Whether pack.toml pins this origin, and states its verdict."""
        return self.kind == SourceKind.PINNED


def parse_source(text: str | None, definition: Definition) -> Source:
    """Parse the value of ``--upstream`` for one pack; None is the pinned release.

    HarnessError: the text has none of the forms, or names another package.
    """
    upstream = definition.upstream
    if text is None:
        return pinned_source(definition)
    if text in (SourceKind.LATEST, SourceKind.INSTALLED):
        return Source(SourceKind(text))
    if text == "head":
        if definition.head is None:
            raise HarnessError("--upstream head: pack.toml names no head commit. Next: --upstream git+URL@COMMIT")
        return Source(SourceKind.GIT, definition.head.commit, upstream.repository)
    if text.startswith("path:") and text != "path:":
        return Source(SourceKind.PATH, text.removeprefix("path:"))
    if match := GIT_PATTERN.fullmatch(text):
        return Source(SourceKind.GIT, match["commit"], match["url"])
    return _release(text, definition)


def pinned_source(definition: Definition) -> Source:
    """Return the origin that pack.toml pins: a release, or a commit of the upstream's repository."""
    upstream = definition.upstream
    if upstream.is_commit:
        return Source(SourceKind.PINNED, upstream.commit, upstream.repository)
    return Source(SourceKind.PINNED, upstream.version)


def _release(text: str, definition: Definition) -> Source:
    package, release = definition.upstream.package, definition.upstream.version
    try:
        requirement, version = requirements.exact_pin(text)
    except ValueError:
        raise HarnessError(
            f"--upstream {text!r} is none of {FORMS}. Next: --upstream {package}=={release or 'VERSION'}"
        ) from None
    if canonicalize_name(requirement.name) != canonicalize_name(package):
        raise HarnessError(f"--upstream {text}: this pack's package is {package}. Next: --upstream {package}==VERSION")
    return pinned_source(definition) if version == release else Source(SourceKind.RELEASE, version)


def commit_of(version: str) -> str:
    """Return the commit that the version of a tree states; empty if it states none."""
    match = COMMIT_VERSION.fullmatch(version)
    return match["commit"] if match else ""
