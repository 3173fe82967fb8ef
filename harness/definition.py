"""What a pack.toml states, as frozen dataclasses."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field

from harness.words import Evidence, Kind, Verdict


@dataclass(frozen=True)
class Upstream:
    """The accused project and the release that the pack is pinned to."""

    package: str
    version: str
    file: str
    sha256: str
    repository: str
    commit: str
    license: str
    modules: tuple[str, ...]
    source_root: str = ""


@dataclass(frozen=True)
class Head:
    """What upstream's default branch gives, at a named commit."""

    commit: str
    date: dt.date
    verdict: Verdict
    fixed_by: str = ""


@dataclass(frozen=True)
class Requires:
    """The ranges in which the runner's own interpreter, torch and triton must lie."""

    python: str
    torch: str
    triton: str = ""


@dataclass(frozen=True)
class Companion:
    """One wheel of a companion set: its version, and its sha256 per Python tag (``any``: every tag)."""

    version: str
    sha256: dict[str, str]

    def hash_for(self, tag: str) -> str | None:
        """Return the sha256 of the wheel for a Python tag such as ``cp311``, or None where there is none."""
        return self.sha256.get(tag, self.sha256.get("any"))


@dataclass(frozen=True)
class Target:
    """What the pinned release must give on one target.

    `exclusive` says that its lanes measure time or memory: a sweep lets nothing else run beside them on their GPU
    (on target cpu: on the host's cores). `environment` names what a script of the pack makes in the cache; the lanes
    run with its interpreter where it has been made, and with the runner's own elsewhere.
    """

    evidence: tuple[Evidence, ...]
    verdict: Verdict
    loads: tuple[str, ...]
    claims: tuple[str, ...] = ()
    claims_executed: tuple[str, ...] = ()
    companions: str = "default"
    timeout_s: float = 600.0
    exclusive: bool = False
    environment: str = ""

    def claims_of(self, evidence: Evidence | None) -> tuple[str, ...]:
        """Return the claims that both lanes must support: some need the GPU itself."""
        return self.claims + (self.claims_executed if evidence == Evidence.EXECUTED else ())


@dataclass(frozen=True)
class Definition:
    """A parsed pack.toml.

    `report_to` is the package whose project REPORT.md is for, where that is not the one whose tree is judged.
    """

    schema: int
    title: str
    kind: Kind
    leading_figure: str
    upstream: Upstream
    requires: Requires
    targets: dict[str, Target]
    head: Head | None = None
    fixed_in: str = ""
    report_to: str = ""
    threads: tuple[str, ...] = ()
    companions: dict[str, dict[str, Companion]] = field(default_factory=dict)

    @property
    def claims(self) -> tuple[str, ...]:
        """Every claim that a lane of this pack may print, on whatever target."""
        every = (claim for target in self.targets.values() for claim in target.claims_of(Evidence.EXECUTED))
        return tuple(dict.fromkeys(every))
