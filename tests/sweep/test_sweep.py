"""The sweep from end to end: the real runner over toy packs, as child processes."""

from __future__ import annotations

import datetime as dt
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from harness.sweep import history
from testing import package_index, sweeps, toys
from testing.workbench import REPOSITORY, Workbench

GPU_TOY = "41_executes_on_a_gpu"


@dataclass
class Runs:
    """A workbench with a folder of run folders."""

    bench: Workbench
    variables: dict[str, str] = field(default_factory=dict)

    @property
    def folder(self) -> Path:
        """The folder of the runs."""
        return self.bench.folder / "sweeps"

    @property
    def newest(self) -> Path:
        """The newest run."""
        return max(self.folder.glob("*/run.json")).parent

    def command(self, *arguments: str) -> list[str]:
        """Build the command line."""
        return self.bench.command("sweep", "--runs", str(self.folder), *arguments)

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        """Run a sweep to its end."""
        ended = self.bench.run("sweep", "--runs", str(self.folder), *arguments, **self.variables, **variables)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    def cells(self, *arguments: str, status: int = 0) -> dict[str, dict[str, Any]]:
        """Run a sweep and return its cells by name."""
        ended = self.run(*arguments)
        assert ended.returncode == status, ended.stderr + ended.stdout
        return self.results()

    def results(self) -> dict[str, dict[str, Any]]:
        """Return the newest run's cells by name."""
        document = json.loads((self.newest / "results.json").read_text())
        return {cell["name"]: cell for cell in document["cells"]}

    def ends(self) -> list[dict[str, Any]]:
        """Return the lines of the newest journal."""
        return [json.loads(line) for line in (self.newest / "journal.jsonl").read_text().splitlines()]

    def gpus(self, *states: dict[str, object]) -> Path:
        """Give the host toy GPUs; return the file of their state."""
        path = self.bench.folder / "gpus.json"
        base = {"name": "Toy H200", "capability": [9, 0]}
        path.write_text(json.dumps({"devices": [base | state for state in states]}))
        self.variables |= {"PYTHONPATH": str(REPOSITORY / "tests/resources/fake_nvml"), "NCCL_FAKE_STATE": str(path)}
        self.variables["CUDA_VISIBLE_DEVICES"] = ",".join(str(index) for index in range(len(states)))
        return path

    def toy(self, behaviour: str, name: str = "", **files: str) -> Path:
        """Lay a toy pack, under another name where one is given, with small files that steer it."""
        folder = self.bench.lay(behaviour, name)
        for file, text in files.items():
            (folder / file.replace("_json", ".json")).write_text(text)
        return folder


@pytest.fixture
def runs(workbench: Workbench) -> Runs:
    """Return a folder of run folders, with none in it."""
    return Runs(workbench)


def kinds(cell: dict[str, Any]) -> list[str]:
    """Return what changed of a cell."""
    return [change["kind"] for change in cell["changes"]]


def test_a_sweep_leaves_everything_in_one_folder_and_the_next_says_that_nothing_changed(runs: Runs) -> None:
    runs.toy("01_confirmed")
    first = runs.run("--repeat", "2")
    assert first.returncode == 0, first.stderr
    assert "nothing needs attention; 1 cells: 1 CONFIRMED" in first.stdout
    document = json.loads((runs.newest / "results.json").read_text())
    assert (document["finished"], document["lanes_run"], document["status"]) == (True, 4, 0)
    assert history.read(runs.newest).run == runs.newest.name, "it is what harness/sweep/results.py says"
    receipt = json.loads((runs.newest / "receipts/01_confirmed/cpu.traced.json").read_text())
    assert (receipt["verdict"], receipt["repeats"]) == ("CONFIRMED", {"agreeing": 2, "of": 2})
    assert receipt["claims"] == ["BITWISE_IDENTICAL"]
    assert "Nothing changed." in (runs.newest / "summary.md").read_text()
    text = "".join(path.read_text() for path in runs.newest.rglob("*") if path.is_file())
    assert str(runs.bench.folder) not in text, "the folder holds a path of this machine"
    first_run = runs.newest
    again = runs.cells("--repeat", "2", "--baseline", str(runs.folder))
    assert runs.newest != first_run
    assert again["01_confirmed/cpu"]["baseline"] == "CONFIRMED"
    assert kinds(again["01_confirmed/cpu"]) == []
    assert runs.bench.run("list", "--from", str(runs.newest / "receipts")).stdout.count("CONFIRMED (traced)") == 1


