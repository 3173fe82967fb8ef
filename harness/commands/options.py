"""Options that several verbs share, and what they stand for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from harness.commands import places
from harness.core import cache, terminal
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.pack import load
from harness.pack.model import Pack

REPOSITORY = places.REPOSITORY
#: The folder of the run folders in a cache.
RUNS = "runs"

packs_argument = click.argument("wanted", metavar="[PACK]...", nargs=-1)
packs_option, cache_option = places.packs_option, places.cache_option
offline_option, mirrors_option = places.offline_option, places.mirrors_option
jobs_option, timeout_option = places.jobs_option, places.timeout_option
from_option = click.option(
    "--from", "run", metavar="RUN", help="Read the receipts of a run: `last`, or its folder (default: the packs' own)."
)
runs_option = click.option(
    "--runs",
    type=click.Path(path_type=Path),
    default=Path("sweeps"),
    show_default=True,
    metavar="DIR",
    help="Folder of the run folders; each sweep is one of them.",
)


def _nothing(_: str) -> None:
    """Tell nobody."""


def the_cache(
    root: Path | None, *, offline: bool, tell: Callable[[str], None] = _nothing, mirrors: Path | None = None
) -> Cache:
    """Return the cache that the options name; `tell` takes what is being fetched."""
    folder = (root or cache.default_root()).expanduser().absolute()
    if os.pathsep in str(folder):
        raise HarnessError(f"the cache {folder}: {os.pathsep!r} in its path would part PYTHONPATH. Next: --cache DIR")
    return Cache(folder, offline, tell, mirrors.absolute() if mirrors is not None else None)


@dataclass(frozen=True)
class Places:
    """Where a call finds packs, releases and commits; its members are the options of the program."""

    packs: Path
    cache_root: Path | None
    offline: bool
    mirrors: Path | None

    def cache(self, tell: Callable[[str], None] = _nothing) -> Cache:
        """Return the cache; `tell` takes what is being fetched."""
        return the_cache(self.cache_root, offline=self.offline, tell=tell, mirrors=self.mirrors)


def with_places(command: Callable[..., int]) -> Callable[..., int]:
    """Let a verb take the options of `Places`, as its argument `where`."""

    @functools.wraps(command)
    def called(packs: Path, cache_root: Path | None, offline: bool, mirrors: Path | None, **others: Any) -> int:  # noqa: ANN401, FBT001 - click passes each option by name
        return command(where=Places(packs, cache_root, offline, mirrors), **others)

    return packs_option(cache_option(offline_option(mirrors_option(called))))


def run_receipts(run: str, cache_root: Path | None, pack: str = "") -> Path:
    """Return the folder of the receipts of a run: a run folder, or ``last``, the newest (that judged `pack`).

    Raises:
        HarnessError: there is no such run.

    """
    if run == "last":
        runs = sorted((the_cache(cache_root, offline=True).root / RUNS).glob("*/receipts"))
        found = [folder for folder in runs if (folder / pack).is_dir()]
        if not found:
            of_pack = f" of {pack}" if pack else ""
            raise HarnessError(
                f"--from last: no run in the cache has receipts{of_pack}. Next: runner.py run {pack}".rstrip()
            )
        return found[-1]
    folder = Path(run).expanduser()
    chosen = folder / "receipts" if (folder / "receipts").is_dir() else folder
    if not chosen.is_dir():
        raise HarnessError(f"--from {run}: no such folder. Next: --from last, or a run folder")
    return chosen.absolute()


def sound_packs(folder: Path, wanted: tuple[str, ...]) -> tuple[list[Pack], list[HarnessError]]:
    """Load the packs that were requested; a broken one does not stop the others."""
    packs, errors = [], []
    for path in load.select_packs(folder.absolute(), wanted):
        try:
            packs.append(load.load_pack(path))
        except HarnessError as error:
            errors.append(error)
    return packs, errors


def one_pack(folder: Path, wanted: str, verb: str) -> Pack:
    """Load the one pack that `wanted` names, or raise what is wrong with it."""
    chosen, broken = sound_packs(folder, (wanted,))
    if broken:
        raise broken[0]
    if len(chosen) != 1:
        names = ", ".join(one.name for one in chosen)
        raise HarnessError(f"{wanted!r} names {len(chosen)} packs ({names}). Next: runner.py {verb} {chosen[0].name}")
    return chosen[0]


def complain(errors: list[HarnessError]) -> None:
    """Print each error on a line of its own."""
    for error in errors:
        terminal.echo(f"error: {error}", err=True)
