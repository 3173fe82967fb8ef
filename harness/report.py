"""The Markdown to attach to an upstream issue or pull request."""

from __future__ import annotations

from pathlib import Path

from harness import facts, markdown, privacy, receipt, staleness, template, upstreams
from harness.errors import HarnessError, unknown
from harness.pack import Pack
from harness.privacy import Scrubber
from harness.receipt import Receipt
from harness.rendering import MissingError, Renderer
from harness.summary import number
from harness.template import Section, Upstream
from harness.versions import history
from harness.words import LaneName

#: GitHub takes 65,536 characters; what stays below 60 KiB fits in every place.
MOST_BYTES = 60 * 1024
LOG_BYTES = 12 * 1024
SMALLEST_LOG = 512
#: Characters of one check's measured values: some are tables of their own.
MOST_MEASURED = 120


def _verdicts(pack: Pack, receipts: list[Receipt]) -> str:
    rows = []
    for one in receipts:
        lanes = [one.lanes[name].verdict if name in one.lanes else "-" for name in LaneName]
        stale = " STALE" if staleness.reasons(pack, one) else ""
        repeats = f"{one.repeats.agreeing}/{one.repeats.of}"
        claims = ", ".join(one.claims)
        device = one.host.gpu or "-"
        rows.append([one.target, one.evidence, device, *lanes, one.verdict + stale, one.kind, repeats, claims])
    header = ["target", "evidence", "GPU", "pristine", "patched", "verdict", "kind", "runs", "claims"]
    return markdown.table(header, rows)


def _figures(receipts: list[Receipt]) -> str:
    rows = []
    for one in receipts:
        pristine, patched = (one.lanes.get(name) for name in LaneName)
        names = dict.fromkeys(line.name for lane in (pristine, patched) if lane for line in lane.figures)
        for name in names:
            found = [one.figure(name, lane) for lane in LaneName]
            line = next(line for line in found if line)
            values = [number(line.value) if line else "-" for line in found]
            spread = [number(line.spread) if line and line.spread is not None else "-" for line in found]
            rows.append([one.target, name, *values, line.unit, " / ".join(spread)])
    header = ["target", "figure", "pristine", "patched", "unit", "spread (pristine / patched)"]
    return markdown.table(header, rows) if rows else ""


def _short(text: str) -> str:
    """Cut what one check measured to what a row can show; the receipt has it whole."""
    return text if len(text) <= MOST_MEASURED else f"{text[:MOST_MEASURED]}... (whole in the receipt)"


def _checks(receipts: list[Receipt]) -> str:
    rows = []
    for one in receipts:
        for name in LaneName:
            lane = one.lanes.get(name)
            for check in lane.checks if lane else ():
                said = {True: "right", False: "WRONG", None: f"not judged: {check.reason}"}[check.ok]
                measured, tolerance = _short(number(check.measured)), number(check.tolerance)
                rows.append([one.target, name, check.name, check.role, said, measured, tolerance, check.unit])
    header = ["target", "lane", "check", "role", "result", "measured", "tolerance", "unit"]
    return markdown.table(header, rows)


def _log(pack: Pack, one: Receipt, most: int) -> str:
    path = pack.receipts / one.log.file
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(the log is missing)"
    return markdown.details(f"Log, {one.target} ({one.evidence})", markdown.fenced(markdown.tail(text, most), "text"))


def _sections(pack: Pack, upstream: Upstream, leading: Receipt, text: str) -> list[str]:
    """Write the parts of the template that the report itself does not have: facts filled in, boxes left open."""
    filled = facts.Facts(pack, leading)
    parts = []
    for section in facts.sections_of(upstream, pack, leading.target):
        if section.source == template.HUMAN:
            parts.append(f"## {section.label}\n\n" + "\n".join(f"- [ ] {tick}" for tick in section.ticks))
        elif section.source == template.RECEIPT and not _has(text, section, filled):
            parts.append(f"## {section.label}\n\n{filled.listed(section)}")
    return parts


def _has(text: str, section: Section, filled: facts.Facts) -> bool:
    """Whether a filled report states every fact of a part already."""
    return all(f"- {label}: {filled.value(fact)}" in text for label, fact in section.facts)


