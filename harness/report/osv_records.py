"""The OSV records in ``advisories/``, one for each pack, and a local service that serves them to pip-audit."""

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

#: The records of the repository. A wheel installs them beside the package `harness`.
FOLDER = files.REPOSITORY / "advisories"
#: OSV reserves ``x_`` for databases that it does not collect.
PREFIX = "x_WRONG-NUMERICS-"


class State(StrEnum):
    """What lanes showed of a version. It is NOT_JUDGED also where a lane ran and could not judge it."""

    AFFECTED = "affected"
    UNAFFECTED = "not affected"
    NOT_JUDGED = "not judged"


@dataclass(frozen=True)
class Advisory:
    """One bug of a package."""

    package: str  # its normalized name
    judged: dict[Version, tuple[State, list[str]]]  # the state of each version, and the evidence for it
    document: dict[str, Any]  # the OSV record

    def of(self, version: Version) -> tuple[State, list[str]]:
        """Return the state of exactly this version, and the evidence. A local build counts as its release."""
        return self.judged.get(Version(version.public), (State.NOT_JUDGED, []))


def load(path: Path) -> Advisory:
    """Load one record. HarnessError is raised where the file is no such record, or contradicts itself."""
    try:
        document: Any = strict_json.loads(path.read_bytes())
        judged = document["database_specific"]["judged"].items()
        by_version = {Version(label): (State(entry["state"]), entry["evidence"]) for label, entry in judged}
        affected = document["affected"][0]
        advisory = Advisory(affected["package"]["name"], by_version, document)
        listed = {Version(label) for label in affected["versions"]}
    except (OSError, strict_json.StrictJsonError, InvalidVersion, LookupError, TypeError, ValueError) as error:
        raise HarnessError(f"{path.name}: {error!r:.300}. Next: runner.py check --write") from None
    if listed != {version for version, (state, _) in by_version.items() if state == State.AFFECTED}:
        reason = "affected.versions are not the versions that database_specific.judged calls affected"
        raise HarnessError(f"{path.name}: {reason}. Next: runner.py check --write")
    return advisory


@contextmanager
def serve(advisories: list[Advisory]) -> Iterator[tuple[str, set[tuple[str, Version]]]]:
    """Answer https://google.github.io/osv.dev/post-v1-query on 127.0.0.1; yield the URL, and all queried versions."""
    queried: set[tuple[str, Version]] = set()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            name, version = query["package"]["name"], Version(query["version"])
            queried.add((name, version))
            bugs = [advisory for advisory in advisories if advisory.package == name]
            records = [bug.document for bug in bugs if bug.of(version)[0] == State.AFFECTED]
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps({"vulns": records}).encode())

        def log_message(self, *_: object) -> None:
            """Log nothing: pip-audit prints the answers."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query", queried
        server.shutdown()
