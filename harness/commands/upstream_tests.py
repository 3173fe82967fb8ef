"""``runner.py upstream-tests``: upstream's own tests, without and with a pack's patch."""

from dataclasses import asdict, replace

import click

from harness.commands import options, running
from harness.commands.options import Shared
from harness.core import HarnessError, UnsupportedHereError, files, terminal
from harness.core.words import Exit, SuiteVerdict
from harness.lane import environment, supervisor
from harness.pack.model import Pack, UpstreamTests
from harness.receipt import receipt as receipts
from harness.schedule.session import Session
from harness.suites import suite
from harness.upstream.patch import StalePatchError

#: The verdicts of suites that were not judged, by their errors; any other is an ERROR.
UNJUDGED = {UnsupportedHereError: SuiteVerdict.UNSUPPORTED, StalePatchError: SuiteVerdict.PATCH_STALE}


@click.command("upstream-tests")
@options.packs_argument
@options.takes(*options.PLACES, "timeout")
@click.option("--gpu", is_flag=True, help="Show the tests this host's GPU, also where they do not need one.")
@click.option("--record", is_flag=True, help="Put the receipt into the pack: receipts/upstream_tests.json.")
def command(shared: Shared, names: tuple[str, ...], gpu: bool, record: bool) -> int:
    """Run upstream's own tests, with and without the patch.

    pack.toml names the files in [upstream_tests]; with no PACK, every pack that names some. They run as lanes do, and
    are compared test by test. Where the pack has an upstream_test.patch, both trees have it: what it adds must be red
    before and green after.

    \b
    UNBROKEN        what was green is green with the patch
    BREAKS_TESTS    a test that was green is not
    NEW_TEST_WRONG  what upstream_test.patch adds is not red, then green
    PATCH_STALE     a patch does not apply to the tree
    UNSUPPORTED     tests need a GPU and none is here, or all are skipped
    ERROR           nothing collected, a crash, a time-out: never a pass

    Exit status 0: all UNBROKEN; 1: something is not; 2: a pack names no tests; 5: nothing was judged.
    """
    packs, errors = options.load_packs(shared.packs, names)
    suites = [(pack, tests) for pack in packs if (tests := pack.definition.upstream_tests)]
    if names and len(suites) < len(packs):
        nameless = next(pack.name for pack in packs if not pack.definition.upstream_tests)
        raise HarnessError(f"{nameless}: pack.toml has no [upstream_tests]. Next: see CONTRIBUTING.md")
    options.print_errors(errors)
    supervisor.adopt_orphans()
    judged: list[tuple[SuiteVerdict, str]] = []
    try:
        with running.session(shared) as session:
            environment.store_bytecode(session.progress.tell)
            for pack, tests in suites:
                asked = replace(tests, gpu=gpu or tests.gpu, timeout_s=shared.timeout or tests.timeout_s)
                judged.append(_judge(pack, asked, session, record=record))
    finally:  # after Ctrl-C, too: what was judged is shown
        for _, text in judged:
            terminal.echo(text)
    verdicts = {verdict for verdict, _ in judged}
    if judged:
        terminal.echo(f"logs: {session.folder}", err=True)
    if errors:
        return Exit.WRONG_CALL
    if verdicts <= {SuiteVerdict.UNSUPPORTED}:
        return Exit.NOTHING_JUDGED
    return Exit.AS_EXPECTED if verdicts <= {SuiteVerdict.UNBROKEN, SuiteVerdict.UNSUPPORTED} else Exit.DEVIATES


def _judge(pack: Pack, tests: UpstreamTests, session: Session, *, record: bool) -> tuple[SuiteVerdict, str]:
    """Run the suite of one pack; return its verdict and what it showed. A suite that was not judged has no receipt."""
    name = f"{pack.name} with {pack.suite_patch.name}"
    try:
        receipt = suite.judge(pack, tests, session)
    except (HarnessError, StalePatchError) as error:
        verdict = UNJUDGED.get(type(error), SuiteVerdict.ERROR)
        return verdict, f"{pack.name}: {error}\n{name}: {verdict}"
    lines = [receipt.reason] if receipt.reason else []
    lines += [f"{test.change}: {test.test} ({test.before} -> {test.after}) {test.reason}" for test in receipt.tests]
    lanes = (receipt.before, receipt.after)
    before, after = (", ".join(f"{count} {result}" for result, count in lane.items()) for lane in lanes)
    if record:
        with files.guard(pack.receipts, "the pack", "--packs DIR"):
            files.write_atomic(pack.receipts / receipts.SUITE, receipts.to_json(asdict(receipt)))
    last = f"{name}: {before} -> {after}: {receipt.verdict}"
    return receipt.verdict, "\n".join([*(f"{pack.name}: {line}" for line in lines), last])
