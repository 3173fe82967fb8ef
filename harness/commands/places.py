"""Where packs, releases and commits come from: options of the program, which a verb takes as well."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

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
        metavar="DIR",
        help="Folder of the packs.",
    ),
    click.Option(["--cache", "cache_root"], type=FOLDER, metavar="DIR", help="Cache (default: the user's own)."),
    click.Option(["--offline"], is_flag=True, help="Never reach the network."),
    click.Option(
        ["--mirrors"],
        type=EXISTING,
        envvar="REPRODUCER_PACKS_MIRRORS",
        metavar="DIR",
        help="DIR/NAME.git stands for upstream's repository NAME (also REPRODUCER_PACKS_MIRRORS).",
    ),
)
packs_option = click.option("--packs", type=FOLDER, default=_of_program("packs"), hidden=True)
cache_option = click.option("--cache", "cache_root", type=FOLDER, default=_of_program("cache_root"), hidden=True)
offline_option = click.option("--offline", is_flag=True, default=_of_program("offline"), hidden=True)
mirrors_option = click.option("--mirrors", type=EXISTING, default=_of_program("mirrors"), hidden=True)
