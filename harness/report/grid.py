"""What receipts say of each pack and target: the verdict, its evidence, and whether the receipt is fresh."""

from __future__ import annotations

from dataclasses import dataclass

from harness.core.words import NO_EXPECTATION
from harness.pack.model import Pack
from harness.receipt import receipt, staleness, strength
from harness.receipt.receipt import Receipt

FRESH, STALE, NONE = "fresh", "STALE", "none"


@dataclass(frozen=True)
class Entry:
    """One pack on one target: the strongest evidence that a receipt holds for it.

    `state` is fresh, STALE, none or "no expectation"; `strength` says how many mutants the checks refused, and is
    empty where nobody measured it.
    """

    target: str
    verdict: str = ""
    evidence: str = ""
    state: str = NONE
    why_stale: tuple[str, ...] = ()
    gpu: str = ""
    strength: str = ""


def entry(pack: Pack, target: str, best: Receipt | None) -> Entry:
    """Build the entry of one pack and target."""
    if best is None:
        return Entry(target, strength=strength.text(pack, target, ""))
    why = tuple(staleness.reasons(pack, best))
    return Entry(
        target=target,
        verdict=best.verdict,
        evidence=best.evidence,
        state=STALE if why else FRESH if target in pack.definition.targets else NO_EXPECTATION,
        why_stale=why,
        gpu=best.host.gpu,
        strength=strength.text(pack, target, best.evidence),
    )


def of_pack(pack: Pack, receipts: list[Receipt]) -> list[Entry]:
    """Build the entries of a pack, one for each target that pack.toml lists, then for those that it does not."""
    best = receipt.strongest(receipts)
    return [entry(pack, target, best.get(target)) for target in dict.fromkeys((*pack.definition.targets, *best))]
