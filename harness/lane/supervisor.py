"""The parent of a command: it ends the command and all processes that the command started, whatever happens.

Run as a script, in a session of its own: ``python -I -S supervisor.py TIMEOUT_S REPORT_FD GATE LOCKS COMMAND...``.
The command runs a script or a contract. Standard input is a pipe that the runner holds open: when it closes, because
the runner was interrupted or killed, the supervisor kills the command. It writes six lines to REPORT_FD: the reason
(exited, timed out, abandoned), the status (negative: the signal), the seconds (without the wait for its GPUs), the peak
memory (bytes, of the largest process), the number of processes that outlived the command, and the seconds of that wait.
A lane starts two supervisors, so that they import little: site-packages and json would take 20 ms.

LOCKS names a file for each GPU that the lane shares with others (separated by ``:``; empty if it shares none). The lane
holds each lock shared while it runs. GATE is the path of a named pipe, which the supervisor makes; the command finds it
in REPRODUCER_GPU_GATE. A command that reads it to its end waits until this lane holds the locks alone; the next time,
until they are shared again. The time-out stands still meanwhile. With an empty GATE no command can ask.
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import resource
import select
import signal
import site
import sys
import time

PR_SET_CHILD_SUBREAPER, PR_SET_PDEATHSIG = 36, 1
#: Seconds that killed processes may take to disappear before the supervisor gives up on them.
PATIENCE = 20.0
POLL = 0.05


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, even of one that leaves the session (Linux)."""
    ask_kernel(PR_SET_CHILD_SUBREAPER, 1)


def ask_kernel(option: int, value: int) -> None:
    """Call prctl, which only Linux has."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0)


class Gate:
    """The lane's share of its GPUs: shared locks, and exclusive ones while the command asks for them.

    Each GPU has two locks. A lane that asks for the GPU alone holds the second lock while it waits for the first. A
    lane that begins to share the GPU has to pass the second: so no lane waits for ever. Locks are taken all together or
    not at all, so that lanes of several GPUs cannot wait for each other.
    """

    def __init__(self, pipe: str, locks: list[str]) -> None:
        """Open the locks; hold none."""
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self.pipe = pipe
        self.gpus = [os.open(path, flags, 0o600) for path in locks]
        self.doors = [os.open(f"{path}.door", flags, 0o600) for path in locks]
        self.answer: int | None = None  # the open end of the pipe of a command that waits
        self.alone = self.at_the_door = False

    def _take(self, descriptors: list[int], kind: int) -> bool:
        for number, descriptor in enumerate(descriptors):
            try:
                fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
            except BlockingIOError:
                self._drop(descriptors[:number])
                return False
        return True

    @staticmethod
    def _drop(descriptors: list[int]) -> None:
        for descriptor in descriptors:
            fcntl.flock(descriptor, fcntl.LOCK_UN)

    def share(self) -> bool:
        """Take every lock shared, if that is possible now; return whether it was."""
        passed = self._take(self.doors, fcntl.LOCK_SH) and self._take(self.gpus, fcntl.LOCK_SH)
        self._drop(self.doors)
        return passed

    def serve(self) -> bool:
        """Answer a command that asks; return whether the command waits for an answer."""
        if self.answer is None:
            try:
                self.answer = os.open(self.pipe, os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError as error:
                if error.errno == errno.ENXIO:  # no command reads the pipe
                    return False
                raise
            self._drop(self.gpus)
        if self._turn():
            self.alone = not self.alone
            os.close(self.answer)
            self.answer = None
        return self.answer is not None

    def _turn(self) -> bool:
        if self.alone:
            return self.share()
        self.at_the_door = self.at_the_door or self._take(self.doors, fcntl.LOCK_EX)
        if not self.at_the_door or not self._take(self.gpus, fcntl.LOCK_EX):
            return False
        self._drop(self.doors)
        self.at_the_door = False
        return True


def runner_is_gone(wait: float, *descriptors: int) -> bool:
    """Wait at most `wait` seconds for one of `descriptors`; return whether the runner is gone."""
    stdin = sys.stdin.fileno()
    ready = select.select([stdin, *descriptors], [], [], wait)[0]
    for descriptor in ready:
        if descriptor != stdin:
            os.read(descriptor, 4096)
    return stdin in ready


def wait(child: int, timeout: float, wakeup: int, gate: Gate | None) -> tuple[str, float]:
    """Wait until the command ends (without reaping it), its time is up, or the runner is gone.

    Return the reason, and the seconds for which the command waited for its GPUs.
    """
    started, waited = time.monotonic(), 0.0
    while True:
        if os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return "exited", waited
        before = time.monotonic()
        waits = gate is not None and gate.serve()
        remaining = started + timeout + waited - before
        if remaining <= 0 and not waits:
            return "timed out", waited
        if runner_is_gone(remaining if gate is None else min(POLL, max(remaining, 0.0)), wakeup):
            return "abandoned", waited
        waited += time.monotonic() - before if waits else 0.0


def kill_all(child: int) -> tuple[int, int]:
    """Kill the group of a command before its leader is reaped, then every descendant.

    Return the status, and how many descendants survived the leader. A command that was just forked has no group of its
    own yet, so that it is killed by itself as well.
    """
    for kill in (os.killpg, os.kill):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            kill(child, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    survivors: set[int] = set()
    end = time.monotonic() + PATIENCE
    if has_orphans():
        site.main()  # -S has left out site-packages
    while has_orphans() and time.monotonic() < end:
        import psutil  # noqa: PLC0415 - few commands leave something behind, and its import takes 15 ms

        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    survivors.add(process.pid)
                process.kill()
        time.sleep(POLL)
    return status, len(survivors)


def has_orphans() -> bool:
    """Reap the processes that have ended; return whether others of the command are still there."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return False
    return True


def start(command: list[str]) -> int:
    """Start the command in a session of its own; the kernel kills it if its supervisor is killed.

    Fork and exec by hand: importing subprocess would cost every lane 10 ms.
    """
    supervisor = os.getpid()
    child = os.fork()
    if child:
        return child
    try:
        os.setsid()
        ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != supervisor:
            os._exit(127)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.execve(command[0], command, os.environ)  # noqa: S606 - no shell is wanted
    except OSError as error:
        os.write(2, f"{command[0]}: {error}\n".encode())
    finally:
        os._exit(127)


def main() -> None:
    """Run the command and report how it ended."""
    pipe, locks, *command = sys.argv[3:]
    timeout, report = float(sys.argv[1]), int(sys.argv[2])
    os.set_inheritable(report, False)  # noqa: FBT003 - its signature
    adopt_orphans()
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    gate = Gate(pipe, locks.split(os.pathsep) if locks else [])
    while not gate.share():
        if runner_is_gone(POLL):
            return
    if pipe:
        os.mkfifo(pipe, 0o600)
        os.environ["REPRODUCER_GPU_GATE"] = pipe
    started = time.monotonic()
    child = start(command)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # the pipes belong to the command alone: they end when its last process does
    os.dup2(quiet, 2)
    reason, waited = wait(child, timeout, wakeup, gate if pipe else None)
    seconds = time.monotonic() - started
    status, left_behind = kill_all(child)
    peak_memory = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    fields = (reason, status, seconds - waited, peak_memory, left_behind, waited)
    with contextlib.suppress(BrokenPipeError):
        os.write(report, "\n".join(map(str, fields)).encode())
    os._exit(0)  # the runner waits for this end


if __name__ == "__main__":
    main()
