"""A lane of upstream's tests: pytest in a process group of its own, on a copy of a tree."""

from __future__ import annotations

import os
import shutil
import socket
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from harness.core import files
from harness.core.cache import Cache
from harness.host.host import Host
from harness.lane import environment, process
from harness.lane.environment import NO_GPU, Gpus
from harness.lane.lane import jit_folder
from harness.lane.log import Log
from harness.lane.process import Ended
from harness.pack.model import UpstreamTests
from harness.schedule.lane_runner import Prepared
from harness.suites import report
from harness.suites.report import Report
from harness.upstream.tree import Tree
from harness.verdict.lane_verdict import abnormal_end

PYTEST = Path(__file__).with_name("pytest_main.py")
#: What decides over a suite's own configuration: no cache in the tree, every test runs, the log holds no colours.
OURS = ("-p", "no:cacheprovider", "--maxfail=0", "--color=no")
#: How a process ended that there was no need to start.
NOT_NEEDED = Ended("exited", 0, 0.0, 0, 0)


@dataclass(frozen=True)
class Place:
    """Where a suite runs.

    Attributes:
        devices: its GPUs, as CUDA_VISIBLE_DEVICES names them; None: it needs none.
        locks: a file for each of them that it shares.
        cancel: a file descriptor; once it can be read, the suite is abandoned.
        threads: that its libraries use for one computation.
        python: the interpreter.
        target: what the GPUs are, or ``cpu``.

    """

    devices: str | None
    locks: tuple[Path, ...]
    cancel: int | None
    threads: int
    python: Path
    target: str


@dataclass(frozen=True)
class SuiteRun:
    """What one run showed.

    Attributes:
        ended: how its process did.
        report: what the plugin wrote.
        problem: why it says nothing of the tests; empty where it does.
        tree: the copy that it ran on, which is gone.
        log: the file of its whole output.

    """

    ended: Ended
    report: Report
    problem: str
    tree: Path
    log: Path


@dataclass(frozen=True)
class Wanted:
    """What to run.

    Attributes:
        suite: as pack.toml names it.
        tree: with the patches that belong to this lane.
        prepared: the dependency set, laid out.
        timeout: in seconds.
        list_only: only name the tests.

    """

    suite: UpstreamTests
    tree: Tree
    prepared: Prepared
    timeout: float
    list_only: bool

    @property
    def files(self) -> list[str]:
        """The files to collect: where tests are only listed, those that the tree has."""
        return [file for file in self.suite.files if not self.list_only or (self.tree.folder / file).exists()]

    @property
    def arguments(self) -> list[str]:
        """Pytest's arguments: the pack's, then ours, then the files."""
        return [*self.suite.arguments, *OURS, *(["--collect-only"] if self.list_only else []), "--", *self.files]


def run(cache: Cache, host: Host, wanted: Wanted, place: Place, log: Path) -> SuiteRun:
    """Run a suite to its end, or only list its tests.

    The tests may write into the tree: they get a copy, which is also their working directory. Where only listing was
    requested and the tree has none of the files, there is nothing to run.
    """
    tree, prepared = wanted.tree, wanted.prepared
    if not wanted.files:
        log.touch()
        return SuiteRun(NOT_NEEDED, Report(), "", tree.folder, log)
    with cache.guard(), cache.scratch("lane-") as work:
        copy, written, gate = work / "tree", work / "report.jsonl", work / "gate"
        shutil.copytree(tree.folder, copy)
        written.touch()
        toolchain = (host.python, host.torch, host.triton)
        key = files.key_of("upstream-tests", tree.key, prepared.dependency_set.sha256, place.target, *toolchain)
        gpus = NO_GPU if place.devices is None else Gpus(place.devices, gate if place.locks else None)
        paths = [copy / tree.source_root, prepared.dependencies.folder]
        ours = (str(place.python), "-P", str(PYTEST), str(written), f"--rootdir={copy}")
        before = prepared.dependencies.lay_out()
        with jit_folder(cache, key, work) as kept:
            folders = environment.Folders(work, kept)
            folders.create()
            variables = environment.build(os.environ, folders, paths, gpus, environment.Share(place.threads))
            command = process.Command(
                arguments=(*ours, *wanted.arguments),
                environment=_environment(wanted.suite, variables),
                folder=copy,
                timeout=wanted.timeout,
                cancel=place.cancel,
                gate=gate,
                locks=place.locks,
            )
            with Log(log) as written_log:
                ended = process.run(command, written_log)
        prepared.dependencies.check(before, while_it_ran=True)
        found = report.read(written.read_text(encoding="utf-8", errors="replace"))
    why = abnormal_end(ended, wanted.timeout) or report.problem(found, ended.status, listed_only=wanted.list_only)
    return SuiteRun(ended, found, why, copy, log)


def _environment(suite: UpstreamTests, lane: Mapping[str, str]) -> dict[str, str]:
    """Return a lane's environment with what the suite needs; pytest loads no plugin that nobody named.

    Suites that start torch.distributed listen on MASTER_PORT, or on a port that all of them share: two at once would
    take it from each other, and the patch would seem to break tests.
    """
    rendezvous = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    return {**lane, **rendezvous, **suite.environment, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


def _free_port() -> int:
    """Return a port of the loopback interface that nobody listens on now."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])
