"""GitHub Markdown that stays valid with any text in it."""

import html
import re
from collections.abc import Callable

#: Terminal escape sequences, and the control characters that no Markdown renderer shows.
ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")

#: Control characters of Latin-1, and characters without width or with a direction.
UNSEEN = re.compile("[\x80-\x9f\u200b-\u200f\u202a-\u202e\u2060-\u2069\ufeff]")

#: The start of a mention, a link, an image, a tag, an entity, code, emphasis, mathematics or an emoji; a commit, which
#: becomes a link; and what begins a heading, a list or a rule.
ACTIVE = re.compile(r"[\[\]<>`@&*~$]|://|www\.|__|#\d|:\w+:|\b[0-9a-f]{40}\b|^(?:#|[-+=|]|\d+[.)] )")


def plain(text: str) -> str:
    """Return text without terminal escapes and control characters, and with Unix line ends."""
    return ESCAPES.sub("", text.replace("\r\n", "\n").replace("\r", "\n"))


def _readable(text: str) -> str:
    """Return plain text without what a page does not show: other control characters, and changes of direction."""
    return UNSEEN.sub("", plain(text))


def fenced(text: str, language: str = "") -> str:
    """Put text into a code fence that no run of backticks inside can close."""
    content = _readable(text).rstrip("\n")
    longest = max((len(run) for run in re.findall(r"`+", content)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{content}\n{fence}"


def code(text: str, most: int = 240) -> str:
    """Write text of any origin as code on one line, in which no mention, link or tag is active.

    A text of more than `most` characters is cut and ends in dots.
    """
    line = " ".join(_readable(text).replace("`", "'").split())
    line = line if len(line) <= most else f"{line[:most]} ..."
    return f"`{line}`" if line else ""


def inert(text: str) -> str:
    """Write text of any origin on one line, as code if Markdown would interpret it."""
    line = " ".join(_readable(text).split())
    return code(text) if ACTIVE.search(line) else line


def details(summary: str, body: str) -> str:
    """Fold a body away; blank lines around it make GitHub render it as Markdown."""
    return f"<details>\n<summary>{html.escape(summary, quote=False)}</summary>\n\n{body.strip()}\n\n</details>\n"


def cell(text: str) -> str:
    """Make text fit into one cell of a table."""
    return html.escape(_readable(text), quote=False).replace("|", "\\|").replace("\n", " ").replace("`", "\\`")


def inert_cell(text: str) -> str:
    """Make text of any origin fit into one cell of a table."""
    return inert(text).replace("|", "\\|")


def table(header: list[str], rows: list[list[str]], write: Callable[[str], str] = cell) -> str:
    """Write a table; `write` makes a text fit into a cell."""
    cells = [[write(text) for text in row] for row in (header, *rows)]
    lines = [cells[0], ["---"] * len(header), *cells[1:]]
    return "\n".join(f"| {' | '.join(row)} |" for row in lines) + "\n"


def tail(text: str, most_bytes: int) -> str:
    """Return the last whole lines of a text that fit into `most_bytes` of UTF-8, below a note if lines are left out."""
    data = text.encode()
    if len(data) <= most_bytes:
        return text
    ending = data[-most_bytes:].decode(errors="ignore").partition("\n")[2]
    return f"[... the first {len(data) - len(ending.encode())} bytes are left out ...]\n{ending}"
