"""What kills a mutant, and what does not."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.words import LaneName, LaneVerdict, Role
from harness.lane.results import CheckLine, LaneEnd, LaneRecord, OutputLine
from harness.mutate import campaign
from harness.mutate.handwritten import Listed, ListedElsewhere
from harness.receipt.strength import Fate, MutantRecord, count
from testing.laid_out import HOST

PRISTINE = LaneRecord(
    LaneVerdict.BUG_REPRODUCED, "", 10, 1.0, 0, 0, "", "",
    checks=(CheckLine("bug", Role.DEFECT, ok=False), CheckLine("other", Role.CONTROL, ok=True)),
    outputs=(OutputLine("y", "float", (), "0", must_match=True),),
)  # fmt: skip


def _end(
    verdict: LaneVerdict, status: int, reason: str = "", checks: tuple[CheckLine, ...] = (), sha256: str = "0"
) -> LaneEnd:
    outputs = (OutputLine("y", "float", (), sha256, must_match=True),)
    record = LaneRecord(verdict, reason, status, 1.0, 0, 0, "", "", checks=checks, outputs=outputs)
    return LaneEnd("key", "task", LaneName.PATCHED, "", 1.0, "cpu", HOST, (), "1.0", "", "x", record)


MUTANT = MutantRecord("name", "own", "", "why", "0", Fate.UNJUDGED)
BUG, OTHER = CheckLine("bug", Role.DEFECT, ok=False), CheckLine("other", Role.CONTROL, ok=False)
RIGHT = (CheckLine("bug", Role.DEFECT, ok=True), CheckLine("other", Role.CONTROL, ok=True))


@pytest.mark.parametrize(
    ("end", "fate", "by"),
    [
        (_end(LaneVerdict.BUG_REPRODUCED, 10, "bug", (BUG,)), Fate.KILLED, ("bug",)),
        (_end(LaneVerdict.CONTROL_FAILED, 125, "other", (BUG, OTHER)), Fate.KILLED, ("bug", "other")),
        (_end(LaneVerdict.UNSUPPORTED, 125, "no such mode"), Fate.KILLED, ()),
        (_end(LaneVerdict.FIX_VALIDATED, 0, checks=RIGHT), Fate.SURVIVED, ()),
        (_end(LaneVerdict.ERROR, 125, "no verdict line"), Fate.UNJUDGED, ()),
        (_end(LaneVerdict.ERROR, -9, "timed out after 2 s"), Fate.UNJUDGED, ()),
        (_end(LaneVerdict.ERROR, 0, "scale.py was never loaded"), Fate.UNJUDGED, ()),
    ],
)
def test_only_a_failed_check_or_a_refused_mode_kills(end: LaneEnd, fate: Fate, by: tuple[str, ...]) -> None:
    found = campaign.fate_of_lane(MUTANT, PRISTINE, end)
    assert (found.fate, found.by, found.refused) == (fate, by, "")
    assert found.reason or fate in (Fate.SURVIVED, Fate.KILLED)


def test_what_the_comparison_alone_refuses_has_survived_the_checks() -> None:
    found = campaign.fate_of_lane(MUTANT, PRISTINE, _end(LaneVerdict.FIX_VALIDATED, 0, checks=RIGHT, sha256="1"))
    assert found.fate == Fate.SURVIVED
    assert found.refused == "PATCH_BREAKS: outputs differ from the unpatched lane's: y"


@pytest.mark.parametrize(
    ("verdict", "status", "again"),
    [
        (LaneVerdict.ERROR, 125, True),
        (LaneVerdict.ERROR, -11, True),
        (LaneVerdict.ERROR, 1, True),
        (LaneVerdict.ERROR, 0, True),  # the script ended well, and a rank of the contract hung
        (LaneVerdict.ERROR, 10, True),
        (LaneVerdict.CONTROL_FAILED, 125, False),
        (LaneVerdict.UNSUPPORTED, 125, False),
    ],
)
def test_what_says_nothing_is_run_again(verdict: LaneVerdict, status: int, again: bool) -> None:  # noqa: FBT001 - a case
    assert campaign.is_inconclusive(_end(verdict, status).record) is again


def test_a_listed_mutant_is_equivalent_until_it_is_killed() -> None:
    survivor, refused = replace(MUTANT, fate=Fate.SURVIVED), replace(MUTANT, fate=Fate.KILLED, by=("bug",))
    listed = Listed("name", "because", ("cpu",))
    assert listed.covers("cpu")
    assert not listed.covers("sm_90a")
    survived = campaign.apply_exemption(survivor, listed)
    assert (survived.fate, survived.reason, survived.listed, survived.why) == (Fate.EQUIVALENT, "because", True, "why")
    killed = campaign.apply_exemption(refused, listed)
    assert (killed.fate, killed.listed) == (Fate.KILLED, True)
    elsewhere = ListedElsewhere("name", "kernel", ("cpu",))
    assert campaign.apply_exemption(survivor, elsewhere).fate == Fate.ELSEWHERE
    assert campaign.apply_exemption(refused, elsewhere).fate == Fate.KILLED
    unlisted = campaign.apply_exemption(survivor, None)
    assert count([survived, killed, unlisted]).of == 2
    assert count([survived, killed, unlisted]).killed == 1
