"""The report of a pack: report.in.md, with each placeholder filled as CONTRIBUTING.md says under Reports."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from harness.core import HarnessError, files, markdown
from harness.core.words import ActionKind, LaneName, LaneVerdict, Verdict
from harness.pack.model import Pack
from harness.receipt import receipt, redaction
from harness.receipt.figures import significant
from harness.receipt.receipt import Receipt
from harness.receipt.redaction import Scrubber
from harness.report.parts import ASK, HEAD, WHOLE, MissingError, Parts

PLACEHOLDER = re.compile(r"\{\{(?P<form>[a-z_]+)(?::(?P<rest>[^{}]+))?\}\}")
LEFT_OVER = re.compile(r"\{\{|\}\}|\b(?:TODO|FIXME|TBD)\b")
#: The line below which the report says how it was checked.
LINE = "\n---\n"
CHECKED = "## How this was checked"
#: The one text to file, where that is not the part above the line: a title, and a quoted text.
QUOTED = re.compile(r"(?m)^## The (?:question to|pull request for) .+\n\nTitle: (?P<title>.+)\n\n(?P<text>(?:>.*\n?)+)")
MOST_WORDS, MOST_THREADS = 300, 3
FENCE = re.compile(r"(?ms)^(`{3,}|~{3,})[^\n]*\n.*?^\1[ \t]*$")
TARGET_OF_LINK = re.compile(r"\]\([^)]*\)")
#: Words of this repository, which a text for upstream may have only as code.
OWN_WORDS = re.compile(
    rf"\b(?:{'|'.join(sorted({*LaneVerdict, *Verdict} - {'ERROR', 'UNSUPPORTED'}))})\b"
    r"|\b(?:strengths?|lanes?|evidence|probes?|pristine|packs?|contracts?|receipts?|mutants?|at first sight)\b"
    r"|\bagainst it\b",
    re.IGNORECASE,
)
CODE = re.compile(r"`[^`\n]*`")


def receipts_of(pack: Pack, run: Path | None = None) -> dict[str, Receipt]:
    """Map targets to the strongest receipts, with ``head:`` and ``ask:`` before the targets on other trees.

    The receipts in the folder `run` replace the pack's own for the same target.
    """
    best = receipt.strongest(receipt.load_all(pack.receipts))
    for prefix in (HEAD, ASK):
        tree_receipts = receipt.strongest(receipt.load_all(pack.receipts / prefix.rstrip(":")))
        best |= {prefix + target: recorded for target, recorded in tree_receipts.items()}
    if run is not None:
        best |= receipt.strongest([recorded for recorded in receipt.load_all(run) if recorded.lanes])
    if not best:
        raise HarnessError(
            f"{pack.name}: no receipt to report from. Next: runner.py run {pack.name}, then report --from last"
        )
    return best


def render(pack: Pack, receipts: dict[str, Receipt] | None = None, *, is_draft: bool = False) -> str:
    """Fill report.in.md from receipts; by default the pack's own. A draft may lack the output of the script."""
    path = pack.report_template
    if not path.exists():
        raise HarnessError(f"{pack.name}: {path.name} is missing. Next: CONTRIBUTING.md, Reports")
    try:
        return fill_template(pack, receipts or receipts_of(pack), path.read_text(encoding="utf-8"), is_draft=is_draft)
    except MissingError as error:
        raise HarnessError(f"{pack.name}/{path.name}: {error}. Next: runner.py check {pack.name}") from None


def fill_template(pack: Pack, receipts: dict[str, Receipt], template: str, *, is_draft: bool = False) -> str:
    """Fill a template; below the title stands what is done already, or why nothing is to be done."""
    parts = Parts(pack, receipts, is_draft)

    def fill(match: re.Match[str]) -> str:
        try:
            return _value(parts, match["form"], match["rest"])
        except MissingError as error:
            raise MissingError(f"{match[0]}: {error}") from None

    text = PLACEHOLDER.sub(fill, template)
    action = pack.definition.action
    if action is not None and action.kind in (ActionKind.FIXED, ActionKind.NOTHING):
        title, _, body = text.partition("\n")
        text = f"{title}\n\n*{action.text}*\n{body}"
    return text.strip() + "\n"


def above_line(text: str) -> str:
    """Return the part of a report above its line."""
    return text.partition(LINE)[0].rstrip() + "\n"


def for_upstream(text: str) -> str:
    """Return the text to file: the quoted one below the line where there is one, else the part above the line."""
    quoted = QUOTED.search(text)
    if quoted is None:
        return above_line(text)
    return f"# {quoted['title']}\n\n{re.sub(r'(?m)^> ?', '', quoted['text']).strip()}\n"


