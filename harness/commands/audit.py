"""``runner.py audit``, and the console script ``wrong-numerics``: which installed versions have a bug that is proven.

It imports click, packaging and the standard library alone, so that the script starts anywhere.
"""

from __future__ import annotations

from pathlib import Path

import click

from harness import commands
from harness.audit import findings, interpreter, lockfiles, output, records, requirements
from harness.audit.environment import Environment
from harness.core.errors import HarnessError


def _environment(requirement: Path | None, lock: Path | None, python: Path | None) -> Environment:
    if sum(one is not None for one in (requirement, lock, python)) > 1:
        raise HarnessError("-r, --lock and --python each name an environment. Next: give one of them")
    if requirement is not None:
        return requirements.read(requirement)
    if lock is not None:
        return lockfiles.read(lock)
    return interpreter.installed(python if python is not None else interpreter.usual(Path.cwd()))


@click.command("audit", context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "-r", "--requirement", type=click.Path(path_type=Path), metavar="FILE", help="A requirements file; == alone pins."
)
@click.option("--lock", type=click.Path(path_type=Path), metavar="FILE", help=f"One of {lockfiles.KNOWN}.")
@click.option(
    "--python",
    type=click.Path(path_type=Path),
    metavar="BIN",
    help="An interpreter (default: of the active environment, .venv, or the path).",
)
@click.option(
    "--advisories",
    type=click.Path(path_type=Path),
    default=records.FOLDER,
    metavar="DIR",
    help="Folder of OSV records.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    requirement: Path | None,
    lock: Path | None,
    python: Path | None,
    advisories: Path,
    as_json: bool,  # noqa: FBT001 - click passes it by name
) -> int:
    """Say which packages of an environment have a bug that a pack proves, one line for each package and bug.

    Nothing of the environment is imported, and nothing is downloaded. A version is called affected or not affected only
    where a test judged exactly that version; every other one is `not judged`, also between two that are affected.

    \b
    Examples:
      runner.py audit                                  # the active environment, .venv, or python3 on the path
      runner.py audit --python ~/work/.venv/bin/python
      runner.py audit -r requirements.txt
      runner.py audit --lock uv.lock --json

    Exit status 0: nothing is affected in silence; 1: something is; 2: the call, a file or a record is wrong; 5: of the
    packages that have records nothing was judged.
    """
    known = records.load_all(advisories)
    environment = _environment(requirement, lock, python)
    found = findings.find(environment, known)
    text = output.as_json(environment, found) if as_json else output.as_text(environment, found, known)
    click.echo(text, nl=False)
    return int(findings.status(found))


def script() -> int:
    """Run the console script ``wrong-numerics``."""
    return commands.main(command)
