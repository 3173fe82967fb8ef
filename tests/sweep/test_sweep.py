"""The sweep from end to end: the real runner over toy packs, as child processes."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import resource
import signal
import subprocess
from pathlib import Path
from typing import Any

from harness.sweep import run_folder
from testing import histories, package_index, sweeps, toys
from testing.workbench import Workbench, until

GPU_TOY = "41_executes_on_a_gpu"


def kinds(cell: dict[str, Any]) -> list[str]:
    """Return what changed of a cell."""
    return [change["kind"] for change in cell["changes"]]


def test_a_sweep_leaves_everything_in_one_folder_and_the_next_says_that_nothing_changed(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    first = workbench.sweep("--repeat", "2")
    assert first.returncode == 0, first.stderr
    assert "nothing needs attention; 1 cells: 1 CONFIRMED" in first.stdout
    document = workbench.results()
    assert (document["finished"], document["lanes_run"], document["status"]) == (True, 4, 0)
    assert run_folder.read(workbench.newest).run == workbench.newest.name, "it is what harness/sweep/run_folder.py says"
    receipt = json.loads((workbench.newest / "receipts/01_confirmed/cpu.traced.json").read_text())
    assert (receipt["verdict"], receipt["repeats"]) == ("CONFIRMED", {"agreeing": 2, "of": 2})
    assert receipt["claims"] == ["BITWISE_IDENTICAL"]
    assert "Nothing changed." in (workbench.newest / "summary.md").read_text()
    text = "".join(path.read_text() for path in workbench.newest.rglob("*") if path.is_file())
    assert str(workbench.folder) not in text, "the folder holds a path of this machine"
    first_run = workbench.newest
    again = workbench.swept("--repeat", "2", "--baseline", str(workbench.sweeps))
    assert workbench.newest != first_run
    assert again["01_confirmed/cpu"]["baseline"] == "CONFIRMED"
    assert kinds(again["01_confirmed/cpu"]) == []


WORSE = {
    "03_fix_ineffective": ("FIX_INEFFECTIVE", "fix ineffective"),
    "04_patch_breaks_a_control": ("PATCH_BREAKS", "patch breaks"),
    "06_patch_needs_an_offset": ("PATCH_STALE", "patch stale"),
    "17_segfaults": ("ERROR", "error"),
    "25_lacks_a_dependency": ("UNSUPPORTED", "newly unsupported"),
    "30_control_fails": ("CONTROL_FAILED", "control failed"),
    "32_prints_secrets": ("ERROR", "error"),
}


def test_what_got_worse_is_said_first_and_needs_attention(workbench: Workbench) -> None:
    for behaviour in ("01_confirmed", *WORSE):
        workbench.lay(behaviour)
    toys.replace(workbench.lay("23_prints_bytes", "99_unfetched") / "pack.toml", workbench.sha256, "0" * 64)
    ended = workbench.sweep("--jobs", "4", GITHUB_TOKEN="a-toy-token-0123456789")  # noqa: S106 - a toy
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    for (behaviour, (verdict, kind)), line in zip(WORSE.items(), lines, strict=False):
        cell = workbench.cells()[f"{behaviour}/cpu"]
        assert (cell["verdict"], kinds(cell)) == (verdict, [kind])
        assert line.startswith(f"{behaviour}/cpu: {kind.upper()}: toykernel 1.0: was CONFIRMED")
    reason = workbench.cells()["99_unfetched/cpu"]["reason"]
    assert reason.startswith("toykernel-1.0.zip: not in the cache $CACHE")
    assert "ghp_" not in "".join(path.read_text() for path in workbench.newest.rglob("*") if path.is_file())


def test_a_lane_whose_verdicts_differ_is_flaky_and_never_a_pass(workbench: Workbench) -> None:
    workbench.lay("36_flaky")
    cell = workbench.swept("--repeat", "3", "--jobs", "1", status=1)["36_flaky/cpu"]
    assert (cell["verdict"], cell["runs"], kinds(cell)) == ("FLAKY", 3, ["flaky"])
    assert cell["agreeing"] < 3
    assert f"FLAKY {cell['agreeing']}/3" in (workbench.newest / "summary.md").read_text()
    (pristine, *_) = cell["lanes"]
    assert len(set(pristine["verdicts"])) == 2


def test_every_verdict_is_compared_with_the_baseline_that_is_named(workbench: Workbench) -> None:
    folder = workbench.lay("01_confirmed")
    workbench.swept()
    good = (folder / "fix.patch").read_text()
    broken = toys.RESOURCES / "packs/03_fix_ineffective/fix.patch"
    (folder / "fix.patch").write_text(broken.read_text())
    worse = workbench.swept("--baseline", str(workbench.newest), status=1)["01_confirmed/cpu"]
    assert kinds(worse) == ["fix ineffective"]
    bad_run = workbench.newest
    still = workbench.swept("--baseline", str(workbench.sweeps), status=1)["01_confirmed/cpu"]
    assert (kinds(still), still["deviation"]) == ([], "CONFIRMED was expected")
    assert "STILL FIX_INEFFECTIVE" in (workbench.newest / "summary.md").read_text()
    (folder / "fix.patch").write_text(good)
    better = workbench.swept("--baseline", str(bad_run))["01_confirmed/cpu"]
    assert kinds(better) == ["recovered"]


def test_a_fix_that_upstream_ships_is_known_the_next_morning(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    toys.replace(pack / "pack.toml", 'fixed_in = "2.0"\n', "")
    with package_index.served(histories.shelf(workbench.folder / "index", {"2.0": "right"})) as url:
        workbench.variables.update(PIP_INDEX_URL=url, PIP_CONFIG_FILE=os.devnull)
        cells = workbench.swept("--latest", "--online", status=1)
        assert cells["01_confirmed/cpu"]["verdict"] == "CONFIRMED"
        newest = cells["01_confirmed/cpu@latest"]
        assert (newest["verdict"], newest["version"], kinds(newest)) == ("FIXED_UPSTREAM", "2.0", ["fixed upstream"])
        assert "FIXED UPSTREAM: toykernel 2.0: was CONFIRMED" in (workbench.newest / "summary.md").read_text()
    workbench.variables["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple/"
    lost = workbench.swept("--latest", "--online")["01_confirmed/cpu@latest"]
    assert (lost["verdict"], kinds(lost)) == ("UNAVAILABLE", []), "what cannot be had fails nothing"
    assert "the package index cannot be read" in lost["reason"]


def test_what_does_not_fit_into_the_budget_is_told_and_comes_first_the_next_time(workbench: Workbench) -> None:
    for name in ("001_long", "002_short", "003_short"):
        workbench.lay(sweeps.TOY, name)
    receipts = workbench.packs / "001_long/receipts"
    receipts.mkdir()
    took = {"lanes": {"pristine": {"seconds": 1000}, "patched": {"seconds": 1}}}
    (receipts / "cpu.traced.json").write_text(json.dumps(took))
    cell = workbench.swept("--budget", "10m", "--jobs", "1")["001_long/cpu"]
    assert cell["verdict"] == "NOT_RUN"
    assert cell["reason"].startswith("it takes about 1000 s, and ")
    assert "001_long/cpu: " not in (workbench.newest / "summary.md").read_text().partition("## Cells")[0]
    (receipts / "cpu.traced.json").unlink()
    workbench.swept("--jobs", "1")
    first = [end["task"] for end in workbench.ends()[:3]]  # what is laid out a moment earlier may begin before it
    assert {"001_long/cpu unpatched", "001_long/cpu patched"} <= set(first)


def test_a_lane_of_unknown_length_is_cut_where_the_budget_ends(workbench: Workbench) -> None:
    folder = workbench.lay(sweeps.TOY, "001_long", seconds="60")
    cell = workbench.swept("--budget", "6s", "--jobs", "2", status=5)["001_long/cpu"]
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", "the budget ended while it ran")
    assert not workbench.ends()
    assert folder.exists()
    assert not sweeps.living(workbench.folder)


def test_only_what_is_asked_for_is_judged(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    workbench.lay("30_control_fails")
    assert list(workbench.swept("1:cpu")) == ["01_confirmed/cpu"]
    ended = workbench.sweep("1:sm_90a")
    assert ended.returncode == 2
    assert "no cell '1:sm_90a'" in ended.stderr
    assert workbench.sweep("--budget", "soon").returncode == 2


def test_a_change_of_the_script_runs_its_lanes_again_and_no_others(workbench: Workbench) -> None:
    changed = workbench.lay(sweeps.TOY, "001_changed")
    workbench.lay(sweeps.TOY, "002_kept")
    slow = workbench.lay(sweeps.TOY, "003_slow", seconds="120")
    with subprocess.Popen(workbench.command("sweep", "--jobs", "3"), stderr=subprocess.DEVNULL) as sweep:
        until(lambda: [one.read_text().count("\n") for one in workbench.sweeps.glob("*/journal.jsonl")] == [4], 120)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(120) == 130
    until(lambda: not sweeps.living(workbench.folder), 120)  # a supervisor ends a moment after its runner
    assert not workbench.results()["finished"]
    assert workbench.cells()["003_slow/cpu"]["verdict"] == "NOT_RUN"
    (slow / "seconds").write_text("0.1")
    (changed / "reproduce.py").write_text((changed / "reproduce.py").read_text() + "# another comment\n")
    cells = workbench.swept("--jobs", "2")
    assert {cell["verdict"] for cell in cells.values()} == {"CONFIRMED"}
    assert sweeps.starts(changed).total() == 4
    assert sweeps.starts(workbench.packs / "002_kept").total() == 2
    assert len(list(workbench.sweeps.glob("*/run.json"))) == 1


def test_sigkill_at_random_moments_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    one = sweeps.siege(tmp_path, packs=6, jobs=3, seed=7)
    while one.kills < 4 or not one.ended:
        one.assault(longest=2.0 if one.kills < 4 else 60.0)


def test_two_sweeps_do_not_write_into_one_folder(workbench: Workbench) -> None:
    workbench.lay(sweeps.TOY, "001_slow", seconds="120")
    with subprocess.Popen(workbench.command("sweep"), stderr=subprocess.DEVNULL) as first:
        until((workbench.packs / "001_slow/starts").exists, 120)
        second = workbench.sweep()
        first.send_signal(signal.SIGTERM)
    assert second.returncode == 2
    assert "another sweep writes into" in second.stderr
    assert first.returncode == 130


def test_no_room_for_a_sweep_names_the_folder_of_runs_and_not_the_cache(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    assert workbench.run("run").returncode == 0, "the cache has everything"
    ended = subprocess.run(
        workbench.command("sweep"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)),
    )
    assert (ended.returncode, "Traceback" in ended.stderr) == (1, False), ended.stderr
    assert ended.stderr.splitlines()[-1].startswith("error: no room in the folder of runs "), ended.stderr


def _stated(folder: Path, line: str) -> None:
    """Add a line to what pack.toml states of a toy's target."""
    toys.replace(folder / "pack.toml", "timeout_s = 60", f"timeout_s = 60\n{line}")


