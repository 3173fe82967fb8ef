"""What a cell's lanes need, for tests whose lanes are no processes: nothing of it lies anywhere."""

from __future__ import annotations

from pathlib import Path

from harness.core.cache import Cache
from harness.core.seal import Layout, Seal
from harness.schedule.lane_runner import Prepared
from harness.upstream.dependencies import DependencySet
from harness.upstream.tree import Tree


def nothing(version: str) -> Prepared:
    """Return a cell's layout whose trees are empty."""
    layout = Layout(Cache(Path()), "trees", "", lambda _: None, "nothing")
    tree = Tree(Path(), "", {}, "", version, "", layout, Seal({}, {}))
    return Prepared(tree, tree, "fix.patch", "", (), DependencySet("default", ()), layout)
