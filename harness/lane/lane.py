"""A lane: a script and a contract, one tree, one dependency set, one target, in a process group of its own."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from harness.core import files, seal
from harness.core.cache import Cache
from harness.core.seal import ChangedError, Layout
from harness.core.words import Evidence, LaneVerdict
from harness.host.host import Host
from harness.lane import built_environment, environment, process, results, script
from harness.lane.cell import Cell
from harness.lane.process import Ended, Log
from harness.lane.record import UpstreamLine
from harness.lane.results import Results
from harness.lane.script import LastLine, Script
from harness.upstream.dependencies import DependencySet
from harness.upstream.tree import Tree

#: The reason of a lane that was cancelled: it says nothing of anything.
ABANDONED = "abandoned"
#: The folder of the witness, which every process of a lane imports at its start.
WITNESS = Path(__file__).with_name("witness")
#: What runs a script that prints no sentinel of its own.
ORDINARY = Path(__file__).with_name("ordinary.py")
#: The exit status of a script that raised.
RAISED = 1
#: The files of a lane's folder that its processes write.
RESULTS, LOADED = "results.jsonl", "loaded.jsonl"
#: pytest as a contract sees it: no configuration, no plugin but the kit's, no cache in the pack.
PYTEST = (
    *("-m", "pytest", "-c", os.devnull, "--tb=short"),
    "--disable-warnings",  # their summary names files by a path that leads out of the tree
    *("-p", "kit.plugin", "-p", "no:cacheprovider", "--import-mode=importlib"),
)


@dataclass(frozen=True)
class Lane:
    """What to run."""

    cell: Cell  # what it is about: the script, the contract and the target
    tree: Tree  # the tree, patched or not
    is_patched: bool  # which
    dependency_set: DependencySet  # its name and members
    dependencies: Layout  # the folder that the set is merged into, laid out and checked
    must_load: tuple[str, ...]  # files of the tree that it has to load, or its verdict is about something else
    #: files of the tree that the target runs, and that the patch changes where there is one: their hashes are recorded
    recorded: tuple[str, ...]
    timeout: float  # in seconds
    locks: tuple[Path, ...] = ()  # a file for each GPU that it shares with other lanes
    cancel: int | None = None  # a file descriptor; once it can be read, the lane is abandoned
    share: environment.Share = environment.ONE_CORE  # of the host's cores, and of its GPUs where it executes

    @property
    def is_wrong_fix(self) -> bool:
        """Whether it is to be refused: its times mean nothing, so that it waits for no GPU to be its own."""
        return self.cell.is_wrong_fix and self.is_patched

    @property
    def stops(self) -> bool:
        """Whether it is over with the first check that fails."""
        return self.is_wrong_fix and not self.cell.judges_all

    @property
    def modules(self) -> tuple[str, ...]:
        """The import names of the modules under test."""
        return self.cell.pack.definition.upstream.modules


@dataclass(frozen=True)
class LaneRun:
    """What came of a lane's processes."""

    ended: Ended  # how
    script: Script  # what reproduce.py said
    results: Results  # of contract.py; empty where there is none, or it did not run
    loaded: tuple[UpstreamLine, ...]  # the modules under test, by the witness
    printed: str  # what reproduce.py wrote to standard output
    log: Path  # the file of its whole output
    #: why none of it may be believed: the witness's notes cannot be read; or what the lane, or somebody else meanwhile,
    #: changed of its tree or dependencies
    problem: str = ""


def kept_key(lane: Lane, host: Host) -> str:
    """Name the lane's caches: never shared between two trees, sets, targets or toolchains."""
    prefix = built_environment.prefix(lane.cell.environment)
    return files.key_of(
        lane.tree.key, lane.dependency_set.sha256, lane.cell.target, prefix, host.python, host.torch, host.triton
    )


def run(cache: Cache, host: Host, lane: Lane, log: Path) -> LaneRun:
    """Run one lane to its end.

    ChangedError is raised where its tree or dependencies are not what was laid out; they have been laid out anew.
    """
    layouts = (lane.tree.layout, lane.dependencies)
    with cache.guard(), cache.scratch("lane-") as work:
        seals = [layout.lay_out() for layout in layouts]
        built_environment.check(cache, lane.cell.environment)
        jit = nullcontext(work / "jit") if lane.is_wrong_fix else jit_folder(cache, kept_key(lane, host), work)
        with jit as kept, Log(log) as output:
            environment.make_folders(work, kept)
            ran = _run(lane, work, kept, output)
        try:
            if ran.ended.reason != ABANDONED:
                for layout, seal_before in zip(layouts, seals, strict=True):
                    layout.check(seal_before, while_it_ran=True)
                built_environment.check(cache, lane.cell.environment)
        except ChangedError as error:
            return replace(ran, problem=f"while it ran: {error}")
    return ran


