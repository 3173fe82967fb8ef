"""From packs to the cells of a sweep: pinned releases, newest releases, and heads of default branches."""

from __future__ import annotations

import fnmatch
import functools
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
    """Build the cell of each pinned release, followed by its cells in `columns`: LATEST, HEAD, or both."""
    look_up = functools.cache(functools.partial(_look_up, cache))
    cells: list[Cell] = []
    for pack, target in pairs:
        upstream = pack.definition.upstream
        subjects = {LATEST: upstream.package, HEAD: upstream.repository}
        for planned in eligibility.plan(pack, target, host):
            pinned = cell_of(pack, planned, Request(), host, cache)
            cells.append(pinned)
            for column in columns if pinned.evidence is not None else ():
                if column == HEAD and upstream.is_compiled:  # it would have to be built
                    continue
                origin, fields = look_up(column, subjects[column], upstream.is_wheel)
                cell = cell_of(pack, planned, Request(origin), host, cache)
                cells.append(replace(cell, column=column, **fields))
    return cells


def _look_up(cache: Cache, column: str, subject: str, is_wheel: bool) -> tuple[str | None, dict[str, Any]]:  # noqa: FBT001 - a key of the cache
    """Return the origin of a moving tree, as ``--upstream`` names it, and the fields of its cell.

    If the look-up fails, the cell is UNAVAILABLE, with the reason.
    """
    try:
        if column == LATEST:
            release = newest.release(cache, subject, wheels_only=is_wheel)
            return f"{subject}=={release.file.version}", {"seen": release.seen}
        head = newest.head(cache, subject)
    except HarnessError as error:
        return None, {"version": "", "evidence": None, "reason": str(error), "verdict": Verdict.UNAVAILABLE}
    version = f"commit {head.commit[:12]} of {head.date}"
    return f"git+{subject}@{head.commit}", {"version": version, "seen": head.seen}
