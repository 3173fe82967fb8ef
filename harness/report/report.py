"""The report of a pack: what upstream reads, and below a line how it was checked.

``report.in.md`` is words and placeholders. A placeholder stands for what a receipt, a data file or pack.toml holds, so
that no figure is typed. The whole text is the pack's README.md; the part above the line is what ``report`` prints.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.core import files, markdown
from harness.core.errors import HarnessError
from harness.core.words import ActionKind, LaneName, LaneVerdict, Verdict
from harness.lane.record import CheckLine, FigureLine
from harness.pack.model import Pack
from harness.receipt import receipt, redaction
from harness.receipt.figures import significant
from harness.receipt.receipt import Receipt
from harness.receipt.redaction import Scrubber
from harness.report.parts import ASK, HEAD, MissingError, Parts

PLACEHOLDER = re.compile(r"\{\{(?P<form>[a-z_]+)(?::(?P<rest>[^{}]+))?\}\}")
LEFT_OVER = re.compile(r"\{\{|\}\}|\b(?:TODO|FIXME|TBD)\b")
#: What separates the part for upstream from how it was checked.
LINE = "\n---\n"
CHECKED = "## How this was checked"
#: What is filed where the action is at another upstream: a title, and a quoted text.
QUESTION = re.compile(r"(?m)^## The question to .+\n\nTitle: (?P<title>.+)\n\n(?P<text>(?:>.*\n?)+)")
MOST_WORDS, MOST_THREADS = 300, 3
FENCE = re.compile(r"(?ms)^(`{3,}|~{3,})[^\n]*\n.*?^\1[ \t]*$")
TARGET_OF_LINK = re.compile(r"\]\([^)]*\)")
#: Words of this repository, which no text for upstream holds but as code.
OWN_WORDS = re.compile(
    rf"\b(?:{'|'.join(sorted({*LaneVerdict, *Verdict} - {'ERROR', 'UNSUPPORTED'}))})\b"
    r"|\b(?:strengths?|lanes?|evidence|probes?|pristine|packs?|contracts?|receipts?|mutants?|at first sight)\b"
    r"|\bagainst it\b",
    re.IGNORECASE,
)
CODE = re.compile(r"`[^`\n]*`")


def receipts_of(pack: Pack, run: Path | None = None) -> dict[str, Receipt]:
    """Map targets to the strongest receipts, ``head:`` and ``ask:`` before those of other trees.

    The receipts in `run`, of a run, stand in the place of the pack's own for the same target. HarnessError is raised
    where there is none.
    """
    best = receipt.strongest(receipt.load_all(pack.receipts))
    for prefix in (HEAD, ASK):
        others = receipt.strongest(receipt.load_all(pack.receipts / prefix.rstrip(":")))
        best |= {prefix + target: one for target, one in others.items()}
    if run is not None:
        best |= receipt.strongest([one for one in receipt.load_all(run) if one.lanes])
    if not best:
        raise HarnessError(
            f"{pack.name}: no receipt to report from. Next: runner.py run {pack.name}, then report --from last"
        )
    return best


def render(pack: Pack, receipts: dict[str, Receipt] | None = None, *, is_draft: bool = False) -> str:
    """Fill report.in.md from receipts; by default the pack's own. A draft may lack the output of the script.

    HarnessError is raised where it is missing, or a placeholder cannot be filled.
    """
    path = pack.report_template
    if not path.exists():
        raise HarnessError(f"{pack.name}: {path.name} is missing. Next: CONTRIBUTING.md, Reports")
    try:
        return filled(pack, receipts or receipts_of(pack), path.read_text(encoding="utf-8"), is_draft=is_draft)
    except MissingError as error:
        raise HarnessError(f"{pack.name}/{path.name}: {error}. Next: runner.py check {pack.name}") from None


def filled(pack: Pack, receipts: dict[str, Receipt], template: str, *, is_draft: bool = False) -> str:
    """Fill a template, and say below its title what is done already, or why nothing is to be done."""
    parts = Parts(pack, receipts, is_draft)
    if is_draft and pack.definition.script is not None:
        template = "\n\n".join(text for text in template.split("\n\n") if not _open_part(parts, text))
    text = PLACEHOLDER.sub(lambda match: value(parts, match["form"], match["rest"]), template)
    action = pack.definition.action
    if action is not None and action.kind in (ActionKind.FIXED, ActionKind.NOTHING):
        title, _, rest = text.partition("\n")
        text = f"{title}\n\n*{action.text}*\n{rest}"
    return text.strip() + "\n"


def open_parts(pack: Pack, receipts: dict[str, Receipt]) -> Iterator[str]:
    """Say which parts a draft leaves out, where the script is its author's own: none of them refuses it."""
    parts = Parts(pack, receipts, is_draft=True)
    if pack.definition.script is not None:
        template = above_line(pack.report_template.read_text(encoding="utf-8"))
        yield from filter(None, (_open_part(parts, text).strip() for text in template.split("\n\n")))


def _open_part(parts: Parts, text: str) -> str:
    """Return what a paragraph of a template lacks; empty where it lacks nothing."""
    if LEFT_OVER.search(PLACEHOLDER.sub("", text)):
        return text
    try:
        for match in PLACEHOLDER.finditer(text):
            value(parts, match["form"], match["rest"])
    except MissingError as error:
        return str(error)
    return ""


def above_line(text: str) -> str:
    """Return the part of a report that is about the package under test."""
    return text.partition(LINE)[0].rstrip() + "\n"


def for_upstream(text: str) -> str:
    """Return what is filed: the part above the line, or the question to another upstream where a report has one."""
    question = QUESTION.search(text)
    if question is None:
        return above_line(text)
    return f"# {question['title']}\n\n{re.sub(r'(?m)^> ?', '', question['text']).strip()}\n"


