"""What a new pack still lacks: what an issue is better with, and what this repository asks of a pack besides."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.pack.model import Pack
from harness.receipt import receipt

OPEN = re.compile(r"\bTODO\b[:. ]*(?P<what>[^\n\"]*)")
#: Findings of `check` on a new pack that a step says already.
TOLD = re.compile(r"report\.in\.md: |README\.md: not what|[a-z0-9_]+: no receipt\.")


def is_new(pack: Pack) -> bool:
    """Whether a pack was never recorded: then its steps say what its report and receipts lack."""
    return not any(receipt.paths(pack.receipts))


def is_half_written(pack: Pack) -> bool:
    """Whether a pack still lacks a text that only its author can write, or its receipts and its page."""
    return bool(list(_open(pack))) or (not pack.report.exists() and is_new(pack))


def steps(pack: Pack) -> list[str]:
    """List what is missing, one line each, the next step first."""
    found = [f"to file an issue: {one}" for one in _open(pack)]
    if is_new(pack):
        found.insert(0, f"to file an issue: runner.py run {pack.name}, then runner.py report {pack.name} --from last")
        found.append(f"to be admitted here: runner.py run {pack.name} --record, then report {pack.name} --write")
    if not pack.contract.exists():
        found.append("to be admitted here: contract.py: a control that is right with the bug and without it")
    if pack.definition.has_patch and not pack.patch.exists():
        found.append("to be admitted here: fix.patch, made with git diff --full-index")
    return found


def _open(pack: Pack) -> Iterator[str]:
    for name in ("pack.toml", "report.in.md", "fix.patch"):
        path = pack.folder / name
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace").partition("diff --git ")[0]
            yield from (f"{name}: {match['what'] or 'TODO stands there'}" for match in OPEN.finditer(text))
