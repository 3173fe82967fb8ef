"""A package index on the loopback interface: HTML pages and files, some of them damaged on purpose."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Shelf:
    """What the index serves: the bytes of each file by project and name, and files that it cuts short.

    Where `uploaded` states the times of files, the pages are JSON.
    """

    files: dict[str, dict[str, bytes]] = field(default_factory=dict)
    cut: set[str] = field(default_factory=set)
    stated: dict[str, str] = field(default_factory=dict)
    uploaded: dict[str, str] = field(default_factory=dict)

    def document(self, project: str) -> bytes:
        """Write the project's page as JSON, with the time of each file that has one."""
        files = [
            {
                "filename": name,
                "url": f"/files/{project}/{name}",
                "hashes": {"sha256": hashlib.sha256(data).hexdigest()},
                "upload-time": self.uploaded.get(name),
            }
            for name, data in self.files[project].items()
        ]
        return json.dumps({"meta": {"api-version": "1.1"}, "name": project, "versions": [], "files": files}).encode()

    def page(self, project: str) -> bytes:
        """Write the project's page; a file's stated hash is its real one unless `stated` says another."""
        links = []
        for name, data in self.files[project].items():
            digest = self.stated.get(name, hashlib.sha256(data).hexdigest())
            links.append(f'<a href="/files/{project}/{name}#sha256={digest}">{name}</a>')
        return ("<!DOCTYPE html><html><body>" + "\n".join(links) + "</body></html>").encode()


def settings(url: str) -> dict[str, str]:
    """Return the variables that lead pip and uv to this index alone."""
    return {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_RETRIES": "0", "PIP_CONFIG_FILE": os.devnull}


class _Handler(BaseHTTPRequestHandler):
    def _send(self, data: bytes, kind: str, *, cut: bool = False) -> None:
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data[: len(data) // 2] if cut else data)

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def listening(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """Listen on a free port; yield the URL for PIP_INDEX_URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/simple/"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def served(shelf: Shelf) -> Iterator[str]:
    """Serve a shelf on a free port; yield the URL for PIP_INDEX_URL."""

    class Handler(_Handler):
        def do_GET(self) -> None:
            parts = self.path.strip("/").split("/")
            if parts[0] == "simple" and len(parts) > 1 and parts[1] in shelf.files:
                if shelf.uploaded:
                    self._send(shelf.document(parts[1]), "application/vnd.pypi.simple.v1+json")
                else:
                    self._send(shelf.page(parts[1]), "text/html")
            elif parts[0] == "files" and parts[2] in shelf.files.get(parts[1], {}):
                self._send(shelf.files[parts[1]][parts[2]], "application/octet-stream", cut=parts[2] in shelf.cut)
            else:
                self.send_error(404)

        do_HEAD = do_GET  # noqa: N815 - http.server names it; uv asks so how large a wheel is

    with listening(Handler) as url:
        yield url


@contextmanager
def answering(kind: str, body: bytes) -> Iterator[str]:
    """Serve one answer to every request; yield the URL for PIP_INDEX_URL."""

    class Handler(_Handler):
        def do_GET(self) -> None:
            self._send(body, kind)

    with listening(Handler) as url:
        yield url
