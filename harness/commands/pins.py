"""``runner.py pins``: whether a pack's dependencies are still the newest, and their renewal."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from harness.author import pins
from harness.commands import options
from harness.core.errors import HarnessError
from harness.core.progress import Progress
from harness.core.words import Exit


@click.command("pins")
@click.argument("wanted", metavar="PACK")
@click.option("--update", is_flag=True, help="Write them into pack.toml and the probe's header.")
@click.option("--keep", is_flag=True, help="Keep the versions, and only add wheels for other Pythons.")
@click.option("--set", "name", default=pins.DEFAULT, show_default=True, help="The dependency set.")
@click.option(
    "--python", "pythons", multiple=True, metavar="X.Y", help="Pin wheels for it (default: those pinned now)."
)
@options.packs_option
@options.cache_option
@options.mirrors_option
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    wanted: str,
    update: bool,  # noqa: FBT001 - click passes options by name
    keep: bool,  # noqa: FBT001 - likewise
    name: str,
    pythons: tuple[str, ...],
    packs: Path,
    cache_root: Path | None,
    mirrors: Path | None,
) -> int:
    """Resolve a pack's dependency set anew, within the limits that its release states, and say what differs.

    Nothing is written without --update. With it the receipts become STALE: they were made with other wheels, and the
    pack is run again. Sets other than the default pin what they pin on purpose; --set names one.

    \b
    Examples:
      runner.py pins 9
      runner.py pins 9 --update --keep --python 3.14

    Exit status 0: nothing differs, or it was written; 1: something differs.
    """
    if any(not re.fullmatch(r"3\.\d{1,2}", one) for one in pythons):
        raise HarnessError(f"--python {', '.join(pythons)}: a version such as 3.12. Next: runner.py pins --help")
    subject = options.one_pack(packs, wanted, "pins")
    members = subject.definition.dependencies.get(name, {})
    tags = sorted(
        {tag for one in members.values() for tag in one.sha256 if tag.startswith("cp3")}, key=lambda t: int(t[3:])
    )
    here = f"{sys.version_info.major}.{sys.version_info.minor}"
    order = tuple(dict.fromkeys([*(f"3.{tag[3:]}" for tag in tags), *pythons])) or (here,)
    with Progress(sys.stderr) as progress:
        cache = options.the_cache(cache_root, offline=False, tell=progress.tell, mirrors=mirrors)
        with cache.guard():
            renewal = pins.renew(subject, pins.Order(name, order, keep), cache, progress.tell)
    for python, why in renewal.left_out.items():
        click.echo(f"note: no wheels for Python {python}: {why}")
    for change in renewal.changes:
        click.echo(f"{subject.name}: {change.text}")
    if not renewal.changes:
        click.echo(f"{subject.name}: nothing differs")
        return int(Exit.AS_EXPECTED)
    if not update:
        click.echo(f"Next: runner.py pins {subject.name} --update, which makes its receipts STALE")
        return int(Exit.DEVIATES)
    for path in pins.write(subject, renewal):
        click.echo(f"wrote {subject.name}/{path.name}")
    click.echo(f"Next: runner.py run {subject.name}, then --record")
    return int(Exit.AS_EXPECTED)
