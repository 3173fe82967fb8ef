"""From packs to the cells of a sweep: pinned releases, newest releases, and heads of default branches."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

from harness.core.cache import Cache
from harness.core.errors import HarnessError, unknown_name
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

Answer = TypeVar("Answer")
#: The columns of cells on upstream's newest release, and on the head of its default branch.
LATEST, HEAD = "latest", "head"


def select(packs: list[Pack], selectors: tuple[str, ...]) -> list[tuple[Pack, str]]:
    """List pack and target for every ``PACK``, ``PACK:TARGET`` or ``:TARGET``, or all pairs without a selector.

    HarnessError is raised if a selector matches nothing.
    """
    pairs = [(pack, target) for pack in packs for target in pack.definition.targets]
    selection: set[tuple[str, str]] = set()
    for selector in selectors:
        name, _, pattern = selector.partition(":")
        named = [(pack, target) for pack, target in pairs if not name or load.matches(pack.name, name)]
        matches = {(pack.name, target) for pack, target in named if fnmatch.fnmatchcase(target, pattern or "*")}
        if not matches:
            names = (f"{pack.name}:{target}" for pack, target in named or pairs)
            raise unknown_name("cell", selector, names, "runner.py sweep PACK[:TARGET]")
        selection |= matches
    return [(pack, target) for pack, target in pairs if not selectors or (pack.name, target) in selection]


def cells(pairs: list[tuple[Pack, str]], host: Host, cache: Cache, *columns: str) -> list[Cell]:
    """Build the cell of each pinned release, followed by its cells in `columns`: LATEST, HEAD, or both.

    The newest release and the head are looked up once for all packs of an upstream. If that fails, their cells are
    UNAVAILABLE, with the reason.
    """

    @functools.cache
    def release(package: str, is_wheel: bool) -> Release | str:  # noqa: FBT001 - a key of the cache
        return _answer(lambda: newest.release(cache, package, wheels_only=is_wheel))

    @functools.cache
    def head(url: str) -> Head | str:
        return _answer(lambda: newest.head(cache, url))

    cells: list[Cell] = []
    for pack, target in pairs:
        upstream = pack.definition.upstream
        for planned in eligibility.plan(pack, target, host):
            cell = cell_of(pack, planned, Request(), host, cache)
            cells.append(cell)
            if cell.evidence is not None and LATEST in columns:
                cells.append(_latest(cell, release(upstream.package, upstream.is_wheel)))
            if cell.evidence is not None and HEAD in columns and not upstream.is_compiled:  # it would have to be built
                cells.append(_head(cell, head(upstream.repository)))
    return cells


def _answer(look_up: Callable[[], Answer]) -> Answer | str:
    """Return the answer of a look-up, or why there is none."""
    try:
        return look_up()
    except HarnessError as error:
        return str(error)


def _unavailable(cell: Cell, column: str, reason: str) -> Cell:
    cell = replace(cell, column=column, source=Source(SourceKind.LATEST), version="")
    return replace(cell, evidence=None, reason=reason, verdict=Verdict.UNAVAILABLE)


def _latest(cell: Cell, release: Release | str) -> Cell:
    """Build the cell of the newest release; if that is the pinned one, it shares the pinned cell's lanes."""
    if isinstance(release, str):
        return _unavailable(cell, LATEST, release)
    file, seen = release.file, release.seen
    if file.version == cell.version:
        return replace(cell, column=LATEST, seen=seen)
    source = Source(SourceKind.RELEASE, file.version)
    return replace(cell, column=LATEST, source=source, version=file.version, tree=file.sha256, seen=seen)


def _head(cell: Cell, head: Head | str) -> Cell:
    """Build the cell of the head of the default branch."""
    if isinstance(head, str):
        return _unavailable(cell, HEAD, head)
    version = f"commit {head.commit[:12]} of {head.date}"
    source = Source(SourceKind.GIT, head.commit, cell.pack.definition.upstream.repository)
    return replace(cell, column=HEAD, source=source, version=version, tree="", seen=head.seen)
