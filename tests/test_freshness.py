"""Probes are compared by what they mean."""

from __future__ import annotations

import pytest

from harness import freshness

PROBE = '"""Doc."""\n\nimport os  # why\n\nx = """#no comment"""\nprint(f"{x}#")\n'


@pytest.mark.parametrize(
    ("changed", "same"),
    [
        (PROBE.replace("Doc.", "Another doc,\nof two lines."), True),
        (PROBE.replace("  # why", ""), True),
        (PROBE.replace("\n\nx", "\n# new\n\n\nx"), True),
        (PROBE.replace("#no", "# no"), False),
        (PROBE.replace("{x}#", "{x}"), False),
        (PROBE.replace("import os", "import sys"), False),
    ],
)
def test_a_probe_is_compared_by_meaning(changed: str, same: bool) -> None:  # noqa: FBT001 - a parameter of the test
    assert (freshness.probe_meaning(PROBE) == freshness.probe_meaning(changed)) == same
