"""The kit's plugin: imports are left out of garbage collections, and fixtures use nothing that pytest deprecates."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from harness.lane.lane import PYTEST

CONTRACT = """
import gc
import weakref

import pytest

pytestmark = pytest.mark.control
EVIDENCE_WITHOUT_GPU = "traced"


class Node:
    pass


def cycle():
    node = Node()
    node.itself = node
    return node


WAS_ENABLED = gc.isenabled()
MADE_BY_THE_MODULE = cycle()


@pytest.fixture(scope="module")
def made_by_a_fixture():
    return cycle()


def test_a_collection_does_not_look_at_what_was_there_before_the_first_test(made_by_a_fixture):
    looked_at = {id(x) for x in gc.get_objects()}
    assert {id(MADE_BY_THE_MODULE), id(made_by_a_fixture)}.isdisjoint(looked_at)


def test_garbage_is_collected_in_tests_and_not_while_the_contract_is_imported():
    assert not WAS_ENABLED
    assert gc.isenabled()


@pytest.mark.parametrize("time", ["first", "second"])
def test_a_cycle_that_a_test_makes_is_collected(time):
    reference = weakref.ref(cycle())
    gc.collect()
    assert reference() is None
"""


FIXTURES = """
import pytest
import torch

EVIDENCE_WITHOUT_GPU = "traced"


@pytest.mark.control
def test_each_fixture(figure, output, claim, recorder):
    figure("one", 1)
    output("zeros", torch.zeros(2))
    claim("WORD")
    assert recorder.figures == ["one = 1 1\\n"]
"""


def run(contract: Path, text: str, *options: str) -> str:
    """Run a contract without the runner; return what pytest printed."""
    contract.write_text(text, encoding="utf-8")
    command = [sys.executable, *PYTEST, *options, str(contract)]
    variables = os.environ | {"REPRODUCER_TARGET": "cpu"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
    return ended.stdout + ended.stderr


def test_imports_are_exempt_from_collections_and_tests_are_not(tmp_path: Path) -> None:
    printed = run(tmp_path / "contract.py", CONTRACT)
    assert "4 passed" in printed, printed


def test_fixtures_use_nothing_that_pytest_deprecates(tmp_path: Path) -> None:
    printed = run(tmp_path / "contract.py", FIXTURES, "-W", "error::pytest.PytestDeprecationWarning")
    assert "1 passed" in printed, printed
