"""``runner.py pr-verdict``: what a change of an upstream does to the packs' bugs, from its base and its head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import IO

import click

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import Evidence, Exit, HarnessError, LaneName, files, terminal
from harness.host import eligibility
from harness.host.eligibility import Planned
from harness.pack import Pack, load
from harness.receipt import redaction
from harness.report import pr_comment, report
from harness.schedule import lanes
from harness.schedule.selection import Request, cell_of, copied_inputs
from harness.schedule.session import Session
from harness.verdict import change
from harness.verdict.change import Compared
from harness.versions.judging import side_of


@click.command("pr-verdict")
@options.packs_argument
@click.option("--base", metavar="SPEC", help="The tree before the change: path:DIR, git+URL@COMMIT, as in `run`.")
@click.option("--head", metavar="SPEC", help="The tree with it.")
@click.option(
    "--changed",
    type=click.File(encoding="utf-8", errors="replace"),
    metavar="FILE",
    help="The files that the change touches, a path a line (-: standard input): only packs that are about them.",
)
@click.option("--target", default="auto", show_default=True, help="cpu, sm_90a, ..., auto (the first judged here).")
@options.takes(*options.PLACES, "jobs", "timeout")
def command(
    shared: Shared,
    names: tuple[str, ...],
    base: str | None,
    head: str | None,
    changed: IO[str] | None,
    target: str,
) -> int:
    """Say whether a change fixes a pack's bug.

    Script and contract run on two trees of your own; fix.patch has no part in it.

    It prints three lines of Markdown for each pack: both verdicts and what they say of the change; what was measured
    on which trees; how many wrong fixes the pack refuses.

    With --changed and neither --base nor --head it only names the packs that are about these files, one a line.

    The code of both trees is run, as your own tests run it: judge only what you would test.

    \b
    Examples:
      runner.py pr-verdict 9 --base path:../base --head path:../head
      runner.py pr-verdict 9 --base git+URL@COMMIT --head git+URL@COMMIT
      git diff --name-only main | runner.py pr-verdict --changed -

    Exit status 1: the change brings the bug in, breaks a control, or ends the lane in an error that base does not
    have; 5: nothing can be said of the change; 0: all others.
    """
    if (base is None) != (head is None) or (base is None and changed is None):
        raise HarnessError("pr-verdict judges two trees. Next: --base SPEC --head SPEC, or --changed FILE")
    if not names and changed is None:
        raise HarnessError("no pack is named. Next: runner.py pr-verdict PACK, or --changed FILE")
    packs, errors = options.load_packs(shared.packs, names)
    options.print_errors(errors)
    if changed is not None:
        packs = load.packs_about(packs, changed.read().splitlines())
    if base is None or head is None:
        for pack in packs:
            terminal.echo(pack.name)
        return Exit.WRONG_CALL if errors else Exit.AS_EXPECTED
    trees = {change.BASE: base, change.HEAD: head}
    with running.session(shared) as session, copied_inputs(session.cache, packs) as copies:
        judgeable, refusals = _judgeable(session, copies, target)
        comparisons, interrupted = _compare(session, judgeable, trees, shared.timeout)
        scrub = redaction.host_scrubber({**session.cache.places, files.REPOSITORY: "$REPOSITORY"})
        text = pr_comment.text(comparisons, scrub)  # it reads the copies
    options.print_errors(refusals)
    for comparison in comparisons:
        report.scrubber(comparison.pack).require_clean("what is printed", text)
    terminal.echo(text, nl=False)
    if interrupted:
        raise KeyboardInterrupt
    if errors:
        return Exit.WRONG_CALL
    return int(change.status(comparison.change for comparison in comparisons))


def _judgeable(
    session: Session, packs: list[Pack], target: str
) -> tuple[list[tuple[Pack, str, Evidence]], list[HarnessError]]:
    """Return the packs that this host can judge, with target and evidence, and an error for each other pack."""
    judgeable, refusals = [], []
    for pack in packs:
        try:
            judgeable.append((pack, *eligibility.first_target(pack, target, session.host)))
        except HarnessError as error:
            if error.status != Exit.NOTHING_JUDGED:
                raise
            refusals.append(error)
    return judgeable, refusals


def _compare(
    session: Session, subjects: list[tuple[Pack, str, Evidence]], trees: Mapping[str, str], timeout: float | None
) -> tuple[list[Compared], bool]:
    """Judge the base and the head of a change by each pack on its target; return whether the user interrupted, too.

    `timeout` is that of a lane, in seconds.
    """
    cells = []
    for pack, target, evidence in subjects:
        for column, upstream in trees.items():
            request = Request(upstream, (), (LaneName.PRISTINE,), timeout)
            cell = cell_of(pack, Planned(target, evidence), request, session.host, session.cache)
            cells.append(replace(cell, column=column))
    account = lanes.run(session, cells, receipts=False)
    for cell in cells:
        outcome = account.results.get(cell.name)
        if outcome is not None and outcome.problem:
            raise HarnessError(f"--{cell.column}: {outcome.problem}")
    sides = [side_of(session, cell, account) for cell in cells]
    comparisons = []
    for (pack, target, evidence), base, head in zip(subjects, sides[::2], sides[1::2], strict=True):
        if base is not None and head is not None:
            comparisons.append(Compared(pack, target, evidence, base, head))
    return comparisons, account.interrupted
