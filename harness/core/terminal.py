"""What reaches a terminal: text from outside must not move its cursor, set its title or hide a line."""

from __future__ import annotations

import click

from harness.core import markdown


def visible(text: str) -> str:
    """Return text with Unix line ends, without terminal escapes, and with what cannot be seen as its escape."""
    return "".join(
        one if one in "\n\t" or one.isprintable() else one.encode("unicode_escape").decode()
        for one in markdown.plain(text)
    )


def echo(text: object, *, err: bool = False, nl: bool = True) -> None:
    """Print text as it can be seen: on standard output, or with `err` on standard error; `nl` ends the line."""
    click.echo(visible(str(text)), err=err, nl=nl)
