"""How strong a verdict is: the record of the wrong fixes that a pack's probe was shown, and what it did with each.

It is a file of its own beside the receipt of its target, ``receipts/strength.TARGET.EVIDENCE.json``: it is made at
another time than the receipt, by another command, and a new receipt must not lose it.

Those of mutants/ are refused because checks were written until they were. What the probe does with wrong fixes that it
has not met is another figure, and has a file of its own, ``receipts/first_sight.TARGET.EVIDENCE.json``. It is of that
day's probe, so that it is never stale; a later set replaces it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass
from enum import StrEnum
from pathlib import Path

from harness.core.errors import HarnessError
from harness.core.words import Evidence
from harness.pack import judges
from harness.pack.model import Pack
from harness.receipt import receipt, staleness, wrong_fixes
from harness.receipt.receipt import FIRST_SIGHT, STRENGTH, Hashed

SCHEMA = 1
AGAIN = "runner.py mutate --record"
#: Said of wrong fixes in code that a target does not run.
NOT_RUN_HERE = "more in code that only another target runs"


class Fate(StrEnum):
    """What became of a wrong fix; `elsewhere`: its code is not run on this target, and judged on another."""

    SURVIVED = "survived"
    UNJUDGED = "unjudged"
    EQUIVALENT = "equivalent"
    ELSEWHERE = "elsewhere"
    KILLED = "killed"


#: The fates of wrong fixes that this target cannot judge.
NOT_JUDGED_HERE = frozenset({Fate.EQUIVALENT, Fate.ELSEWHERE})


@dataclass(frozen=True)
class MutantRecord:
    """One wrong fix, and what became of it."""

    name: str
    origin: str  # `own` (written by a person), `generated`, or `unseen` (by a person who had not read the probe)
    operator: str  # of a generated one; empty of others
    why: str  # the line before its diff
    sha256: str  # of what it makes of the release, as `wrong_fixes.identity` says
    fate: Fate
    by: tuple[str, ...] = ()  # the checks that were wrong and killed it
    #: why it is unjudged, equivalent or judged elsewhere, or how it was killed where no check says so
    reason: str = ""
    #: of a survivor of the probe alone: why the runner's comparison of the lanes refuses it; empty where it does not
    refused: str = ""
    listed: bool = False  # in mutants/equivalent.toml, as equivalent or as judged elsewhere
    seconds: float = 0.0  # of its lane
    date: str = ""  # of its lane, where that ran for an earlier record and was not run again; else empty


@dataclass(frozen=True)
class Count:
    """How many wrong fixes were killed, `of` those that this target can judge; `unjudged` of them said nothing."""

    killed: int
    of: int
    survived: int
    unjudged: int
    equivalent: int
    elsewhere: int = 0


@dataclass(frozen=True)
class Strength:
    """A pack's strength on one target.

    `measured_at` is the commit whose checks refused them, where these were moved since; `generated` and `seed` are
    those of the sample; `upstream` is the sha256 of the release.
    """

    schema: int
    pack: str
    target: str
    evidence: Evidence
    date: str
    seed: int
    generated: int
    own: Count
    made: Count
    probe: Hashed
    patch: Hashed
    upstream: str
    python: str
    torch: str
    triton: str
    gpu: str
    seconds: float
    command: str
    mutants: tuple[MutantRecord, ...]
    measured_at: str = ""

    @property
    def whole(self) -> Count:
        """Own and generated ones together."""
        return Count(*(sum(pair) for pair in zip(astuple(self.own), astuple(self.made), strict=True)))

    @property
    def name(self) -> str:
        """The file's name."""
        return file_name(self.target, self.evidence, FIRST_SIGHT if self.is_first_sight else STRENGTH)

    @property
    def is_first_sight(self) -> bool:
        """Whether it is of wrong fixes that the probe had not met before."""
        return bool(self.mutants) and all(one.origin == "unseen" for one in self.mutants)


def count(found: Iterable[MutantRecord]) -> Count:
    """Count the fates of wrong fixes."""
    fates = [one.fate for one in found]
    number = {str(fate): fates.count(fate) for fate in Fate}
    return Count(of=sum(fate not in NOT_JUDGED_HERE for fate in fates), **number)


def file_name(target: str, evidence: Evidence, kind: str = STRENGTH) -> str:
    """Return the name of the file of one target; `kind` is its beginning."""
    return f"{kind}{target}.{evidence}.json"


def load(path: Path) -> Strength:
    """Load a record, or raise HarnessError that names the file and every error in it."""
    found = receipt.load_as(path, Strength, AGAIN)
    if found.schema != SCHEMA:
        raise HarnessError(f"{path.name}: not of schema {SCHEMA}. Next: {AGAIN}")
    return found


