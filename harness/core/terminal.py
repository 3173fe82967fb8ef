"""What reaches a terminal: text from outside must not move its cursor, set its title or hide a line."""

from __future__ import annotations

import io
from collections.abc import Iterable
from typing import TYPE_CHECKING

import click

from harness.core import markdown

if TYPE_CHECKING:
    from rich.table import Table

#: Characters: tables of verdicts are as wide as a wide terminal.
WIDTH = 160


def visible(text: str) -> str:
    """Return text with Unix line ends, without terminal escapes, and with what cannot be seen as its escape."""
    return "".join(
        one if one in "\n\t" or one.isprintable() else one.encode("unicode_escape").decode()
        for one in markdown.plain(text)
    )


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print text as it can be seen: on standard output, or with `err` on standard error; `nl` ends the line."""
    click.echo(visible(str(text)), err=err, nl=nl)


def rendered(parts: Iterable[Table | str]) -> str:
    """Write tables and lines, none of which ends in a blank."""
    from rich.console import Console  # noqa: PLC0415 - 40 ms that `list` does without

    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{text.rstrip()}\n" for text in stream.getvalue().splitlines())
