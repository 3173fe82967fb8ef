"""What made a verdict change between two trees of an upstream: which release, then which of its commits.

It takes it that there is one change between the two. Both are judged again, now and here: what they gave on another
day may have had another cause.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from packaging.version import Version

from harness.core.errors import HarnessError
from harness.upstream import checkout, release_tag
from harness.versions import candidates, git_bisect, release_bisect, timeline
from harness.versions.candidates import Candidate
from harness.versions.judging import Judging, LaneNotRunError
from harness.versions.timeline import Entry

#: Told of each step.
Tell = Callable[[str], None]


def releases(judging: Judging, old: str, new: str, tell: Tell) -> list[str]:
    """Say which release between two made the verdict change, and which of its commits, or why that cannot be told.

    Args:
        judging: the pack and target.
        old: the earlier release.
        new: the later one.
        tell: told of each step.

    Raises:
        InterruptedJudgingError: the user interrupted.
        KeyboardInterrupt: likewise.

    """
    if Version(new) <= Version(old):
        same = f"the release is the same, {new}" if Version(new) == Version(old) else f"{new} is older than {old}"
        return [f"not bisected: {same}"]
    known: dict[int, Entry] = {}
    try:
        listed = _listed(judging, old, new)
        _search(judging, listed, known, tell)
    except HarnessError as error:
        return [_so_far(judging, old, new, known, error)]
    rows = [known[index] for index in sorted(known)]
    why = _no_change(rows)
    if why:
        return [why]
    found = timeline.boundary(rows)
    return [found.text, _commit_of(judging, found.before.label, found.after.label, tell)]


def _listed(judging: Judging, old: str, new: str) -> list[Candidate]:
    """List the releases from one to another; both have to be there."""
    listed = candidates.releases(judging.session.cache, judging.pack, f">={old},<={new}")
    for wanted, one in ((old, listed[0]), (new, listed[-1])):
        if Version(one.label) != Version(wanted):
            raise HarnessError(f"the package index does not list {wanted}")
    return listed


def _search(judging: Judging, listed: list[Candidate], known: dict[int, Entry], tell: Tell) -> None:
    """Judge both ends, and between them what decides; `known` takes every entry at once."""
    last = len(listed) - 1

    def judge(indices: set[int]) -> dict[int, Entry]:
        found = judging.needed({index: listed[index] for index in sorted(indices)})
        for entry in found.values():
            tell(f"{entry.label} {entry.verdict}")
        return found

    known |= judge({0, last})
    if not _no_change([known[0], known[last]]):
        release_bisect.drive([release_bisect.narrow(0, last)], known, judge)


def _no_change(rows: list[Entry]) -> str:
    """Say why there is nothing to search between the first row and the last; empty where there is."""
    for end in (rows[0], rows[-1]):
        if not end.is_judged:
            reason = f" ({end.reason})" if end.reason else ""
            return f"not bisected: {end.label} gives {end.verdict} now{reason}, which is neither right nor wrong"
    if rows[0].verdict == rows[-1].verdict:
        return f"no release did it: {rows[0].label} gives {rows[0].verdict} now as well, so something else here changed"
    return ""


def _so_far(judging: Judging, old: str, new: str, known: dict[int, Entry], error: HarnessError) -> str:
    """Say between which releases it lies, as far as that is known, and why not more is."""
    rows = [known[index] for index in sorted(known)]
    if rows and not _no_change(rows):
        found = timeline.boundary(rows)
        old, new = found.before.label, found.after.label
    why = f"no time was left: {error}" if isinstance(error, LaneNotRunError) else str(error)
    package, number = judging.pack.definition.upstream.package, judging.pack.name.partition("_")[0]
    return (
        f"which release of {package} from {old} to {new} did it cannot be told ({why}). "
        f"Next: runner.py versions {number} --target {judging.target} --range '>={old},<={new}'"
    )


def _commit_of(judging: Judging, before: str, after: str, tell: Tell) -> str:
    """Say which commit between two releases did it."""
    upstream = judging.pack.definition.upstream
    if upstream.is_compiled:
        return "which commit did it is not asked: a commit would have to be built"
    try:
        mirror = checkout.history(judging.session.cache, upstream.repository)
        ends = tuple(_tagged(judging, mirror, release) for release in (before, after))
        found = git_bisect.between(judging, upstream.repository, (ends[0], ends[1]), (), tell)
    except HarnessError as error:
        return _unknown_commit(error)
    return f"its commit: {found.commit}"


def _tagged(judging: Judging, mirror: Path, release: str) -> str:
    """Return the commit of a release: its tag's, else what pack.toml names."""
    upstream = judging.pack.definition.upstream
    commit = release_tag.commit_of(str(mirror), upstream.package, release, mirror)
    commit = commit or (upstream.commit if release == upstream.version else "")
    if not commit:
        raise HarnessError(f"the repository has no tag of {release}")
    return git_bisect.commit_of(mirror, commit)


def commits(judging: Judging, old: str, new: str, tell: Tell) -> list[str]:
    """Say which commit of the upstream's repository made the verdict change, or why that cannot be told.

    Args:
        judging: the pack and target.
        old: the earlier commit, by its 40 digits, or a release.
        new: the later commit, likewise.
        tell: told of each step.

    Raises:
        KeyboardInterrupt: the user interrupted.

    """
    if old == new:
        return ["not bisected: the commit is the same"]
    url = judging.pack.definition.upstream.repository
    try:
        mirror = checkout.history(judging.session.cache, url)
        first = git_bisect.commit_of(mirror, old) if len(old) == len(new) else _tagged(judging, mirror, old)
        return [git_bisect.between(judging, url, (first, new), (), tell).line]
    except HarnessError as error:
        return [_unknown_commit(error)]


def _unknown_commit(error: HarnessError) -> str:
    why = f"no time was left: {error}" if isinstance(error, LaneNotRunError) else str(error)
    return f"which commit did it cannot be told ({why.partition('. Next:')[0]})"
