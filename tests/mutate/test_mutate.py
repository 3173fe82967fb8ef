"""`runner.py mutate` over toy packs: what is killed, what survives, what says nothing, and a kill -9 in the middle."""

from __future__ import annotations

import json
import signal
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from harness.host.host import cores
from harness.pack import judges, load, patch_text
from testing import sweeps, toys
from testing.workbench import Workbench, until


def _mutate(workbench: Workbench, *arguments: str) -> tuple[int, dict[str, Any], str]:
    ended = workbench.run("mutate", "--json", "--target", "cpu", *arguments)
    assert "Traceback" not in ended.stderr, ended.stderr
    (found,) = json.loads(ended.stdout)["results"]
    return ended.returncode, found, ended.stderr


def _fates(found: dict[str, Any]) -> dict[str, str]:
    return {one["name"]: one["fate"] for one in found["strength"]["mutants"]}


def test_a_script_that_refuses_every_wrong_fix(workbench: Workbench) -> None:
    workbench.lay("42_refuses_wrong_fixes")
    status, found, _ = _mutate(workbench, "--generated", "0")
    mutants = {one["name"]: one for one in found["strength"]["mutants"]}
    assert status == 0
    assert _fates(found) == {
        "adds_the_weight": "killed",
        "multiplies_the_other_way_round": "equivalent",
        "refuses_the_mode": "killed",
        "weights_the_first_two_alike": "killed",
    }
    assert mutants["adds_the_weight"]["by"] == ["test_ones"], "it is over with the first check that fails"
    assert mutants["refuses_the_mode"]["by"] == ["test_weights"]
    own = {"killed": 3, "of": 3, "survived": 0, "unjudged": 0, "equivalent": 1, "elsewhere": 0}
    assert found["strength"]["own"] == own


def test_survivors_and_what_only_the_comparison_refuses(workbench: Workbench) -> None:
    workbench.lay("43_lets_wrong_fixes_pass")
    status, found, _ = _mutate(workbench, "--generated", "0")
    mutants = {one["name"]: one for one in found["strength"]["mutants"]}
    assert status == 1
    assert found["open"] == ["loses_an_empty_total", "rounds_the_total"]
    assert mutants["rounds_the_total"]["refused"].startswith("PATCH_BREAKS: outputs differ")
    assert mutants["loses_an_empty_total"]["refused"] == ""
    shown = workbench.run("mutate", "--target", "cpu", "--generated", "0").stdout
    assert "strength: killed 1 of 3 (own 1 of 3, generated 0 of 0); 2 survived script and contract (1 refused" in shown


def test_no_live_line_erases_the_table_on_a_terminal(workbench: Workbench) -> None:
    workbench.lay("43_lets_wrong_fixes_pass")
    shown = workbench.run_on_terminal("mutate", "--target", "cpu", "--generated", "0")
    assert b"\x1b" not in shown.rpartition(b"survived: loses_an_empty_total: ")[2]


def test_a_survivor_that_is_listed_afterwards_costs_no_lane(workbench: Workbench) -> None:
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    status, found, _ = _mutate(workbench, "--generated", "0")
    entries = [
        f'[[equivalent]]\nname = "{name}"\nreason = "The total of nothing is not asked for."\n'
        for name in found["open"]
    ]
    (pack / "mutants/equivalent.toml").write_text("\n".join(entries), encoding="utf-8")
    assert (status, len(entries)) == (1, 2)
    status, found, told = _mutate(workbench, "--generated", "0")
    assert (status, found["open"]) == (0, [])
    assert "going on: 5 lanes ended before" in told, "both trees and three wrong fixes"
    assert " patched: " not in told
    _, _, told = _mutate(workbench, "--generated", "0")
    assert "going on" not in told, "now it is settled, and the same command judges anew"


