"""A report from one run: what was judged there, what was not, and a GPU that the pack does not list."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from testing import toys
from testing.workbench import REPOSITORY, Workbench, empty

TEMPLATE = """# A title

**Wrong result**: it is wrong.

{{verdicts}}

On the CPU {{figure:cpu:max_error}}, on the GPU {{figure:sm_90a:max_error}}.

| where | error |
| --- | --- |
| cpu | {{figure:cpu:max_error}} |
| sm_90a | {{figure:sm_90a:max_error}} |
| both | {{figure:cpu:max_error}}, {{figure:sm_90a:max_error}} |

{{versions:sm_90a}}
"""
GPU = '\n[targets.sm_90a]\nevidence = ["executed"]\nverdict = "CONFIRMED"\nloads = []\n'


def _with_gpu_target(pack: Path) -> None:
    """Let a toy pack list a GPU, and its report speak of both targets."""
    definition = pack / "pack.toml"
    definition.write_text(definition.read_text() + GPU)
    (pack / "report.in.md").write_text(TEMPLATE)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Run a toy pack of two targets on the CPU alone; nothing is recorded."""
    bench = empty(tmp_path_factory.mktemp("judged"))
    _with_gpu_target(bench.lay("01_confirmed"))
    ended = bench.run("run", "1", "--target", "cpu")
    assert ended.returncode == 0, ended.stderr
    return bench


def _report(bench: Workbench, *arguments: str) -> tuple[int, str, str]:
    ended = bench.run("report", "1", "--cache", str(bench.cache), *arguments)
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode, ended.stdout, ended.stderr


def _gpu(bench: Workbench, capability: list[int]) -> dict[str, str]:
    """Give the host one toy GPU; return the variables that show it."""
    state = bench.folder / "gpus.json"
    state.write_text(json.dumps({"devices": [{"name": "Toy GPU", "capability": capability}]}))
    fake = REPOSITORY / "tests/resources/fake_nvml"
    return {"PYTHONPATH": str(fake), "NCCL_FAKE_STATE": str(state), "CUDA_VISIBLE_DEVICES": "0"}


def test_it_speaks_of_what_was_judged_and_says_of_the_rest_that_it_was_not(judged: Workbench) -> None:
    status, text, _ = _report(judged, "--from", "last")
    assert status == 0
    assert "which judged cpu (traced). Not judged in it: sm_90a;" in text
    assert text.startswith("# A title\n\nFilled from one run")
    assert "| cpu | traced | CPU | CONFIRMED |" in text
    assert "On the CPU 3, on the GPU [sm_90a: not judged]." in text
    assert "| sm_90a | [sm_90a" not in text
    assert "| both | 3, [sm_90a: not judged] |" in text
    assert "GPU: none used (traced for cpu)" in text


def test_the_committed_report_still_wants_every_receipt(judged: Workbench) -> None:
    status, text, errors = _report(judged)
    assert (status, text) == (2, "")
    assert "no receipt to report from" in errors


@pytest.mark.parametrize("form", ["issue", "pr-comment"])
def test_a_run_folder_in_full(judged: Workbench, form: str) -> None:
    (run,) = (judged.cache / "runs").iterdir()
    status, text, _ = _report(judged, "--from", str(run), "--full", "--to", form)
    assert status == 0
    assert "Log, cpu (traced)" in text
    assert "(the log is missing)" not in text


def test_a_run_of_another_tree_is_refused(judged: Workbench, tmp_path: Path) -> None:
    (run,) = (judged.cache / "runs").iterdir()
    other = Path(shutil.copytree(run, tmp_path / "run"))
    path = other / "receipts/01_confirmed/cpu.traced.json"
    document = json.loads(path.read_text())
    document["upstream"] |= {"origin": "path", "version": "path at 1"}
    path.write_text(json.dumps(document))
    status, text, errors = _report(judged, "--from", str(other))
    assert (status, text) == (2, "")
    assert "that run judged path at 1 (path), and the report is about the pinned 1.0. Next: runner.py run" in errors


