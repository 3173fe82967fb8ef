"""``runner.py check``: whether each pack is sound, and whether the OSV records say what the packs say."""

import re
from collections.abc import Iterator
from pathlib import Path

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import Exit, files, terminal
from harness.core.errors import Finding, HarnessError
from harness.host import nvml
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.report import advisories, bundle, soundness

TODO = re.compile(r"\bTODO\b[:. ]*(?P<text>[^\n\"]*)")
#: Findings on a new pack that `_steps` says already.
TOLD = re.compile(r"report\.in\.md: |README\.md: not what|[a-z0-9_]+: no receipt\.")


def _check_bundle(sent: Path, folder: Path) -> int:
    errors = bundle.errors(sent.read_bytes(), options.load_packs(folder, ())[0])
    for line in errors:
        terminal.echo(f"refuted: {line}")
    terminal.echo(f"{sent.name}: {f'{len(errors)} error(s)' if errors else 'it holds'}")
    return Exit.DEVIATES if errors else Exit.AS_EXPECTED


def _write_advisories(folder_of_packs: Path, folder: Path) -> int:
    packs, errors = options.load_packs(folder_of_packs, ())
    if errors:
        options.print_errors(errors)
        return Exit.WRONG_CALL
    for plan in advisories.plans(packs, folder):
        with files.guard(folder, "the folder of advisories", "--packs DIR"):
            if plan.text is None:
                plan.path.unlink(missing_ok=True)
            else:
                files.write_atomic(plan.path, plan.text)
        terminal.echo(f"{plan.path.name}: {plan.why}; {'deleted' if plan.text is None else 'written'}")
    return Exit.AS_EXPECTED


def _stale_advisories(packs: list[Pack], folder: Path) -> list[Finding]:
    try:
        plans = advisories.plans(packs, folder)
    except HarnessError as error:
        return [Finding(str(error))]
    return [Finding(f"{plan.path.name}: {plan.why}. Next: runner.py check --write") for plan in plans]


def _print(found: dict[str, list[Finding]]) -> set[str]:
    """Print a line for each finding; return the names with a finding that is no warning."""
    for name, findings in found.items():
        for finding in findings:
            terminal.echo(f"{'warning' if finding.is_warning else 'unsound'}: {name}: {finding.text}")
    return {name for name, findings in found.items() if not all(finding.is_warning for finding in findings)}


def _is_new(pack: Pack) -> bool:
    """Whether a pack has no receipt. `_steps` then names what its report and receipts lack."""
    return not any(receipt.paths(pack.receipts))


def _is_half_written(pack: Pack) -> bool:
    """Whether a pack has a TODO, or neither a receipt nor a README.md."""
    return any(_todos(pack)) or (not pack.report.exists() and _is_new(pack))


def _steps(pack: Pack) -> list[str]:
    """List what is missing, a line each, the next step first."""
    lines = [f"to file an issue: {todo}" for todo in _todos(pack)]
    if _is_new(pack):
        lines.insert(0, f"to file an issue: runner.py run {pack.name}, then runner.py report {pack.name} --from last")
        lines.append(f"to be admitted here: runner.py run {pack.name} --record, then report {pack.name} --write")
    if not pack.contract.exists():
        lines.append("to be admitted here: contract.py: a control that is right with the bug and without it")
    if pack.definition.has_patch and not pack.patch.exists():
        lines.append("to be admitted here: fix.patch, made with git diff --full-index")
    return lines


def _todos(pack: Pack) -> Iterator[str]:
    for name in ("pack.toml", "report.in.md", "fix.patch"):
        path = pack.folder / name
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace").partition("diff --git ")[0]
            yield from (f"{name}: {match['text'] or 'TODO stands there'}" for match in TODO.finditer(text))


@click.command("check")
@options.packs_argument
@options.takes(*options.PLACES)
@click.option("--bundle", "sent", type=options.FILE, help="Check a bundle that somebody sent, instead.")
@click.option("--write", is_flag=True, help="Write the OSV records in advisories/ anew, instead.")
def command(shared: Shared, names: tuple[str, ...], sent: Path | None, write: bool) -> int:
    """Check that packs are sound.

    pack.toml is strict; reproduce.py is short, says its sentinels and has a header whose pins agree; the patch
    reads like a commit, applies to the pinned tree without offset and changes exactly what it says; receipts are
    fresh, as expected, hold when judged again from what they say, and have their logs; README.md is what report.in.md
    renders to, and short. A STALE receipt fails where this host can make it anew and is a warning where it cannot.

    Of a half-written pack it says first what is missing, one line each, the next step first: what an issue needs (`to
    file an issue`), apart from what this repository asks of a pack besides (`to be admitted here`).

    With --bundle it judges a bundle that `report --bundle` made: its zip, each receipt from what it says of the lanes,
    and its texts against what this repository would send with them. It cannot show that a run took place.

    Without PACK it says as well which OSV records, in advisories/ beside the packs, differ from them. Affected are the
    versions that a committed receipt or `versions --record` judged wrong, and no others.

    Exit status 0: sound; 1: something is not; 2: a pack.toml cannot be read.
    """
    records = shared.packs.absolute().with_name("advisories")
    if write:
        return _write_advisories(shared.packs, records)
    if sent is not None:
        return _check_bundle(sent, shared.packs)
    cache, this_host = shared.cache(), nvml.detect()
    packs, errors = options.load_packs(shared.packs, names)
    found = {pack.name: soundness.findings(pack, cache, this_host) for pack in packs}
    for name, finding in soundness.duplicate_numbers(packs).items():
        found[name].insert(0, finding)
    if records.is_dir() and not names and not errors:
        found[records.name] = _stale_advisories(packs, records)
    options.print_errors(errors)
    half_written = [pack for pack in packs if _is_half_written(pack)]
    for pack in half_written:
        for step in _steps(pack):
            terminal.echo(f"{pack.name}: {step}")
        if _is_new(pack):
            found[pack.name] = [finding for finding in found[pack.name] if not TOLD.match(finding.text)]
    unsound = _print(found) | {pack.name for pack in half_written}
    terminal.echo(f"{len(packs)} pack(s) read, {len(packs) - len(unsound - {records.name})} sound")
    if errors:
        return Exit.WRONG_CALL
    return Exit.DEVIATES if unsound else Exit.AS_EXPECTED
