"""Options of the program, which a verb takes as well: where things lie, and how lanes run."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

#: Seconds: no lane and no budget is longer than a month, and no clock takes an infinity.
LONGEST = 31 * 24 * 3600.0
JOBS, REPEATS = click.IntRange(1, 4096), click.IntRange(1, 1000)


class Seconds(click.FloatRange):
    """A positive number of seconds, at most a month: neither infinity nor what is no number."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True, max=LONGEST)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:  # noqa: ANN401
        """Return the number, or fail with a line that names the option."""
        found = super().convert(value, param, ctx)
        if not math.isfinite(found):
            self.fail(f"{value} is no number of seconds.", param, ctx)
        return found


#: The repository; where the runner is installed, the folder that it is installed in.
REPOSITORY = Path(__file__).resolve().parents[2]


def _of_program(name: str) -> Callable[[], Any]:
    """Return what gives the value of an option of the program, where the verb does not state it again."""
    return lambda: click.get_current_context().find_root().params.get(name)


def _packs() -> Path:
    """Return the repository's packs, and those of the current folder where the runner is installed without any."""
    own = REPOSITORY / "packs"
    return own if own.is_dir() else Path("packs")


FOLDER = click.Path(path_type=Path)
EXISTING = click.Path(path_type=Path, file_okay=False, exists=True)
#: Options of the program, which a verb takes as well: its help does not repeat them.
PLACES = (
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
    click.Option(["--jobs"], type=JOBS, metavar="N", help="Lanes at once (default: as fits)."),
    click.Option(["--timeout"], type=Seconds(), metavar="S", help="Seconds per lane (default: pack.toml's)."),
)
packs_option = click.option("--packs", type=FOLDER, default=_of_program("packs"), hidden=True)
cache_option = click.option("--cache", "cache_root", type=FOLDER, default=_of_program("cache_root"), hidden=True)
offline_option = click.option("--offline", is_flag=True, default=_of_program("offline"), hidden=True)
mirrors_option = click.option("--mirrors", type=EXISTING, default=_of_program("mirrors"), hidden=True)
jobs_option = click.option("--jobs", type=JOBS, default=_of_program("jobs"), hidden=True)
timeout_option = click.option("--timeout", type=Seconds(), default=_of_program("timeout"), hidden=True)


def also(command: click.Command) -> str:
    """Name the options of the program that a verb takes: its help does not describe them again."""
    of_program = {option.name: option.opts[0] for option in PLACES}
    taken = [of_program[one.name] for one in command.params if getattr(one, "hidden", False) and one.name in of_program]
    return f"See also runner.py --help for: {' '.join(sorted(taken))}" if taken else ""
