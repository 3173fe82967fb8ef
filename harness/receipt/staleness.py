"""Whether a receipt still speaks of the pack beside it."""

from __future__ import annotations

from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError
from harness.host.eligibility import evidence_here
from harness.host.host import Host, python_tag
from harness.pack import judges
from harness.pack.model import Pack
from harness.receipt.receipt import DependencyRecord, FixRecord, Hashed, Receipt
from harness.upstream import dependencies

#: Why a receipt or a record of another day is STALE.
PATCH_CHANGED = "the patch changed"


def changed(path: Path, recorded: Hashed | FixRecord) -> bool:
    """Whether a patch means something else than when it was recorded, or is gone."""
    if not path.exists():
        return True
    return files.sha256_file(path) != recorded.sha256 and judges.meaning(path) != recorded.meaning


def reasons(pack: Pack, receipt: Receipt) -> list[str]:
    """Say why a receipt is STALE; nothing where it is fresh."""
    definition = pack.definition
    found = [judges.CHANGED] if judges.changed(pack, receipt.probe.sha256, receipt.probe.meaning) else []
    fix = receipt.fix
    if fix is not None and changed(pack.folder / Path(fix.name).name, fix):
        found.append(PATCH_CHANGED)
    pinned, recorded = definition.upstream, receipt.upstream
    same = recorded.commit == pinned.commit if pinned.is_commit else recorded.sha256 == pinned.sha256
    if recorded.origin == "pinned" and not same:
        found.append("the pinned release changed")
    target = definition.targets.get(receipt.target)
    if target is None:
        return found  # a GPU that pack.toml does not list: it states nothing that could have changed
    if receipt.evidence not in target.evidence:
        found.append(f"pack.toml lists no {receipt.evidence} evidence for {receipt.target}")
    elif receipt.dependencies.name == target.dependencies:
        found += dependency_reasons(pack, target.dependencies, receipt.dependencies, receipt.host.python)
    return found


def dependency_reasons(pack: Pack, name: str, recorded: DependencyRecord, python: str) -> list[str]:
    """Say whether a dependency set of the pack is another now, for the Python that it was recorded with."""
    try:
        here = dependencies.named(pack.definition, name, python_tag(python))
    except HarnessError:
        return ["its dependency set is gone"]
    same = recorded.sha256 == here.sha256 or recorded.packages == here.versions
    return [] if same else ["the dependency set changed"]


def rerunnable(pack: Pack, receipt: Receipt, host: Host) -> bool:
    """Whether this host could produce the receipt anew: the target with at least that evidence."""
    target = pack.definition.targets.get(receipt.target)
    here = evidence_here(host, receipt.target, target) if target else None
    return here is not None and here.rank <= receipt.evidence.rank
