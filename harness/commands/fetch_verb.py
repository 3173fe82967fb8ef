"""``runner.py fetch``: fill a cache for a machine without network."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path

import click

from harness import companions, files, origin, tree
from harness.cache import Cache
from harness.commands import options
from harness.errors import HarnessError, UnavailableError
from harness.host import python_tag
from harness.pack import Pack
from harness.progress import Progress
from harness.words import Exit

REQUIREMENTS = "requirements.txt"
HERE = f"{sys.version_info.major}.{sys.version_info.minor}"
#: Wheels for the machines that packs run on: any glibc from 2.17 (2014) to 2.34 (2021).
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")


def _fetch(pack: Pack, cache: Cache, tag: str) -> None:
    upstream = pack.definition.upstream
    tree.materialize(cache, upstream, origin.parse(None, pack.definition))
    for name in pack.definition.companions:
        companions.materialize(cache, companions.named(pack.definition, name, tag))


def _fetch_runner(destination: Path, python: str) -> None:
    """Download the wheels that the runner itself needs, without building anything."""
    project = tomllib.loads((options.REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    wheels = destination / "wheels"
    files.write_atomic(wheels / REQUIREMENTS, "\n".join(project["dependencies"]) + "\n")
    arguments = ["--only-binary=:all:", "--python-version", python, "--implementation", "cp", "--dest", str(wheels)]
    for platform in PLATFORMS:
        arguments += ["--platform", platform]
    command = [sys.executable, "-m", "pip", "download", "--quiet", *arguments, *project["dependencies"]]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode != 0:
        lines = [line for line in ended.stderr.splitlines() if line.startswith("ERROR")]
        raise UnavailableError(f"the runner's own wheels: {lines[-1] if lines else 'pip download failed'}")


@click.command("fetch")
@options.packs_argument
@click.option("--dest", type=click.Path(path_type=Path), required=True, help="The cache folder to fill.")
@click.option(
    "--python", default=f"{sys.version_info.major}.{sys.version_info.minor}", show_default=True, metavar="X.Y"
)
@click.option("--runner", "with_runner", is_flag=True, help="Also the runner's own wheels, into DEST/wheels.")
@options.packs_option
def command(wanted: tuple[str, ...], dest: Path, python: str, packs: Path, with_runner: bool) -> int:  # noqa: FBT001
    """Fill a cache for a machine without network, and with another Python.

    Fetches the pinned tree and every companion set of the packs. Nothing that is fetched is executed or built.

    \b
    There, with torch and triton installed:
      python -m pip install --no-index --find-links DEST/wheels -r DEST/wheels/requirements.txt   (after --runner)
      runner.py run --cache DEST --offline
    """
    python_parts = python.split(".")
    if len(python_parts) != 2 or not all(part.isdecimal() for part in python_parts):  # noqa: PLR2004 - major and minor
        raise HarnessError(f"--python {python!r}: a version such as 3.12. Next: runner.py fetch --help")
    chosen, errors = options.sound_packs(packs, wanted)
    cache = options.the_cache(dest, offline=False)
    filled = 0
    with Progress(sys.stderr) as progress:
        for pack in chosen:
            progress.tell(f"{pack.name}: fetching for Python {python}")
            try:
                _fetch(pack, cache, python_tag(python))
                filled += 1
            except HarnessError as error:
                errors.append(HarnessError(f"{pack.name}: {error}", status=error.status))
        if with_runner:
            progress.tell("fetching the runner's own wheels")
            _fetch_runner(dest, python)
    options.complain(errors)
    click.echo(f"filled {dest} for {filled} of {len(chosen)} pack(s). Next, there: runner.py run --cache DIR --offline")
    return int(max((error.status for error in errors), default=Exit.AS_EXPECTED))
