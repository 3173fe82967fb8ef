"""REPORT.md: what a report's template renders to from the committed receipts, kept beside it for whoever browses."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError
from harness.core.words import Kind, LaneVerdict, Verdict
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.receipt.receipt import Receipt
from harness.report import form, issue, reports
from harness.report.placeholders import MissingError, Renderer
from harness.report.reports import Report

MOST_LINES = 80
RELATIVE_IMAGE = re.compile(r"!\[[^\]]*\]\((?!https://)[^)]*\)|<img\b[^>]*\bsrc=[\"']?(?!https://)[^>]*>")
#: What a value looks like that was printed by a program and not by a person.
LONG_FRACTION = re.compile(r"\b\d+\.\d{9,}")
RAW_MAPPING = re.compile(r"\{['\"][^{}`]*['\"]: ")
#: ``18 sites of 27 sites``: two figures with their units, one behind the other.
UNIT_TWICE = re.compile(r"\b\d[\d.,]* ([A-Za-z/]+) of \d[\d.,]* \1\b")
#: Those that are English as well stand in a report for what they mean there.
SENTINELS = re.compile(rf"\b(?:{'|'.join(sorted({*LaneVerdict, *Verdict} - {'ERROR', 'UNSUPPORTED'}))})\b")


def render(pack: Pack, report: Report, *, is_draft: bool = False) -> str:
    """Fill a report's template from the receipts that are committed with the pack.

    Raises:
        HarnessError: a placeholder cannot be filled, or a receipt cannot be read.

    """
    own = replace(pack, receipts_elsewhere=None)
    try:
        return Renderer(own, receipt.load_all(own.receipts), report, is_draft=is_draft).text().strip() + "\n"
    except MissingError as error:
        raise HarnessError(f"{pack.name}/{report.template.name}: {error}. Next: runner.py check {pack.name}") from None


def write(pack: Pack) -> list[Path]:
    """Write every report of a pack, as a draft where an output is missing; return the paths of those that changed.

    A report in the form is the pack's README.md, and takes the place of REPORT.md.
    """
    changed = []
    for report in reports.of_pack(pack).values():
        text = render(pack, report, is_draft=True)
        if report.in_form:
            (pack.folder / reports.WRITTEN.format("")).unlink(missing_ok=True)
        if not report.written.exists() or report.written.read_text(encoding="utf-8") != text:
            files.write_atomic(report.written, text)
            changed.append(report.written)
    return changed


def errors(pack: Pack, receipts: list[Receipt]) -> list[str]:
    """Say where rendered reports are too long, not what their templates render to, or not written for people."""
    found = []
    for report in reports.of_pack(pack).values():
        if report.template.exists():
            try:
                text = render(pack, report)
            except HarnessError:
                continue  # told with the placeholders
            found += [f"{report.written.name}: {error}" for error in _errors(pack, receipts, report, text)]
    return found


def _errors(pack: Pack, receipts: list[Receipt], report: Report, text: str) -> Iterator[str]:
    again = f"Next: runner.py report {pack.name} --write"
    if report.in_form and (pack.folder / reports.WRITTEN.format("")).exists():
        yield f"REPORT.md stands beside it. {again}"
    if not report.written.exists():
        yield f"missing. {again}"
    elif report.written.read_text(encoding="utf-8") != text:
        yield f"not what {report.template.name} renders to from the receipts. {again}"
    if report.in_form:
        yield from form.text_errors(form.above(text))
        yield from style_errors(text)
        return
    lines = len(text.splitlines())
    if lines > MOST_LINES:
        yield f"{lines} lines, more than {MOST_LINES}. Next: shorten {report.template.name}"
    for sent in issue.FORMS if receipts else ():
        own = replace(pack, receipts_elsewhere=None)
        complaint = issue.too_long(own, issue.short(own, sent, report.name), report.name)
        if complaint:
            yield f"as {sent} {complaint}"
    yield from style_errors(text)
    if pack.definition.kind == Kind.CLEANUP:
        words = dict.fromkeys(SENTINELS.findall(text))
        yield from (f"{word!r}: the report of a cleanup says it in words" for word in words)


def style_errors(text: str) -> Iterator[str]:
    """Name what no person would have written, or what leads nowhere from an upstream's page."""
    for match in RELATIVE_IMAGE.finditer(text):
        yield f"{match[0]!r}: an image that is not on the web; drop it, or upload it"
    for pattern, what in ((LONG_FRACTION, "a number with every digit"), (RAW_MAPPING, "a raw mapping")):
        yield from (f"{match[0]!r}: {what}" for match in pattern.finditer(text))
    for match in UNIT_TWICE.finditer(text):
        yield f"{match[0]!r}: the unit stands there twice; {{{{number:TARGET:NAME}}}} is a figure without it"
