"""Which packs a change of an upstream concerns, by the files that it touches."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import PurePosixPath

from harness.pack.model import Definition, Pack


def paths(definition: Definition) -> tuple[str, ...]:
    """List the files of the upstream repository that a pack is about; a folder ends with a slash.

    They are those that its targets load; where it names none, because it has no patch, the modules under test.
    """
    loads = dict.fromkeys(path for target in definition.targets.values() for path in target.loads)
    if loads:
        return tuple(loads)
    root = f"{definition.upstream.source_root}/".lstrip("/")
    modules = [f"{root}{name.replace('.', '/')}" for name in definition.upstream.modules]
    return tuple(path for module in modules for path in (f"{module}.py", f"{module}/"))


def concerned(packs: Iterable[Pack], changed: Iterable[str]) -> list[Pack]:
    """Return the packs that are about one of these files, by their paths from the repository's root.

    A pack of compiled code is none of them: a checkout is judged without being built, and cannot be imported.
    """
    files = {str(PurePosixPath(line)) for line in changed if line}
    found = []
    for pack in packs:
        about = paths(pack.definition)
        folders = tuple(path for path in about if path.endswith("/"))
        touched = not files.isdisjoint(about) or any(file.startswith(folders) for file in files)
        if touched and not pack.definition.upstream.is_compiled:
            found.append(pack)
    return found
