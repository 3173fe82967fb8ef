"""Replay a week of nightly sweeps: seven nights of this year on which the package index had something new.

    python benchmarks/week.py --cache CACHE --runs RUNS --keep baselines/week \
        --repository https://github.com/linkedin/Liger-Kernel=COPY

What is real: the releases, each from the package index, whose page tells when each file was uploaded; the commits, from
a copy of upstream's repository; every lane, its verdict and its seconds; the runner, which is called once a night as a
timer would call it: `sweep --latest --bisect 20m --baseline RUNS`.

What is replayed: the index is seen through a page on the loopback interface that leaves out what was uploaded after the
night, and the clock that names the run folders and the day of a look-up stands at the night. The packs, Python, torch
and the packages beside the upstream are today's. Each folder's name, and so the head of each page, ends in `_replayed`.

Only results.json, summary.md and index.html of each night are kept; the logs and receipts that a page links stay in
RUNS.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import requests

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from harness.commands import main as runner  # noqa: E402 - found through the path above
from harness.sweep import run_folder  # noqa: E402 - likewise
from harness.upstream import newest  # noqa: E402 - likewise
from testing import package_index  # noqa: E402 - likewise

INDEX = "https://pypi.org/simple/"
JSON_PAGE = "application/vnd.pypi.simple.v1+json"
#: Whose releases come night by night; the packages beside them are pinned by their hashes.
REPLAYED = {"liger-kernel", "megatron-core"}
#: At two in the morning, UTC, each behind a release of liger-kernel. Between the fourth and the fifth the machine is
#: taken to have been off, so that two releases came at once.
NIGHTS = ("2026-02-05", "2026-02-13", "2026-05-01", "2026-07-24", "2026-09-17", "2026-10-01", "2026-10-22")
KEPT = ("results.json", "summary.md", "index.html")


@contextmanager
def index_of(night: dt.datetime) -> Iterator[str]:
    """Serve the package index as it was at a moment; yield the URL for PIP_INDEX_URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            package = self.path.strip("/").rpartition("/")[2]
            page = requests.get(
                f"{INDEX}{package}/",
                headers={"Accept": JSON_PAGE},
                verify=os.environ.get("PIP_CERT") or True,
                timeout=60,
            )
            document = page.json() if page.ok else {"files": []}
            if package in REPLAYED:
                document["files"] = [
                    file for file in document["files"] if dt.datetime.fromisoformat(file["upload-time"]) <= night
                ]
                document.pop("versions", None)
            body = json.dumps(document).encode()
            self.send_response(page.status_code)
            self.send_header("Content-Type", JSON_PAGE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with package_index.listening(Handler) as url:
        yield url


def sweep_as_of(night: dt.datetime, arguments: list[str]) -> int:
    """Run the runner in this process with its clock at a night; it goes on from there."""
    began = time.monotonic()
    run_folder.now = lambda: night + dt.timedelta(seconds=time.monotonic() - began)
    newest.today = night.date
    run_folder.STAMP += "_replayed"
    sys.argv = ["runner.py", *arguments]
    return runner()


def variables(url: str, repositories: list[str]) -> dict[str, str]:
    """Return what makes the runner find the index of the night, and the copies of repositories."""
    found = os.environ | {"PIP_INDEX_URL": url, "PIP_EXTRA_INDEX_URL": "", "PIP_CONFIG_FILE": os.devnull}
    found["GIT_CONFIG_COUNT"] = str(len(repositories))
    for number, text in enumerate(repositories):
        remote, _, copy = text.partition("=")
        found[f"GIT_CONFIG_KEY_{number}"] = f"url.{Path(copy).absolute().as_uri()}.insteadOf"
        found[f"GIT_CONFIG_VALUE_{number}"] = remote
    return found


def replay(night: dt.datetime, arguments: argparse.Namespace) -> None:
    """Run one night's sweep in a process of its own, and keep what is to be read of it."""
    runs = arguments.runs.absolute()
    sweep = ["sweep", "--latest", "--bisect", "20m", "--jobs", "1", "--cache", str(arguments.cache)]
    sweep += [
        "--runs",
        str(runs),
        "--baseline",
        str(runs),
        *(text for one in arguments.only for text in ("--only", one)),
    ]
    command = [sys.executable, __file__, "--as-of", night.isoformat(), *sweep]
    with index_of(night) as url:
        ended = subprocess.run(
            command,
            cwd=REPOSITORY,
            env=variables(url, arguments.repository),
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert ended.returncode in {0, 1}, (night, ended.returncode)
    (folder,) = runs.glob(f"{night:%Y%m%d}*_replayed")
    print(f"{night:%Y-%m-%d}: exit status {ended.returncode}\n{ended.stdout}", flush=True)
    if arguments.keep:
        kept = arguments.keep / folder.name
        kept.mkdir(parents=True, exist_ok=True)
        for name in KEPT:
            shutil.copyfile(folder / name, kept / name)


def main() -> None:
    """Replay every night."""
    parser = argparse.ArgumentParser(description="Replay a week of nightly sweeps.")
    parser.add_argument("--cache", type=Path, required=True, help="of its own: what the index listed is kept in it")
    parser.add_argument("--runs", type=Path, required=True, help="the folder of the run folders; must not exist")
    parser.add_argument("--keep", type=Path, help="a copy of what is to be read of each night goes here")
    parser.add_argument("--only", action="append", default=[], help="as in `sweep`")
    parser.add_argument("--repository", action="append", default=[], metavar="URL=COPY", help="of an upstream")
    parser.add_argument("--nights", type=int, default=len(NIGHTS), help="the first so many")
    arguments = parser.parse_args()
    for text in NIGHTS[: arguments.nights]:
        night = dt.datetime.fromisoformat(f"{text}T02:00:00+00:00")
        if not list(arguments.runs.glob(f"{night:%Y%m%d}*_replayed/{run_folder.RESULTS}")):
            replay(night, arguments)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--as-of"]:
        sys.exit(sweep_as_of(dt.datetime.fromisoformat(sys.argv[2]), sys.argv[3:]))
    main()
