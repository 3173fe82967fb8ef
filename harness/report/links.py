"""The address of this repository on the web: ``[tool.reproducer-packs] repository_url`` in pyproject.toml.

While the setting is empty, a link is the path of the file, as text: upstream's pages cannot follow a relative link.

README.md, docs/nights.md and deploy/github have placeholders for the address. Replace them by
``sed -i 's|https://RAW-URL-OF-THIS-REPOSITORY|URL/raw/main|; s|https://URL-OF-THIS-REPOSITORY|URL|' FILES``.
"""

import functools

import tomli

from harness.core import files

BRANCH = "main"


@functools.cache
def repository_url() -> str:
    """Return the URL of this repository, without a slash at its end; empty while it has no address."""
    path = files.REPOSITORY / "pyproject.toml"
    if not path.exists():  # installed without its repository
        return ""
    tool = tomli.loads(path.read_text(encoding="utf-8")).get("tool", {})
    return str(tool.get("reproducer-packs", {}).get("repository_url", "")).rstrip("/")


def page(path: str) -> str:
    """Return the URL of a file, or of a heading in a file, of this repository; empty while it has no address."""
    return f"{repository_url()}/blob/{BRANCH}/{path}" if repository_url() else ""


def link(path: str) -> str:
    """Link a file of this repository, with its path as the text of the link."""
    return f"[{path}]({page(path)})" if page(path) else f"`{path}`"
