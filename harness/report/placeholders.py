"""Filling a report's template: what was measured stands in receipts and raw data, and is never typed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from harness.core.errors import HarnessError
from harness.core.words import Evidence, Kind, LaneName
from harness.pack.model import Pack
from harness.pack.rules import FORM_REQUIRED
from harness.receipt import receipt, staleness
from harness.receipt.figures import significant
from harness.receipt.receipt import Receipt
from harness.report import form, of_run, reports, sections, template, template_fields, upstream_templates
from harness.report.blocks import Blocks
from harness.report.reports import Report
from harness.report.sections import ASK, HEAD, NothingStatedError, Sections
from harness.report.template import Section

PLACEHOLDER = re.compile(r"\{\{(?P<kind>[a-z_]+)(?::(?P<rest>[^{}]+))?\}\}")
LEFT_OVER = re.compile(r"\{\{|\}\}|\b(?:TODO|FIXME|TBD)\b")
#: A part that is a block of its own stands apart from a sentence that it follows on one line.
SPACES = {
    re.compile(r"(?<=\S)[ \t]+(?=\{\{(?:script|diff(?::[^{}]+)?)\}\})"): "\n\n",
    re.compile(r"(?<=\S)[ \t]+(?=\{\{threads\}\})"): "\n",
}
MOST_NAMED = 3
THREADS_HEADING = "already there"


class MissingError(LookupError):
    """A placeholder names something that no receipt, data file or pack.toml holds."""


def _receipts_by_target(pack: Pack, found: list[Receipt]) -> dict[str, Receipt]:
    best = receipt.strongest(found)
    for prefix in (HEAD, ASK):
        others = receipt.strongest(receipt.load_all(pack.receipts / prefix.rstrip(":")))
        best |= {prefix + target: one for target, one in others.items()}
    return best


def leading_of(receipts: list[Receipt]) -> Receipt:
    """Return the receipt whose machine a report describes: the first with a GPU, else the first."""
    return next((one for one in receipts if one.host.gpu), receipts[0])


class Renderer:
    """Fills the placeholders of one of a pack's reports."""

    def __init__(
        self, pack: Pack, receipts: list[Receipt], report: Report, *, one_run: bool = False, is_draft: bool = False
    ) -> None:
        """Take the pack's receipts, what its receipts/head, receipts/ask and data/ hold, and the report.

        `one_run`: the receipts are those of one run, and what it did not judge is said to be so. `is_draft`: an output
        that no receipt holds is said to be missing.
        """
        self._pack = pack
        self._report = report
        self._receipts = _receipts_by_target(pack, receipts)
        self._leading = leading_of(receipts) if one_run else None
        self._template = report.template.read_text(encoding="utf-8") if report.template.exists() else None
        if one_run and self._template is not None:
            self._template = of_run.template(self._template, self._receipts)
        headed = any(THREADS_HEADING in heading.lower() for heading in headings(self._template or ""))
        self._blocks = Blocks(pack, self._receipts, is_draft)
        self._sections = Sections(pack, report.name, self._receipts, headed, one_run)
        self._texts: dict[str, str] = {}
        self._documents: dict[str, Any] = {}
        self._verdicts: dict[int, str] = {}

    def text(self) -> str:
        """Fill the report's template, or raise MissingError that names the first placeholder that cannot be."""
        if self._template is None:
            raise MissingError("missing")
        if not self._report.in_form:
            return self._filled(self._template)
        below = self._filled(form.halves(self._template)[1])
        return f"{self.above()}{form.LINE}\n{below}\n"

    def above(self) -> str:
        """Fill what upstream reads of a report in the form; the title is that of pack.toml."""
        above = form.halves(self._template or "")[0]
        for pattern, space in SPACES.items():
            above = pattern.sub(space, above)
        return f"{form.heading(self._pack)}\n\n{self._filled(above)}"

    def _filled(self, text: str) -> str:
        return PLACEHOLDER.sub(lambda match: self.value(match["kind"], match["rest"]), text).strip()

    def heaviest(self) -> str:
        """Say which placeholders of the template take most bytes: where a report that is too long can be cut."""
        sizes: dict[str, int] = {}
        for match in PLACEHOLDER.finditer(self._template or ""):
            sizes[match[0]] = sizes.get(match[0], 0) + len(self.value(match["kind"], match["rest"]).encode())
        most = sorted(sizes.items(), key=lambda pair: -pair[1])[:MOST_NAMED]
        return ", ".join(f"{name} {size}" for name, size in most)

    def value(self, kind: str, rest: str | None) -> str:
        """Return what one placeholder stands for."""
        whole = f"{{{{{kind}}}}}" if rest is None else f"{{{{{kind}:{rest}}}}}"
        if rest is None or kind in ("patch", "diff"):
            try:
                if self._report.in_form and kind == "diff":
                    return self._blocks.diff(rest)
                if self._report.in_form and kind in self._blocks.parts:
                    return self._blocks.parts[kind]()
                return self._sections.text(kind, rest)
            except NothingStatedError as error:
                raise MissingError(f"{whole}: {error}") from None
        if kind in ("data", "table"):
            return self._data(kind, rest)
        return self._of_receipt(kind, rest)

    def _of_receipt(self, kind: str, rest: str) -> str:
        """Return what a receipt says; where the receipts are one run's, what it lacks was not judged there."""
        prefix, place = (HEAD, rest.removeprefix(HEAD)) if rest.startswith(HEAD) else ("", rest)
        target, _, name = place.partition(":")
        found = self._receipts.get(prefix + target)
        if self._leading is None:
            return self._said(kind, found, prefix + target, name)
        if kind == "versions":  # the upstream's kind asks for a machine: that of the run
            return self._said(kind, found or self._leading, prefix + target, name)
        if found is None:
            return of_run.not_judged(prefix + target)
        try:
            return self._said(kind, found, prefix + target, name)
        except MissingError:  # weaker evidence, or one lane alone
            return of_run.not_measured(prefix + target)

    def _said(self, kind: str, found: Receipt | None, place: str, name: str) -> str:
        whole = f"{{{{{kind}:{place}{f':{name}' if name else ''}}}}}"
        if found is None:
            raise MissingError(f"{whole}: no receipt for {place}")
        if kind == "verdict":
            if id(found) not in self._verdicts:
                self._verdicts[id(found)] = self._verdict(found)
            return self._verdicts[id(found)]
        if kind == "versions":
            return template_fields.short(self._report.upstream, self._pack, found)
        if kind in ("figure", "number", "check"):
            return self._measured(kind, found, name)
        raise MissingError(f"{whole}: no placeholder of that form")

    def _verdict(self, found: Receipt) -> str:
        repeats = f", {found.repeats.agreeing} of {found.repeats.of} runs" if found.repeats.of > 1 else ""
        device = found.host.gpu or ("CPU" if found.evidence != Evidence.COMPILED else f"compiled for {found.target}")
        why = staleness.reasons(self._pack, found)
        text = f"{sections.said(found.kind, found.verdict)} ({found.kind}; {found.evidence}, {device}{repeats})"
        return text + (f"; STALE: {', '.join(why)}" if why else "")

    @staticmethod
    def _measured(kind: str, found: Receipt, name: str) -> str:
        name, _, lane = name.partition(":")
        record = found.lanes.get(lane or LaneName.PRISTINE)
        lines = (record.checks if kind == "check" else record.figures) if record else ()
        line = next((line for line in lines if line.name == name), None)
        if line is None:
            raise MissingError(f"{{{{{kind}:{found.target}:{name}}}}}: no such {kind} in the {lane or 'pristine'} lane")
        value = getattr(line, "measured", None) if kind == "check" else getattr(line, "value", None)
        if kind == "check" and value is None:
            value = getattr(line, "reason", "") or None
        unit = f" {line.unit}" if line.unit not in ("", "1") and kind != "number" else ""
        return f"{significant(value)}{unit}"

    def _data(self, kind: str, rest: str) -> str:
        name, _, keys = rest.partition(":")
        if name not in self._texts:
            path = self._pack.folder / "data" / name
            if not path.is_file() or path.parent.resolve() != (self._pack.folder / "data").resolve():
                raise MissingError(f"{{{{{kind}:{rest}}}}}: no file data/{name}")
            self._texts[name] = path.read_text(encoding="utf-8")
        if kind == "table":
            return self._texts[name].strip()
        if name not in self._documents:
            self._documents[name] = json.loads(self._texts[name])
        value = self._documents[name]
        for key in keys.split("."):
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise MissingError(f"{{{{{kind}:{rest}}}}}: no {key} in data/{name}") from None
        return significant(value)


