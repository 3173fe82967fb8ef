"""What is said to Slurm and what it says back, without one: its commands are scripts that behave oddly on request."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.commands import cli
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.schedule import slurm
from harness.schedule.slurm import AwayError
from testing.workbench import REPOSITORY, Workbench

FAKE = REPOSITORY / "tests/resources/fake_slurm"


def test_a_gpu_that_is_promised_is_of_its_architecture() -> None:
    targets = ("sm_80", "sm_90a", "sm_100a", "sm_121a")
    promised = slurm.settings([f"{target}=x" for target in targets], []).gpus
    assert tuple(gpu.target for gpu in promised[: len(targets)]) == targets
    for wrong in ("sm_90", "cpu", "sm_", "sm_80a"):
        with pytest.raises(HarnessError, match="no such value"):
            slurm.settings([wrong], [])


@dataclass(frozen=True)
class Odd:
    """A workbench on a machine whose Slurm is odd."""

    bench: Workbench

    @property
    def state(self) -> Path:
        """The folder that says how."""
        folder = self.bench.folder / "slurm"
        folder.mkdir(exist_ok=True)
        return folder

    def is_odd(self, **how: object) -> None:
        """Make it so."""
        for name, value in how.items():
            (self.state / name).write_text(str(value))

    @property
    def variables(self) -> dict[str, str]:
        """The environment of the runner."""
        return os.environ | {"FAKE_SLURM": str(self.state), "PATH": f"{FAKE}{os.pathsep}{os.environ['PATH']}"}

    def command(self, *arguments: str) -> list[str]:
        """Build the command line of a sweep."""
        return self.bench.command("sweep", "--slurm", "--runs", str(self.bench.folder / "sweeps"), *arguments)

    def sweep(self, *arguments: str, status: int) -> str:
        """Run a sweep to its end, and return what it said on standard error."""
        command = self.command(*arguments)
        ended = subprocess.run(command, env=self.variables, capture_output=True, text=True, check=False, timeout=120)
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended.stderr

    def killed(self) -> None:
        """Run a sweep, and kill it when it has submitted an array."""
        with subprocess.Popen(self.command(), env=self.variables, stderr=subprocess.PIPE, text=True) as one:
            assert one.stderr
            assert any("Slurm's job 100" in line for line in one.stderr)
            one.kill()

    def cell(self, name: str = "01_confirmed/cpu") -> dict[str, Any]:
        """Return a cell of the newest run."""
        newest = max(self.bench.folder.glob("sweeps/*/results.json"))
        return next(cell for cell in json.loads(newest.read_text())["cells"] if cell["name"] == name)

    def scripts(self) -> list[str]:
        """Return what sbatch was asked for, each array that was taken."""
        return [path.read_text() for path in sorted(self.state.glob("job-*"))]


@pytest.fixture
def odd(workbench: Workbench) -> Odd:
    """Return a workbench with one sound pack."""
    workbench.lay("01_confirmed")
    return Odd(workbench)


def test_options_of_sbatch_are_handed_on(odd: Odd) -> None:
    odd.sweep(*("--slurm-option", "partition=gpu", "--slurm-option", "constraint=nvme&ib"), "--jobs", "3", status=0)
    (script,) = odd.scripts()
    asked = set(script.replace("#SBATCH --", "").splitlines())
    assert {"partition=gpu", "constraint='nvme&ib'", "cpus-per-task=3", "requeue", "open-mode=append"} <= asked
    assert not any(line.startswith("gres") for line in asked), "a lane on cores asks for no GPU"


def test_a_budget_that_ends_cancels_what_is_left(odd: Odd) -> None:
    odd.is_odd(idle="")
    odd.sweep("--budget", "1s", status=5)
    cell = odd.cell()
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", "the budget ended before Slurm was through with it")
    assert not cell["changes"], "that is the user's own choice"
    assert (odd.state / "cancelled").read_text().startswith("--name=reproducer-")


def test_what_cannot_be_read_is_not_run(odd: Odd) -> None:
    odd.is_odd(damages="")
    odd.sweep(status=1)
    cell = odd.cell()
    assert cell["verdict"] == "NOT_RUN"
    assert cell["reason"].startswith("Slurm: task 100 returned nothing that can be read: ")
    assert [change["kind"] for change in cell["changes"]] == ["not run"]


def test_what_slurm_does_not_take_is_not_run_and_nothing_private_is_said(odd: Odd) -> None:
    odd.is_odd(refuses=f"Batch job submission failed: see {Path.home()}/limits")
    odd.sweep(status=1)
    cell = odd.cell()
    reason = "Slurm does not take a task on cpu: Batch job submission failed: see $HOME/limits"
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", reason)
    assert [change["kind"] for change in cell["changes"]] == ["not run"]


def test_a_pack_that_changed_meanwhile_is_submitted_again(odd: Odd) -> None:
    odd.is_odd(damages="", forgets="")
    odd.killed()
    (odd.state / "damages").unlink()
    script = odd.bench.packs / "01_confirmed/reproduce.py"
    script.write_text(script.read_text() + "# another comment\n")
    odd.sweep(status=0)
    assert len(odd.scripts()) == 2
    assert odd.cell()["verdict"] == "CONFIRMED"


def test_the_next_command_follows_the_array_of_one_that_was_killed(odd: Odd) -> None:
    odd.killed()
    odd.sweep(status=0)
    assert len(odd.scripts()) == 1
    assert odd.cell()["verdict"] == "CONFIRMED"


def test_an_array_whose_command_was_killed_before_it_named_the_work_is_submitted_again(odd: Odd) -> None:
    odd.killed()
    (work,) = odd.bench.folder.glob("sweeps/*.slurm/jobs/*_submitted.pkl")
    work.unlink()
    odd.sweep(status=0)
    assert (len(odd.scripts()), odd.cell()["verdict"]) == (2, "CONFIRMED")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--slurm-option partition=p", "no cluster was asked for. Next: runner.py sweep --slurm ..."),
        ("--slurm --gpu-type sm_90=h200", "--gpu-type sm_90=h200: no such value"),
        ("--slurm --gpu-type sm_90a=h200:4", "--gpu-type sm_90a=h200:4: no such value"),
        ("--slurm --gpu-type sm_80=a --gpu-type sm_80=b", "--gpu-type sm_80=b: no such value, or given twice"),
        ("--slurm --slurm-option array=0-3", "array=0-3: no such value"),
        ("--slurm --slurm-option -p=gpu", "-p=gpu: no such value"),
        ("--slurm --slurm-option qos=a --slurm-option qos=b", "qos=b: no such value, or given twice"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(HarnessError) as error:
        cli.main(["sweep", *arguments.split()], standalone_mode=False)
    assert words in str(error.value)
    assert error.value.status == Exit.WRONG_CALL


def test_a_machine_without_slurm_says_so(odd: Odd) -> None:
    (odd.bench.folder / "bin").mkdir()
    for name in ("git", "rm"):
        (odd.bench.folder / "bin" / name).symlink_to(str(shutil.which(name)))
    ended = odd.bench.run(*odd.command()[odd.command().index("sweep") :], PATH=str(odd.bench.folder / "bin"))
    assert (ended.returncode, "sbatch is not on PATH. Next: " in ended.stderr) == (2, True), ended.stderr


def test_an_installation_without_the_extra_says_so(odd: Odd) -> None:
    (odd.bench.folder / "submitit.py").write_text("raise ImportError")
    ended = odd.bench.run(*odd.command()[odd.command().index("sweep") :], PYTHONPATH=str(odd.bench.folder))
    assert (ended.returncode, "Next: pip install -e '.[slurm]'" in ended.stderr) == (2, True), ended.stderr


def test_slurm_that_cannot_be_asked_is_not_the_end_of_a_task(monkeypatch: pytest.MonkeyPatch, odd: Odd) -> None:
    for name in ("FAKE_SLURM", "PATH"):
        monkeypatch.setenv(name, odd.variables[name])
    odd.is_odd(away=1)
    with pytest.raises(AwayError, match="Unable to contact"):
        slurm.states(["100"])
    assert slurm.states(["100"]) == {}
    odd.is_odd(forgets="")
    assert slurm.states(["100"]) == {}
