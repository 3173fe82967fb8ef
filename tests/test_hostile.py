"""What is hostile is refused in one line, and takes nothing else along."""

from __future__ import annotations

from pathlib import Path

import pytest

from testing import hostile
from testing.hostile import Case

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("case", hostile.CASES, ids=lambda case: case.name)
def test_it_is_refused(case: Case, tmp_path: Path) -> None:
    case.attempt(tmp_path, *case.arguments)


def test_no_two_cases_have_one_name() -> None:
    names = [case.name for case in hostile.CASES]
    assert len(set(names)) == len(names)
