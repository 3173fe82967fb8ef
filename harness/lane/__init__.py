"""One lane in a process group of its own: its environment, its supervisor and its results."""

from harness.lane.cell import BOTH_LANES, Cell, pack_lanes
from harness.lane.results import FigureLine, LaneEnd, LaneRecord, LogRecord, check_names

__all__ = ["BOTH_LANES", "Cell", "FigureLine", "LaneEnd", "LaneRecord", "LogRecord", "check_names", "pack_lanes"]
