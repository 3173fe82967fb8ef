"""What one lane showed: the one record that is judged, journalled and kept in receipts."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import LaneVerdict
from harness.lane.transcript import CheckLine, FigureLine, OutputLine, UpstreamLine


@dataclass(frozen=True)
class LaneRecord:
    """What one lane showed.

    Attributes:
        verdict: of its script and its contract.
        reason: empty only behind a verdict that needs none.
        exit_status: of the probe; negative for a signal.
        seconds: wall time of the probe, without what it waited for its GPU.
        peak_memory: of its largest process, in bytes.
        left_behind: processes that outlived the probe and were killed.
        tree: the sha256 of the tree it ran on.
        device: as the probe names it.
        upstream: the modules under test that it loaded.
        checks: in the order in which it printed them.
        figures: likewise.
        outputs: likewise.
        claims: likewise, each once.
        script: what reproduce.py said; empty of a probe.
        printed: its standard output, 4096 bytes at most; empty where an older runner recorded none.
        waited: seconds in which it waited until no other lane used its GPU.

    """

    verdict: LaneVerdict
    reason: str
    exit_status: int
    seconds: float
    peak_memory: int
    left_behind: int
    tree: str
    device: str
    upstream: tuple[UpstreamLine, ...] = ()
    checks: tuple[CheckLine, ...] = ()
    figures: tuple[FigureLine, ...] = ()
    outputs: tuple[OutputLine, ...] = ()
    claims: tuple[str, ...] = ()
    waited: float = 0.0
    script: str = ""
    printed: str = ""

    def figure(self, name: str) -> FigureLine | None:
        """Return a figure by its name; None where the lane printed none."""
        return next((line for line in self.figures if line.name == name), None)
