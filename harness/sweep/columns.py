"""The columns beside the pinned releases: what each is called, and the cells of pre-releases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from packaging.version import Version

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnsupportedHereError
from harness.core.words import Verdict
from harness.host import eligibility
from harness.host.host import Host
from harness.upstream import dependencies, newest, toolchain
from harness.upstream.newest import Release
from harness.upstream.source import Source, SourceKind
from harness.upstream.toolchain import Toolchain
from harness.verdict.cell import Cell

Found = TypeVar("Found")
#: What a cell has behind its name: of upstream's newest release, of its default branch's head, of its pre-release.
LATEST, HEAD, PRE = "latest", "head", "pre"
#: And of the pinned release under a pre-release of torch or triton.
OF_TOOLCHAIN = {"torch": "pre-torch", "triton": "pre-triton"}


@dataclass(frozen=True)
class Moving:
    """What else than the pinned releases is judged: the newest releases, the default branches' heads, pre-releases."""

    latest: bool = False
    head: bool = False
    pre: bool = False


def option(column: str) -> str:
    """Return the option of ``sweep`` that makes the cells of a column."""
    return f"--{PRE}" if column in OF_TOOLCHAIN.values() else f"--{column}"


def package(cell: Cell) -> tuple[str, bool]:
    """Return the package of a cell's upstream, and whether its releases are judged by their wheels."""
    upstream = cell.pack.definition.upstream
    return upstream.package, upstream.is_wheel


def looked_up(look: Callable[..., Found], *given: Any, **named: Any) -> Found | str:  # noqa: ANN401 - as `look` takes
    """Look something up, once for all packs of an upstream; return why not where it cannot be had."""
    try:
        return look(*given, **named)
    except HarnessError as error:
        return str(error)


def unavailable(cell: Cell, column: str, reason: str) -> Cell:
    """Build the cell of what cannot be had from anywhere."""
    source = Source(SourceKind.LATEST)
    return replace(
        cell, column=column, source=source, version="", evidence=None, reason=reason, verdict=Verdict.UNAVAILABLE
    )


def of_release(cell: Cell, column: str, found: Release | str) -> Cell:
    """Build the cell of a release that moves; where that is the pinned one, it shares the pinned cell's lanes."""
    if isinstance(found, str):
        return unavailable(cell, column, found)
    release, seen = found.file, found.seen.isoformat()
    if release.version == cell.version:
        return replace(cell, column=column, seen=seen)
    source = Source(SourceKind.RELEASE, release.version)
    return replace(cell, column=column, source=source, version=release.version, tree=release.sha256, seen=seen)


@dataclass(frozen=True)
class Prereleases:
    """What pre-releases there are, or why there is none: of upstreams, as `package` names them, of torch and triton."""

    upstreams: dict[tuple[str, bool], Release | str]
    toolchains: dict[str, Toolchain | str]

    def cells(self, cell: Cell, host: Host) -> Iterator[Cell]:
        """Yield the cells of the pre-releases that concern a pack, each with one thing that differs from its own."""
        yield of_release(cell, PRE, self.upstreams[package(cell)])
        for name, found in self.toolchains.items():
            if getattr(cell.pack.definition.requires, name):
                yield _under(cell, OF_TOOLCHAIN[name], found, host)


def prereleases(cells: Iterable[Cell], host: Host, cache: Cache) -> Prereleases:
    """Look up the pre-releases that concern cells."""
    packages = dict.fromkeys(package(cell) for cell in cells)
    python = ".".join(host.python.split(".")[:2])
    return Prereleases(
        {(name, wheel): looked_up(newest.prerelease, cache, name, wheels_only=wheel) for name, wheel in packages},
        {name: looked_up(toolchain.prerelease, cache, name, python) for name in OF_TOOLCHAIN if packages},
    )


def _under(cell: Cell, column: str, found: Toolchain | str, host: Host) -> Cell:
    """Build the cell of the pinned release under a pre-release of torch or triton."""
    if isinstance(found, str):
        return unavailable(cell, column, found)
    version, seen = f"{cell.version} with {found.package} {found.version}", found.seen.isoformat()
    here = replace(cell, column=column, version=version, toolchain=found.members, seen=seen)
    reason = _why_not(cell, found, host)
    return here if not reason else replace(here, evidence=None, reason=reason, verdict=Verdict.UNSUPPORTED)


def _why_not(cell: Cell, found: Toolchain, host: Host) -> str:
    """Say why a pack cannot be judged under a pre-release; empty where it can."""
    if cell.environment is not None:
        return f"the environment {cell.stated.environment} is built for the torch of this interpreter"
    installed = getattr(host, found.package)
    if installed and Version(installed) >= Version(found.version):
        return f"the interpreter's own {found.package} {installed} is no older than {found.version}"
    brought = {member.package: member.version for member in found.members}
    torch, triton = brought.get("torch", host.torch), brought.get("triton", host.triton)
    outside = eligibility.out_of_range(cell.pack, replace(host, torch=torch, triton=triton))
    try:
        pinned = dependencies.named(cell.pack.definition, cell.stated.dependencies, host.python_tag)
    except UnsupportedHereError as error:
        return str(error)
    return outside or found.unmet(pinned)
