"""What a pack.toml may state."""

from __future__ import annotations

import pytest
from conftest import Workbench


def test_all_errors_of_a_broken_definition_come_at_once(workbench: Workbench) -> None:
    pack = workbench.lay("01_confirmed")
    text = (pack / "pack.toml").read_text()
    text = text.replace('kind = "wrong-result"', 'kind = "opinion"\ncolour = "red"').replace('title = "', "title = 3 #")
    text = text.replace("[targets.cpu]", "[targets.sm_90]").replace("timeout_s = 60", 'timeout_s = "long"')
    (pack / "pack.toml").write_text(text)
    ended = workbench.run("check")
    assert ended.returncode == 2
    (line,) = ended.stderr.strip().splitlines()
    for part in (
        "kind: 'opinion' is none of",
        "title: expected str",
        "extra fields found (colour)",
        "timeout_s: expected",
    ):
        assert part in line


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        ("[targets.cpu]", "[targets.sm_90]", "no target such as cpu, sm_80, sm_90a (with the suffix"),
        ('evidence = ["traced"]', 'evidence = ["executed"]', "executed means on a GPU"),
        ('version = "1.0"', 'version = "one"', "'one' is no version"),
        ("schema = 1", "schema = 7", "schema: 7 is not the known 1"),
        ('sha256 = "', 'sha256 = "zz', "not 64 lower-case hexadecimal digits"),
        ("schema = 1", "schema = ", "not TOML"),
        ('loads = ["src', 'loads = ["/src', "is no relative path"),
    ],
)
def test_a_definition_that_cannot_be_right_is_refused(workbench: Workbench, old: str, new: str, reason: str) -> None:
    pack = workbench.lay("01_confirmed")
    text = (pack / "pack.toml").read_text()
    assert old in text
    (pack / "pack.toml").write_text(text.replace(old, new))
    assert reason in workbench.run("list").stderr


def test_a_broken_pack_does_not_stop_the_others(workbench: Workbench) -> None:
    broken = workbench.lay("30_control_fails")
    (broken / "pack.toml").write_text("nonsense")
    workbench.lay("01_confirmed")
    status, (row,) = workbench.rows()
    assert (status, row["verdict"]) == (2, "CONFIRMED")
