"""Where this repository is on the web: one setting, ``[tool.reproducer-packs] repository_url`` in pyproject.toml.

Until the project has a public address the setting is empty, and a link is the file's path in this repository, as text:
a relative link would lead nowhere from an upstream's page.

README.md, docs/nights.md and deploy/github have placeholders for the address. Write it there by
``sed -i 's|https://RAW-URL-OF-THIS-REPOSITORY|URL/raw/main|; s|https://URL-OF-THIS-REPOSITORY|URL|' FILES``.
"""

from __future__ import annotations

import functools

import tomli

from harness.core import files

BRANCH = "main"


@functools.cache
def repository_url() -> str:
    """Return the URL of this repository, without a slash at its end; empty while it has none."""
    path = files.REPOSITORY / "pyproject.toml"
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
