"""``runner.py list``: the packs, and what their receipts say."""

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import NO_EXPECTATION, Exit, HarnessError, terminal
from harness.pack.model import Pack
from harness.receipt import receipt, staleness, strength
from harness.receipt.receipt import Receipt

#: Of the JSON document.
SCHEMA = 1
FRESH, STALE, NONE = "fresh", "STALE", "none"


@dataclass(frozen=True)
class Entry:
    """One pack on one target: the receipt with the strongest evidence.

    `state` is fresh, STALE, none or "no expectation"; `strength` is the mutation score.
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
    definition = pack.definition.targets.get(target)
    score = strength.summary(pack, target, best.evidence if best else "")
    entry = Entry(target, pack.definition.expected if definition else "", strength=score)
    if best is None:
        return entry
    reasons = tuple(staleness.reasons(pack, best))
    return replace(
        entry,
        verdict=best.verdict,
        evidence=best.evidence,
        state=STALE if reasons else FRESH if definition else NO_EXPECTATION,
        why_stale=reasons,
        gpu=best.host.gpu,
    )


def _entries(pack: Pack) -> list[Entry]:
    """Build an entry for each target that pack.toml lists, then for each other target that has a receipt."""
    best = receipt.strongest(receipt.load_all(pack.receipts, lanes=False))
    return [_entry(pack, target, best.get(target)) for target in dict.fromkeys((*pack.definition.targets, *best))]


def _lines(pack: Pack, entries: list[Entry]) -> list[str]:
    definition = pack.definition
    fixed = f", fixed in {definition.fixed_in}" if definition.fixed_in else ""
    package = f"{definition.upstream.package} {definition.upstream.pin}{fixed}"
    return [
        f"{pack.name}  [{definition.kind}]  {package}",
        f"    {definition.title}",
        *(f"    {entry.target:8} {_state(entry)}" for entry in entries),
    ]


def _state(entry: Entry) -> str:
    if entry.state == NONE:
        return "no receipt"
    verdict = f"{entry.verdict} ({', '.join(filter(None, (entry.evidence, entry.gpu)))})"
    state = f"{entry.state}: {'; '.join(entry.why_stale)}" if entry.why_stale else entry.state
    return f"{verdict}, {state}; mutants: {entry.strength}"


def _document(pack: Pack, entries: list[Entry]) -> dict[str, object]:
    definition = pack.definition
    return {
        "pack": pack.name,
        "title": definition.title,
        "kind": definition.kind,
        "upstream": definition.upstream.package,
        "version": definition.upstream.pin,
        "fixed_in": definition.fixed_in,
        "targets": {entry.target: asdict(entry) for entry in entries},
    }


@click.command("list")
@options.packs_argument
@click.option("--runs", "sweeps", type=options.FOLDER, metavar="DIR", help="What the sweeps in DIR found.")
@options.takes("packs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(shared: Shared, names: tuple[str, ...], sweeps: Path | None, as_json: bool) -> int:
    """List the packs and what their receipts say.

    For each target it shows the verdict of the strongest receipt.

    A receipt is fresh or STALE: script, contract, patch, release or dependencies changed in meaning since.

    \b
    Examples:
      runner.py list
      runner.py list 9 --runs sweeps    # verdicts and figures, sweep by sweep
    """
    if sweeps is not None:
        if as_json:
            raise HarnessError("--runs prints no JSON. Next: read results.json of each sweep")
        from harness.commands import history  # noqa: PLC0415 - rich, which `list` does without

        history.show(names, sweeps)
        return Exit.AS_EXPECTED
    packs, errors = options.load_packs(shared.packs, names)
    listed = []
    for pack in packs:
        try:
            listed.append((pack, _entries(pack)))
        except HarnessError as error:
            errors.append(error)
    if as_json:
        terminal.echo(
            json.dumps({"schema": SCHEMA, "packs": [_document(pack, entries) for pack, entries in listed]}, indent=1)
        )
    else:
        terminal.echo("\n".join(line for pack, entries in listed for line in _lines(pack, entries)))
    options.print_errors(errors)
    return Exit.WRONG_CALL if errors else Exit.AS_EXPECTED