def files_of(pack: Pack, kind: str = STRENGTH) -> list[Path]:
    """List the files of a pack's records; `kind` is their beginning."""
    return sorted((pack.folder / "receipts").glob(f"{kind}*.json"))


def find(pack: Pack, target: str, evidence: str, kind: str = STRENGTH) -> Strength | None:
    """Return the record of one target of a pack, seen in that way; None where there is none that can be read."""
    if not evidence:
        return None
    path = pack.folder / "receipts" / file_name(target, Evidence(evidence), kind)
    try:
        return load(path) if path.exists() else None
    except HarnessError:  # `check` says why
        return None


def at_first_sight(pack: Pack, target: str, evidence: str) -> Strength | None:
    """Return what a probe did on one target with wrong fixes that it had not met; None where nobody recorded it.

    Seen in that way, or else in the strongest other: it cannot be measured again, and is said wherever there is one.
    """
    ways = [Evidence(evidence), *(one for one in Evidence if one != evidence)] if evidence else []
    return next((found for one in ways if (found := find(pack, target, one, FIRST_SIGHT))), None)


def stale(pack: Pack, strength: Strength) -> list[str]:
    """Say why a record is STALE; nothing where it is fresh."""
    found = []
    if not strength.measured_at and judges.changed(pack, strength.probe.sha256, strength.probe.meaning):
        found.append(judges.CHANGED)  # what was carried forward from a commit speaks of that day's
    found += [staleness.PATCH_CHANGED] if staleness.changed(pack.patch, strength.patch) else []
    found += ["the pinned release changed"] if strength.upstream != pack.definition.upstream.sha256 else []
    recorded = {one.name: one.sha256 for one in strength.mutants if one.origin == "own"}
    found += ["its own wrong fixes changed"] if recorded != wrong_fixes.identities(pack) else []
    stated = pack.definition.strength
    wanted, had = (stated.seed, stated.generated), (strength.seed, strength.generated)
    found += ["pack.toml states another sample"] if wanted != had else []
    target = pack.definition.targets.get(strength.target)
    if target is None or strength.evidence not in target.evidence:
        found.append(f"pack.toml lists no {strength.evidence} evidence for {strength.target}")
    return found


def nothing(pack: Pack) -> str:
    """Say why there is no strength: it was not measured, or the pack has no patch that a wrong one could stand for."""
    return "not measured" if pack.definition.has_patch else "no patch"


def found_again(pack: Pack, recorded: Strength, folder: str) -> list[tuple[str, str]]:
    """Pair the names of a record's wrong fixes with those that they have in a folder of the pack.

    Each is found by what it makes of the release. With another fix.patch that is another thing, and its name counts.
    """
    there = wrong_fixes.identities(pack, folder)
    by_name = staleness.changed(pack.patch, recorded.patch)
    return [
        (one.name, name)
        for one in recorded.mutants
        for name, sha256 in there.items()
        if one.sha256 == sha256 or (by_name and one.name == name)
    ]


def still_open(pack: Pack, first: Strength, covered: Iterable[str] = ()) -> list[MutantRecord]:
    """List the wrong fixes that passed at first sight and stand neither in mutants/ nor among the `covered` names."""
    closed = {*covered, *(name for name, _ in found_again(pack, first, wrong_fixes.OWN))}
    passed = (one for one in first.mutants if one.fate in (Fate.SURVIVED, Fate.UNJUDGED))
    return [one for one in passed if one.name not in closed]


def summary(pack: Pack, target: str, evidence: str) -> str:
    """Write how many wrong fixes were refused, such as ``38 of 40, 2026-11-21; 7 of 10 at first sight``.

    It says STALE where that is so for a reason that a bundle shows; a pack's own wrong fixes are no part of one.
    """
    found, first = find(pack, target, evidence), at_first_sight(pack, target, evidence)
    said = nothing(pack)
    if found:
        elsewhere = f" (+{found.whole.elsewhere} elsewhere)" if found.whole.elsewhere else ""
        said = f"{found.whole.killed} of {found.whole.of}{elsewhere}, {found.date}"
        said += f" at commit {found.measured_at[:12]}" if found.measured_at else ""
        said += "" if {judges.CHANGED, staleness.PATCH_CHANGED}.isdisjoint(stale(pack, found)) else " STALE"
    if first:
        way = "" if first.evidence == evidence else f" ({first.evidence})"
        said += f"; {first.whole.killed} of {first.whole.of} at first sight{way}"
    return said
