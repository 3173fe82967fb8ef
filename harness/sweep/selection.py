"""From packs to the cells of a sweep: the pinned releases, and with them each upstream's newest."""

from __future__ import annotations

import fnmatch
from dataclasses import replace

from harness.core.cache import Cache
from harness.core.errors import unknown
from harness.host import eligibility
from harness.host.host import Host
from harness.pack import load
from harness.pack.model import Pack
from harness.schedule.selection import Request, cell_of
from harness.sweep import columns
from harness.sweep.columns import HEAD, LATEST, Moving, looked_up, package
from harness.upstream import newest
from harness.upstream.newest import Head
from harness.upstream.source import Source, SourceKind
from harness.verdict.cell import Cell


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


def cells(chosen: list[tuple[Pack, str]], host: Host, cache: Cache, moving: Moving) -> list[Cell]:
    """Build the cells of the pinned releases, each followed by those of what moves."""
    pinned = [
        cell_of(pack, planned, Request(), host, cache)
        for pack, target in chosen
        for planned in eligibility.plan(pack, target, host)
    ]
    judged = [cell for cell in pinned if cell.evidence is not None]
    packages = dict.fromkeys(package(cell) for cell in judged if moving.latest)
    releases = {(name, wheel): looked_up(newest.release, cache, name, wheels_only=wheel) for name, wheel in packages}
    urls = dict.fromkeys(_repository(cell) for cell in judged if moving.head and not _compiled(cell))
    heads = {url: looked_up(newest.head, cache, url) for url in urls}
    found: list[Cell] = []
    for cell in pinned:
        found.append(cell)
        if cell.evidence is None:
            continue
        if moving.latest:
            found.append(columns.of_release(cell, LATEST, releases[package(cell)]))
        if _repository(cell) in heads and not _compiled(cell):
            found.append(_head(cell, heads[_repository(cell)]))
    return found


def _repository(cell: Cell) -> str:
    return cell.pack.definition.upstream.repository


def _compiled(cell: Cell) -> bool:
    """Whether a checkout of the upstream would have to be built first."""
    return cell.pack.definition.upstream.is_compiled


def _head(cell: Cell, found: Head | str) -> Cell:
    """Build the cell of the head of the default branch."""
    if isinstance(found, str):
        return columns.unavailable(cell, HEAD, found)
    version = f"commit {found.commit[:12]} of {found.date}"
    source = Source(SourceKind.GIT, found.commit, _repository(cell))
    return replace(cell, column=HEAD, source=source, version=version, tree="", seen=found.seen)