def test_lanes_that_fill_a_gpu_run_on_all_gpus_at_once_one_on_each(workbench: Workbench) -> None:
    workbench.gpus({"total": 140 * 2**30}, {"total": 140 * 2**30})
    for number in range(3):
        _stated(workbench.lay(GPU_TOY, f"00{number}_toy", seconds="0.4"), "gpu_memory_gib = 100")
    workbench.lay("01_confirmed")
    cells = workbench.swept("--jobs", "4")
    assert {cell["verdict"] for cell in cells.values()} == {"CONFIRMED"}
    spans = [line.split()[1:] for path in workbench.packs.glob("*/starts") for line in path.read_text().splitlines()]
    assert {token for token, _, _ in spans} == {"0", "1"}
    for token in "01":
        mine = sorted((float(begin), float(end)) for place, begin, end in spans if place == token)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(mine)), "two at once"
    assert {end["place"] for end in workbench.ends()} == {"gpu 0", "gpu 1", "cpu"}
    receipt = json.loads((workbench.newest / "receipts/000_toy/sm_90a.executed.json").read_text())
    assert receipt["host"]["gpus"] == [{"name": "Toy H200", "compute_capability": "9.0"}]
    workbench.variables["CUDA_VISIBLE_DEVICES"] = "1"
    workbench.swept("0")
    assert {end["place"] for end in workbench.ends()} == {"gpu 1"}


