"""From packs to cells: what a command judges, from copies of the packs' files."""

import fnmatch
import functools
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from harness.core import Cache, HarnessError, LaneName, Verdict, unknown_name
from harness.host import eligibility
from harness.host.eligibility import Planned
from harness.host.host import Host
from harness.lane.cell import BOTH_LANES, Cell, pack_lanes
from harness.lane.environment import find_environment
from harness.pack import Pack, load
from harness.upstream import download
from harness.upstream.source import SourceKind, parse_source

#: The columns of cells on the tree of the patch that upstream is asked to merge, on upstream's newest release, and on
#: the head of its default branch.
ASK, LATEST, HEAD = "ask", "latest", "head"


@dataclass(frozen=True)
class Request:
    """What a command requests of every pack."""

    upstream: str | None = None  # the text of ``--upstream``; None is the pinned release, ASK the tree of [ask]
    dependencies: tuple[str, ...] = ()  # the values of ``--with``
    lanes: tuple[LaneName, ...] = BOTH_LANES
    timeout: float | None = None  # of each lane, in seconds; None is the pack's own


def cell_of(pack: Pack, planned: Planned, request: Request, host: Host, cache: Cache) -> Cell:
    """Build the cell of one pack and target.

    HarnessError is raised if ``--upstream`` names no tree of this pack, or the pack asks upstream to merge no patch.
    """
    if request.upstream == ASK:
        ask = pack.definition.ask
        if ask is None:
            raise HarnessError("--upstream ask: pack.toml names no patch in [ask]. Next: runner.py run, without it")
        cell = cell_of(pack, planned, replace(request, upstream=ask.origin), host, cache)
        return replace(cell, column=ASK, patch=pack.ask_patch, about=ask.checks)
    source = parse_source(request.upstream, pack.definition)
    pin = pack.definition.upstream.pin
    environment = pack.definition.stated(planned.target).environment
    lanes = tuple(lane for lane in request.lanes if lane in pack_lanes(pack))
    if not lanes:
        raise HarnessError(f'{pack.name} has no patched lane: pack.toml says fix = "none". Next: --lane unpatched')
    return Cell(
        pack=pack,
        target=planned.target,
        evidence=planned.evidence,
        source=source,
        version=pin if source.is_pinned else source.value if source.kind == SourceKind.RELEASE else "",
        dependencies=request.dependencies,
        lanes=lanes,
        timeout=request.timeout,
        environment=find_environment(cache, host, environment),
        reason=planned.reason,
    )


def cells_of(packs: list[Pack], target: str, request: Request, host: Host, cache: Cache) -> list[Cell]:
    """Build the cells of packs on ``auto``, ``all`` or one target, in the order of packs and targets.

    HarnessError is raised if there is no such target, or for the reasons of `cell_of`.
    """
    pairs = [(pack, planned) for pack in packs for planned in eligibility.plan(pack, target, host)]
    return [cell_of(pack, planned, request, host, cache) for pack, planned in pairs]


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


def sweep_cells(pairs: list[tuple[Pack, str]], host: Host, cache: Cache, *columns: str) -> list[Cell]:
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
                # A compiled head would have to be built; the code of a pack that pins a commit is in no release.
                if upstream.is_compiled if column == HEAD else upstream.is_commit:
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
            release = download.newest_release(cache, subject, wheels_only=is_wheel)
            return f"{subject}=={release.version}", {"seen": release.seen}
        head = download.newest_head(cache, subject)
    except HarnessError as error:
        return None, {"version": "", "evidence": None, "reason": str(error), "verdict": Verdict.UNAVAILABLE}
    version = f"commit {head.version[:12]} of {head.date}"
    return f"git+{subject}@{head.version}", {"version": version, "seen": head.seen}


@contextmanager
def copied_inputs(cache: Cache, packs: Iterable[Pack]) -> Iterator[list[Pack]]:
    """Copy script, contract and patches of each pack into a folder of this command; yield packs that read the copies.

    A receipt states the hashes of the files that ran, even if somebody edits the originals meanwhile.
    """
    with cache.scratch("inputs-") as folder:
        with cache.guard():
            copies = [_copy(pack, folder / pack.name) for pack in packs]
        yield copies


def _copy(pack: Pack, folder: Path) -> Pack:
    folder.mkdir()
    for path in (pack.script, pack.contract, *pack.folder.glob("*.patch")):
        if path.is_file():  # a missing file is an error where it is read
            shutil.copyfile(path, folder / path.name)
    return replace(pack, inputs=folder)
