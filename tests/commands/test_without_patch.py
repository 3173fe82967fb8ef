"""A pack without a patch, from `run` to its bundle: one lane, REPRODUCED, and nothing that only a patch could give."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from testing import histories, toys
from testing import workbench as benches
from testing.workbench import Workbench

NAME = "45_has_no_patch"


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Judge the toy pack without a patch and keep its receipt."""
    made = benches.empty(tmp_path_factory.mktemp("judged"))
    made.lay(NAME)
    made.recorded()
    return made


def test_every_verb_takes_it(judged: Workbench) -> None:
    found = json.loads((judged.packs / NAME / "receipts/cpu.traced.json").read_text())
    assert (found["verdict"], found["fix"], list(found["lanes"])) == ("REPRODUCED", None, ["pristine"])
    ended = judged.run("check")
    assert (ended.returncode, ended.stdout) == (0, "1 pack(s) read, 1 sound\n")
    assert "toykernel 1.0 has the bug on cpu; no patch was judged." in judged.run("run").stdout
    text = (judged.packs / NAME / "README.md").read_text()
    assert "| cpu | traced | CPU | REPRODUCED | no patch |" in text
    assert "with the patch" not in text.partition("\n---\n")[0]
    ended = judged.run("mutate", NAME)
    assert (ended.returncode, "pack.toml expects REPRODUCED" in ended.stdout) == (5, True)
    ended = judged.run("sweep", "--runs", str(judged.folder / "runs"))
    assert (ended.returncode, "REPRODUCED" in ended.stdout) == (0, True), ended.stdout + ended.stderr
    bundle = judged.folder / f"{NAME}.zip"
    made = judged.run("report", NAME, "--bundle", str(bundle))
    assert made.returncode == 0, made.stderr
    ended = judged.run("check", "--bundle", str(bundle))
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.parametrize("file", ["fix.patch", "fix.head.patch", "mutants/all.patch"])
def test_a_patch_beside_it_is_named(recorded: Workbench, file: str) -> None:
    path = recorded.packs / NAME / file
    path.parent.mkdir(exist_ok=True)
    path.write_text("Subject: x\n")
    assert f'{file}: pack.toml says fix = "none"' in recorded.findings()


def test_a_docstring_that_does_not_say_how_it_is_run_is_named(recorded: Workbench) -> None:
    toys.replace(recorded.packs / NAME / "reproduce.py", "uv run reproduce.py", "uv run it")
    assert "its docstring does not say how reproduce.py is run" in recorded.findings()


def test_the_patched_lane_cannot_be_asked_for(workbench: Workbench) -> None:
    workbench.lay(NAME)
    ended = workbench.run("run", "--lane", "patched")
    assert ended.returncode == 2
    assert 'has no patched lane: pack.toml says fix = "none"' in ended.stderr


def test_a_release_without_the_bug_is_fixed_upstream(workbench: Workbench, tmp_path: Path) -> None:
    pack = workbench.lay(NAME)
    source = tmp_path / "checkout"
    histories.commits(source, ["right"])
    workbench.gives(0, "FIXED_UPSTREAM", "--upstream", f"path:{source}")
    toys.blind(pack)
    workbench.gives(1, "FIXED_UPSTREAM")  # pack.toml expects REPRODUCED of the pinned release


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (
            "timeout_s = 60",
            f'[head]\ncommit = "{"1" * 40}"\ndate = 2026-11-21\nverdict = "CONFIRMED"',
            "head: without a patch the verdict is REPRODUCED, or FIXED_UPSTREAM",
        ),
        ("timeout_s = 60", 'loads = ["src/toykernel/scale.py"]', "without a patch no file is changed"),
        ('fix = "none"', 'fix = "perhaps"', "fix: 'perhaps' is none of patch, none"),
    ],
)
def test_a_definition_that_wants_a_patch_is_refused(workbench: Workbench, old: str, new: str, reason: str) -> None:
    pack = workbench.lay(NAME)
    toys.replace(pack / "pack.toml", old, new)
    assert reason in toys.refusal(pack)
