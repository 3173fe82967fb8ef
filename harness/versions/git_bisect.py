"""The commit that brought a bug in, or fixed it: git's own bisection, each step a lane of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.core import git
from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.upstream import checkout
from harness.versions.candidates import Candidate
from harness.versions.judging import Judging
from harness.versions.timeline import RIGHT, WRONG, Entry

SHOWN = 12
SKIPPED = re.compile(r"(?m)^[0-9a-f]{40}$")
EXACT = re.compile(r"(?m)^([0-9a-f]{40}) is the first after commit")


@dataclass(frozen=True)
class Found:
    """What a bisection gave.

    Attributes:
        rows: the commits judged, in the order of the history.
        what: ``fixed in`` or ``bug from``.
        commit: which one, with its date and subject; or those that it is one of.

    """

    rows: list[Entry]
    what: str
    commit: str

    @property
    def line(self) -> str:
        """The answer in one line."""
        return f"{self.what} {self.commit}"


def candidate_of(url: str, commit: str, date: str, dependencies: tuple[str, ...]) -> Candidate:
    """Return one commit as something to judge."""
    return Candidate(commit[:SHOWN], f"git+{url}@{commit}", dependencies, date)


def commit_of(repository: Path, name: str) -> str:
    """Return the full hash of a commit, branch or tag."""
    for place in (name, f"refs/upstream/heads/{name}", f"refs/upstream/{name}"):
        answer = git.run(["rev-parse", "--quiet", "--verify", f"{place}^{{commit}}"], repository)
        if answer.returncode == 0:
            return answer.stdout.strip()
    raise HarnessError(f"--range: the repository has no commit, branch or tag {name!r}. Next: --range OLD..NEW")


def _show(repository: Path, commit: str, form: str) -> str:
    return git.run(["log", "-1", f"--format={form}", "--date=short", commit], repository).stdout.strip()


def ends(repository: Path, wanted: str, pinned: str) -> tuple[str, str]:
    """Return the two ends of a range ``OLD..NEW``; by default from the pinned release to the default branch."""
    old, separator, new = wanted.partition("..")
    if wanted and not separator:
        raise HarnessError(f"--range {wanted!r}: two commits, branches or tags. Next: --range OLD..NEW")
    return commit_of(repository, old or pinned), commit_of(repository, new or "HEAD")


def bisect(judging: Judging, url: str, wanted: str, requested: tuple[str, ...], seen: Callable[[str], None]) -> Found:
    """Find the commit between two ends at which the verdict changes.

    Args:
        judging: the pack and target.
        url: the repository's.
        wanted: ``OLD..NEW``, or empty.
        requested: the values of ``--with``.
        seen: told of each step.

    Raises:
        HarnessError: an end cannot be judged, or both give the same verdict.

    """
    mirror = checkout.history(judging.session.cache, url)
    old, new = ends(mirror, wanted, judging.pack.definition.upstream.commit)
    return between(judging, url, (old, new), requested, seen)


def between(
    judging: Judging, url: str, both: tuple[str, str], requested: tuple[str, ...], seen: Callable[[str], None]
) -> Found:
    """Find the commit between two whose history is in the cache, named by all their digits; see `bisect`.

    Raises:
        HarnessError: an end cannot be judged, or both give the same verdict.
        KeyboardInterrupt: the user interrupted.

    """
    cache, (old, new) = judging.session.cache, both
    mirror = checkout.kept(cache, url)

    def judge(commit: str) -> Entry:
        found = judging.one(candidate_of(url, commit, _show(mirror, commit, "%cd"), requested))
        seen(f"{found.label} {found.verdict}")
        return found

    rows = {commit: judge(commit) for commit in both}
    if not all(row.is_judged for row in rows.values()) or rows[old].verdict == rows[new].verdict:
        said = "; ".join(f"{row.label} gives {row.verdict} {row.reason}".strip() for row in rows.values())
        raise HarnessError(f"nothing to bisect: {said}. Next: --range OLD..NEW", status=Exit.DEVIATES)
    with cache.guard(), cache.scratch("bisect-") as folder:
        output = _drive(mirror, folder, both, rows, judge)
    what = {WRONG: "fixed in", RIGHT: "bug from"}[rows[old].verdict]
    return Found(_in_order(mirror, rows), what, _answer(mirror, output))


def _drive(
    mirror: Path, repository: Path, both: tuple[str, str], rows: dict[str, Entry], judge: Callable[[str], Entry]
) -> str:
    """Let git choose each commit, in a bare repository that borrows the mirror's objects, so that its state is private.

    `rows` takes what was judged. Returns what git said last.
    """
    old, new = both
    git.run(["init", "--quiet", "--bare"], repository)
    (repository / "objects/info/alternates").write_text(f"{mirror / 'objects'}\n", encoding="utf-8")
    git.run(["update-ref", "--no-deref", "HEAD", new], repository)
    start = ["bisect", "start", "--no-checkout", "--term-old=before", "--term-new=after", new, old]
    ended = git.run(start, repository)
    if ended.returncode != 0:
        raise HarnessError(f"git bisect: {git.last_line(ended.stdout + ended.stderr)}", status=Exit.DEVIATES)
    while ended.returncode == 0 and not EXACT.search(ended.stdout):
        commit = git.run(["rev-parse", "--verify", "--quiet", "BISECT_HEAD"], repository).stdout.strip()
        if not commit:
            break
        row = rows[commit] = judge(commit)
        same = "before" if row.verdict == rows[old].verdict else "after"
        ended = git.run(["bisect", same if row.is_judged else "skip", commit], repository)
    return ended.stdout + ended.stderr


def _in_order(mirror: Path, rows: dict[str, Entry]) -> list[Entry]:
    listed = git.run(["rev-list", "--no-walk=sorted", *rows], mirror).stdout.split()
    return [rows[commit] for commit in reversed(listed)] if len(listed) == len(rows) else list(rows.values())


def _answer(mirror: Path, output: str) -> str:
    exact = EXACT.search(output)
    if exact:
        return f"{exact[1][:SHOWN]} ({_show(mirror, exact[1], '%cd, %s')})"
    any_of = SKIPPED.findall(output.rpartition("could be any of:")[2])
    if not any_of:
        raise HarnessError(f"git bisect gave no commit: {git.last_line(output)}", status=Exit.DEVIATES)
    several = ", ".join(f"{commit[:SHOWN]} ({_show(mirror, commit, '%cd, %s')})" for commit in any_of)
    return f"one of {len(any_of)} commits, the others of which could not be judged: {several}"
