"""What one lane showed: the lines of its contract, the modules that it loaded, and the record that receipts keep."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import Evidence, LaneVerdict, Role

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
