"""The headings of an upstream's own issue template: read from a checkout of it, or from a file."""

from __future__ import annotations

import re
from pathlib import Path

from harness.core.errors import HarnessError

FOLDERS = (".github/ISSUE_TEMPLATE", ".github", "docs", ".")
BUG = re.compile(r"(?i)bug|issue_template")
#: Of a form: the labels of what is typed, in the order of the form.
LABEL = re.compile(r"^\s+label:\s*(?P<label>.+?)\s*$", re.MULTILINE)
TYPE = re.compile(r"^\s*-\s*type:\s*(?P<type>\w+)", re.MULTILINE)
HEADING = re.compile(r"^(?:#{1,4}\s+(?P<heading>.+?)|\*\*(?P<bold>[^*]+)\*\*:?)\s*$", re.MULTILINE)
TYPED = {"textarea", "input", "dropdown"}


def find(place: Path) -> Path:
    """Return the template of a bug report: the file itself, or that of a checkout.

    Raises:
        HarnessError: there is none.

    """
    if place.is_file():
        return place
    for folder in FOLDERS:
        found = sorted(path for path in (place / folder).glob("*") if path.suffix in {".md", ".yml", ".yaml"})
        for path in found:
            if BUG.search(path.stem) and path.stem.lower() != "config":
                return path
    raise HarnessError(f"--template {place}: no template of a bug report. Next: name the file itself")


def headings(path: Path) -> list[str]:
    """List what a template asks for: the headings of its Markdown, or the labels of the fields of its form.

    Raises:
        HarnessError: it asks for nothing that can be read.

    """
    text = path.read_text(encoding="utf-8", errors="replace")
    found = _of_form(text) if path.suffix in {".yml", ".yaml"} else _of_markdown(text)
    if not found:
        raise HarnessError(
            f"--template {path.name}: neither headings nor fields with a label. Next: without --template"
        )
    return list(dict.fromkeys(found))


def _of_form(text: str) -> list[str]:
    parts = TYPE.split(text)[1:]
    fields = zip(parts[::2], parts[1::2], strict=True)
    labels = (LABEL.search(body) for kind, body in fields if kind in TYPED)
    return [match["label"].strip("\"'") for match in labels if match]


def _of_markdown(text: str) -> list[str]:
    body = re.sub(r"\A---\n.*?\n---\n", "", text, flags=re.DOTALL)
    return [(match["heading"] or match["bold"]).strip("#: ") for match in HEADING.finditer(body)]
