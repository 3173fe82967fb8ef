"""The records in ``advisories/``, one OSV file for each pack, and a service that gives them to pip-audit."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from packaging.version import InvalidVersion, Version

from harness.core import files, strict_json
from harness.core.errors import HarnessError

#: Where the records lie: in the repository, and beside this package where it is installed from a wheel.
FOLDER = files.REPOSITORY / "advisories"
#: OSV keeps ``x_`` for databases that it does not collect.
PREFIX = "x_WRONG-NUMERICS-"


class State(StrEnum):
    """What is known of one version; `NOT_JUDGED` also where a lane ran and could not judge it."""

    AFFECTED = "affected"
    UNAFFECTED = "not affected"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Advisory:
    """One bug: its package's normalized name, the state and its evidence by version, and the OSV record."""

    package: str
    judged: dict[Version, tuple[State, list[str]]]
    document: dict[str, Any]

    def of(self, version: Version) -> tuple[State, list[str]]:
        """Return what lanes showed of exactly this version; a local build counts as its release."""
        return self.judged.get(Version(version.public), (State.NOT_JUDGED, []))


def load(path: Path) -> Advisory:
    """Load one record; raises HarnessError, which names the file, where it is none of ours."""
    try:
        document: Any = strict_json.loads(path.read_bytes())
        judged = document["database_specific"]["judged"].items()
        by_version = {Version(label): (State(one["state"]), one["evidence"]) for label, one in judged}
        affected = document["affected"][0]
        found = Advisory(affected["package"]["name"], by_version, document)
        stated = {Version(label) for label in affected["versions"]}
    except (OSError, strict_json.StrictJsonError, InvalidVersion, LookupError, TypeError, ValueError) as error:
        raise HarnessError(f"{path.name}: {error!r:.300}. Next: runner.py check --write") from None
    if stated != {version for version, (state, _) in by_version.items() if state == State.AFFECTED}:
        said = "affected.versions are not the versions that database_specific.judged calls affected"
        raise HarnessError(f"{path.name}: {said}. Next: runner.py check --write")
    return found


@contextmanager
def serving(advisories: list[Advisory]) -> Iterator[tuple[str, set[tuple[str, Version]]]]:
    """Answer https://google.github.io/osv.dev/post-v1-query on 127.0.0.1; yields the URL, and all that was asked."""
    asked: set[tuple[str, Version]] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name, version = query["package"]["name"], Version(query["version"])
            asked.add((name, version))
            affecting = [one for one in advisories if one.package == name and one.of(version)[0] == State.AFFECTED]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"vulns": [one.document for one in affecting]}).encode())

        def log_message(self, *_: object) -> None:
            """Say nothing: pip-audit reports what it was told."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
        server.shutdown()
