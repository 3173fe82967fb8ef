"""The text of a script: its PEP 723 header, its docstring and its length."""

import ast
import re
import tomllib

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

HEADER = re.compile(r"(?m)^# /// script$\n(?P<content>(?:^#(?: .*)?$\n)+)^# ///$")
#: One screen for a script, with its header and its docstring.
MOST_LINES = 80
MOST_DOCSTRING_LINES = 12
#: The words with which a script has to be able to end.
SENTINELS = ("BUG_REPRODUCED", "FIX_VALIDATED", "UNSUPPORTED")


def _pins(text: str) -> dict[str, str]:
    """Return the exact pins of a PEP 723 header; ValueError names its fault."""
    header = HEADER.search(text)
    if header is None:
        raise ValueError("it has no PEP 723 header")
    document = tomllib.loads("\n".join(line[2:] for line in header["content"].splitlines()))
    if "requires-python" not in document:
        raise ValueError("its header states no requires-python")
    pins: dict[str, str] = {}
    for requirement in map(Requirement, map(str, document.get("dependencies", []))):
        exact = [spec.version for spec in requirement.specifier if spec.operator == "=="]
        if len(exact) != 1:
            raise ValueError(f"its header does not pin {requirement.name} exactly")
        pins[canonicalize_name(requirement.name)] = exact[0]
    return pins


def read(text: str, *, has_patch: bool = True) -> tuple[dict[str, str], list[str]]:
    """Return a script's exact pins by package, and the rules that its text breaks.

    If the pack has a fix.patch, the script has to be able to say FIX_VALIDATED.
    """
    pins, errors = dict[str, str](), list[str]()
    try:
        pins = _pins(text)
    except (ValueError, TypeError, RecursionError) as error:
        errors.append(f"its header: {error}")
    docstring, problem = _docstring(text)
    length, lines = len(text.splitlines()), len(docstring.splitlines())
    if problem:
        errors.append(problem)
    elif "reproduce.py" not in docstring:
        errors.append("its docstring does not say how reproduce.py is run")
    if length > MOST_LINES:
        errors.append(f"it has {length} lines; a script has at most {MOST_LINES}, the rest belongs in contract.py")
    if lines > MOST_DOCSTRING_LINES:
        errors.append(f"its docstring has {lines} lines; at most {MOST_DOCSTRING_LINES}")
    sentinels = [word for word in SENTINELS if word != "FIX_VALIDATED" or has_patch]
    errors += [f"it never says {word}" for word in sentinels if word not in text]
    if re.search(r"(?m)^\s*(?:from|import) (?:harness|kit|packs)\b", text):
        errors.append("it imports from this repository: a script is pasted into an issue as it is")
    return pins, errors


def _docstring(text: str) -> tuple[str, str]:
    try:
        return ast.get_docstring(ast.parse(text)) or "", ""
    except SyntaxError as error:
        return "", f"no Python: {error.msg} in line {error.lineno}"
    except (ValueError, RecursionError, MemoryError) as error:  # NUL, or brackets without end
        return "", f"no Python: {error or type(error).__name__}"
