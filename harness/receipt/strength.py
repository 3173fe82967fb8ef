"""How strong a verdict is: the wrong fixes (mutants) that a pack's checks were shown, and the fate of each.

The identity of a wrong fix is the content of the tree that it makes, not its text.

The record lies beside the receipt of its target, which another command makes at another time. The record of unseen
wrong fixes speaks of the checks of its day, and is never stale. A later set replaces it.
"""

import datetime as dt
import functools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

from harness.core import Evidence, HarnessError, files
from harness.core.structure import Form
from harness.pack import Pack, judges, patch_text
from harness.receipt import receipt, staleness
from harness.receipt.receipt import FIRST_SIGHT, STRENGTH, Hashed

SCHEMA = 1
AGAIN = "runner.py mutate --record"
SLUG = re.compile(r"[^\w.-]+")
#: The folder, in each folder of wrong fixes, for patches on the release itself. The others apply on top of fix.patch.
WHOLE = "whole"


class Origin(StrEnum):
    """Who made a mutant: a person who knew the checks, a person who had not read them, or the operators."""

    OWN = "own"
    UNSEEN = "unseen"
    GENERATED = "generated"


#: The folders of the handwritten mutants.
FOLDERS = {Origin.OWN: "mutants", Origin.UNSEEN: "mutants/unseen"}


@dataclass(frozen=True)
class Mutant:
    """One wrong fix."""

    name: str  # the same in every run: the stem of the file, or the place, the operator and the edit
    origin: Origin
    operator: str  # of a generated mutant, else empty
    patch: str  # the text, with the line before the diff
    sha256: str = ""  # of what it makes of the release, or of its text where index lines are abbreviated
    equivalence: str = ""  # why it is trivially the fix itself, or empty
    path: Path = Path()  # of a handwritten mutant
    is_whole: bool = False  # whether it is a patch on the release, and not on fix.patch
    release_patch: str = ""  # of a generated mutant: the patch on the release

    @property
    def why(self) -> str:
        """The line before its diff: why it is wrong."""
        return self.patch.partition("diff --git ")[0].strip()

    @property
    def slug(self) -> str:
        """A short name for files."""
        if self.origin in FOLDERS:
            return f"{self.origin}-{SLUG.sub('_', self.name)}"
        place = SLUG.sub("_", self.name.partition(": ")[0].rpartition("/")[2])
        return f"{place}-{files.key_of(self.name)[:8]}"


@functools.lru_cache(maxsize=256)  # each target of a pack asks for all of them
def _identity(fix: str, text: str, *, is_whole: bool) -> str:
    return patch_text.result_hash(*([] if is_whole else [fix]), text) or judges.patch_meaning(text)


def handwritten(pack: Pack, origin: Origin) -> list[Mutant]:
    """Read the handwritten mutants of one origin, in the order of their names. Bytes that are no UTF-8 are replaced."""
    fix = pack.patch.read_text(encoding="utf-8", errors="replace") if pack.patch.exists() else ""
    folder, mutants = pack.folder / FOLDERS[origin], []
    for path in sorted([*folder.glob("*.patch"), *folder.glob(f"{WHOLE}/*.patch")], key=lambda path: path.stem):
        text, is_whole = path.read_text(encoding="utf-8", errors="replace"), path.parent != folder
        sha256 = _identity(fix, text, is_whole=is_whole)
        mutants.append(Mutant(path.stem, origin, "", text, sha256, path=path, is_whole=is_whole))
    return mutants


def identities(pack: Pack, origin: Origin = Origin.OWN) -> dict[str, str]:
    """Map the names of the handwritten mutants of one origin to the sha256 of what they make."""
    return {mutant.name: mutant.sha256 for mutant in handwritten(pack, origin)}


class Fate(StrEnum):
    """The fate of a wrong fix; `elsewhere`: this target does not run its code, and another target judges it."""

    SURVIVED = "survived"
    UNJUDGED = "unjudged"
    EQUIVALENT = "equivalent"
    ELSEWHERE = "elsewhere"
    KILLED = "killed"


def _has_begun(day: str) -> bool:
    """Whether this ISO date has begun somewhere on Earth."""
    return dt.date.fromisoformat(day) <= dt.datetime.now(dt.UTC).date() + dt.timedelta(days=1)


#: The fates of wrong fixes that no check refused.
OPEN = frozenset({Fate.SURVIVED, Fate.UNJUDGED})
#: The fates of wrong fixes that this target cannot judge.
NOT_JUDGED_HERE = frozenset({Fate.EQUIVALENT, Fate.ELSEWHERE})


@dataclass(frozen=True)
class MutantRecord:
    """One wrong fix, and its fate."""

    name: str
    origin: str  # `own` (written by a person), `generated`, or `unseen` (by a person who had not read the checks)
    operator: str  # of a generated wrong fix; else empty
    why: str  # the line before its diff
    sha256: str  # of what it makes of the release, as `_identity` says
    fate: Fate
    by: tuple[str, ...] = ()  # the checks that were wrong and killed it
    #: why it is unjudged, equivalent or judged elsewhere, or how it was killed without a wrong check
    reason: str = ""
    #: why the comparison of the lanes refuses a wrong fix that the checks let pass; empty where it does not
    refused: str = ""
    listed: bool = False  # in mutants/equivalent.toml, as equivalent or as judged elsewhere
    seconds: float = 0.0  # of its lane
    date: str = ""  # of its lane, where that ran for an earlier record; else empty


@dataclass(frozen=True)
class Count:
    """How many wrong fixes were killed, out of those (`of`) that this target can judge; the others by their fates."""

    killed: int
    of: int
    survived: int
    unjudged: int
    equivalent: int
    elsewhere: int = 0

    def __str__(self) -> str:
        return f"{self.killed} of {self.of}"


