"""The newest release of an upstream, and the head of its default branch.

Both move, so they are looked up each time. The cache keeps the result with the day of the look-up: a machine without
network judges the result of `fetch --latest`, and says how old it is.
"""

import datetime as dt
import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass

from harness.core import files, git, strict_json, structure
from harness.core.cache import Cache
from harness.core.errors import UnavailableError
from harness.upstream import checkout, download

COMMIT = re.compile(r"(?P<commit>[0-9a-f]{40})\tHEAD")


@dataclass(frozen=True)
class Newest:
    """The newest release of a package, or the commit at the head of a repository's default branch."""

    version: str  # of the release, or the commit
    date: str  # of the upload, or of the commit
    seen: str  # the day, in UTC, of the look-up
    file: str = ""  # of the release on the package index
    sha256: str = ""  # of that file


def release(cache: Cache, package: str, *, wheels_only: bool) -> Newest:
    """Look up the newest release.

    UnavailableError: the look-up failed, or without network, the cache holds no result of an earlier one.
    """

    def ask(today: str) -> Newest:
        file = download.resolve(cache, package, None, wheels_only=wheels_only)
        return Newest(file.version, file.date, today, file.file, file.sha256)

    return _look_up(cache, f"release of {package}{' (wheel)' if wheels_only else ''}", ask)


def head(cache: Cache, url: str) -> Newest:
    """Look up the commit at the head of the default branch of the repository at `url`, and fetch it, likewise."""

    def ask(today: str) -> Newest:
        listed = git.run(["ls-remote", "--", url, "HEAD"], cache.root)
        match = COMMIT.fullmatch(listed.stdout.strip())
        if listed.returncode != 0 or match is None:
            raise UnavailableError(f"the head of {url}: {git.last_line(listed.stderr)}")
        return Newest(match["commit"], checkout.commit_date(cache, url, match["commit"]).isoformat(), today)

    return _look_up(cache, f"head of {url}", ask)


def _look_up(cache: Cache, subject: str, ask: Callable[[str], Newest]) -> Newest:
    """Ask, and store the result; without network, return the stored result."""
    path = cache.entry("newest", f"{files.key_of(subject)}.json")
    if not cache.offline:
        result = ask(dt.datetime.now(dt.UTC).date().isoformat())
        with cache.guard():
            files.write_atomic(path, json.dumps({"of": subject, "found": asdict(result)}, indent=1) + "\n")
        return result
    try:
        return structure.structure(strict_json.loads(path.read_bytes())["found"], Newest)
    except (OSError, ValueError, KeyError, TypeError):
        raise UnavailableError(
            f"the newest {subject} was not looked up into this cache, and --offline forbids to look now. "
            "Next: runner.py fetch --latest --cache DIR where there is network"
        ) from None
