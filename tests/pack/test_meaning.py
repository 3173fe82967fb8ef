"""Probes are compared by what they mean."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.core import files
from harness.pack import judges

SCRIPT = '"""Doc."""\n\nimport os  # why\n\nx = """#no comment"""\nprint(f"{x}#")\n'


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (SCRIPT.replace("Doc.", "Another doc,\nof two lines."), True),
        (SCRIPT.replace("  # why", ""), True),
        (SCRIPT.replace("\n\nx", "\n# new\n\n\nx"), True),
        (SCRIPT.replace("#no", "# no"), False),
        (SCRIPT.replace("{x}#", "{x}"), False),
        (SCRIPT.replace("import os", "import sys"), False),
    ],
)
def test_a_script_is_compared_by_meaning(changed: str, same: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert (judges.script_meaning(SCRIPT) == judges.script_meaning(changed)) == same


def test_a_form_feed_hides_no_change() -> None:
    source = "NOTE = 'a\x0cb\x1cc\u2028d'\nvalue = 1  # one\nother = 2\n"
    assert judges.script_meaning(source) != judges.script_meaning(source.replace("other = 2", "other = 3"))
    assert judges.script_meaning(source) != judges.script_meaning(source.replace("value = 1", "value = 4"))
    assert judges.script_meaning(source) == judges.script_meaning(source.replace("# one", "# two"))


def test_no_code_behind_a_docstring_is_part_of_it() -> None:
    source = '"""Doc."""; value = 1\nother = """text"""\n'
    assert judges.script_meaning(source) != judges.script_meaning(source.replace("value = 1", "value = 4"))


def test_what_cannot_be_parsed_means_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "reproduce.py"
    for data in (b"\x00", b"(" * 5000, b"\xff", b"x = 1\n  y", b"x = ("):
        path.write_bytes(data)
        assert judges.meaning(path) == files.sha256_bytes(data)
