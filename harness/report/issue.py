"""The Markdown to attach to an upstream issue or pull request."""

from __future__ import annotations

from collections import Counter
from itertools import groupby

from harness.core import markdown
from harness.core.errors import HarnessError, unknown
from harness.core.words import Kind, LaneName
from harness.lane.transcript import CheckLine
from harness.pack.model import Pack
from harness.receipt import receipt, redaction, staleness
from harness.receipt.figures import significant
from harness.receipt.receipt import Receipt
from harness.receipt.redaction import Scrubber
from harness.report import links, of_run, patches, reports, sections, template, template_fields
from harness.report.placeholders import MissingError, Renderer, leading_of
from harness.report.reports import Report
from harness.report.template import Section, Upstream
from harness.versions import timeline
from harness.versions.timeline import Entry

FORMS = ("issue", "pr-comment")
#: What a maintainer reads to its end.
MOST_BYTES = 6 * 1024
#: With everything: GitHub takes 65,536 characters; what stays below 60 KiB fits in every place.
MOST_BYTES_IN_FULL = 60 * 1024
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
        shown = sections.said(one.kind, one.verdict) + stale
        between = [] if one.kind == Kind.CLEANUP else lanes
        rows.append([one.target, one.evidence, device, *between, shown, one.kind, repeats, claims])
    between = [] if pack.definition.kind == Kind.CLEANUP else ["pristine", "patched"]
    header = ["target", "evidence", "GPU", *between, "verdict", "kind", "runs", "claims"]
    return markdown.table(header, rows)


def _figures(receipts: list[Receipt]) -> str:
    rows = []
    for one in receipts:
        pristine, patched = (one.lanes.get(name) for name in LaneName)
        names = dict.fromkeys(line.name for lane in (pristine, patched) if lane for line in lane.figures)
        for name in names:
            found = [one.figure(name, lane) for lane in LaneName]
            line = next(line for line in found if line)
            values = [significant(line.value) if line else "-" for line in found]
            spread = [significant(line.spread) if line and line.spread is not None else "-" for line in found]
            rows.append([one.target, name, *values, line.unit, " / ".join(spread)])
    header = ["target", "figure", "pristine", "patched", "unit", "spread (pristine / patched)"]
    return markdown.table(header, rows) if rows else ""


def _cut(text: str) -> str:
    """Cut what one check measured to what a row can show; the receipt has it whole."""
    return text if len(text) <= MOST_MEASURED else f"{text[:MOST_MEASURED]}... (whole in the receipt)"


def _by_test(names: list[str]) -> list[str]:
    """Write each test once, with the number of its cases where these are several."""
    counts = Counter(name.partition("[")[0] for name in names)
    alone = {name.partition("[")[0]: name for name in names}
    return [alone[test] if number == 1 else f"{test} ({number} cases)" for test, number in counts.items()]


def _checks(receipts: list[Receipt], *, measured: bool) -> str:
    """Write a row for each check, with what each lane made of it: twice the rows would not fit beside the logs.

    Without `measured`, one for all that came out alike, with the cases of a test counted: hundreds of checks leave no
    room for what they measured.
    """
    rows = []
    for one in receipts:
        lanes = [
            {check.name: check for check in one.lanes[name].checks} if name in one.lanes else {} for name in LaneName
        ]
        for name in dict.fromkeys(name for lane in lanes for name in lane):
            check = next(lane[name] for lane in lanes if name in lane)
            said = [_said(lane[name], measured=measured) if name in lane else "-" for lane in lanes]
            rows.append([one.target, name, check.role, *said, _limit(check)])
    if measured:
        return markdown.table(["target", "check", "role", *LaneName, "tolerance"], rows)
    alike: dict[tuple[str, ...], list[str]] = {}
    for target, name, role, *said, _ in rows:
        alike.setdefault((target, role, *said), []).append(name)
    together = [[*key, "; ".join(_by_test(names))] for key, names in alike.items()]
    return markdown.table(["target", "role", *LaneName, "checks"], together)


def _limit(check: CheckLine) -> str:
    return f"{significant(check.tolerance)} {check.unit}".strip()


def _said(check: CheckLine, *, measured: bool) -> str:
    """Say what a lane made of a check, and what it measured."""
    if check.ok is None:
        return f"not judged: {check.reason}" if measured else "not judged"
    verdict = "right" if check.ok else "WRONG"
    return f"{verdict}: {_cut(significant(check.measured))}" if measured else verdict


