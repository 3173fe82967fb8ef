"""Pruning the cache: what nobody has used for a while is removed, and can be fetched or built again."""

from __future__ import annotations

import time
from dataclasses import dataclass

from harness.core import files
from harness.core.cache import Cache

#: The folders of the cache whose entries are pruned, with what an entry is.
KINDS = {
    "runs": "run folders of `run` and `versions`",
    "mutate": "journals and logs of `mutate`",
    "jit": "JIT results of lanes",
    "compiled": "bytecode of wheels",
    "trees": "trees, with and without patches",
    "dependencies": "dependency sets",
    "unpacked": "unpacked wheels",
    "environments": "built environments",
    "git": "clones",
    "downloads": "downloads",
}
DAY = 24 * 3600.0


@dataclass(frozen=True)
class Pruned:
    """What was removed of one kind: how many entries, and how many bytes no entry shares."""

    kind: str
    entries: int
    size: int


def prune(cache: Cache, days: float, *, dry_run: bool = False) -> list[Pruned]:
    """Remove the entries that were not used for `days` days; `dry_run` only says which those are."""
    cache.sweep()
    oldest, found = time.time() - days * DAY, []
    for kind in KINDS:
        entries = [path for path in sorted((cache.root / kind).glob("*")) if path.lstat().st_mtime < oldest]
        size = 0
        for entry in entries:
            with cache.lock(f"{kind}-{entry.name}"):
                size += sum(one.st_size for _, one in files.walk(entry) if one and one.st_nlink == 1)  # others stay
                if not dry_run:
                    files.remove_tree(entry)
        found.append(Pruned(kind, len(entries), size))
    return found
