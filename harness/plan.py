"""What of a pack this host can show: targets, and the strongest evidence for each."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from harness.definition import Target
from harness.errors import HarnessError
from harness.host import Host
from harness.pack import Pack
from harness.words import Evidence, is_target


@dataclass(frozen=True)
class Planned:
    """One target of one pack: with its evidence, or with the reason why it cannot be judged here."""

    target: str
    evidence: Evidence | None
    reason: str = ""


def evidence_here(host: Host, name: str, target: Target) -> Evidence | None:
    """Return the strongest evidence that pack.toml admits and this host can produce; None where there is none."""
    for evidence in sorted(target.evidence, key=lambda kind: kind.rank):
        if evidence != Evidence.EXECUTED or name in host.gpu_targets:
            return evidence
    return None


def _out_of_range(pack: Pack, host: Host) -> str:
    requires = pack.definition.requires
    for what, wanted, found in (
        ("Python", requires.python, host.python),
        ("torch", requires.torch, host.torch),
        ("triton", requires.triton, host.triton),
    ):
        if found and wanted and not SpecifierSet(wanted).contains(found.partition("+")[0], prereleases=True):
            return f"{what} {found} is outside the pack's range {wanted}"
    return ""


def _one(pack: Pack, name: str, host: Host) -> Planned:
    targets = pack.definition.targets
    if name not in targets:
        return Planned(name, None, f"this pack lists {', '.join(targets)}")
    reason = _out_of_range(pack, host)
    evidence = evidence_here(host, name, targets[name])
    if evidence is None:
        reason = f"no {name} GPU here, and the pack admits only executed"
    return Planned(name, None if reason else evidence, reason)


def plan(pack: Pack, wanted: str, host: Host) -> list[Planned]:
    """List the targets to judge: ``auto`` (this host's GPU, else cpu), ``all`` (what this host can show), or one.

    Raises:
        HarnessError: `wanted` is no target.

    """
    if wanted == "auto":
        return [_one(pack, host.auto_target, host)]
    if wanted != "all":
        if not is_target(wanted):
            raise HarnessError(
                f"no target {wanted!r}. Choices: auto, all, cpu, sm_80, sm_90a and the like "
                "(with the suffix from sm_90 on). Next: runner.py list"
            )
        return [_one(pack, wanted, host)]
    every = [_one(pack, name, host) for name in pack.definition.targets]
    shown = [planned for planned in every if planned.evidence is not None]
    return shown or every[:1]
