"""``runner.py audit``, and the console script ``wrong-numerics``: pip-audit over the records of this repository."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import click
from packaging.version import Version

from harness import commands
from harness.audit import records
from harness.audit.records import Advisory, State
from harness.audit.service import serving
from harness.core.errors import HarnessError
from harness.core.words import Exit

#: Files that pip-audit cannot read, and what makes a file of them that it can.
EXPORTS = {
    "uv.lock": "uv export --frozen --no-hashes --no-emit-project -o requirements.txt",
    "poetry.lock": "poetry export --without-hashes -o requirements.txt",
    "Pipfile.lock": "pipenv requirements > requirements.txt",
    "environment.yml": "python -m pip list --format=freeze > requirements.txt, in that environment",
    "environment.yaml": "python -m pip list --format=freeze > requirements.txt, in that environment",
    "conda-lock.yml": "python -m pip list --format=freeze > requirements.txt, in that environment",
    "pixi.lock": "python -m pip list --format=freeze > requirements.txt, in that environment",
}


def _sentences(package: str, version: Version, advisories: list[Advisory]) -> list[str]:
    """Say of one version what pip-audit cannot: how each bug was shown, and which were not judged."""
    lines, others = [], dict[State, list[str]]()
    for one in advisories:
        judged = one.of(version)
        if judged.state != State.AFFECTED:
            others.setdefault(judged.state, []).append(one.identifier)
            continue
        shown = f"shown by {', '.join(judged.evidence)}" if judged.evidence else "shown by a test"
        around = f" Workaround: {one.workaround}." if one.workaround else ""
        quiet = "without an error or a warning, " if one.silent else ""
        lines.append(f"{package} {version}: affected by {one.identifier}, {quiet}{shown}.{around} Report: {one.report}")
    for state, names in sorted(others.items()):
        by = "by" if state == State.UNAFFECTED else "for"
        lines.append(f"{package} {version}: {state} {by} {', '.join(names)}")
    return lines


def _refuse_nested(arguments: tuple[str, ...]) -> None:
    """Refuse what pip-audit 2.10 skips without a word: the files that a requirements file names, without pip."""
    if "--disable-pip" not in arguments:
        return
    for path in [Path(one.partition("=")[2] or one) for one in arguments]:
        if not path.is_file():
            continue
        for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.strip().startswith(("-r", "--requirement", "-c", "--constraint")):
                raise HarnessError(
                    f"{path.name} names another file ({line.strip()[:80]!r}), which pip-audit --disable-pip skips. "
                    "Next: name each file with a -r of its own, or leave --disable-pip out"
                )


@click.command("audit", context_settings={"help_option_names": ["-h", "--help"], "ignore_unknown_options": True})
@click.option(
    "--python", type=click.Path(path_type=Path), metavar="BIN", help="Of the environment (default: this one)."
)
@click.option(
    "--advisories",
    type=click.Path(path_type=Path),
    default=records.FOLDER,
    metavar="DIR",
    help="Folder of OSV records.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(python: Path | None, advisories: Path, arguments: tuple[str, ...]) -> int:
    """Say which packages have a bug that a pack proves. ARGUMENTS go to pip-audit, which reads the environment.

    pip-audit prints its own table on standard output. Standard error says how each bug was shown, and which versions
    nobody judged. A version is affected or not affected only where a test judged exactly that version.

    \b
    Examples:
      runner.py audit                                   # the environment that this program is installed in
      runner.py audit --python ~/work/.venv/bin/python  # another one, which has pip
      runner.py audit --path ~/work/.venv/lib/python3.12/site-packages
      runner.py audit -r requirements.txt --no-deps --disable-pip    # pins alone, and no network
      runner.py audit -r requirements.txt               # what pip would install, too
      runner.py audit --locked . -f json                # pylock.toml

    Exit status 0: no version is affected; 1: one is; 2: the call is wrong, or pip-audit could not read what it was
    given; 5: no record has judged the version of a package that records name.
    """
    for argument in arguments:
        name = Path(argument.partition("=")[2] or argument).name
        if name in EXPORTS:
            raise HarnessError(f"pip-audit does not read {name}. Next: {EXPORTS[name]}; then -r requirements.txt")
    _refuse_nested(arguments)
    if find_spec("pip_audit") is None:
        raise HarnessError("pip-audit is not installed. Next: pip install 'reproducer-packs[audit]'")
    known = records.load_all(advisories)
    environment = os.environ | ({"PIPAPI_PYTHON_LOCATION": str(python)} if python else {})
    with serving(known) as service:
        options = ["--vulnerability-service", "osv", "--osv-url", service.url, "--progress-spinner", "off"]
        ended = subprocess.run([sys.executable, "-m", "pip_audit", *options, *arguments], env=environment, check=False)
    affected, unjudged = False, False
    for package, version in sorted(set(service.asked)):
        of_package = [one for one in known if one.package == package]
        states = {one.of(version).state for one in of_package}
        affected |= State.AFFECTED in states
        unjudged |= states == {State.NOT_JUDGED}
        for line in _sentences(package, version, of_package):
            click.echo(line, err=True)
    if ended.returncode != 0:
        return int(Exit.DEVIATES if affected else Exit.WRONG_CALL)
    if not service.asked:
        click.echo("no package that a record names is installed or named here", err=True)
    return int(Exit.NOTHING_JUDGED if unjudged else Exit.AS_EXPECTED)


def script() -> int:
    """Run the console script ``wrong-numerics``."""
    return commands.main(command)
