"""Which lane goes next, and where: order, memory, several GPUs, quiet."""

from __future__ import annotations

from dataclasses import replace

from harness.core.words import Evidence, LaneName
from harness.host.host import Device, Gpu, place_name
from harness.lane.cell import Cell
from harness.schedule.task import Devices, Places, Task, lower_bound_seconds, rank


def _task(
    toy: Cell,
    name: str,
    seconds: float | None,
    *,
    gpus: int = 0,
    wrong: bool = False,
    alone: bool = False,
    **stated: object,
) -> Task:
    target = replace(toy.pack.definition.targets["cpu"], gpus=max(gpus, 1), **stated)  # type: ignore[arg-type]
    targets = {"cpu": target, "sm_90a": target}
    one = replace(toy.pack, definition=replace(toy.pack.definition, targets=targets))
    toy = replace(toy, is_wrong_fix=wrong, alone=alone)
    where = {"target": "sm_90a", "evidence": Evidence.EXECUTED} if gpus else {}
    return Task(replace(toy, pack=one, **where), LaneName.PRISTINE, 1, name, name, gpus=gpus, seconds=seconds)  # type: ignore[arg-type]


def _device(number: int, memory_gib: float = 140.0, *, is_instance: bool = False) -> Device:
    return Device(str(number), str(number), Gpu("Toy", "9.0"), None, None, is_instance, memory_gib)


def _places(jobs: int, *memory_gib: float) -> Places:
    return Places(jobs, [_device(number, memory) for number, memory in enumerate(memory_gib)])


def _started(ready: list[Task], places: Places) -> list[str]:
    """Start what there is a place for; return the keys in that order."""
    return [task.key for task, _ in _taken(ready, places)]


def _taken(ready: list[Task], places: Places) -> list[tuple[Task, Devices]]:
    found = []
    while (taken := places.take(sorted(ready, key=rank))) is not None:
        ready.remove(taken[0])
        found.append(taken)
    return found


def test_the_longest_goes_first_and_the_unknown_is_taken_for_long(toy: Cell) -> None:
    named = [("short", 1.0), ("unknown", None), ("long", 500.0), ("middle", 50.0)]
    queue = [*(_task(toy, name, seconds) for name, seconds in named)]
    assert _started(queue, _places(9)) == ["long", "unknown", "middle", "short"]
    assert rank(_task(toy, "short with a long one after it", 2.0), 300.0) < rank(_task(toy, "unknown", None))


def test_what_was_left_out_last_time_goes_before_everything(toy: Cell) -> None:
    queue = [_task(toy, "long", 500.0), replace(_task(toy, "left out", 1.0), urgent=True)]
    assert _started(queue, _places(9)) == ["left out", "long"]


def test_what_measures_on_the_cores_has_them_for_itself_and_is_not_passed(toy: Cell) -> None:
    places, first = _places(2), _task(toy, "first", 9.0)
    queue = [first]
    _taken(queue, places)
    measuring = _task(toy, "measures", 1.0, alone=True)
    queue.append(_task(toy, "other", 500.0))
    queue.append(measuring)
    assert _started(queue, places) == [], "the cores are not free, and nothing may pass"
    del places.running[first.key]
    _taken(queue, places)
    del places.running[measuring.key]
    assert _started(queue, places) == ["other"]


def test_lanes_share_a_gpu_as_far_as_its_memory_goes(toy: Cell) -> None:
    lanes = [_task(toy, f"lane {number}", 9.0 - number, gpus=1, gpu_memory_gib=30.0) for number in range(6)]
    assert _started([*lanes], _places(9, 140.0)) == [f"lane {number}" for number in range(4)]
    assert len(_started([*lanes], _places(9, 140.0, 140.0))) == 6
    assert len(_started([*lanes], _places(3, 140.0))) == 3, "there are three jobs"
    assert len(_started([*lanes], _places(9, 20.0))) == 1, "one that is too large for a GPU runs there alone"
    assert len(_started([*lanes], _places(9, 0.0))) == 6, "NVML does not tell"


