"""What README.md shows of the packs: its first figure, the output of a run, the table of packs; a test compares them.

``python -m harness.report.packs_table`` writes them, and docs/releases.svg.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from harness.core import files, markdown
from harness.core.errors import HarnessError
from harness.core.words import Kind, LaneName, Verdict
from harness.pack import load
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.receipt.figures import figure_text
from harness.receipt.receipt import Receipt
from harness.report import advisories, releases_chart, run_table, strong
from harness.report.run_table import RunRow
from harness.report.strong import Strength

REPOSITORY = Path(__file__).resolve().parents[2]
CHART = REPOSITORY / "docs/releases.svg"
MARKS = "<!-- {name}: written by python -m harness.report.packs_table -->\n...<!-- end of {name} -->\n"
#: The figure that the README opens with, and the sentence around it.
FIRST = ("20_tilelang_reduce_barrier", "sm_90a.executed.json", "wrong_launches_sum")
CONTROL = "wrong_launches_sync_threads"
SENTENCE = (
    "**{package} {version} leaves out a barrier: a kernel of three gemms and `T.reduce_sum` gives wrong numbers in "
    "{measured} {unit}\non an {gpu}**, without an error; with the barrier put in by hand, in {control} "
    "([pack 20](packs/20_tilelang_reduce_barrier/REPORT.md) has the kernel)."
)
#: The receipt of the run that README.md begins with.
FIRST_RUN = ("17_liger_flce_saved_gradients", "cpu.interpreted.json")
ENDS_OF_ROWS = ["default branch", "upstream", "evidence", "strength"]
BUGS = ["pack", "release", "what goes wrong", "since", "fixed in", *ENDS_OF_ROWS]
OTHERS = ["pack", "release", "what it shows", *ENDS_OF_ROWS]
#: What a verdict on the default branch says.
THERE = {Verdict.CONFIRMED: "has the bug", Verdict.REPRODUCED: "has the bug", Verdict.FIXED_UPSTREAM: "is right"}
OF_A_THREAD = re.compile(r"/(?P<project>[^/]+)/(?:issues|pull)/(?P<number>\d+)$")
STARTS = re.compile(r"since (?P<version>\S+)(?P<earlier> or earlier)?")
ENDS = re.compile(r"fixed in (?P<version>[^\s,]+)")


def text(packs: list[Pack]) -> str:
    """Write both tables: bugs of a release, the silent ones first, and packs that show none."""
    bugs, others = [], []
    for pack in sorted(packs, key=_alarm):
        period = _period(pack)
        first, last = _start(pack), _end(pack)
        if period is None:
            others.append([*first, last[0].replace("has the bug", "as the release"), *last[1:]])
        else:
            bugs.append([*first, *period, *last])
    found = f"{markdown.table(BUGS, bugs)}\n"
    if others:
        found += f"Packs that show no bug of a release:\n\n{markdown.table(OTHERS, others)}\n"
    return found


def first_figure(folder: Path) -> str:
    """Write the sentence that README.md opens with, from a receipt below the folder of packs."""
    pack, file, name = FIRST
    found = receipt.load(folder / pack / "receipts" / file)
    figures = {one.name: one for one in found.lanes[LaneName.PRISTINE].figures}
    figure = figures[name]
    upstream = found.upstream
    named = {"gpu": found.host.gpu, "package": upstream.package, "version": upstream.version}
    named["control"] = str(figures[CONTROL].value)
    return SENTENCE.format(**named, measured=figure.value, unit=figure.unit) + "\n"


def first_run(folder: Path) -> str:
    """Write what the run that README.md begins with prints, from its receipt below the folder of packs."""
    pack, file = FIRST_RUN
    found, definition = receipt.load(folder / pack / "receipts" / file), load.load_pack(folder / pack).definition
    figures = (found.figure(definition.leading_figure, lane) for lane in LaneName)
    row = RunRow(
        pack=pack,
        kind=definition.kind,
        target=found.target,
        evidence=found.evidence,
        pristine=found.lanes[LaneName.PRISTINE].verdict,
        patched=found.lanes[LaneName.PATCHED].verdict,
        verdict=found.verdict,
        figure=figure_text(*figures),
        deviation="",
        reason=found.reason,
        claims=found.claims,
        receipt="",
        logs=(),
    )
    return f"```\n{run_table.as_text([row])}```\n"


def _alarm(pack: Pack) -> tuple[bool, int, str]:
    kind = pack.definition.kind
    return kind not in advisories.SILENT, [*Kind].index(kind), pack.name


def _start(pack: Pack) -> list[str]:
    definition = pack.definition
    upstream = definition.upstream
    pin = f"commit {upstream.commit[:12]}" if upstream.is_commit else upstream.version
    release = f"{upstream.package} {pin}"
    what = f"{definition.title} ({definition.kind})"
    return [f"[{pack.name}](packs/{pack.name}/{pack.report.name})", release, what]


def _period(pack: Pack) -> list[str] | None:
    """Return since when a release has the bug, and where it is fixed; None where the pack warns of none."""
    document = advisories.document(pack)
    if document is None:
        return None
    period = document["database_specific"]["periods"][-1]
    start, end = STARTS.match(period["since"]), ENDS.match(period["fixed"])
    since = f"{start['version']}{start['earlier'] or ''}" if start else period["since"]
    return [since, end["version"] if end else "-"]


def _end(pack: Pack) -> list[str]:
    """Return what the default branch has, upstream's thread, the strongest evidence, and how strong the probe is."""
    best = min(receipt.strongest(receipt.load_all(pack.receipts)).values(), key=_rank, default=None)
    at_head = [one for one in receipt.load_all(pack.receipts / "head") if one.verdict in THERE]
    head, date = pack.definition.head, "not judged"
    if head is not None:
        date = f"{THERE.get(at_head[0].verdict if at_head else head.verdict, 'not judged')}, {head.date}"
    if best is None:
        return [date, _thread(pack), "-", "-"]
    return [date, _thread(pack), best.evidence + (f", {best.host.gpu}" if best.host.gpu else ""), _strength(pack)]


