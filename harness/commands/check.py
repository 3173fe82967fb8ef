"""``runner.py check``: whether each pack is sound, and whether the OSV records say what the packs say."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

from harness.audit import records
from harness.author import missing
from harness.commands import options
from harness.commands.options import Shared
from harness.core import room, terminal
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.host import host
from harness.report import advisories, bundle_check, soundness
from harness.report.soundness import Checker


def _check_bundle(sent: Path, packs: Path) -> int:
    """Say what of a bundle does not hold, a line each."""
    try:
        data = sent.read_bytes()
    except OSError as error:
        raise HarnessError(f"{sent} cannot be read ({error.strerror}). Next: --bundle FILE.zip") from None
    found = bundle_check.errors(data, options.sound_packs(packs, ())[0])
    for line in found:
        terminal.echo(f"refuted: {line}")
    terminal.echo(f"{sent.name}: {f'{len(found)} error(s)' if found else 'it holds'}")
    return Exit.DEVIATES if found else Exit.AS_EXPECTED


def _check_advisories(packs: Path, folder: Path, *, write: bool) -> int:
    """Say which records in a folder differ from their packs, or write them anew."""
    chosen, broken = options.sound_packs(packs, ())
    if broken:
        options.complain(broken)
        return Exit.WRONG_CALL
    found = advisories.plans(chosen, folder, dt.datetime.now(dt.UTC))
    if write:
        with room.guard(folder, "the folder of advisories", "--records DIR"):
            advisories.carry_out(found)
    for one in found:
        done = ("deleted" if one.text is None else "written") if write else "Next: runner.py check --advisories --write"
        terminal.echo(f"{one.path.name}: {one.why}; {done}" if write else f"{one.path.name}: {one.why}. {done}")
    if not found:
        terminal.echo("all records are as their packs say")
    return Exit.DEVIATES if found and not write else Exit.AS_EXPECTED


@click.command("check")
@options.packs_argument
@options.takes(*options.PLACES)
@click.option("--bundle", "sent", type=click.Path(path_type=Path), help="Check a bundle that somebody sent, instead.")
@click.option("--advisories", "is_records", is_flag=True, help="Check the OSV records in advisories/, instead.")
@click.option("--write", is_flag=True, help="With --advisories: write them anew.")
@click.option("--records", "folder", type=options.FOLDER, default=records.FOLDER, metavar="DIR", hidden=True)
def command(
    shared: Shared, wanted: tuple[str, ...], sent: Path | None, is_records: bool, write: bool, folder: Path
) -> int:
    """Check that packs are sound.

    pack.toml is strict; reproduce.py is short, says its sentinels and has a header whose pins agree; the patch
    reads like a commit, applies to the pinned tree without offset and changes exactly what it says; receipts are
    fresh, as expected, and have their logs, beside which there are none; README.md is what report.in.md renders to, and
    short. A STALE receipt fails where this host can make it anew and is a warning where it cannot.

    Of a half-written pack it says first what is missing, one line each, the next step first: what an issue needs (`to
    file an issue`), apart from what this repository asks of a pack besides (`to be admitted here`).

    With --bundle it judges a bundle that `report --bundle` made: its zip, each receipt from what it says of the lanes,
    and its texts against what this repository would send with them. It cannot show that a run took place.

    With --advisories it says which OSV records differ from their packs. Affected are the versions that a committed
    receipt or `versions --record` judged wrong, and no others.

    Exit status 0: sound; 1: something is not; 2: a pack.toml cannot be read.
    """
    if write and not is_records:
        raise click.UsageError("--write is for --advisories")
    if is_records:
        return _check_advisories(shared.packs, folder, write=write)
    if sent is not None:
        return _check_bundle(sent, shared.packs)
    cache, here = shared.cache(), host.detect()
    chosen, broken = options.sound_packs(shared.packs, wanted)
    findings, half = soundness.duplicate_numbers(chosen), [pack for pack in chosen if missing.is_half_written(pack)]
    for pack in chosen:
        findings += Checker(pack, cache, here).findings()
    options.complain(broken)
    for pack in half:
        for step in missing.steps(pack):
            terminal.echo(f"{pack.name}: {step}")
    new = {pack.name for pack in half if missing.is_new(pack)}
    for finding in findings:
        if finding.pack in new and missing.TOLD.match(finding.text):
            continue
        terminal.echo(f"{'warning' if finding.warning else 'unsound'}: {finding.pack}: {finding.text}")
    unsound = {finding.pack for finding in findings if not finding.warning} | {pack.name for pack in half}
    terminal.echo(f"{len(chosen)} pack(s) read, {len(chosen) - len(unsound)} sound")
    if broken:
        return Exit.WRONG_CALL
    return Exit.DEVIATES if unsound else Exit.AS_EXPECTED