def headings(text: str) -> list[str]:
    """List the headings of a Markdown text, those that are a bold line of their own among them."""
    lines = [line.strip() for line in text.splitlines()]
    return [line.strip("#* ") for line in lines if line.startswith("#") or re.fullmatch(r"\*\*[^*]+\*\*:?", line)]


def holds(text: str, section: Section) -> bool:
    """Whether a text has a heading for one part of a template."""
    names = [name.lower() for name in (section.label, *section.also)]
    return any(name in heading.lower() for heading in headings(text) for name in names)


def errors(pack: Pack, receipts: list[Receipt]) -> list[str]:
    """Say what keeps the templates of a pack's reports from being filled."""
    return [
        f"{report.template.name}: {error}"
        for report in reports.of_pack(pack).values()
        for error in _report_errors(pack, receipts, report)
    ]


def _report_errors(pack: Pack, receipts: list[Receipt], report: Report) -> Iterator[str]:
    upstream = report.upstream
    if not report.template.exists():
        yield "missing"
        return
    if report.name and upstream is upstream_templates.GENERIC:
        yield f"no upstream {report.name!r}; there is {', '.join(upstream_templates.BY_NAME)}"
    text = report.template.read_text(encoding="utf-8")
    yield from _unfilled(pack, receipts, text, report)
    left = PLACEHOLDER.sub("", text)
    yield from (f"{match[0]!r} is left in it" for match in LEFT_OVER.finditer(left))
    if report.in_form:
        yield from form.template_errors(pack, text)
        return
    if FORM_REQUIRED:
        yield f"it is not in the form: it lacks {form.SCRIPT}"
    for section in upstream.sections:
        if section.source == template.REPORT and section.required and not holds(text, section):
            yield f"its upstream's template asks for a section {section.label!r}"
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if pack.definition.kind == Kind.CLEANUP and not first.startswith("Not a bug:"):
        yield "the report of a cleanup opens with 'Not a bug:'"


def _unfilled(pack: Pack, receipts: list[Receipt], text: str, report: Report) -> Iterator[str]:
    try:
        renderer = Renderer(pack, receipts, report)
    except HarnessError as error:
        yield str(error)
        return
    for match in PLACEHOLDER.finditer(text):
        try:
            renderer.value(match["kind"], match["rest"])
        except (MissingError, HarnessError) as error:
            yield str(error)
