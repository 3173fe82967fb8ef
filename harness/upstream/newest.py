"""The newest release of an upstream, and the head of its default branch.

Both move, so they are looked up each time. The cache keeps the result with the day of the look-up: a machine without
network judges the result of `fetch --latest`, and says how old it is.
"""

from __future__ import annotations

import datetime as dt
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TypeVar

from harness.core import files, git, strict_json, structure
from harness.core.cache import Cache
from harness.core.errors import UnavailableError
from harness.upstream import checkout, download
from harness.upstream.download import ReleaseFile

COMMIT = re.compile(r"(?P<commit>[0-9a-f]{40})\tHEAD")


@dataclass(frozen=True)
class Release:
    """The newest release of a package."""

    file: ReleaseFile
    seen: str  # the day, in UTC, of the look-up


@dataclass(frozen=True)
class Head:
    """The commit at the head of a repository's default branch."""

    commit: str
    date: str  # of the commit
    seen: str  # the day, in UTC, of the look-up


Newest = TypeVar("Newest", Release, Head)


def release(cache: Cache, package: str, *, wheels_only: bool) -> Release:
    """Look up the newest release.

    UnavailableError: the look-up failed, or without network, the cache holds no result of an earlier one.
    """
    subject = f"release of {package}{' (wheel)' if wheels_only else ''}"

    def ask() -> Release:
        return Release(download.resolve(cache, package, None, wheels_only=wheels_only), _today())

    return _look_up(cache, subject, Release, ask)


def head(cache: Cache, url: str) -> Head:
    """Look up the commit at the head of the default branch of the repository at `url`, and fetch it, likewise."""

    def ask() -> Head:
        listed = git.run(["ls-remote", "--", url, "HEAD"], cache.root)
        match = COMMIT.fullmatch(listed.stdout.strip())
        if listed.returncode != 0 or match is None:
            raise UnavailableError(f"the head of {url}: {git.last_line(listed.stderr)}")
        return Head(match["commit"], checkout.commit_date(cache, url, match["commit"]).isoformat(), _today())

    return _look_up(cache, f"head of {url}", Head, ask)


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


def _look_up(cache: Cache, subject: str, kind: type[Newest], ask: Callable[[], Newest]) -> Newest:
    """Ask, and store the result; without network, return the stored result."""
    path = cache.entry("newest", f"{files.key_of(subject)}.json")
    if not cache.offline:
        result = ask()
        with cache.guard():
            files.write_atomic(path, json.dumps({"of": subject, "found": asdict(result)}, indent=1) + "\n")
        return result
    try:
        return structure.structure(strict_json.loads(path.read_bytes())["found"], kind)
    except (OSError, ValueError, KeyError, TypeError):
        raise UnavailableError(
            f"the newest {subject} was not looked up into this cache, and --offline forbids to look now. "
            "Next: runner.py fetch --latest --cache DIR where there is network"
        ) from None
