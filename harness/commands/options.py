"""Options that several verbs share, and how a verb reads them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import click

from harness.core import Cache, HarnessError, cache, terminal
from harness.core.files import REPOSITORY
from harness.pack import Pack, load
from harness.receipt.receipt import MOST_REPEATS

#: The folder of the run folders in a cache.
RUNS = "runs"
#: The longest time-out and the longest budget, in seconds: a month. No clock takes an infinity.
LONGEST = 31 * 24 * 3600
SECONDS = click.IntRange(1, LONGEST)
REPEATS = click.IntRange(1, MOST_REPEATS)
FOLDER, EXISTING = click.Path(path_type=Path), click.Path(path_type=Path, file_okay=False, exists=True)
FILE = click.Path(path_type=Path, dir_okay=False, exists=True)


def _packs() -> Path:
    """Return the repository's packs. A runner that is installed without packs uses those of the current folder."""
    own = REPOSITORY / "packs"
    return own if own.is_dir() else Path("packs")


#: Options of the program. A verb takes some of them as well, and its help does not describe them again.
PROGRAM_OPTIONS = (
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
#: The options that name folders, and whether the network may be reached.
PLACES = ("packs", "cache_root", "offline", "mirrors")
packs_argument = click.argument("names", metavar="[PACK]...", nargs=-1)


@dataclass(frozen=True)
class Shared:
    """The values of the program's options; `timeout` is in seconds."""

    packs: Path = Path("packs")
    cache_root: Path | None = None
    offline: bool = False
    mirrors: Path | None = None
    jobs: int | None = None
    timeout: float | None = None

    def cache(self, tell: Callable[[str], None] = lambda _: None) -> Cache:
        """Return the cache; `tell` is called with a line about each download."""
        root = (self.cache_root or cache.default_root()).expanduser().absolute()
        if os.pathsep in str(root):
            raise HarnessError(f"the cache {root}: {os.pathsep!r} in its path would part PYTHONPATH. Next: --cache DIR")
        return Cache(root, self.offline, tell, self.mirrors.absolute() if self.mirrors is not None else None)


def _override(context: click.Context, option: click.Parameter, value: object) -> None:
    """Let an option after the verb take the place of the program's."""
    if value:
        context.obj = replace(context.obj, **{str(option.name): value})


def takes(*names: str) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Let a verb take options of the program, by name; its first argument is a `Shared`."""

    def decorated(command: Callable[..., int]) -> Callable[..., int]:
        for option in PROGRAM_OPTIONS:
            if option.name in names:
                again = partial(click.option, *option.opts, option.name, type=option.type, is_flag=option.is_flag)
                command = again(hidden=True, expose_value=False, callback=_override)(command)
        return click.pass_obj(command)

    return decorated


def see_also(command: click.Command) -> str:
    """Return the epilog of a verb's help: the options of the program that the verb takes."""
    hidden = {parameter.name for parameter in command.params if getattr(parameter, "hidden", False)}
    names = sorted(option.opts[0] for option in PROGRAM_OPTIONS if option.name in hidden)
    return f"See also runner.py --help for: {' '.join(names)}" if names else ""


def run_receipts(run: str, shared: Shared, pack: str) -> Path:
    """Return the folder of a run's receipts. `run` is a run folder, or ``last`` for the newest run that judged `pack`.

    HarnessError is raised if there is no such run.
    """
    if run == "last":
        runs = sorted((shared.cache().root / RUNS).glob("*/receipts"))
        folders = [run_folder for run_folder in runs if (run_folder / pack).is_dir()]
        if not folders:
            raise HarnessError(f"--from last: no run in the cache has receipts of {pack}. Next: runner.py run {pack}")
        return folders[-1]
    run_folder = Path(run).expanduser()
    receipts = run_folder / "receipts" if (run_folder / "receipts").is_dir() else run_folder
    if not receipts.is_dir():
        raise HarnessError(f"--from {run}: no such folder. Next: --from last, or a run folder")
    return receipts.absolute()


def load_packs(folder: Path, names: tuple[str, ...]) -> tuple[list[Pack], list[HarnessError]]:
    """Load packs, all where no name is given; return the errors of the broken ones beside the sound ones."""
    packs, errors = [], []
    for path in load.select_packs(folder.absolute(), names):
        try:
            packs.append(load.load_pack(path))
        except HarnessError as error:
            errors.append(error)
    return packs, errors


def one_pack(folder: Path, name: str, verb: str) -> Pack:
    """Load the one pack that `name` names. HarnessError is raised if the pack is broken, or several packs match."""
    packs, errors = load_packs(folder, (name,))
    if errors:
        raise errors[0]
    if len(packs) != 1:
        matches = ", ".join(pack.name for pack in packs)
        raise HarnessError(f"{name!r} names {len(packs)} packs ({matches}). Next: runner.py {verb} {packs[0].name}")
    return packs[0]


def print_errors(errors: list[HarnessError]) -> None:
    """Print each error on a line of its own."""
    for error in errors:
        terminal.echo(f"error: {error}", err=True)
