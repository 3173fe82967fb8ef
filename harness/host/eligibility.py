"""What of a pack this host can show: targets, and the strongest evidence for each."""

from __future__ import annotations

from dataclasses import dataclass

from packaging.specifiers import SpecifierSet

from harness.core.errors import HarnessError
from harness.core.words import Evidence, Exit, is_target
from harness.host.host import Host
from harness.pack.model import Pack, Target


@dataclass(frozen=True)
class Planned:
    """One target of one pack: with its evidence, or with the reason why it cannot be judged here."""

    target: str
    evidence: Evidence | None
    reason: str = ""


def evidence_here(host: Host, name: str, target: Target) -> Evidence | None:
    """Return the strongest evidence that pack.toml admits and this host can produce; None where there is none."""
    for evidence in sorted(target.evidence, key=lambda kind: kind.rank):
        if evidence != Evidence.EXECUTED or host.count(name) >= target.gpus:
            return evidence
    return None


def out_of_range(pack: Pack, host: Host) -> str:
    """Say which of Python, torch and triton lies outside a pack's range here; empty where none does."""
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
    targets, stated = pack.definition.targets, pack.definition.stated(name)
    listed = f"this pack lists {', '.join(targets)}"
    if not stated.evidence:
        return Planned(name, None, listed)
    reason = out_of_range(pack, host)
    evidence = evidence_here(host, name, stated)
    if evidence is None:
        here = f"{host.count(name)} of {stated.gpus} {name} GPUs" if host.count(name) else f"no {name} GPU"
        reason = f"{here} here, and {'the pack admits only executed' if name in targets else listed}"
    return Planned(name, None if reason else evidence, reason)


def plan(pack: Pack, wanted: str, host: Host) -> list[Planned]:
    """List the targets to judge: ``auto`` (this host's GPU, else cpu), ``all`` (what this host can show), or one.

    A GPU of this host is judged whether the pack lists it or not; of one that is not listed nothing is expected.
    HarnessError is raised where `wanted` is no target.
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
    targets = pack.definition.targets
    executes = any(Evidence.EXECUTED in target.evidence for target in targets.values())
    # What pack.toml does not list is judged, too: its list says what somebody has seen, not where the pack can run
    others = [gpu.target for gpu in host.gpus if executes and gpu.target not in targets]
    every = [_one(pack, name, host) for name in dict.fromkeys([*targets, *others])]
    return [planned for planned in every if planned.evidence is not None] or every[:1]


def first(pack: Pack, wanted: str, host: Host) -> tuple[str, Evidence]:
    """Return the one target to judge, and how; ``auto`` is this host's GPU, else cpu, else the first that it can show.

    HarnessError is raised where this host can show none of them, or `wanted` is no target.
    """
    planned = [*plan(pack, wanted, host), *(plan(pack, "all", host) if wanted == "auto" else [])]
    for one in planned:
        if one.evidence is not None:
            return one.target, one.evidence
    raise HarnessError(f"{pack.name}: {planned[0].reason}", status=Exit.NOTHING_JUDGED)
