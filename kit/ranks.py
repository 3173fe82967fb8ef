"""Groups of ranks: processes that talk through gloo on the CPU and through NCCL on GPUs, and that run one job together.

    with ranks(4, setup) as group:              # setup(rank) runs once on every rank
        results = group.run(measure, case)      # measure(what setup returned, case) runs on every rank

Every rank is a process and has a log. CPU ranks are forked, so they share what this process has imported. GPU ranks are
spawned and load the contract by its path. A rank that dies, hangs or disagrees is named, with its last lines.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime as dt
import faulthandler
import functools
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
from collections.abc import Callable, Iterator
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
PARTINGS = 3  # so often a group is started again after an exception that only some ranks had


class RankError(RuntimeError):
    """A rank died, hangs, or raised what is no fault of the code under test; the first line names the rank."""


@dataclass(frozen=True)
class Rank:
    """What a rank knows about itself: its number, how many there are, and its device ("cpu" or "cuda:1")."""

    number: int
    count: int
    device: str


@dataclass
class _Outcome:
    """How a job ended on one rank."""

    kind: str  # result, tree (the code under test is wrong), skip, fault (of the contract), peer (gone), died, hangs
    value: Any = None
    text: str = ""


@dataclass
class RankGroup:
    """`count` ranks that live until the group is closed; see `ranks`."""

    count: int
    setup: Callable[[Rank], Any] | None
    device: str
    seconds: float
    _folder: Path = field(default_factory=Path)
    _processes: list[Any] = field(default_factory=list)
    _pipes: list[Any] = field(default_factory=list)
    _partings: list[str] = field(default_factory=list)
    _broken: str = ""

    def run(self, function: Callable[..., Any], *arguments: object) -> list[Any]:
        """Call function(context, *arguments) on every rank; return the results, the tensors among them on the CPU.

        `context` is what `setup` returned on that rank, or its Rank. `function` stands at the top of its module, and
        the arguments can be pickled. Raises AssertionError where the code under test raised, or an assertion failed,
        on a rank, with its name and text; skips where `kit.plugin.judged` says "not judged"; and raises RankError for a
        rank that died, hangs, or raised what is no fault of the code under test.
        """
        if self._broken:
            raise RankError(f"an earlier job broke these ranks: {self._broken}")
        if len(self._partings) >= PARTINGS:
            pytest.skip(f"the ranks parted {PARTINGS} times before: {self._partings[0]}"[:400])
        until = time.monotonic() + self.seconds
        if not self._processes:
            self._start(function)
            until += STARTING_S[self.device]
        job = pickle.dumps((function, arguments))
        for pipe in self._pipes:
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it died, as its outcome tells
                pipe.send((function.__module__, inspect.getfile(function), job))
        return self._judge(function.__name__, self._outcomes(until))

    def close(self) -> None:
        """End every rank."""
        for process, pipe in zip(self._processes, self._pipes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        self._processes, self._pipes = [], []

    def _start(self, function: Callable[..., Any]) -> None:
        """Start the ranks; `function` names the module that spawned ones load."""
        self._folder = Path(tempfile.mkdtemp(dir=self._folder.parent if self._folder.name else None))
        first = getattr(self.setup, "func", self.setup) or function  # of a functools.partial
        context: Any = multiprocessing.get_context("fork" if self.device == "cpu" else "spawn")
        setup = pickle.dumps(self.setup)
        for number in range(self.count):
            mine, its = context.Pipe()
            rank = Rank(number, self.count, "cpu" if self.device == "cpu" else f"cuda:{number}")
            module = (first.__module__, inspect.getfile(first))
            arguments = (rank, self._folder, self.seconds, its, module, setup)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, which stay idle
                process.start()
            its.close()  # so that its end is the end of the pipe
            self._processes.append(process)
            self._pipes.append(mine)

    def _outcomes(self, until: float) -> list[_Outcome]:
        """Wait for every rank's answer, or until one died, or until time is up."""
        outcomes: dict[int, _Outcome] = {}
        while len(outcomes) < self.count and time.monotonic() < until:
            waiting = [pipe for number, pipe in enumerate(self._pipes) if number not in outcomes]
            for pipe in multiprocessing.connection.wait(waiting, max(0.0, until - time.monotonic())):
                number = self._pipes.index(pipe)
                outcomes[number] = self._answer(number)
                if outcomes[number].kind in {"tree", "died", "fault"}:
                    until = min(until, time.monotonic() + GRACE_S)
        for number in set(range(self.count)) - outcomes.keys():
            os.kill(self._processes[number].pid, signal.SIGUSR1)  # it writes down where it is
            outcomes[number] = _Outcome("hangs", text=f"hangs: no answer after {self.seconds:.0f} s")
        return [outcomes[number] for number in range(self.count)]

    def _answer(self, number: int) -> _Outcome:
        """Receive one rank's outcome; the end of its pipe is the end of the rank."""
        try:
            outcome: _Outcome = pickle.loads(self._pipes[number].recv_bytes())  # noqa: S301 - our own process wrote it
        except (EOFError, ConnectionResetError):
            self._processes[number].join()
            return _Outcome("died", text=f"died: exit status {self._processes[number].exitcode}")
        return outcome

    def _judge(self, job: str, outcomes: list[_Outcome]) -> list[Any]:
        """Return the results, or raise what the ranks came to."""
        kinds = [outcome.kind for outcome in outcomes]
        if set(kinds) == {"result"}:
            return [outcome.value for outcome in outcomes]
        worst = next(kind for kind in ("died", "tree", "fault", "skip", "peer", "hangs") if kind in kinds)
        named = [number for number, kind in enumerate(kinds) if kind == worst]
        alone = len(named) < self.count
        texts = {text: [str(at) for at in named if outcomes[at].text == text] for text in (x.text for x in outcomes)}
        told = "; ".join(f"rank {', '.join(at)} of {self.count} {text}" for text, at in texts.items() if at)
        if alone and worst not in {"died", "hangs"}:
            told = f"the ranks disagree in {job}: {told}; the others: {', '.join(sorted({*kinds} - {worst}))}"
        if "hangs" in kinds:
            time.sleep(0.3)  # for what SIGUSR1 asked for
        shown = named if worst in {"died", "hangs"} else named[:1]
        text = "\n".join([told, *(line for number in shown for line in self._last_lines(number))])
        if alone or worst in {"died", "hangs", "peer"} or "CUDA error" in told:
            self.close()  # these ranks do not meet any more, or can do nothing on their GPUs
            self._partings.append(f"{job}: {told}")
        if worst == "tree":
            raise AssertionError(text)
        if worst == "skip":
            pytest.skip(outcomes[named[0]].text)
        self._broken = told if not self._processes else ""
        raise RankError(text)

    def _last_lines(self, number: int) -> list[str]:
        """Return the last lines that a rank wrote, and where it hangs, innermost first."""
        files = [self._folder / f"{name}{number}" for name in ("log", "stack")]
        log, stack = (file.read_text(errors="replace").splitlines() if file.exists() else [] for file in files)
        lines = log[-LAST_LINES:] + stack[:LAST_LINES]
        return [f"last lines of rank {number} of {self.count}:", *(f"    {line}" for line in lines)]


