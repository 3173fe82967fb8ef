"""From packs to the cells of a sweep: the pinned releases, and with them each upstream's newest."""

from __future__ import annotations

import fnmatch
import itertools
from dataclasses import replace

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError, unknown
from harness.core.words import Verdict
from harness.host import eligibility
from harness.host.host import Host
from harness.pack import load
from harness.pack.model import Pack
from harness.schedule.selection import Request, cell_of
from harness.upstream import download
from harness.upstream.download import ReleaseFile
from harness.upstream.source import Source, SourceKind
from harness.verdict.cell import Cell

#: What a cell of upstream's newest release has behind its name.
LATEST = "latest"


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


def cells(chosen: list[tuple[Pack, str]], host: Host, cache: Cache, *, latest: bool) -> list[Cell]:
    """Build the cells of the pinned releases, and with `latest` those of each upstream's newest release."""
    pinned = [
        cell_of(pack, planned, Request(), host, cache)
        for pack, target in chosen
        for planned in eligibility.plan(pack, target, host)
    ]
    if not latest:
        return pinned
    packages = dict.fromkeys(_package(cell) for cell in pinned if cell.evidence is not None)
    known = {(package, wheel): _resolved(cache, package, wheels_only=wheel) for package, wheel in packages}
    pairs = ([cell, _latest(cell, known[_package(cell)])] if cell.evidence is not None else [cell] for cell in pinned)
    return list(itertools.chain.from_iterable(pairs))


def _package(cell: Cell) -> tuple[str, bool]:
    """Return the package of a cell's upstream, and whether its releases are judged by their wheels."""
    upstream = cell.pack.definition.upstream
    return upstream.package, upstream.is_wheel


def _resolved(cache: Cache, package: str, *, wheels_only: bool) -> ReleaseFile | str:
    """Look the newest release up, once for all packs of an upstream; return why not where it cannot be had."""
    try:
        return download.resolve(cache, package, None, wheels_only=wheels_only)
    except (UnavailableError, HarnessError) as error:
        return str(error)


def _latest(cell: Cell, release: ReleaseFile | str) -> Cell:
    """Build the cell of the newest release; where that is the pinned one, it shares the pinned cell's lanes."""
    if isinstance(release, str):
        source = Source(SourceKind.LATEST)
        return replace(
            cell, column=LATEST, source=source, version="", evidence=None, reason=release, verdict=Verdict.UNAVAILABLE
        )
    if release.version == cell.version:
        return replace(cell, column=LATEST)
    source = Source(SourceKind.RELEASE, release.version)
    return replace(cell, column=LATEST, source=source, version=release.version, tree=release.sha256)