WORSE = {
    "03_fix_ineffective": ("FIX_INEFFECTIVE", "fix ineffective"),
    "04_patch_breaks_a_control": ("PATCH_BREAKS", "patch breaks"),
    "06_patch_needs_an_offset": ("PATCH_STALE", "patch stale"),
    "17_segfaults": ("ERROR", "error"),
    "25_lacks_a_dependency": ("UNSUPPORTED", "newly unsupported"),
    "30_control_fails": ("CONTROL_FAILED", "control failed"),
    "32_prints_secrets": ("ERROR", "error"),
}


def test_what_got_worse_is_said_first_and_needs_attention(runs: Runs) -> None:
    for behaviour in ("01_confirmed", *WORSE):
        runs.toy(behaviour)
    unfetched = runs.toy("23_prints_bytes") / "pack.toml"
    unfetched.write_text(unfetched.read_text().replace(runs.bench.sha256, "0" * 64))
    unfetched.parent.rename(unfetched.parent.with_name("99_unfetched"))
    ended = runs.run("--jobs", "4", GITHUB_TOKEN="a-toy-token-0123456789")  # noqa: S106 - a toy
    assert ended.returncode == 1
    lines = ended.stdout.splitlines()
    for (behaviour, (verdict, kind)), line in zip(WORSE.items(), lines, strict=False):
        cell = runs.results()[f"{behaviour}/cpu"]
        assert (cell["verdict"], kinds(cell)) == (verdict, [kind])
        assert line.startswith(f"{behaviour}/cpu: {kind.upper()}: toykernel 1.0: was CONFIRMED")
    reason = runs.results()["99_unfetched/cpu"]["reason"]
    assert reason.startswith("toykernel-1.0.zip: not in the cache $CACHE")
    assert "ghp_" not in "".join(path.read_text() for path in runs.newest.rglob("*") if path.is_file())


def test_a_lane_whose_verdicts_differ_is_flaky_and_never_a_pass(runs: Runs) -> None:
    runs.toy("36_flaky")
    cell = runs.cells("--repeat", "3", "--jobs", "1", status=1)["36_flaky/cpu"]
    assert (cell["verdict"], cell["runs"], kinds(cell)) == ("FLAKY", 3, ["flaky"])
    assert cell["agreeing"] < 3
    assert f"FLAKY {cell['agreeing']}/3" in (runs.newest / "summary.md").read_text()
    (pristine, *_) = cell["lanes"]
    assert len(set(pristine["verdicts"])) == 2


def test_every_verdict_is_compared_with_the_baseline_that_is_named(runs: Runs) -> None:
    folder = runs.toy("01_confirmed")
    runs.cells()
    good = (folder / "fix.patch").read_text()
    broken = toys.RESOURCES / "packs/03_fix_ineffective/fix.patch"
    (folder / "fix.patch").write_text(broken.read_text())
    assert kinds(runs.cells("--baseline", str(runs.newest), status=1)["01_confirmed/cpu"]) == ["fix ineffective"]
    bad_run = runs.newest
    still = runs.cells("--baseline", str(runs.folder), status=1)["01_confirmed/cpu"]
    assert (kinds(still), still["deviation"]) == ([], "CONFIRMED was expected")
    assert "STILL FIX_INEFFECTIVE" in (runs.newest / "summary.md").read_text()
    (folder / "fix.patch").write_text(good)
    better = runs.cells("--baseline", str(bad_run))["01_confirmed/cpu"]
    assert kinds(better) == ["recovered"]


def test_a_fix_that_upstream_ships_is_known_the_next_morning(runs: Runs) -> None:
    pack = runs.toy("01_confirmed")
    definition = pack / "pack.toml"
    definition.write_text(definition.read_text().replace('fixed_in = "2.0"\n', ""))
    fixed = runs.bench.folder / "fixed/toykernel-2.0"
    source = toys.RESOURCES / "upstream/toykernel-1.0/src/toykernel"
    (fixed / "src/toykernel").mkdir(parents=True)
    for path in source.glob("*.py"):
        text = path.read_text().replace(
            "value * weights[0] for value in values", "a * b for a, b in zip(values, weights)"
        )
        (fixed / "src/toykernel" / path.name).write_text(text)
    archive = runs.bench.folder / "toykernel-2.0.zip"
    toys.zip_folder(fixed, archive)
    shelf = package_index.Shelf({"toykernel": {archive.name: archive.read_bytes()}})
    with package_index.served(shelf) as url:
        runs.variables |= {"PIP_INDEX_URL": url, "PIP_CONFIG_FILE": os.devnull}
        cells = runs.cells("--latest", "--online", status=1)
        assert cells["01_confirmed/cpu"]["verdict"] == "CONFIRMED"
        newest = cells["01_confirmed/cpu@latest"]
        assert (newest["verdict"], newest["version"], kinds(newest)) == ("FIXED_UPSTREAM", "2.0", ["fixed upstream"])
        assert "FIXED UPSTREAM: toykernel 2.0: was CONFIRMED" in (runs.newest / "summary.md").read_text()
    runs.variables["PIP_INDEX_URL"] = "http://127.0.0.1:9/simple/"
    lost = runs.cells("--latest", "--online")["01_confirmed/cpu@latest"]
    assert (lost["verdict"], kinds(lost)) == ("UNAVAILABLE", []), "what cannot be had fails nothing"
    assert "the package index cannot be read" in lost["reason"]


