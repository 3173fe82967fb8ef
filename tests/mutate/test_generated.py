"""Generated mutants: a patch taken apart and put together, parts left out, and the sample."""

from __future__ import annotations

import functools
import io
import subprocess
from pathlib import Path

import pytest

from harness.mutate import changes, generated
from harness.mutate.generated import Candidate, Fix
from harness.receipt.strength import Mutant

OLD = "".join(f"line {number}\n" for number in range(1, 31))
NEW = OLD.replace("line 3\n", "line 3\nx\ny\n").replace("line 6\n", "").replace("line 20\n", "line twenty\n")
PYTHON_OLD = "def f(a, b):\n    return a\n\n\ndef g(a):\n    return a\n"
PYTHON_NEW = "def f(a, b):\n    c = a + b\n    return c\n\n\ndef g(a):\n    return a\n"


def _fix(old: str | None, new: str | None, path: str = "file.py") -> Fix:
    patch = changes.format_patch("why\n", {path: old}, {path: new})
    return Fix({path: old}, {path: new}, changes.parse(patch))


PAIRS = [
    (OLD, NEW),
    (OLD, OLD + "more\n"),
    (OLD, OLD.replace("line 4", "\x0cline\u2028four\r")),
    (OLD, "before\n" + OLD),
    (OLD, OLD.rstrip("\n")),
    (OLD.rstrip("\n"), OLD),
    (OLD.rstrip("\n"), NEW.rstrip("\n")),
    (OLD, "--- a\n+++ b\n" + OLD),
    (OLD, "first\n" + OLD.replace("line 30\n", "line thirty")),
]


@pytest.mark.parametrize(("old", "new"), PAIRS)
def test_what_is_written_is_read_and_gives_the_new_file(old: str, new: str) -> None:
    runs = changes.parse(changes.format_patch("why\n", {"file.txt": old}, {"file.txt": new}))["file.txt"]
    assert changes.apply(old, runs) == new
    lines = dict(enumerate(io.StringIO(new, newline="\n"), start=1))
    added = [lines.get(number, "") for number in sorted(changes.lines_in_new(runs))]
    behind = ["line 7\n"] if any(not run.added for run in runs) else []
    assert sorted(added) == sorted([*(line for run in runs for line in run.added), *behind])


@pytest.mark.parametrize(("old", "new"), [*PAIRS, (None, NEW), (OLD, None)])
def test_git_applies_what_is_written(tmp_path: Path, old: str | None, new: str | None) -> None:
    (tmp_path / "wrong.patch").write_bytes(changes.format_patch("why\n", {"file.txt": old}, {"file.txt": new}).encode())
    file = tmp_path / "file.txt"
    if old is not None:
        file.write_bytes(old.encode())
    subprocess.run(["git", "apply", "-p1", "wrong.patch"], cwd=tmp_path, check=True)
    assert (file.read_bytes().decode() if file.exists() else None) == new


def test_a_patch_that_does_not_fit_is_refused() -> None:
    runs = changes.parse(changes.format_patch("why\n", {"a": OLD}, {"a": NEW}))["a"]
    with pytest.raises(ValueError, match="line 6 is not what the patch takes away"):
        changes.apply(OLD.replace("line 6", "line six").replace("line 3", "line 2\nline 3"), runs)


def test_hunks_and_halves_are_left_out() -> None:
    found = {one.name: one.text() for one in generated.candidates(_fix(OLD, NEW, "file.txt"), ())}
    assert found == {
        "file.txt:4 hunk: 1 left out": OLD.replace("line 20\n", "line twenty\n"),
        "file.txt:20 hunk: 2 left out": OLD.replace("line 3\n", "line 3\nx\ny\n").replace("line 6\n", ""),
        "file.txt:4 half: first half of hunk 1 left out": NEW.replace("x\ny\n", ""),
        "file.txt:6 half: second half of hunk 1 left out": NEW.replace("line 5\n", "line 5\nline 6\n"),
    }


def test_a_run_of_lines_is_halved_where_the_hunk_has_no_other() -> None:
    old, new = "a\nb\n", "a\n1\n2\n3\nb\n"
    found = {one.name: one.text() for one in generated.candidates(_fix(old, new, "file.txt"), ())}
    assert found == {
        "file.txt:2 half: first half of hunk 1 left out": "a\n2\n3\nb\n",
        "file.txt:2 half: second half of hunk 1 left out": "a\n1\nb\n",
    }


