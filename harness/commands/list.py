"""``runner.py list``: the packs, and what their receipts say."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import terminal
from harness.core.errors import HarnessError
from harness.core.words import NO_EXPECTATION, Exit
from harness.pack.model import Pack
from harness.receipt import receipt, staleness, strength
from harness.receipt.receipt import Receipt

FRESH, STALE, NONE = "fresh", "STALE", "none"


@dataclass(frozen=True)
class Entry:
    """One pack on one target: the strongest evidence that a receipt holds for it.

    `state` is fresh, STALE, none or "no expectation"; `strength` says how many mutants the checks refused.
    """

    target: str
    expected: str = ""
    verdict: str = ""
    evidence: str = ""
    state: str = NONE
    why_stale: tuple[str, ...] = ()
    gpu: str = ""
    strength: str = ""


def _entry(pack: Pack, target: str, best: Receipt | None) -> Entry:
    stated = pack.definition.targets.get(target)
    entry = Entry(target, stated.verdict if stated else "", strength=strength.summary(pack, target, ""))
    if best is None:
        return entry
    why = tuple(staleness.reasons(pack, best))
    return replace(
        entry,
        verdict=best.verdict,
        evidence=best.evidence,
        state=STALE if why else FRESH if stated else NO_EXPECTATION,
        why_stale=why,
        gpu=best.host.gpu,
        strength=strength.summary(pack, target, best.evidence),
    )


def _entries(pack: Pack) -> list[Entry]:
    """Build the entries of a pack, one for each target that pack.toml lists, then for those that it does not."""
    best = receipt.strongest(receipt.load_all(pack.receipts, lanes=False))
    return [_entry(pack, target, best.get(target)) for target in dict.fromkeys((*pack.definition.targets, *best))]


def _lines(pack: Pack, entries: list[Entry]) -> list[str]:
    definition = pack.definition
    fixed = f", fixed in {definition.fixed_in}" if definition.fixed_in else ""
    package = f"{definition.upstream.package} {definition.upstream.pin}{fixed}"
    return [
        f"{pack.name}  [{definition.kind}]  {package}",
        f"    {definition.title}",
        *(f"    {one.target:8} {_state(one)}" for one in entries),
    ]


def _state(one: Entry) -> str:
    if one.state == NONE:
        return "no receipt"
    verdict = f"{one.verdict} ({', '.join(filter(None, (one.evidence, one.gpu)))})"
    state = f"{one.state}: {'; '.join(one.why_stale)}" if one.why_stale else one.state
    return f"{verdict}, {state}; mutants: {one.strength}"


def _document(pack: Pack, entries: list[Entry]) -> dict[str, object]:
    definition = pack.definition
    return {
        "pack": pack.name,
        "title": definition.title,
        "kind": definition.kind,
        "upstream": definition.upstream.package,
        "version": definition.upstream.pin,
        "fixed_in": definition.fixed_in,
        "targets": {one.target: asdict(one) for one in entries},
    }


@click.command("list")
@options.packs_argument
@click.option("--runs", "sweeps", type=options.FOLDER, metavar="DIR", help="What the sweeps in DIR found of one pack.")
@options.takes("packs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(shared: Shared, wanted: tuple[str, ...], sweeps: Path | None, as_json: bool) -> int:
    """List the packs and what their receipts say.

    For each target it shows the verdict of the strongest receipt.

    A receipt is fresh or STALE: script, contract, patch, release or dependencies changed in meaning since.

    \b
    Examples:
      runner.py list
      runner.py list 9 --runs sweeps    # verdicts and figures, sweep by sweep
    """
    if sweeps is not None:
        if len(wanted) != 1 or as_json:
            raise HarnessError("--runs shows one pack, without --json. Next: runner.py list PACK --runs DIR")
        from harness.commands import history  # noqa: PLC0415 - rich, which `list` does without

        history.show(wanted[0], sweeps)
        return Exit.AS_EXPECTED
    chosen, errors = options.sound_packs(shared.packs, wanted)
    listed = []
    for pack in chosen:
        try:
            listed.append((pack, _entries(pack)))
        except HarnessError as error:
            errors.append(error)
    if as_json:
        terminal.echo(json.dumps([_document(pack, entries) for pack, entries in listed], indent=1))
    else:
        terminal.echo("\n".join(line for pack, entries in listed for line in _lines(pack, entries)))
    options.complain(errors)
    return Exit.WRONG_CALL if errors else Exit.AS_EXPECTED