def test_wrong_fixes_compile_in_few_processes(workbench: Workbench) -> None:
    pack = workbench.lay("42_refuses_wrong_fixes")
    definition = pack / "pack.toml"
    shown = 'import os\nprint("PROCESSES", os.environ["REPRODUCER_PROCESSES"])\nvalues, weights ='
    toys.replace(pack / "reproduce.py", "values, weights =", shown)
    stated = definition.read_text(encoding="utf-8").replace("[targets.cpu]\n", "[targets.cpu]\nprocesses = 1000\n")
    definition.write_text(stated, encoding="utf-8")
    assert _mutate(workbench, "--generated", "0")[0] == 0
    said: dict[bool, set[int]] = {False: set(), True: set()}
    for log in (workbench.cache / "mutate").rglob("*.log"):
        lines = log.read_text(encoding="utf-8").splitlines()
        said[".own-" in log.name] |= {int(line.split()[1]) for line in lines if line.startswith("PROCESSES")}
    assert said == {False: {len(cores())}, True: {min(2, len(cores()))}}


@pytest.mark.slow
def test_what_crashes_or_hangs_is_run_again_alone_and_unjudged(workbench: Workbench) -> None:
    workbench.lay("44_mutants_crash_and_hang")
    status, found, _ = _mutate(workbench, "--generated", "0", "--timeout", "3")
    mutants = {one["name"]: one for one in found["strength"]["mutants"]}
    assert status == 1
    assert _fates(found) == {
        "aborts": "unjudged",
        "adds_the_weight": "killed",
        "does_not_apply": "unjudged",
        "hangs": "unjudged",
        "raises": "killed",
    }
    assert mutants["hangs"]["reason"] == "timed out after 3 s (run twice, the second time alone)"
    assert mutants["aborts"]["reason"].startswith("killed by SIGABRT (run twice")
    assert mutants["raises"]["by"] == ["test_weights"], "the script raised, and the contract says in whose code"
    assert mutants["does_not_apply"]["reason"].startswith("its patch does not apply")
    assert found["strength"]["own"]["of"] == 5


def test_a_wrong_fix_that_leaves_the_patched_file_unused_is_judged_by_its_checks(workbench: Workbench) -> None:
    mutants = workbench.lay("42_refuses_wrong_fixes") / "mutants"
    for path in mutants.iterdir():
        path.unlink()
    added = "    return [value + weight for value, weight in zip(values, weights)]"
    lines = ["def scale(values, weights):", added, "def total(values):", "    return sum(values)"]
    blob, name = patch_text.blob("".join(f"{line}\n" for line in lines)), "src/toykernel/scale/__init__.py"
    head = f"It is another module.\ndiff --git a/{name} b/{name}\nnew file mode 100644\nindex {'0' * 40}..{blob}\n"
    hunk = "".join(f"+{line}\n" for line in lines)
    (mutants / "another_module.patch").write_text(f"{head}--- /dev/null\n+++ b/{name}\n@@ -0,0 +1,4 @@\n{hunk}")
    status, found, _ = _mutate(workbench, "--generated", "0")
    assert (status, _fates(found)) == (0, {"another_module": "killed"})
    assert found["strength"]["mutants"][0]["by"] == ["test_ones"]


def test_generated_mutants_leave_nothing_in_the_cache(workbench: Workbench) -> None:
    definition = workbench.lay("01_confirmed") / "pack.toml"
    pristine = {path: path.stat().st_ino for path in (workbench.cache / "trees").rglob("*.py")}
    _, first, _ = _mutate(workbench, "--generated", "6")
    definition.write_text(definition.read_text(encoding="utf-8") + "[strength]\nseed = 2\n", encoding="utf-8")
    _, other, _ = _mutate(workbench, "--generated", "6")
    names = [set(_fates(found)) for found in (first, other)]
    assert names[0] != names[1], "pack.toml states the seed"
    assert len(names[0]) == 6
    assert len(list((workbench.cache / "trees").iterdir())) == 2
    assert len(list((workbench.cache / "jit").iterdir())) == 2
    for path, inode in pristine.items():
        assert path.stat().st_ino == inode
    text = next((workbench.cache / "trees").rglob("scale.py")).read_text(encoding="utf-8")
    assert "weights[0]" in text


