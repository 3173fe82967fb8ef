"""A new pack before it is written: everything that pack.toml and the probe's header state, resolved once for both."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name

from harness.author import reach
from harness.author.script import Script
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import Evidence, Fix, Kind
from harness.host.host import Host
from harness.pack import requirements
from harness.pack.model import CPU, Dependency, Requires, Upstream
from harness.pack.requirements import INTERPRETERS
from harness.upstream import download, metadata, package_index, release_tag, tree, uv
from harness.upstream.download import ReleaseFile
from harness.upstream.source import Source, SourceKind
from harness.upstream.tree import Tree

#: Triton's interpreter converts arrays to scalars in a way that numpy 2.4 no longer takes.
OF_INTERPRETER = "numpy<2.4"
#: Packages that an error names.
MOST_NAMED = 8
PYPI_FILES = "https://files.pythonhosted.org/"
#: What a probe needs of Python where nothing else is stated.
PYTHON, OLDER_PYTHON = ">=3.10", "3.9"


@dataclass(frozen=True)
class Wish:
    """What the caller of `new` states.

    Attributes:
        package: the upstream's name on the index.
        version: of the release.
        modules: import names under test; empty: those that the script imports and the release has.
        script: that shows the bug; None where there is none yet.
        control: that fails neither with the bug nor without it; None where there is none yet.
        repository: its URL, where the release states none or another one.
        commit: of the release's tag, where the repository cannot be asked.
        kind: what sort of claim it will be.
        fix: whether there is a patch, or will be one: else none is asked for.

    """

    package: str
    version: str
    modules: tuple[str, ...]
    script: Script | None
    control: Script | None
    repository: str
    commit: str
    kind: Kind
    fix: Fix

    @property
    def imports(self) -> tuple[tuple[str, tuple[str, ...]], ...]:
        """What both scripts import."""
        return tuple(one for given in (self.script, self.control) if given for one in given.imports)


@dataclass(frozen=True)
class Draft:
    """A pack that can be written.

    Attributes:
        upstream: as pack.toml states it; its commit may be unknown.
        tree: of the release.
        requires: the interpreter's ranges.
        wanted: requirements.in.
        pinned: requirements.txt, which is made of it; empty where nothing is needed, or could be had.
        targets: cpu, and the GPU of this host.
        cpu_evidence: how the bug is seen on the target cpu.
        fix: whether there is a patch, or will be one.
        roots: the modules of the upstream that the script imports.
        stubs: parents of these that are found and not executed.
        has_wheel: whether an installer finds a wheel of the release.
        torch: the version that the probe's header pins; empty where the interpreter has none.
        triton: likewise; empty where nothing imports it.
        remarks: what could not be resolved, a line each.

    """

    upstream: Upstream
    tree: Tree
    requires: Requires
    wanted: str
    pinned: str
    targets: tuple[str, ...]
    cpu_evidence: Evidence
    kind: Kind
    fix: Fix
    script: Script | None
    control: Script | None
    roots: tuple[str, ...]
    stubs: tuple[str, ...]
    has_wheel: bool
    torch: str
    triton: str
    remarks: tuple[str, ...]

    @property
    def members(self) -> dict[str, Dependency]:
        """The default dependency set."""
        return requirements.read(self.pinned)

    @property
    def ran_on_cpu(self) -> str:
        """What a run on the target cpu executes, and what stands in for something: exactly what its evidence is."""
        stubs = f"; of {', '.join(self.stubs)} the __init__ is not executed" if self.stubs else ""
        if self.cpu_evidence == Evidence.INTERPRETED:
            kernels = "Triton kernels run in Triton's interpreter, each autotuned one with its first configuration"
            return f"the release's {kernels}, and the rest of its code as it is{stubs}"
        return f"the release's own code runs as it is, on real values{stubs or '; nothing stands in for any of it'}"

    @property
    def main_file(self) -> str:
        """The path in the repository of the first module that the script imports; empty where it has no source."""
        if not self.roots:
            return ""
        found = reach.of_modules(self.tree.import_root, list(self.roots), self.stubs).files
        path = next((found[name] for name in self.roots if name in found), None)
        if path is None:
            return ""
        inside = path.relative_to(self.tree.import_root).as_posix()
        return f"{self.upstream.source_root}/{inside}".lstrip("/")


def resolve(wish: Wish, cache: Cache, host: Host, tell: Callable[[str], None]) -> Draft:
    """Resolve a new pack: release, metadata, source root, commit, what its script reaches, and the pins of that.

    Raises:
        HarnessError: there is no such release or module, or its files cannot be had.

    """
    if cache.offline:
        raise HarnessError("new asks the package index. Next: without --offline")
    tell(f"looking up {wish.package} {wish.version}")
    release = download.resolve(cache, wish.package, wish.version)
    laid = _laid_out(cache, release)
    stated = metadata.read(laid.folder)
    modules, root = _modules(wish, laid)
    offers = package_index.of_user().release(wish.package, wish.version)
    upstream, remarks = _upstream(wish, release, stated, modules, root, cache)
    upstream = replace(upstream, url=public_url([one.file.url for one in offers if one.sha256 == release.sha256]))
    laid = _laid_out(cache, release, upstream)
    roots = _roots(wish, modules, laid.import_root)
    _refuse_missing(wish, roots, laid.import_root, stated)
    known = {*INTERPRETERS, *_others(wish, modules)}
    stubs = () if upstream.is_compiled else reach.stubs_for(laid.import_root, list(roots), known)
    reached = reach.of_modules(laid.import_root, list(roots), stubs)
    others = dict(reached.others) | dict.fromkeys(_others(wish, modules), "the script")
    uses_triton = "triton" in others
    needed = _all_of(stated) if upstream.is_compiled else _needed(others, stated, remarks)
    if uses_triton and "numpy" not in {one.name for one in needed}:
        needed.append(Requirement("numpy"))  # Triton's interpreter imports it, and Triton's wheel does not require it
    wanted = _asked(needed, uses_triton=uses_triton)
    pinned = _pinned(wanted, remarks, tell)
    return Draft(
        upstream=upstream,
        tree=laid,
        requires=_requires(stated, host, uses_triton=uses_triton),
        wanted=wanted if pinned else "",
        pinned=pinned,
        targets=tuple(dict.fromkeys((CPU, host.auto_target))),
        cpu_evidence=Evidence.INTERPRETED if uses_triton else Evidence.TRACED,
        kind=wish.kind,
        fix=Fix.NONE if upstream.is_compiled else wish.fix,
        script=wish.script,
        control=wish.control,
        roots=roots,
        stubs=stubs,
        has_wheel=any(one.file.filename.endswith(".whl") for one in offers),
        torch=(host.torch or "").partition("+")[0],
        triton=(host.triton or "") if uses_triton else "",
        remarks=tuple(remarks),
    )


def _pinned(wanted: str, remarks: list[str], tell: Callable[[str], None]) -> str:
    """Pin the dependency set; what cannot be had is said, and left to the author."""
    if not wanted:
        return ""
    tell("resolving what the script's modules import")
    try:
        return uv.compiled(wanted)
    except uv.UvError as error:
        remarks.append(f"{error}. Next: other versions in requirements.in, then uv pip compile (CONTRIBUTING.md)")
        return ""


def _asked(needed: list[Requirement], *, uses_triton: bool) -> str:
    """Write requirements.in, without what the lane's interpreter brings."""
    limited = [*needed, *([Requirement(OF_INTERPRETER)] if uses_triton else [])]
    wanted = (one for one in limited if canonicalize_name(one.name) not in INTERPRETERS)
    return "".join(f"{line}\n" for line in dict.fromkeys(map(str, wanted)))


