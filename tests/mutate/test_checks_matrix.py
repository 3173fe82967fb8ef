"""`mutate --matrix`: which check refuses which wrong fix, and the cover that follows."""

from __future__ import annotations

import shutil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.mutate import output
from testing.workbench import REPOSITORY, Workbench


def test_each_wrong_fix_is_covered_twice_where_two_checks_refuse_it() -> None:
    refused = {"a": {"1", "2", "3"}, "b": {"1"}, "c": {"2", "3"}, "d": {"3"}, "e": {"4"}}
    assert output.cover(refused) == ["a", "c", "b", "e"]
    assert output.cover({}) == []


@given(st.dictionaries(st.text("abcdef", min_size=1, max_size=3), st.sets(st.integers(0, 9).map(str))))
def test_a_cover_loses_no_wrong_fix(refused: dict[str, set[str]]) -> None:
    chosen = output.cover(refused)
    for mutant in set().union(*refused.values()):
        by = [name for name, names in refused.items() if mutant in names]
        assert len([name for name in chosen if name in by]) >= min(2, len(by))


@pytest.mark.parametrize("options", [(), ("--matrix",)])
def test_a_lane_goes_on_after_a_failed_check_for_the_matrix_alone(
    workbench: Workbench, options: tuple[str, ...]
) -> None:
    folder = workbench.lay("60_script_and_contract")
    (folder / "mutants").mkdir()
    wrong = REPOSITORY / "tests/resources/packs/42_refuses_wrong_fixes/mutants/adds_the_weight.patch"
    shutil.copy(wrong, folder / "mutants")
    ended = workbench.run("mutate", "60", "--target", "cpu", "--generated", "0", *options)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "test_weights_of_one_change_nothing" in ended.stdout
    assert ("test_each_value_has_its_weight[unlike]" in ended.stdout) == bool(options), ended.stdout
    assert ("2 of 3 checks refuse each wrong fix twice" in ended.stdout) == bool(options)
