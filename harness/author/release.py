"""The release that a new pack is about: its file, its modules, and the packages that it had on its day."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import Version

from harness.author.script import Script
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.host.host import Host
from harness.pack.model import Upstream
from harness.pack.requirements import INTERPRETERS
from harness.upstream import download, metadata, package_index, tree, uv
from harness.upstream.source import Source, SourceKind
from harness.upstream.tree import Tree

#: Folders of a repository in which its packages may lie; a wheel has them at its top.
ROOTS = ("", "src", "python", "lib")
#: Triton's interpreter imports numpy, which no wheel of triton requires, and takes none from 2.4 on.
OF_INTERPRETER = "numpy<2.4"
#: What a pack needs of Python where the release takes older ones, too.
PYTHON, OLDER_PYTHON = ">=3.10", "3.9"
#: A line of a release that imports them.
IMPORTS_TORCH = re.compile(rb"(?m)^[ \t]*(?:import|from) (?:torch|triton)\b")
#: In pack.toml, where the release states nothing.
UNKNOWN = "https://example.org/TODO"

#: Files that a build would compile.
NATIVE_SOURCES = {".c", ".cc", ".cpp", ".cu", ".pyx", ".rs"}


@dataclass(frozen=True)
class Release:
    """A release, resolved."""

    upstream: Upstream  # as pack.toml states it; its commit may be unknown
    tree: Tree  # of it
    requires_python: str  # the range
    pinned: str  # requirements.txt: what it imports besides torch and triton
    header: tuple[str, ...]  # the packages that its script names
    needs_torch: bool  # whether it or its script imports torch or triton
    requires: tuple[str, ...]  # what is resolved for another release of it: `OrdinaryScript.requires`
    day: str  # after which the index had more; empty where it states no day
    remarks: tuple[str, ...]  # what could not be known, a line each


def requirements_of(texts: tuple[str, ...]) -> list[Requirement]:
    """Read the values of ``--with``; HarnessError: one is neither PACKAGE nor PACKAGE==VERSION."""
    try:
        found = [Requirement(text) for text in texts]
    except InvalidRequirement as error:
        raise HarnessError(f"--with: {str(error).splitlines()[0]}. Next: --with PACKAGE==VERSION") from None
    if any(one.url for one in found):
        raise HarnessError("--with names a URL. Next: --with PACKAGE==VERSION")
    return found


def resolve(  # noqa: PLR0913 - one parameter for each thing that the caller states
    wanted: list[Requirement], script: Script, cache: Cache, host: Host, tell: Callable[[str], None], *, deps: bool
) -> Release:
    """Resolve the first of some requirements as the release under test, and the others for its script.

    `deps` says whether what the release requires is installed; else only what `wanted` names. HarnessError is raised
    where there is no such release, or the script imports nothing of it.
    """
    if cache.offline:
        raise HarnessError("new asks the package index. Next: without --offline")
    first, others = wanted[0], wanted[1:]
    name = f"{first.name}{_extras(first)}"
    tell(f"looking up {first.name}")
    index, version = package_index.of_user(), _exact(first)
    try:
        release = download.resolve(cache, first.name, version, wheels_only=True)
    except HarnessError:  # no wheel for this Python: the source is judged as it is
        release = download.resolve(cache, first.name, version)
    version = release.version
    bare = Upstream(release.package, UNKNOWN, "", (), "", version, release.file, release.sha256)
    laid = tree.materialize(cache, bare, Source(SourceKind.PINNED, version))
    stated = metadata.read(laid.folder)
    if stated.requires_python and not SpecifierSet(stated.requires_python).contains(host.python):
        raise HarnessError(
            f"{first.name} {version} needs Python {stated.requires_python}, and this is {host.python}. "
            "Next: run new with such a Python"
        )
    root, modules = _modules(laid.folder, script, f"{first.name} {version}")
    upstream = replace(
        bare,
        repository=stated.repository or UNKNOWN,
        license=stated.license or "TODO",
        modules=modules,
        source_root=root,
    )
    remarks = [] if stated.repository else ["the release links no repository: upstream.repository in pack.toml"]
    if not bare.is_wheel and (sources := _files(laid.folder, NATIVE_SOURCES)):
        remarks.append(f"native code is not built, such as {sources[0]}: the script ran without it")
    tell("resolving what it requires")
    asked, requires = list[str](), tuple[str, ...]()
    if deps and bare.is_wheel:
        asked, requires = [f"{name}=={version}"], (name, *map(str, others))
    elif deps:
        asked = [str(one) for one in stated.requires if one.marker is None or one.marker.evaluate({"extra": ""})]
    day = _day({first.name: version} | {one.name: exact for one in others if (exact := _exact(one))}, index)
    scripts = (path for path in laid.folder.rglob("*.py") if path.is_file())
    imported = not INTERPRETERS.isdisjoint(script.imports)
    needs_torch = imported or any(IMPORTS_TORCH.search(path.read_bytes()) for path in scripts)
    more = (OF_INTERPRETER,) if needs_torch else ()
    pinned, taken = _compiled([*asked, *map(str, others)], host.python, day, more)
    if day != taken:
        remarks.append(f"what it requires is of today: of the release's day no wheels run on Python {host.python}")
    # the release under test is none of its requirements: its tree comes on PYTHONPATH
    own = rf"(?m)^{re.escape(canonicalize_name(first.name))}(?:\[.*\])?==.*\n(?:[ \t].*\n)*"
    pinned = re.sub(own, "", pinned)
    header = [f"{name}=={version}", *(_pin(one, pinned) for one in others)]
    header += [one for one in sorted(INTERPRETERS) if one in script.imports]
    header += ["pytest"] if "pytest" in script.imports or script.is_test else []
    return Release(
        upstream,
        tree.materialize(cache, upstream, Source(SourceKind.PINNED, version)),
        _python(stated.requires_python),
        pinned,
        tuple(dict.fromkeys(header)),
        needs_torch,
        requires,
        taken,
        tuple(remarks),
    )


def _files(folder: Path, suffixes: set[str]) -> list[str]:
    """Return the paths of the files with one of some suffixes, relative to the folder."""
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.suffix in suffixes)


def _pin(one: Requirement, pinned: str) -> str:
    """Write a requirement with the version that was resolved, so that it means the same on another day."""
    versions = dict(pin.split("==") for pin in uv.PIN.findall(pinned))  # uv writes canonical names
    version = versions.get(canonicalize_name(one.name))
    return f"{one.name}{_extras(one)}=={version}" if version else str(one)


def _compiled(asked: list[str], python: str, day: str, more: tuple[str, ...]) -> tuple[str, str]:
    """Resolve requirements as of a day, with some more where they admit them.

    Where that day had no wheels for this Python, they are resolved as of today. It returns the pins, and the day.
    """
    why = ""
    for before in dict.fromkeys((day, "")):
        for wanted in dict.fromkeys(((*asked, *more), tuple(asked))):
            try:
                return uv.compiled("\n".join(wanted), python, before), before
            except uv.UvError as error:
                why = why or str(error)
    raise HarnessError(f"{why}. Next: --no-deps, and --with each package that the script needs")


def _extras(one: Requirement) -> str:
    return f"[{','.join(sorted(one.extras))}]" if one.extras else ""


def _exact(one: Requirement) -> str | None:
    """Return the version that a requirement names; None where it names none."""
    return next((spec.version for spec in one.specifier if spec.operator == "=="), None)


def _day(versions: dict[str, str], index: package_index.Index) -> str:
    """Return the day after the last of some releases, by package; empty where the index states no day."""
    times = [
        offer.file.upload_time
        for package, version in versions.items()
        for offer in index.offers(package)
        if offer.version == Version(version) and offer.file.upload_time is not None
    ]
    return (max(times) + dt.timedelta(days=1)).strftime("%Y-%m-%dT%H:%M:%SZ") if times else ""


def _modules(folder: Path, script: Script, name: str) -> tuple[str, tuple[str, ...]]:
    """Return the folder on PYTHONPATH, and the modules that the script imports from there."""
    for root in ROOTS:
        there = {path.stem for path in (folder / root).glob("*") if path.is_dir() or path.suffix in {".py", ".so"}}
        found = tuple(one for one in script.imports if one in there and one not in script.beside)
        if found:
            return root, found
    there = {path.parent.name for path in folder.rglob("__init__.py") if len(path.relative_to(folder).parts) < 4}  # noqa: PLR2004 - PACKAGE below a root
    raise HarnessError(
        f"the script imports no module of {name}: it imports {', '.join(script.imports) or 'none'}, and the release "
        f"has {', '.join(sorted(there - {'tests', 'test'})[:8]) or 'none'}. Next: name first, with --with, the package "
        "that has the bug"
    )


def _python(stated: str) -> str:
    """Return a release's range of Python; where it takes versions that no pack runs on, the oldest of a pack."""
    return PYTHON if not stated or SpecifierSet(stated).contains(OLDER_PYTHON) else stated.replace(" ", "")
