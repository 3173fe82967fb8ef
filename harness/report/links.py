"""Where this repository is on the web: one setting, ``[tool.reproducer-packs] repository_url`` in pyproject.toml.

Until the project has a public address the setting is empty, and a link is the file's path in this repository, as text:
a relative link would lead nowhere from an upstream's page.

``python -m harness.report.links`` writes the address where README.md, docs/ and deploy/ have a placeholder for it.
"""

from __future__ import annotations

import functools
import re
import sys
from pathlib import Path

import tomli

from harness.core import files

REPOSITORY = Path(__file__).resolve().parents[2]
BRANCH = "main"
#: What stands where the address belongs, in the files that a user copies lines from.
RAW, ADDRESS = "https://RAW-URL-OF-THIS-REPOSITORY", "https://URL-OF-THIS-REPOSITORY"
PAGE = re.compile(r"https://[\w.:-]+(?:/[\w.~-]+)+")
WRITTEN = ("README.md", "docs/nights.md", "deploy/github/reproducer-packs.yml")


@functools.cache
def repository_url() -> str:
    """Return the URL of this repository, without a slash at its end; empty while it has none."""
    path = REPOSITORY / "pyproject.toml"
    if not path.exists():  # installed without its repository
        return ""
    tool = tomli.loads(path.read_text(encoding="utf-8")).get("tool", {})
    return str(tool.get("reproducer-packs", {}).get("repository_url", "")).rstrip("/")


def page(path: str) -> str:
    """Return the URL of a file of this repository (or of a heading in it); empty while there is no address."""
    return f"{repository_url()}/blob/{BRANCH}/{path}" if repository_url() else ""


def to(path: str) -> str:
    """Link a file of this repository by its path in it."""
    return f"[{path}]({page(path)})" if page(path) else f"`{path}`"


def named(text: str, path: str) -> str:
    """Link a word to a file of this repository (or a heading in it); the word alone while there is no address."""
    return f"[{text}]({page(path)})" if page(path) else text


def commit(sha: str, url: str) -> str:
    """Link a commit of a repository on the web; its first digits alone where `url` is no such repository's.

    GitHub makes a link of these digits below a pull request. A URL with a user or a token in it is nobody's to read.
    """
    short, page = sha[:12], url.removesuffix("/").removesuffix(".git")
    return f"[{short}]({page}/commit/{sha})" if PAGE.fullmatch(page) else short


def with_address(text: str, url: str) -> str:
    """Write the address into a text that has a placeholder for it; an empty one leaves it as it is."""
    if not url:
        return text
    return text.replace(RAW, f"{url}/raw/{BRANCH}").replace(ADDRESS, url)


def main() -> int:
    """Write the address into README.md, docs/ and deploy/; return 0."""
    for name in WRITTEN:
        path = REPOSITORY / name
        before = path.read_text(encoding="utf-8")
        after = with_address(before, repository_url())
        if after != before:
            files.write_atomic(path, after)
        sys.stdout.write(f"{name}: {'written' if after != before else 'as it was'}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
