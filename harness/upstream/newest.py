"""What is newest of an upstream: its newest release, and the head of its default branch.

Both move, so they are looked up each time. What was found is kept in the cache with the day on which it was
looked up: a machine without network judges what `fetch --latest` found, and says how old that is.
"""

from __future__ import annotations

import datetime as dt
import functools
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
    """The newest release of a package, and the day, in UTC, on which that was looked up."""

    file: ReleaseFile
    seen: str


@dataclass(frozen=True)
class Head:
    """The commit at the head of a repository's default branch, its own date, and the day of the look-up."""

    commit: str
    date: str
    seen: str


Found = TypeVar("Found", Release, Head)


def release(cache: Cache, package: str, *, wheels_only: bool) -> Release:
    """Look up the newest release.

    UnavailableError is raised where it cannot be looked up, and without network: it never was, into this cache.
    """
    what = f"release of {package}{' (wheel)' if wheels_only else ''}"
    look = functools.partial(download.resolve, cache, package, None, wheels_only=wheels_only)
    return _known(cache, what, Release, lambda: Release(look(), _today()))


def head(cache: Cache, url: str) -> Head:
    """Look up the commit at the head of the default branch of the repository at `url`, and fetch it, likewise."""

    def look() -> Head:
        listed = git.run(["ls-remote", "--", url, "HEAD"], cache.root)
        match = COMMIT.fullmatch(listed.stdout.strip())
        if listed.returncode != 0 or match is None:
            raise UnavailableError(f"the head of {url}: {git.last_line(listed.stderr)}")
        return Head(match["commit"], checkout.date_of(cache, url, match["commit"]).isoformat(), _today())

    return _known(cache, f"head of {url}", Head, look)


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()


def _known(cache: Cache, what: str, kind: type[Found], look: Callable[[], Found]) -> Found:
    """Look something up and keep it; without network, return what was kept."""
    kept = cache.entry("newest", f"{files.key_of(what)}.json")
    if not cache.offline:
        found = look()
        with cache.guard():
            files.write_atomic(kept, json.dumps({"of": what, "found": asdict(found)}, indent=1) + "\n")
        return found
    try:
        return structure.structure(strict_json.loads(kept.read_bytes())["found"], kind)
    except (OSError, ValueError, KeyError, TypeError):
        raise UnavailableError(
            f"the newest {what} was not looked up into this cache, and --offline forbids to look now. "
            "Next: runner.py fetch --latest --cache DIR where there is network"
        ) from None