def _history(pack: Pack, target: str) -> list[str]:
    """Fold away what `runner.py versions --save` found, where it was kept."""
    rows = facts.history_of(pack, target)
    cells = [[row.label, row.date, row.verdict, row.figure, row.reason] for row in rows]
    table = markdown.table(["", "date", "verdict", "figure", "reason"], cells)
    return [markdown.details(f"{target}: {history.line(rows)}", table)] if rows else []


def _body(pack: Pack, receipts: list[Receipt], upstream: Upstream, path: Path) -> str:
    try:
        return Renderer(pack, receipts, upstream).fill(path.read_text(encoding="utf-8")).strip()
    except (MissingError, FileNotFoundError) as error:
        raise HarnessError(f"{pack.name}/{path.name}: {error}. Next: runner.py check {pack.name}") from None


def _parts(pack: Pack, receipts: list[Receipt], form: str, upstream: Upstream, path: Path) -> list[str]:
    report = _body(pack, receipts, upstream, path)
    verdicts = f"{_verdicts(pack, receipts)}\n{_figures(receipts)}".strip()
    environments = "\n\n".join(
        f"**{one.target} ({one.evidence})**\n\n{facts.every(upstream, pack, one)}" for one in receipts
    )
    commit = f"{pack.definition.upstream.package} {pack.definition.upstream.version}"
    folded = [
        *(part for one in receipts for part in _history(pack, one.target)),
        markdown.details("Checks", _checks(receipts)),
        markdown.details("Environment", environments),
        markdown.details(f"fix.patch, for {commit}", markdown.fenced(pack.patch.read_text("utf-8"), "diff")),
    ]
    if form == "issue":
        leading = next((one for one in receipts if one.host.gpu), receipts[0])
        return [report, *_sections(pack, upstream, leading, report), "## Evidence\n\n" + verdicts, *folded]
    open_boxes = "\n".join(f"- [ ] {duty}" for duty in upstream.duties)
    head = f"### {pack.definition.title}\n\n{verdicts}"
    return [head, f"#### Left to the author\n\n{open_boxes}", markdown.details("Report", report), *folded]


def reader(pack: Pack, name: str | None) -> tuple[Upstream, Path]:
    """Return the upstream that a report is for, by name or the pack's own, and the report that it reads."""
    found = facts.reports(pack)
    if name is None:
        name = next(iter(found))
    if name not in found:
        raise unknown("report", name, found, f"runner.py report {pack.name}")
    return upstreams.BY_NAME.get(name, upstreams.GENERIC), found[name]


def scrubber(pack: Pack) -> Scrubber:
    """Return what refuses the private in texts about a pack; versions that pack.toml or a receipt states are none."""
    sets = pack.definition.companions.values()
    stated = {companion.version for members in sets for companion in members.values()}
    return privacy.of_host({}, stated | receipt.public_versions(receipt.load_all(pack.receipts)))


def left_open(form: str, upstream: Upstream) -> list[str]:
    """List what only a human can do before it is filed."""
    if form != "issue":
        return list(upstream.duties)
    places = [label for section in upstream.sections for label, fact in section.facts if fact == "location"]
    return [
        *(tick for section in upstream.sections for tick in section.ticks),
        *(f"{label} filled in" for label in places),
    ]


def build(pack: Pack, form: str, name: str | None = None) -> str:
    """Build the Markdown for an issue or a comment on a pull request, at most 60 KiB of it.

    Args:
        pack: with receipts for at least one target.
        form: ``issue`` or ``pr-comment``.
        name: of the upstream that reads it; None is the pack's own.

    Raises:
        HarnessError: no receipt, or a report that cannot be filled from them, or too long without any log.

    """
    upstream, path = reader(pack, name)
    best = receipt.strongest(receipt.load_all(pack.receipts))
    receipts = [best[target] for target in pack.definition.targets if target in best]
    if not receipts:
        raise HarnessError(f"{pack.name}: no receipt to report from. Next: runner.py run {pack.name}")
    text = "\n\n".join(part.strip() for part in _parts(pack, receipts, form, upstream, path)) + "\n"
    room = (MOST_BYTES - len(text.encode())) // len(receipts) - SMALLEST_LOG
    if room < 0:
        raise HarnessError(
            f"{pack.name}: the report is over {MOST_BYTES} bytes without logs. Next: shorten {path.name}"
        )
    logs = [_log(pack, one, min(LOG_BYTES, room)) for one in receipts if room > SMALLEST_LOG]
    return text + "\n" + "\n".join(logs)
