"""The closure of what a probe imports: every wheel by version and sha256, for each Python tag.

pip resolves it (`--dry-run --only-binary=:all:`): it is there wherever the runner is, it reads the user's own settings,
as everything here that asks the index does, and of a wheel it reads metadata alone. No sdist is taken, since resolving
one means executing its setup.py. torch and triton belong to the interpreter and never into a set, and neither does what
only they need.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.core.errors import HarnessError, UnavailableError
from harness.pack.model import Dependency

#: They are the interpreter's.
INTERPRETERS = {"torch", "triton"}
#: Wheels for the machines that packs run on: any glibc from 2.17 (2014) to 2.34 (2021).
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
ANY = "any"


@dataclass(frozen=True)
class Wheel:
    """One wheel that pip chose, and the names of the packages that it requires."""

    name: str
    version: str
    file: str
    sha256: str
    requires: tuple[str, ...]


@dataclass(frozen=True)
class Closure:
    """A dependency set as pack.toml states it; `left_out` says of each Python for which there is none why not."""

    members: dict[str, Dependency]
    left_out: dict[str, str]


def resolve(
    roots: Iterable[Requirement], pythons: Iterable[str], tell: Callable[[str], None], fixed: Iterable[str] = ()
) -> Closure:
    """Resolve the closure of requirements, in the same versions for each Python.

    Args:
        roots: what is imported; torch and triton among them are left out.
        pythons: such as ``3.12``; the first one's versions hold for the others.
        tell: takes what is being done.
        fixed: further limits of versions, such as ``numpy<2.4``.

    Raises:
        UnavailableError: there is none for the first Python.

    """
    wanted = [one for one in roots if canonicalize_name(one.name) not in INTERPRETERS]
    versions: dict[str, str] = {}
    hashes: dict[str, dict[str, str]] = {}
    left_out: dict[str, str] = {}
    for python in pythons if wanted else ():
        tell(f"resolving {', '.join(sorted({one.name for one in wanted}))} for Python {python}")
        limits = [*fixed, *(f"{name}=={version}" for name, version in versions.items())]
        try:
            wheels = _reached(wanted, _resolved(wanted, python, limits))
        except UnavailableError as error:
            if not versions:
                raise
            left_out[python] = str(error)
            continue
        for one in wheels:
            versions.setdefault(one.name, one.version)
            tag = ANY if one.file.endswith("-none-any.whl") else f"cp{python.replace('.', '')}"
            hashes.setdefault(one.name, {})[tag] = one.sha256
    return Closure({name: Dependency(versions[name], hashes[name]) for name in sorted(versions)}, left_out)


def _reached(roots: list[Requirement], wheels: dict[str, Wheel]) -> list[Wheel]:
    """Return the wheels that the roots need without what only torch or triton need."""
    waiting, found = [str(canonicalize_name(one.name)) for one in roots], dict[str, Wheel]()
    while waiting:
        name = waiting.pop()
        if name not in found and name in wheels and name not in INTERPRETERS:
            found[name] = wheels[name]
            waiting += wheels[name].requires
    return [found[name] for name in sorted(found)]


def _resolved(roots: list[Requirement], python: str, limits: list[str]) -> dict[str, Wheel]:
    with tempfile.TemporaryDirectory(prefix="closure-") as text:
        folder = Path(text)
        (folder / "constraints.txt").write_text("\n".join(limits) + "\n", encoding="utf-8")
        (folder / "requirements.txt").write_text("\n".join(map(str, roots)) + "\n", encoding="utf-8")
        arguments = ["--dry-run", "--quiet", "--ignore-installed", "--only-binary=:all:", "--implementation", "cp"]
        arguments += [
            "--python-version",
            python,
            "--target",
            str(folder / "target"),
            "--report",
            str(folder / "report"),
        ]
        arguments += [text for platform in PLATFORMS for text in ("--platform", platform)]
        files = ["-c", str(folder / "constraints.txt"), "-r", str(folder / "requirements.txt")]
        command = [sys.executable, "-m", "pip", "install", *arguments, *files]
        ended = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if ended.returncode != 0:
            lines = [line.removeprefix("ERROR: ") for line in ended.stderr.splitlines() if line.startswith("ERROR")]
            why = lines[0] if lines else "pip found no way"
            raise UnavailableError(f"no wheels for Python {python}: {why}. Next: name other versions, or --python")
        try:
            return _wheels(json.loads((folder / "report").read_text(encoding="utf-8")))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise HarnessError(
                f"pip's report cannot be read ({error}). Next: python -m pip install --upgrade pip"
            ) from None


def _wheels(report: dict[str, Any]) -> dict[str, Wheel]:
    found: dict[str, Wheel] = {}
    for item in report["install"]:
        metadata, download = item["metadata"], item["download_info"]
        name = canonicalize_name(metadata["name"])
        requires = tuple(canonicalize_name(Requirement(text).name) for text in metadata.get("requires_dist") or ())
        file = download["url"].rpartition("/")[2]
        found[name] = Wheel(name, metadata["version"], file, download["archive_info"]["hashes"]["sha256"], requires)
    return found
