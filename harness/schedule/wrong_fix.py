"""What a lane on a wrong fix gets of the right one's, and what goes when it is over: a mutant is run once."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.core import seal
from harness.core.cache import Cache
from harness.host.host import Host
from harness.lane import lane
from harness.lane.lane import Lane
from harness.upstream import tree
from harness.upstream.tree import Tree

#: The caches whose keys hash what was compiled - the source with all that it refers to, options, compiler, target -
#: so that a result of the right fix is that of any tree with the same kernel.
LENT = ("triton", "tilelang", "inductor", "cuda")
#: How Triton's files begin that name the other files of one kernel, by their whole paths.
GROUP = "__grp__"


def _copy(source: str, target: str) -> str:
    """Copy a file; write it anew where it names the folder that it lies in. A link would break the source's seal."""
    old, new = Path(source), Path(target)
    if old.name.startswith(GROUP):
        text = old.read_text(encoding="utf-8")
        new.write_text(text.replace(str(old.parents[0]), str(new.parents[0])), encoding="utf-8")
    else:
        shutil.copy2(old, new)
    return target


def _lend(cache: Cache, right: str, wrong: str) -> None:
    """Fill the JIT caches of a lane that has none with those of another, if these are sealed."""
    source, target = cache.entry("jit", right), cache.entry("jit", wrong)
    if target.exists() or not source.is_dir() or not seal.kept(cache, "jit", right, source):
        return
    for name in (one for one in LENT if (source / one).is_dir()):
        shutil.copytree(source / name, target / name, copy_function=_copy)
    target.mkdir(parents=True, exist_ok=True)
    seal.keep(cache, "jit", wrong, target)


@contextmanager
def lent(cache: Cache, host: Host, wrong: Lane, like: Tree | None) -> Iterator[None]:
    """Let a lane on a wrong fix begin with the JIT results of the right one; remove its own, and its tree, behind it.

    What torch's C++ extensions build is not lent: ninja goes by the times of files.
    `like` is the tree with the right fix; None where it cannot be laid out.
    """
    own = lane.kept_key(wrong, host)
    seal.forget(cache, "jit", own, cache.entry("jit", own))  # of a runner that was killed meanwhile
    try:
        if like is not None:
            _lend(cache, lane.kept_key(replace(wrong, tree=like), host), own)
        yield
    finally:
        seal.forget(cache, "jit", own, cache.entry("jit", own))
        seal.forget(cache, tree.KIND, wrong.tree.key, cache.entry(tree.KIND, wrong.tree.key))