def test_lanes_share_a_gpu_and_what_is_timed_runs_alone(workbench: Workbench) -> None:
    workbench.gpus({})
    for number in range(4):
        folder = workbench.lay(GPU_TOY, f"00{number}_toy", seconds="2")
        if number == 3:
            _stated(folder, "measures = true")
            (folder / "alone").write_text("0.6")
    assert {cell["verdict"] for cell in workbench.swept("--jobs", "8").values()} == {"CONFIRMED"}
    spans = [line.split() for path in workbench.packs.glob("*/starts") for line in path.read_text().splitlines()]
    shared = sorted((float(begin), float(end)) for lane, _, begin, end in spans if not lane.startswith("alone"))
    alone = sorted((float(begin), float(end)) for lane, _, begin, end in spans if lane.startswith("alone"))
    assert any(earlier[1] > later[0] for earlier, later in itertools.pairwise(shared)), "none shared the GPU"
    assert len(alone) == 2
    for begin, end in alone:
        others = [span for span in (*shared, *alone) if span != (begin, end) and span[0] < end and span[1] > begin]
        assert not others, "something ran beside what is timed"
    ends = {end["task"]: end for end in workbench.ends()}
    measured = ends["003_toy/sm_90a unpatched"]
    assert measured["record"]["waited"] > 0.1
    assert measured["record"]["seconds"] <= measured["seconds"], "what it waited is no part of what it took"
    journal = (workbench.newest / "journal.jsonl").stat().st_mtime
    for ended in ends.values():
        began = dt.datetime.fromisoformat(ended["started"]).timestamp()
        over = began + ended["record"]["waited"] + ended["seconds"]
        assert over <= journal + 0.05, f"{ended['task']}: its interval ends behind the end of all"