@contextlib.contextmanager
def ranks(
    count: int, setup: Callable[[Rank], Any] | None = None, *, device: str = "cpu", seconds: float = 120.0
) -> Iterator[RankGroup]:
    """Give a group of `count` ranks, started with its first job; `device` is "cpu" (gloo) or "cuda" (NCCL).

    Each job may take `seconds`. torch.distributed is set up when setup(rank) is called. torch uses one thread there.
    """
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        group = RankGroup(count, setup, device, seconds, Path(folder, "start"))
        try:
            yield group
        finally:
            group.close()


def partition(world: int, size: int, *, apart: bool = False) -> list[list[int]]:
    """Return the ranks of each group of `size`: neighbours, or `apart`, as order="dp-tp" makes them."""
    if apart:
        return [list(range(start, world, world // size)) for start in range(world // size)]
    return [list(range(start, start + size)) for start in range(0, world, size)]


def own_group(size: int, *, apart: bool = False) -> Any:  # noqa: ANN401 - a ProcessGroup, without types
    """Make the process groups of a partition, on every rank; return the one that this rank is in."""
    members = partition(torch.distributed.get_world_size(), size, apart=apart)
    return torch.distributed.new_subgroups_by_enumeration(members)[0]  # type: ignore[no-untyped-call]


def _serve(rank: Rank, folder: Path, seconds: float, pipe: Any, module: tuple[str, str], setup: bytes) -> None:  # noqa: ANN401, PLR0913, PLR0917
    """Be one rank: answer every job until this process is killed."""
    log = os.open(f"{folder}/log{rank.number}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1, closefd=False)  # not what pytest captures
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: no rank outlives the tests
    faulthandler.register(signal.SIGUSR1, file=os.open(f"{folder}/stack{rank.number}", os.O_WRONLY | os.O_CREAT))
    ready = _attempt(functools.partial(_set_up, rank, folder, seconds, module, setup))
    while True:
        job = pipe.recv()
        outcome = _attempt(functools.partial(_do, ready.value, *job)) if ready.kind == "result" else ready
        pipe.send_bytes(pickle.dumps(outcome))


def _set_up(rank: Rank, folder: Path, seconds: float, module: tuple[str, str], setup: bytes) -> Any:  # noqa: ANN401
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
    function = pickle.loads(setup)  # noqa: S301 - our own parent wrote it
    return rank if function is None else function(rank)


def _do(context: Any, name: str, file: str, job: bytes) -> Any:  # noqa: ANN401
    """Run one job, and return its result for the parent."""
    load_contract(name, file)
    function, arguments = pickle.loads(job)  # noqa: S301 - our own parent wrote it
    print("job", function.__name__, *arguments, flush=True)  # noqa: T201 - into its log
    result = function(context, *arguments)
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()  # what fails on a GPU belongs to the job that asked for it
    # In memory of its own: a slice would bring its whole tensor.
    return tree_map_only(torch.Tensor, lambda x: x.detach().to("cpu", copy=True).contiguous().clone(), result)


def _attempt(function: Callable[[], Any]) -> _Outcome:
    """Call a function, and say how it ended and whose fault that is."""
    try:
        return _Outcome("result", function())
    except (Exception, pytest.skip.Exception) as error:  # noqa: BLE001 - the parent reports it
        traceback.print_exc()
        if isinstance(error, torch.distributed.DistError) or "Connection closed by peer" in str(error):
            return _Outcome("peer", text=str(error)[:400])
        try:
            ok, reason = judged(error, [frame.filename for frame in traceback.extract_tb(error.__traceback__)])
        except ContractError as told:
            return _Outcome("fault", text=str(told))
        return _Outcome("skip" if ok is None else "tree", text=reason)