def _thread(pack: Pack) -> str:
    """Link the first thread that pack.toml names."""
    url = next((one.url for one in pack.definition.threads), "")
    match = OF_A_THREAD.search(url)
    return f"[{match['project']}#{match['number']}]({url})" if match else "-"


def _rank(one: Receipt) -> int:
    return one.evidence.rank


def _strength(pack: Pack) -> str:
    """Return a pack's strength, or why it has none."""
    receipts = sorted(receipt.load_all(pack.receipts), key=_rank, reverse=True)
    records = {one.target: strong.find(pack, one.target, one.evidence) for one in receipts}
    known = {target: one for target, one in records.items() if one is not None}
    strongest = {one.target: one.evidence for one in receipts}
    first = {strong.first_sight(pack, target, evidence): None for target, evidence in strongest.items()}
    return "; ".join(filter(None, (of_targets(known) if known else strong.nothing(pack), *first)))


def of_targets(known: Mapping[str, Strength]) -> str:
    """Return the strength on the target that most wrong fixes were judged on; a stale one only where all are."""
    target, found = max(known.items(), key=lambda pair: (not pair[1].stale, pair[1].of))
    return f"{found.killed}/{found.of} on {target}{' STALE' if found.stale else ''}"


def within(readme: str, name: str, written: str) -> str:
    """Return README.md with a text in its place, between the two marks of that name."""
    begin, end = MARKS.format(name=name).split("...")
    before, opened, rest = readme.partition(begin)
    _, closed, after = rest.partition(end)
    if not opened or not closed:
        raise HarnessError(f"README.md has no marks of {name}. Next: {begin}{end}")
    return f"{before}{begin}{written}{end}{after}"


def every_pack() -> list[Pack]:
    """Load the repository's packs."""
    return [load.load_pack(path) for path in load.select_packs(REPOSITORY / "packs", ())]


def written(readme: str) -> str:
    """Return README.md as receipts and definitions have it now."""
    folder = REPOSITORY / "packs"
    texts = {"packs": text(every_pack()), "first figure": first_figure(folder), "first run": first_run(folder)}
    for name, found in texts.items():
        readme = within(readme, name, found)
    return readme


if __name__ == "__main__":
    README = REPOSITORY / "README.md"
    files.write_atomic(README, written(README.read_text(encoding="utf-8")))
    files.write_atomic(CHART, releases_chart.drawing(releases_chart.rows(every_pack())))
