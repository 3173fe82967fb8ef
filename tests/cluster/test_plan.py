"""From cells to arrays: their order, their tasks, their time limits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from harness.cluster import plan
from harness.cluster.plan import Wanted
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import LaneName
from harness.host import host
from harness.host.gpus import GpuPool
from harness.pack import load
from harness.schedule.selection import Request, cells_of
from harness.schedule.task import tasks
from harness.verdict.cell import Cell
from testing import toys


@pytest.fixture
def cell(tmp_path: Path) -> Cell:
    """Return the cell of a toy pack on a GPU that a cluster promises."""
    pack = load.load_pack(toys.lay(tmp_path, "41_executes_on_a_gpu", "0" * 64))
    here = replace(host.detect(GpuPool([], "", [])), gpus=plan.promised([("sm_90a", "h200")], [pack]))
    (found,) = cells_of([pack], "all", Request(), here, Cache(tmp_path / "cache"))
    assert found.gpu == "sm_90a"
    return found


def wanted(cell: Cell, number: int, seconds: float | None, *, gpus: int = 1, ranks: int = 1) -> Wanted:
    """Return the cell under another name, with lanes that took so long."""
    stated = replace(cell.stated, gpus=gpus, ranks=ranks)
    definition = replace(cell.pack.definition, targets={"sm_90a": stated})
    one = replace(cell, pack=replace(cell.pack, definition=definition), column=f"copy{number}")
    here = replace(host.detect(GpuPool([], "", [])), gpus=(plan.gpu_of("sm_90a", "h200"),))
    return Wanted(one, tuple(replace(task, seconds=seconds) for task in tasks(one, here, 1)))


def test_there_is_an_array_for_each_number_of_gpus_and_ranks_and_the_longest_comes_first(cell: Cell) -> None:
    cells = [wanted(cell, number, seconds) for number, seconds in enumerate((3.0, None, 7.0))]
    cells += [wanted(cell, 8, 1.0, ranks=2), wanted(cell, 9, 1.0, gpus=2)]
    arrays = plan.grouped(cells)
    assert [[one.cell.column for task in array for one in task] for array in arrays] == [
        ["copy1", "copy2", "copy0"],
        ["copy8"],
        ["copy9"],
    ]


def test_no_array_has_more_tasks_than_slurm_takes(cell: Cell) -> None:
    one = wanted(cell, 1, 3.0)
    (array,) = plan.grouped([one] * (2 * plan.MOST_TASKS + 1))
    assert len(array) <= plan.MOST_TASKS
    assert sum(map(len, array)) == 2 * plan.MOST_TASKS + 1


def test_the_time_limit_follows_from_what_is_known_and_never_from_more_than_the_time_out(cell: Cell) -> None:
    assert cell.stated.timeout_s == 60
    assert wanted(cell, 1, None).longest == 2 * 60
    assert wanted(cell, 1, 5.0).longest == 2 * plan.MARGIN * 5.0
    assert wanted(cell, 1, 50.0).longest == 2 * 60
    long = replace(wanted(cell, 1, None), cell=replace(cell, timeout=3600.0))
    assert plan.minutes([[long]]) == 125
    assert plan.minutes([[wanted(cell, 1, 0.1)]]) == plan.SHORTEST


def test_a_gpu_that_is_promised_is_of_its_architecture() -> None:
    found = {
        target: plan.gpu_of(target, "x").compute_capability for target in ("sm_80", "sm_90a", "sm_100a", "sm_121a")
    }
    assert found == {"sm_80": (8, 0), "sm_90a": (9, 0), "sm_100a": (10, 0), "sm_121a": (12, 1)}
    for wrong in ("sm_90", "cpu", "sm_", "sm_80a"):
        with pytest.raises(HarnessError, match="no architecture"):
            plan.gpu_of(wrong, "x")


def test_the_file_of_an_array_says_what_its_tasks_are(cell: Cell, tmp_path: Path) -> None:
    one = wanted(cell, 1, 3.0)
    array = plan.Array(
        schema=plan.SCHEMA,
        number=1,
        name="reproducer-1",
        target="sm_90a",
        gpus=2,
        kind="h200",
        packs="packs-0001",
        cache="cache",
        mirrors="",
        repeat=1,
        jobs=2,
        minutes=10,
        tasks=((one.planned(),),),
    )
    plan.write(tmp_path, array)
    assert plan.read_all(tmp_path) == [array]
    assert (array.gres, array.place) == ("gpu:h200:2", "gpus h200,h200")
    assert replace(array, kind="").gres == "gpu:2"
    assert (replace(array, target="").gres, replace(array, target="").place) == ("", "cpu")
    assert len(one.planned().keys) == len(LaneName)
    plan.path_of(tmp_path, 2).write_text("{")
    with pytest.raises(HarnessError, match="Next: remove that folder"):
        plan.read_all(tmp_path)
