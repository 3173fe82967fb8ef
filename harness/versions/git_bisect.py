"""The commit that brought a bug in, or fixed it: the real ``git bisect run``, each step a lane of its own."""

from __future__ import annotations

import json
import os
import re
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from harness.core import git
from harness.core.errors import HarnessError
from harness.core.words import Exit, LaneVerdict
from harness.upstream import checkout
from harness.versions.candidates import Candidate
from harness.versions.judging import Judging
from harness.versions.timeline import RIGHT, WRONG, Entry

STEP = Path(__file__).with_name("git_bisect_step.py")
SHOWN = 12
SKIPPED = re.compile(r"(?m)^[0-9a-f]{40}$")


@dataclass(frozen=True)
class Found:
    """What a bisection gave: the commits judged, in the order of the history, and the answer in one line."""

    rows: list[Entry]
    line: str


@dataclass(frozen=True)
class Step:
    """What one step of ``git bisect run`` has to know; it travels as JSON."""

    pack: str
    inputs: str
    target: str
    evidence: str
    url: str
    old: str
    cache: str
    offline: bool
    timeout: float | None
    dependencies: tuple[str, ...]
    folder: str
    journal: str


def candidate_of(url: str, commit: str, date: str, dependencies: tuple[str, ...]) -> Candidate:
    """Return one commit as something to judge."""
    return Candidate(commit[:SHOWN], f"git+{url}@{commit}", dependencies, date)


def _commit(repository: Path, name: str) -> str:
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
    return _commit(repository, old or pinned), _commit(repository, new or "HEAD")


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
    cache = judging.session.cache
    mirror = checkout.history(cache, url)
    old, new = ends(mirror, wanted, judging.pack.definition.upstream.commit)
    rows = {}
    for commit in (old, new):
        date = _show(mirror, commit, "%cd")
        rows[commit] = judging.one(candidate_of(url, commit, date, requested))
        seen(f"{rows[commit].label} {rows[commit].verdict}")
    if not all(row.is_judged for row in rows.values()) or rows[old].verdict == rows[new].verdict:
        said = "; ".join(f"{row.label} gives {row.verdict} {row.reason}".strip() for row in rows.values())
        raise HarnessError(f"nothing to bisect: {said}. Next: --range OLD..NEW", status=Exit.DEVIATES)
    with cache.guard(), cache.scratch("bisect-") as folder:
        (folder / "step.json").write_text(
            json.dumps(asdict(_step(judging, url, rows[old], requested, folder))), encoding="utf-8"
        )
        steps, output = _drive(mirror, old, new, folder)
    return Found(_in_order(mirror, rows | steps), _answer(mirror, output, rows[old]))


def _step(judging: Judging, url: str, first: Entry, requested: tuple[str, ...], folder: Path) -> Step:
    return Step(
        pack=str(judging.pack.folder),
        inputs=str(judging.pack.inputs or judging.pack.folder),
        target=judging.target,
        evidence=judging.evidence,
        url=url,
        old=first.verdict,
        cache=str(judging.session.cache.root),
        offline=judging.session.cache.offline,
        timeout=judging.timeout,
        dependencies=requested,
        folder=str(judging.session.folder),
        journal=str(folder / "journal"),
    )


def _drive(mirror: Path, old: str, new: str, folder: Path) -> tuple[dict[str, Entry], str]:
    """Run git's own bisection in a bare repository that borrows the mirror's objects, so that its state is private."""
    repository = folder / "repository"
    repository.mkdir()
    command = shlex.join([sys.executable, "-P", str(STEP), str(folder / "step.json")])
    run = ["bisect", "run", "sh", "-c", f'exec {command} "$(git rev-parse BISECT_HEAD)"']
    git.run(["init", "--quiet", "--bare"], repository)
    (repository / "objects/info/alternates").write_text(f"{mirror / 'objects'}\n", encoding="utf-8")
    for arguments in (
        ["update-ref", "--no-deref", "HEAD", new],
        ["bisect", "start", "--no-checkout", "--term-old=before", "--term-new=after", new, old],
    ):
        ended = git.run(arguments, repository)
        if ended.returncode != 0:
            raise HarnessError(f"git bisect: {git.last_line(ended.stdout + ended.stderr)}")
    watched, held = os.pipe()  # a step ends when this process does, however that ends
    try:
        ended = git.run(run, repository, stdin=watched)
    finally:
        os.close(held)
        os.close(watched)
    journal = folder / "journal"
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    documents = [json.loads(line) for line in lines]
    rows = {one["commit"]: Entry(**one["row"] | {"verdict": LaneVerdict(one["row"]["verdict"])}) for one in documents}
    return rows, ended.stdout + ended.stderr


def _in_order(mirror: Path, rows: dict[str, Entry]) -> list[Entry]:
    listed = git.run(["rev-list", "--no-walk=sorted", *rows], mirror).stdout.split()
    return [rows[commit] for commit in reversed(listed)] if len(listed) == len(rows) else list(rows.values())


def _answer(mirror: Path, output: str, first: Entry) -> str:
    what = {WRONG: "fixed in", RIGHT: "bug from"}[first.verdict]
    exact = re.search(r"(?m)^([0-9a-f]{40}) is the first after commit", output)
    if exact:
        return f"{what} {exact[1][:SHOWN]} ({_show(mirror, exact[1], '%cd, %s')})"
    any_of = SKIPPED.findall(output.rpartition("could be any of:")[2])
    if not any_of:
        raise HarnessError(f"git bisect gave no commit: {git.last_line(output)}", status=Exit.DEVIATES)
    several = ", ".join(f"{commit[:SHOWN]} ({_show(mirror, commit, '%cd, %s')})" for commit in any_of)
    return f"{what} one of {len(any_of)} commits, the others of which could not be judged: {several}"
