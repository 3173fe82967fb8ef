"""Lock files: uv.lock, poetry.lock, Pipfile.lock, and pylock.toml as PEP 751 has it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness.audit.environment import Environment, Named, named, read_text
from harness.core import strict_json
from harness.core.errors import HarnessError

KNOWN = "uv.lock, poetry.lock, Pipfile.lock, pylock.toml, pylock.NAME.toml"
PYLOCK = re.compile(r"pylock\.(?:[^.]+\.)?toml")
CHECKOUT = "locked to a checkout, folder or URL, not to a release of the package index"
#: What poetry calls another package index.
POETRY_INDEX = {"", "legacy"}


def _uv(one: dict[str, Any]) -> str:
    """Say why a package of uv.lock is no release."""
    source = one.get("source")
    return "" if isinstance(source, dict) and "registry" in source else CHECKOUT


def _poetry(one: dict[str, Any]) -> str:
    source = one.get("source", {})
    return "" if isinstance(source, dict) and source.get("type", "") in POETRY_INDEX else CHECKOUT


def _pylock(one: dict[str, Any]) -> str:
    return CHECKOUT if {"vcs", "directory", "archive"} & one.keys() else ""


def _pipfile(one: dict[str, Any]) -> str:
    return CHECKOUT if {"git", "path", "file", "url", "hg", "svn", "bzr"} & one.keys() else ""


def _text(one: dict[str, Any], *keys: str) -> str:
    return next((value for key in keys if isinstance(value := one.get(key), str)), "")


def _of_tables(rows: object, why: Callable[[dict[str, Any]], str], place: str) -> list[Named]:
    """Read the packages of a lock.

    Raises:
        ValueError: they are no tables with a name.

    """
    if not isinstance(rows, list):
        raise ValueError("it has no list of packages")  # noqa: TRY004 - a file's fault, told like its others
    found = []
    for one in rows:
        if not isinstance(one, dict) or not _text(one, "name"):
            raise ValueError("a package has no name")
        version = _text(one, "version").removeprefix("==")
        reason = why(one) or ("" if version else "no version is locked")
        marker = _text(one, "marker", "markers")
        found.append(named(_text(one, "name"), version, reason=reason, marker=marker, place=place))
    return found


def _pipfile_rows(document: dict[str, Any]) -> list[dict[str, Any]]:
    rows = []
    for group, members in document.items():
        if group != "_meta" and isinstance(members, dict):
            rows += [one | {"name": name} for name, one in members.items() if isinstance(one, dict)]
    return rows


def _packages(path: Path, text: str) -> list[Named]:
    if path.name == "Pipfile.lock":
        document = strict_json.loads(text)
        if not isinstance(document, dict) or "_meta" not in document:
            raise ValueError("no _meta: not what pipenv writes")
        return _of_tables(_pipfile_rows(document), _pipfile, path.name)
    table = tomllib.loads(text)
    if path.name == "uv.lock":
        return _of_tables(table.get("package"), _uv, path.name)
    if path.name == "poetry.lock":
        return _of_tables(table.get("package"), _poetry, path.name)
    if "lock-version" not in table:
        raise ValueError("no lock-version: not what PEP 751 describes")
    return _of_tables(table.get("packages"), _pylock, path.name)


def read(path: Path) -> Environment:
    """Read a lock file, which is known by its name.

    Raises:
        HarnessError: it is of another tool, cannot be read, or is not what its name says.

    """
    if path.name not in ("uv.lock", "poetry.lock", "Pipfile.lock") and not PYLOCK.fullmatch(path.name):
        raise HarnessError(f"--lock {path}: known by their names are {KNOWN}. Next: -r FILE, exported from the lock")
    text = read_text(path, "--lock")
    try:
        packages = _packages(path, text)
    except (ValueError, RecursionError) as error:
        raise HarnessError(
            f"--lock {path}: {' '.join(str(error).split())[:200]}. Next: lock again, or name another file"
        ) from None
    return Environment(f"lock file {path}", tuple(dict.fromkeys(packages)))
