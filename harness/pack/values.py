"""What a pack.toml's values may be, where they become paths, arguments, patterns or times."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import PurePosixPath

from harness.core import files
from harness.core.words import BITWISE_IDENTICAL, LaneVerdict
from harness.pack.model import Definition

#: Seconds: a lane of a month is a mistake.
LONGEST = 31 * 24 * 3600.0
MOST_GPUS = 1024
MOST_RANKS = 1024
MOST_MEMORY_GIB = 1 << 20
PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
CLAIM = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
#: A claim of such a name would be read as something else.
TAKEN = {"TARGET", "UPSTREAM", "CHECK", "FIGURE", "OUTPUT", *LaneVerdict}
#: Never a path or an option of git's.
REPOSITORY = re.compile(r"https?://[^\s]+")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")


def _texts(value: object, path: str) -> Iterator[tuple[str, str]]:
    """Yield every text of a document with its path; no recursion."""
    waiting = [(path, value)]
    while waiting:
        here, one = waiting.pop()
        if isinstance(one, str):
            yield here, one
        elif isinstance(one, dict):
            for key, item in one.items():
                yield f"{here}.{key}".lstrip("."), key
                waiting.append((f"{here}.{key}".lstrip("."), item))
        elif isinstance(one, list):
            waiting += [(f"{here}[{index}]", item) for index, item in enumerate(one)]


def text_errors(document: object) -> list[str]:
    """Say which texts hold control characters: no path, no argument and no table takes them."""
    hidden = (path for path, text in _texts(document, "") if CONTROL.search(text))
    return [f"{path[:80]!r}: it holds control characters" for path in hidden]


def _relative(text: str) -> bool:
    path = PurePosixPath(text)
    return not path.is_absolute() and ".." not in path.parts and "\\" not in text


def _upstream(definition: Definition) -> Iterator[str]:
    upstream = definition.upstream
    if not PACKAGE.fullmatch(upstream.package):
        yield f"upstream.package: {upstream.package!r} is no name of a package"
    if upstream.file and not files.is_bare_name(upstream.file):  # none where a commit is pinned
        yield f"upstream.file: {upstream.file[:80]!r} is no name of a file"
    if not _relative(upstream.source_root):
        yield f"upstream.source_root: {upstream.source_root!r} leads out of the repository"
    if not REPOSITORY.fullmatch(upstream.repository):
        yield f"upstream.repository: {upstream.repository!r} is no http(s) URL"
    yield from (f"upstream.modules: {name!r} is no import name" for name in upstream.modules if not name.isidentifier())


def _claims(path: str, claims: tuple[str, ...]) -> Iterator[str]:
    for claim in claims:
        if not CLAIM.fullmatch(claim) or claim in TAKEN:
            yield f"{path}: {claim!r} is no claim such as MEMORY_SAVE_VERIFIED, or a word of the verdicts"


def _targets(definition: Definition) -> Iterator[str]:
    for name, target in definition.targets.items():
        path = f"targets.{name}"
        if not 0 < target.timeout_s <= LONGEST:
            yield f"{path}.timeout_s: {target.timeout_s!r} is not between 0 and {LONGEST:.0f} s (a month)"
        if not target.gpus <= MOST_GPUS:
            yield f"{path}.gpus: more than {MOST_GPUS}"
        if not target.ranks <= MOST_RANKS:
            yield f"{path}.ranks: more than {MOST_RANKS}"
        if not 1 <= target.processes <= MOST_RANKS:
            yield f"{path}.processes: {target.processes!r} is not between 1 and {MOST_RANKS}"
        if not 0 <= target.gpu_memory_gib <= MOST_MEMORY_GIB:
            yield f"{path}.gpu_memory_gib: {target.gpu_memory_gib!r} is no number of GiB"
        yield from _claims(f"{path}.claims", tuple(claim for claim in target.claims if claim != BITWISE_IDENTICAL))
        yield from _claims(f"{path}.claims_executed", target.claims_executed)


def _environments(definition: Definition) -> Iterator[str]:
    for name, built in definition.environments.items():
        yield from (
            f"environments.{name}.files.{package}: no name of a package"
            for package in built.files
            if not PACKAGE.fullmatch(package)
        )


def errors(definition: Definition) -> list[str]:
    """Say which values no reader may use as they are."""
    return [*_upstream(definition), *_targets(definition), *_environments(definition)]
