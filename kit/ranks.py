"""Groups of ranks: processes that talk through gloo on the CPU and through NCCL on GPUs, and that run one job together.

    with ranks(4, setup) as group:              # setup(rank) runs once on every rank
        results = group.run(measure, case)      # measure(what setup returned, case) runs on every rank

Every rank is a process and has a log. CPU ranks are forked, so they share what this process has imported. Start them on
the main thread while no other thread runs: a lock that a thread holds during the fork stays locked in the rank. GPU
ranks are spawned and load the contract by its path. A rank that dies, hangs or disagrees is named, with its last lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import faulthandler
import gc
import inspect
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map_only

from kit.compiled import load_contract
from kit.plugin import ContractError, judged

LAST_LINES = 20  # of a rank's log, in the text of an exception
GRACE_S = 15.0  # after the code under test raised on one rank, the others have so long to raise, too
STARTING_S = {"cpu": 10.0, "cuda": 120.0}  # until ranks are there: spawned ones import everything anew
#: What PyTorch says of a result of another shape or dtype, or of none, and of an index out of bounds: a contract's own
#: shapes and indices are right.
WRONG_RESULT = (
    "does not require grad",
    "to not have been used in the graph",
    "is invalid for input of size",
    "Mismatch in shape",
    "device-side assert",
)
PARTINGS = 3  # so often a group is started again after an exception that only some ranks had


class RankError(RuntimeError):
    """A rank died, hangs, or raised what is no fault of the code under test; the first line names the rank."""


@dataclass(frozen=True)
class Rank:
    """What a rank knows about itself: its number, how many there are, and its device ("cpu" or "cuda:1")."""

    number: int
    count: int
    device: str


#: How a job ended on one rank: result, tree (the code under test is wrong), skip, fault (of the contract), peer (gone),
#: died or hangs; and the result or a text.
Outcome = tuple[str, Any]


@dataclass
class RankGroup(contextlib.AbstractContextManager["RankGroup"]):
    """`count` ranks, started with the first job, that live until the group is closed.

    Attributes:
        setup: what each rank calls once, where torch.distributed is set up. torch uses one thread there.
        device: "cpu" (gloo) or "cuda" (NCCL).
        seconds: that each job may take.
        raised: in how many jobs the code under test raised.

    """

    count: int
    setup: Callable[[Rank], Any]
    device: str = "cpu"
    seconds: float = 120.0
    raised: int = field(default=0, init=False)
    _processes: list[Any] = field(default_factory=list, init=False)
    _pipes: list[Any] = field(default_factory=list, init=False)
    _partings: list[str] = field(default_factory=list, init=False)

    def run(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call function(context, *arguments) on every rank; return the results, the tensors among them on the CPU.

        `context` is what `setup` returned on that rank. `function` can be pickled by its name, and so can the
        arguments; spawned ranks load the module of `setup`. Raises AssertionError where the code under test raised, or
        an assertion failed, on a rank, with its name and text; skips where `kit.plugin.judged` says "not judged", or
        where ranks are lost; and raises RankError for a rank that died, hangs, or raised what is no fault of the code
        under test.
        """
        if len(self._partings) >= PARTINGS:
            pytest.skip(f"the ranks are lost: {self._partings[0]}"[:400])
        until = time.monotonic() + self.seconds
        if not self._processes:
            self._start()
            until += STARTING_S[self.device]
        job = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died, as its outcome tells
                pipe.send_bytes(job)
        return self._judge(function.__name__, self._outcomes(until))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every rank."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        if self._processes:
            self._folder.cleanup()
        self._processes, self._pipes = [], []

    def _start(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        module, setup = (self.setup.__module__, inspect.getfile(self.setup)), pickle.dumps(self.setup)
        context: Any = multiprocessing.get_context("fork" if self.device == "cpu" else "spawn")
        for number in range(self.count):
            mine, its = context.Pipe()
            rank = Rank(number, self.count, "cpu" if self.device == "cpu" else f"cuda:{number}")
            arguments = (rank, self._folder.name, self.seconds, its, module, setup)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which stay idle
                process.start()
            its.close()  # so that its end is the end of the pipe
            self._processes.append(process)
            self._pipes.append(mine)

    def _outcomes(self, until: float) -> list[Outcome]:
        """Wait for every rank's answer, or until one died, or until time is up."""
        waiting: dict[Any, int] = {pipe: number for number, pipe in enumerate(self._pipes)}
        outcomes: dict[int, Outcome] = {}
        while waiting and time.monotonic() < until:
            ready: list[Any] = multiprocessing.connection.wait([*waiting], max(0.0, until - time.monotonic()))
            for pipe in ready:
                number = waiting.pop(pipe)
                try:
                    outcomes[number] = pickle.loads(pipe.recv_bytes())  # noqa: S301 - our own process wrote it
                except (EOFError, ConnectionResetError):  # the end of its pipe is the end of the rank
                    self._processes[number].join()
                    outcomes[number] = "died", f"died: exit status {self._processes[number].exitcode}"
                if outcomes[number][0] in {"tree", "died", "fault"}:
                    until = min(until, time.monotonic() + GRACE_S)
        for number in waiting.values():
            os.kill(self._processes[number].pid, signal.SIGUSR1)  # it writes down where it is
            outcomes[number] = "hangs", f"hangs: no answer after {self.seconds:.0f} s"
        return [outcomes[number] for number in range(self.count)]

    def _judge(self, job: str, outcomes: list[Outcome]) -> list[Any]:
        """Return the results, or raise what the ranks came to."""
        kinds = [kind for kind, _ in outcomes]
        if {*kinds} == {"result"}:
            return [result for _, result in outcomes]
        worst = next(kind for kind in ("died", "tree", "fault", "skip", "peer", "hangs") if kind in kinds)
        named = {number: text for number, (kind, text) in enumerate(outcomes) if kind == worst}
        numbers = {text: ", ".join(str(at) for at in named if named[at] == text) for text in named.values()}
        told = "; ".join(f"rank {at} of {self.count} {text}" for text, at in numbers.items())
        alone, gone = len(named) < self.count, worst in {"died", "hangs"}
        if alone and not gone:
            told = f"the ranks disagree in {job}: {told}; the others: {', '.join(sorted({*kinds} - {worst}))}"
        if "hangs" in kinds:
            time.sleep(0.3)  # for what SIGUSR1 asked for
        shown = [line for at in (named if gone else [*named][:1]) for line in self._last_lines(at)]
        if alone or gone or worst == "peer" or "CUDA error" in told:
            self.close()  # these ranks do not meet any more, or can do nothing on their GPUs
            self._partings += [f"{job}: {told}"] * (1 if worst in {"tree", "skip"} else PARTINGS)
        if worst == "skip":
            pytest.skip(next(iter(named.values())))
        if worst == "tree":
            self.raised += "it raised" in told
            raise AssertionError("\n".join([told, *shown]))
        raise RankError("\n".join([told, *shown]))

    def _last_lines(self, number: int) -> list[str]:
        """Return the last lines that a rank wrote, and where it hangs, innermost first."""
        files = [Path(self._folder.name, f"{name}{number}") for name in ("log", "stack")]
        log, stack = (file.read_text(errors="replace").splitlines() if file.exists() else [] for file in files)
        lines = log[-LAST_LINES:] + stack[:LAST_LINES]
        return [f"last lines of rank {number} of {self.count}:", *(f"    {line}" for line in lines)]


ranks = RankGroup  # as a contract reads it: with ranks(4, setup) as group


def partition(world: int, size: int, *, apart: bool = False) -> list[list[int]]:
    """Return the ranks of each group of `size`: neighbours, or `apart`, as order="dp-tp" makes them."""
    start, step = (1, world // size) if apart else (size, 1)
    return [[group * start + place * step for place in range(size)] for group in range(world // size)]


def own_group(size: int, *, apart: bool = False) -> Any:  # noqa: ANN401 - a ProcessGroup, without types
    """Make the process groups of a partition, on every rank; return the one that this rank is in."""
    members = partition(torch.distributed.get_world_size(), size, apart=apart)
    return torch.distributed.new_subgroups_by_enumeration(members)[0]  # type: ignore[no-untyped-call]


def _serve(rank: Rank, folder: str, seconds: float, pipe: Any, module: tuple[str, str], setup: bytes) -> None:  # noqa: ANN401, PLR0913, PLR0917
    """Be one rank: answer every job until this process is killed."""
    log = os.open(f"{folder}/log{rank.number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1, closefd=False)  # not what pytest captures
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the tests
    faulthandler.register(signal.SIGUSR1, file=os.open(f"{folder}/stack{rank.number}", os.O_WRONLY | os.O_CREAT))
    gc.freeze()  # a collection on a rank looks at what the rank has made, not at all that was imported
    kind, context = _attempt(_set_up, rank, folder, seconds, module, setup)
    while True:
        job = pipe.recv_bytes()
        pipe.send_bytes(pickle.dumps(_attempt(_do, context, job) if kind == "result" else (kind, context)))


def _set_up(rank: Rank, folder: str, seconds: float, module: tuple[str, str], setup: bytes) -> Any:  # noqa: ANN401
    """Set torch and torch.distributed up, and return what the contract's setup makes of it."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if rank.device != "cpu":
        torch.cuda.set_device(rank.device)
    torch.distributed.init_process_group(
        "gloo" if rank.device == "cpu" else "nccl",
        store=torch.distributed.FileStore(f"{folder}/store", rank.count),  # type: ignore[attr-defined]
        rank=rank.number,
        world_size=rank.count,
        timeout=dt.timedelta(seconds=seconds + 60),  # the parent says before that which rank hangs
    )
    load_contract(*module)
    return pickle.loads(setup)(rank)  # noqa: S301 - our own parent wrote it


def _do(context: Any, job: bytes) -> Any:  # noqa: ANN401
    """Run one job, and return its result for the parent."""
    function, arguments = pickle.loads(job)  # noqa: S301 - our own parent wrote it
    print("job", function.__name__, *arguments, flush=True)  # noqa: T201 - into its log
    result = function(context, *arguments)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # what fails on a GPU belongs to the job that asked for it
    # In memory of its own: a slice would bring its whole tensor.
    return tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True).contiguous().clone(), result)


def _attempt(function: Callable[..., Any], *arguments: object) -> Outcome:
    """Call a function, and say how it ended and whose fault that is."""
    try:
        return "result", function(*arguments)
    except (Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        if isinstance(error, torch.distributed.DistError) or "Connection closed by peer" in str(error):
            return "peer", str(error)[:400]
        try:
            ok, reason = judged(error, [frame.filename for frame in traceback.extract_tb(error.__traceback__)])
        except ContractError as told:
            wrong = any(text in str(told) for text in WRONG_RESULT)
            return ("tree", f"it raised {told}") if wrong else ("fault", str(told))
        return "skip" if ok is None else "tree", reason
