"""Options that several verbs share, and what they stand for."""

from __future__ import annotations

import datetime as dt
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from harness import cache, pack
from harness.cache import Cache
from harness.errors import HarnessError
from harness.pack import Pack

Command = Callable[..., Any]
REPOSITORY = Path(__file__).resolve().parents[2]

packs_argument = click.argument("wanted", metavar="[PACK]...", nargs=-1)
packs_option = click.option(
    "--packs", type=click.Path(path_type=Path), default=REPOSITORY / "packs", help="Folder of the packs."
)
cache_option = click.option(
    "--cache", "cache_root", type=click.Path(path_type=Path), help="Cache folder (default: the user's cache folder)."
)
offline_option = click.option("--offline", is_flag=True, help="Never reach the network.")


def the_cache(root: Path | None, *, offline: bool) -> Cache:
    """Return the cache that the options name."""
    return Cache((root or cache.default_root()).expanduser().absolute(), offline)


def log_folder(cache: Cache) -> Path:
    """Make a folder in the cache for the logs of one call."""
    stamp = dt.datetime.now(dt.UTC).strftime("%Y%m%dT%H%M%SZ")
    (cache.root / "runs").mkdir(parents=True, exist_ok=True)
    return Path(tempfile.mkdtemp(prefix=f"{stamp}-", dir=cache.root / "runs"))


def sound_packs(folder: Path, wanted: tuple[str, ...]) -> tuple[list[Pack], list[HarnessError]]:
    """Load the packs that were asked for; a broken one does not stop the others."""
    packs, errors = [], []
    for path in pack.select(folder.absolute(), wanted):
        try:
            packs.append(pack.load(path))
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
        click.echo(f"error: {error}", err=True)
