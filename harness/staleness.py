"""Whether a receipt still speaks of the pack beside it."""

from __future__ import annotations

from pathlib import Path

from harness import companions, files, freshness
from harness.errors import HarnessError
from harness.host import Host, python_tag
from harness.pack import Pack
from harness.plan import evidence_here
from harness.receipt import Hashed, Receipt


def _changed(path: Path, recorded: Hashed | None) -> bool:
    if recorded is None or not path.exists():
        return path.exists()
    return files.sha256_file(path) != recorded.sha256 and freshness.meaning(path) != recorded.meaning


def reasons(pack: Pack, receipt: Receipt) -> list[str]:
    """Say why a receipt is STALE; nothing where it is fresh."""
    definition = pack.definition
    found = ["the probe changed"] if _changed(pack.probe, receipt.probe) else []
    head = definition.head is not None and receipt.upstream.version.endswith(definition.head.commit)
    if receipt.patch is not None and _changed(pack.head_patch if head else pack.patch, receipt.patch):
        found.append("the patch changed")
    if receipt.upstream.origin == "pinned" and receipt.upstream.sha256 != definition.upstream.sha256:
        found.append("the pinned release changed")
    target = definition.targets.get(receipt.target)
    if target is None or receipt.evidence not in target.evidence:
        found.append(f"pack.toml lists no {receipt.evidence} evidence for {receipt.target}")
    elif receipt.companions.name == target.companions:
        found += _companion_reason(pack, receipt)
    return found


def _companion_reason(pack: Pack, receipt: Receipt) -> list[str]:
    try:
        here = companions.named(pack.definition, receipt.companions.name, python_tag(receipt.host.python))
    except HarnessError:
        return ["its companion set is gone"]
    return [] if here.sha256 == receipt.companions.sha256 else ["the companion set changed"]


def rerunnable(pack: Pack, receipt: Receipt, host: Host) -> bool:
    """Whether this host could produce the receipt anew: the target with at least that evidence."""
    target = pack.definition.targets.get(receipt.target)
    here = evidence_here(host, receipt.target, target) if target else None
    return here is not None and here.rank <= receipt.evidence.rank