def _log(pack: Pack, one: Receipt, most: int) -> str:
    path = pack.receipts / one.log.file
    text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else "(the log is missing)"
    return markdown.details(f"Log, {one.target} ({one.evidence})", markdown.fenced(markdown.tail(text, most), "text"))


def _sections(pack: Pack, upstream: Upstream, leading: Receipt, text: str) -> list[str]:
    """Write the parts of the template that the report itself does not have: facts filled in, boxes left open."""
    filled = template_fields.Facts(pack, leading)
    parts = []
    for section in template_fields.sections_of(upstream, pack, leading.target):
        if section.source == template.HUMAN:
            parts.append(f"## {section.label}\n\n" + "\n".join(f"- [ ] {tick}" for tick in section.ticks))
        elif section.source == template.RECEIPT and not _has(text, section, filled):
            parts.append(f"## {section.label}\n\n{filled.listed(section)}")
    return parts


def _has(text: str, section: Section, filled: template_fields.Facts) -> bool:
    """Whether a filled report states every fact of a part already."""
    return all(f"{label}: {filled.value(fact)}" in text for label, fact in section.facts)


def _history(pack: Pack, target: str) -> list[str]:
    """Fold away what `runner.py versions --save` found, where it was kept."""
    rows = template_fields.history_of(pack, target)
    alike = groupby(rows, key=lambda row: row.label if row.is_judged else (row.verdict, row.reason))
    cells = [_stretch(list(some)) for _, some in alike]
    table = markdown.table(["", "date", "verdict", "figure", "reason"], cells)
    return [markdown.details(f"{target}: {timeline.line(rows)}", table)] if rows else []


def _stretch(alike: list[Entry]) -> list[str]:
    """Write neighbours that could not be judged for the same reason as one row; a judged one stands alone."""
    first, last = alike[0], alike[-1]
    if len(alike) == 1:
        return [first.label, first.date, first.verdict, first.figure, first.reason]
    label, date = f"{first.label} to {last.label} ({len(alike)})", f"{first.date} to {last.date}"
    return [label, date, first.verdict, "", first.reason]


def _renderer(pack: Pack, receipts: list[Receipt], report: Report) -> Renderer:
    return Renderer(pack, receipts, report, one_run=pack.receipts_elsewhere is not None, is_draft=True)


def _body(pack: Pack, receipts: list[Receipt], report: Report) -> str:
    renderer = _renderer(pack, receipts, report)
    try:
        return (renderer.above() if report.in_form else renderer.text()).strip()
    except MissingError as error:
        raise HarnessError(f"{pack.name}/{report.template.name}: {error}. Next: runner.py check {pack.name}") from None


def _bundle(pack: Pack) -> str:
    """Name the bundle, and say how it is checked; a report of one run has none."""
    if pack.receipts_elsewhere is not None:
        patch = ", the patch" if pack.definition.has_patch else ""
        return f"The probe{patch} and the pack's own receipts are in {links.project()}."
    number = pack.name.partition("_")[0]
    return (
        f"Logs, all figures and receipts: {pack.name}.zip (`runner.py bundle {number}`); `runner.py check --bundle` "
        f"judges it again. Both are in {links.project()}."
    )


def _short(pack: Pack, receipts: list[Receipt], form: str, report: Report) -> str:
    body, template_text = _body(pack, receipts, report), report.template.read_text(encoding="utf-8")
    if report.in_form:
        return f"{body}\n"
    if pack.receipts_elsewhere is not None:
        body = of_run.with_scope(body, of_run.scope(pack, receipts, template_text))
    parts = [body]
    if form == "issue":
        parts += _sections(pack, report.upstream, leading_of(receipts), body)
    if patches.for_project(pack, report.name) is None and "{{patch" not in template_text:
        parts.append(patches.none_for(report.name))
    return links.linked("\n\n".join(part.strip() for part in [*parts, _bundle(pack)]) + "\n", pack.folder)


def _folded(pack: Pack, receipts: list[Receipt], form: str, report: Report, *, measured: bool) -> list[str]:
    """Write what `--full` has besides: every figure and check, the environments, the patch whole."""
    environments = "\n\n".join(
        f"**{one.target} ({one.evidence})**\n\n{template_fields.every(report.upstream, pack, one)}" for one in receipts
    )
    open_boxes = "\n".join(f"- [ ] {duty}" for duty in report.upstream.duties)
    path = patches.for_project(pack, report.name)
    patch = [markdown.details(path.name, markdown.fenced(path.read_text("utf-8"), "diff"))] if path else []
    return [
        *([f"## Left to the author\n\n{open_boxes}"] if form != "issue" else []),
        "## Evidence\n\n" + f"{_verdicts(pack, receipts)}\n{_figures(receipts)}".strip(),
        *(part for one in receipts for part in _history(pack, one.target)),
        markdown.details("Checks", _checks(receipts, measured=measured)),
        markdown.details("Environment", environments),
        *patch,
    ]


