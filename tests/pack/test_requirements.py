"""Requirements files: what a pack's dependency sets may say, and what is wrong with one."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.core.errors import HarnessError
from harness.pack import requirements
from testing.workbench import Workbench

ONE, TWO = "1" * 64, "2" * 64
SOUND = f"""# a comment
NumPy==2.3.5 \\
    --hash=sha256:{ONE} \\
    --hash=sha256:{TWO}
    # via toykernel, -r requirements.in
toyhelper==1.0 ; sys_platform != 'win32' --hash=sha256:{ONE}  # why
"""


def test_versions_hashes_and_markers_are_read() -> None:
    found, errors = requirements.read(SOUND)
    assert errors == []
    assert list(found) == ["NumPy", "toyhelper"]
    assert (found["NumPy"].version, found["NumPy"].hashes, found["NumPy"].marker) == ("2.3.5", (ONE, TWO), "")
    assert found["toyhelper"].marker == 'sys_platform != "win32"'
    assert requirements.read("") == ({}, [])


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("a==1", "a: no PACKAGE==VERSION with its sha256. Next: uv's --generate-hashes"),
        (f"a==1 --hash=md5:{ONE}", "a: no PACKAGE"),
        (f"a==1 --hash=sha256:{ONE[:-1]}", "a: no PACKAGE"),
        (f"a>=1 --hash=sha256:{ONE}", "a: no PACKAGE"),
        (f"a==1.* --hash=sha256:{ONE}", "a: no PACKAGE"),
        (f"a --hash=sha256:{ONE}", "a: no PACKAGE"),
        (f"a @ https://user:word@example.org/a-1-py3-none-any.whl --hash=sha256:{ONE}", "a: no PACKAGE"),
        (f"./wheels/a.whl --hash=sha256:{ONE}", "no PACKAGE"),
        ("--index-url https://user:word@example.org/simple", "--index-url: no PACKAGE"),
        ("-r other.txt", "-r: no PACKAGE"),
        ("-e .", "-e: no PACKAGE"),
        (f"torch==2.13.0 --hash=sha256:{ONE}", "torch: the lane's interpreter brings it"),
        (f"Triton==3.6.0 --hash=sha256:{ONE}", "Triton: the lane's interpreter brings it"),
        (f"numpy==2.2.0 --hash=sha256:{ONE}", "numpy: it stands there twice"),
        ("a = 1", "a: no PACKAGE"),
    ],
)
def test_a_line_that_pins_no_wheel_is_refused(line: str, said: str) -> None:
    _, (error,) = requirements.read(f"{SOUND}{line}\n")
    assert said in error
    assert "example.org" not in error, "an index may be private"


@given(st.text(max_size=200))
def test_no_text_ends_the_reader(text: str) -> None:
    assert all(one.hashes for one in requirements.read(text)[0].values())


@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("requirements.txt", "a==1\n", "requirements.txt: a: no PACKAGE"),
        ("requirements-tests.txt", "", "requirements-tests.txt: no requirements.txt, and no requirements.NAME.txt"),
    ],
)
def test_check_names_the_file_and_what_is_wrong_with_it(workbench: Workbench, file: str, text: str, said: str) -> None:
    pack = workbench.lay("01_confirmed")
    (pack / "requirements.txt").write_text(f"a==1 --hash=sha256:{ONE}\n")
    (pack / file).write_text(text)
    ended = workbench.run("check")
    assert f"01_confirmed/{said}" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(HarnessError, match=r"requirements\.txt: not UTF-8"):
        requirements.read_sets(tmp_path)


@pytest.mark.parametrize(
    ("marker", "python", "held"),
    [
        ("python_full_version < '3.12'", "3.11", True),
        ("python_full_version < '3.12'", "3.12", False),
        ("sys_platform == 'win32'", "3.11", False),
        ("platform_machine == 'AMD64' or platform_machine == 'x86_64'", "3.13", True),
    ],
)
def test_a_marker_is_asked_of_the_lanes_python(marker: str, python: str, held: bool) -> None:  # noqa: FBT001 - a case
    assert requirements.marker_holds(marker, python) is held
