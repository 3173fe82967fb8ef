"""From packs to the cells of a sweep: the pinned releases, and with them what moves at each upstream."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from harness.core.cache import Cache
from harness.core.errors import HarnessError, unknown
from harness.core.words import Verdict
from harness.host import eligibility
from harness.host.host import Host
from harness.lane.cell import Cell
from harness.pack import load
from harness.pack.model import Pack
from harness.schedule.selection import Request, cell_of
from harness.upstream import newest
from harness.upstream.newest import Head, Release
from harness.upstream.source import Source, SourceKind

Found = TypeVar("Found")
#: What a cell has after its name: of upstream's newest release, of its default branch's head.
LATEST, HEAD = "latest", "head"


def selected(packs: list[Pack], only: tuple[str, ...]) -> list[tuple[Pack, str]]:
    """List pack and target for every ``PACK``, ``PACK:TARGET`` or ``:TARGET``; all where there is none.

    HarnessError is raised where one of them names nothing.
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
            raise unknown("cell", text, (f"{one.name}:{here}" for one, here in every), "runner.py sweep PACK[:TARGET]")
        chosen |= found
    return [(one, target) for one, target in every if not only or (one.name, target) in chosen]


def cells(chosen: list[tuple[Pack, str]], host: Host, cache: Cache, *columns: str) -> list[Cell]:
    """Build the cells of the pinned releases, each followed by those of what moves: LATEST, HEAD, or both.

    What moves is looked up once for all packs of an upstream. What cannot be had is UNAVAILABLE, with the reason.
    """

    @functools.cache
    def release(package: str, is_wheel: bool) -> Release | str:  # noqa: FBT001 - a key of the cache
        return _looked_up(lambda: newest.release(cache, package, wheels_only=is_wheel))

    @functools.cache
    def head(url: str) -> Head | str:
        return _looked_up(lambda: newest.head(cache, url))

    found: list[Cell] = []
    for pack, target in chosen:
        upstream = pack.definition.upstream
        for planned in eligibility.plan(pack, target, host):
            cell = cell_of(pack, planned, Request(), host, cache)
            found.append(cell)
            if cell.evidence is not None and LATEST in columns:
                found.append(_latest(cell, release(upstream.package, upstream.is_wheel)))
            if cell.evidence is not None and HEAD in columns and not upstream.is_compiled:  # it would have to be built
                found.append(_head(cell, head(upstream.repository)))
    return found


def _looked_up(look: Callable[[], Found]) -> Found | str:
    """Look something up; return why not where it cannot be had."""
    try:
        return look()
    except HarnessError as error:
        return str(error)


def _unavailable(cell: Cell, column: str, reason: str) -> Cell:
    cell = replace(cell, column=column, source=Source(SourceKind.LATEST), version="")
    return replace(cell, evidence=None, reason=reason, verdict=Verdict.UNAVAILABLE)


def _latest(cell: Cell, found: Release | str) -> Cell:
    """Build the cell of the newest release; where that is the pinned one, it shares the pinned cell's lanes."""
    if isinstance(found, str):
        return _unavailable(cell, LATEST, found)
    release, seen = found.file, found.seen
    if release.version == cell.version:
        return replace(cell, column=LATEST, seen=seen)
    source = Source(SourceKind.RELEASE, release.version)
    return replace(cell, column=LATEST, source=source, version=release.version, tree=release.sha256, seen=seen)


def _head(cell: Cell, found: Head | str) -> Cell:
    """Build the cell of the head of the default branch."""
    if isinstance(found, str):
        return _unavailable(cell, HEAD, found)
    version = f"commit {found.commit[:12]} of {found.date}"
    source = Source(SourceKind.GIT, found.commit, cell.pack.definition.upstream.repository)
    return replace(cell, column=HEAD, source=source, version=version, tree="", seen=found.seen)
