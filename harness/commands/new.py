"""``runner.py new``: a pack from a script."""

from dataclasses import replace
from pathlib import Path

import click

from harness.author import new_pack, release
from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import Exit, LaneVerdict, terminal


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
@click.option(
    "--fails", default="AssertionError", show_default=True, metavar="NAME", help="The exception that is the bug."
)
@options.takes("packs", "cache_root")
def command(shared: Shared, slug: str, source: Path, packages: tuple[str, ...], no_deps: bool, fails: str) -> int:
    """Write a pack from a script that fails.

    It becomes packs/NN_SLUG, and the script runs once on the release that has the bug.

    reproduce.py is the script below a header that names its packages. A script that prints no sentinel gets ten lines
    that print one: the bug is that it ends in the exception --fails, and any other exception leaves it open.

    \b
    Examples:
      runner.py new einops_axes --from-script bug.py --with einops==0.8.1
      runner.py new tvd_ties --from-script bug.py --with liger-kernel==0.8.3 \\
        --with transformers --fails RuntimeError
    """
    parsed = release.read_script(source)
    folder = new_pack.folder_for(shared.packs.absolute(), slug)
    requirements, title = release.requirements_of(packages), parsed.title or slug.replace("_", " ")
    with running.session(replace(shared, jobs=1)) as session:
        host, tell = session.host, session.progress.tell
        resolved = release.resolve(requirements, parsed, session.cache, host, tell, deps=not no_deps)
        targets = new_pack.targets(host, is_interpreted=parsed.is_interpreted)
        texts = {
            "requirements.txt": resolved.pinned,
            "reproduce.py": parsed.as_reproducer(resolved.requires_python, resolved.header, fails),
            "pack.toml": new_pack.definition(resolved, title, fails, targets, host),
            "report.in.md": new_pack.report(resolved, title),
        }
        new_pack.write(folder, texts)
        lane, reason = new_pack.trial(folder, session)
    verdict = lane.verdict if lane is not None else None
    name = f"{resolved.upstream.package} {resolved.upstream.version}"
    if lane is not None:
        is_right = verdict == LaneVerdict.FIX_VALIDATED
        reason = f"the script does not fail on {name}" if is_right else f"{verdict} on {name}: {lane.reason}"
    next_step = f"runner.py run {folder.name}, then runner.py report {folder.name} --from last"
    if verdict != LaneVerdict.BUG_REPRODUCED:
        next_step = f"mend the script, or name the bug with --fails; remove {folder.name}, then the same call again"
    terminal.echo(f"{reason}\nwrote {folder.name}\nNext: {next_step}")
    return Exit.AS_EXPECTED if verdict == LaneVerdict.BUG_REPRODUCED else Exit.DEVIATES
