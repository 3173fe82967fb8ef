"""Whether a receipt still holds for the pack beside it."""

from pathlib import Path

from harness.core import HarnessError, files
from harness.host.eligibility import strongest_evidence
from harness.host.host import Host, python_tag
from harness.pack import Pack, judges, requirements
from harness.receipt.receipt import DependencyRecord, Hashed, PatchRecord, Receipt
from harness.upstream.source import SourceKind

#: A reason why a receipt or a record is STALE.
PATCH_CHANGED = "the patch changed"


def patch_changed(path: Path, recorded: Hashed | PatchRecord | None) -> bool:
    """Whether a patch came, is gone, or means something else than when it was recorded; None: there was none."""
    if recorded is None or not path.exists():
        return recorded is not None or path.exists()
    return files.sha256_file(path) != recorded.sha256 and judges.meaning(path) != recorded.meaning


def reasons(pack: Pack, receipt: Receipt) -> list[str]:
    """Say why a receipt is STALE; empty where it is fresh."""
    definition = pack.definition
    findings = [judges.CHANGED] if judges.changed(pack, receipt.probe.sha256, receipt.probe.meaning) else []
    fix = receipt.fix
    if fix is not None and patch_changed(pack.folder / Path(fix.name).name, fix):
        findings.append(PATCH_CHANGED)
    pinned, recorded = definition.upstream, receipt.upstream
    is_same = recorded.commit == pinned.commit if pinned.is_commit else recorded.sha256 == pinned.sha256
    if recorded.origin == SourceKind.PINNED and not is_same:
        findings.append("the pinned release changed")
    target = definition.targets.get(receipt.target)
    if target is None:
        return findings  # pack.toml does not list this GPU, and states nothing that could have changed
    if receipt.evidence not in target.evidence:
        findings.append(f"pack.toml lists no {receipt.evidence} evidence for {receipt.target}")
    elif receipt.dependencies.name == target.dependencies:
        findings += dependency_reasons(pack, target.dependencies, receipt.dependencies, receipt.host.python)
    return findings


def dependency_reasons(pack: Pack, name: str, recorded: DependencyRecord, python: str) -> list[str]:
    """Say how a dependency set of the pack changed, for the Python of the record; empty where it did not."""
    try:
        members = requirements.named_set(pack.definition, name, python_tag(python))
    except HarnessError:
        return ["its dependency set is gone"]
    is_same = recorded.sha256 == members.sha256 or recorded.packages == members.versions
    return [] if is_same else ["the dependency set changed"]


def rerunnable(pack: Pack, receipt: Receipt, host: Host) -> bool:
    """Whether this host can make the receipt anew, with evidence that is at least as strong."""
    target = pack.definition.targets.get(receipt.target)
    evidence = strongest_evidence(host, receipt.target, target) if target else None
    return evidence is not None and evidence.rank <= receipt.evidence.rank
