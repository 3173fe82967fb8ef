"""What the receipts of all packs show: state by target, and the table of packs against targets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core.errors import HarnessError
from harness.core.words import NO_EXPECTATION, LaneName
from harness.pack.model import Pack
from harness.receipt import receipt, staleness, strength
from harness.receipt.figures import figure_text
from harness.receipt.receipt import Receipt

FRESH, STALE, NONE = "fresh", "STALE", "none"


@dataclass(frozen=True)
class Entry:
    """One pack on one target: the strongest evidence that a receipt holds for it.

    `figures` maps the name of a figure to its value in the pristine lane; `state` is fresh, STALE, none or
    "no expectation"; `strength` is how many wrong fixes the probe refused, empty where nobody measured it.
    """

    pack: str
    kind: str
    target: str
    verdict: str
    evidence: str
    state: str
    why_stale: tuple[str, ...]
    figure: str
    gpu: str
    strength: str = ""


def entry(pack: Pack, target: str, found: Receipt | None) -> Entry:
    """Build the entry of one pack and target."""
    kind = pack.definition.kind
    if found is None:
        return Entry(pack.name, kind, target, "", "", NONE, (), "", "")
    why = tuple(staleness.reasons(pack, found))
    name = pack.definition.leading_figure
    figure = figure_text(found.figure(name, LaneName.PRISTINE), found.figure(name, LaneName.PATCHED))
    state = STALE if why else FRESH if target in pack.definition.targets else NO_EXPECTATION
    strong = strength.in_a_table(pack, target, found.evidence)
    return Entry(pack.name, kind, target, found.verdict, found.evidence, state, why, figure, found.host.gpu, strong)


def of_pack(pack: Pack, receipts: list[Receipt]) -> list[Entry]:
    """Build the entries of a pack, one for each target that pack.toml lists, then for those that it does not."""
    best = receipt.strongest(receipts)
    targets = dict.fromkeys((*pack.definition.targets, *best))
    return [entry(pack, target, best.get(target)) for target in targets]


def gather(folders: list[Path]) -> tuple[dict[str, list[Receipt]], list[HarnessError]]:
    """Read the receipts below `folders` by pack: a folder of packs, or what ``--receipts DIR`` wrote on some machine.

    Receipts of upstream's default branch (``head``) are left out: they speak of another tree.
    """
    found: dict[str, list[Receipt]] = {}
    errors = []
    for folder in folders:
        if not folder.is_dir():
            errors.append(HarnessError(f"no folder {folder}. Next: runner.py table DIR, with DIR from run --receipts"))
            continue
        places = [folder, *folder.glob("*/"), *folder.glob("*/receipts/")]
        for path in sorted({path for place in places for path in receipt.paths(place)}):
            try:
                if not receipt.is_receipt(path):
                    continue
                one = receipt.load(path)
                found.setdefault(one.pack, []).append(one)
            except HarnessError as error:
                errors.append(error)
    return found, errors


def text_of(one: Entry) -> str:
    """Write an entry shortly: the verdict, how it was seen, and STALE where it is."""
    if one.state == NONE:
        return "-"
    state = {FRESH: "", STALE: f" {STALE}"}.get(one.state, f", {one.state}")
    return f"{one.verdict} ({one.evidence}){state}" + (f", {one.strength}" if one.strength else "")


def arranged(entries: list[Entry]) -> tuple[list[str], list[list[str]]]:
    """Arrange entries as packs against targets; return the header and the rows."""
    targets = sorted({one.target for one in entries}, key=lambda name: (name != "cpu", len(name), name))
    by_place = {(one.pack, one.target): one for one in entries}
    packs = list(dict.fromkeys((one.pack, one.kind) for one in entries))
    rows = [
        [pack, kind, *(text_of(by_place[pack, name]) if (pack, name) in by_place else "" for name in targets)]
        for pack, kind in packs
    ]
    return ["pack", "kind", *targets], rows


def markdown(entries: list[Entry]) -> str:
    """Write the grid as a Markdown table."""
    header, rows = arranged(entries)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines) + "\n"


def as_json(entries: list[Entry]) -> str:
    """Write the entries as one JSON document."""
    return json.dumps([asdict(one) for one in entries], indent=1) + "\n"
