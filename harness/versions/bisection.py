"""Where a verdict changes, in about log2(n) lanes: among releases by halving, among commits by git's own bisection.

It is taken that the verdict changes once between two ends. What cannot be judged is skipped, and is never an answer.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from packaging.version import Version

from harness.core import git
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.upstream import checkout
from harness.versions import timeline
from harness.versions.judging import Candidate, Judging, LaneNotRunError, releases
from harness.versions.timeline import RIGHT, WRONG, Entry

#: Digits of a commit that people see.
SHOWN = 12
EXACT = re.compile(r"(?m)^([0-9a-f]{40}) is the first after commit")
SKIPPED = re.compile(r"(?m)^[0-9a-f]{40}$")
Tell = Callable[[str], None]
#: Judges the entry at an index.
Judge = Callable[[int], Entry]


@dataclass
class Known:
    """Judges each candidate when it is first asked for; `rows` are the entries by index, `tell` is told of each."""

    judging: Judging
    tell: Tell
    listed: list[Candidate]
    rows: dict[int, Entry] = field(default_factory=dict)

    def __call__(self, index: int) -> Entry:
        """Return the entry at an index."""
        if index not in self.rows:
            self.rows[index] = self.judging.one(self.listed[index])
            self.tell(f"{self.rows[index].label} {self.rows[index].verdict}")
        return self.rows[index]

    @property
    def entries(self) -> list[Entry]:
        """What was judged, in the order of the candidates."""
        return [self.rows[index] for index in sorted(self.rows)]


def narrow(judge: Judge, left: int, right: int) -> tuple[int, int]:
    """Judge between two judged entries of different verdicts, and return those between which nothing is judged."""
    first = judge(left).verdict
    skipped = set[int]()
    in_a_row = 0
    while untried := [index for index in range(left + 1, right) if index not in skipped]:
        middle = (left + right) // 2
        away = (1 << in_a_row) >> 1  # after skips in a row, at twice the distance for each
        far = [index for index in untried if abs(index - middle) >= away]
        index = min(far or untried, key=lambda index: abs(index - middle))
        entry = judge(index)
        in_a_row = 0 if entry.is_judged else in_a_row + 1
        if not entry.is_judged:
            skipped.add(index)
        elif entry.verdict == first:
            left = index
        else:
            right = index
    return left, right


def search(judge: Judge, end: int, anchor: int) -> None:
    """Judge what decides where the bug of the entry `anchor` begins or ends towards the entry `end`."""
    unjudged, reached = end, anchor
    if judge(end).is_judged:
        unjudged = reached = end
    while abs(reached - unjudged) > 1:
        middle = (reached + unjudged) // 2
        if judge(middle).is_judged:
            reached = middle
        else:
            unjudged = middle
    if judge(reached).verdict != WRONG:
        narrow(judge, min(reached, anchor), max(reached, anchor))


def around_the_bug(known: Known) -> None:
    """Judge what decides where the bug of the pinned release (or of the newest) begins and ends.

    HarnessError: that release does not have the bug, so there is nothing to search from. KeyboardInterrupt: the user
    interrupted; `known` holds what was judged.
    """
    last = len(known.listed) - 1
    anchor = next((index for index, candidate in enumerate(known.listed) if candidate.is_pinned), last)
    if known(anchor).verdict != WRONG:
        raise HarnessError(
            f"--bisect starts from {known(anchor).label}, which gives {known(anchor).verdict}. "
            "Next: the same without --bisect",
            status=Exit.DEVIATES,
        )
    search(known, 0, anchor)
    search(known, last, anchor)


def release_between(judging: Judging, old: str, new: str, tell: Tell) -> list[str]:
    """Say which release made the verdict change, and which of its commits, or why that cannot be told.

    Both ends are judged again, now and here: what they gave on another day may have had another cause. An interruption
    is KeyboardInterrupt.
    """
    upstream, number = judging.pack.definition.upstream, judging.pack.name.partition("_")[0]
    if Version(new) <= Version(old):
        return [f"not bisected: {new} is not newer than {old}"]
    try:
        known = Known(judging, tell, _between(judging, old, new))
        last = len(known.listed) - 1
        if why := _nothing_to_search(known(0), known(last)):
            return [why]
        before, after = (known.rows[index].label for index in narrow(known, 0, last))
    except HarnessError as error:
        next_step = f"runner.py versions {number} --target {judging.target} --range '>={old},<={new}'"
        what = f"which release of {upstream.package} from {old} to {new} did it"
        return [f"{what} cannot be told ({_why(error)}). Next: {next_step}"]
    text = timeline.boundary(known.entries)
    if upstream.is_compiled:
        return [text, "which commit did it is not asked: a commit would have to be built"]
    return [text, commit_between(judging, before, after, tell, "its commit:")]


def _between(judging: Judging, old: str, new: str) -> list[Candidate]:
    """List the releases from one to another; both have to be there."""
    listed = releases(judging.session.cache, judging.pack, f">={old},<={new}")
    missing = {Version(old), Version(new)} - {Version(candidate.label) for candidate in listed}
    if missing:
        raise HarnessError(f"the package index does not list {min(missing)}")
    return listed


def _nothing_to_search(old: Entry, new: Entry) -> str:
    """Say why there is nothing to search between two releases; empty where there is."""
    for entry in (old, new):
        if not entry.is_judged:
            reason = f" ({entry.reason})" if entry.reason else ""
            return f"not bisected: {entry.label} gives {entry.verdict} now{reason}, which is neither right nor wrong"
    if old.verdict == new.verdict:
        return f"no release did it: {old.label} gives {old.verdict} now as well, so something else here changed"
    return ""


def commit_between(judging: Judging, old: str, new: str, tell: Tell, intro: str = "") -> str:
    """Say which commit made the verdict change, or why that cannot be told; an interruption is KeyboardInterrupt.

    `old` and `new` are commits by their 40 digits, or releases. `intro` stands before the commit; empty: ``fixed in``
    or ``bug from``.
    """
    if old == new:
        return "not bisected: the commit is the same"
    try:
        mirror = checkout.history(judging.session.cache, judging.pack.definition.upstream.repository)
        ends = _commit_or_tag(judging, mirror, old), _commit_or_tag(judging, mirror, new)
        what, commit = commits(judging, mirror, ends, tell)
    except HarnessError as error:
        return f"which commit did it cannot be told ({_why(error)})"
    return f"{intro or what} {commit}"


def _why(error: HarnessError) -> str:
    prefix = "no time was left: " if isinstance(error, LaneNotRunError) else ""
    return prefix + str(error).partition(". Next:")[0]


def _commit_or_tag(judging: Judging, mirror: Path, name: str) -> str:
    """Return a commit as it is, and that of a release by its tag, or as pack.toml names it."""
    upstream = judging.pack.definition.upstream
    if not checkout.COMMIT.fullmatch(name):
        tagged = checkout.commit_of_tag(str(mirror), upstream.package, name, mirror)
        pinned = upstream.commit if name == upstream.version else ""
        if not tagged and not pinned:
            raise HarnessError(f"the repository has no tag of {name}")
        name = tagged or pinned
    if git.run(["cat-file", "-e", f"{name}^{{commit}}"], mirror).returncode:
        raise HarnessError(f"the repository has no commit {name}")
    return name


def commits(judging: Judging, mirror: Path, ends: tuple[str, str], tell: Tell) -> tuple[str, str]:
    """Find the commit between two, the earlier one first, named by all their digits, at which the verdict changes.

    It returns ``fixed in`` or ``bug from``, and the commit with its date and subject, or those that it is one of.

    `mirror` has the upstream's history. HarnessError: an end cannot be judged, or both give the same verdict.
    KeyboardInterrupt: the user interrupted.
    """
    cache, url = judging.session.cache, judging.pack.definition.upstream.repository

    def judge(commit: str) -> Entry:
        date = _show(mirror, commit, "%cd")
        entry = judging.one(Candidate(commit[:SHOWN], f"git+{url}@{commit}", date))
        tell(f"{entry.label} {entry.verdict}")
        return entry

    old, new = (judge(commit) for commit in ends)
    if not (old.is_judged and new.is_judged) or old.verdict == new.verdict:
        said = "; ".join(f"{row.label} gives {row.verdict} {row.reason}".strip() for row in (old, new))
        raise HarnessError(f"nothing to bisect: {said}", status=Exit.DEVIATES)
    with cache.guard(), cache.scratch("bisect-") as folder:
        return {WRONG: "fixed in", RIGHT: "bug from"}[old.verdict], changed_at(mirror, folder, ends, old, judge)


def _show(repository: Path, commit: str, form: str) -> str:
    return git.run(["log", "-1", f"--format={form}", "--date=short", commit], repository).stdout.strip()


def changed_at(mirror: Path, repository: Path, ends: tuple[str, str], old: Entry, judge: Callable[[str], Entry]) -> str:
    """Let git choose each commit until it names the one at which the verdict changes, or those that it is one of.

    Its state is in a bare repository of its own, which borrows the objects of the mirror.
    """
    git.run(["init", "--quiet", "--bare"], repository)
    (repository / "objects/info/alternates").write_text(f"{mirror / 'objects'}\n", encoding="utf-8")
    git.run(["update-ref", "--no-deref", "HEAD", ends[1]], repository)
    start = ["bisect", "start", "--no-checkout", "--term-old=before", "--term-new=after", ends[1], ends[0]]
    ended = git.run(start, repository)
    if ended.returncode != 0:
        raise HarnessError(f"git bisect: {git.last_line(ended.stdout + ended.stderr)}", status=Exit.DEVIATES)
    while ended.returncode == 0 and not EXACT.search(ended.stdout):
        commit = git.run(["rev-parse", "--verify", "--quiet", "BISECT_HEAD"], repository).stdout.strip()
        if not commit:
            break
        entry = judge(commit)
        same = "before" if entry.verdict == old.verdict else "after"
        ended = git.run(["bisect", same if entry.is_judged else "skip", commit], repository)
    output = ended.stdout + ended.stderr
    exact = EXACT.search(output)
    left = [exact[1]] if exact else SKIPPED.findall(output.rpartition("could be any of:")[2])
    # git names the commits that are left in the order of their hashes where their dates are the same
    history = git.run(["rev-list", "--topo-order", "--reverse", f"{ends[0]}..{ends[1]}"], repository).stdout.split()
    commits = [commit for commit in history if commit in left]
    if not commits:
        raise HarnessError(f"git bisect gave no commit: {git.last_line(output)}", status=Exit.DEVIATES)
    several = ", ".join(f"{commit[:SHOWN]} ({_show(mirror, commit, '%cd, %s')})" for commit in commits)
    if exact:
        return several
    return f"one of {len(commits)} commits, the others of which could not be judged: {several}"