def test_what_does_not_fit_into_the_budget_is_told_and_comes_first_the_next_time(runs: Runs) -> None:
    for name in ("001_long", "002_short", "003_short"):
        runs.toy(sweeps.TOY, name)
    receipts = runs.bench.packs / "001_long/receipts"
    receipts.mkdir()
    took = {"lanes": {"pristine": {"seconds": 1000}, "patched": {"seconds": 1}}}
    (receipts / "cpu.traced.json").write_text(json.dumps(took))
    cell = runs.cells("--budget", "10m", "--jobs", "1")["001_long/cpu"]
    assert cell["verdict"] == "NOT_RUN"
    assert cell["reason"].startswith("it takes about 1000 s, and ")
    assert "001_long/cpu: " not in (runs.newest / "summary.md").read_text().partition("## Cells")[0]
    (receipts / "cpu.traced.json").unlink()
    runs.cells("--jobs", "1")
    first = [end["task"] for end in runs.ends()[:3]]  # what is laid out a moment earlier may begin before it
    assert {"001_long/cpu pristine", "001_long/cpu patched"} <= set(first)


def test_a_lane_of_unknown_length_is_cut_where_the_budget_ends(runs: Runs) -> None:
    folder = runs.toy(sweeps.TOY, "001_long", seconds="60")
    cell = runs.cells("--budget", "6s", "--jobs", "2", status=5)["001_long/cpu"]
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", "the budget ended while it ran")
    assert not runs.ends()
    assert folder.exists()
    assert not sweeps.living(runs.bench.folder)


def test_only_what_is_asked_for_is_judged(runs: Runs) -> None:
    runs.toy("01_confirmed")
    runs.toy("30_control_fails")
    assert list(runs.cells("1:cpu")) == ["01_confirmed/cpu"]
    ended = runs.run("1:sm_90a")
    assert ended.returncode == 2
    assert "no cell '1:sm_90a'" in ended.stderr
    assert runs.run("--budget", "soon").returncode == 2


def test_a_change_of_the_probe_runs_its_lanes_again_and_no_others(runs: Runs) -> None:
    changed = runs.toy(sweeps.TOY, "001_changed")
    runs.toy(sweeps.TOY, "002_kept")
    slow = runs.toy(sweeps.TOY, "003_slow", seconds="120")
    with subprocess.Popen(runs.command("--jobs", "3"), stderr=subprocess.DEVNULL) as sweep:
        _await(lambda: runs.folder.exists() and len(runs.ends()) == 4)
        sweep.send_signal(signal.SIGINT)
        assert sweep.wait(120) == 130
    _await(lambda: not sweeps.living(runs.bench.folder))  # a supervisor ends a moment after its runner
    assert not json.loads((runs.newest / "results.json").read_text())["finished"]
    assert runs.results()["003_slow/cpu"]["verdict"] == "NOT_RUN"
    (slow / "seconds").write_text("0.1")
    (changed / "reproduce.py").write_text((changed / "reproduce.py").read_text() + "# another comment\n")
    cells = runs.cells("--jobs", "2")
    assert {cell["verdict"] for cell in cells.values()} == {"CONFIRMED"}
    assert sweeps.starts(changed).total() == 4
    assert sweeps.starts(runs.bench.packs / "002_kept").total() == 2
    assert len(list(runs.folder.glob("*/run.json"))) == 1


def _await(done: Any, seconds: float = 120.0) -> None:  # noqa: ANN401 - any condition
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        try:
            if done():
                return
        except (ValueError, OSError):
            pass
        time.sleep(0.02)
    raise AssertionError("it never came")


