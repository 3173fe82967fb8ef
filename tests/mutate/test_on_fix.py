"""Wrong fixes on top of fix.patch: what fits, what is none, whole ones, and another fix.patch under them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from harness.mutate import changes
from harness.pack import patch_text
from testing import histories
from testing.workbench import Workbench

FILE = "src/toykernel/scale.py"
RELEASE = histories.WRONG
RIGHT = "[value * weight for value, weight in zip(values, weights, strict=True)]"
FIXED = RELEASE.replace("[value * weights[0] for value in values]", RIGHT)
ROUNDS = ("return sum(values)", "return round(sum(values))")
OTHER_FIX = FIXED.replace(RIGHT, "[v * w for v, w in zip(values, weights, strict=True)]").replace(
    "\n\n\ndef scale", "\n\n#: The weights are not normalised.\nNORMALISED = False\n\n\ndef scale"
)


def _patch(old: str | None, new: str | None, why: str = "It is wrong.") -> str:
    return changes.format_patch(f"{why}\n", {FILE: old}, {FILE: new})


def _put(pack: Path, name: str, text: str) -> Path:
    path = pack / "mutants" / f"{name}.patch"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def _rebased(workbench: Workbench) -> tuple[int, str]:
    ended = workbench.run("mutate", "--rebase")
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout


def _judged(workbench: Workbench) -> dict[str, dict[str, Any]]:
    ended = workbench.run("mutate", "--json", "--target", "cpu", "--generated", "0")
    (found,) = json.loads(ended.stdout)["results"]
    return {one["name"]: one for one in found["strength"]["mutants"]}


def _commit(workbench: Workbench) -> None:
    for words in (("init", "-q"), ("add", "."), ("commit", "-qm", "x")):
        histories.git(workbench.packs, *words)


def _another_fix(workbench: Workbench, pack: Path) -> None:
    """Change fix.patch; git knows the one before."""
    _commit(workbench)
    head = (pack / "fix.patch").read_text(encoding="utf-8").partition("diff --git ")[0].rstrip("\n")
    (pack / "fix.patch").write_text(_patch(RELEASE, OTHER_FIX, head), encoding="utf-8")


def test_check_refuses_what_is_no_wrong_fix_on_its_tree(workbench: Workbench) -> None:
    pack = workbench.lay("42_refuses_wrong_fixes")
    on_fix, on_release = _patch(FIXED, FIXED.replace(*ROUNDS)), _patch(RELEASE, RELEASE.replace(*ROUNDS))
    other = f"{FILE}: its index line names another file that it changes"
    mends = "Next: runner.py mutate --rebase, or whole/ if it was written on the release"
    abbreviated = "it does not fit the release with fix.patch: its index line is abbreviated; use git diff --full-index"
    found = {
        "empty": (_patch(FIXED, FIXED), "it changes nothing"),
        "whole/fix": (_patch(RELEASE, FIXED), "it makes the fix itself"),
        "release": (_patch(FIXED, RELEASE), "it makes the release itself"),
        "misplaced": (on_release, f"it does not fit the release with fix.patch: {other}. {mends}"),
        "whole/misplaced_too": (on_fix, f"it does not fit the pinned release: {other}"),
        "short": (on_fix.replace("index 7a2983fc3aa160ad1390da8ffa6945e49dd122d5..", "index 7.."), abbreviated),
        "there": (
            _patch(None, "NEW = 1\n"),
            f"it does not fit the release with fix.patch: {FILE}: it is there already",
        ),
        "unseen/empty_too": (_patch(FIXED, FIXED), "it changes nothing"),
        "unseen/whole/fix_too": (_patch(RELEASE, FIXED), "it makes the fix itself"),
        "adds_the_weight": (on_fix, "another of this name is in mutants/whole"),
    }
    _put(pack, "whole/adds_the_weight", on_release)
    for name, (text, _) in found.items():
        _put(pack, name, text)
    said = workbench.findings()
    assert [reason for name, (_, reason) in found.items() if f"mutants/{name}.patch: {reason}" not in said] == []


def test_sound_ones_are_not_named(workbench: Workbench) -> None:
    pack = workbench.lay("42_refuses_wrong_fixes")
    _put(pack, "whole/leaves_it", _patch(RELEASE, RELEASE.replace(*ROUNDS)))
    assert ".patch: " not in workbench.findings().replace("fix.patch: ", "")


def test_a_whole_one_is_judged_without_the_fix(workbench: Workbench) -> None:
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    _put(pack, "whole/leaves_it", _patch(RELEASE, RELEASE.replace(*ROUNDS)))
    found = _judged(workbench)
    assert (found["leaves_it"]["fate"], found["leaves_it"]["by"]) == ("killed", ["reproduce.py"])
    assert found["rounds_the_total"]["fate"] == "survived"


def test_both_forms_are_one_wrong_fix(workbench: Workbench) -> None:
    pack = workbench.lay("42_refuses_wrong_fixes")
    definition = pack / "pack.toml"
    definition.write_text(definition.read_text() + "\n[strength]\ngenerated = 0\n", encoding="utf-8")
    assert workbench.run("mutate", "--target", "cpu", "--record").returncode == 0
    (pack / "mutants/adds_the_weight.patch").unlink()
    for sign, is_stale in (("+", False), ("-", True)):
        wrong = FIXED.replace("[value * weight for", f"[value {sign} weight for")
        _put(pack, "whole/adds_the_weight", _patch(RELEASE, wrong, "It adds the weight."))
        assert ("STALE: its own wrong fixes changed" in workbench.findings()) == is_stale


@pytest.mark.parametrize(("old", "new"), [(None, "NEW = 1\n"), ("GONE = 1\n", None)])
def test_a_file_that_one_side_lacks_has_the_header_of_any_other(old: str | None, new: str | None) -> None:
    assert [file.path for file in patch_text.parse(_patch(old, new))] == [FILE]


def test_another_fix_is_put_under_them(workbench: Workbench) -> None:
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    _another_fix(workbench, pack)
    assert workbench.findings().count("it does not fit the release with fix.patch") == 3
    left = (pack / "mutants/adds_the_weight.patch").read_bytes()
    status, said = _rebased(workbench)
    assert (status, "adds_the_weight.patch: left: src/toykernel/scale.py: it conflicts with fix.patch" in said) == (
        1,
        True,
    ), said
    assert "0 kept, 2 rebased, 1 left" in said
    assert (pack / "mutants/adds_the_weight.patch").read_bytes() == left
    rounds = (pack / "mutants/rounds_the_total.patch").read_text(encoding="utf-8")
    assert rounds.startswith("The total of fractions is wrong, which only the output shows.\ndiff --git ")
    assert changes.apply(OTHER_FIX, changes.parse(rounds)[FILE]) == OTHER_FIX.replace(*ROUNDS)
    assert workbench.findings().count("it does not fit the release with fix.patch") == 1
    assert {name: one["fate"] for name, one in _judged(workbench).items()} == {
        "adds_the_weight": "unjudged",
        "loses_an_empty_total": "survived",
        "rounds_the_total": "survived",
    }
    assert "2 kept, 0 rebased, 1 left" in _rebased(workbench)[1]


def test_one_that_the_new_fix_holds_already_is_left(workbench: Workbench) -> None:
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    head = (pack / "fix.patch").read_text(encoding="utf-8").partition("diff --git ")[0].rstrip("\n")
    _commit(workbench)
    (pack / "fix.patch").write_text(_patch(RELEASE, FIXED.replace(*ROUNDS), head), encoding="utf-8")
    status, said = _rebased(workbench)
    assert status == 1
    assert "rounds_the_total.patch: left: it makes the fix itself" in said


def test_a_first_sight_outlasts_another_fix(workbench: Workbench) -> None:
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    _put(pack, "unseen/rounds", (pack / "mutants/rounds_the_total.patch").read_text(encoding="utf-8"))
    (pack / "mutants/rounds_the_total.patch").unlink()
    assert workbench.run("mutate", "--target", "cpu", "--unseen", "--record").returncode == 1
    _another_fix(workbench, pack)
    _rebased(workbench)
    said = workbench.findings()
    assert "still open: rounds." in said
    assert "neither in" not in said
    assert "not judged yet" not in said
    again = workbench.run("mutate", "--target", "cpu", "--unseen", "--record")
    assert (again.returncode, "the pack was shown rounds (recorded on 20" in again.stderr) == (2, True)


def test_rebase_judges_nothing(workbench: Workbench) -> None:
    pack = workbench.lay("42_refuses_wrong_fixes")
    for option in (["--record"], ["--unseen"], ["--json"]):
        refused = workbench.run("mutate", "--rebase", *option)
        assert (refused.returncode, "--rebase judges nothing" in refused.stderr) == (2, True)
    (pack / "fix.patch").write_text(_patch("one\n", "two\n"), encoding="utf-8")
    refused = workbench.run("mutate", "--rebase")
    assert refused.returncode == 2
    assert "42_refuses_wrong_fixes/fix.patch does not fit the pinned release: src/toykernel/scale.py" in refused.stderr


def test_without_blob_hashes_nobody_says_where_it_belongs(workbench: Workbench) -> None:
    """Lines that are added alone fit anywhere by what they take away."""
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    moved = FIXED.replace("    return sum", "    values = list(values)[1:]\n    return sum")
    bare = "".join(line for line in _patch(FIXED, moved).splitlines(keepends=True) if not line.startswith("index "))
    path = _put(pack, "drops_the_first", bare)
    ended = workbench.run("mutate", "--target", "cpu", "--generated", "0")
    assert "its patch does not apply: its index line is abbreviated; use git diff --full-index" in ended.stdout
    assert (str(path) in ended.stdout, "own-drops_the_first patched" in ended.stderr) == (True, False), "it has no lane"
    assert "drops_the_first.patch: left: its index line is abbreviated" in _rebased(workbench)[1]


def test_one_on_a_fix_that_git_does_not_know_is_left(workbench: Workbench) -> None:
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    _put(pack, "x", _patch("another\n", "release\n"))
    status, said = _rebased(workbench)
    assert (status, "x.patch: left: src/toykernel/scale.py: line 1 is not what the patch takes away" in said) == (
        1,
        True,
    )
