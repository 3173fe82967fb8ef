"""Options that several verbs share, and what they stand for."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from harness.core import cache, terminal
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.files import REPOSITORY
from harness.pack import load
from harness.pack.model import Pack

#: The folder of the run folders in a cache.
RUNS = "runs"
#: Seconds: no lane and no budget is longer than a month, and no clock takes an infinity.
LONGEST = 31 * 24 * 3600
SECONDS = click.IntRange(1, LONGEST)
REPEATS = click.IntRange(1, 1000)
FOLDER, EXISTING = click.Path(path_type=Path), click.Path(path_type=Path, file_okay=False, exists=True)


def _packs() -> Path:
    """Return the repository's packs, and those of the current folder where the runner is installed without any."""
    own = REPOSITORY / "packs"
    return own if own.is_dir() else Path("packs")


#: Options of the program, which a verb takes as well: its help does not repeat them.
OF_PROGRAM = (
    click.Option(
        ["--packs"],
        type=FOLDER,
        default=_packs,
        envvar="REPRODUCER_PACKS_PACKS",
        metavar="DIR",
        help="Folder of the packs.",
    ),
    click.Option(
        ["--cache", "cache_root"],
        type=FOLDER,
        envvar="REPRODUCER_PACKS_CACHE",
        metavar="DIR",
        help="Cache (default: the user's own).",
    ),
    click.Option(["--offline"], is_flag=True, envvar="REPRODUCER_PACKS_OFFLINE", help="Never reach the network."),
    click.Option(
        ["--mirrors"],
        type=EXISTING,
        envvar="REPRODUCER_PACKS_MIRRORS",
        metavar="DIR",
        help="DIR/NAME.git stands for upstream's repository NAME.",
    ),
    click.Option(["--jobs"], type=click.IntRange(1, 4096), metavar="N", help="Lanes at once (default: as fits)."),
    click.Option(["--timeout"], type=SECONDS, metavar="S", help="Seconds per lane (default: pack.toml's)."),
)
#: Those that say where things lie.
PLACES = ("packs", "cache_root", "offline", "mirrors")
packs_argument = click.argument("wanted", metavar="[PACK]...", nargs=-1)


@dataclass(frozen=True)
class Shared:
    """What the options of the program say, as far as a verb takes them; `timeout` is in seconds."""

    packs: Path = Path("packs")
    cache_root: Path | None = None
    offline: bool = False
    mirrors: Path | None = None
    jobs: int | None = None
    timeout: float | None = None

    def cache(self, tell: Callable[[str], None] = lambda _: None) -> Cache:
        """Return the cache; `tell` takes what is being fetched."""
        root = (self.cache_root or cache.default_root()).expanduser().absolute()
        if os.pathsep in str(root):
            raise HarnessError(f"the cache {root}: {os.pathsep!r} in its path would part PYTHONPATH. Next: --cache DIR")
        return Cache(root, self.offline, tell, self.mirrors.absolute() if self.mirrors is not None else None)


def takes(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Let a verb take options of the program by their names, as members of its argument `shared`."""

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        @functools.wraps(command)
        def called(**given: Any) -> int:  # noqa: ANN401 - click passes each option by name
            of_program = click.get_current_context().find_root().params
            stated: dict[str, Any] = {name: given.pop(name) or of_program.get(name) for name in names}
            return command(shared=Shared(**stated), **given)

        for one in OF_PROGRAM:
            if one.name in names:
                again = click.option(*one.opts, one.name, type=one.type, is_flag=one.is_flag, hidden=True)
                called = again(called)
        return called

    return decorated


def also(command: click.Command) -> str:
    """Name the options of the program that a verb takes: its help does not describe them again."""
    of_program = {option.name: option.opts[0] for option in OF_PROGRAM}
    taken = [of_program[one.name] for one in command.params if getattr(one, "hidden", False) and one.name in of_program]
    return f"See also runner.py --help for: {' '.join(sorted(taken))}" if taken else ""


def run_receipts(run: str, shared: Shared, pack: str) -> Path:
    """Return the folder of the receipts of a run: a run folder, or ``last``, the newest that judged `pack`.

    HarnessError is raised where there is no such run.
    """
    if run == "last":
        runs = sorted((shared.cache().root / RUNS).glob("*/receipts"))
        found = [folder for folder in runs if (folder / pack).is_dir()]
        if not found:
            raise HarnessError(f"--from last: no run in the cache has receipts of {pack}. Next: runner.py run {pack}")
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