def test_sigkill_at_random_moments_loses_nothing_and_runs_nothing_twice(tmp_path: Path) -> None:
    one = sweeps.siege(tmp_path, packs=6, jobs=3, seed=7)
    while one.kills < 4 or not one.ended:
        one.assault(longest=2.0 if one.kills < 4 else 60.0)


def test_two_sweeps_do_not_write_into_one_folder(runs: Runs) -> None:
    runs.toy(sweeps.TOY, "001_slow", seconds="120")
    with subprocess.Popen(runs.command(), stderr=subprocess.DEVNULL) as first:
        _await((runs.bench.packs / "001_slow/starts").exists)
        second = runs.run()
        first.send_signal(signal.SIGTERM)
    assert second.returncode == 2
    assert "another sweep writes into" in second.stderr
    assert first.returncode == 130


def _stated(folder: Path, line: str) -> None:
    """Add a line to what pack.toml states of a toy's target."""
    text = (folder / "pack.toml").read_text()
    (folder / "pack.toml").write_text(text.replace("timeout_s = 60", f"timeout_s = 60\n{line}"))


def test_lanes_of_exclusive_targets_run_on_all_gpus_at_once_one_on_each(runs: Runs) -> None:
    runs.gpus({}, {})
    for number in range(3):
        _stated(runs.toy(GPU_TOY, f"00{number}_toy", seconds="0.4"), "exclusive = true")
    runs.toy("01_confirmed")
    cells = runs.cells("--jobs", "4")
    assert {cell["verdict"] for cell in cells.values()} == {"CONFIRMED"}
    spans = [line.split()[1:] for path in runs.bench.packs.glob("*/starts") for line in path.read_text().splitlines()]
    assert {token for token, _, _ in spans} == {"0", "1"}
    for token in "01":
        mine = sorted((float(begin), float(end)) for place, begin, end in spans if place == token)
        assert all(earlier[1] <= later[0] for earlier, later in itertools.pairwise(mine)), "two at once"
    assert {end["place"] for end in runs.ends()} == {"gpu 0", "gpu 1", "cpu"}
    receipt = json.loads((runs.newest / "receipts/000_toy/sm_90a.executed.json").read_text())
    assert receipt["host"]["gpus"] == [{"name": "Toy H200", "compute_capability": "9.0"}]
    runs.variables["CUDA_VISIBLE_DEVICES"] = "1"
    runs.cells("0")
    assert {end["place"] for end in runs.ends()} == {"gpu 1"}


def test_lanes_share_a_gpu_and_what_is_timed_runs_alone(runs: Runs) -> None:
    runs.gpus({})
    for number in range(4):
        folder = runs.toy(GPU_TOY, f"00{number}_toy", seconds="2")
        if number == 3:
            _stated(folder, "measures = true")
            (folder / "alone").write_text("0.6")
    assert {cell["verdict"] for cell in runs.cells("--jobs", "8").values()} == {"CONFIRMED"}
    spans = [line.split() for path in runs.bench.packs.glob("*/starts") for line in path.read_text().splitlines()]
    shared = sorted((float(begin), float(end)) for lane, _, begin, end in spans if not lane.startswith("alone"))
    alone = sorted((float(begin), float(end)) for lane, _, begin, end in spans if lane.startswith("alone"))
    assert any(earlier[1] > later[0] for earlier, later in itertools.pairwise(shared)), "none shared the GPU"
    assert len(alone) == 2
    for begin, end in alone:
        others = [span for span in (*shared, *alone) if span != (begin, end) and span[0] < end and span[1] > begin]
        assert not others, "something ran beside what is timed"
    ends = {end["task"]: end for end in runs.ends()}
    measured = ends["003_toy/sm_90a pristine"]
    assert measured["record"]["waited"] > 0.1
    assert measured["record"]["seconds"] <= measured["seconds"], "what it waited is no part of what it took"
    journal = (runs.newest / "journal.jsonl").stat().st_mtime
    for end in ends.values():
        began = dt.datetime.fromisoformat(end["started"]).timestamp()
        over = began + end["record"]["waited"] + end["seconds"]
        assert over <= journal + 0.05, f"{end['task']}: its interval ends behind the end of all"


HARMS: dict[str, dict[str, object]] = {
    "3072 MiB did not come back": {"memory": 3 * 2**30},
    "1 process(es) that were not there before": {"processes": [4242]},
    "Xid 79": {"xids": [31, 79]},
    "2 uncorrected memory error(s)": {"uncorrected": 2},
    "it cannot be read": {"lost": True},
}


