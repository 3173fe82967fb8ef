"""Where this repository is on the web: one setting, ``[tool.reproducer-packs] repository_url`` in pyproject.toml.

Until the project has a public address the setting is empty, and a link is the file's path in this repository, as text:
a relative link would lead nowhere from an upstream's page.
"""

from __future__ import annotations

import functools
from pathlib import Path

import tomli

REPOSITORY = Path(__file__).resolve().parents[2]
BRANCH = "main"


@functools.cache
def repository_url() -> str:
    """Return the URL of this repository, without a slash at its end; empty while it has none."""
    path = REPOSITORY / "pyproject.toml"
    if not path.exists():  # installed without its repository
        return ""
    tool = tomli.loads(path.read_text(encoding="utf-8")).get("tool", {})
    return str(tool.get("reproducer-packs", {}).get("repository_url", "")).rstrip("/")


def to(path: str) -> str:
    """Link a file of this repository by its path in it."""
    url = repository_url()
    return f"[{path}]({url}/blob/{BRANCH}/{path})" if url else f"`{path}`"


def project() -> str:
    """Name this repository in a sentence."""
    return repository_url() or "the repository of this pack"
