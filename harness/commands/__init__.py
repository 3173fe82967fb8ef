"""The command line: one module for each verb, imported only when the verb is called."""

import errno
import importlib
import io
import os
import signal
import sys
from typing import Any

import click

from harness import __version__
from harness.commands.options import PROGRAM_OPTIONS, Shared, see_also
from harness.core import Exit, HarnessError, terminal, unknown_name
from harness.core.files import NO_ROOM

VERBS = (
    "new",
    "list",
    "run",
    "sweep",
    "versions",
    "pr-verdict",
    "mutate",
    "upstream-tests",
    "fetch",
    "check",
    "report",
    "audit",
    "prune",
)

EPILOG = """\b
Exit statuses: 0 all is as pack.toml expects; 1 something deviates;
  2 the call, or a pack's definition, is wrong; 5 nothing was judged;
  130 interrupted, and what was finished is kept
"""


class Verbs(click.Group):
    """Imports the module of a verb only when the verb is called: `list` must not pay for the imports of `report`."""

    def list_commands(self, _: click.Context) -> list[str]:
        """List the verbs in the order in which a user meets them."""
        return list(VERBS)

    def get_command(self, _: click.Context, name: str) -> click.Command:
        """Return the verb's command. If there is no such verb, the HarnessError suggests similar ones."""
        if name not in VERBS:
            raise unknown_name("command", name, VERBS, "runner.py --help")
        command: click.Command = importlib.import_module(f"harness.commands.{name.replace('-', '_')}").command
        command.epilog = see_also(command)
        return command


@click.command(cls=Verbs, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="runner.py")
@click.pass_context
def cli(context: click.Context, /, **values: Any) -> None:  # noqa: ANN401 - click passes each option by name
    """Prove upstream bugs, and prove that patches fix them.

    A pack holds a script, a contract and a patch. Both files run on the unpatched release (BUG_REPRODUCED) and on the
    same release with the patch (FIX_VALIDATED). Together that is CONFIRMED. Begin with: runner.py list

    The options may also stand after a command that uses them. REPRODUCER_PACKS_PACKS, _CACHE, _OFFLINE and _MIRRORS
    are variables for the first four.
    """
    context.obj = Shared(**values)


cli.params[:0] = PROGRAM_OPTIONS


def main() -> int:
    """Run the command line and return its exit status; an expected error is one line on standard error."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # a file name may be invalid UTF-8
    try:
        status = cli.main(standalone_mode=False)
        sys.stdout.flush()
    except HarnessError as error:
        terminal.echo(f"error: {error}", err=True)
        return error.status
    except click.ClickException as error:
        error.show()
        return Exit.WRONG_CALL
    except (KeyboardInterrupt, click.Abort) as error:
        message = str(error.__cause__ or error)  # click raises its own exception from the interrupt
        terminal.echo(f"interrupted: {message}" if message else "interrupted", err=True)
        return Exit.INTERRUPTED
    except OSError as error:
        if error.filename is not None or error.errno not in {*NO_ROOM, errno.EPIPE}:
            raise
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at exit
        if error.errno == errno.EPIPE:
            return Exit.AS_EXPECTED
        terminal.echo(f"error: standard output cannot be written ({error.strerror}). Next: free room for it", err=True)
        return Exit.DEVIATES
    return int(status or 0)