def test_each_file_is_left_out_and_a_target_keeps_to_the_files_it_loads() -> None:
    old: dict[str, str | None] = {"a.py": PYTHON_OLD, "b.py": PYTHON_OLD}
    new: dict[str, str | None] = {"a.py": PYTHON_NEW, "b.py": PYTHON_NEW}
    fix = Fix(old, new, changes.parse(changes.format_patch("", old, new)))
    found = generated.candidates(fix, ("b.py", "c.py"))
    assert {one.path for one in found} == {"b.py"}
    left_out = next(one for one in found if one.operator == "file")
    (mutant,) = generated.made(fix, [left_out])
    assert (list(changes.parse(mutant.release_patch)), list(changes.parse(mutant.patch))) == (["a.py"], ["b.py"])
    assert {one.path for one in generated.candidates(fix, ())} == {"a.py", "b.py"}


def test_operators_keep_to_what_is_added_and_the_functions_around_it() -> None:
    found = generated.candidates(_fix(PYTHON_OLD, PYTHON_NEW), ())
    lines = {int(one.name.partition(":")[2].split()[0]) for one in found if one.operator not in {"hunk", "half"}}
    assert lines == {2, 3}
    assert {one.name for one in found if one.added} >= {"file.py:2 arithmetic: + -> - in a + b"}


def test_names_are_unique_and_the_same_every_time() -> None:
    new = PYTHON_NEW.replace("c = a + b", "c = (a + b) * (a + b)")
    names = [one.name for one in generated.candidates(_fix(PYTHON_OLD, new), ())]
    assert len(set(names)) == len(names)
    assert "file.py:2 arithmetic: + -> - in a + b (2)" in names
    assert names == [one.name for one in generated.candidates(_fix(PYTHON_OLD, new), ())]


def test_a_sample_is_the_same_for_a_seed_and_another_for_another() -> None:
    new = PYTHON_NEW.replace("c = a + b", "c = f(a, b, 1, 2, 3, key=4) + (a if b else 7)")
    fix = _fix(PYTHON_OLD, new)
    found = generated.candidates(fix, ())
    names = {seed: [one.name for one in generated.sample(fix, found, 8, seed)] for seed in (1, 2)}
    assert names[1] == [one.name for one in generated.sample(fix, found, 8, 1)]
    assert set(names[1]) != set(names[2])
    assert len(names[1]) == 8
    fewer = [one for one in found if one.name != names[1][3]]
    assert set(names[1]) - {one.name for one in generated.sample(fix, fewer, 8, 1)} == {names[1][3]}


def _made(fix: Fix, **texts: str) -> dict[str, Mutant]:
    pool = [Candidate(name, "x", "file.py", functools.partial(str, text)) for name, text in texts.items()]
    return {mutant.name: mutant for mutant in generated.made(fix, pool)}


def test_what_does_not_parse_is_no_mutant_and_nothing_is_made_twice() -> None:
    found = _made(
        _fix(PYTHON_OLD, PYTHON_NEW),
        broken=PYTHON_NEW.replace("a + b", "a +"),
        pristine=PYTHON_OLD,
        one=PYTHON_NEW.replace("a + b", "a - b"),
        same=PYTHON_NEW.replace("a + b", "a  -  (b)"),
        layout=PYTHON_NEW.replace("c = a + b", "c = (a + b)  # a comment"),
    )
    assert {name: mutant.equivalence for name, mutant in found.items()} == {
        "one": "",
        "layout": "the same syntax tree as the fix",
    }


@pytest.mark.parametrize(
    ("old", "new", "equivalence"), [("6", "2 * 3", "the same bytecode as the fix"), ("1", "True", "")]
)
def test_a_folded_constant_is_the_fix_and_a_truth_value_is_not(old: str, new: str, equivalence: str) -> None:
    fix = _fix(PYTHON_OLD, PYTHON_NEW.replace("b\n", f"{old}\n"))
    assert _made(fix, folded=PYTHON_NEW.replace("b\n", f"{new}\n"))["folded"].equivalence == equivalence
