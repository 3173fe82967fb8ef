"""What one lane showed: the lines of its contract, the modules that it loaded, and the record that receipts keep."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import Evidence, LaneName, LaneVerdict, Role
from harness.host.gpus import Gpu

#: Characters of a name, which stands in tables, placeholders and sentences.
LONGEST_NAME = 200


@dataclass(frozen=True)
class TargetLine:
    """What the lane judged, how, and on what device."""

    target: str
    evidence: Evidence
    device: str


@dataclass(frozen=True)
class UpstreamLine:
    """One module under test, as the lane loaded it."""

    module: str
    file: str
    sha256: str


@dataclass(frozen=True)
class CheckLine:
    """One check: `ok` is None where it was not judged, and then `reason` says why."""

    name: str
    role: Role
    ok: bool | None
    measured: object = None
    tolerance: object = None
    unit: str = ""
    reason: str = ""


@dataclass(frozen=True)
class FigureLine:
    """A measured value that nobody judges; `spread` in the same unit, or None."""

    name: str
    value: object
    unit: str = ""
    spread: object = None


@dataclass(frozen=True)
class OutputLine:
    """One tensor by its hash, compared between the lanes where `must_match` says so."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    must_match: bool


@dataclass(frozen=True)
class LaneRecord:
    """What one lane showed.

    Attributes:
        verdict: of its script and its contract.
        reason: empty only behind a verdict that needs none.
        exit_status: of the script; negative for a signal.
        seconds: wall time of both files, without what it waited for its GPU.
        peak_memory: of its largest process, in bytes.
        left_behind: processes that outlived it and were killed.
        tree: the sha256 of the tree it ran on.
        device: as the contract names it.
        upstream: the modules under test that it loaded.
        checks: in their order.
        figures: likewise.
        outputs: likewise.
        claims: likewise, each once.
        script: what reproduce.py said; empty where an older runner recorded none.
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


@dataclass(frozen=True)
class LogRecord:
    """The log beside the receipt, and its hash."""

    file: str
    sha256: str


@dataclass(frozen=True)
class LaneEnd:
    """One lane that ended: enough to judge and to write the receipt without running it again.

    Attributes:
        key: of its task.
        task: its name, for people.
        target: what it was about.
        evidence: how it was seen.
        lane: which tree it ran on.
        number: which repetition it is.
        started: when, in UTC.
        seconds: while its cores and GPUs were taken, from its start until its log was written.
        place: where it ran: ``gpu 0``, ``gpus 0,1`` or ``cpu``.
        gpus: that it had.
        version: of the tree.
        tree: the sha256 of the pristine tree.
        patch: the name of the patch's file; empty in the pristine lane.
        record: what it showed, scrubbed; None where it could not begin, since the patch does not apply.
        stale: why the patch does not apply.
        log: the scrubbed log in the run folder; None where there is none.

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
    gpus: tuple[Gpu, ...]
    version: str
    tree: str
    patch: str
    record: LaneRecord | None
    stale: str = ""
    log: LogRecord | None = None

    @property
    def verdict(self) -> LaneVerdict | None:
        """The lane's verdict; None where it could not begin."""
        return self.record.verdict if self.record else None
