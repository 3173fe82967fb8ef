"""``runner.py fetch``: fill a cache for a machine without network."""

from __future__ import annotations

import functools
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import files, terminal
from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.core.progress import Progress
from harness.core.words import Exit
from harness.host.host import python_tag
from harness.pack.model import Pack
from harness.sweep.selection import Moving
from harness.upstream import dependencies, download, newest, tree
from harness.upstream.source import of_git, parse_source

REQUIREMENTS = "requirements.txt"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def _fetch(pack: Pack, cache: Cache, tag: str) -> None:
    upstream = pack.definition.upstream
    tree.materialize(cache, upstream, parse_source(None, pack.definition))
    suite, asked = pack.definition.upstream_tests, pack.definition.ask
    for origin in {one.origin for one in (suite, asked) if one is not None and one.origin}:
        tree.materialize(cache, upstream, of_git(origin))
    for name in pack.definition.dependencies:
        dependencies.fetch(cache, dependencies.named(pack.definition, name, tag), tag)
    for built in pack.definition.environments.values():
        for package, sha256 in built.files.items():
            download.fetch(cache, package, None, sha256)


def _fetch_moving(packs: list[Pack], cache: Cache, moving: Moving, tell: Callable[[str], None]) -> list[HarnessError]:
    """Fetch each upstream's newest release, and the head of its default branch; return what could not be had."""
    upstreams = [pack.definition.upstream for pack in packs]
    packages = dict.fromkeys((one.package, one.is_wheel) for one in upstreams if moving.latest)
    urls = dict.fromkeys(one.repository for one in upstreams if moving.head and not one.is_compiled)
    looks: dict[str, Callable[[], object]] = {
        f"the newest release of {package}": functools.partial(_newest_release, cache, package, wheels_only=wheel)
        for package, wheel in packages
    }
    looks |= {f"the head of {url}": functools.partial(newest.head, cache, url) for url in urls}
    errors = []
    for what, look in looks.items():
        tell(f"fetching {what}")
        try:
            look()
        except HarnessError as error:
            errors.append(error)
    return errors


def _newest_release(cache: Cache, package: str, *, wheels_only: bool) -> None:
    file = newest.release(cache, package, wheels_only=wheels_only).file
    download.fetch(cache, package, file.file, file.sha256)


def _fetch_runner(destination: Path, python: str) -> None:
    """Download the wheels that the runner itself needs, without building anything."""
    project = tomllib.loads((options.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wheels = destination / "wheels"
    files.write_atomic(wheels / REQUIREMENTS, "\n".join(project["dependencies"]) + "\n")
    arguments = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(wheels)]
    for platform in download.PLATFORMS:
        arguments += ["--platform", platform]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *arguments, *project["dependencies"]]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(f"the runner's own wheels: {lines[-1] if lines else 'pip download failed'}")


@click.command("fetch")
@options.packs_argument
@click.option("--python", default=HERE, show_default=True, metavar="X.Y", help="The Python of that machine.")
@click.option("--runner", "with_runner", is_flag=True, help="Also the runner's own wheels, into CACHE/wheels.")
@click.option("--latest", is_flag=True, help="Also each upstream's newest release, for sweep --latest.")
@click.option("--head", is_flag=True, help="Also the head of its default branch, for sweep --head.")
@options.takes("packs", "cache_root", "mirrors")
def command(  # noqa: PLR0913, PLR0917 - one parameter for each option
    shared: Shared,
    wanted: tuple[str, ...],
    python: str,
    with_runner: bool,  # noqa: FBT001 - click passes it by name
    latest: bool,  # noqa: FBT001 - likewise
    head: bool,  # noqa: FBT001 - likewise
) -> int:
    """Fill a cache for a machine without network.

    It fetches the pinned trees and all dependency sets of the packs, the trees of [ask] and [upstream_tests], and what
    their environments are built from. With --latest and --head it also fetches what is newest today. An offline sweep
    judges that, and says of which day it is. Nothing is executed or built.

    \b
    Here:
      runner.py fetch --cache DIR --runner
    There, with torch and triton installed:
      python -m pip install --no-index --find-links DIR/wheels \\
        -r DIR/wheels/requirements.txt
      runner.py run --cache DIR --offline
    """
    python_parts = python.split(".")
    if len(python_parts) != 2 or not all(part.isdecimal() for part in python_parts):  # noqa: PLR2004 - major and minor
        raise HarnessError(f"--python {python!r}: a version such as 3.12. Next: runner.py fetch --help")
    chosen, errors = options.sound_packs(shared.packs, wanted)
    cache = shared.cache()
    filled = 0
    with Progress(sys.stderr) as progress, cache.guard():
        for pack in chosen:
            progress.tell(f"{pack.name}: fetching for Python {python}")
            try:
                _fetch(pack, cache, python_tag(python))
                filled += 1
            except HarnessError as error:
                errors.append(HarnessError(f"{pack.name}: {error}", status=error.status))
        errors += _fetch_moving(chosen, cache, Moving(latest, head), progress.tell)
        if with_runner:
            progress.tell("fetching the runner's own wheels")
            _fetch_runner(cache.root, python)
    options.complain(errors)
    terminal.echo(
        f"filled {cache.root} for {filled} of {len(chosen)} pack(s). Next, there: runner.py run --cache DIR --offline"
    )
    return int(max((error.status for error in errors), default=Exit.AS_EXPECTED))
