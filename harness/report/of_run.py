"""A report from the receipts of one run: it speaks of what that run judged, and says of the rest that it was not."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator

from harness.core.errors import HarnessError
from harness.core.words import NO_EXPECTATION, Exit, Verdict
from harness.pack.model import Pack
from harness.receipt import receipt
from harness.receipt.receipt import Receipt
from harness.upstream.source import SourceKind

#: A placeholder for something that a receipt of one target says; ``head:`` and ``ask:`` before that of another tree.
MEASURED = re.compile(
    r"\{\{(?:verdict|figure|number|check|versions):(?P<target>(?:(?:head|ask):)?[a-z0-9_]+)(?::[^{}]+)?\}\}"
)
#: A receipt with one of these says nothing of the bug.
UNJUDGED = {Verdict.ERROR, Verdict.UNSUPPORTED, Verdict.UNAVAILABLE}


def not_judged(target: str) -> str:
    """Write what stands in a text for a figure of a target that was not judged."""
    return f"[{target}: not judged]"


def not_measured(target: str) -> str:
    """Write what stands in a text for what a run did not measure of a target that it judged."""
    return f"[{target}: not measured]"


def template(text: str, judged: Collection[str]) -> str:
    """Leave out of a report's template the rows of tables that are only about targets which were not judged."""
    return "".join(line for line in text.splitlines(keepends=True) if not _is_about_others(line, judged))


def _is_about_others(line: str, judged: Collection[str]) -> bool:
    targets = {match["target"] for match in MEASURED.finditer(line)}
    return line.startswith("|") and bool(targets) and targets.isdisjoint(judged)


def receipts(pack: Pack) -> list[Receipt]:
    """Return the strongest receipt of each target that a run judged: those of pack.toml, then what it does not list.

    Raises:
        HarnessError: the run judged nothing of the pack, or another tree than the one that the report is about.

    """
    best = receipt.strongest(receipt.load_all(pack.receipts))
    again = f"Next: runner.py run {pack.name}, then report {pack.name} --from last"
    others = [one for one in best.values() if one.upstream.origin != SourceKind.PINNED]
    if others:
        raise HarnessError(
            f"{pack.name}: that run judged {others[0].upstream.version} ({others[0].upstream.origin}), and the report "
            f"is about the pinned {pack.definition.upstream.pin}. {again}"
        )
    order = dict.fromkeys((*pack.definition.targets, *best))
    judged = [best[name] for name in order if name in best and best[name].verdict not in UNJUDGED]
    if not judged:
        said = ", ".join(f"{one.target} gave {one.verdict}" for one in best.values())
        raise HarnessError(
            f"{pack.name}: that run judged nothing of it{f' ({said})' if said else ''}. {again}",
            status=Exit.NOTHING_JUDGED,
        )
    return judged


def scope(pack: Pack, judged: list[Receipt], text: str) -> str:
    """Say which targets a run judged, which it did not, and what of the template's text comes from elsewhere."""
    names = {one.target for one in judged}
    failed = {one.target: one for one in receipt.load_all(pack.receipts) if one.verdict in UNJUDGED}
    said = [f"Filled from one run, which judged {', '.join(_judged(pack, one) for one in judged)}."]
    rest = [name for name in dict.fromkeys((*pack.definition.targets, *failed)) if name not in names]
    if rest:
        shown = (f"{name} ({failed[name].verdict})" if name in failed else name for name in rest)
        said.append(f"Not judged in it: {', '.join(shown)}; what is said of these below is the pack's own.")
    if "{{data:" in text or "{{table:" in text:
        said.append("Figures from files in the pack's `data/` were measured elsewhere.")
    return " ".join(said)


def _judged(pack: Pack, one: Receipt) -> str:
    listed = one.target in pack.definition.targets
    return f"{one.target} ({one.evidence}{'' if listed else f'; {NO_EXPECTATION}: the pack does not list it'})"


def with_scope(body: str, said: str) -> str:
    """Put that paragraph behind a report's title, or before everything where it has none."""
    return "\n\n".join(_parts(body, said))


def _parts(body: str, said: str) -> Iterator[str]:
    title, _, rest = body.partition("\n")
    if title.startswith("# "):
        yield title
        yield said
        yield rest.strip()
    else:
        yield said
        yield body
