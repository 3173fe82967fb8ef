"""Dependency sets: the packages that a lane imports besides torch and triton, resolved and laid out by uv.

uv never builds an sdist, and executes no code of a package. The user's configuration of uv is not read. To resolve, uv
asks the indexes that the user's pip is configured for. Errors hold no URL, since an index may be private.
"""

import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name
from uv import find_uv_bin

from harness.core import Cache, HarnessError, UnavailableError, files, seal
from harness.core.seal import Layout
from harness.pack import Definition, Dependency, requirements
from harness.pack.requirements import DependencySet
from harness.upstream import download, package_index

#: The configuration with which everybody resolves requirements.
CONFIGURATION = files.REPOSITORY / "packs/uv.toml"
#: The user's own settings of uv and of Python, which a child does not inherit.
FOREIGN = re.compile(r"UV_.*|VIRTUAL_ENV|CONDA_PREFIX|PYTHON.*|PYC_.*")
URL = re.compile(r"(?:https?|file)://[^\s)]+")

#: A pin in the text that `resolve_pins` returns.
PIN = re.compile(r"(?m)^(?P<pin>[\w.-]+==[^\s;\\]+)")


class UvError(Exception):
    """The error of uv, on one line and without URLs."""


def run_uv(arguments: Sequence[str], **variables: str) -> None:
    """Run uv with arguments such as ``pip install``, and with `variables` beside the caller's own.

    The caller's variables that configure uv or Python are left out. UvError: uv failed.
    """
    environment = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)} | variables
    command = [find_uv_bin(), *arguments, "--no-progress", "--quiet", "--color", "never"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode != 0:
        message = " ".join(line.strip() for line in process.stderr.splitlines() if not line.startswith("warning:"))
        message = message.removeprefix("error: ").replace(" cause: ", ": ")
        raise UvError(URL.sub("the index", message) or f"uv ended with status {process.returncode}")


def resolve_pins(requirements: str, python: str = "", before: str = "") -> str:
    """Resolve the lines of a requirements.in into pinned lines, as an author would by CONTRIBUTING.md.

    `python` is the version for which to resolve (empty: every version). Files that were uploaded after `before`, a time
    in UTC by RFC 3339 (empty: now), are ignored. UvError: no versions meet the requirements.
    """
    main, *extra = package_index.endpoints()
    indexes = {"UV_DEFAULT_INDEX": main, "UV_INDEX": " ".join(extra), "UV_INDEX_STRATEGY": "unsafe-best-match"}
    with tempfile.TemporaryDirectory(prefix="requirements-") as folder:
        source, output = Path(folder) / "requirements.in", Path(folder) / "requirements.txt"
        source.write_text(requirements, encoding="utf-8")
        command = ["pip", "compile", "--config-file", str(CONFIGURATION), source.name, "--output-file", output.name]
        command += ["--no-universal", "--python-version", python] if python else []
        command += ["--exclude-newer", before] if before else []
        run_uv([*command, "--directory", folder, "--python", sys.executable], **indexes)
        return output.read_text(encoding="utf-8")


def lay_out(requirements: Path, wheels: Path, site: Path, python: Path, cache: Path) -> None:
    """Lay out the wheels of one folder in another, `site`, with their bytecode and without network.

    `requirements` is a file with the version and the sha256 of each, `python` the interpreter, `cache` a folder of uv's
    own on the same file system, to which nobody else writes. Python does not compare the bytecode with its source: both
    are sealed. UvError: a wheel is missing, is not for that interpreter, or has another sha256.
    """
    inputs = ["--requirement", str(requirements), "--find-links", str(wheels)]
    outputs = ["--target", str(site), "--python", str(python), "--cache-dir", str(cache), "--link-mode", "hardlink"]
    limits = ["--no-config", "--offline", "--no-index", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command = ["pip", "install", *inputs, *outputs, *limits, "--compile-bytecode"]
    run_uv(command, PYC_INVALIDATION_MODE="UNCHECKED_HASH")
    (site / ".lock").unlink(missing_ok=True)


def requested_set(
    cache: Cache, definition: Definition, requested: tuple[str, ...], default: str, tag: str
) -> DependencySet:
    """Return the set that the values of ``--with`` request: a named set, each ``PACKAGE==VERSION``, or both.

    `default` is the set that the target names, `tag` the Python tag of the wheels, such as ``cp311``.
    """
    names = [text for text in requested if "==" not in text]
    if len(names) > 1:
        raise HarnessError(f"--with names {len(names)} sets ({', '.join(names)}); name one")
    base = requirements.named_set(definition, names[0] if names else default, tag)
    pins = [text for text in requested if "==" in text]
    if not pins:
        return base
    members = {canonicalize_name(package): member for package, member in base.members.items()}
    for text in pins:
        try:
            requirement, version = requirements.exact_pin(text)
        except ValueError:
            raise HarnessError(f"--with {text!r}: neither a set nor PACKAGE==VERSION") from None
        release = download.resolve(cache, requirement.name, version, wheels_only=True)
        members[canonicalize_name(requirement.name)] = Dependency(release.version, (release.sha256,))
    return DependencySet("+".join([base.name, *pins]), dict(sorted(members.items())))


def add_wheel(dependencies: DependencySet, package: str, version: str, sha256: str) -> DependencySet:
    """Add the wheel of an upstream to a set: its libraries look for others beside them."""
    return replace(dependencies, members={**dependencies.members, package: Dependency(version, (sha256,))})


def layout(cache: Cache, dependencies: DependencySet, python: Path, tag: str) -> Layout:
    """Return the layout of the folder that holds all wheels of a set with their bytecode.

    `python` is the interpreter that compiles and that lanes run with; `tag` is its Python tag, such as ``cp311``.

    The folder is made from the wheels alone. Files of another set, or of a cache of uv, could bring back what a lane
    wrote. Each user has a folder of their own: bytecode is not reproducible, so that nobody else could check it.
    """

    def build(entry: Path) -> None:
        with cache.scratch("wheels-") as scratch:
            wheels, requirements_file, site = scratch / "wheels", scratch / "requirements.txt", entry / "site"
            wheels.mkdir()
            site.mkdir()  # for an empty set, too
            for package, member in dependencies.members.items():
                wheel = download.wheel(cache, package, member.version, member.hashes, tag)
                (wheels / wheel.name).symlink_to(wheel)
            _refuse_conflicts(wheels)
            cache.tell(f"laying out the dependency set {dependencies.name}")
            requirements_file.write_text(dependencies.requirements, encoding="utf-8")
            if dependencies.members:
                try:
                    lay_out(requirements_file, wheels, site, python, scratch / "uv")
                except UvError as error:
                    raise UnavailableError(f"the dependency set {dependencies.name}: {error}") from None

    key = f"{dependencies.sha256[:32]}-{tag}-{seal.owner_id()}"
    return Layout(cache, "dependencies", key, build, f"the dependency set {dependencies.name}", "site", _may_differ)


def _may_differ(path: str) -> bool:
    """Whether a file may differ when a set is laid out again: bytecode, and files that hold the time."""
    return "__pycache__/" in path or path.endswith((".dist-info/RECORD", ".dist-info/uv_cache.json"))


def _refuse_conflicts(wheels: Path) -> None:
    """Refuse wheels that hold one file with different contents: uv would take either."""
    owners: dict[str, tuple[int, str]] = {}
    for wheel in sorted(wheels.iterdir()):
        with zipfile.ZipFile(wheel) as bundle:
            for info in bundle.infolist():
                checksum, owner = owners.setdefault(info.filename, (info.CRC, wheel.name))
                if checksum != info.CRC:
                    raise UnavailableError(f"{wheel.name}: {info.filename} stands in {owner} with other content")