def test_lanes_are_spread_over_the_gpus(toy: Cell) -> None:
    lanes = [_task(toy, f"lane {number}", 9.0, gpus=1) for number in range(4)]
    numbers = [devices[0].number for _, devices in _taken([*lanes], _places(9, 140.0, 140.0))]
    assert sorted(numbers) == ["0", "0", "1", "1"]


def test_a_lane_gets_its_gpus_together_and_is_not_passed_by_others_of_its_kind(toy: Cell) -> None:
    places = _places(9, 30.0, 30.0)
    small = [_task(toy, f"small {number}", 500.0, gpus=1, gpu_memory_gib=30.0) for number in range(3)]
    queue = [small[0]]
    _taken(queue, places)
    queue.append(_task(toy, "pair", 1.0, gpus=2, gpu_memory_gib=30.0))
    queue += [*small[1:], _task(toy, "on the cores", 5.0)]
    assert _started(queue, places) == ["on the cores"], "a GPU is free, and the pair is waited for"
    del places.running[small[0].key]
    ((pair, devices),) = _taken(queue, places)
    assert (pair.key, place_name(*devices)) == ("pair", "gpus 0,1")


def test_ranks_of_a_lane_share_its_job(toy: Cell) -> None:
    lanes = [_task(toy, name, 9.0, ranks=4) for name in ("first", "second")]
    assert _started([*lanes], _places(2)) == ["first", "second"]


def test_a_wrong_fix_of_several_ranks_counts_as_many_and_is_not_passed(toy: Cell) -> None:
    places, first = _places(4), _task(toy, "first", 9.0)
    queue = [first]
    _taken(queue, places)
    wide, pair = _task(toy, "four ranks", 1.0, ranks=4, wrong=True), _task(toy, "two ranks", 1.0, ranks=2, wrong=True)
    queue += [_task(toy, "long", 500.0), pair, wide]
    assert _started(queue, places) == [], "three cores are free, and four are waited for"
    del places.running[first.key]
    ((task, _),) = _taken(queue, places)
    assert task.key == "four ranks"
    del places.running[task.key]
    queue.append(_task(toy, "short", 1.0))
    queue.append(_task(toy, "shorter", 0.5))
    assert _started(queue, places) == ["two ranks", "long", "short"], "the fourth core is the last"


def test_a_wrong_fix_counts_the_few_processes_that_its_contract_may_compile_in(toy: Cell) -> None:
    lanes = [_task(toy, f"lane {number}", 9.0, gpus=1, processes=8) for number in range(3)]
    assert len(_started([*lanes], _places(5, 140.0))) == 3
    wrong = [replace(lane, cell=replace(lane.cell, is_wrong_fix=True)) for lane in lanes]
    assert [lane.processes for lane in (lanes[0], wrong[0])] == [8, 2], "it is over with the first failed check"
    assert len(_started([*wrong], _places(5, 140.0))) == 2
    assert len(_started([*wrong], _places(1, 140.0))) == 1, "one that wants more than there is runs alone"
    again = replace(wrong[0], cell=replace(wrong[0].cell, alone=True))
    assert again.processes == 8, "nobody else wants the cores"
    assert _task(toy, "one", 9.0, processes=1).processes == 1


def test_a_lane_of_a_wrong_fix_does_not_measure(toy: Cell) -> None:
    lane = _task(toy, "lane", 9.0, gpus=1, measures=True)
    assert lane.cell.measures
    assert not replace(lane.cell, is_wrong_fix=True).measures, "a GPU that another program uses is not refused"


def test_ranks_on_gpus_get_their_cores_before_lanes_that_need_no_gpu(toy: Cell) -> None:
    places = _places(2, 140.0, 140.0)
    first = _task(toy, "first", 9.0)
    queue = [first]
    _taken(queue, places)
    queue += [_task(toy, "on the cores", 500.0), _task(toy, "ranks", 1.0, gpus=2, ranks=2, wrong=True)]
    assert _started(queue, places) == [], "the GPUs are free, and a core is missing"
    del places.running[first.key]
    assert _started(queue, places) == ["ranks"]


