"""A script as the body of a function: its lines stay as they are."""

from __future__ import annotations

import pytest

from harness.author import script
from harness.core.errors import HarnessError

TEXT = '''#!/usr/bin/env python3
"""It is wrong.

More of it.
"""
from __future__ import annotations

import torch
from toykernel.scale import scale, total as add

TEXT = """one
two"""


def helper(x):
    return x


if __name__ == "__main__":
    found = helper(scale([1.0], [2.0]))
    long = f"""{found}
end"""
    assert found == [2.0], TEXT
'''


def _run(found: script.Script) -> dict[str, object]:
    """Run a body in a function, as a probe does, with its imports left out."""
    lines = [line for line in found.body.splitlines() if "import " not in line]
    names: dict[str, object] = {"scale": lambda values, _: values}
    exec("def script():\n" + "\n".join(lines) + "\n    return locals()\n", names)  # noqa: S102 - our own text
    return names


def test_what_stands_under_main_stands_alone_and_strings_stay() -> None:
    found = script.read(TEXT, "bug.py")
    assert found.imports == (("__future__", ("annotations",)), ("torch", ()), ("toykernel.scale", ("scale", "total")))
    assert (found.docstring, found.fails, found.problems) == ("It is wrong.", True, ())
    assert '    TEXT = """one\ntwo"""' in found.body
    assert "__main__" not in found.body
    assert "__future__" not in found.body
    with pytest.raises(AssertionError, match="one\ntwo"):
        _run(found)["script"]()  # type: ignore[operator]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("from torch import *\nassert 0", "line 1: `import *` cannot stand in a function"),
        ("def f():\n    global x\n    x = 1", "line 2: `global` means another variable"),
        (
            "import triton\n@triton.jit\ndef k(x):\n    pass",
            "line 3: the kernel k has to stand at the probe's top level",
        ),
    ],
)
def test_what_cannot_stand_in_a_function_is_named(text: str, problem: str) -> None:
    assert [one for one in script.read(text, "bug.py").problems if one.startswith(problem)]


def test_a_script_that_asserts_nothing_is_known() -> None:
    assert not script.read("import torch\nprint(torch.ones(1))\n", "bug.py").fails
    assert script.read("import torch\ntorch.testing.assert_close(1, 2)\n", "bug.py").fails
    assert script.read("import sys\nsys.exit('wrong')\n", "bug.py").fails
    assert not script.read("import sys\nsys.exit()\n", "bug.py").fails


@pytest.mark.parametrize("text", ["def (", "x = '\0'", "if 1:\n  a\n b"])
def test_what_is_no_python_is_refused(text: str) -> None:
    with pytest.raises(HarnessError, match=r"bug.py: no Python: .* Next: run it by itself first"):
        script.read(text, "bug.py")


def test_an_empty_script_has_no_body() -> None:
    assert not script.read("", "bug.py").body
    assert not script.read('"""Words."""\n', "bug.py").body
