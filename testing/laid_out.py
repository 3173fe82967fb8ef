"""Cells, and what their lanes need, for tests whose lanes are no processes: nothing of it lies anywhere."""

from __future__ import annotations

from pathlib import Path

from harness.core.cache import Cache
from harness.core.seal import Layout
from harness.core.words import LaneName, LaneVerdict
from harness.host.host import Host
from harness.lane.cell import Cell
from harness.lane.results import LaneEnd, LaneRecord
from harness.pack import load
from harness.pack.requirements import DependencySet
from harness.schedule import selection
from harness.schedule.lane_runner import Prepared
from harness.upstream.tree import Tree

#: A host without a GPU.
HOST = Host("3.11.7", "2.13.0+cpu", "3.6.0")


def cell(folder: Path) -> Cell:
    """Return the cell of a pack on the cores of `HOST`."""
    (one,) = selection.sweep_cells([(load.load_pack(folder), "cpu")], HOST, None)  # type: ignore[arg-type]
    return one


def end(key: str, task: str, lane: LaneName, verdict: LaneVerdict, host: Host = HOST) -> LaneEnd:
    """Return the end of a lane on the cores of a host."""
    record = LaneRecord(verdict, "", 10, 1.0, 1, 0, "ab", "CPU")
    return LaneEnd(key, task, lane, "2026-01-01T00:00:00+00:00", 1.5, "cpu", host, (), "1.0", "tree", "", record)


def nothing(version: str) -> Prepared:
    """Return a cell's layout whose trees are empty."""
    layout = Layout(Cache(Path()), "trees", "", lambda _: None, "nothing")
    tree = Tree(Path(), "", {}, "", version, "", layout)
    return Prepared(tree, tree, "fix.patch", "", (), (), DependencySet("default", {}), layout)