def test_a_script_that_does_not_confirm_its_own_fix_says_nothing_of_wrong_ones(workbench: Workbench) -> None:
    workbench.lay("03_fix_ineffective")
    status, found, _ = _mutate(workbench)
    assert status == 1
    assert found["strength"] is None
    assert "its own fix gives FIX_INEFFECTIVE" in found["problem"]


@pytest.mark.slow
def test_several_mutants_share_a_gpu(workbench: Workbench) -> None:
    pack = workbench.lay("41_executes_on_a_gpu")
    (pack / "seconds").write_text("1.5", encoding="utf-8")
    workbench.gpus({})
    ended = workbench.run("mutate", "--json", "--generated", "4", "--jobs", "3")
    found = json.loads(ended.stdout)["results"][0]
    assert (found["target"], found["strength"]["evidence"], found["strength"]["gpu"]) == (
        "sm_90a",
        "executed",
        "Toy H200",
    )
    times = [line.split() for line in (pack / "starts").read_text(encoding="utf-8").splitlines()]
    spans = [(float(begin), float(end)) for _, device, begin, end in times if device == "0"]
    together = [sum(begin <= moment < end for begin, end in spans) for moment, _ in spans]
    assert max(together) >= 2


def test_wrong_calls(workbench: Workbench) -> None:
    pack = workbench.lay("42_refuses_wrong_fixes")
    assert workbench.run("mutate", "--target", "cpu", "--record", "--generated", "3").returncode == 2
    (pack / "mutants/equivalent.toml").write_text('[[equivalent]]\nname = "x"\nreason = ""\n', encoding="utf-8")
    refused = workbench.run("mutate", "--target", "cpu")
    assert refused.returncode == 2
    assert "x: no reason" in refused.stderr


def test_code_that_only_another_target_runs_is_counted_apart(workbench: Workbench) -> None:
    pack = workbench.lay("43_lets_wrong_fixes_pass")
    listed = pack / "mutants/equivalent.toml"
    entries = [
        f'[[elsewhere]]\nname = "{name}"\nreason = "Nothing here calls it."\ntargets = ["cpu"]\n'
        for name in ("loses_an_empty_total", "rounds_the_total")
    ]
    listed.write_text("\n".join(entries), encoding="utf-8")
    alone = workbench.run("mutate", "--target", "cpu", "--generated", "0")
    assert alone.returncode == 2
    assert "rounds_the_total: elsewhere: name the targets that do not run its code, and leave one" in alone.stderr
    definition = pack / "pack.toml"
    loads = 'loads = ["src/toykernel/scale.py"]'
    other = f'\n[targets.sm_90a]\nevidence = ["executed"]\n{loads}\ntimeout_s = 9\n'
    definition.write_text(definition.read_text(encoding="utf-8") + other, encoding="utf-8")
    status, found, _ = _mutate(workbench, "--generated", "0")
    assert status == 0
    own = {"killed": 1, "of": 1, "survived": 0, "unjudged": 0, "equivalent": 0, "elsewhere": 2}
    assert found["strength"]["own"] == own


