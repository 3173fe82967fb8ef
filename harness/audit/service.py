"""An OSV service on the loopback interface, over the records of this repository; pip-audit asks it.

The query is that of https://google.github.io/osv.dev/post-v1-query, for one package and version.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.audit.records import Advisory, State


@dataclass(frozen=True)
class Service:
    """A running service.

    Attributes:
        url: where pip-audit asks.
        asked: each package that has records, with the version that was asked for, in this order.

    """

    url: str
    asked: list[tuple[str, Version]] = field(default_factory=list)


@contextmanager
def serving(advisories: list[Advisory]) -> Iterator[Service]:
    """Serve the records until the block ends."""
    asked: list[tuple[str, Version]] = []
    covered = {one.package for one in advisories}

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            try:
                query = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
                package, version = canonicalize_name(query["package"]["name"]), Version(query["version"])
            except (InvalidVersion, KeyError, TypeError, ValueError):
                self.send_error(400)
                return
            if package in covered:
                asked.append((package, version))
            found = [one for one in advisories if one.package == package and one.of(version).state == State.AFFECTED]
            body = json.dumps({"vulns": [one.document for one in found]} if found else {}).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing: pip-audit prints what it found."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield Service(f"http://127.0.0.1:{server.server_port}/v1/query", asked)
    finally:
        server.shutdown()
        server.server_close()
