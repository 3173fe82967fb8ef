"""The end of a lane, as the journal keeps it: enough to judge and to write the receipt without running it again."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.cache import Cache
from harness.host import Gpu
from harness.lane import LaneResult
from harness.receipt import LaneRecord, LogRecord
from harness.transcript import TargetLine, Transcript
from harness.tree import CONTENT, Tree
from harness.words import Evidence, LaneName


@dataclass(frozen=True)
class LaneEnd:
    """One lane that ended.

    Attributes:
        key: of its task.
        task: its name, for people.
        target: what it was about.
        evidence: how it was seen.
        lane: which tree it ran on.
        number: which repetition it is.
        started: when, in UTC.
        seconds: while its GPU or core was taken, from its start until its log was written.
        place: where it ran: ``gpu 0`` or ``cpu``.
        gpu: that GPU's name and compute capability, both empty on the cores.
        version: of the tree.
        tree_key: the tree's name in the cache.
        record: what it showed; None where it could not begin, since the patch does not apply.
        stale: why the patch does not apply.
        log: the log beside the journal; None where there is none.

    """

    key: str
    task: str
    target: str
    evidence: Evidence
    lane: LaneName
    number: int
    started: str
    seconds: float
    place: str
    gpu: tuple[str, str]
    version: str
    tree_key: str
    record: LaneRecord | None
    stale: str = ""
    log: LogRecord | None = None

    @property
    def gpus(self) -> tuple[Gpu, ...]:
        """The GPU that it ran on, as a host lists its own."""
        name, capability = self.gpu
        if not name:
            return ()
        major, minor = capability.split(".")
        return (Gpu(name, (int(major), int(minor))),)


def result(end: LaneEnd, cache: Cache, night: Path) -> LaneResult | None:
    """Return what the lane showed the way `lane.run` does; None where it could not begin."""
    record = end.record
    if record is None:
        return None
    said = Transcript(
        reason=record.reason,
        target=TargetLine(end.target, end.evidence, record.device) if record.device else None,
        upstream=record.upstream,
        checks=record.checks,
        figures=record.figures,
        outputs=record.outputs,
        claims=record.claims,
    )
    folder = cache.entry("patched" if end.lane == LaneName.PATCHED else "trees", end.tree_key) / CONTENT
    return LaneResult(
        name=end.lane,
        verdict=record.verdict,
        reason=record.reason,
        transcript=said,
        tree=Tree(folder, "", {}, record.tree, end.version, end.tree_key),
        status=record.exit_status,
        seconds=record.seconds,
        peak_memory=record.peak_memory,
        left_behind=record.left_behind,
        log=night / end.log.file if end.log else Path("no log"),
    )
