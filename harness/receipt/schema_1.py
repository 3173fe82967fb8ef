"""Receipts of schema 1, which an older runner wrote: read as what they say in today's words."""

from __future__ import annotations

from typing import Any

from harness.upstream.source import commit_of

SCHEMA = 1
KINDS = {"robustness": "cleanup"}


def renewed(document: dict[str, Any]) -> dict[str, Any]:
    """Return a document of schema 1 as one of schema 2; what is misshapen stays so, and is refused by its reader."""
    try:
        found = dict(document)
        found |= {"schema": 2, "kind": KINDS.get(found["kind"], found["kind"]), "dependencies": found.pop("companions")}
        patch = found.pop("patch")
        found["fix"] = None if patch is None else {"kind": "patch", "name": "", **patch}
        found["upstream"] = {**found["upstream"], "commit": commit_of(found["upstream"]["version"])}
        host = dict(found["host"])
        gpu = {"name": host.pop("gpu", ""), "compute_capability": host.pop("compute_capability", "")}
        found["host"] = {**host, "gpus": [gpu] if gpu["name"] else []}
    except (KeyError, TypeError, AttributeError):
        return document
    return found
