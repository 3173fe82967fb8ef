"""From packs to cells: what a command judges, from copies of the packs' files."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import LaneName
from harness.host import eligibility
from harness.host.eligibility import Planned
from harness.host.host import Host
from harness.lane import built_environment
from harness.lane.cell import BOTH_LANES, Cell, pack_lanes
from harness.pack.model import Pack
from harness.upstream.source import SourceKind, parse_source

#: The column of the cell whose patch upstream is asked to merge.
ASK = "ask"


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
    is_pinned, upstream = source.is_pinned, pack.definition.upstream
    environment = pack.definition.stated(planned.target).environment
    lanes = tuple(lane for lane in request.lanes if lane in pack_lanes(pack))
    if not lanes:
        raise HarnessError(f'{pack.name} has no patched lane: pack.toml says fix = "none". Next: --lane pristine')
    return Cell(
        pack=pack,
        target=planned.target,
        evidence=planned.evidence,
        source=source,
        version=upstream.pin if is_pinned else source.value if source.kind == SourceKind.RELEASE else "",
        tree=upstream.sha256 if is_pinned else "",
        dependencies=request.dependencies,
        lanes=lanes,
        timeout=request.timeout,
        environment=built_environment.find_environment(cache, host, environment),
        reason=planned.reason,
    )


def cells_of(packs: list[Pack], target: str, request: Request, host: Host, cache: Cache) -> list[Cell]:
    """Build the cells of packs on ``auto``, ``all`` or one target, in the order of packs and targets.

    HarnessError is raised if there is no such target, or for the reasons of `cell_of`.
    """
    pairs = [(pack, planned) for pack in packs for planned in eligibility.plan(pack, target, host)]
    return [cell_of(pack, planned, request, host, cache) for pack, planned in pairs]


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
    sources = {path.name: path for path in (pack.script, pack.contract, *pack.folder.glob("*.patch"))}
    for name, path in sources.items():
        if path.is_file():  # a missing file is an error where it is read
            shutil.copyfile(path, folder / name)
    return replace(pack, inputs=folder)
