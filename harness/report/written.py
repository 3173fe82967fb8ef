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
from harness.report import issue, reports
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


def render(pack: Pack, report: Report) -> str:
    """Fill a report's template from the receipts that are committed with the pack.

    Raises:
        HarnessError: a placeholder cannot be filled, or a receipt cannot be read.

    """
    own = replace(pack, receipts_elsewhere=None)
    try:
        return Renderer(own, receipt.load_all(own.receipts), report).text().strip() + "\n"
    except MissingError as error:
        raise HarnessError(f"{pack.name}/{report.template.name}: {error}. Next: runner.py check {pack.name}") from None


def write(pack: Pack) -> list[Path]:
    """Write every report of a pack; return the paths of those that were not like that before."""
    changed = []
    for report in reports.of_pack(pack).values():
        text = render(pack, report)
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
    if not report.written.exists():
        yield f"missing. {again}"
    elif report.written.read_text(encoding="utf-8") != text:
        yield f"not what {report.template.name} renders to from the receipts. {again}"
    lines = len(text.splitlines())
    if lines > MOST_LINES:
        yield f"{lines} lines, more than {MOST_LINES}. Next: shorten {report.template.name}"
    for form in issue.FORMS if receipts else ():
        own = replace(pack, receipts_elsewhere=None)
        complaint = issue.too_long(own, issue.short(own, form, report.name), report.name)
        if complaint:
            yield f"as {form} {complaint}"
    yield from style_errors(pack, text)


def style_errors(pack: Pack, text: str) -> Iterator[str]:
    """Name what no person would have written, or what leads nowhere from an upstream's page."""
    for match in RELATIVE_IMAGE.finditer(text):
        yield f"{match[0]!r}: an image that is not on the web; drop it, or upload it"
    for pattern, what in ((LONG_FRACTION, "a number with every digit"), (RAW_MAPPING, "a raw mapping")):
        yield from (f"{match[0]!r}: {what}" for match in pattern.finditer(text))
    for match in UNIT_TWICE.finditer(text):
        yield f"{match[0]!r}: the unit stands there twice; {{{{number:TARGET:NAME}}}} is a figure without it"
    if pack.definition.kind == Kind.CLEANUP:
        words = dict.fromkeys(SENTINELS.findall(text))
        yield from (f"{word!r}: the report of a cleanup says it in words" for word in words)
