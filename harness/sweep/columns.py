"""From packs to the cells of a sweep: pinned releases, newest releases, and heads of default branches."""

from __future__ import annotations

import fnmatch
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

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
from harness.upstream.source import Source, SourceKind

#: The fields in which the cell of a moving tree differs from the cell of the pinned release.
Fields = dict[str, Any]
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
    latest, head = (functools.cache(functools.partial(_look_up, moving, cache)) for moving in (_latest, _head))
    cells: list[Cell] = []
    for pack, target in pairs:
        upstream = pack.definition.upstream
        for planned in eligibility.plan(pack, target, host):
            cell = cell_of(pack, planned, Request(), host, cache)
            cells.append(cell)
            if cell.evidence is not None and LATEST in columns:
                fields = latest(upstream.package, upstream.is_wheel)
                if fields["version"] == cell.version:  # it shares the lanes of the pinned cell
                    fields = {"seen": fields["seen"]}
                cells.append(replace(cell, column=LATEST, **fields))
            if cell.evidence is not None and HEAD in columns and not upstream.is_compiled:  # it would have to be built
                cells.append(replace(cell, column=HEAD, **head(upstream.repository)))
    return cells


def _look_up(moving: Callable[..., Fields], cache: Cache, *subject: object) -> Fields:
    """Return the fields of a moving tree, or those of a cell that is UNAVAILABLE."""
    try:
        return moving(cache, *subject)
    except HarnessError as error:
        gone = {"evidence": None, "reason": str(error), "verdict": Verdict.UNAVAILABLE}
        return {"source": Source(SourceKind.LATEST), "version": "", **gone}


def _latest(cache: Cache, package: str, is_wheel: bool) -> Fields:  # noqa: FBT001 - a key of the cache
    release = newest.release(cache, package, wheels_only=is_wheel)
    source = Source(SourceKind.RELEASE, release.version)
    return {"source": source, "version": release.version, "tree": release.sha256, "seen": release.seen}


def _head(cache: Cache, repository: str) -> Fields:
    head = newest.head(cache, repository)
    version = f"commit {head.version[:12]} of {head.date}"
    return {
        "source": Source(SourceKind.GIT, head.version, repository),
        "version": version,
        "tree": "",
        "seen": head.seen,
    }
