"""What is said to Slurm and what it says back, without one: its commands are scripts that behave oddly on request."""

from __future__ import annotations

import os
import shutil
import subprocess
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


@pytest.fixture
def odd(workbench: Workbench) -> Workbench:
    """Return a workbench with one sound pack, on a machine whose Slurm is odd."""
    workbench.lay("01_confirmed")
    _state(workbench).mkdir()
    workbench.variables.update(FAKE_SLURM=str(_state(workbench)), PATH=f"{FAKE}{os.pathsep}{os.environ['PATH']}")
    return workbench


def _state(odd: Workbench) -> Path:
    """Return the folder that says how Slurm is odd."""
    return odd.folder / "slurm"


def _is_odd(odd: Workbench, **how: object) -> None:
    """Make Slurm odd."""
    for name, value in how.items():
        (_state(odd) / name).write_text(str(value))


def _cell(odd: Workbench, *arguments: str, status: int) -> dict[str, Any]:
    """Run a sweep to its end; return its only cell."""
    (cell,) = odd.swept("--slurm", *arguments, status=status).values()
    return cell


def _killed(odd: Workbench) -> None:
    """Run a sweep, and kill it when it has submitted an array."""
    command = odd.command("sweep", "--slurm")
    with subprocess.Popen(command, env=os.environ | odd.variables, stderr=subprocess.PIPE, text=True) as one:
        assert one.stderr
        assert any("Slurm's job 100" in line for line in one.stderr)
        one.kill()


def _scripts(odd: Workbench) -> list[str]:
    """Return what sbatch was asked for, each array that was taken."""
    return [path.read_text() for path in sorted(_state(odd).glob("job-*"))]


def test_options_of_sbatch_are_handed_on(odd: Workbench) -> None:
    _cell(odd, "--slurm-option", "partition=gpu", "--slurm-option", "constraint=nvme&ib", "--jobs", "3", status=0)
    (script,) = _scripts(odd)
    asked = set(script.replace("#SBATCH --", "").splitlines())
    assert {"partition=gpu", "constraint='nvme&ib'", "cpus-per-task=3", "requeue", "open-mode=append"} <= asked
    assert not any(line.startswith("gres") for line in asked), "a lane on cores asks for no GPU"


def test_a_budget_that_ends_cancels_what_is_left(odd: Workbench) -> None:
    _is_odd(odd, idle="")
    cell = _cell(odd, "--budget", "1s", status=5)
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", "the budget ended before Slurm was through with it")
    assert not cell["changes"], "that is the user's own choice"
    assert (_state(odd) / "cancelled").read_text().startswith("--name=reproducer-")


def test_what_cannot_be_read_is_not_run(odd: Workbench) -> None:
    _is_odd(odd, damages="")
    cell = _cell(odd, status=1)
    assert cell["verdict"] == "NOT_RUN"
    assert cell["reason"].startswith("Slurm: task 100 returned nothing that can be read: ")
    assert [change["kind"] for change in cell["changes"]] == ["not run"]


def test_what_slurm_does_not_take_is_not_run_and_nothing_private_is_said(odd: Workbench) -> None:
    _is_odd(odd, refuses=f"Batch job submission failed: see {Path.home()}/limits")
    cell = _cell(odd, status=1)
    reason = "Slurm does not take a task on cpu: Batch job submission failed: see $HOME/limits"
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", reason)
    assert [change["kind"] for change in cell["changes"]] == ["not run"]


def test_a_pack_that_changed_meanwhile_is_submitted_again(odd: Workbench) -> None:
    _is_odd(odd, damages="", forgets="")
    _killed(odd)
    (_state(odd) / "damages").unlink()
    script = odd.packs / "01_confirmed/reproduce.py"
    script.write_text(script.read_text() + "# another comment\n")
    assert _cell(odd, status=0)["verdict"] == "CONFIRMED"
    assert len(_scripts(odd)) == 2


def test_the_next_command_follows_the_array_of_one_that_was_killed(odd: Workbench) -> None:
    _killed(odd)
    assert _cell(odd, status=0)["verdict"] == "CONFIRMED"
    assert len(_scripts(odd)) == 1


def test_an_array_whose_command_was_killed_before_it_named_the_work_is_submitted_again(odd: Workbench) -> None:
    _killed(odd)
    (work,) = odd.folder.glob("sweeps/*.slurm/jobs/*_submitted.pkl")
    work.unlink()
    assert (_cell(odd, status=0)["verdict"], len(_scripts(odd))) == ("CONFIRMED", 2)


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


def test_a_machine_without_slurm_says_so(odd: Workbench) -> None:
    (odd.folder / "bin").mkdir()
    for name in ("git", "rm"):
        (odd.folder / "bin" / name).symlink_to(str(shutil.which(name)))
    ended = odd.run("sweep", "--slurm", PATH=str(odd.folder / "bin"))
    assert (ended.returncode, "sbatch is not on PATH. Next: " in ended.stderr) == (2, True), ended.stderr


def test_an_installation_without_the_extra_says_so(odd: Workbench) -> None:
    (odd.folder / "submitit.py").write_text("raise ImportError")
    ended = odd.run("sweep", "--slurm", PYTHONPATH=str(odd.folder))
    assert (ended.returncode, "Next: pip install -e '.[slurm]'" in ended.stderr) == (2, True), ended.stderr


def test_slurm_that_cannot_be_asked_is_not_the_end_of_a_task(monkeypatch: pytest.MonkeyPatch, odd: Workbench) -> None:
    for name in ("FAKE_SLURM", "PATH"):
        monkeypatch.setenv(name, odd.variables[name])
    _is_odd(odd, away=1)
    with pytest.raises(AwayError, match="Unable to contact"):
        slurm.states(["100"])
    assert slurm.states(["100"]) == {}
    _is_odd(odd, forgets="")
    assert slurm.states(["100"]) == {}
