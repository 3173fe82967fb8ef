"""``runner.py list``: the packs, and what their receipts say."""

from __future__ import annotations

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


def _lines(pack: Pack) -> list[str]:
    """Describe a pack: a line for each target that pack.toml lists, then for each other target that has a receipt."""
    definition = pack.definition
    fixed = f", fixed in {definition.fixed_in}" if definition.fixed_in else ""
    best = receipt.strongest(receipt.load_all(pack.receipts, lanes=False))
    return [
        f"{pack.name}  [{definition.kind}]  {definition.upstream.package} {definition.upstream.pin}{fixed}",
        f"    {definition.title}",
        *(f"    {target:8} {_state(pack, best.get(target))}" for target in dict.fromkeys((*definition.targets, *best))),
    ]


def _state(pack: Pack, best: Receipt | None) -> str:
    """Say what the receipt with the strongest evidence shows, whether it is fresh, and the mutation score."""
    if best is None:
        return "no receipt"
    reasons = staleness.reasons(pack, best)
    state = f"STALE: {'; '.join(reasons)}" if reasons else "fresh"
    if not reasons and best.target not in pack.definition.targets:
        state = NO_EXPECTATION
    shown = ", ".join(filter(None, (best.evidence, best.host.gpu)))
    return f"{best.verdict} ({shown}), {state}; mutants: {strength.summary(pack, best.target, best.evidence)}"


@click.command("list")
@options.packs_argument
@click.option("--runs", "sweeps", type=options.FOLDER, metavar="DIR", help="What the sweeps in DIR found.")
@options.takes("packs")
def command(shared: Shared, names: tuple[str, ...], sweeps: Path | None) -> int:
    """List the packs and what their receipts say.

    For each target it shows the verdict of the strongest receipt.

    A receipt is fresh or STALE: script, contract, patch, release or dependencies changed in meaning since.

    \b
    Examples:
      runner.py list
      runner.py list 9 --runs sweeps    # verdicts and figures, sweep by sweep
    """
    if sweeps is not None:
        from harness.commands import history  # noqa: PLC0415 - rich, which `list` does without

        history.show(names, sweeps)
        return Exit.AS_EXPECTED
    packs, errors = options.load_packs(shared.packs, names)
    for pack in packs:
        try:
            terminal.echo("\n".join(_lines(pack)))
        except HarnessError as error:
            errors.append(error)
    options.print_errors(errors)
    return Exit.WRONG_CALL if errors else Exit.AS_EXPECTED
