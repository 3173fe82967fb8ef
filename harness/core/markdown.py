"""GitHub Markdown that stays valid whatever is put into it."""

from __future__ import annotations

import re
from collections.abc import Callable

#: Terminal escape sequences, and the control characters that no Markdown renderer shows.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

#: What begins a mention, a link, an image, a tag, an entity, code or emphasis.
ACTIVE = re.compile(r"[\[\]<>`@&*~]|://|www\.")


def plain(text: str) -> str:
    """Return text without terminal escapes and control characters, and with Unix line ends."""
    return ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def fenced(text: str, language: str = "") -> str:
    """Put text into a code fence that no run of backticks inside can close."""
    content = plain(text).rstrip("\n")
    longest = max((len(run) for run in re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{content}\n{fence}"


def code(text: str, most: int = 240) -> str:
    """Write text of any origin as code on one line: in it no mention, link or tag comes to life.

    What is longer than `most` characters is cut, and says so.
    """
    shown = " ".join(plain(text).replace("`", "'").split())
    shown = shown if len(shown) <= most else f"{shown[:most]} ..."
    return f"`{shown}`" if shown else ""


def inert(text: str) -> str:
    """Write text of any origin on one line: as code where Markdown would make something of it."""
    shown = " ".join(plain(text).split())
    return code(text) if ACTIVE.search(shown) else shown


def details(summary: str, body: str) -> str:
    """Fold a body away; blank lines around it make GitHub render it as Markdown."""
    return f"<details>\n<summary>{escaped(summary)}</summary>\n\n{body.strip()}\n\n</details>\n"


def escaped(text: str) -> str:
    """Escape what HTML would read as a tag."""
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")


def cell(text: str) -> str:
    """Make text fit into one cell of a table."""
    return escaped(plain(text)).replace("|", "\\|").replace("\n", " ").replace("`", "\\`")


def inert_cell(text: str) -> str:
    """Make text of any origin fit into one cell of a table."""
    return inert(text).replace("|", "\\|")


def table(header: list[str], rows: list[list[str]], write: Callable[[str], str] = cell) -> str:
    """Write a table; `write` makes a text fit into a cell."""
    body = [[write(text) for text in line] for line in (header, *rows)]
    written = [body[0], ["---"] * len(header), *body[1:]]
    return "\n".join(f"| {' | '.join(line)} |" for line in written) + "\n"


def tail(text: str, most_bytes: int) -> str:
    """Return the last whole lines of a text that fit into `most_bytes` of UTF-8, and say so where it was cut."""
    data = text.encode()
    if len(data) <= most_bytes:
        return text
    kept = data[-most_bytes:].decode(errors="ignore").partition("\n")[2]
    return f"[... the first {len(data) - len(kept.encode())} bytes are left out ...]\n{kept}"
