"""A lane: a script and a contract, one tree, one dependency set, one target, in a process group of its own."""

import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

from harness.core import Cache, LaneVerdict, files, seal
from harness.core.seal import ChangedError, Layout
from harness.host.host import Host
from harness.lane import environment, process, results, script
from harness.lane.cell import Cell
from harness.lane.environment import Share
from harness.lane.process import Ended
from harness.lane.results import Results, UpstreamLine
from harness.lane.script import Script
from harness.pack.requirements import DependencySet
from harness.upstream.tree import Tree

#: The reason of a lane that was cancelled, whose results say nothing.
ABANDONED = "abandoned"
#: The folder of the witness, which every process of a lane imports at its start.
WITNESS = Path(__file__).with_name("witness")
#: The exit status of a script that raised.
RAISED = 1
#: The files of a lane's folder that its processes write.
RESULTS, LOADED = "results.jsonl", "loaded.jsonl"
#: pytest as a contract sees it: no configuration, no plugin but the kit's, no cache in the pack.
PYTEST = (
    *("-m", "pytest", "-c", os.devnull, "--tb=short", "-rN"),  # the results have the reasons that a summary repeats
    "--disable-warnings",  # their summary names files by a path that leads out of the tree
    *("-p", "kit.plugin", "-p", "no:cacheprovider", "--import-mode=importlib"),
)


@dataclass(frozen=True)
class Lane:
    """What to run."""

    cell: Cell  # its pack and target
    tree: Tree  # the tree, patched or not
    dependency_set: DependencySet  # its name and members
    dependencies: Layout  # the folder of the set
    must_load: tuple[str, ...]  # files of the tree without which its verdict would be about something else
    #: files of the tree that the target runs, and that the patch, if there is one, changes: their hashes are recorded
    recorded: tuple[str, ...]
    timeout: float  # in seconds
    share: Share  # of the host's cores and GPUs
    locks: tuple[Path, ...] = ()  # a file for each GPU that it shares with other lanes
    cancel: int | None = None  # a file descriptor; once it can be read, the lane is abandoned

    @property
    def has_gate(self) -> bool:
        """Whether it can ask for its GPUs alone: it shares them, and its times mean something."""
        return bool(self.locks) and not self.cell.is_wrong_fix

    @property
    def modules(self) -> tuple[str, ...]:
        return self.cell.pack.definition.upstream.modules


@dataclass(frozen=True)
class LaneRun:
    """The result of a lane's processes."""

    ended: Ended
    script: Script  # the sentinel of reproduce.py
    results: Results  # of contract.py; empty if there is none, or it did not run
    loaded: tuple[UpstreamLine, ...]  # the modules under test, by the witness
    #: why nothing of it counts: the witness's notes cannot be read, or the tree or the dependencies changed meanwhile
    problem: str = ""


def run(cache: Cache, host: Host, lane: Lane) -> LaneRun:
    """Run one lane to its end.

    ChangedError: its tree or its dependencies had changed; they have been laid out anew.
    """
    cell, layouts = lane.cell, (lane.tree.layout, lane.dependencies)
    toolchain = (cell.environment or sys.prefix, host.python, host.torch, host.triton)
    key = files.key_of(lane.tree.key, lane.dependency_set.sha256, cell.target, *toolchain)
    with cache.guard(), cache.scratch("lane-") as work:
        seals = [layout.lay_out() for layout in layouts]
        environment.check_built(cache, cell.environment)
        jit = nullcontext(work / "jit") if cell.is_wrong_fix else jit_folder(cache, key, work)
        with jit as caches:
            environment.make_folders(work, caches)
            lane_run = _run(lane, work, caches)
        try:
            if lane_run.ended.reason != ABANDONED:
                for layout, seal_before in zip(layouts, seals, strict=True):
                    layout.check(seal_before, while_it_ran=True)
                environment.check_built(cache, cell.environment)
        except ChangedError as error:
            return replace(lane_run, problem=f"while it ran: {error}")
    return lane_run


