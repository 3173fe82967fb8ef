"""Holds what an environment has against the records: one finding for each package and bug."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from packaging.version import Version

from harness.audit.environment import Environment, Named
from harness.audit.records import Advisory, State
from harness.core.words import Exit

NOBODY = "nobody judged this version"


@dataclass(frozen=True)
class Finding:
    """What is known of one bug in one package of an environment.

    Attributes:
        package: normalized.
        version: as the environment has it; empty where it names none.
        state: affected, not affected, or not judged.
        silent: whether nothing tells the user of the bug, which this version has only where `state` says so.
        what: goes wrong.
        kind: of bug.
        since: where it came in, as far as was judged; empty unless affected.
        fixed: where it went, likewise.
        evidence: how it was shown; empty where nothing was.
        reason: why it is not judged; of others what limits the statement, mostly nothing.
        link: to the report.
        workaround: that a check of the pack shows; may be empty.
        identifier: of the OSV record.
        place: where the environment names the package.

    """

    package: str
    version: str
    state: State
    silent: bool
    what: str
    kind: str
    since: str
    fixed: str
    evidence: tuple[str, ...]
    reason: str
    link: str
    workaround: str
    identifier: str
    place: str

    @property
    def order(self) -> tuple[int, str, str]:
        """What is affected in silence comes first, then what is affected, not judged, not affected."""
        rank = {State.AFFECTED: 1, State.NOT_JUDGED: 2, State.UNAFFECTED: 3}[self.state]
        return (0 if self.is_silently_affected else rank, self.package, self.identifier)

    @property
    def is_silently_affected(self) -> bool:
        """Whether this version has the bug, and nothing tells its user."""
        return self.state == State.AFFECTED and self.silent


def _limits(one: Named) -> str:
    """Say what keeps a statement on a release from holding for this package as it stands here."""
    local = Version(one.version).local
    found = [f"a local build ({local}) of the release that was judged"] if local else []
    found += [f"only where {one.marker}"] if one.marker else []
    return "; ".join(found)


def _finding(one: Named, advisory: Advisory) -> Finding:
    judged = advisory.of(one.version) if one.version and not one.reason else None
    state = judged.state if judged else State.NOT_JUDGED
    period = advisory.period_of(one.version) if judged and state == State.AFFECTED else None
    if judged is None:
        reason = one.reason
    elif state == State.NOT_JUDGED:
        reason = f"the test cannot judge it: {judged.reason}" if judged.reason else NOBODY
    else:
        reason = _limits(one)
    return Finding(
        package=one.name,
        version=one.version,
        state=state,
        silent=advisory.silent,
        what=advisory.title,
        kind=advisory.kind,
        since=period.since if period else "",
        fixed=period.fixed if period else "",
        evidence=judged.evidence if judged and state != State.NOT_JUDGED else (),
        reason=reason,
        link=advisory.link,
        workaround=advisory.workaround if state == State.AFFECTED else "",
        identifier=advisory.identifier,
        place=one.place,
    )


def find(environment: Environment, advisories: Iterable[Advisory]) -> list[Finding]:
    """List one finding for each bug that is known of each package, the worst first."""
    by_package: dict[str, list[Advisory]] = defaultdict(list)
    for advisory in advisories:
        by_package[advisory.package].append(advisory)
    found = [_finding(one, advisory) for one in environment.packages for advisory in by_package[one.name]]
    return sorted(found, key=lambda one: one.order)


def status(found: list[Finding]) -> Exit:
    """Return the exit status: 1 where something is affected in silence, 5 where nothing with a record was judged."""
    if any(one.is_silently_affected for one in found):
        return Exit.DEVIATES
    judged = [one for one in found if one.state != State.NOT_JUDGED]
    return Exit.NOTHING_JUDGED if found and not judged else Exit.AS_EXPECTED
