"""The fate of a mutant: by its lane and the pristine lane, or by mutants/equivalent.toml."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import tomli

from harness.core import structure
from harness.core.errors import HarnessError
from harness.core.words import LaneVerdict, Verdict
from harness.lane.record import LaneEnd, LaneRecord
from harness.lane.script import STATUS
from harness.pack.model import Pack
from harness.receipt.strength import Fate, MutantRecord
from harness.verdict import pack_verdict

#: The fates of wrong fixes that no check refused.
OPEN = frozenset({Fate.SURVIVED, Fate.UNJUDGED})


@dataclass(frozen=True)
class Listed:
    """A mutant that need not be killed, since it is no wrong fix."""

    fate: ClassVar[Fate] = Fate.EQUIVALENT
    name: str
    reason: str
    targets: tuple[str, ...] = ()  # on which it is none; empty: all

    def covers(self, target: str) -> bool:
        return not self.targets or target in self.targets


@dataclass(frozen=True)
class ListedElsewhere(Listed):
    """A mutant in code that only other targets than these run."""

    fate: ClassVar[Fate] = Fate.ELSEWHERE


@dataclass(frozen=True)
class _File:
    equivalent: tuple[Listed, ...] = ()
    elsewhere: tuple[ListedElsewhere, ...] = ()


def exemptions(pack: Pack) -> list[Listed]:
    """Read mutants/equivalent.toml, if it is there.

    HarnessError is raised where it does not parse, an entry has no reason or names a target that pack.toml does not
    list, a mutant has two entries, or a mutant that is judged elsewhere has no target left.
    """
    path = pack.folder / "mutants/equivalent.toml"
    if not path.exists():
        return []
    place = f"{pack.name}/mutants/{path.name}"
    try:
        file = structure.structure(tomli.loads(path.read_text(encoding="utf-8")), _File)
    except ValueError as error:
        raise HarnessError(f"{place}: {error}. Next: see CONTRIBUTING.md, Wrong fixes") from None
    entries, targets = [*file.equivalent, *file.elsewhere], pack.definition.targets
    errors = [f"{entry.name}: no reason" for entry in entries if not entry.reason.strip()]
    errors += [f"{entry.name}: no target {name}" for entry in entries for name in entry.targets if name not in targets]
    errors += [
        f"{entry.name}: elsewhere: name the targets that do not run its code, and leave one that does"
        for entry in file.elsewhere
        if not entry.targets or not set(targets) - set(entry.targets)
    ]
    names = [entry.name for entry in entries]
    errors += [f"{name}: named twice" for name in sorted({name for name in names if names.count(name) > 1})]
    if errors:
        raise HarnessError(f"{place}: {'; '.join(errors)}")
    return entries


def is_inconclusive(record: LaneRecord | None) -> bool:
    """Whether a lane has to run again, alone: the host may be to blame for a crash, a time-out or a lack of memory.

    A lane that ended with the status of a verdict would end so again. UNSUPPORTED shares its status with a traceback.
    """
    conclusive = {STATUS[LaneVerdict.BUG_REPRODUCED], STATUS[LaneVerdict.FIX_VALIDATED]}
    return record is not None and record.verdict == LaneVerdict.ERROR and record.exit_status not in conclusive


def fate_of_lane(mutant: MutantRecord, pristine: LaneRecord | None, end: LaneEnd) -> MutantRecord:
    """Judge a mutant by its lane: a failed check kills it, and so does UNSUPPORTED, since the pristine tree was judged.

    A maintainer runs script and contract alone. A mutant that only the comparison of the two lanes refuses has
    therefore survived, and `refused` says so.
    """
    record = end.record
    if record is None:
        return replace(mutant, fate=Fate.UNJUDGED, reason=f"its patch does not apply: {end.stale}")
    mutant = replace(mutant, seconds=round(record.seconds, 3))
    failed = tuple(check.name for check in record.checks if check.ok is False)
    if not failed and record.script.startswith(LaneVerdict.BUG_REPRODUCED):
        return replace(mutant, fate=Fate.KILLED, by=("reproduce.py",))
    if record.verdict in (LaneVerdict.BUG_REPRODUCED, LaneVerdict.CONTROL_FAILED, LaneVerdict.FIX_INCOMPLETE):
        return replace(mutant, fate=Fate.KILLED, by=failed)
    if record.verdict == LaneVerdict.UNSUPPORTED:
        reason = f"UNSUPPORTED, which the pristine tree is not: {record.reason}"
        return replace(mutant, fate=Fate.KILLED, reason=reason)
    if record.verdict == LaneVerdict.ERROR:
        return replace(mutant, fate=Fate.UNJUDGED, reason=record.reason)
    judgement = pack_verdict.judge_lanes(pristine, record)
    refused = "" if judgement.verdict == Verdict.CONFIRMED else f"{judgement.verdict}: {judgement.reason}"
    return replace(mutant, fate=Fate.SURVIVED, refused=refused)


def apply_exemption(record: MutantRecord, exemption: Listed | None) -> MutantRecord:
    """Note that mutants/equivalent.toml lists a mutant, and take its fate and reason unless the mutant was killed."""
    if exemption is None:
        return record
    if record.fate in OPEN:
        record = replace(record, fate=exemption.fate, reason=exemption.reason)
    return replace(record, listed=True)