@dataclass(frozen=True)
class Strength:
    """A pack's strength on one target.

    `measured_at` is the commit whose checks were measured, where checks moved since. `generated` and `seed` are the
    size and the seed of the sample. `upstream` is the sha256 of the release.
    """

    schema: Annotated[int, Form(f"{SCHEMA}, which this runner knows", SCHEMA.__eq__)]
    pack: str
    target: str
    evidence: Evidence
    date: Annotated[str, Form("a day that has begun", _has_begun)]
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

    def __post_init__(self) -> None:
        if (self.own, self.made) != counts(self.mutants):
            raise ValueError("its numbers are not those of its mutants")

    @property
    def whole(self) -> Count:
        """The counts of own and generated wrong fixes together."""
        return count(self.mutants)

    @property
    def name(self) -> str:
        """The file's name."""
        return f"{FIRST_SIGHT if self.is_first_sight else STRENGTH}{self.target}.{self.evidence}.json"

    @property
    def is_first_sight(self) -> bool:
        """Whether the record is about unseen wrong fixes."""
        return bool(self.mutants) and all(mutant.origin == Origin.UNSEEN for mutant in self.mutants)


def count(mutants: Iterable[MutantRecord]) -> Count:
    """Count the fates of wrong fixes."""
    fates = [mutant.fate for mutant in mutants]
    number = {str(fate): fates.count(fate) for fate in Fate}
    return Count(of=sum(fate not in NOT_JUDGED_HERE for fate in fates), **number)


def counts(mutants: Sequence[MutantRecord]) -> tuple[Count, Count]:
    """Count the fates of handwritten wrong fixes, and those of generated ones."""
    made = count(mutant for mutant in mutants if mutant.origin == Origin.GENERATED)
    return count(mutant for mutant in mutants if mutant.origin != Origin.GENERATED), made


def load(path: Path) -> Strength:
    """Load a record, or raise HarnessError that names the file and every error in it."""
    record = receipt.load_as(path, Strength, AGAIN)
    if (record.pack, record.name) != (path.parent.parent.name, path.name):
        text = f"it speaks of {record.pack} {record.target} ({record.evidence})"
        raise HarnessError(f"{path.name}: {text}. Next: {AGAIN}")
    return record


def find(pack: Pack, target: str, evidence: str, kind: str = STRENGTH) -> Strength | None:
    """Return the record of one target with that evidence; None where it is missing or cannot be read."""
    path = pack.folder / "receipts" / f"{kind}{target}.{evidence}.json"
    try:
        return load(path) if path.exists() else None
    except HarnessError:  # `check` says why
        return None


def changes(pack: Pack, strength: Strength) -> list[str]:
    """Say which of the checks and fix.patch changed since; a record that names its commit speaks of its own checks."""
    is_changed = not strength.measured_at and judges.changed(pack, strength.probe.sha256, strength.probe.meaning)
    is_patch_changed = staleness.patch_changed(pack.patch, strength.patch)
    return [judges.CHANGED] * is_changed + [staleness.PATCH_CHANGED] * is_patch_changed


def stale(pack: Pack, strength: Strength) -> list[str]:
    """Say why a record is STALE; empty where it is fresh."""
    recorded = {mutant.name: mutant.sha256 for mutant in strength.mutants if mutant.origin == Origin.OWN}
    settings, target = pack.definition.strength, pack.definition.targets.get(strength.target)
    reasons = {
        "the pinned release changed": strength.upstream != pack.definition.upstream.sha256,
        "its own wrong fixes changed": recorded != identities(pack),
        "pack.toml states another sample": (settings.seed, settings.generated) != (strength.seed, strength.generated),
        f"pack.toml lists no {strength.evidence} evidence for {strength.target}": (
            target is None or strength.evidence not in target.evidence
        ),
    }
    return changes(pack, strength) + [reason for reason, holds in reasons.items() if holds]


def match_names(pack: Pack, recorded: Strength, origin: Origin) -> list[tuple[str, str]]:
    """Pair the names of a record's wrong fixes with the names of the same ones among the handwritten of one origin.

    They are the same where they make the same of the release. Once fix.patch changed, equal names count, too.
    """
    present = identities(pack, origin)
    by_name = staleness.patch_changed(pack.patch, recorded.patch)
    return [
        (mutant.name, name)
        for mutant in recorded.mutants
        for name, sha256 in present.items()
        if mutant.sha256 == sha256 or (by_name and mutant.name == name)
    ]


def summary(pack: Pack, target: str, evidence: str) -> str:
    """Write how many wrong fixes were refused, such as ``38 of 40, 2026-11-21; 7 of 10 at first sight``.

    It says STALE only for reasons that a bundle shows: the pack's own wrong fixes are no part of a bundle. The figure
    at first sight cannot be measured again: where none has that evidence, the strongest other one stands there.
    """
    record = find(pack, target, evidence)
    text = "not measured" if pack.definition.has_patch else "no patch"
    if record:
        elsewhere = f" (+{record.whole.elsewhere} elsewhere)" if record.whole.elsewhere else ""
        text = f"{record.whole}{elsewhere}, {record.date}"
        text += f" at commit {record.measured_at[:12]}" if record.measured_at else ""
        text += " STALE" if changes(pack, record) else ""
    words = sorted(Evidence, key=lambda word: word != evidence) if evidence else []
    first_sight = next((record for word in words if (record := find(pack, target, word, FIRST_SIGHT))), None)
    if first_sight:
        evidence_note = "" if first_sight.evidence == evidence else f" ({first_sight.evidence})"
        text += f"; {first_sight.whole} at first sight{evidence_note}"
    return text