@pytest.mark.slow
def test_a_killed_command_goes_on_and_runs_nothing_twice(workbench: Workbench) -> None:
    pack = workbench.lay("40_runs_for_a_while")
    (pack / "seconds").write_text("0.4", encoding="utf-8")
    command = workbench.command("mutate", "--json", "--target", "cpu", "--generated", "6", "--jobs", "2")
    with subprocess.Popen(command, stdout=-3, stderr=-3) as running:
        journal = until(lambda: _journal(workbench, 5), 60)
        running.send_signal(signal.SIGKILL)
    known = [json.loads(line)["key"] for line in journal.read_text(encoding="utf-8").splitlines()]
    until(lambda: not sweeps.living(workbench.packs))
    before = sum(sweeps.starts(pack).values())
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    found = json.loads(ended.stdout)["results"][0]
    (journal,) = journal.parent.glob("*.jsonl")
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    alone = sum(one["task"].count(".alone ") for one in lines)
    assert "going on: " in ended.stderr
    assert sum(found["strength"]["made"][word] for word in ("of", "equivalent")) == 6
    assert Counter(one["key"] for one in lines).most_common(1)[0][1] == 1
    assert [one["key"] for one in lines][: len(known)] == known
    assert sum(sweeps.starts(pack).values()) - before <= 2 + 6 - len(known) + alone
    assert not list((workbench.cache / "work").iterdir())


@pytest.mark.slow
def test_each_pack_is_recorded_once_it_is_judged(workbench: Workbench) -> None:
    first, second = (workbench.lay("40_runs_for_a_while", name) for name in ("01_first", "02_second"))
    (second / "seconds").write_text("1", encoding="utf-8")
    command = workbench.command("mutate", "--target", "cpu", "--jobs", "2", "--record", "--json")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as running:
        until(lambda: sum(sweeps.starts(second).values()) > 3, 60)
        running.send_signal(signal.SIGKILL)
    until(lambda: not sweeps.living(workbench.packs))
    before = sum(sweeps.starts(first).values())
    assert (first / "receipts/strength.cpu.traced.json").exists()
    assert not (second / "receipts/strength.cpu.traced.json").exists()
    alone = workbench.run("mutate", "2", "--target", "cpu", "--jobs", "2")
    assert "02_second: going on: " in alone.stderr, "whichever packs are named beside it"
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert [result["pack"] for result in json.loads(ended.stdout)["results"]] == ["01_first", "02_second"]
    assert sum(sweeps.starts(first).values()) == before, "the same command judges no pack twice"
    assert (second / "receipts/strength.cpu.traced.json").exists()


def test_a_pack_that_another_runner_judges_is_refused_before_a_lane(workbench: Workbench) -> None:
    first, second = (workbench.lay("40_runs_for_a_while", name) for name in ("01_first", "02_second"))
    (second / "seconds").write_text("2", encoding="utf-8")
    with subprocess.Popen(workbench.command("mutate", "2", "--target", "cpu"), stdout=-3, stderr=-3) as running:
        until(lambda: sweeps.starts(second))
        ended = workbench.run("mutate", "--target", "cpu")
        running.kill()
    assert ended.returncode == 2
    assert "the same mutants are being judged by another runner" in ended.stderr
    assert not sweeps.starts(first)


@pytest.mark.slow
def test_a_script_that_is_edited_meanwhile_is_another_days(workbench: Workbench) -> None:
    pack = workbench.lay("40_runs_for_a_while")
    (pack / "seconds").write_text("0.4", encoding="utf-8")
    before = judges.sha256(load.load_pack(pack))
    command = workbench.command("mutate", "--target", "cpu", "--jobs", "2", "--record")
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, text=True) as running:
        until(lambda: _journal(workbench, 3), 60)
        with (pack / "reproduce.py").open("a", encoding="utf-8") as script:
            script.write("\nEDITED = 1\n")
        running.communicate(timeout=120)
    recorded = json.loads((pack / "receipts/strength.cpu.traced.json").read_text(encoding="utf-8"))
    assert recorded["probe"]["sha256"] == before
    assert "strength.cpu.traced.json: STALE" in workbench.run("check").stdout


def _journal(workbench: Workbench, ends: int) -> Path | None:
    """Return the journal of a command once so many of its lanes have ended."""
    found = list(workbench.cache.glob("mutate/*/journal.jsonl"))
    return found[0] if found and found[0].read_bytes().count(b"\n") >= ends else None
