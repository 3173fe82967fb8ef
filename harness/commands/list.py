"""``runner.py list``: what there is."""

from __future__ import annotations

import json
from pathlib import Path

import click

from harness.commands import options
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.pack.model import Pack
from harness.receipt import receipt, strength
from harness.report import grid


def _document(pack: Pack) -> dict[str, object]:
    definition = pack.definition
    cells = {one.target: one for one in grid.of_pack(pack, receipt.load_all(pack.receipts, lanes=False))}
    return {
        "pack": pack.name,
        "title": definition.title,
        "kind": definition.kind,
        "upstream": definition.upstream.package,
        "version": definition.upstream.pin,
        "fixed_in": definition.fixed_in,
        "targets": {
            name: {
                "evidence": list(target.evidence),
                "expected": target.verdict,
                "receipt": cells[name].state,
                "verdict": cells[name].verdict,
                "strength": strength.text(pack, name, cells[name].evidence),
            }
            for name, target in definition.targets.items()
        },
    }


def _lines(document: dict[str, object]) -> list[str]:
    targets = document["targets"]
    fixed = f", fixed in {document['fixed_in']}" if document["fixed_in"] else ""
    lines = [f"{document['pack']}  [{document['kind']}]  {document['upstream']} {document['version']}{fixed}"]
    lines.append(f"    {document['title']}")
    if isinstance(targets, dict):
        lines += [
            f"    {name:8} {'/'.join(target['evidence'])}: receipt {target['receipt']} {target['verdict']}".rstrip()
            + (f"; {target['strength']}" if target["strength"] else "")
            for name, target in targets.items()
        ]
    return lines


@click.command("list")
@options.packs_argument
@options.packs_option
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(wanted: tuple[str, ...], packs: Path, as_json: bool) -> int:  # noqa: FBT001 - click passes it by name
    """List packs: upstream, pinned version, what each target can show, and the state of its receipt.

    A receipt is fresh, STALE (probe, patch, release or dependencies changed in meaning since), or none.
    """
    chosen, errors = options.sound_packs(packs, wanted)
    documents = []
    for pack in chosen:
        try:
            documents.append(_document(pack))
        except HarnessError as error:
            errors.append(error)
    if as_json:
        click.echo(json.dumps(documents, indent=1))
    else:
        click.echo("\n".join(line for document in documents for line in _lines(document)))
    options.complain(errors)
    return int(Exit.WRONG_CALL if errors else Exit.AS_EXPECTED)
