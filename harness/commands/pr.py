"""``runner.py pr``: a pack's patch as one commit in the user's own checkout."""

from __future__ import annotations

from pathlib import Path

import click

from harness.commands import options
from harness.core.words import Exit
from harness.report import pull_request


@click.command("pr")
@click.argument("wanted", metavar="PACK")
@click.option(
    "--checkout",
    type=click.Path(path_type=Path, file_okay=False, exists=True),
    required=True,
    metavar="DIR",
    help="The top of your clone of the upstream, at the commit to build on.",
)
@click.option("--branch", metavar="NAME", help="The branch to make (default: fix-, and the pack's name).")
@options.packs_option
def command(wanted: str, checkout: Path, branch: str | None, packs: Path) -> int:
    """Make a branch with one commit in your checkout of an upstream: the patch, and the test for its own suite.

    It is ask.patch where the pack has one, else fix.patch, and upstream_test.patch;
    the message stands in the patch. Author, configuration and hooks are your own. There is no sign-off: that is yours.
    Nothing is pushed, and nothing is formatted but by the hooks of your checkout.

    Refused, and the checkout left as it was: changes in it, a branch of that name, a clone of something else, a commit
    that the patch fits only with an offset or not at all, a hook that says no.
    """
    subject = options.one_pack(packs, wanted, "pr")
    made = pull_request.make(subject, checkout, branch)
    click.echo(f"branch {made.branch}, commit {made.commit[:12]} by {made.author}")
    click.echo(made.stat)
    click.echo("left to you, when you have read the commit:")
    for line in made.left:
        click.echo(f"  {line}")
    return int(Exit.AS_EXPECTED)