def scrubber(pack: Pack) -> Scrubber:
    """Return what refuses the private in texts about a pack; versions that pack.toml or a receipt states are none."""
    sets = pack.definition.dependencies.values()
    stated = {dependency.version for members in sets for dependency in members.values()}
    return redaction.of_host({}, stated | receipt.public_versions(receipt.load_all(pack.receipts)))


def write(pack: Pack) -> bool:
    """Write README.md of a pack, a draft where an output is missing; say whether it was another."""
    text = render(pack, is_draft=True)
    scrubber(pack).require_clean(pack.report.name, text)
    if pack.report.exists() and pack.report.read_text(encoding="utf-8") == text:
        return False
    files.write_atomic(pack.report, text)
    return True


def value(parts: Parts, form: str, rest: str | None) -> str:
    """Return what one placeholder stands for; MissingError is raised where nothing holds it."""
    try:
        return _value(parts, form, rest)
    except MissingError as error:
        whole = form if rest is None else f"{form}:{rest}"
        raise MissingError(f"{{{{{whole}}}}}: {error}") from None


def _value(parts: Parts, form: str, rest: str | None) -> str:
    if rest is None or form == "diff":
        return parts.text(form, rest)
    if form in ("data", "table"):
        return _data(parts.pack, form, rest)
    prefix = HEAD if rest.startswith(HEAD) else ""
    target, _, place = rest.removeprefix(HEAD).partition(":")
    one = parts.receipts.get(prefix + target)
    if one is None:
        raise MissingError(f"no receipt for {prefix + target}")
    if form in ("figure", "number", "check"):
        return _measured(form, one, place)
    raise MissingError("no placeholder of that form")


def _measured(form: str, one: Receipt, place: str) -> str:
    name, _, lane = place.partition(":")
    record = one.lanes.get(lane or LaneName.PRISTINE)
    lines = (record.checks if form == "check" else record.figures) if record else ()
    line = next((line for line in lines if line.name == name), None)
    if line is None:
        raise MissingError(f"no such {form} in the {lane or 'pristine'} lane")
    measured = line.value if isinstance(line, FigureLine) else line.measured
    if isinstance(line, CheckLine) and measured is None:
        measured = line.reason or None
    unit = f" {line.unit}" if line.unit not in ("", "1") and form != "number" else ""
    shown = f"{significant(measured)}{unit}"
    return markdown.code(shown) if isinstance(measured, str) else shown


def _data(pack: Pack, form: str, rest: str) -> str:
    name, _, keys = rest.partition(":")
    path = pack.folder / "data" / name
    if not path.is_file() or path.parent.resolve() != (pack.folder / "data").resolve():
        raise MissingError(f"no file data/{name}")
    text = path.read_text(encoding="utf-8")
    if form == "table":
        return text.strip()
    found = json.loads(text)
    for key in keys.split("."):
        try:
            found = found[int(key)] if isinstance(found, list) else found[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise MissingError(f"no {key} in data/{name}") from None
    return significant(found)


def errors(pack: Pack) -> Iterator[str]:
    """Say what keeps report.in.md from being filled, or is wrong with its form, and whether README.md is that text."""
    name = pack.report_template.name
    if not pack.report_template.exists():
        yield f"{name} is missing"
        return
    template = pack.report_template.read_text(encoding="utf-8")
    yield from (f"{name}: {match[0]!r} is left in it" for match in LEFT_OVER.finditer(PLACEHOLDER.sub("", template)))
    yield from (f"{name}: {error}" for error in form_errors(pack, template))
    if not any(receipt.paths(pack.receipts)):
        return  # told with the receipts
    try:
        text = render(pack)
    except HarnessError as error:
        yield str(error).removeprefix(f"{pack.name}/").removesuffix(f". Next: runner.py check {pack.name}")
        with suppress(HarnessError):  # what else is wrong with it, where the output alone is missing
            yield from (f"{pack.report.name}: {one}" for one in text_errors(render(pack, is_draft=True)))
        return
    yield from (f"{pack.report.name}: {error}" for error in text_errors(text))
    if not pack.report.exists() or pack.report.read_text(encoding="utf-8") != text:
        again = f"Next: runner.py report {pack.name} --write"
        yield f"{pack.report.name}: not what {name} renders to from the receipts. {again}"


def form_errors(pack: Pack, template: str) -> Iterator[str]:
    """Say where a template is not of the form that upstream gets."""
    title = template.partition("\n")[0]
    if title != f"# {pack.definition.title}":
        yield "its first line is not '# ' and the title of pack.toml"
    if pack.definition.action is None:
        yield "pack.toml has no [action] that says what is to be done with it"
    _, line, below = template.partition(LINE)
    if not line or CHECKED not in below:
        yield f"it has no line '---' with {CHECKED!r} below"
    if len(pack.definition.threads) > MOST_THREADS:
        yield f"pack.toml has {len(pack.definition.threads)} [[threads]], more than {MOST_THREADS}"


def text_errors(text: str) -> Iterator[str]:
    """Name what is too long for a maintainer, and words that he does not know."""
    for part, place in {for_upstream(text): "in the question", above_line(text): "above the line"}.items():
        yield from _length_errors(TARGET_OF_LINK.sub("]", FENCE.sub("", part)), place)


def _length_errors(words: str, place: str) -> Iterator[str]:
    """Say where a text for upstream is too long, or has words that nobody there knows."""
    number = len(words.split())
    if number > MOST_WORDS:
        yield f"{number} words {place} beside code, more than {MOST_WORDS}"
    own = dict.fromkeys(match[0] for match in OWN_WORDS.finditer(CODE.sub("", words)))
    if own:
        yield f"words of this repository {place}: {', '.join(own)}"
