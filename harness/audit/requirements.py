"""Requirements files as pip reads them: which packages they pin to one release.

pip has no public parser, and pip-requirements-parser had its last release in 2022; a line's own grammar is packaging's.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from harness.audit.environment import Environment, Named, named, read_text
from harness.core.errors import HarnessError

COMMENT = re.compile(r"(?:^|\s+)#.*$")
#: Options that may follow a requirement on its line.
OF_LINE = re.compile(r"\s--?[A-Za-z]")
INCLUDE = re.compile(r"(?:-r|--requirement)(?:\s*=\s*|\s*)(?P<file>\S.*)")
CONSTRAINT = re.compile(r"(?:-c|--constraint)(?:\s*=\s*|\s*)(?P<file>\S.*)")
EDITABLE = re.compile(r"(?:-e|--editable)(?:\s*=\s*|\s+)(?P<place>\S.*)")
URL = re.compile(r"[A-Za-z][\w+.-]*://")
MOST_FILES = 1000


@dataclass
class _Reading:
    """What was found until now; files that were read are not read again, so that no circle is endless."""

    required: list[Named] = field(default_factory=list)
    constrained: list[Named] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    waiting: list[tuple[Path, bool]] = field(default_factory=list)
    seen: set[tuple[Path, bool]] = field(default_factory=set)


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield each logical line with the number of its first: a backslash at the end joins, a comment ends one."""
    joined, first = "", 0
    for number, line in enumerate(text.splitlines(), 1):
        first = first if joined else number
        is_comment = line.lstrip().startswith("#")
        if line.endswith("\\") and not is_comment:
            joined += line[:-1]
            continue
        whole = COMMENT.sub("", joined + line).strip()
        joined = ""
        if whole:
            yield first, whole
    rest = COMMENT.sub("", joined).strip()
    if rest:
        yield first, rest


def pinned_by(requirement: Requirement) -> str:
    """Return the one version that a requirement admits; empty where it admits several."""
    for one in requirement.specifier:
        if one.operator in ("==", "===") and not one.version.endswith(".*"):
            return one.version
    return ""


def _requirement(text: str, place: str) -> Named:
    """Read one requirement.

    Raises:
        InvalidRequirement: it is none.

    """
    found = Requirement(text)
    marker = str(found.marker or "")
    if found.url:
        return named(
            found.name, "", reason="from a URL, not a release of the package index", marker=marker, place=place
        )
    version = pinned_by(found)
    reason = "" if version else f"not pinned ({found.specifier or 'any version'})"
    return named(found.name, version, reason=reason, marker=marker, place=place)


def _editable(place: str, where: str) -> Named | None:
    name = re.search(r"#(?:.*&)?egg=([A-Za-z0-9][\w.-]*)", place) or re.match(r"([A-Za-z0-9][\w.-]*)\s+@\s", place)
    return named(name[1], "", reason="installed from a checkout", place=where) if name else None


def _file(path: Path, reading: _Reading, *, constraints: bool) -> None:
    for number, line in _lines(read_text(path, "-r")):
        where = f"{path.name}:{number}"
        include, constraint, editable = INCLUDE.fullmatch(line), CONSTRAINT.fullmatch(line), EDITABLE.fullmatch(line)
        other = include or constraint
        if other:
            _queue(other["file"], path, reading, where, constraints=constraints or constraint is not None)
        elif editable:
            one = _editable(editable["place"], where)
            reading.required += [one] if one else []
            reading.unread += [] if one else [f"{where}: {line[:80]}: a checkout, whose package the line does not name"]
        elif not line.startswith("-"):
            rest = OF_LINE.split(line, maxsplit=1)[0].strip()
            try:
                (reading.constrained if constraints else reading.required).append(_requirement(rest, where))
            except InvalidRequirement:
                reading.unread.append(f"{where}: {line[:80]}: not a package's name with its version")


def _queue(text: str, path: Path, reading: _Reading, where: str, *, constraints: bool) -> None:
    """Note a file that another one names, relative to that."""
    if URL.match(text):
        reading.unread.append(f"{where}: {text[:80]}: a URL, and nothing is downloaded")
        return
    try:
        (name,) = shlex.split(text)
    except ValueError:
        name = text
    reading.waiting.append((path.parent / name, constraints))


def read(path: Path) -> Environment:
    """Read a requirements file and those that it includes.

    A constraint counts for a package that is required without a version.

    Raises:
        HarnessError: one of them cannot be read.

    """
    reading = _Reading(waiting=[(path, False)])
    while reading.waiting:
        one, constraints = reading.waiting.pop(0)
        key = (one.resolve(), constraints)
        if key in reading.seen:
            continue
        reading.seen.add(key)
        if len(reading.seen) > MOST_FILES:
            raise HarnessError(f"-r {path}: it includes more than {MOST_FILES} files. Next: name one file")
        _file(one, reading, constraints=constraints)
    pins = {one.name: one for one in reading.constrained if one.version}
    packages = [pins.get(one.name, one) if one.reason.startswith("not pinned") else one for one in reading.required]
    return Environment(f"requirements file {path}", tuple(dict.fromkeys(packages)), tuple(reading.unread))
