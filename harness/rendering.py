"""Rendering REPORT.md: its placeholders are filled from receipts and raw data, never typed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

from harness import facts, receipt, staleness, template, upstreams
from harness.errors import HarnessError
from harness.pack import Pack
from harness.receipt import Receipt
from harness.summary import number
from harness.template import Section, Upstream
from harness.words import Evidence, Kind, LaneName

PLACEHOLDER = re.compile(r"\{\{(?P<form>[a-z]+):(?P<rest>[^{}]+)\}\}")
LEFT_OVER = re.compile(r"\{\{|\}\}|\b(?:TODO|FIXME|TBD)\b")


class MissingError(LookupError):
    """A placeholder names something that no receipt or data file holds."""


def _receipts_by_target(pack: Pack, receipts: list[Receipt]) -> dict[str, Receipt]:
    best = receipt.strongest(receipts)
    for path in sorted((pack.receipts / "head").glob("*.json")):
        one = receipt.load(path)
        best[f"head:{one.target}"] = one
    return best


class Renderer:
    """Fills the placeholders of one pack's report."""

    def __init__(self, pack: Pack, receipts: list[Receipt], upstream: Upstream) -> None:
        """Take the pack's receipts, what its receipts/head and data/ hold, and the upstream that reads the report."""
        self._pack = pack
        self._upstream = upstream
        self._receipts = _receipts_by_target(pack, receipts)

    def fill(self, text: str) -> str:
        """Fill every placeholder, or raise MissingError that names the first one that cannot be."""
        return PLACEHOLDER.sub(lambda match: self.value(match["form"], match["rest"]), text)

    def value(self, form: str, rest: str) -> str:
        """Return what one placeholder stands for."""
        if form in ("data", "table"):
            return self._data(form, rest)
        prefix, place = ("head:", rest.removeprefix("head:")) if rest.startswith("head:") else ("", rest)
        target, _, name = place.partition(":")
        found = self._receipts.get(prefix + target)
        if found is None:
            raise MissingError(f"{{{{{form}:{rest}}}}}: no receipt for {prefix}{target}")
        if form == "verdict":
            return self._verdict(found)
        if form == "versions":
            return facts.every(self._upstream, self._pack, found)
        if form in ("figure", "check"):
            return self._measured(form, found, name)
        raise MissingError(f"{{{{{form}:{rest}}}}}: no placeholder of that form")

    def _verdict(self, found: Receipt) -> str:
        repeats = f", {found.repeats.agreeing} of {found.repeats.of} runs" if found.repeats.of > 1 else ""
        device = found.host.gpu or ("CPU" if found.evidence != Evidence.COMPILED else f"compiled for {found.target}")
        stale = "; STALE: " + ", ".join(staleness.reasons(self._pack, found))
        text = f"{found.verdict} ({found.kind}; {found.evidence}, {device}{repeats})"
        return text + (f"{stale}" if staleness.reasons(self._pack, found) else "")

    @staticmethod
    def _measured(form: str, found: Receipt, name: str) -> str:
        name, _, lane = name.partition(":")
        record = found.lanes.get(lane or LaneName.PRISTINE)
        lines = (record.figures if form == "figure" else record.checks) if record else ()
        line = next((line for line in lines if line.name == name), None)
        if line is None:
            raise MissingError(f"{{{{{form}:{found.target}:{name}}}}}: no such {form} in the {lane or 'pristine'} lane")
        value = getattr(line, "value", None) if form == "figure" else getattr(line, "measured", None)
        unit = f" {line.unit}" if line.unit not in ("", "1") else ""
        return f"{number(value)}{unit}"

    def _data(self, form: str, rest: str) -> str:
        name, _, keys = rest.partition(":")
        path = self._pack.folder / "data" / name
        if not path.is_file() or path.parent.resolve() != (self._pack.folder / "data").resolve():
            raise MissingError(f"{{{{{form}:{rest}}}}}: no file data/{name}")
        text = path.read_text(encoding="utf-8")
        if form == "table":
            return text.strip()
        value = json.loads(text)
        for key in keys.split("."):
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise MissingError(f"{{{{{form}:{rest}}}}}: no {key} in data/{name}") from None
        return number(value)


def headings(text: str) -> list[str]:
    """List the headings of a Markdown text, those that are a bold line of their own among them."""
    lines = [line.strip() for line in text.splitlines()]
    return [line.strip("#* ") for line in lines if line.startswith("#") or re.fullmatch(r"\*\*[^*]+\*\*:?", line)]


def holds(text: str, section: Section) -> bool:
    """Whether a text has a heading for one part of a template."""
    names = [name.lower() for name in (section.label, *section.also)]
    return any(name in heading.lower() for heading in headings(text) for name in names)


def errors(pack: Pack, receipts: list[Receipt]) -> list[str]:
    """Say what keeps a pack's reports from being whole."""
    return [
        f"{path.name}: {error}"
        for name, path in facts.reports(pack).items()
        for error in _report_errors(pack, receipts, name, path)
    ]


def _report_errors(pack: Pack, receipts: list[Receipt], name: str, path: Path) -> Iterator[str]:
    upstream = upstreams.BY_NAME.get(name, upstreams.GENERIC)
    if name and upstream is upstreams.GENERIC:
        yield f"no upstream {name!r}; there is {', '.join(upstreams.BY_NAME)}"
    text = path.read_text(encoding="utf-8")
    yield from _unfilled(pack, receipts, text, upstream)
    left = PLACEHOLDER.sub("", text)
    yield from (f"{match[0]!r} is left in it" for match in LEFT_OVER.finditer(left))
    for section in upstream.sections:
        if section.source == template.REPORT and section.required and not holds(text, section):
            yield f"its upstream's template asks for a section {section.label!r}"
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if pack.definition.kind == Kind.ROBUSTNESS and not first.startswith("Not a bug:"):
        yield "the report of a robustness pack opens with 'Not a bug:'"


def _unfilled(pack: Pack, receipts: list[Receipt], text: str, upstream: Upstream) -> Iterator[str]:
    try:
        renderer = Renderer(pack, receipts, upstream)
    except HarnessError as error:
        yield str(error)
        return
    for match in PLACEHOLDER.finditer(text):
        try:
            renderer.value(match["form"], match["rest"])
        except MissingError as error:
            yield str(error)