HARMS: dict[str, dict[str, object]] = {
    "3072 MiB did not come back": {"memory": 3 * 2**30},
    "1 process(es) that were not there before": {"processes": [4242]},
    "Xid 79": {"xids": [31, 79]},
    "2 uncorrected memory error(s)": {"uncorrected": 2},
    "it cannot be read": {"lost": True},
}


def test_a_gpu_with_a_fault_leaves_the_pool_and_its_lane_is_repeated_elsewhere(workbench: Workbench) -> None:
    workbench.gpus(*[{} for _ in range(len(HARMS) + 1)])
    for number, harm in enumerate(HARMS.values()):
        workbench.lay(GPU_TOY, f"00{number}_toy", harm_json=json.dumps(harm))
    ended = workbench.sweep()
    assert ended.returncode == 1, ended.stderr
    assert {cell["verdict"] for cell in workbench.cells().values()} == {"CONFIRMED"}
    faults = [gpu for gpu in workbench.results()["gpus"] if gpu["reason"]]
    assert sorted(gpu["reason"].partition(":")[0] for gpu in faults) == sorted(HARMS)
    told = ended.stdout.splitlines()[: len(HARMS)]
    assert all("left the pool after" in line for line in told)
    for gpu in faults:
        assert gpu["place"] not in {end["place"] for end in workbench.ends() if end["task"] == gpu["task"]}


def test_a_lane_that_gives_every_gpu_a_fault_is_not_tried_on_all_of_them(workbench: Workbench) -> None:
    workbench.gpus({}, {}, {})
    workbench.lay(GPU_TOY, "001_toy", harm_json=json.dumps({"xids": [79]}), again="")
    workbench.lay(GPU_TOY, "002_toy", seconds="0.1")
    cells = workbench.swept(status=1)
    assert cells["001_toy/sm_90a"]["verdict"] == "NOT_RUN"
    assert cells["001_toy/sm_90a"]["reason"].startswith("2 GPUs had a fault after it")
    assert cells["002_toy/sm_90a"]["verdict"] == "CONFIRMED"


def test_a_gpu_that_is_lost_from_the_beginning_is_told_and_the_others_go_on(workbench: Workbench) -> None:
    workbench.gpus({}, {"lost": True})
    workbench.lay(GPU_TOY, "001_toy")
    ended = workbench.sweep()
    assert (ended.returncode, workbench.cells()["001_toy/sm_90a"]["verdict"]) == (1, "CONFIRMED")
    assert ended.stdout.startswith("gpu 1 cannot be used: toy NVML error 15")
    assert "gpu 1 cannot be used" in (workbench.newest / "index.html").read_text()


def test_a_pack_that_measures_has_its_gpu_for_itself(workbench: Workbench) -> None:
    state = workbench.gpus({"processes": [4242]}, {})
    folder = workbench.lay(GPU_TOY, "001_toy", measured="2.0")
    _stated(folder, "measures = true")
    workbench.swept()
    assert {end["place"] for end in workbench.ends()} == {"gpu 1"}
    (folder / "measured").write_text("2.5")
    slower = workbench.swept("--baseline", str(workbench.newest), status=1)["001_toy/sm_90a"]
    assert kinds(slower) == ["slower", "slower"]
    assert slower["changes"][0]["text"] == "unpatched time: 2.5 ms, was 2 (noise 0.2)"
    document = json.loads(state.read_text())
    document["devices"][1]["processes"] = [4243]
    state.write_text(json.dumps(document))
    taken = workbench.swept("1", status=1)["001_toy/sm_90a"]
    assert (taken["verdict"], taken["reason"]) == ("NOT_RUN", "every sm_90a GPU is taken by another program")


def test_a_target_that_this_host_lost_is_newly_unsupported(workbench: Workbench) -> None:
    workbench.gpus({})
    workbench.lay(GPU_TOY, "001_toy")
    workbench.swept()
    workbench.variables.clear()
    workbench.variables["CUDA_VISIBLE_DEVICES"] = ""
    assert workbench.swept(status=5)["001_toy/sm_90a"]["verdict"] == "NOT_HERE"
    first = min(workbench.sweeps.glob("*/run.json")).parent
    lost = workbench.swept("--baseline", str(first), status=1)["001_toy/sm_90a"]
    assert (lost["verdict"], kinds(lost)) == ("NOT_HERE", ["newly unsupported"])
