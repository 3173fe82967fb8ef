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
from urllib.parse import unquote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from harness.core.errors import HarnessError, UnavailableError
from harness.pack.model import Dependency
from harness.upstream.package_index import NoPrereleaseError

#: They are the interpreter's.
INTERPRETERS = {"torch", "triton"}
#: Wheels for the machines that packs run on: any glibc from 2.17 (2014) to 2.34 (2021).
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_17_x86_64", "manylinux_2_27_x86_64", "manylinux_2_28_x86_64")
#: The oldest Python that the runner takes is 3.11.
ANY, OLDEST = "any", 11
#: Triton's interpreter converts arrays to scalars in a way that numpy 2.4 no longer takes.
OF_INTERPRETER = "numpy<2.4"


@dataclass(frozen=True)
class Wheel:
    """One wheel that pip chose, and what it requires."""

    name: str
    version: str
    file: str
    sha256: str
    requires: tuple[Requirement, ...]

    def tag(self, python: str) -> str:
        """Return the tag under which pack.toml pins it: ``any`` where every Python that runs packs takes this file."""
        tags = parse_wheel_filename(self.file)[3]
        return ANY if any(_takes_every(one.interpreter, one.abi) for one in tags) else f"cp{python.replace('.', '')}"


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
            wheels = _reached(wanted, _resolved(wanted, python, limits), python)
        except UnavailableError as error:
            if not versions:
                raise
            left_out[python] = str(error)
            continue
        for one in wheels:
            versions.setdefault(one.name, one.version)
            hashes.setdefault(one.name, {})[one.tag(python)] = one.sha256
    return Closure({name: Dependency(versions[name], hashes[name]) for name in sorted(versions)}, left_out)


def prerelease(package: str, python: str) -> list[Wheel]:
    """Resolve the newest pre-release of torch or triton with everything that it requires; its own wheel comes first.

    Only the package itself is chosen as ``--pre`` chooses; what it requires is final where it does not name another.

    Raises:
        NoPrereleaseError: the newest version for that Python is final.
        UnavailableError: there is none, or what it requires cannot be had.

    """
    newest = _resolved([Requirement(package)], python, [], ("--pre", "--no-deps"))[package]
    if not Version(newest.version).is_prerelease:
        raise NoPrereleaseError(package, newest.version)
    wheels = _resolved([Requirement(f"{package}=={newest.version}")], python, [])
    return [wheels.pop(package), *(wheels[name] for name in sorted(wheels))]


def _takes_every(interpreter: str, abi: str) -> bool:
    """Whether a wheel of these tags is for every Python from the oldest that runs packs on."""
    if abi == "abi3" and interpreter.startswith("cp3"):
        return int(interpreter[3:] or 0) <= OLDEST
    return abi == "none" and interpreter in ("py3", "py2.py3")


def _reached(roots: list[Requirement], wheels: dict[str, Wheel], python: str) -> list[Wheel]:
    """Return the wheels that the roots need without what only torch or triton need."""
    waiting, found = list(roots), dict[str, Wheel]()
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        name, extras = str(canonicalize_name(wanted.name)), frozenset(wanted.extras)
        if (name, extras) in seen or name not in wheels or name in INTERPRETERS:
            continue
        seen.add((name, extras))
        found[name] = wheels[name]
        waiting += [one for one in wheels[name].requires if holds(one, python, extras)]
    return [found[name] for name in sorted(found)]


def holds(requirement: Requirement, python: str, extras: frozenset[str]) -> bool:
    """Whether a requirement is one on Linux, for that Python and with one of the extras or none."""
    if requirement.marker is None:
        return True
    here = {"python_version": python, "python_full_version": f"{python}.0", "sys_platform": "linux", "os_name": "posix"}
    here |= {"platform_system": "Linux", "platform_machine": "x86_64", "implementation_name": "cpython"}
    return any(requirement.marker.evaluate({**here, "extra": extra}) for extra in ("", *extras))


def _resolved(
    roots: list[Requirement], python: str, limits: list[str], options: tuple[str, ...] = ()
) -> dict[str, Wheel]:
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
        command = [sys.executable, "-m", "pip", "install", *options, *arguments, *files]
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
        requires = tuple(Requirement(text) for text in metadata.get("requires_dist") or ())
        file = unquote(download["url"].partition("#")[0].rpartition("/")[2])
        found[name] = Wheel(name, metadata["version"], file, download["archive_info"]["hashes"]["sha256"], requires)
    return found
