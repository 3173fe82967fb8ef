"""Which targets a host can show, and by what evidence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from harness.core.errors import HarnessError
from harness.core.words import Evidence, is_target
from harness.host import eligibility
from harness.host.host import Gpu, Host
from harness.pack import load
from harness.pack.model import Pack, Target
from testing.workbench import Workbench

NO_GPU = Host("3.11.7", "2.13.0+cpu", "3.6.0")
H200 = replace(NO_GPU, gpus=(Gpu("NVIDIA H200", "9.0"),))


def _pack(workbench: Workbench, **targets: tuple[Evidence, ...]) -> Pack:
    loaded = load.load_pack(workbench.lay("01_confirmed"))
    definitions = {name: Target(evidence, ()) for name, evidence in targets.items()}
    return replace(loaded, definition=replace(loaded.definition, targets=definitions))


@pytest.mark.parametrize(
    ("capability", "target"),
    [("8.0", "sm_80"), ("8.9", "sm_89"), ("9.0", "sm_90a"), ("10.0", "sm_100a"), ("12.1", "sm_121a")],
)
def test_an_architecture_has_its_suffix_from_sm_90_on(capability: str, target: str) -> None:
    assert Gpu("a GPU", capability).target == target
    assert is_target(target)
    assert not is_target(target.removesuffix("a") if target.endswith("a") else f"{target}a")


def test_the_strongest_evidence_that_this_host_can_produce_is_taken(workbench: Workbench) -> None:
    pack = _pack(workbench, sm_90a=(Evidence.COMPILED, Evidence.EXECUTED), sm_100a=(Evidence.COMPILED,))
    assert [(planned.target, planned.evidence) for planned in eligibility.plan(pack, "all", NO_GPU)] == [
        ("sm_90a", Evidence.COMPILED),
        ("sm_100a", Evidence.COMPILED),
    ]
    assert eligibility.plan(pack, "sm_90a", H200)[0].evidence == Evidence.EXECUTED
    assert eligibility.plan(pack, "auto", H200)[0].target == "sm_90a"
    assert eligibility.plan(pack, "auto", NO_GPU)[0].reason == "this pack lists sm_90a, sm_100a"


def test_a_gpu_that_a_pack_does_not_list_is_judged_as_its_others_are(workbench: Workbench) -> None:
    pack = _pack(workbench, cpu=(Evidence.TRACED,), sm_90a=(Evidence.EXECUTED,))
    b200 = replace(NO_GPU, gpus=(Gpu("NVIDIA B200", "10.0"),))
    assert [(planned.target, planned.evidence) for planned in eligibility.plan(pack, "all", b200)] == [
        ("cpu", Evidence.TRACED),
        ("sm_100a", Evidence.EXECUTED),
    ]
    assert eligibility.plan(pack, "auto", b200)[0].evidence == Evidence.EXECUTED
    missing = eligibility.plan(pack, "sm_100a", H200)[0]
    assert (missing.evidence, missing.reason) == (None, "no sm_100a GPU here, and this pack lists cpu, sm_90a")


def test_what_is_only_compiled_for_gpus_is_compiled_for_another_too(workbench: Workbench) -> None:
    pack = _pack(workbench, sm_90a=(Evidence.COMPILED,))
    assert eligibility.plan(pack, "sm_100a", NO_GPU)[0].evidence == Evidence.COMPILED
    b200 = replace(NO_GPU, gpus=(Gpu("NVIDIA B200", "10.0"),))
    assert [planned.target for planned in eligibility.plan(pack, "all", b200)] == ["sm_90a"]


def test_an_unlisted_gpu_is_given_what_the_listed_one_needs(workbench: Workbench) -> None:
    pack = load.load_pack(workbench.lay("01_confirmed"))
    target = Target((Evidence.EXECUTED,), ("src/x.py",), ("CLAIM",), (), "other", gpus=2)
    pack = replace(pack, definition=replace(pack.definition, targets={"sm_90a": target}))
    stated = pack.definition.stated("sm_100a")
    assert (stated.dependencies, stated.gpus, stated.loads, stated.claims) == ("other", 2, (), ())


def test_one_gpu_is_enough_for_a_pack_that_takes_two(workbench: Workbench) -> None:
    pack = load.load_pack(workbench.lay("01_confirmed"))
    target = Target((Evidence.EXECUTED,), ("src/x.py",), gpus=2, ranks=2)
    pack = replace(pack, definition=replace(pack.definition, targets={"sm_90a": target}))
    assert eligibility.plan(pack, "auto", H200)[0].evidence == Evidence.EXECUTED
    assert [target.ranks_on(gpus) for gpus in (0, 1, 2)] == [2, 1, 2]
    assert replace(target, gpus=1).ranks_on(1) == 2, "these share a GPU"


def test_all_leaves_out_what_this_host_cannot_show_but_never_says_nothing(workbench: Workbench) -> None:
    pack = _pack(workbench, cpu=(Evidence.TRACED,), sm_90a=(Evidence.EXECUTED,))
    assert [planned.target for planned in eligibility.plan(pack, "all", NO_GPU)] == ["cpu"]
    (only,) = eligibility.plan(_pack_of_one(pack), "all", NO_GPU)
    assert (only.evidence, only.reason) == (None, "no sm_90a GPU here, and this pack judges sm_90a on a GPU alone")


def _pack_of_one(pack: Pack) -> Pack:
    targets = {"sm_90a": pack.definition.targets["sm_90a"]}
    return replace(pack, definition=replace(pack.definition, targets=targets))


def test_ranges_hold_for_local_versions_too(workbench: Workbench) -> None:
    pack = _pack(workbench, cpu=(Evidence.TRACED,))
    assert eligibility.plan(pack, "cpu", NO_GPU)[0].evidence == Evidence.TRACED
    old = eligibility.plan(pack, "cpu", replace(NO_GPU, torch="1.13.1+cu117"))[0]
    assert (old.evidence, old.reason) == (None, "torch 1.13.1+cu117 is outside the pack's range >=2")
    with pytest.raises(HarnessError, match="no target 'sm_90'"):
        eligibility.plan(pack, "sm_90", NO_GPU)
