"""From packs to the cells of a sweep: the pinned releases, and with them each upstream's newest."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from harness.core.cache import Cache
from harness.core.errors import HarnessError, unknown
from harness.core.words import Verdict
from harness.host import eligibility
from harness.host.host import Host
from harness.pack import load
from harness.pack.model import Pack
from harness.schedule.selection import Request, cell_of
from harness.upstream import newest
from harness.upstream.newest import Head, Release
from harness.upstream.source import Source, SourceKind
from harness.verdict.cell import Cell

Found = TypeVar("Found", Release, Head)
#: What a cell of upstream's newest release has behind its name.
LATEST = "latest"
#: And of the head of its default branch.
HEAD = "head"


def selected(packs: list[Pack], only: tuple[str, ...]) -> list[tuple[Pack, str]]:
    """List pack and target for every ``--only PACK``, ``PACK:TARGET`` or ``:TARGET``; all where there is none.

    Raises:
        HarnessError: one of them names nothing.

    """
    every = [(one, target) for one in packs for target in one.definition.targets]
    chosen: set[tuple[str, str]] = set()
    for text in only:
        name, _, target = text.partition(":")
        found = {
            (one.name, here)
            for one, here in every
            if (not name or load.matches(one.name, name)) and fnmatch.fnmatchcase(here, target or "*")
        }
        if not found:
            raise unknown("cell", text, (f"{one.name}:{here}" for one, here in every), "--only PACK[:TARGET]")
        chosen |= found
    return [(one, target) for one, target in every if not only or (one.name, target) in chosen]


@dataclass(frozen=True)
class Moving:
    """What else than the pinned releases is judged: each upstream's newest release, the head of its default branch."""

    latest: bool = False
    head: bool = False


def cells(chosen: list[tuple[Pack, str]], host: Host, cache: Cache, moving: Moving) -> list[Cell]:
    """Build the cells of the pinned releases, each followed by those of what moves."""
    pinned = [
        cell_of(pack, planned, Request(), host, cache)
        for pack, target in chosen
        for planned in eligibility.plan(pack, target, host)
    ]
    judged = [cell for cell in pinned if cell.evidence is not None]
    packages = dict.fromkeys(_package(cell) for cell in judged if moving.latest)
    releases = {(name, wheel): _found(newest.release, cache, name, wheels_only=wheel) for name, wheel in packages}
    urls = dict.fromkeys(_repository(cell) for cell in judged if moving.head and not _compiled(cell))
    heads = {url: _found(newest.head, cache, url) for url in urls}
    found: list[Cell] = []
    for cell in pinned:
        found.append(cell)
        if cell.evidence is not None and moving.latest:
            found.append(_latest(cell, releases[_package(cell)]))
        if cell.evidence is not None and _repository(cell) in heads and not _compiled(cell):
            found.append(_head(cell, heads[_repository(cell)]))
    return found


def _package(cell: Cell) -> tuple[str, bool]:
    """Return the package of a cell's upstream, and whether its releases are judged by their wheels."""
    upstream = cell.pack.definition.upstream
    return upstream.package, upstream.is_wheel


def _repository(cell: Cell) -> str:
    return cell.pack.definition.upstream.repository


def _compiled(cell: Cell) -> bool:
    """Whether a checkout of the upstream would have to be built first."""
    return cell.pack.definition.upstream.is_compiled


def _found(look: Callable[..., Found], *given: Any, **named: Any) -> Found | str:  # noqa: ANN401 - as `look` takes them
    """Look something up, once for all packs of an upstream; return why not where it cannot be had."""
    try:
        return look(*given, **named)
    except HarnessError as error:
        return str(error)


def _unavailable(cell: Cell, column: str, reason: str) -> Cell:
    source = Source(SourceKind.LATEST)
    return replace(
        cell, column=column, source=source, version="", evidence=None, reason=reason, verdict=Verdict.UNAVAILABLE
    )


def _latest(cell: Cell, found: Release | str) -> Cell:
    """Build the cell of the newest release; where that is the pinned one, it shares the pinned cell's lanes."""
    if isinstance(found, str):
        return _unavailable(cell, LATEST, found)
    release, seen = found.file, found.seen.isoformat()
    if release.version == cell.version:
        return replace(cell, column=LATEST, seen=seen)
    source = Source(SourceKind.RELEASE, release.version)
    return replace(cell, column=LATEST, source=source, version=release.version, tree=release.sha256, seen=seen)


def _head(cell: Cell, found: Head | str) -> Cell:
    """Build the cell of the head of the default branch."""
    if isinstance(found, str):
        return _unavailable(cell, HEAD, found)
    version = f"commit {found.commit[:12]} of {found.date}"
    source = Source(SourceKind.GIT, found.commit, _repository(cell))
    return replace(cell, column=HEAD, source=source, version=version, tree="", seen=found.seen.isoformat())
