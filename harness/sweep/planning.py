"""From packs to cells and tasks: what there is to judge tonight."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Iterator
from dataclasses import replace

from harness import download, made, pack, plan
from harness.cache import Cache
from harness.download import Release as IndexRelease
from harness.errors import HarnessError, UnavailableError, UnsupportedHereError, unknown
from harness.host import Host
from harness.origin import Kind, Origin
from harness.pack import Pack
from harness.sweep.cell import Cell, Release, Task, tasks


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
            if (not name or pack.matches(one.name, name)) and fnmatch.fnmatchcase(here, target or "*")
        }
        if not found:
            raise unknown("cell", text, (f"{one.name}:{here}" for one, here in every), "--only PACK[:TARGET]")
        chosen |= found
    return [(one, target) for one, target in every if not only or (one.name, target) in chosen]


def cells(chosen: list[tuple[Pack, str]], host: Host, cache: Cache, *, latest: bool) -> list[Cell]:
    """Build the cells of the pinned releases, and with `latest` those of each upstream's newest release."""
    pinned = [_pinned(one, target, host, cache) for one, target in chosen]
    if not latest:
        return pinned
    packages = dict.fromkeys(_package(cell) for cell in pinned if cell.evidence is not None)
    known = {package: _resolved(cache, package) for package in packages}
    pairs = ([cell, _latest(cell, known[_package(cell)])] if cell.evidence is not None else [cell] for cell in pinned)
    return list(itertools.chain.from_iterable(pairs))


def _package(cell: Cell) -> str:
    return cell.pack.definition.upstream.package


def _pinned(one: Pack, target: str, host: Host, cache: Cache) -> Cell:
    (planned,) = plan.plan(one, target, host)
    upstream = one.definition.upstream
    origin = Origin(Kind.PINNED, upstream.version)
    cell = Cell(
        pack=one,
        target=target,
        evidence=planned.evidence,
        release=Release.PINNED,
        origin=origin,
        version=upstream.version,
        tree=upstream.sha256,
        reason=planned.reason,
        environment=made.environment(cache, host, one.definition.targets[target].environment),
    )
    try:
        cell.companion_set(host)
    except UnsupportedHereError as error:
        return replace(cell, evidence=None, reason=str(error))
    return cell


def _resolved(cache: Cache, package: str) -> IndexRelease | str:
    """Look the newest release up, once for all packs of an upstream; return why not where it cannot be had."""
    try:
        return download.resolve(cache, package, None)
    except (UnavailableError, HarnessError) as error:
        return str(error)


def _latest(cell: Cell, release: IndexRelease | str) -> Cell:
    """Build the cell of the newest release; where that is the pinned one, it shares the pinned cell's lanes."""
    if isinstance(release, str):
        origin = Origin(Kind.LATEST)
        return replace(
            cell, release=Release.LATEST, origin=origin, version="", evidence=None, reason=release, broken=True
        )
    if release.version == cell.version:
        return replace(cell, release=Release.LATEST)
    origin = Origin(Kind.RELEASE, release.version)
    return replace(cell, release=Release.LATEST, origin=origin, version=release.version, tree=release.sha256)


def unique_tasks(every: list[Cell], host: Host, repeat: int) -> Iterator[Task]:
    """Yield the tasks of all cells; what two cells share (the newest release is the pinned one) comes once."""
    seen: set[str] = set()
    for cell in every:
        for task in tasks(cell, host, repeat):
            if task.key not in seen:
                seen.add(task.key)
                yield task