def reader(pack: Pack, name: str | None) -> Report:
    """Return the report for the upstream of that name; None is the pack's own."""
    found = reports.of_pack(pack)
    if name is None:
        name = next(iter(found))
    if name not in found:
        raise unknown("report", name, found, f"runner.py report {pack.name}")
    return found[name]


def scrubber(pack: Pack) -> Scrubber:
    """Return what refuses the private in texts about a pack; versions that pack.toml or a receipt states are none."""
    sets = pack.definition.dependencies.values()
    stated = {dependency.version for members in sets for dependency in members.values()}
    return redaction.of_host({}, stated | receipt.public_versions(receipt.load_all(pack.receipts)))


def left_open(form: str, upstream: Upstream) -> list[str]:
    """List what only a human can do before it is filed."""
    if form != "issue":
        return list(upstream.duties)
    places = [label for section in upstream.sections for label, fact in section.facts if fact == "location"]
    return [
        *(tick for section in upstream.sections for tick in section.ticks),
        *(f"{label} filled in" for label in places),
    ]


def _receipts(pack: Pack) -> list[Receipt]:
    if pack.receipts_elsewhere is not None:
        return of_run.receipts(pack)
    best = receipt.strongest(receipt.load_all(pack.receipts))
    found = [best[target] for target in pack.definition.targets if target in best]
    if not found:
        raise HarnessError(
            f"{pack.name}: no receipt to report from. Next: runner.py run {pack.name} --record, "
            "or runner.py report --from last where it has run"
        )
    return found


def short(pack: Pack, form: str, name: str | None = None) -> str:
    """Build the Markdown for an issue or a comment on a pull request, however long it is.

    Args:
        pack: with receipts for at least one target.
        form: ``issue`` or ``pr-comment``.
        name: of the upstream that reads it; None is the pack's own.

    Raises:
        HarnessError: no receipt, or a template that cannot be filled from them.

    """
    return _short(pack, _receipts(pack), form, reader(pack, name))


def build(pack: Pack, form: str, name: str | None = None) -> str:
    """Build what `short` does, in at most 6 KiB.

    Raises:
        HarnessError: as `short` does, or it is longer and of the pack's own receipts.

    """
    text = short(pack, form, name)
    complaint = too_long(pack, text, name)
    if complaint and pack.receipts_elsewhere is None:
        raise HarnessError(f"{pack.name}: the report is {complaint}, or --full")
    return text


def too_long(pack: Pack, text: str, name: str | None) -> str:
    """Say how much too long a report is, and what makes it so; empty where it is short enough, or in the form."""
    size, report = len(links.unlinked(text).encode()), reader(pack, name)
    if size <= MOST_BYTES or report.in_form:
        return ""
    heaviest = _renderer(pack, _receipts(pack), report).heaviest()
    most = f" ({heaviest})" if heaviest else ""
    return f"{size} bytes, more than {MOST_BYTES}{most}. Next: shorten {report.template.name}"


def build_in_full(pack: Pack, form: str, name: str | None = None) -> str:
    """Build what `short` does and append all figures, checks, environments, the patch and the logs' ends, in 60 KiB.

    Raises:
        HarnessError: as `short` does, or it is too long without any log.

    """
    report, found = reader(pack, name), _receipts(pack)
    text, room = "", -1
    for measured in (True, False):
        parts = [_short(pack, found, form, report), *_folded(pack, found, form, report, measured=measured)]
        text = text if room >= 0 else "\n\n".join(part.strip() for part in parts) + "\n"
        room = (MOST_BYTES_IN_FULL - len(text.encode())) // len(found) - SMALLEST_LOG
    if room < 0:
        raise HarnessError(
            f"{pack.name}: the report is over {MOST_BYTES_IN_FULL} bytes without logs. Next: shorten "
            f"{report.template.name}"
        )
    logs = [_log(pack, one, min(LOG_BYTES, room)) for one in found if room > SMALLEST_LOG]
    return text + "\n" + "\n".join(logs)
