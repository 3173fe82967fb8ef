"""``runner.py check``: whether each pack is sound, and whether the OSV records say what the packs say."""

from __future__ import annotations

import datetime as dt
from pathlib import Path

import click

from harness.author import missing
from harness.commands import options
from harness.commands.options import Shared
from harness.core import room, terminal
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.host import host
from harness.pack.model import Pack
from harness.report import advisories, bundle_check, soundness
from harness.report.soundness import Checker, Finding


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


def _write_advisories(packs: Path, folder: Path) -> int:
    """Write the records in a folder as their packs have them now."""
    chosen, broken = options.sound_packs(packs, ())
    if broken:
        options.complain(broken)
        return Exit.WRONG_CALL
    found = advisories.plans(chosen, folder, dt.datetime.now(dt.UTC))
    with room.guard(folder, "the folder of advisories", "--packs DIR"):
        advisories.carry_out(found)
    for one in found:
        terminal.echo(f"{one.path.name}: {one.why}; {'deleted' if one.text is None else 'written'}")
    return Exit.AS_EXPECTED


def _stale_advisories(packs: list[Pack], folder: Path) -> list[Finding]:
    """Say which records differ from their packs."""
    try:
        found = advisories.plans(packs, folder, dt.datetime.now(dt.UTC))
    except HarnessError as error:
        return [Finding(folder.name, str(error))]
    return [Finding(folder.name, f"{one.path.name}: {one.why}. Next: runner.py check --write") for one in found]


@click.command("check")
@options.packs_argument
@options.takes(*options.PLACES)
@click.option("--bundle", "sent", type=click.Path(path_type=Path), help="Check a bundle that somebody sent, instead.")
@click.option("--write", is_flag=True, help="Write the OSV records in advisories/ anew, instead.")
def command(shared: Shared, wanted: tuple[str, ...], sent: Path | None, write: bool) -> int:
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
    cache, here = shared.cache(), host.detect()
    chosen, broken = options.sound_packs(shared.packs, wanted)
    findings, half = soundness.duplicate_numbers(chosen), [pack for pack in chosen if missing.is_half_written(pack)]
    for pack in chosen:
        findings += Checker(pack, cache, here).findings()
    if records.is_dir() and not wanted and not broken:
        findings += _stale_advisories(chosen, records)
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
    unsound_packs = unsound & {pack.name for pack in chosen}
    terminal.echo(f"{len(chosen)} pack(s) read, {len(chosen) - len(unsound_packs)} sound")
    if broken:
        return Exit.WRONG_CALL
    return Exit.DEVIATES if unsound else Exit.AS_EXPECTED
