"""From cells to arrays: their order, their tasks, their time limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.core.cache import Cache
from harness.host import host
from harness.host.host import GpuPool
from harness.lane.cell import Cell
from harness.pack import load
from harness.schedule import slurm, slurm_engine
from harness.schedule.lanes import Account
from harness.schedule.selection import Request, cells_of
from harness.schedule.session import Journal, Session
from harness.schedule.slurm import Settings, Work
from harness.schedule.task import tasks
from testing import toys

NODES = Settings({"sm_90a": "h200"}, {})


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """Return the cell of a toy pack on a GPU that a cluster promises."""
    pack = load.load_pack(toys.lay(tmp_path, "41_executes_on_a_gpu", "0" * 64))
    here = replace(host.detect(GpuPool([], "", [])), gpus=NODES.gpus)
    (found,) = cells_of([pack], "all", Request(), here, Cache(tmp_path / "cache"))
    assert found.gpu == "sm_90a"
    return found


def work(cell: Cell, number: int, seconds: float | None, *, gpus: int = 1, ranks: int = 1) -> Work:
    """Return the cell under another name, with lanes that took so long."""
    stated = replace(cell.stated, gpus=gpus, ranks=ranks)
    definition = replace(cell.pack.definition, targets={"sm_90a": stated})
    one = replace(cell, pack=replace(cell.pack, definition=definition), column=f"copy{number}")
    here = replace(host.detect(GpuPool([], "", [])), gpus=NODES.gpus)
    lanes = tuple(replace(task, seconds=seconds) for task in tasks(one, here, 1))
    return Work(one, lanes, f"gpu:h200:{gpus}", Cache(Path()), 2 * ranks, {})


def test_there_is_an_array_for_each_number_of_gpus_and_ranks_and_the_longest_comes_first(cell: Cell) -> None:
    cells = [work(cell, number, seconds) for number, seconds in enumerate((3.0, None, 7.0))]
    cells += [work(cell, 8, 1.0, ranks=2), work(cell, 9, 1.0, gpus=2)]
    arrays = [[one.cell.column for one in array] for array in slurm_engine.group_into_arrays(cells)]
    assert arrays == [["copy1", "copy2", "copy0"], ["copy8"], ["copy9"]]


def test_the_time_limit_is_enough_for_the_time_outs_of_the_longest(cell: Cell) -> None:
    short = work(cell, 1, 0.1)
    long = replace(short, lanes=60 * short.lanes)
    assert cell.stated.timeout_s == 60
    assert slurm_engine.time_limit_minutes([short]) == 5 + 2
    assert slurm_engine.time_limit_minutes([short, long]) == 5 + 120


def test_a_cancelled_task_is_submitted_again_even_if_its_submission_was_interrupted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(slurm, "cancel", lambda _: "")
    jobs = tmp_path / "jobs"
    jobs.mkdir()
    for name in ("7_0_submitted.pkl", "7_0_0_result.pkl", "7_1_submitted.pkl"):
        (jobs / name).touch()
    session = Session(Cache(tmp_path), host.detect(GpuPool([], "", [])), [], tmp_path, Journal(), lambda _: "")
    slurm_engine.Collection(NODES, Account(session), tmp_path).cancel()
    assert sorted(path.name for path in jobs.iterdir()) == ["7_0_0_result.pkl", "7_0_submitted.pkl"]
