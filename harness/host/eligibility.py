"""The targets of a pack that this host can judge, and the strongest evidence for each."""

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


def strongest_evidence(host: Host, name: str, target: Target) -> Evidence | None:
    """Return the strongest evidence that pack.toml admits and this host can produce; None if there is none."""
    executes = host.count(name) > 0
    available = (evidence for evidence in target.evidence if executes or evidence != Evidence.EXECUTED)
    return min(available, key=lambda evidence: evidence.rank, default=None)


def version_mismatch(pack: Pack, host: Host) -> str:
    """Name a version of Python, torch or triton that is outside the pack's range; empty if none is."""
    requires = pack.definition.requires
    for package, specifier, version in (
        ("Python", requires.python, host.python),
        ("torch", requires.torch, host.torch),
        ("triton", requires.triton, host.triton),
    ):
        if version and specifier and not SpecifierSet(specifier).contains(version.partition("+")[0], prereleases=True):
            return f"{package} {version} is outside the pack's range {specifier}"
    return ""


def _planned(pack: Pack, name: str, host: Host) -> Planned:
    targets, stated = pack.definition.targets, pack.definition.stated(name)
    listing = f"this pack lists {', '.join(targets)}"
    if not stated.evidence:
        return Planned(name, None, listing)
    reason = version_mismatch(pack, host)
    evidence = strongest_evidence(host, name, stated)
    if evidence is None:
        on_gpu = f"this pack judges {name} on a GPU alone"
        reason = f"no {name} GPU here, and {on_gpu if name in targets else listing}"
    return Planned(name, None if reason else evidence, reason)


def plan(pack: Pack, requested: str, host: Host) -> list[Planned]:
    """List the targets to judge: ``auto`` (this host's GPU, else cpu), ``all`` (that this host can judge), or one.

    A GPU of this host is judged even if the pack does not list it; then nothing is expected.
    HarnessError: `requested` is no target.
    """
    if requested == "auto":
        return [_planned(pack, host.auto_target, host)]
    if requested != "all":
        if not is_target(requested):
            raise HarnessError(
                f"no target {requested!r}. Choices: auto, all, cpu, sm_80, sm_90a and the like "
                "(with the suffix from sm_90 on). Next: runner.py list"
            )
        return [_planned(pack, requested, host)]
    targets = pack.definition.targets
    executes = any(Evidence.EXECUTED in target.evidence for target in targets.values())
    # pack.toml lists the targets that somebody has judged; the pack may run on others, too.
    unlisted = [gpu.target for gpu in host.gpus if executes and gpu.target not in targets]
    candidates = [_planned(pack, name, host) for name in dict.fromkeys([*targets, *unlisted])]
    return [planned for planned in candidates if planned.evidence is not None] or candidates[:1]


def first_target(pack: Pack, requested: str, host: Host) -> tuple[str, Evidence]:
    """Return one target and its evidence; ``auto`` is this host's GPU, else cpu, else the first that it can judge.

    HarnessError: this host can judge none, or `requested` is no target.
    """
    candidates = [*plan(pack, requested, host), *(plan(pack, "all", host) if requested == "auto" else [])]
    for candidate in candidates:
        if candidate.evidence is not None:
            return candidate.target, candidate.evidence
    raise HarnessError(f"{pack.name}: {candidates[0].reason}", status=Exit.NOTHING_JUDGED)