def test_while_its_gpus_are_taken_a_lane_of_ranks_leaves_the_cores_to_others(toy: Cell) -> None:
    places = _places(2, 30.0)
    holds = _task(toy, "holds the GPU", 9.0, gpus=1, gpu_memory_gib=30.0)
    queue = [holds]
    _taken(queue, places)
    queue += [
        _task(toy, "on the cores", 500.0),
        _task(toy, "ranks", 1.0, gpus=1, ranks=2, wrong=True, gpu_memory_gib=30.0),
    ]
    assert _started(queue, places) == ["on the cores"]


def test_a_bound_on_the_whole_counts_ranks(toy: Cell) -> None:
    tasks = [_task(toy, "ranks", 10.0, ranks=4, wrong=True), _task(toy, "plain", 12.0), _task(toy, "unknown", None)]
    assert [lower_bound_seconds(tasks, jobs) for jobs in (1, 2, 8)] == [22.0, 16.0, 12.0]


def test_a_pair_never_starts_where_there_is_one_gpu_and_holds_up_nobody(toy: Cell) -> None:
    pair, places = _task(toy, "pair", 500.0, gpus=2), _places(9, 140.0)
    assert _started([pair, _task(toy, "single", 1.0, gpus=1)], places) == ["single"]
    assert places.never(pair) == "1 of 2 GPUs are left"


def test_no_process_uses_two_mig_instances(toy: Cell) -> None:
    places = Places(9, [_device(number, is_instance=True) for number in range(2)])
    queue = [_task(toy, "pair", 9.0, gpus=2)]
    assert _started(queue, places) == []


def test_one_gpu_at_a_time_is_kept_for_lanes_that_need_one_for_themselves(toy: Cell) -> None:
    places, queue = _places(9, 140.0, 140.0), list[Task]()

    def begin() -> list[str]:
        _taken(queue, places)
        return sorted(f"{key} on {place_name(*devices)}" for key, (_, devices) in places.running.items())

    for name in "ab":
        queue.append(_task(toy, name, 9.0, gpus=1))
    assert begin() == ["a on gpu 0", "b on gpu 1"]
    for name in ("alone", "alone too"):
        queue.append(_task(toy, name, 9.0, gpus=1, alone=True))
    for name in "cde":
        queue.append(_task(toy, name, 1.0, gpus=1))
    assert begin() == ["a on gpu 0", *(f"{name} on gpu 1" for name in "bcde")], "only the emptiest is kept"
    del places.running["a"]
    assert begin()[:1] == ["alone on gpu 0"]
    queue.append(_task(toy, "f", 1.0, gpus=1))
    assert "f on gpu 1" in begin(), "the second waits for the GPU that the first has, and holds up nobody"
    for name in "bcdef":
        del places.running[name]
    assert begin() == ["alone on gpu 0", "alone too on gpu 1"]


def test_a_lane_that_needs_a_gpu_for_itself_gets_the_only_one(toy: Cell) -> None:
    places, queue = _places(9, 140.0), [_task(toy, "first", 9.0, gpus=1)]
    ((first, _),) = _taken(queue, places)
    queue.append(_task(toy, "alone", 1.0, gpus=1, alone=True))
    queue.append(_task(toy, "other", 500.0, gpus=1))
    assert _started(queue, places) == []
    del places.running[first.key]
    assert _started(queue, places) == ["alone"]


def test_a_gpu_that_another_program_uses_measures_nothing(toy: Cell) -> None:
    places = _places(9, 140.0)
    places.busy.append(places.devices[0])
    measuring = _task(toy, "measures", 500.0, gpus=1, measures=True)
    assert _started([measuring, _task(toy, "plain", 1.0, gpus=1)], places) == ["plain"]
    assert places.never(measuring) == "every sm_90a GPU is taken by another program"
    assert places.never(_task(toy, "other", 1.0)) == ""


def test_a_gpu_with_a_fault_gets_no_lane(toy: Cell) -> None:
    places = _places(9, 140.0)
    places.devices.pop()
    task = _task(toy, "one", 1.0, gpus=1)
    assert (_started([task], places), places.never(task)) == ([], "no healthy sm_90a GPU is left")
