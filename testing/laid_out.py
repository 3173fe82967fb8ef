"""Cells, and what their lanes need, for tests whose lanes are no processes: nothing of it lies anywhere."""

from __future__ import annotations

from pathlib import Path

from harness.core.cache import Cache
from harness.core.seal import Layout, Seal
from harness.host.host import Host
from harness.lane.cell import Cell
from harness.pack import load
from harness.schedule.lane_runner import Prepared
from harness.sweep import columns
from harness.upstream.dependencies import DependencySet
from harness.upstream.tree import Tree

#: A host without a GPU.
HOST = Host("3.11.7", "2.13.0+cpu", "3.6.0")


def cell(folder: Path) -> Cell:
    """Return the cell of a pack on the cores of `HOST`."""
    (one,) = columns.cells([(load.load_pack(folder), "cpu")], HOST, None)  # type: ignore[arg-type]
    return one


def nothing(version: str) -> Prepared:
    """Return a cell's layout whose trees are empty."""
    layout = Layout(Cache(Path()), "trees", "", lambda _: None, "nothing")
    tree = Tree(Path(), "", {}, "", version, "", layout, Seal({}, {}))
    return Prepared(tree, tree, "fix.patch", "", (), (), DependencySet("default", ()), layout)