def _run(lane: Lane, work: Path, caches: Path) -> LaneRun:
    """Run the script, and then the contract, unless the script failed or has refused a wrong fix.

    If the script raises on a wrong fix, the contract tells whether the code under test raised.
    """
    pack, is_wrong_fix = lane.cell.pack, lane.cell.is_wrong_fix
    stops = is_wrong_fix and not lane.cell.judges_all
    end = process.run(_command(lane, work, caches, ("-P", str(pack.script)), lane.timeout))
    exited = end.reason == "exited" and end.status >= 0
    sentinel = script.read(end.last_line, end.status) if exited else Script(LaneVerdict.ERROR)
    contract_results = Results()
    refused = stops and sentinel.verdict == LaneVerdict.BUG_REPRODUCED
    raised = is_wrong_fix and exited and end.status == RAISED
    if pack.contract.exists() and (sentinel.verdict != LaneVerdict.ERROR or raised) and not refused:
        stop = ("-x",) if stops else ()
        pytest = ("-P", *PYTEST, "--rootdir", str(pack.contract.parent), *stop, str(pack.contract))
        command = _command(lane, work, caches, pytest, lane.timeout - end.seconds)
        contract_end = process.run(command)
        contract_results = results.read(work / RESULTS, contract_end.status, pack.definition.claims)
        end = _combined(end, contract_end)
    loaded, problem = results.read_loaded(work / LOADED)
    return LaneRun(end, sentinel, contract_results, loaded, problem)


def _combined(script_end: Ended, contract_end: Ended) -> Ended:
    """Combine the ends of script and contract; the exit status is the script's unless pytest itself failed."""
    pytest_ended = contract_end.reason == "exited" and contract_end.status in results.STATUSES
    return replace(
        contract_end,
        status=script_end.status if pytest_ended else contract_end.status,
        seconds=script_end.seconds + contract_end.seconds,
        waited=script_end.waited + contract_end.waited,
        peak_memory=max(script_end.peak_memory, contract_end.peak_memory),
        left_behind=script_end.left_behind + contract_end.left_behind,
        log=script_end.log + contract_end.log,
        printed=script_end.printed,
    )


def witness_variables(tree: Path, modules: tuple[str, ...], work: Path) -> dict[str, str]:
    """Return what tells the witness which modules to note, and that `work` takes its notes."""
    return {
        "REPRODUCER_TREE": str(tree),
        "REPRODUCER_MODULES": ",".join(modules),
        "REPRODUCER_LOADED": str(work / LOADED),
    }


def _command(lane: Lane, work: Path, caches: Path, arguments: tuple[str, ...], timeout: float) -> process.Command:
    python = environment.interpreter(lane.cell.environment)
    gate = work / f"gate-{len(list(work.glob('gate-*')))}"  # each supervisor makes its own
    # The last folder is that of the kit, which contracts import.
    paths = [WITNESS, lane.tree.import_root, lane.dependencies.folder, files.REPOSITORY]
    return process.Command(
        arguments=(str(python), *arguments),
        environment={
            **environment.build(os.environ, work, caches, paths, lane.share),
            **witness_variables(lane.tree.folder, lane.modules, work),
            "REPRODUCER_RESULTS": str(work / RESULTS),
            "REPRODUCER_TARGET": lane.cell.target,
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        folder=work / "cwd",
        timeout=max(0.1, timeout),
        cancel=lane.cancel,
        locks=lane.locks,
        gate=gate if lane.has_gate else None,
    )


@contextmanager
def jit_folder(cache: Cache, key: str, work: Path) -> Iterator[Path]:
    """Yield the folder of a lane's JIT results, with those of the previous run if they are unchanged.

    No two trees, dependency sets, targets or toolchains have one `key`.
    While another runner uses them, the lane begins with none and leaves none.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(cache.lock(f"jit-{key}", timeout=0))
        except TimeoutError:
            yield work / "jit"
            return
        folder = cache.entry("jit", key)
        if folder.exists() and not seal.is_unchanged(cache, "jit", key, folder):
            seal.forget(cache, "jit", key, folder)
        yield folder
        seal.keep(cache, "jit", key, folder)
