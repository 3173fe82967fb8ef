"""What is said to Slurm and what it says back, without one: its commands are scripts that behave oddly on request."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from harness.cluster import slurm
from harness.cluster.slurm import AwayError, Job, RefusedError, Settings, TaskState
from harness.commands import sweep
from harness.core.errors import HarnessError
from harness.core.words import Exit
from testing.workbench import REPOSITORY, Workbench

FAKE = REPOSITORY / "tests/resources/fake_slurm"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("7", [7]),
        ("0-3", [0, 1, 2, 3]),
        ("[1-3,8]", [1, 2, 3, 8]),
        ("0-2%4", [0, 1, 2]),
        ("0-8:4", [0, 4, 8]),
        ("N/A", []),
        ("", []),
    ],
)
def test_the_numbers_of_tasks_are_read_as_squeue_writes_them(text: str, found: list[int]) -> None:
    assert list(slurm.indices(text)) == found


def test_an_array_asks_for_what_its_tasks_need(tmp_path: Path) -> None:
    job = Job("name", 40, "gpu:h200:2", 2, 17, tmp_path / "%a.out", tmp_path, ("python", "a b"))
    settings = Settings("gpu", "proj", "nvme&ib")
    assert job.arguments(settings) == [
        *("sbatch", "--parsable", "--job-name=name", "--array=0-39", "--ntasks=1", "--cpus-per-task=2"),
        *("--gres=gpu:h200:2", "--time=17", "--requeue", "--open-mode=append", f"--output={tmp_path}/%a.out"),
        *(f"--chdir={tmp_path}", "--partition=gpu", "--account=proj", "--constraint=nvme&ib"),
        "--wrap=exec python 'a b'",
    ]


def test_a_task_that_is_requeued_is_not_over() -> None:
    over = {
        state for state in ("PENDING", "REQUEUED", "COMPLETING", "NODE_FAIL", "TIMEOUT") if TaskState(state).is_over
    }
    assert over == {"NODE_FAIL", "TIMEOUT"}


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
        """What the runner needs in its environment."""
        return {"FAKE_SLURM": str(self.state), "PATH": f"{FAKE}{os.pathsep}{os.environ['PATH']}"}

    def sweep(self, *arguments: str, status: int) -> subprocess.CompletedProcess[str]:
        """Run a sweep to its end."""
        places = ("--slurm", "--runs", str(self.bench.folder / "sweeps"), "--poll", "0.2")
        ended = self.bench.run("sweep", *places, *arguments, **self.variables)
        assert ended.returncode == status, ended.stdout + ended.stderr
        return ended

    def cell(self, name: str) -> dict[str, Any]:
        """Return a cell of the newest run."""
        newest = max(self.bench.folder.glob("sweeps/*/results.json"))
        return next(cell for cell in json.loads(newest.read_text())["cells"] if cell["name"] == name)

    def arrays(self) -> int:
        """Count the arrays that were taken."""
        return len(list(self.state.glob("job-*.json")))


@pytest.fixture
def odd(workbench: Workbench) -> Odd:
    """Return a workbench with one sound pack."""
    workbench.lay("01_confirmed")
    return Odd(workbench)


def test_an_array_that_was_taken_in_silence_and_then_forgotten_is_counted_once(odd: Odd) -> None:
    odd.is_odd(silent="", away=2, forgets="")
    said = odd.sweep(status=0).stderr
    assert odd.cell("01_confirmed/cpu")["verdict"] == "CONFIRMED"
    assert odd.arrays() == 1
    assert "Slurm cannot be reached: Unable to contact slurm controller" in said


def test_slurm_out_of_reach_ends_the_command_and_the_next_goes_on(odd: Odd) -> None:
    odd.is_odd(unreachable="")
    ended = odd.sweep(status=1)
    assert "error: Slurm cannot be reached: Batch job submission failed: Unable to contact" in ended.stderr
    assert "Next: the same command again" in ended.stderr
    (odd.state / "unreachable").unlink()
    odd.sweep(status=0)
    assert odd.arrays() == 1
    assert len(list(odd.bench.folder.glob("sweeps/*/run.json"))) == 1


def test_a_budget_that_ends_cancels_what_is_left(odd: Odd) -> None:
    odd.is_odd(idle="")
    odd.sweep("--budget", "1s", status=5)
    cell = odd.cell("01_confirmed/cpu")
    assert (cell["verdict"], cell["reason"]) == ("NOT_RUN", "the budget ended before Slurm was through with it")
    assert not cell["changes"], "that is the user's own choice"
    assert (odd.state / "cancelled").read_text() == "100"


def test_what_cannot_be_read_is_not_run(odd: Odd) -> None:
    odd.is_odd(damages="")
    odd.sweep(status=1)
    cell = odd.cell("01_confirmed/cpu")
    assert cell["verdict"] == "NOT_RUN"
    assert cell["reason"].startswith("what its task published cannot be read: ")
    assert [change["kind"] for change in cell["changes"]] == ["not run"]


def test_a_refusal_is_said_without_what_is_private(odd: Odd) -> None:
    odd.is_odd(refuses=f"Batch job submission failed: see {Path.home()}/limits")
    odd.sweep(status=5)
    assert odd.cell("01_confirmed/cpu")["reason"].endswith("Batch job submission failed: see $HOME/limits")


def test_a_pack_that_changed_meanwhile_is_submitted_again(odd: Odd) -> None:
    odd.is_odd(damages="", forgets="")
    lost = odd.bench.folder / "sweeps"
    with subprocess.Popen(
        odd.bench.command("sweep", "--slurm", "--runs", str(lost), "--poll", "5"),
        env=os.environ | odd.variables,
        stderr=subprocess.PIPE,
        text=True,
    ) as one:
        assert one.stderr
        assert any("Slurm's job 100" in line for line in one.stderr)
        one.kill()
    (odd.state / "damages").unlink()
    probe = odd.bench.packs / "01_confirmed/reproduce.py"
    probe.write_text(probe.read_text() + "# another comment\n")
    odd.sweep(status=0)
    assert odd.arrays() == 2
    assert odd.cell("01_confirmed/cpu")["verdict"] == "CONFIRMED"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--slurm --gpus 0", "--gpus: with --slurm the lanes run elsewhere"),
        ("--slurm --latest --bisect 1m", "--bisect: with --slurm"),
        ("--partition p", "Next: runner.py sweep --slurm --partition ..."),
        ("--slurm --gpu-type sm_90=h200", "no architecture such as sm_80"),
        ("--slurm --gpu-type sm_90a=h200:4", "name each architecture once"),
        ("--slurm --gpu-type sm_80=a --gpu-type sm_80=b", "name each architecture once"),
    ],
)
def test_options_that_do_not_fit_together_are_refused(arguments: str, words: str) -> None:
    with pytest.raises(HarnessError) as error:
        sweep.command.main(arguments.split(), standalone_mode=False)
    assert words in str(error.value)
    assert error.value.status == Exit.WRONG_CALL


def test_a_machine_without_slurm_says_so(odd: Odd) -> None:
    (odd.bench.folder / "bin").mkdir()
    (odd.bench.folder / "bin/git").symlink_to("/usr/bin/git")
    places = ("--slurm", "--runs", str(odd.bench.folder / "sweeps"))
    ended = odd.bench.run("sweep", *places, PATH=str(odd.bench.folder / "bin"))
    assert (ended.returncode, "sbatch is not on PATH. Next: " in ended.stderr) == (2, True), ended.stderr


def test_slurm_that_cannot_be_asked_is_neither_a_refusal_nor_an_end(monkeypatch: pytest.MonkeyPatch, odd: Odd) -> None:
    for name, value in odd.variables.items():
        monkeypatch.setenv(name, value)
    odd.is_odd(away=1)
    with pytest.raises(AwayError, match="Unable to contact"):
        slurm.states(["100"])
    assert slurm.states(["100"]) == {}
    odd.is_odd(forgets="")
    assert slurm.states(["100"]) == {}
    job = Job("n", 1, "", 1, 10, odd.state / "%a.out", odd.state, (sys.executable, "-c", ""))
    odd.is_odd(refuses="Invalid feature specification")
    with Path(os.devnull).open() as stream, pytest.raises(RefusedError, match="Invalid feature specification"):
        slurm.submit(job, Settings(), stream.fileno())
