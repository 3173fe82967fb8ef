"""Running a script or a contract under its supervisor, and reading its output with bounded memory."""

import contextlib
import os
import select
import selectors
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from harness.lane import script

SUPERVISOR = Path(__file__).with_name("supervisor.py")
CHUNK = 1 << 16
#: Seconds beyond the command's own timeout, for killing its processes, and for reading the rest of its pipes.
GRACE = 30.0
DRAIN = 5.0
#: Seconds for which a lane may wait until other lanes leave its GPUs: each of them has its own timeout.
LONGEST_WAIT = 3600.0
#: Bytes of a log's beginning and of its end that are kept.
HEAD = 1 << 17
TAIL = 1 << 17
#: Bytes after which an unfinished line is written.
LONGEST_LINE = 1 << 20


@dataclass(frozen=True)
class Command:
    """What to run."""

    arguments: tuple[str, ...]  # the interpreter and its arguments
    environment: Mapping[str, str]  # the whole environment
    folder: Path  # the working directory
    timeout: float  # seconds of wall time
    #: a file descriptor; once it can be read, everything is killed and the end is ``abandoned``
    cancel: int | None = None
    locks: tuple[Path, ...] = ()  # a file for each GPU that is shared with other lanes
    gate: Path | None = None  # the named pipe, not made yet, on which the command asks for its GPUs alone


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    #: ``exited``, ``timed out``, ``abandoned``, or ``lost`` if the supervisor itself was killed
    reason: str
    status: int  # the exit status, negative for a signal
    seconds: float  # wall time, without the wait for its GPUs
    peak_memory: int  # of its largest process, in bytes
    left_behind: int  # the number of processes that outlived it and were killed
    waited: float = 0.0  # seconds of the wait for its GPUs
    log: str = ""  # what it printed on both streams; of a long output, the beginning and the end
    printed: str = ""  # its standard output, as a report shows it
    last_line: str = ""  # of its standard output, the last line that is not blank


LOST = Ended("lost", -9, 0.0, 0, 0)
ABANDONED = Ended("abandoned", -9, 0.0, 0, 0)


class Log:
    """Keeps streams in whole lines: of a long output, the beginning and the end."""

    def __init__(self) -> None:
        self._rest: dict[int, bytes] = {}
        self._head, self._tail = bytearray(), bytearray()
        self._dropped = 0

    def feed(self, source: int, data: bytes) -> None:
        """Take a piece of the stream `source`; an unfinished line waits for its rest."""
        lines, newline, rest = (self._rest.get(source, b"") + data).rpartition(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, newline, rest = lines + newline + rest, b"", b""
        self._rest[source] = rest
        self._keep(lines + newline)

    def text(self) -> str:
        """Return the lines, the unfinished ones last, with a note on dropped bytes; call it once, at the end."""
        for rest in self._rest.values():
            self._keep(rest + b"\n" if rest else b"")
        note = f"\n[... {self._dropped} bytes are left out here ...]\n" if self._dropped else ""
        return (self._head + note.encode() + self._tail).decode(errors="replace")

    def _keep(self, data: bytes) -> None:
        head = data[: HEAD - len(self._head)]
        self._head += head
        self._tail += data[len(head) :]
        surplus = max(0, len(self._tail) - TAIL)
        del self._tail[:surplus]
        self._dropped += surplus


def run(command: Command) -> Ended:
    """Run a command until all its processes are gone."""
    report, report_end = os.pipe()
    locks = os.pathsep.join(str(path) for path in command.locks)
    settings = (str(command.timeout), str(report_end), str(command.gate or ""), locks)
    supervisor = subprocess.Popen(
        [sys.executable, "-I", "-S", str(SUPERVISOR), *settings, *command.arguments],
        cwd=command.folder,
        env=dict(command.environment),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        pass_fds=[report_end],
        start_new_session=True,
    )
    os.close(report_end)
    try:
        return _read(supervisor, report, command)
    finally:
        _end(supervisor, report)
        os.close(report)


def _read(supervisor: subprocess.Popen[bytes], report: int, command: Command) -> Ended:
    """Read until the supervisor has reported and its pipes end, or until its deadline."""
    log, output = Log(), Log()
    deadline = time.monotonic() + command.timeout + GRACE + (LONGEST_WAIT if command.locks else 0.0)
    ended, cancel = LOST, command.cancel
    with selectors.DefaultSelector() as selector:
        for source in (supervisor.stdout, supervisor.stderr, report, cancel):
            if source is not None:
                selector.register(source, selectors.EVENT_READ)
        unread = 3
        while unread and time.monotonic() < deadline:
            for key, _ in selector.select(max(0.0, deadline - time.monotonic())):
                if key.fd == cancel:
                    ended, deadline = ABANDONED, 0.0
                    break
                data = os.read(key.fd, CHUNK)
                if key.fd == report:
                    ended = _ended(data.decode()) if data else LOST
                    deadline = min(deadline, time.monotonic() + DRAIN)
                if key.fd == report or not data:
                    selector.unregister(key.fileobj)
                    unread -= 1
                else:
                    log.feed(key.fd, data)
                    if key.fileobj is supervisor.stdout:
                        output.feed(key.fd, data)
    text = output.text()
    return replace(ended, log=log.text(), printed=script.printed(text), last_line=script.last_line(text))


def _ended(report: str) -> Ended:
    reason, status, seconds, peak_memory, left_behind, waited = report.split("\n")
    return Ended(reason, int(status), float(seconds), int(peak_memory), int(left_behind), float(waited))


def _end(supervisor: subprocess.Popen[bytes], report: int) -> None:
    """Let go of the supervisor: when its standard input closes, it kills all that still runs.

    The pipe of its report ends with the supervisor, so that no wait has to poll.

    A supervisor that was killed or stopped does not; then its processes, whose parent is now this process, are killed
    here. A child in another session is a living supervisor, or an orphan.
    """
    for stream in (supervisor.stdin, supervisor.stdout, supervisor.stderr):
        if stream is not None:
            stream.close()
    deadline = time.monotonic() + GRACE
    while select.select([report], [], [], max(0.0, deadline - time.monotonic()))[0]:
        if not os.read(report, CHUNK):
            break
    else:
        supervisor.kill()
    supervisor.wait()
    if supervisor.returncode == 0:
        return
    import psutil  # noqa: PLC0415 - 15 ms that nearly no run needs

    own = os.getsid(0)
    for child in psutil.Process().children():
        with contextlib.suppress(psutil.Error, OSError):
            if os.getsid(child.pid) == own or str(SUPERVISOR) in child.cmdline():
                continue
            for process in (*child.children(recursive=True), child):
                process.kill()
            os.waitpid(child.pid, 0)
