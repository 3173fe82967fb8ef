"""``runner.py audit``: pip-audit over the OSV records of this repository, from a local service."""

import argparse
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import click
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.core import Exit, HarnessError, files, structure, terminal
from harness.report.advisories import PREFIX, State

#: The records of the repository. A wheel installs them beside the package `harness`.
FOLDER = files.REPOSITORY / "advisories"
#: Files that pip-audit does not read, each with the command that exports its packages.
EXPORTS = {
    "uv*.lock": "uv export --frozen --all-extras --all-groups --no-hashes --no-emit-project -o requirements.txt",
    "poetry.lock": "poetry export --without-hashes --all-extras --all-groups -o requirements.txt",
    "Pipfile.lock": "pipenv requirements > requirements.txt",
    "pyproject.toml": "uv pip compile --all-extras pyproject.toml -o requirements.txt",
    "*.y*ml": "python -m pip list --format=freeze > requirements.txt, in that environment",
}
#: Prints the folders that an interpreter imports from. With -S, nothing of its environment runs: what the module `site`
#: would add is read from pyvenv.cfg, as `site` reads it, and from the .pth files that name folders.
SEARCH_PATH = """
import os, site, sys
folder = os.path.dirname(sys.executable)
prefix = next((x for x in (folder, os.path.dirname(folder)) if os.path.isfile(os.path.join(x, "pyvenv.cfg"))), None)
settings = {"include-system-site-packages": "true"}
if prefix:
    with open(os.path.join(prefix, "pyvenv.cfg"), encoding="utf-8", errors="replace") as lines:
        pairs = [line.partition("=") for line in lines if "=" in line]
    settings.update((key.strip().lower(), value.strip().lower()) for key, _, value in pairs)
folders = site.getsitepackages([prefix]) if prefix else []
if settings["include-system-site-packages"] == "true":
    folders += [*site.getsitepackages([sys.base_prefix]), site.getusersitepackages()]
print(*sys.path, *folders, sep="\\n")
for folder in filter(os.path.isdir, folders):
    for name in sorted(os.listdir(folder)):
        if name.endswith(".pth"):
            with open(os.path.join(folder, name), encoding="utf-8", errors="replace") as lines:
                print(*(os.path.join(folder, line.strip()) for line in lines if line.strip()), sep="\\n")
"""


@dataclass(frozen=True)
class Advisory:
    """One bug of a package."""

    package: str  # its normalized name
    judged: dict[Version, tuple[State, list[str]]]  # the state of each version, and the evidence for it
    document: dict[str, Any]  # the OSV record

    def of(self, version: Version) -> tuple[State, list[str]]:
        """Return the state of exactly this version, and the evidence. A local build counts as its release."""
        return self.judged.get(Version(version.public), (State.NOT_JUDGED, []))


def load(path: Path) -> Advisory:
    """Load one record. HarnessError is raised where the file is no such record, or contradicts itself."""
    try:
        document: Any = structure.loads(path.read_bytes())
        judged = document["database_specific"]["judged"].items()
        by_version = {Version(label): (State(entry["state"]), entry["evidence"]) for label, entry in judged}
        affected = document["affected"][0]
        advisory = Advisory(affected["package"]["name"], by_version, document)
        listed = {Version(label) for label in affected["versions"]}
    except (OSError, structure.StrictJsonError, InvalidVersion, LookupError, TypeError, ValueError) as error:
        raise HarnessError(f"{path.name}: {error!r:.300}. Next: runner.py check --write") from None
    if listed != {version for version, (state, _) in by_version.items() if state == State.AFFECTED}:
        reason = "affected.versions are not the versions that database_specific.judged calls affected"
        raise HarnessError(f"{path.name}: {reason}. Next: runner.py check --write")
    return advisory


@contextmanager
def serve(advisories: list[Advisory]) -> Iterator[tuple[str, set[tuple[str, Version]]]]:
    """Answer https://google.github.io/osv.dev/post-v1-query on 127.0.0.1; yield the URL, and all queried versions."""
    queried: set[tuple[str, Version]] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name, version = query["package"]["name"], Version(query["version"])
            queried.add((name, version))
            bugs = [advisory for advisory in advisories if advisory.package == name]
            records = [bug.document for bug in bugs if bug.of(version)[0] == State.AFFECTED]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"vulns": records}).encode())

        def log_message(self, *_: object) -> None:
            """Log nothing: pip-audit prints the answers."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query", queried
        server.shutdown()


def _lines(path: Path) -> list[str]:
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [line.partition(" #")[0].strip() for line in text.splitlines() if not line.lstrip().startswith("#")]


def _inputs(arguments: tuple[str, ...]) -> list[Path]:
    """Return the files that pip-audit will read; refuse files that it cannot read or would silently skip."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("-r", "--requirement", type=Path, action="append", default=[])
    for option in ("--disable-pip", "--fix", "--locked"):
        parser.add_argument(option, action="store_true")
    parsed, unparsed = parser.parse_known_args(arguments)
    if parsed.fix:
        raise HarnessError("audit changes no environment. Next: leave --fix out")
    for path in parsed.requirement:
        for export in [command for pattern, command in EXPORTS.items() if fnmatchcase(path.name, pattern)]:
            raise HarnessError(f"pip-audit does not read {path.name}. Next: {export}; then -r requirements.txt")
        if parsed.disable_pip and any(line.startswith(("-r", "-c", "--req", "--const")) for line in _lines(path)):
            raise HarnessError(f"--disable-pip skips the files that {path.name} names. Next: one -r for each of them")
    pattern = "pylock*.toml" if parsed.locked else "pyproject.toml"
    return [*parsed.requirement, *(path for folder in unparsed for path in Path(folder).glob(pattern))]


