"""Functions of a contract run in processes of their own, and what they raise there is judged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from kit.cuda_source import in_processes
from kit.plugin import ContractError


def environment(name: str) -> tuple[int, str]:
    return os.getpid(), os.environ.get(name, "")


def fail(error: Exception) -> None:
    raise error


def test_each_task_has_a_process_and_an_environment_of_its_own() -> None:
    ours = os.environ.get("KIT_TEST", "")
    for variables, value in ((None, ours), ({"KIT_TEST": "set"}, "set")):
        results = in_processes(environment, [("KIT_TEST",), ("KIT_TEST",)], variables)
        assert [text for _, text in results] == [value, value]
        assert len({os.getpid(), *(process for process, _ in results)}) == 1 + len(results)
    assert os.environ.get("KIT_TEST", "") == ours


@pytest.mark.parametrize("variables", [None, {}], ids=["forked", "spawned"])
def test_code_under_test_that_raises_fails_the_check(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str]
) -> None:
    with pytest.raises(ContractError, match="ValueError: no fault of upstream"):
        in_processes(fail, [(ValueError("no fault of upstream"),)], variables)
    monkeypatch.setenv("REPRODUCER_TREE", str(Path(__file__).parent))
    with pytest.raises(AssertionError, match="it raised ValueError: wrong"):
        in_processes(fail, [(ValueError("wrong"),)], variables)
    with pytest.raises(OSError, match="no space"):
        in_processes(fail, [(OSError("no space"),)], variables)