def share_of(lane: Lane, gate: Path) -> environment.Share:
    """Return a lane's share of the host; it may ask for its GPUs alone where others use them and it measures."""
    if lane.cell.evidence != Evidence.EXECUTED:
        return replace(lane.share, visible="")
    return replace(lane.share, gate=gate if lane.locks and not lane.is_wrong_fix else None)


def _run(lane: Lane, work: Path, kept: Path, log: Log) -> LaneRun:
    """Run the script, and then the contract: not where the script failed, or has refused a wrong fix already.

    Where the script raises on a wrong fix, the contract says whether the code under test did.
    """
    line, none = LastLine(), Script(LaneVerdict.ERROR, "")
    probe, contract, settings = lane.cell.pack.probe, lane.cell.pack.contract, lane.cell.pack.definition.script
    how = (str(probe),) if settings is None else (str(ORDINARY), str(probe), json.dumps(asdict(settings)))
    command = _command(lane, work, kept, ("-P", *how), lane.timeout)
    ended = process.run(command, log, line)
    said = script.read(line.text, ended.status) if ended.reason == "exited" and ended.status >= 0 else none
    refused = lane.stops and said.verdict == LaneVerdict.BUG_REPRODUCED
    found = Results()
    failed = said.verdict == LaneVerdict.ERROR
    raised = lane.is_wrong_fix and failed and ended.reason == "exited" and ended.status == RAISED
    if contract.exists() and (not failed or raised) and not refused:
        stop = ("-x",) if lane.stops else ()
        pytest = ("-P", *PYTEST, "--rootdir", str(contract.parent), *stop, str(contract))
        command = _command(lane, work, kept, pytest, lane.timeout - ended.seconds)
        second = process.run(command, log)
        found = results.read(work / RESULTS, second.status, lane.cell.pack.definition.claims)
        ended = _together(ended, second)
    seen, problem = results.read_loaded(work / LOADED)
    return LaneRun(ended, said, found, seen, line.printed, log.path, problem)


def _together(first: Ended, second: Ended) -> Ended:
    """Put together how script and contract ended; a contract that pytest ended leaves the script's exit status."""
    normal = second.reason == "exited" and second.status in (results.PASSED, results.FAILED, results.NOTHING)
    return replace(
        second,
        status=first.status if normal else second.status,
        seconds=first.seconds + second.seconds,
        waited=first.waited + second.waited,
        peak_memory=max(first.peak_memory, second.peak_memory),
        left_behind=first.left_behind + second.left_behind,
    )


def _command(lane: Lane, work: Path, kept: Path, arguments: tuple[str, ...], timeout: float) -> process.Command:
    python = built_environment.interpreter(lane.cell.environment)
    gate = work / f"gate-{len(list(work.glob('gate-*')))}"  # each supervisor makes its own
    # What contracts import, the kit, lies in the last folder.
    paths = [WITNESS, lane.tree.import_root, lane.dependencies.folder, files.REPOSITORY]
    return process.Command(
        arguments=(str(python), *arguments),
        environment={
            **environment.build(os.environ, work, kept, paths, share_of(lane, gate)),
            "REPRODUCER_TREE": str(lane.tree.folder),
            "REPRODUCER_MODULES": ",".join(lane.modules),
            "REPRODUCER_LOADED": str(work / LOADED),
            "REPRODUCER_RESULTS": str(work / RESULTS),
            "REPRODUCER_TARGET": lane.cell.target,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        folder=work / "cwd",
        timeout=max(0.1, timeout),
        cancel=lane.cancel,
        gate=gate,
        locks=lane.locks,
    )


@contextmanager
def jit_folder(cache: Cache, key: str, work: Path) -> Iterator[Path]:
    """Yield the folder of a lane's JIT results: those of the run before, where nothing has touched them since.

    Where another runner uses them at this moment, the lane begins with none and leaves none.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(cache.lock(f"jit-{key}", timeout=0))
        except TimeoutError:
            yield work / "jit"
            return
        folder = cache.entry("jit", key)
        if folder.exists() and not seal.kept(cache, "jit", key, folder):
            seal.forget(cache, "jit", key, folder)
        yield folder
        seal.keep(cache, "jit", key, folder)
