"""Cells, the subjects of verdicts."""

from dataclasses import dataclass
from pathlib import Path

from harness.core.words import Evidence, LaneName, Verdict
from harness.pack.model import Pack, Target
from harness.upstream.source import Source, SourceKind

BOTH_LANES = (LaneName.PRISTINE, LaneName.PATCHED)


def pack_lanes(pack: Pack) -> tuple[LaneName, ...]:
    """Return the lanes of a pack's verdict: a pack without a patch has the pristine one alone."""
    return BOTH_LANES if pack.definition.has_patch else BOTH_LANES[:1]


@dataclass(frozen=True)
class Cell:
    """One pack on one target, judged on one tree with one dependency set."""

    pack: Pack
    target: str
    evidence: Evidence | None  # the strongest that this host can produce; None if it cannot judge the cell
    source: Source  # the origin of its tree
    #: the difference to the pack's cell on the pinned release: ``latest``, ``head``, a release; else empty
    column: str = ""
    version: str = ""  # of the release, if it is known before the tree is laid out
    dependencies: tuple[str, ...] = ()  # another dependency set than the target's own, as ``--with`` names it
    lanes: tuple[LaneName, ...] = BOTH_LANES  # the lanes that run
    timeout: float | None = None  # of each lane, in seconds; None: the target's own
    patch: Path | None = None  # None: the pack's own
    is_wrong_fix: bool = False  # whether `patch` is a wrong fix, whose tree is removed after its lane
    judges_all: bool = False  # whether the lane of a wrong fix goes on after a failed check
    about: tuple[str, ...] = ()  # the defect checks that the verdict is about, by name or glob; empty: all
    alone: bool = False  # whether no other lane may run at the same time, as for a retry
    environment: Path | None = None  # that of its target, if it has been built here
    reason: str = ""  # why the cell cannot be judged, if `evidence` is None
    verdict: Verdict = Verdict.UNSUPPORTED  # for that reason: UNSUPPORTED (by this host), UNAVAILABLE or ERROR
    seen: str = ""  # the day of the look-up of a moving release or commit; empty for others

    @property
    def name(self) -> str:
        """Its name in every output, the same from run to run."""
        return f"{self.pack.name}/{self.target}" + (f"@{self.column}" if self.column else "")

    @property
    def stated(self) -> Target:
        """The statements of pack.toml on its target; for an unlisted target, how to run it."""
        return self.pack.definition.stated(self.target)

    @property
    def is_listed(self) -> bool:
        """Whether pack.toml lists its target; nothing is expected of an unlisted GPU."""
        return self.target in self.pack.definition.targets

    @property
    def known_evidence(self) -> Evidence:
        """The evidence of a cell that this host can judge; ValueError: it cannot."""
        if self.evidence is None:
            raise ValueError(f"{self.name} cannot be judged here")
        return self.evidence

    @property
    def measures(self) -> bool:
        """Whether its figures of time and memory count, so that nothing may disturb it; not for a wrong fix."""
        tells_figures = self.evidence == Evidence.EXECUTED or self.target == "cpu"
        return self.stated.measures and tells_figures and not self.is_wrong_fix

    @property
    def gpu(self) -> str:
        """The architecture of the GPUs that its lanes need; empty if they run on the cores alone."""
        return self.target if self.evidence == Evidence.EXECUTED else ""

    @property
    def is_stated(self) -> bool:
        """Whether pack.toml states its verdict: on the pinned release with the target's own dependency set.

        Then its patched lane need not wait until the pristine lane has reproduced the bug.
        """
        return self.source.is_pinned and not self.dependencies and self.is_listed

    @property
    def may_be_unavailable(self) -> bool:
        """Whether a missing tree is no error: that of a moving origin, or of the head that pack.toml names."""
        at_head = self.source.kind == SourceKind.GIT and self.pack.definition.is_head(self.source.value)
        moves = self.source.kind == SourceKind.LATEST or (bool(self.seen) and not self.source.is_pinned)
        return moves or (at_head and not self.fits_exactly)

    @property
    def fits_exactly(self) -> bool:
        """Whether the patch was made for this tree: the pinned tree, or the tree of the cell's own patch."""
        return self.source.is_pinned or self.patch is not None
