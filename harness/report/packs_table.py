"""What README.md shows of the packs: its first figure, the output of a run, the table of packs; a test compares them.

``python -m harness.report.packs_table`` writes them.
"""

from __future__ import annotations

from pathlib import Path

from harness.core import files, markdown
from harness.core.errors import HarnessError
from harness.core.files import REPOSITORY
from harness.core.words import ActionKind, Kind, LaneName
from harness.pack import load
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.receipt.figures import figure_text
from harness.report import advisories, parts, run_table
from harness.report.run_table import RunRow

MARKS = "<!-- {name}: written by python -m harness.report.packs_table -->\n...<!-- end of {name} -->\n"
#: The figure that the README opens with, and the sentence around it.
FIRST = ("20_tilelang_reduce_barrier", "sm_90a.executed.json", "wrong_launches_sum")
CONTROL = "wrong_launches_sync_threads"
SENTENCE = (
    "**{package} {version} leaves out a barrier: a kernel of three gemms and `T.reduce_sum` is wrong in {measured} "
    "{unit}\non an {gpu}.** No error is raised. With the barrier put in by hand, it is wrong in {control} "
    "([pack 20](packs/20_tilelang_reduce_barrier) has the kernel).\n"
)
#: The receipt of the run that README.md begins with.
FIRST_RUN = ("17_liger_flce_saved_gradients", "cpu.interpreted.json")
HEADER = ["pack", "what goes wrong", "release", "since", "default branch", "seen on", "what to do"]


def text(packs: list[Pack]) -> str:
    """Write the table: packs to file first, and of these the silent bugs first."""
    return f"{markdown.table(HEADER, [_row(pack) for pack in sorted(packs, key=_order)])}\n"


def first_figure(folder: Path) -> str:
    """Write the sentence that README.md opens with, from a receipt below the folder of packs."""
    pack, file, name = FIRST
    found = receipt.load(folder / pack / "receipts" / file)
    figures = {one.name: one for one in found.lanes[LaneName.PRISTINE].figures}
    return SENTENCE.format(
        gpu=found.host.gpu,
        package=found.upstream.package,
        version=found.upstream.version,
        control=figures[CONTROL].value,
        measured=figures[name].value,
        unit=figures[name].unit,
    )


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
        tree=f"{found.upstream.package} {found.upstream.version}",
    )
    return f"```\n{run_table.as_text([row])}```\n"


def _order(pack: Pack) -> tuple[int, bool, int, str]:
    definition = pack.definition
    action = [*ActionKind].index(definition.action.kind) if definition.action else 0
    return action, definition.kind not in advisories.SILENT, [*Kind].index(definition.kind), pack.name


def _row(pack: Pack) -> list[str]:
    definition = pack.definition
    upstream, action = definition.upstream, definition.action
    pin = f"commit {upstream.commit[:12]}" if upstream.is_commit else upstream.version
    return [
        f"[{pack.name.partition('_')[0]}](packs/{pack.name})",
        f"{definition.title} ({definition.kind})",
        f"{upstream.package} {pin}",
        _period(pack),
        _head(pack),
        _seen(pack),
        f"{action.kind}: {action.text}" if action else "-",
    ]


def _period(pack: Pack) -> str:
    document = advisories.document(pack)
    if document is None:
        return "-"
    period = document["database_specific"]["periods"][-1]
    since, fixed = (period[end].partition(",")[0] for end in ("since", "fixed"))
    return f"{since.removeprefix('since ')}{f', {fixed}' if fixed.startswith('fixed in ') else ''}"


def _head(pack: Pack) -> str:
    head = pack.definition.head
    if head is None:
        return "not judged"
    said = [parts.said_of_tree(one.verdict, pack.definition.kind) for one in receipt.load_all(pack.receipts / "head")]
    judged = [text for text in said if text]
    return f"{judged[0]}, {head.date}" if judged else "not judged"


def _seen(pack: Pack) -> str:
    receipts = receipt.strongest(receipt.load_all(pack.receipts)).values()
    best = min(receipts, key=lambda one: one.evidence.rank, default=None)
    return best.evidence + (f", {best.host.gpu}" if best.host.gpu else "") if best else "-"


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
