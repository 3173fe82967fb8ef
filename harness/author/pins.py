"""The pins of a pack, looked up anew: wheels in other versions, or for another Python, in pack.toml and the header."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from harness.author import pack_text
from harness.core import files
from harness.core.cache import Cache
from harness.core.errors import HarnessError, unknown
from harness.pack import probe, rules
from harness.pack.model import Dependency, Pack
from harness.upstream import closure, metadata, tree
from harness.upstream.source import pinned

DEFAULT = "default"
PIN = r'"NAME==[^"]+"'


@dataclass(frozen=True)
class Change:
    """One package of a set: what is pinned, and what would be; None where it comes or goes."""

    package: str
    before: Dependency | None
    after: Dependency | None

    @property
    def text(self) -> str:
        """Say what changes, shortly."""
        if self.before is None or self.after is None:
            one, what = (self.after, "new") if self.before is None else (self.before, "no longer needed")
            return f"{self.package} {one.version if one else ''}: {what}"
        if self.before.version != self.after.version:
            return f"{self.package} {self.before.version} -> {self.after.version}"
        tags = sorted(set(self.after.sha256) - set(self.before.sha256))
        gone = sorted(set(self.before.sha256) - set(self.after.sha256))
        said = [*(f"+{tag}" for tag in tags), *(f"-{tag}" for tag in gone)]
        return f"{self.package} {self.after.version}: {', '.join(said) or 'other files on the index'}"


@dataclass(frozen=True)
class Renewal:
    """A dependency set, resolved anew; `left_out` says of each Python for which there is none why not."""

    name: str
    members: dict[str, Dependency]
    changes: tuple[Change, ...]
    left_out: dict[str, str]


@dataclass(frozen=True)
class Order:
    """What to look up anew.

    Attributes:
        name: of the dependency set.
        pythons: for which wheels are pinned, the first one's versions for all.
        keep: whether the versions stay, and only wheels for other Pythons are added.

    """

    name: str
    pythons: tuple[str, ...]
    keep: bool


def renew(pack: Pack, order: Order, cache: Cache, tell: Callable[[str], None]) -> Renewal:
    """Resolve a dependency set anew: what it names, within the limits that the pinned release states.

    Raises:
        HarnessError: there is no such set.
        UnavailableError: it cannot be resolved.

    """
    sets, name = pack.definition.dependencies, order.name
    if name not in sets:
        raise unknown("dependency set", name, sets, f"runner.py pins {pack.name} --set NAME")
    before = sets[name]
    fixed = [f"{package}=={one.version}" for package, one in before.items()] if order.keep else []
    limits = [*fixed, *_interpreters_limit(pack, before)]
    found = closure.resolve(_roots(pack, before, cache), order.pythons, tell, limits)
    members = _named_as(before, found.members)
    changes = (Change(one, before.get(one), members.get(one)) for one in sorted({*before, *members}))
    return Renewal(name, members, tuple(one for one in changes if one.before != one.after), found.left_out)


def _interpreters_limit(pack: Pack, members: dict[str, Dependency]) -> list[str]:
    has_numpy = any(canonicalize_name(package) == "numpy" for package in members)
    return [closure.OF_INTERPRETER] if has_numpy and pack.definition.requires.triton else []


def _roots(pack: Pack, members: dict[str, Dependency], cache: Cache) -> list[Requirement]:
    """Return every package of a set, with the limits that the pinned release states of it."""
    definition = pack.definition
    laid = tree.materialize(cache, definition.upstream, pinned(definition))
    try:
        stated = metadata.read(laid.folder).requires
    except HarnessError:
        stated = ()  # a commit has none: what the set names is all that is known
    limits = {str(canonicalize_name(one.name)): one.specifier for one in stated}
    return [Requirement(f"{name}{limits.get(str(canonicalize_name(name)), '')}") for name in members]


def _named_as(before: dict[str, Dependency], found: dict[str, Dependency]) -> dict[str, Dependency]:
    """Keep the spelling and order of the names that a pack has."""
    spelled = {str(canonicalize_name(name)): name for name in before}
    renamed = {spelled.get(name, name): one for name, one in found.items()}
    order = [*(name for name in before if name in renamed), *(name for name in renamed if name not in before)]
    return {name: renamed[name] for name in order}


def write(pack: Pack, renewal: Renewal) -> list[Path]:
    """Write the new pins into pack.toml, and those of the default set into the probe's header.

    Raises:
        HarnessError: pack.toml is written in another form than ours; then nothing is changed.

    """
    path = pack.folder / "pack.toml"
    text = path.read_text(encoding="utf-8")
    for change in renewal.changes:
        text = _changed(text, f"dependencies.{renewal.name}.", change, path)
    if rules.parse(text).dependencies.get(renewal.name, {}) != renewal.members:
        raise HarnessError(
            f"{pack.name}/pack.toml: its [dependencies] are written in another form. Next: change them by hand"
        )
    files.write_atomic(path, text)
    if renewal.name != DEFAULT or not pack.probe.exists():
        return [path]
    before = pack.probe.read_text(encoding="utf-8")
    after = _header(before, renewal)
    if after != before:
        files.write_atomic(pack.probe, after)
    return [path, *([pack.probe] if after != before else [])]


def _table(text: str, header: str) -> re.Match[str] | None:
    """Find a table of pack.toml: its header, with a comment or none, and the lines up to the next one."""
    return re.search(rf"(?m)^\[{re.escape(header)}\](?P<comment>[^\n]*)\n(?P<body>(?:(?!\[).*\n?)*)", text)


def _changed(text: str, prefix: str, change: Change, path: Path) -> str:
    quoted, plain = f'{prefix}"{change.package}"', f"{prefix}{change.package}"
    found = _table(text, plain) or _table(text, quoted)
    if change.before is not None and found is None:
        raise HarnessError(f"{path.parent.name}/pack.toml: no table [{plain}]. Next: change it by hand")
    lines = "\n".join(pack_text.dependency(change.after)) if change.after else ""
    if found is None:
        last = list(re.finditer(rf"(?m)^\[{re.escape(prefix)}[^\n]*\n(?:(?!\[).*\n?)*", text))[-1]
        return f"{text[: last.end()].rstrip()}\n\n[{plain}]\n{lines}\n\n{text[last.end() :]}"
    if change.after is None:
        return text[: found.start()] + text[found.end() :]
    rest = [line for line in found["body"].splitlines() if not re.match(r"(?:version|sha256)\s*=", line)]
    body = "\n".join([lines, *rest]).rstrip()
    return f"{text[: found.start()]}[{plain}]{found['comment']}\n{body}\n\n{text[found.end() :].lstrip()}"


def _header(text: str, renewal: Renewal) -> str:
    """Write the versions of a set into the pins of a probe's header."""
    match = probe.HEADER.search(text)
    if match is None:
        return text
    content = match["content"]
    for name, one in renewal.members.items():
        content, count = re.subn(PIN.replace("NAME", re.escape(name)), f'"{name}=={one.version}"', content, count=1)
        if not count:
            content = _with_pin(content, f'"{name}=={one.version}"')
    for gone in (change.package for change in renewal.changes if change.after is None):
        content = re.sub(r"(?m)^#\s+" + PIN.replace("NAME", re.escape(gone)) + r",\n", "", content, count=1)
    return text[: match.start("content")] + content + text[match.end("content") :]


def _with_pin(content: str, pin: str) -> str:
    """Add a pin to the list of a header: on a line of its own, or before the bracket that closes it."""
    if re.search(r"(?m)^# \]$", content):
        return re.sub(r"(?m)^# \]$", f"#   {pin},\n# ]", content, count=1)
    return re.sub(r"(?m)^(# dependencies = \[.*?),?\]$", rf"\g<1>, {pin}]", content, count=1)
