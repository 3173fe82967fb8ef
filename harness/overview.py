"""What the receipts of all packs show: state by target, and the table of packs against targets."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import receipt, staleness
from harness.errors import HarnessError
from harness.pack import Pack
from harness.receipt import Receipt
from harness.summary import figure_text
from harness.words import LaneName

FRESH, STALE, NONE = "fresh", "STALE", "none"


@dataclass(frozen=True)
class Cell:
    """One pack on one target: the strongest evidence that a receipt holds for it.

    `figures` maps the name of a figure to its value in the pristine lane; `state` is fresh, STALE or none.
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


def cell(pack: Pack, target: str, found: Receipt | None) -> Cell:
    """Build the cell of one pack and target."""
    kind = pack.definition.kind
    if found is None:
        return Cell(pack.name, kind, target, "", "", NONE, (), "", "")
    why = tuple(staleness.reasons(pack, found))
    name = pack.definition.leading_figure
    figure = figure_text(found.figure(name, LaneName.PRISTINE), found.figure(name, LaneName.PATCHED))
    state = STALE if why else FRESH
    return Cell(pack.name, kind, target, found.verdict, found.evidence, state, why, figure, found.host.gpu)


def of_pack(pack: Pack, receipts: list[Receipt]) -> list[Cell]:
    """Build the cells of a pack, one for each target that pack.toml lists."""
    best = receipt.strongest(receipts)
    return [cell(pack, target, best.get(target)) for target in pack.definition.targets]


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
        for path in sorted({*folder.glob("*.json"), *folder.glob("*/*.json"), *folder.glob("*/receipts/*.json")}):
            try:
                one = receipt.load(path)
                found.setdefault(one.pack, []).append(one)
            except HarnessError as error:
                errors.append(error)
    return found, errors


def text_of(one: Cell) -> str:
    """Write a cell shortly: the verdict, how it was seen, and STALE where it is."""
    if one.state == NONE:
        return "-"
    return f"{one.verdict} ({one.evidence})" + (f" {STALE}" if one.state == STALE else "")


def grid(cells: list[Cell]) -> tuple[list[str], list[list[str]]]:
    """Arrange cells as packs against targets; return the header and the rows."""
    targets = sorted({one.target for one in cells}, key=lambda name: (name != "cpu", len(name), name))
    by_place = {(one.pack, one.target): one for one in cells}
    packs = list(dict.fromkeys((one.pack, one.kind) for one in cells))
    rows = [
        [pack, kind, *(text_of(by_place[pack, name]) if (pack, name) in by_place else "" for name in targets)]
        for pack, kind in packs
    ]
    return ["pack", "kind", *targets], rows


def markdown(cells: list[Cell]) -> str:
    """Write the grid as a Markdown table."""
    header, rows = grid(cells)
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(text.replace('|', chr(92) + '|') for text in line)} |" for line in lines) + "\n"


def as_json(cells: list[Cell]) -> str:
    """Write the cells as one JSON document."""
    return json.dumps([asdict(one) for one in cells], indent=1) + "\n"
