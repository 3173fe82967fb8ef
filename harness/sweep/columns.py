"""The columns beside the pinned releases: upstream's newest release and the head of its default branch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from harness.core.errors import HarnessError
from harness.core.words import Verdict
from harness.upstream.newest import Release
from harness.upstream.source import Source, SourceKind
from harness.verdict.cell import Cell

Found = TypeVar("Found")
#: What a cell has behind its name: of upstream's newest release, of its default branch's head.
LATEST, HEAD = "latest", "head"


@dataclass(frozen=True)
class Moving:
    """What else than the pinned releases is judged: the newest releases, the default branches' heads."""

    latest: bool = False
    head: bool = False


def package(cell: Cell) -> tuple[str, bool]:
    """Return the package of a cell's upstream, and whether its releases are judged by their wheels."""
    upstream = cell.pack.definition.upstream
    return upstream.package, upstream.is_wheel


def looked_up(look: Callable[..., Found], *given: Any, **named: Any) -> Found | str:  # noqa: ANN401 - as `look` takes
    """Look something up, once for all packs of an upstream; return why not where it cannot be had."""
    try:
        return look(*given, **named)
    except HarnessError as error:
        return str(error)


def unavailable(cell: Cell, column: str, reason: str) -> Cell:
    """Build the cell of what cannot be had from anywhere."""
    source = Source(SourceKind.LATEST)
    return replace(
        cell, column=column, source=source, version="", evidence=None, reason=reason, verdict=Verdict.UNAVAILABLE
    )


def of_release(cell: Cell, column: str, found: Release | str) -> Cell:
    """Build the cell of a release that moves; where that is the pinned one, it shares the pinned cell's lanes."""
    if isinstance(found, str):
        return unavailable(cell, column, found)
    release, seen = found.file, found.seen
    if release.version == cell.version:
        return replace(cell, column=column, seen=seen)
    source = Source(SourceKind.RELEASE, release.version)
    return replace(cell, column=column, source=source, version=release.version, tree=release.sha256, seen=seen)
