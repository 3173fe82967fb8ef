"""Fixtures for every test, and the markers that follow from what a test uses."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

import pytest

from harness.lane.cell import Cell
from testing import laid_out, toys
from testing import workbench as benches
from testing.workbench import Workbench

#: Fixtures that run the real runner, or another program, as a child process.
CHILD_PROCESSES = {"workbench", "judged", "page", "found", "folders", "bench", "odd", "nights"}


def pytest_configure() -> None:
    """Keep the cache as it is, and let Ctrl-C reach what the tests start.

    Tests of packs import trees of the cache: bytecode beside these would break their seals. A shell that starts the
    tests in the background has Ctrl-C ignored.
    """
    sys.dont_write_bytecode = True
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def workbench(tmp_path: Path) -> Workbench:
    """Build an empty workbench whose cache holds the toy upstream's release 1.0."""
    return benches.empty(tmp_path)


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Judge the sound toy pack and keep its receipt, once for the tests of a file."""
    return benches.confirmed(tmp_path_factory.mktemp("judged"))


@pytest.fixture
def recorded(judged: Workbench, tmp_path: Path) -> Workbench:
    """Copy the judged toy pack, so that a test may change it."""
    return benches.copied(judged, tmp_path)


@pytest.fixture
def toy(tmp_path: Path) -> Cell:
    """Return the cell of the sound toy pack, whose lanes are no processes."""
    return laid_out.cell(toys.lay(tmp_path / "toy", toys.BASE, "a" * 64))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of real packs, and those that run child processes; name the kind of what is hostile."""
    for item in items:
        item.user_properties += [("hostile", mark.args[0]) for mark in item.iter_markers("hostile")]
        if "packs" in item.path.parent.parts[-1:]:
            item.add_marker(pytest.mark.packs)
        if isinstance(item, pytest.Function) and CHILD_PROCESSES.intersection(item.fixturenames):
            item.add_marker(pytest.mark.slow)
