"""How long the lanes of a pack took, from its committed receipts."""

from __future__ import annotations

import json

from harness.pack import Pack


def of_pack(pack: Pack) -> dict[tuple[str, str], float]:
    """Read the seconds of a pack's lanes by receipt (``TARGET.EVIDENCE``) and lane.

    Receipts that cannot be read are `check`'s business.
    """
    found: dict[tuple[str, str], float] = {}
    for path in pack.receipts.glob("*.json"):
        try:
            lanes = json.loads(path.read_text(encoding="utf-8"))["lanes"]
            found |= {(path.stem, name): float(lane["seconds"]) for name, lane in lanes.items()}
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            continue
    return found
