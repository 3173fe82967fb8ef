"""The PEP 723 header of a probe, and the other parts that every probe has in common."""

from __future__ import annotations

import ast
import re
import tomllib
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement
from packaging.utils import canonicalize_name

HEADER = re.compile(r"(?m)^# /// script$\n(?P<content>(?:^#(?: .*)?$\n)+)^# ///$")
BEGIN, END = "# --- protocol: begin", "# --- protocol: end"
#: Between the two markers.
MOST_BLOCK_LINES = 60
COMMAND_LINES = 4


@dataclass(frozen=True)
class Probe:
    """A probe's text, taken apart."""

    pins: dict[str, str]
    requires_python: str
    docstring: str
    block: str
    errors: tuple[str, ...]

    @property
    def commands(self) -> list[str]:
        """The four indented lines of the docstring that show both sentinels without the runner."""
        lines = [line for line in self.docstring.splitlines() if line.startswith("    ") and line.strip()]
        starts = [index for index, line in enumerate(lines) if "git" in line and "apply" in line]
        if not starts:
            return []
        first = max(0, starts[0] - 2)
        return [line.strip() for line in lines[first : first + COMMAND_LINES]]

    @property
    def shows_the_bug(self) -> bool:
        """Whether an indented line of the docstring runs the probe and says what it shows without a patch."""
        lines = [line for line in self.docstring.splitlines() if line.startswith("    ")]
        return any("reproduce.py" in line and "BUG_REPRODUCED" in line for line in lines)


def block_of(text: str) -> str:
    """Return the protocol block with its markers; empty where there is none."""
    begin, end = text.find(BEGIN), text.find(END)
    return text[begin : text.index("\n", end) + 1] if 0 <= begin < end else ""


def original_block() -> str:
    """Return the protocol block that every probe has to carry."""
    return block_of((Path(__file__).parents[1] / "protocol.py").read_text(encoding="utf-8"))


def pins_of(content: str) -> tuple[dict[str, str], str, list[str]]:
    """Return the exact pins of a PEP 723 header, its requires-python, and its errors."""
    try:
        document = tomllib.loads("\n".join(line[2:] for line in content.splitlines()))
    except (ValueError, RecursionError) as error:
        return {}, "", [f"its PEP 723 header is not TOML: {error}"]
    pins: dict[str, str] = {}
    listed = document.get("dependencies", [])
    errors = [] if isinstance(listed, list) else ["its header's dependencies are no list"]
    for text in listed if isinstance(listed, list) else []:
        try:
            requirement = Requirement(str(text))
        except InvalidRequirement:
            errors.append(f"its header's dependency {text!r} cannot be read")
            continue
        exact = [spec.version for spec in requirement.specifier if spec.operator == "=="]
        if len(exact) != 1:
            errors.append(f"its header does not pin {requirement.name} exactly")
        else:
            pins[canonicalize_name(requirement.name)] = exact[0]
    return pins, str(document.get("requires-python", "")), errors


def _docstring(text: str) -> tuple[str, list[str]]:
    text = text[: text.find(BEGIN)]  # it stands before the block; parsing the whole probe takes ten times as long
    try:
        return ast.get_docstring(ast.parse(text)) or "", []
    except SyntaxError as error:
        return "", [f"no Python: {error.msg} in line {error.lineno}"]
    except (ValueError, RecursionError, MemoryError) as error:  # NUL, or brackets without end
        return "", [f"no Python: {error or type(error).__name__}"]


def read(text: str, *, has_patch: bool = True) -> Probe:
    """Take a probe apart; `errors` says what of it breaks the contract.

    The docstring of a pack without a patch has a line that shows the bug, and none that applies a patch.
    """
    header = HEADER.search(text)
    pins, requires_python, errors = pins_of(header["content"]) if header else ({}, "", ["it has no PEP 723 header"])
    docstring, problems = _docstring(text)
    errors += problems
    block = block_of(text)
    if block != original_block():
        errors.append("its protocol block differs from harness/protocol.py" if block else "it has no protocol block")
    if not requires_python:
        errors.append("its header states no requires-python")
    found = Probe(pins, requires_python, docstring, block, ())
    if not problems and has_patch and len(found.commands) != COMMAND_LINES:
        errors.append("its docstring lacks the four indented lines that show both sentinels")
    if not problems and not has_patch and (found.commands or not found.shows_the_bug):
        errors.append("its docstring lacks an indented line that runs reproduce.py and says BUG_REPRODUCED")
    if re.search(r"(?m)^\s*(?:from|import) harness\b", text):
        errors.append("it imports harness: a probe is standalone")
    return replace(found, errors=tuple(errors))
