"""What README.md shows of the packs: its first figure, the output of a run, the table of packs.

``python -m harness.report.packs_table`` writes them, and a test compares them.
"""

from pathlib import Path

from harness.core import HarnessError, files, markdown
from harness.core.files import REPOSITORY
from harness.core.words import ActionKind, Kind, LaneName
from harness.pack import Pack, load
from harness.receipt import receipt
from harness.report import advisories, parts, run_table
from harness.report.run_table import RunRow

MARKS = "<!-- {name}: written by python -m harness.report.packs_table -->\n...<!-- end of {name} -->\n"
#: The figure that README.md opens with, its neighbour, and the sentence around both.
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
    """Write the table: packs to file first, and among them silent bugs first."""
    return f"{markdown.table(HEADER, [_row(pack) for pack in sorted(packs, key=_sort_key)])}\n"


def first_figure(folder: Path) -> str:
    """Write the sentence that README.md opens with, from a receipt in the folder of packs."""
    pack, file, name = FIRST
    recorded = receipt.load(folder / pack / "receipts" / file)
    figures = {line.name: line for line in recorded.lanes[LaneName.PRISTINE].figures}
    return SENTENCE.format(
        gpu=recorded.host.gpu,
        package=recorded.upstream.package,
        version=recorded.upstream.version,
        control=figures[CONTROL].value,
        measured=figures[name].value,
        unit=figures[name].unit,
    )


def first_run(folder: Path) -> str:
    """Write the output of the run that README.md begins with, from its receipt in the folder of packs."""
    pack, file = FIRST_RUN
    recorded, definition = receipt.load(folder / pack / "receipts" / file), load.load_pack(folder / pack).definition
    figures = {lane: recorded.figure(definition.leading_figure, lane) for lane in LaneName}
    row = RunRow(
        pack=pack,
        kind=definition.kind,
        target=recorded.target,
        evidence=recorded.evidence,
        pristine=recorded.lanes[LaneName.PRISTINE].verdict,
        patched=recorded.lanes[LaneName.PATCHED].verdict,
        verdict=recorded.verdict,
        figure={lane: line for lane, line in figures.items() if line},
        tree=f"{recorded.upstream.package} {recorded.upstream.version}",
    )
    return f"```\n{run_table.as_text([row])}```\n"


def _sort_key(pack: Pack) -> tuple[int, bool, int, str]:
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
        _since(pack),
        _default_branch(pack),
        _strongest_evidence(pack),
        f"{action.kind}: {action.text}" if action else "-",
    ]


def _since(pack: Pack) -> str:
    document = advisories.document(pack)
    if document is None:
        return "-"
    period = document["database_specific"]["periods"][-1]
    since, fixed = (period[end].partition(",")[0] for end in ("since", "fixed"))
    return f"{since.removeprefix('since ')}{f', {fixed}' if fixed.startswith('fixed in ') else ''}"


def _default_branch(pack: Pack) -> str:
    head, kind = pack.definition.head, pack.definition.kind
    if head is None:
        return parts.NOT_JUDGED
    statements = [parts.tree_statement(recorded.verdict, kind) for recorded in receipt.load_all(pack.receipts / "head")]
    statement = next(filter(None, statements), parts.unjudged_statement(head))
    return statement if statement == parts.NOT_JUDGED else f"{statement}, {head.date}"


def _strongest_evidence(pack: Pack) -> str:
    receipts = receipt.strongest(receipt.load_all(pack.receipts)).values()
    best = min(receipts, key=lambda recorded: recorded.evidence.rank, default=None)
    return best.evidence + (f", {best.host.gpu}" if best.host.gpu else "") if best else "-"


def replace_section(readme: str, name: str, content: str) -> str:
    """Return README.md with a text put between the two marks of that name."""
    begin, end = MARKS.format(name=name).split("...")
    before, first_mark, tail = readme.partition(begin)
    _, last_mark, after = tail.partition(end)
    if not first_mark or not last_mark:
        raise HarnessError(f"README.md has no marks of {name}. Next: {begin}{end}")
    return f"{before}{begin}{content}{end}{after}"


def every_pack() -> list[Pack]:
    """Load the repository's packs."""
    return [load.load_pack(path) for path in load.select_packs(REPOSITORY / "packs", ())]


def render_readme(readme: str) -> str:
    """Return README.md as today's receipts and definitions give it."""
    folder = REPOSITORY / "packs"
    texts = {"packs": text(every_pack()), "first figure": first_figure(folder), "first run": first_run(folder)}
    for name, content in texts.items():
        readme = replace_section(readme, name, content)
    return readme


if __name__ == "__main__":
    README = REPOSITORY / "README.md"
    files.write_atomic(README, render_readme(README.read_text(encoding="utf-8")))