def test_a_gpu_with_a_fault_leaves_the_pool_and_its_lane_is_repeated_elsewhere(runs: Runs) -> None:
    runs.gpus(*[{} for _ in range(len(HARMS) + 1)])
    for number, harm in enumerate(HARMS.values()):
        runs.toy(GPU_TOY, f"00{number}_toy", harm_json=json.dumps(harm))
    ended = runs.run()
    assert ended.returncode == 1, ended.stderr
    assert {cell["verdict"] for cell in runs.results().values()} == {"CONFIRMED"}
    faults = [gpu for gpu in json.loads((runs.newest / "results.json").read_text())["gpus"] if gpu["reason"]]
    assert sorted(gpu["reason"].partition(":")[0] for gpu in faults) == sorted(HARMS)
    told = ended.stdout.splitlines()[: len(HARMS)]
    assert all("left the pool after" in line for line in told)
    for gpu in faults:
        assert gpu["place"] not in {end["place"] for end in runs.ends() if end["task"] == gpu["task"]}


def test_a_lane_that_gives_every_gpu_a_fault_is_not_tried_on_all_of_them(runs: Runs) -> None:
    runs.gpus({}, {}, {})
    runs.toy(GPU_TOY, "001_toy", harm_json=json.dumps({"xids": [79]}), again="")
    runs.toy(GPU_TOY, "002_toy", seconds="0.1")
    cells = runs.cells(status=1)
    assert cells["001_toy/sm_90a"]["verdict"] == "NOT_RUN"
    assert cells["001_toy/sm_90a"]["reason"].startswith("2 GPUs had a fault after it")
    assert cells["002_toy/sm_90a"]["verdict"] == "CONFIRMED"


def test_a_gpu_that_is_lost_from_the_beginning_is_told_and_the_others_go_on(runs: Runs) -> None:
    runs.gpus({}, {"lost": True})
    runs.toy(GPU_TOY, "001_toy")
    ended = runs.run()
    assert (ended.returncode, runs.results()["001_toy/sm_90a"]["verdict"]) == (1, "CONFIRMED")
    assert ended.stdout.startswith("gpu 1 cannot be used: toy NVML error 15")
    assert "gpu 1 cannot be used" in (runs.newest / "index.html").read_text()


def test_a_fault_of_the_program_takes_no_gpu_out(runs: Runs) -> None:
    runs.gpus({})
    runs.toy(GPU_TOY, "001_toy", harm_json=json.dumps({"xids": [13, 31]}))
    assert runs.cells()["001_toy/sm_90a"]["verdict"] == "CONFIRMED"


def test_a_pack_that_measures_has_its_gpu_for_itself(runs: Runs) -> None:
    state = runs.gpus({"processes": [4242]}, {})
    folder = runs.toy(GPU_TOY, "001_toy", measured="2.0")
    _stated(folder, "measures = true")
    runs.cells()
    assert {end["place"] for end in runs.ends()} == {"gpu 1"}
    (folder / "measured").write_text("2.5")
    slower = runs.cells("--baseline", str(runs.newest), status=1)["001_toy/sm_90a"]
    assert kinds(slower) == ["slower", "slower"]
    assert slower["changes"][0]["text"] == "pristine time: 2.5 ms, was 2 (noise 0.2)"
    document = json.loads(state.read_text())
    document["devices"][1]["processes"] = [4243]
    state.write_text(json.dumps(document))
    taken = runs.cells("1", status=1)["001_toy/sm_90a"]
    assert (taken["verdict"], taken["reason"]) == ("NOT_RUN", "every sm_90a GPU is taken by another program")


def test_a_target_that_this_host_lost_is_newly_unsupported(runs: Runs) -> None:
    runs.gpus({})
    runs.toy(GPU_TOY, "001_toy")
    runs.cells()
    runs.variables.clear()
    runs.variables["CUDA_VISIBLE_DEVICES"] = ""
    assert runs.cells(status=5)["001_toy/sm_90a"]["verdict"] == "NOT_HERE"
    lost = runs.cells("--baseline", str(min(runs.folder.glob("*/run.json")).parent), status=1)["001_toy/sm_90a"]
    assert (lost["verdict"], kinds(lost)) == ("NOT_HERE", ["newly unsupported"])


def test_help_names_every_option() -> None:
    command = [sys.executable, str(REPOSITORY / "runner.py"), "sweep", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for option in ("--jobs", "PACK[:TARGET]", "--budget", "--repeat", "--baseline", "--latest", "--runs"):
        assert option in text
