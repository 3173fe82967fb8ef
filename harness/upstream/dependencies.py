"""Dependency sets: the packages that a lane imports besides torch and triton, laid out in one folder by uv."""

import zipfile
from dataclasses import replace
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.core import seal
from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.core.seal import Layout
from harness.pack import requirements
from harness.pack.model import Definition, Dependency
from harness.pack.requirements import DependencySet
from harness.upstream import download, uv


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
                    uv.lay_out(requirements_file, wheels, site, python, scratch / "uv")
                except uv.UvError as error:
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
