"""Sweeps of toy packs on a real Slurm: three nodes on the loopback interface, five toy GPUs."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from testing import clones, slurm, sweeps, toys
from testing.slurm import Cluster
from testing.workbench import REPOSITORY, Workbench, until

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.skipif(bool(slurm.MISSING), reason=slurm.REASON)]

GPU_TOY, EVIDENCE = "41_executes_on_a_gpu", "sm_90a.executed.json"
CARDS = slurm.H200
#: Seconds after which a test gives up; on a busy machine everything takes longer, and nothing is judged by that.
LONGEST = 240


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """Run a Slurm for the tests of this file."""
    with slurm.running(tmp_path_factory.mktemp("slurm") / "slurm") as found:
        yield found


@dataclass
class Nights:
    """A workbench whose sweeps run on a cluster."""

    bench: Workbench
    cluster: Cluster

    @property
    def variables(self) -> dict[str, str]:
        """What the runner needs in its environment; Slurm hands it on to the tasks."""
        return os.environ | self.bench.variables | self.cluster.variables

    def command(self, *arguments: str) -> list[str]:
        """Build the command line."""
        types = () if "--gpu-type" in arguments else ("--gpu-type", "sm_90a=h200")
        return self.bench.command("sweep", "--slurm", *types, *arguments)

    def start(self, *arguments: str) -> subprocess.Popen[str]:
        """Start a sweep."""
        return subprocess.Popen(
            self.command(*arguments), env=self.variables, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self, *arguments: str, status: int = 0) -> str:
        """Run a sweep to its end and return what it said."""
        with self.start(*arguments) as one:
            said, _ = one.communicate(timeout=LONGEST)
        assert one.returncode == status, said
        assert "Traceback" not in said
        return said

    @property
    def beside(self) -> Path:
        """What the engine knows of the newest run."""
        return self.bench.newest.with_name(f"{self.bench.newest.name}.slurm")

    def verdicts(self) -> set[str]:
        """Return every verdict of the newest run."""
        return {cell["verdict"] for cell in self.bench.cells().values()}

    def toys(self, count: int, seconds: float = 0.1) -> list[Path]:
        """Lay packs whose lanes take so long."""
        packs = sweeps.copies(self.bench.packs, self.bench.sha256, count, GPU_TOY)
        for pack in packs:
            (pack / "seconds").write_text(str(seconds))
        return packs

    def tasks(self) -> dict[str, str]:
        """Return the state of every task of the newest run that Slurm knows, by its number."""
        numbers = {path.name.partition("_")[0] for path in self.beside.glob("jobs/*_submission.sh")}
        return {name: state for name, state in self.cluster.jobs().items() if name.partition("_")[0] in numbers}


@pytest.fixture
def nights(workbench: Workbench, cluster: Cluster) -> Nights:
    """Return a folder of run folders, with none in it; each node shows two GPUs."""
    workbench.gpus({}, {})
    return Nights(workbench, cluster)


def once(packs: list[Path]) -> bool:
    """Whether each lane of each pack was started exactly once."""
    return all(sweeps.starts(pack) == {"pristine": 1, "patched": 1} for pack in packs)


def wait(done: Callable[[], object]) -> None:
    """Wait until something is so."""
    until(done, LONGEST)


def test_forty_lanes_on_five_cards_take_what_the_cards_allow(nights: Nights) -> None:
    packs = nights.toys(20)
    chance = random.Random(1)  # noqa: S311 - no secret
    for pack in packs:
        seconds = chance.uniform(1.0, 4.0)
        (pack / "seconds").write_text(f"{seconds:.2f}")
        (pack / "receipts").mkdir()
        (pack / "receipts" / EVIDENCE).write_text(
            json.dumps({"lanes": {name: {"seconds": seconds} for name in ("pristine", "patched")}})
        )
    nights.bench.lay("01_confirmed", "900_on_cores")
    said = nights.run()
    assert "nothing needs attention; 21 cells: 21 CONFIRMED" in said
    assert "gpu:h200:1: 20 tasks" in said
    assert once(packs)
    took = nights.cluster.spans(said.partition("20 tasks, Slurm's job ")[2].split()[0])
    assert max(sum(begin <= moment < end for begin, end in took) for moment, _ in took) == CARDS
    best = max(*(end - begin for begin, end in took), sum(end - begin for begin, end in took) / CARDS)
    whole = max(end for _, end in took) - min(begin for begin, _ in took)
    assert whole <= 1.1 * best + 1, f"{whole:.0f} s, and {best:.0f} were possible; Slurm counts whole seconds"
    results = nights.bench.results()
    assert [(gpu["place"], gpu["name"]) for gpu in results["gpus"]] == [("a node", "Toy H200")]
    assert (results["lanes_run"], results["host"]["driver"]) == (42, "999.1")
    assert {lane["place"] for cell in results["cells"] for lane in cell["lanes"]} == {"gpu:h200:1", "cpu"}
    receipt = json.loads((nights.bench.newest / "receipts/001_toy" / EVIDENCE).read_text())
    assert receipt["host"]["gpus"] == [{"name": "Toy H200", "compute_capability": "9.0"}]
    assert receipt["host"]["driver"] == "999.1"
    text = "".join(path.read_text() for path in nights.bench.newest.rglob("*") if path.is_file())
    assert str(nights.bench.folder) not in text, "the folder holds a path of this machine"
    assert not nights.beside.exists(), "what nobody needs is removed"


def test_a_lane_of_two_gpus_asks_for_two_and_too_many_are_not_run(nights: Nights) -> None:
    one, two = nights.toys(2)
    toys.replace(two / "pack.toml", "timeout_s = 60", "timeout_s = 60\ngpus = 2")
    nights.run()
    assert nights.bench.cells()["002_toy/sm_90a"]["lanes"][0]["place"] == "gpu:h200:2"
    assert {line.split()[1] for line in (two / "starts").read_text().splitlines()} == {"0,1"}
    assert {line.split()[1] for line in (one / "starts").read_text().splitlines()} <= {"0", "1"}
    toys.replace(two / "pack.toml", "gpus = 2", "gpus = 3")
    nights.run("--baseline", str(nights.bench.sweeps), status=1)
    cell = nights.bench.cells()["002_toy/sm_90a"]
    why = "Batch job submission failed: Requested node configuration is not available"
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", f"Slurm does not take a task on gpu:h200:3: {why}")
    assert [change["kind"] for change in cell["changes"]] == ["not run"]
    assert nights.bench.cells()["001_toy/sm_90a"]["verdict"] == "CONFIRMED"


def test_nodes_of_several_kinds_fill_one_table(nights: Nights) -> None:
    (pack,) = nights.toys(1)
    text = (pack / "pack.toml").read_text()
    head, _, body = text.partition("[targets.sm_90a]\n")
    (pack / "pack.toml").write_text(f"{head}[targets.sm_80]\n{body}\n[targets.sm_90a]\n{body}")
    other = {"devices": [{"name": "Toy A100", "capability": [8, 0]}]}
    (nights.bench.folder / "gpus.json.toy4").write_text(json.dumps(other))
    nights.run("--gpu-type", "sm_80=a100", "--gpu-type", "sm_90a=h200")
    assert nights.verdicts() == {"CONFIRMED"}
    assert set(nights.bench.cells()) == {"001_toy/sm_80", "001_toy/sm_90a"}
    assert [gpu["name"] for gpu in nights.bench.results()["gpus"]] == ["Toy A100", "Toy H200"]
    receipt = json.loads((nights.bench.newest / "receipts/001_toy/sm_80.executed.json").read_text())
    assert receipt["host"]["gpus"] == [{"name": "Toy A100", "compute_capability": "8.0"}]


def test_an_option_counts_more_than_the_environment(nights: Nights, monkeypatch: pytest.MonkeyPatch) -> None:
    nights.toys(1)
    for name, value in {"SBATCH_PARTITION": "nope", "SBATCH_TIMELIMIT": "1", "SBATCH_GRES": "gpu:9"}.items():
        monkeypatch.setenv(name, value)
    nights.run("--slurm-option", "partition=toys")
    assert nights.verdicts() == {"CONFIRMED"}


def test_an_array_that_slurm_takes_and_will_not_run_is_told(nights: Nights) -> None:
    nights.toys(1)
    nights.run("--slurm-option", "partition=short", status=1)
    cell = nights.bench.cells()["001_toy/sm_90a"]
    assert (cell["verdict"], cell["reason"].partition(" is ")[2]) == ("NOT_RUN", "never run (PartitionTimeLimit)")
    assert "PENDING" not in nights.cluster.jobs().values()


def test_a_gpu_with_a_fault_is_told_and_its_lanes_say_nothing(nights: Nights) -> None:
    pack, _ = nights.toys(2)
    (pack / "harm.json").write_text('{"xids": [79]}')
    said = nights.run(status=1)
    assert "gpu:h200:1: Xid 79" in said
    assert "what its task printed names the node" in said
    cells = nights.bench.cells()
    assert cells["001_toy/sm_90a"]["verdict"] == "NOT_RUN"
    (gpu,) = [gpu for gpu in nights.bench.results()["gpus"] if gpu["reason"]]
    assert (gpu["place"], "Xid 79" in gpu["reason"]) == ("gpu:h200:1", True)
    assert socket.gethostname() in next(nights.beside.glob("jobs/*_0_0_log.out")).read_text()


def test_a_type_that_is_another_architecture_judges_nothing(nights: Nights) -> None:
    (pack,) = nights.toys(1)
    toys.replace(pack / "pack.toml", "[targets.sm_90a]", "[targets.sm_80]")
    nights.run("--gpu-type", "sm_80=h200", status=1)
    cell = nights.bench.cells()["001_toy/sm_80"]
    assert (cell["verdict"], sweeps.starts(pack).total()) == ("NOT_RUN", 0)
    assert cell["reason"] == "Slurm gave Toy H200 (sm_90a) for gpu:h200:1, and not 1 of sm_80"


def test_ctrl_c_cancels_the_array_and_the_same_command_goes_on(nights: Nights) -> None:
    packs = nights.toys(4)
    for pack in packs[2:]:
        (pack / "seconds").write_text("60")
    with nights.start() as one:
        wait(lambda: all(f"00{n}_toy/sm_90a patched" in _journal(nights) for n in (1, 2)))
        one.send_signal(signal.SIGINT)
        said, _ = one.communicate(timeout=LONGEST)
    assert one.returncode == 130, said
    assert "cancelled: " in said
    wait(lambda: set(nights.tasks().values()) <= {"CANCELLED", "COMPLETED"})
    assert not nights.bench.results()["finished"]
    assert nights.bench.cells()["004_toy/sm_90a"]["verdict"] == "NOT_RUN"
    for pack in packs:
        (pack / "seconds").write_text("0.1")
    nights.run()
    assert nights.verdicts() == {"CONFIRMED"}
    assert once(packs[:2])
    assert len(list(nights.bench.sweeps.glob("*/run.json"))) == 1


def _journal(nights: Nights) -> str:
    return "".join(_read(path) for path in sorted(nights.bench.sweeps.glob("*/journal.jsonl"))[-1:])


def test_a_night_that_somebody_cancels_says_so_of_each_lane(nights: Nights) -> None:
    packs = nights.toys(3, 60)
    (packs[0] / "seconds").write_text("0.1")
    with nights.start() as one:
        wait(lambda: "001_toy/sm_90a patched" in _journal(nights))
        nights.cluster.ask("scancel", *{name.partition("_")[0] for name in nights.tasks()})
        said, _ = one.communicate(timeout=LONGEST)
    assert one.returncode == 1, said
    cells = nights.bench.cells()
    assert cells["001_toy/sm_90a"]["verdict"] == "CONFIRMED"
    lost = [cell for name, cell in cells.items() if name != "001_toy/sm_90a"]
    assert {cell["verdict"] for cell in lost} == {"NOT_RUN"}
    assert all(cell["reason"].endswith("is CANCELLED and returned nothing") for cell in lost), lost
    assert nights.bench.results()["finished"]
    assert list(nights.beside.glob("jobs/*.out")), "what tasks printed tells more"


def test_the_batch_file_runs_a_sweep_and_its_end_is_that_of_its_arrays(nights: Nights) -> None:
    clone = clones.lay(nights.bench)
    shutil.copytree(nights.bench.cache, clone / "cache")
    text = (REPOSITORY / "deploy/slurm-sweep.sbatch").read_text()
    assert text.count("/shared/reproducer-packs") >= 2
    batch = clone / "sweep.sbatch"
    batch.write_text(text.replace("/shared/reproducer-packs", str(clone)))
    submit = ["sbatch", "--parsable", str(batch)]
    job = subprocess.run(submit, env=nights.variables, capture_output=True, text=True, check=True).stdout.strip()
    wait(lambda: nights.cluster.jobs()[job] in {"COMPLETED", "FAILED"})
    said = (clone / f"sweep.{job}.out").read_text()
    assert "nothing needs attention; 1 cells: 1 CONFIRMED" in said, said
    script = clone / "packs/01_confirmed/reproduce.py"
    toys.replace(script, "from toykernel import scale\n", "import time; time.sleep(90)\n")
    job = subprocess.run(submit, env=nights.variables, capture_output=True, text=True, check=True).stdout.strip()
    wait(lambda: "1 running" in _read(clone / f"sweep.{job}.out"))
    nights.cluster.ask("scancel", job)
    wait(lambda: "interrupted" in _read(clone / f"sweep.{job}.out"))
    states = nights.cluster.jobs()
    assert not {"PENDING", "RUNNING"} & set(states.values()), "an array runs on that nobody collects"


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_job_whose_slurmd_is_gone_ends_by_itself(nights: Nights) -> None:
    (pack,) = nights.toys(1, 8)
    with nights.start() as one:
        wait(lambda: _asleep([pack]))
        (job,) = nights.tasks()
        node = nights.cluster.node_of(job)
        nights.cluster.kill(node)
        said, _ = one.communicate(timeout=LONGEST)
    nights.cluster.start_node(node)
    assert one.returncode == 0, said
    assert once([pack])
    nights.cluster.until("idle")


def test_everything_is_counted_once_whatever_is_killed(nights: Nights) -> None:
    """Kill the command twenty times; meanwhile lose a node with all that runs on it, and of two the slurmd alone."""
    packs = nights.toys(CARDS, 300)
    chance = random.Random(3)  # noqa: S311 - no secret
    for _ in range(9):  # while it plans, submits, begins to ask
        _killed(nights, chance.uniform(0.2, 0.9))
    with nights.start() as one:  # where this machine is so slow that none of them came so far as to submit
        wait(lambda: _asleep(packs) == 2 * CARDS)
        one.kill()
    nights.cluster.kill_node("toy1")
    for node in ("toy2", "toy3"):
        nights.cluster.kill(node)
    for pack in packs:
        (pack / "seconds").write_text("0.1")
    for _ in range(10):  # while Slurm finds out, which takes longer than all of these
        _killed(nights, chance.uniform(0.3, 1.0))
    wait(lambda: nights.cluster.ask("sinfo", "--noheader", "--nodes=toy1", "--format=%T").startswith("down"))
    nights.cluster.start_node("toy1")
    nights.run()
    old = [one for node in ("toy2", "toy3") for one in nights.cluster.processes(f"SLURMD_NODENAME={node}")]
    assert len(old) >= 3, "the old copies run on"
    assert nights.verdicts() == {"CONFIRMED"}
    assert once(packs), "only the second attempts came to their ends"
    names = nights.cluster.ask("squeue", "--noheader", "--states=all", "--array", "--format=%j").split()
    assert sum(nights.bench.newest.name in name for name in names) == CARDS, "an array was submitted twice"
    ends = [json.loads(line)["task"] for line in _journal(nights).splitlines()]
    assert len(ends) == len(set(ends)) == 2 * CARDS
    assert len(list(nights.bench.sweeps.glob("*/run.json"))) == 1
    for node in ("toy2", "toy3"):
        nights.cluster.end_jobs(node)
        nights.cluster.start_node(node)
    nights.cluster.until("idle")


def _killed(nights: Nights, seconds: float) -> None:
    """Begin the sweep, or go on with it, and kill the command after so long."""
    with nights.start() as one:
        with contextlib.suppress(subprocess.TimeoutExpired):
            one.wait(seconds)
        assert one.poll() is None, one.communicate()[0]
        one.kill()


def _asleep(packs: list[Path]) -> int:
    """Count the lanes that know how long they are to sleep."""
    return sum(len(_read(pack / "sleeps").splitlines()) for pack in packs)