def _laid_out(cache: Cache, release: ReleaseFile, upstream: Upstream | None = None) -> Tree:
    pinned = upstream or Upstream(release.package, "", "", "", (), release.version, release.file, release.sha256)
    return tree.materialize(cache, pinned, Source(SourceKind.PINNED, release.version))


def _modules(wish: Wish, laid: Tree) -> tuple[tuple[str, ...], str]:
    """Return the import names under test and the folder that they lie in."""
    usual = canonicalize_name(wish.package).replace("-", "_")
    imported = [name.partition(".")[0] for name, _ in wish.imports]
    candidates = wish.modules or (*dict.fromkeys(imported), usual)
    found = {name: reach.source_root(laid.folder, name) for name in candidates}
    if wish.script and not wish.modules:
        _refuse_unimported(wish, wish.script, [name for name, root in found.items() if root is not None])
    lost = [name for name in wish.modules if found[name] is None]
    roots = [root for root in found.values() if root is not None]
    if lost or not roots:
        there = ", ".join(sorted({path.parent.name for path in laid.folder.rglob("__init__.py")} - {"tests"})[:8])
        raise HarnessError(
            f"{wish.package} {wish.version} has no module {', '.join(lost or candidates)}. It has {there or 'none'}. "
            "Next: --module NAME, or --upstream the package that the script's import comes from"
        )
    modules = tuple(name for name, root in found.items() if root == roots[0])
    return (
        modules if wish.modules or not wish.imports else tuple(n for n in modules if n in imported) or modules
    ), roots[0]


def _refuse_unimported(wish: Wish, script: Script, there: list[str]) -> None:
    """Raise HarnessError where a script imports no module that the release has."""
    imported = dict.fromkeys(name.partition(".")[0] for name, _ in script.imports)
    if not imported.keys() & set(there):
        others = ", ".join(name for name in imported if name not in reach.STANDARD) or "no package at all"
        raise HarnessError(
            f"the script imports no module of {wish.package} {wish.version}: it imports {others}. Next: --upstream the "
            "package that has the bug, or --module NAME where the script reaches it through another"
        )


