"""Output to a terminal: text of any origin must not move the cursor, set the title or hide a line."""

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
    """Return text with Unix line ends, without terminal escapes, and with visible escapes of invisible characters."""
    lines = markdown.plain(text).split("\n")
    return "\n".join(line if line.isprintable() else "".join(map(_escaped, line)) for line in lines)


def _escaped(character: str) -> str:
    is_visible = character == "\t" or character.isprintable()
    return character if is_visible else character.encode("unicode_escape").decode()


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print visible text on standard output, or with `err` on standard error; `nl` ends the line."""
    click.echo(visible(str(text)), err=err, nl=nl)


def render(parts: Iterable[Table | str]) -> str:
    """Write tables and lines without blanks at their ends."""
    from rich.console import Console  # noqa: PLC0415 - 40 ms that `list` does without

    stream = io.StringIO()
    console = Console(file=stream, width=WIDTH, highlight=False, markup=False, emoji=False)
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    return "".join(f"{text.rstrip()}\n" for text in stream.getvalue().splitlines())
