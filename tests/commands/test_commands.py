"""Calls: wrong ones end in one line and status 2; interrupted ones keep what was finished."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import psutil
import pytest
from click.testing import CliRunner

from harness.commands import VERBS, cli, options, running
from harness.commands.options import Shared
from harness.core.cache import Cache
from harness.core.words import LaneName
from harness.pack import load
from testing import toys
from testing.workbench import REPOSITORY, Workbench, until


def _error(workbench: Workbench, *arguments: str) -> str:
    ended = workbench.run(*arguments)
    assert ended.returncode == 2, ended.stderr
    lines = ended.stderr.strip().splitlines()
    assert len(lines) == 1, ended.stderr
    return lines[0]


@pytest.mark.parametrize("verb", ["run", "report"])
def test_an_unknown_pack_names_the_choices(workbench: Workbench, verb: str) -> None:
    workbench.lay("01_confirmed")
    line = _error(workbench, verb, "confirmd")
    assert line.startswith("error: no pack 'confirmd'")
    assert "01_confirmed" in line
    assert "Next: runner.py list" in line


def test_no_pack_at_all(workbench: Workbench) -> None:
    assert "error: no pack in" in _error(workbench, "run")
    shutil.rmtree(workbench.packs)
    assert "--packs DIR" in _error(workbench, "run")


@pytest.mark.parametrize("name", ["1", "01", "confirmed", "01_confirmed", "0*", "conf*"])
def test_a_pack_is_named_by_number_slug_or_glob(workbench: Workbench, name: str) -> None:
    workbench.lay("01_confirmed")
    workbench.lay("30_control_fails")
    assert [path.name for path in load.select_packs(workbench.packs, (name,))] == ["01_confirmed"]


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        (("--target", "sm_90"), "no target 'sm_90'. Choices: auto, all, cpu"),
        (("--upstream", "otherkernel==1.0"), "this pack's package is toykernel"),
        (("--upstream", "toykernel>=1.0"), "is none of PACKAGE==VERSION"),
        (
            ("--upstream", "nonsense:x"),
            "is none of PACKAGE==VERSION, latest, head, ask, path:DIR, git+URL@COMMIT, installed",
        ),
        (("--upstream", "path:/no/such/folder"), "no such folder"),
        (("--upstream", "head"), "pack.toml names no head commit"),
        (("--with", "otherset"), "no dependency set 'otherset'"),
        (("--with", "a", "--with", "b"), "--with names 2 sets"),
    ],
)
def test_a_wrong_option_is_one_line(workbench: Workbench, arguments: tuple[str, ...], reason: str) -> None:
    workbench.lay("01_confirmed")
    ended = workbench.run("run", *arguments)
    assert ended.returncode == 2, ended.stderr
    errors = [line for line in ended.stderr.splitlines() if line.startswith("error:")]
    assert len(errors) == 1
    assert reason in errors[0]
    assert "Traceback" not in ended.stderr


def test_an_unknown_option_is_status_2(workbench: Workbench) -> None:
    assert workbench.run("run", "--frobnicate").returncode == 2
    assert workbench.run("frobnicate").returncode == 2


@pytest.mark.parametrize("verb", ["", *VERBS])
def test_help_fits_a_screen(verb: str) -> None:
    shown = CliRunner().invoke(cli, [verb, "--help"] if verb else ["--help"], terminal_width=80)
    lines = shown.output.splitlines()
    assert shown.exit_code == 0
    assert 10 < len(lines) <= 40, shown.output
    assert max(map(len, lines)) <= 80, shown.output
    assert not [line for line in lines[1:] if line.endswith("...")], "no summary is cut"


@pytest.mark.parametrize("place", ["before the verb", "after it", "environment"])
def test_options_of_the_program_stand_before_or_after_the_verb(workbench: Workbench, place: str) -> None:
    workbench.lay("01_confirmed")
    packs = ("--packs", str(workbench.packs))
    call = {"before the verb": (*packs, "list"), "after it": ("list", *packs), "environment": ("list",)}[place]
    variables = {"REPRODUCER_PACKS_PACKS": str(workbench.packs)} if place == "environment" else {}
    command = [sys.executable, str(REPOSITORY / "runner.py"), *call]
    ended = subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in ended.stdout.splitlines() if line[0] != " "] == ["01_confirmed"]


def test_a_target_that_is_not_here_is_unsupported_with_the_reason(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    status, (row,) = workbench.rows("--target", "sm_90a")
    assert (status, row["verdict"], row["reason"]) == (5, "UNSUPPORTED", "no sm_90a GPU here, and this pack lists cpu")


def test_a_torch_out_of_range_is_unsupported(workbench: Workbench) -> None:
    toys.replace(workbench.lay("01_confirmed") / "pack.toml", 'torch = ">=2"', 'torch = "<2"')
    workbench.gives(5, "UNSUPPORTED", reason="is outside the pack's range <2")


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _is_gone(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 130), (signal.SIGKILL, -9)])
def test_an_interrupted_run_keeps_what_was_finished_and_leaves_no_process(
    workbench: Workbench, number: signal.Signals, status: int
) -> None:
    workbench.lay("01_confirmed")
    hanging = workbench.lay("37_needs_long")
    theirs = (hanging / "pid", hanging / "grandchild")
    command = workbench.command("run", "--json", "--jobs", "3")  # both lanes of the one that hangs, and one beside
    with subprocess.Popen(command, stdout=-1, stderr=-1, text=True) as runner:
        finished = until(lambda: next(workbench.cache.glob("runs/*/receipts/*/cpu.traced.json"), None))
        pids = [until(partial(_text, path)) for path in theirs]
        os.kill(runner.pid, number)
        output, _ = runner.communicate(timeout=30)
    assert runner.returncode == status
    for pid in pids:
        until(partial(_is_gone, int(pid)), 10)
    assert json.loads(finished.read_text())["verdict"] == "CONFIRMED"
    assert [path.parent.name for path in workbench.cache.glob("runs/*/receipts/*/*.json")] == ["01_confirmed"]
    if number != signal.SIGKILL:
        assert [row["verdict"] for row in json.loads(output)["rows"]] == ["CONFIRMED"]
    assert workbench.rows("1")[0] == 0
    assert not list(workbench.cache.glob("work/*")), "the next run removes what a killed one left"


def test_two_runners_on_one_cache(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    command = workbench.command("run", "--json")
    runners = [subprocess.Popen(command, stdout=-1, stderr=-1, text=True) for _ in range(2)]
    outputs = [runner.communicate(timeout=60)[0] for runner in runners]
    assert [runner.returncode for runner in runners] == [0, 0]
    documents = [json.loads(output) for output in outputs]
    assert [(document["schema"], document["rows"][0]["verdict"]) for document in documents] == [(1, "CONFIRMED")] * 2
    figures = documents[0]["rows"][0]["figure"]
    assert {lane: isinstance(line["value"], float) for lane, line in figures.items()} == dict.fromkeys(LaneName, True)
    assert len(list(workbench.cache.glob("runs/*/receipts/01_confirmed/cpu.traced.json"))) == 2


def test_the_table_is_the_last_thing_on_the_screen_and_logs_are_named_where_something_deviates(
    workbench: Workbench,
) -> None:
    pack = workbench.lay("01_confirmed")
    ended = workbench.run("run")
    first = ended.stdout.splitlines()[2].split()
    said = "01_confirmed wrong-result cpu traced BUG_REPRODUCED FIX_VALIDATED CONFIRMED"
    assert " ".join(first[:7]) == said
    assert "max_error 3 -> 0" in ended.stdout
    assert len(ended.stdout.splitlines()) == 3
    assert "01_confirmed/cpu unpatched: BUG_REPRODUCED" in ended.stderr
    (folder,) = workbench.cache.glob("runs/*")
    assert ended.stderr.splitlines()[-1] == f"logs and receipts: {folder}"
    assert ended.stderr.count("unpacking toykernel 1.0") == 1
    (pack / "fix.patch").unlink()
    deviates = workbench.run("run").stdout.splitlines()
    assert deviates[0].startswith("01_confirmed cpu: fix.patch is missing: runner.py run --lane unpatched")
    assert deviates[-1].split()[:1] == ["01_confirmed"]


def test_a_run_leaves_the_checkout_as_it_was_unless_it_records(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    assert workbench.run("run").returncode == 0
    assert not (pack / "receipts").exists()
    assert workbench.run("run", "--record").returncode == 0
    assert (pack / "receipts/cpu.traced.json").exists()
    half = workbench.run("run", "--record", "--lane", "unpatched")
    assert (half.returncode, "--record: one lane of two is half of what" in half.stderr) == (2, True)
    elsewhere = workbench.run("run", "--record", "--upstream", f"path:{toys.RESOURCES}/upstream/toykernel-1.0")
    assert elsewhere.returncode == 2
    assert "--record: pack.toml states nothing of this tree" in elsewhere.stderr


def test_of_several_packs_those_without_a_head_are_left_out(workbench: Workbench) -> None:
    stated = workbench.lay("01_confirmed") / "pack.toml"
    workbench.lay("36_flaky")
    commit = "1" * 40
    stated.write_text(f'{stated.read_text()}\n[head]\ncommit = "{commit}"\ndate = 2026-01-01\nverdict = "CONFIRMED"\n')
    ended = workbench.run("run", "--upstream", "head")
    assert ended.returncode == 5, ended.stderr
    assert "36_flaky: left out: pack.toml names no head commit" in ended.stderr
    assert "UNAVAILABLE" in ended.stdout


def test_the_last_of_runs_within_one_second_is_the_last(tmp_path: Path) -> None:
    for _ in range(20):
        receipts = running.run_folder(Cache(tmp_path)) / "receipts"
        receipts.mkdir()
        assert options.run_receipts("last", Shared(cache_root=tmp_path), "") == receipts