def _search_path(python: Path) -> list[str]:
    """Return pip-audit's options for the folders that an interpreter imports from. The interpreter needs no pip."""
    command = [str(python.absolute()), "-I", "-S", "-c", SEARCH_PATH]
    printed = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False).stdout
    return [f"--path={folder}" for folder in dict.fromkeys(printed.splitlines()) if Path(folder).is_dir()]


def _report(package: str, version: Version, advisories: list[Advisory]) -> State:
    """Print what pip-audit does not: the evidence of each bug, a workaround, and whether the version was judged.

    The state is AFFECTED if any record says so, and NOT_JUDGED if no record judged the version.
    """
    label = f"{package} {version}" + (f" (counted as {version.public})" if version.local else "")
    advisories = [advisory for advisory in advisories if advisory.package == package]
    for advisory in advisories:
        (state, evidence), details = advisory.of(version), advisory.document["database_specific"]
        terminal.echo(f"{label}: {state}: {advisory.document['id']}: {advisory.document['summary']}", err=True)
        if state == State.AFFECTED:
            silent = "no error or warning tells; " if details["silent"] else ""
            terminal.echo(f"    {silent}shown: {', '.join(evidence)}; report: {details['report']}", err=True)
            terminal.echo(f"    workaround: {details['workaround'] or 'none that a check shows'}", err=True)
    states = {advisory.of(version)[0] for advisory in advisories}
    if State.AFFECTED in states:
        return State.AFFECTED
    return State.NOT_JUDGED if states == {State.NOT_JUDGED} else State.UNAFFECTED


@click.command("audit", context_settings={"help_option_names": ["--help"], "ignore_unknown_options": True})
@click.option(
    "--python",
    type=click.Path(exists=True, dir_okay=False, executable=True, path_type=Path),
    metavar="BIN",
    help="Judge what it imports.",
)
@click.option("--advisories", "folder", type=click.Path(path_type=Path), default=FOLDER, hidden=True)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def command(python: Path | None, folder: Path, arguments: tuple[str, ...]) -> int:
    """Say which of your packages have a proved bug.

    ARGUMENTS go to pip-audit, which reads the packages.

    \b
      runner.py audit --python BIN    # all that BIN imports; it needs no pip
      runner.py audit -r FILE --no-deps --disable-pip    # the pins, no network
      runner.py audit -r FILE    # and what pip would install: it may execute
      runner.py audit --locked . -f json    # pylock.toml; see pip-audit -h

    A version is affected or not only where a lane judged exactly that version. Standard error says how.

    Exit status 1: a version is affected. 5: nobody judged the version of a package that records name. 2: the call is
    wrong, or pip-audit reads no package. 0: none of these.
    """
    inputs = _inputs(arguments)
    advisories = [load(path) for path in sorted(folder.glob(f"{PREFIX}*.json"))]
    if not advisories:
        raise HarnessError(f"no advisories in {folder}. Next: --advisories DIR")
    if not arguments and python is None:
        python = Path(os.environ.get("VIRTUAL_ENV", sys.prefix), "bin/python")
        terminal.echo(f"environment: {python}", err=True)
    no_proxy = f"{os.environ.get('no_proxy') or os.environ.get('NO_PROXY', '')},127.0.0.1"
    with serve(advisories) as (url, queries):
        options = [*arguments, *(_search_path(python) if python else []), "--progress-spinner=off"]
        call = [sys.executable, "-m", "pip_audit", *options, "--vulnerability-service=osv", f"--osv-url={url}"]
        pip_audit = subprocess.run(call, env=os.environ | {"no_proxy": no_proxy}, check=False)
    states = [_report(name, version, advisories) for name, version in sorted(queries)]
    missed = {advisory.package for advisory in advisories} - {name for name, _ in queries}
    for line in [line for path in inputs for line in _lines(path)]:
        if any(package in canonicalize_name(line) for package in missed):
            terminal.echo(f"not judged, since pip-audit skips it: {line[:200]}", err=True)
            states.append(State.NOT_JUDGED)
    if State.AFFECTED in states:
        return Exit.DEVIATES
    if not states:
        raise HarnessError("pip-audit read no package. Next: see what it says; --no-deps --disable-pip needs no pip")
    if pip_audit.returncode:
        raise HarnessError(f"pip-audit ended with status {pip_audit.returncode}. Next: see what it says above")
    return Exit.AS_EXPECTED if set(states) == {State.UNAFFECTED} else Exit.NOTHING_JUDGED