@pytest.mark.parametrize(
    ("harm", "status", "said"),
    [
        ("nothing", 5, "that run judged nothing of it. Next: runner.py run 01_confirmed"),
        ("ERROR", 5, "that run judged nothing of it (cpu gave ERROR)"),
        ("broken", 2, "cpu.traced.json"),
    ],
)
def test_a_run_that_judged_nothing(judged: Workbench, tmp_path: Path, harm: str, status: int, said: str) -> None:
    (run,) = (judged.cache / "runs").iterdir()
    other = Path(shutil.copytree(run, tmp_path / "run"))
    path = other / "receipts/01_confirmed/cpu.traced.json"
    if harm == "nothing":
        path.unlink()
    elif harm == "broken":
        path.write_text(path.read_text()[:100])
    else:
        path.write_text(json.dumps(json.loads(path.read_text()) | {"verdict": harm}))
    found, text, errors = _report(judged, "--from", str(other))
    assert (found, text) == (status, "")
    assert said in errors


def test_last_is_the_last_run_of_this_pack(workbench: Workbench) -> None:
    workbench.lay("01_confirmed")
    workbench.lay("03_fix_ineffective")
    assert workbench.run("run", "1").returncode == 0
    workbench.run("run", "3")
    status, text, _ = _report(workbench, "--from", "last")
    assert (status, "| cpu | traced | CPU | CONFIRMED |" in text) == (0, True)
    ended = workbench.run("report", "3", "--cache", str(workbench.folder / "none"), "--from", "last")
    assert (ended.returncode, "no run in the cache has receipts of 03_fix_ineffective" in ended.stderr) == (2, True)


def test_a_gpu_that_is_not_listed_runs_with_no_expectation(workbench: Workbench) -> None:
    pack = workbench.lay("41_executes_on_a_gpu", "01_gpu")
    variables = _gpu(workbench, [10, 0])
    ended = workbench.run("run", "1", **variables)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "sm_100a: no expectation: pack.toml does not list this target" in ended.stdout
    assert "CONFIRMED (no expectation)" in ended.stdout
    (pack / "report.in.md").write_text("# A title\n\n{{verdicts}}\n")
    status, text, _ = _report(workbench, "--from", "last")
    assert status == 0
    assert "| sm_100a | executed | Toy GPU | CONFIRMED (no expectation) | not measured |" in text
    assert "judged sm_100a (executed; no expectation: the pack does not list it). Not judged in it: sm_90a" in text
    table = workbench.run("list", "--cache", str(workbench.cache), "--from", "last").stdout
    assert "no expectation" in table
    bundle = workbench.run("bundle", "1", "--cache", str(workbench.cache), "--from", "last")
    assert (bundle.returncode, "a target that pack.toml does not list" in bundle.stderr) == (2, True)


def test_what_is_not_listed_never_deviates_unless_it_says_nothing(workbench: Workbench) -> None:
    pack = workbench.lay("41_executes_on_a_gpu", "01_gpu")
    toys.blind(pack)
    status, (row,) = workbench.rows("1", "--target", "auto", **_gpu(workbench, [10, 0]))
    assert (status, row["verdict"], row["expectation"], row["deviation"]) == (0, "FIXED_UPSTREAM", "no expectation", "")
    toys.replace(pack / "contract.py", "assert scale.scale(VALUES, [1.0] * 3)", "assert [] and scale.scale(VALUES, [])")
    status, (row,) = workbench.rows("1", "--target", "auto", **_gpu(workbench, [10, 0]))
    assert (status, row["verdict"], row["deviation"]) == (1, "CONTROL_FAILED", "controls are wrong")


def test_it_is_neither_recorded_nor_mutated(workbench: Workbench) -> None:
    pack = workbench.lay("41_executes_on_a_gpu", "01_gpu")
    ended = workbench.run("run", "1", "--record", **_gpu(workbench, [10, 0]))
    assert (ended.returncode, "its receipt stays in the run folder" in ended.stdout) == (0, True), ended.stderr
    assert not (pack / "receipts").exists()
    mutated = workbench.run("mutate", "1", "--target", "sm_100a", **_gpu(workbench, [10, 0]))
    assert (mutated.returncode, "pack.toml does not list this target" in mutated.stdout) == (5, True), mutated.stdout
