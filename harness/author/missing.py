"""What a new pack still lacks, first for an issue, then for this repository."""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.pack.model import Pack
from harness.receipt import receipt

TODO = re.compile(r"\bTODO\b[:. ]*(?P<text>[^\n\"]*)")
#: Findings of `check` on a new pack that `steps` says already.
TOLD = re.compile(r"report\.in\.md: |README\.md: not what|[a-z0-9_]+: no receipt\.")


def is_new(pack: Pack) -> bool:
    """Whether a pack has no receipt. `steps` then names what its report and receipts lack."""
    return not any(receipt.paths(pack.receipts))


def is_half_written(pack: Pack) -> bool:
    """Whether a pack has a TODO, or neither a receipt nor a README.md."""
    return any(_todos(pack)) or (not pack.report.exists() and is_new(pack))


def steps(pack: Pack) -> list[str]:
    """List what is missing, a line each, the next step first."""
    lines = [f"to file an issue: {todo}" for todo in _todos(pack)]
    if is_new(pack):
        lines.insert(0, f"to file an issue: runner.py run {pack.name}, then runner.py report {pack.name} --from last")
        lines.append(f"to be admitted here: runner.py run {pack.name} --record, then report {pack.name} --write")
    if not pack.contract.exists():
        lines.append("to be admitted here: contract.py: a control that is right with the bug and without it")
    if pack.definition.has_patch and not pack.patch.exists():
        lines.append("to be admitted here: fix.patch, made with git diff --full-index")
    return lines


def _todos(pack: Pack) -> Iterator[str]:
    for name in ("pack.toml", "report.in.md", "fix.patch"):
        path = pack.folder / name
        if path.exists():
            text = path.read_text(encoding="utf-8", errors="replace").partition("diff --git ")[0]
            yield from (f"{name}: {match['text'] or 'TODO stands there'}" for match in TODO.finditer(text))
