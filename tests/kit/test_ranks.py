"""A group of ranks runs jobs together; a rank that dies, hangs or disagrees is named, and leaves nothing behind."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

from kit.ranks import STARTING_S, Rank, RankError, RankGroup, own_group, ranks


def itself(rank: Rank) -> Rank:
    return rank


def set_up(rank: Rank) -> tuple[Rank, torch.distributed.ProcessGroup]:
    return rank, own_group(2, apart=True)


def total(context: tuple[Rank, torch.distributed.ProcessGroup], factor: int) -> dict[str, torch.Tensor]:
    rank, group = context
    numbers = torch.tensor([rank.number * factor])
    torch.distributed.all_reduce(numbers, group=group)
    return {"total": numbers}


def end(rank: Rank, how: str, who: int) -> int:
    print("last words", flush=True)  # noqa: T201 - of a rank
    if rank.number == who:
        Path(how).write_text(str(os.getpid()), encoding="ascii")
        if Path(how).name == "dies":
            os._exit(3)
        if Path(how).name == "is killed":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    return rank.number


def refuse(rank: Rank, who: tuple[int, ...], kind: type[BaseException]) -> int:
    if rank.number in who:
        raise kind("not this")
    return rank.number


class DeviceSideError(Exception):
    """What CUDA says when an assertion on the device fails."""

    def __str__(self) -> str:
        return "CUDA error: device-side assert triggered"


def meet_or_raise(rank: Rank, who: int, text: str) -> None:
    if rank.number == who:
        raise ValueError(text)
    torch.distributed.barrier()


def process_id(rank: Rank) -> int:
    return os.getpid() + 0 * rank.number


def product(rank: Rank) -> torch.Tensor:
    return torch.ones(3, requires_grad=True) * rank.number


def give_another_shape(_rank: Rank) -> None:
    ones = torch.ones(3, requires_grad=True)
    torch.autograd.grad(ones.square(), ones, torch.ones(2))


@pytest.fixture
def pair() -> Iterator[RankGroup]:
    with ranks(2, itself, seconds=20.0) as group:
        yield group


@pytest.fixture
def under_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPRODUCER_TREE", str(Path(__file__).parent))


def test_ranks_sum_over_the_group_that_each_is_in() -> None:
    with ranks(4, set_up) as group:
        for factor in (1, 10):
            totals = [int(result["total"]) for result in group.run(total, factor)]
            assert totals == [2 * factor, 4 * factor, 2 * factor, 4 * factor]


def test_results_are_plain_tensors(pair: RankGroup) -> None:
    products = pair.run(product)
    assert [tensor.tolist() for tensor in products] == [[0.0] * 3, [1.0] * 3]
    assert not any(tensor.requires_grad for tensor in products)


@pytest.mark.parametrize(("how", "told"), [("dies", "died: exit status 3"), ("is killed", "died: exit status -9")])
def test_a_rank_that_died_is_named_with_its_last_lines(pair: RankGroup, tmp_path: Path, how: str, told: str) -> None:
    with pytest.raises(RankError, match=f"rank 1 of 2 {told}") as raised:
        pair.run(end, str(tmp_path / how), 1)
    assert "    last words" in str(raised.value)
    with pytest.raises(pytest.skip.Exception, match=f"the ranks are lost: end: rank 1 of 2 {told}"):
        pair.run(product)


def test_a_rank_that_hangs_is_named_with_where_it_is_and_ends_with_the_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(STARTING_S, "cpu", 1.0)
    file = tmp_path / "hangs"
    with (
        ranks(2, itself, seconds=2.0) as group,
        pytest.raises(RankError, match="rank 0 of 2 hangs: no answer after 2 s") as told,
    ):
        group.run(end, str(file), 0)
    assert "in end" in str(told.value)
    assert not Path("/proc", file.read_text(encoding="ascii")).exists()


@pytest.mark.usefixtures("under_test")
def test_what_the_code_under_test_raises_is_an_assertion_error(pair: RankGroup) -> None:
    with pytest.raises(AssertionError, match="rank 0, 1 of 2 it raised ValueError: not this"):
        pair.run(refuse, (0, 1), ValueError)
    assert len(pair.run(product)) == 2  # these ranks are still together


@pytest.mark.usefixtures("under_test")
def test_ranks_that_disagree_are_started_again_thrice(pair: RankGroup) -> None:
    for _ in range(3):
        with pytest.raises(AssertionError, match="the ranks disagree in refuse: rank 1 of 2"):
            pair.run(refuse, (1,), ValueError)
    with pytest.raises(pytest.skip.Exception, match="the ranks are lost: refuse: the ranks disagree"):
        pair.run(product)


@pytest.mark.usefixtures("under_test")
def test_what_one_rank_alone_raised_is_told_while_the_others_wait_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kit.ranks.GRACE_S", 0.5)
    with ranks(3, itself, seconds=30.0) as group:
        with pytest.raises(AssertionError, match="rank 1 of 3 it raised ValueError: alone; the others: hangs"):
            group.run(meet_or_raise, 1, "alone")
        assert len(group.run(product)) == 3  # on ranks that were started again


@pytest.mark.usefixtures("under_test")
def test_ranks_whose_gpu_is_lost_are_started_again(pair: RankGroup) -> None:
    before = pair.run(process_id)
    with pytest.raises(AssertionError, match="device-side assert"):
        pair.run(refuse, (0, 1), DeviceSideError)
    assert not {*before} & {*pair.run(process_id)}


def test_what_neither_the_code_under_test_nor_the_host_did_is_an_error(pair: RankGroup) -> None:
    with pytest.raises(RankError, match="rank 1 of 2 ValueError"):
        pair.run(refuse, (1,), ValueError)


def test_what_pytorch_says_of_a_wrong_result_is_an_assertion_error(pair: RankGroup) -> None:
    with pytest.raises(AssertionError, match="rank 0, 1 of 2 it raised RuntimeError: Mismatch in shape"):
        pair.run(give_another_shape)
    assert pair.raised == 1


@pytest.mark.parametrize("kind", [MemoryError, OSError])
def test_what_a_host_lacks_is_not_judged(pair: RankGroup, kind: type[BaseException]) -> None:
    with pytest.raises(pytest.skip.Exception, match="not this"):
        pair.run(refuse, (0, 1), kind)


def test_spawned_ranks_load_the_module_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("multiprocessing.get_context", _spawning(sys.modules["multiprocessing"].get_context))
    with ranks(2, itself) as group:
        assert [tensor.tolist() for tensor in group.run(product)] == [[0.0] * 3, [1.0] * 3]


def _spawning(get_context: object) -> object:
    return lambda _method: get_context("spawn")  # type: ignore[operator]