def _upstream(  # noqa: PLR0913, PLR0917 - what pack.toml states of it comes from as many places
    wish: Wish, release: ReleaseFile, stated: metadata.Metadata, modules: tuple[str, ...], root: str, cache: Cache
) -> tuple[Upstream, list[str]]:
    repository = wish.repository or stated.repository
    commit = release_tag.commit_of(repository, wish.package, release.version, cache.root)
    if wish.commit and commit and wish.commit != commit:
        raise HarnessError(f"--commit {wish.commit}: the tag of {release.version} is {commit}. Next: without --commit")
    remarks = []
    if wish.commit and not commit:
        remarks.append("--commit is unchecked: no tag of the release could be read to compare it with")
    if not repository:
        remarks.append("the release links no repository: state upstream.repository, or --repository URL")
    if not stated.license:
        remarks.append("the release states no licence that is known: state upstream.license, as SPDX names it")
    upstream = Upstream(
        package=wish.package,
        repository=repository,
        commit=commit or wish.commit,
        commit_unchecked=not commit,
        license=stated.license,
        modules=modules,
        version=release.version,
        file=release.file,
        sha256=release.sha256,
        source_root=root,
    )
    return upstream, remarks


def _roots(wish: Wish, modules: tuple[str, ...], root: Path) -> tuple[str, ...]:
    """Name the modules of the upstream that a script imports, those among the names that it takes of them included."""
    found = []
    for name, taken in wish.imports:
        if name.partition(".")[0] in modules:
            inner = [f"{name}.{one}" for one in taken if _is_module(root, f"{name}.{one}")]
            found += inner if inner and len(inner) == len(taken) else [name, *inner]
    return tuple(dict.fromkeys(found)) or modules


def _refuse_missing(wish: Wish, roots: tuple[str, ...], root: Path, stated: metadata.Metadata) -> None:
    """Raise HarnessError where a script imports a module that another release of the same namespace has."""
    for name in roots:
        place = root.joinpath(*name.split("."))
        if not (_is_module(root, name) or place.is_dir() or any(place.parent.glob(f"{place.name}.*"))):
            others = ", ".join(list(dict.fromkeys(one.name for one in stated.requires))[:MOST_NAMED])
            raise HarnessError(
                f"{wish.package} {wish.version} has no module {name}. Next: --upstream the package that has it"
                + (f" (this one requires {others})" if others else "")
            )


def _is_module(root: Path, name: str) -> bool:
    place = root.joinpath(*name.split("."))
    return place.with_suffix(".py").is_file() or (place / "__init__.py").is_file()


def _others(wish: Wish, modules: tuple[str, ...]) -> list[str]:
    names = [name.partition(".")[0] for name, _ in wish.imports]
    return [name for name in names if name not in modules and name not in reach.STANDARD]


def _needed(others: dict[str, str], stated: metadata.Metadata, remarks: list[str]) -> list[Requirement]:
    """Return what has to be beside the upstream: an import name's package as the release, or this Python, knows it.

    No name is guessed: on an index, anybody may have taken it.
    """
    by_name = {canonicalize_name(one.name): one for one in stated.requires}
    installed = importlib.metadata.packages_distributions()
    found: dict[str, Requirement] = {}
    for name, asker in others.items():
        names = [canonicalize_name(one) for one in (name, *installed.get(name, ()))]
        declared = next((by_name[one] for one in names if one in by_name), None)
        if INTERPRETERS.intersection(names):
            continue
        if declared is not None:
            found[declared.name] = Requirement(f"{declared.name}{declared.specifier}")
        elif name in installed:
            found[installed[name][0]] = Requirement(installed[name][0])
        else:
            remarks.append(
                f"{asker} imports {name}, which neither the release's requirements nor this Python name: state its "
                "package in requirements.in, then uv pip compile (CONTRIBUTING.md)"
            )
    return list(found.values())


def _all_of(stated: metadata.Metadata) -> list[Requirement]:
    """Return all that a compiled wheel requires: nobody can read from its libraries what they load."""
    return [one for one in stated.requires if one.marker is None or one.marker.evaluate({"extra": ""})]


def _requires(stated: metadata.Metadata, host: Host, *, uses_triton: bool) -> Requires:
    torch = ".".join((host.torch or "2").partition("+")[0].split(".")[:2])
    triton = f">={'.'.join(host.triton.split('.')[:2])}" if uses_triton and host.triton else ""
    return Requires(_python(stated.requires_python), f">={torch}", triton)


def _python(stated: str) -> str:
    """Return a release's range of Python; where it takes versions that no probe runs on, the probe's own."""
    try:
        older = SpecifierSet(stated).contains(OLDER_PYTHON)
    except InvalidSpecifier:
        older = True
    return PYTHON if older else re.sub(r"\s", "", stated)


def public_url(urls: list[str]) -> str:
    """Return the first URL of a file that lies on PyPI, where anybody gets it; empty where another index has it."""
    return next((url.partition("#")[0] for url in urls if url.startswith(PYPI_FILES)), "")