def scrubber(pack: Pack) -> Scrubber:
    """Return the scrubber for texts about a pack; it knows the versions in pack.toml and in receipts as public.

    Those with four parts, such as cuDNN's, look like an address.
    """
    sets = pack.definition.dependencies.values()
    versions = {dependency.version for members in sets for dependency in members.values()}
    for recorded in receipt.load_all(pack.receipts, lanes=False):
        versions |= {recorded.host.cudnn, recorded.host.nccl, *recorded.dependencies.packages.values()}
    return redaction.host_scrubber({}, versions)


def write(pack: Pack) -> bool:
    """Write README.md of a pack, as a draft where an output is missing; return whether the text changed."""
    text = render(pack, is_draft=True)
    scrubber(pack).require_clean(pack.report.name, text)
    if pack.report.exists() and pack.report.read_text(encoding="utf-8") == text:
        return False
    files.write_atomic(pack.report, text)
    return True


def _value(parts: Parts, form: str, argument: str | None) -> str:
    """Return the text for one placeholder; MissingError: it has an unknown form, or its text would be empty."""
    if form == "diff":
        return parts.diff(argument)
    if form in WHOLE and argument is None:
        return str(getattr(parts, form)())
    if form in ("data", "table") and argument:
        return _data_value(parts.pack, form, argument)
    if form in ("figure", "number") and argument:
        return _figure_value(parts.receipts, form, argument)
    raise MissingError("no placeholder of that form")


def _figure_value(receipts: dict[str, Receipt], form: str, argument: str) -> str:
    target, name, lane = [*argument.split(":"), "", ""][:3]
    if target not in receipts:
        raise MissingError(f"no receipt for {target}")
    figure = receipts[target].figure(name, lane or LaneName.PRISTINE)
    if figure is None:
        raise MissingError(f"no such figure in the {lane or 'unpatched'} lane")
    unit = f" {figure.unit}" if figure.unit not in ("", "1") and form == "figure" else ""
    text = f"{significant(figure.value)}{unit}"
    return markdown.inert(text) if isinstance(figure.value, (int, float)) else markdown.code(text)


def _data_value(pack: Pack, form: str, argument: str) -> str:
    name, _, keys = argument.partition(":")
    path = pack.folder / "data" / name
    if not path.is_file() or path.parent.resolve() != (pack.folder / "data").resolve():
        raise MissingError(f"no file data/{name}")
    text = path.read_text(encoding="utf-8")
    if form == "table":
        return text.strip()
    item = json.loads(text)
    for key in keys.split("."):
        try:
            item = item[int(key)] if isinstance(item, list) else item[key]
        except (KeyError, IndexError, ValueError, TypeError):
            raise MissingError(f"no {key} in data/{name}") from None
    return significant(item)


def errors(pack: Pack) -> Iterator[str]:
    """Say what keeps report.in.md from being filled, what is wrong with its form, and whether README.md is outdated."""
    name = pack.report_template.name
    if not pack.report_template.exists():
        yield f"{name} is missing"
        return
    template = pack.report_template.read_text(encoding="utf-8")
    yield from (f"{name}: {match[0]!r} is left in it" for match in LEFT_OVER.finditer(PLACEHOLDER.sub("", template)))
    yield from (f"{name}: {error}" for error in form_errors(pack, template))
    if not any(receipt.paths(pack.receipts)):
        return  # the missing receipts are findings of their own
    try:
        text = render(pack)
    except HarnessError as error:
        yield str(error).removeprefix(f"{pack.name}/").removesuffix(f". Next: runner.py check {pack.name}")
        with suppress(HarnessError):  # further errors of the text, where only an output is missing
            yield from (f"{pack.report.name}: {error}" for error in text_errors(render(pack, is_draft=True)))
        return
    yield from (f"{pack.report.name}: {error}" for error in text_errors(text))
    if not pack.report.exists() or pack.report.read_text(encoding="utf-8") != text:
        next_step = f"Next: runner.py report {pack.name} --write"
        yield f"{pack.report.name}: not what {name} renders to from the receipts. {next_step}"


def form_errors(pack: Pack, template: str) -> Iterator[str]:
    """Say where a template departs from the form of reports."""
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
    """Say where a text for upstream is too long, or has words of this repository."""
    for part, place in {for_upstream(text): "in the question", above_line(text): "above the line"}.items():
        words = TARGET_OF_LINK.sub("]", FENCE.sub("", part))
        number = len(words.split())
        if number > MOST_WORDS:
            yield f"{number} words {place} beside code, more than {MOST_WORDS}"
        own_words = dict.fromkeys(match[0] for match in OWN_WORDS.finditer(CODE.sub("", words)))
        if own_words:
            yield f"words of this repository {place}: {', '.join(own_words)}"
