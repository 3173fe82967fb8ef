"""``runner.py new``: a pack from a script."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import click

from harness.author import new_pack, release, script
from harness.author.pack_text import Stated
from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import terminal
from harness.core.errors import HarnessError
from harness.core.words import Exit, LaneVerdict
from harness.lane import ordinary
from harness.pack.forms import VARIABLE
from harness.pack.model import CPU, OrdinaryScript


@click.command("new")
@click.argument("slug")
@click.option(
    "--from-script", "source", required=True, type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="F"
)
@click.option(
    "--with",
    "packages",
    required=True,
    multiple=True,
    metavar="PKG[==VER]",
    help="First the release that has the bug, then what else the script needs.",
)
@click.option("--no-deps", is_flag=True, help="Install only what --with names, and not what the release requires.")
@click.option("--timeout", type=options.SECONDS, metavar="S", help="A run that takes longer has failed.")
@click.option(
    "--repeat", type=options.REPEATS, default=1, metavar="N", help="Runs of the script; one that fails will do."
)
@click.option("--env", "variables", multiple=True, metavar="NAME=VALUE", help="A variable that the script needs.")
@options.takes("packs", "cache_root")
def command(
    shared: Shared,
    slug: str,
    source: Path,
    packages: tuple[str, ...],
    no_deps: bool,
    timeout: float | None,
    repeat: int,
    variables: tuple[str, ...],
) -> int:
    """Write a pack from a script that fails.

    It becomes packs/NN_SLUG, and the script runs once on the release that has the bug.

    The script stays as it is, below a header that names its packages. It fails by an assertion, by an exit with a text
    or with 1, or by an exception of its own line or of the package. A file of tests is run by pytest.

    \b
    Examples:
      runner.py new einops_axes --from-script bug.py --with einops==0.8.1
      runner.py new tvd_ties --from-script bug.py --with liger-kernel==0.8.3 \\
        --with transformers
    """
    parsed = script.read(source)
    folder = new_pack.folder_for(shared.packs.absolute(), slug)
    run = OrdinaryScript("", timeout or 0.0, repeat, _environment(variables), parsed.beside)
    title = parsed.title or slug.replace("_", " ")
    with running.session(replace(shared, jobs=1)) as session:
        host = session.host
        requirements = release.requirements_of(packages)
        resolved = release.resolve(requirements, parsed, session.cache, host, session.progress.tell, deps=not no_deps)
        targets = tuple(dict.fromkeys((CPU, host.auto_target)))
        run = replace(run, requires=resolved.requires)
        typed = ordinary.command_line(parsed.text, run.environment)
        stated = Stated(title, typed, run, targets)
        new_pack.write(folder, new_pack.texts(parsed, resolved, stated, host), source.parent, parsed.beside)
        lane, reason = new_pack.trial(folder, session)
        if lane is not None:
            new_pack.record_trial(folder, resolved, stated, host, lane)
    name = f"{resolved.upstream.package} {resolved.upstream.version}"
    is_reproduced = lane is not None and lane.verdict == LaneVerdict.BUG_REPRODUCED
    if lane is not None:
        is_right = lane.verdict == LaneVerdict.FIX_VALIDATED
        reason = f"the script does not fail on {name}" if is_right else f"{lane.verdict} on {name}: {lane.reason}"
    for remark in resolved.remarks:
        terminal.echo(f"open: {remark}", err=True)
    next_step = f"runner.py run {folder.name}, then runner.py report {folder.name} --from last"
    if not is_reproduced:
        next_step = f"mend the script, remove {folder.name}, then the same call again"
    terminal.echo(f"{reason}\nwrote {folder.name}\nNext: {next_step}")
    return Exit.AS_EXPECTED if is_reproduced else Exit.DEVIATES


def _environment(variables: tuple[str, ...]) -> dict[str, str]:
    """Read the values of ``--env``. HarnessError is raised for a variable that a lane sets itself."""
    environment = {}
    for variable in variables:
        name, equals, value = variable.partition("=")
        if not equals or not VARIABLE.fullmatch(name):
            raise HarnessError(f"--env {name}: no variable that a script may set. Next: --env NAME=VALUE")
        environment[name] = value
    return environment
