"""From packs to cells: what a command judges, by files that nobody edits meanwhile."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core import files
from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnsupportedHereError
from harness.core.words import LaneName, Verdict
from harness.host import eligibility
from harness.host.eligibility import Planned
from harness.host.host import Host
from harness.lane import built_environment
from harness.pack.model import Pack
from harness.upstream import dependencies
from harness.upstream.source import SourceKind, parse_source
from harness.verdict.cell import BOTH_LANES, Cell, lanes_of

#: What tells the cell of the patch that upstream is asked to merge from the others of its pack.
ASK = "ask"


@dataclass(frozen=True)
class Request:
    """What was requested, for every pack of a command alike."""

    upstream: str | None = None  # the text of ``--upstream``; None is the pinned release
    dependencies: tuple[str, ...] = ()  # the values of ``--with``
    lanes: tuple[LaneName, ...] = BOTH_LANES  # which of the two
    timeout: float | None = None  # of each, in seconds; None is the pack's own
    #: with the patch that upstream is asked to merge, on the tree that pack.toml names for it
    ask: bool = False


def cell_of(pack: Pack, planned: Planned, request: Request, host: Host, cache: Cache) -> Cell:
    """Build the cell of one pack and target.

    Raises:
        HarnessError: ``--upstream`` names nothing of this pack, or it asks upstream to merge no patch of its own.

    """
    if request.ask:
        return _asked(pack, planned, replace(request, upstream=_origin(pack), ask=False), host, cache)
    source = parse_source(request.upstream, pack.definition)
    pinned, upstream = source.is_pinned, pack.definition.upstream
    cell = Cell(
        pack=pack,
        target=planned.target,
        evidence=planned.evidence,
        source=source,
        version=upstream.pin if pinned else source.value if source.kind == SourceKind.RELEASE else "",
        tree=upstream.sha256 if pinned else "",
        dependencies=request.dependencies,
        lanes=_lanes(pack, request.lanes),
        timeout=request.timeout,
        reason=planned.reason,
    )
    if planned.evidence is None:
        return cell
    try:
        files.sha256_file(pack.probe)
    except OSError as error:
        missing = f"{pack.probe.name} cannot be read ({error.strerror})"
        return replace(cell, evidence=None, reason=missing, verdict=Verdict.ERROR)
    try:
        if not request.dependencies:
            dependencies.named(pack.definition, cell.stated.dependencies, host.python_tag)
    except UnsupportedHereError as error:
        return replace(cell, evidence=None, reason=str(error))
    return replace(cell, environment=built_environment.environment(cache, host, cell.stated.environment))


def _lanes(pack: Pack, requested: tuple[LaneName, ...]) -> tuple[LaneName, ...]:
    """Return those of the requested lanes that a pack has."""
    found = tuple(lane for lane in requested if lane in lanes_of(pack))
    if not found:
        raise HarnessError(f'{pack.name} has no patched lane: pack.toml says fix = "none". Next: --lane pristine')
    return found


def _origin(pack: Pack) -> str:
    ask = pack.definition.ask
    if ask is None or not ask.patch:
        raise HarnessError("--upstream ask: pack.toml names no patch in [ask]. Next: runner.py run, without it")
    return ask.origin


def _asked(pack: Pack, planned: Planned, request: Request, host: Host, cache: Cache) -> Cell:
    """Build the cell of what upstream is asked to merge, about the checks that it is to mend."""
    cell = cell_of(pack, planned, request, host, cache)
    about = pack.definition.ask.checks if pack.definition.ask else ()
    return replace(cell, column=ASK, patch=pack.ask_patch, about=about)


def cells_of(packs: list[Pack], target: str, request: Request, host: Host, cache: Cache) -> list[Cell]:
    """Build the cells of packs on ``auto``, ``all`` or one target, in the order of packs and targets.

    Raises:
        HarnessError: `target` or the request names nothing.

    """
    pairs = [(pack, planned) for pack in packs for planned in eligibility.plan(pack, target, host)]
    return [cell_of(pack, planned, request, host, cache) for pack, planned in pairs]


@contextmanager
def taken(cache: Cache, packs: Iterable[Pack]) -> Iterator[list[Pack]]:
    """Copy script, contract and patches of each pack into a folder of this command's; yield packs that read them there.

    What runs is what receipts state the hashes of: a file that is edited meanwhile is another run's.
    """
    with cache.scratch("inputs-") as folder:
        with cache.guard():
            found = [_taken(pack, folder / pack.name) for pack in packs]
        yield found


def _taken(pack: Pack, folder: Path) -> Pack:
    folder.mkdir()
    ordinary = pack.definition.script
    copied = {path.name: path for path in (pack.probe, pack.contract, *pack.folder.glob("*.patch"))}
    copied |= {name: pack.probe.parent / name for name in (ordinary.beside if ordinary else ())}
    for name, path in copied.items():
        if path.is_file():  # what is missing is told where it is needed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    return replace(pack, inputs=folder)
