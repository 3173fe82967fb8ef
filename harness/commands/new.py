"""``runner.py new``: a pack from a script."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import click

from harness.author import draft, fix, missing, new_pack, script, trial
from harness.author.draft import Wish
from harness.commands import options, running
from harness.core.errors import HarnessError
from harness.core.progress import Progress
from harness.core.words import Exit, Fix, Kind
from harness.host import host
from harness.host.gpus import gpu_pool
from harness.pack import load

RELEASE = re.compile(r"(?P<package>[A-Za-z0-9][\w.-]*)==(?P<version>[\w.!+-]+)")


@click.command("new")
@click.argument("slug")
@click.option("--upstream", required=True, metavar="PKG==VER", help="The release that has the bug.")
@click.option("--module", "modules", multiple=True, metavar="M", help="Import name under test (default: the script's).")
@click.option("--from-script", type=click.Path(path_type=Path, dir_okay=False, exists=True), metavar="F")
@click.option(
    "--control",
    type=click.Path(path_type=Path, dir_okay=False, exists=True),
    metavar="F",
    help="A script that fails neither with the bug nor without it.",
)
@click.option(
    "--fix-commit", metavar="SHA|PATCH", help="Upstream's fix: a commit of its repository, or a patch's file."
)
@click.option("--no-fix", is_flag=True, help="Nobody has a fix yet: no fix.patch is asked for, REPRODUCED expected.")
@click.option("--no-try", is_flag=True, help="Do not run the script on the release once the pack is written.")
@click.option(
    "--kind", type=click.Choice([one.value for one in Kind]), default=Kind.WRONG_RESULT.value, show_default=True
)
@click.option("--repository", default="", metavar="URL", help="Upstream's, where the release links none.")
@click.option("--commit", default="", metavar="SHA", help="Of the release's tag, where the repository is out of reach.")
@options.packs_option
@options.cache_option
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    slug: str,
    upstream: str,
    modules: tuple[str, ...],
    from_script: Path | None,
    control: Path | None,
    fix_commit: str | None,
    no_fix: bool,  # noqa: FBT001 - click passes options by name
    no_try: bool,  # noqa: FBT001 - likewise
    kind: str,
    repository: str,
    commit: str,
    packs: Path,
    cache_root: Path | None,
) -> int:
    """Write a new pack: packs/NN_SLUG, with what can be known of it, and list what is missing.

    The script fails while the bug is there: by an assertion, by sys.exit, or by an exception of the package under
    test. It becomes a defect check; a control says whether it ends twice in the same way, and --control gives one of
    your own.

    Resolved are the release with its sha256 and licence, the commit of its tag, where its modules lie, and the
    wheels of what the script reaches. A parent package that imports more than that is found and not
    executed. Then the pack's pristine lane is run once, to say whether the script fails on that release; with --no-try,
    or without a script, nothing of the release is executed.

    \b
    Examples:
      runner.py new einops_axes --upstream einops==0.8.1 --from-script bug.py
      runner.py new toy --upstream toykernel==1.0 --module toykernel --fix-commit 42.patch
    """
    match = RELEASE.fullmatch(upstream)
    if match is None:
        raise HarnessError(f"--upstream {upstream!r}: name one release. Next: --upstream PACKAGE==VERSION")
    if commit and not re.fullmatch(r"[0-9a-f]{40}", commit):
        raise HarnessError(
            f"--commit {commit!r}: not 40 lower-case hexadecimal digits. Next: git rev-parse TAG^{{commit}}"
        )
    fix.refuse(fix_commit)
    if no_fix and fix_commit is not None:
        raise HarnessError("--no-fix and --fix-commit: there is a fix, or there is none. Next: leave one of them out")
    folder = new_pack.folder_for(packs.absolute(), slug)
    given, right = (script.read(_text(path), path.name) if path else None for path in (from_script, control))
    wish = Wish(
        package=match["package"],
        version=match["version"],
        modules=modules,
        script=given,
        control=right,
        repository=repository,
        commit=commit,
        kind=Kind(kind),
        fix=Fix.NONE if no_fix else Fix.PATCH,
    )
    with Progress(sys.stderr) as progress, gpu_pool() as pool:
        cache, here = options.the_cache(cache_root, offline=False, tell=progress.tell), host.detect(pool)
        with cache.guard():
            found = draft.resolve(wish, cache, here, progress.tell)
            written = new_pack.write(folder, found, fix_commit, progress.tell)
            _tell(written, found)
            if given is None or no_try:
                click.echo(f"Next: runner.py run {folder.name} --lane pristine   (BUG_REPRODUCED)")
                return int(Exit.AS_EXPECTED)
            tried = trial.pristine(load.load_pack(folder), running.session(cache, here, pool, progress, jobs=1))
    click.echo(f"tried: {tried.text}")
    again = f"runner.py run {folder.name} --lane pristine   (BUG_REPRODUCED)"
    click.echo(f"Next: runner.py check {folder.name}" if tried.failed else f"Next: mend what that says, then {again}")
    return int(Exit.AS_EXPECTED)


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise HarnessError(f"{path}: not UTF-8 ({error.reason}). Next: save it as UTF-8") from None


def _tell(written: new_pack.Written, found: draft.Draft) -> None:
    """Say what was written, what could not be, what runs on the CPU, and what is missing."""
    name, given = written.folder.name, found.script
    for path in sorted(one for one in written.folder.rglob("*") if one.is_file()):
        click.echo(f"wrote {name}/{path.relative_to(written.folder)}")
    remarks = [*written.remarks, *(f"script: {one}" for one in (given.problems if given else ()))]
    if given is not None and not given.fails:
        remarks.append("script: it asserts nothing, so that it can only fail where the package under test raises")
    for one in [*remarks, f"target cpu is {found.cpu_evidence}: {found.ran_on_cpu}"]:
        click.echo(f"note: {one}")
    for one in missing.steps(load.load_pack(written.folder)):
        click.echo(one)
