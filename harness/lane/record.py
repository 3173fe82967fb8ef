"""The record of one lane: the lines of its contract, the modules that it loaded, and its verdict."""

from collections.abc import Iterable
from dataclasses import dataclass

from harness.core.words import Evidence, LaneName, LaneVerdict, Role
from harness.host.gpus import Gpu
from harness.host.host import Host

#: Characters of a name at most: names stand in tables, placeholders and sentences.
LONGEST_NAME = 200


@dataclass(frozen=True)
class TargetLine:
    """The lane's target, evidence and device."""

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
    """One check; if it was not judged, `ok` is None and `reason` says why."""

    name: str
    role: Role
    ok: bool | None
    reason: str = ""
    seconds: float = 0.0  # of its setup, call and teardown


def check_names(checks: Iterable[CheckLine], role: Role, *, ok: bool) -> tuple[str, ...]:
    """Name the checks of one role that were right (`ok`), or those that were wrong."""
    return tuple(check.name for check in checks if check.role == role and check.ok is ok)


@dataclass(frozen=True)
class FigureLine:
    """A measured value that is not judged; `spread` is in the same unit, or None."""

    name: str
    value: object
    unit: str = ""
    spread: object = None


@dataclass(frozen=True)
class OutputLine:
    """One tensor by its hash, which is compared between the lanes if it `must_match`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    must_match: bool


@dataclass(frozen=True)
class LaneRecord:
    """The results of one lane."""

    verdict: LaneVerdict  # of its script and its contract
    reason: str  # empty only for a verdict that needs none
    exit_status: int  # of the script; negative for a signal
    seconds: float  # wall time of both files, without the wait for its GPUs
    peak_memory: int  # of its largest process, in bytes
    left_behind: int  # processes that outlived it and were killed
    tree: str  # the sha256 of its tree
    device: str  # as the contract names it
    upstream: tuple[UpstreamLine, ...] = ()  # the modules under test that it loaded
    checks: tuple[CheckLine, ...] = ()  # in their order
    figures: tuple[FigureLine, ...] = ()  # likewise
    outputs: tuple[OutputLine, ...] = ()  # likewise
    claims: tuple[str, ...] = ()  # likewise, each once
    waited: float = 0.0  # seconds of the wait until no other lane used its GPUs
    script: str = ""  # the sentinel of reproduce.py
    printed: str = ""  # its standard output, 4096 bytes at most

    def figure(self, name: str) -> FigureLine | None:
        return next((line for line in self.figures if line.name == name), None)


@dataclass(frozen=True)
class LogRecord:
    """The log beside the receipt, and its hash."""

    file: str
    sha256: str


@dataclass(frozen=True)
class LaneEnd:
    """One lane that ended: enough to judge it and to write the receipt without another run."""

    key: str  # of its task
    task: str  # its name, for people
    lane: LaneName
    started: str  # the time, in UTC
    seconds: float  # for which its cores and GPUs were taken, from its start until its log was written
    place: str  # ``gpu 0``, ``gpus 0,1`` or ``cpu``
    host: Host  # on which it ran
    gpus: tuple[Gpu, ...]  # of the host, that it had
    version: str  # of the tree
    tree: str  # the sha256 of the pristine tree
    patch: str  # the name of the patch's file; empty in the pristine lane
    record: LaneRecord | None  # scrubbed; None if the lane could not begin, since the patch does not apply
    stale: str = ""  # why the patch does not apply
    log: LogRecord | None = None  # the scrubbed log in the run folder, if there is one

    @property
    def verdict(self) -> LaneVerdict | None:
        return self.record.verdict if self.record else None
