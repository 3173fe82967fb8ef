"""The parent of a probe: it ends the probe and everything that the probe started, whatever happens.

Run as a script, in a session of its own: ``python -I supervisor.py TIMEOUT_S REPORT_FD COMMAND...``.
Standard input is a pipe that the runner holds open: when it closes, because the runner was interrupted or
killed, the supervisor kills the probe. It writes one JSON object to REPORT_FD: ``reason`` (exited, timed out,
abandoned), ``status`` (negative: the signal), ``left_behind`` (processes that outlived the probe), ``seconds``,
``peak_memory`` (bytes, the largest process).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import subprocess
import sys
import time

import psutil

PR_SET_CHILD_SUBREAPER = 36
#: How long, in seconds, killed processes may take to disappear before the supervisor gives up on them.
PATIENCE = 20.0
POLL = 0.05


def adopt_orphans() -> None:
    """Become the parent of every orphaned descendant, so that leaving the session is no escape (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def wait(probe: int, deadline: float, wakeup: int) -> str:
    """Wait until the probe ends (without reaping it), its time is up, or the runner is gone."""
    while True:
        if os.waitid(os.P_PID, probe, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
            return "exited"
        left = deadline - time.monotonic()
        if left <= 0:
            return "timed out"
        ready = select.select([sys.stdin.buffer, wakeup], [], [], left)[0]
        if sys.stdin.buffer in ready:
            return "abandoned"
        if wakeup in ready:
            os.read(wakeup, 4096)


def kill_all(probe: int) -> tuple[int, int]:
    """Kill the probe's group before its leader is reaped, then every descendant; return status and survivors seen."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(probe, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(probe, 0)[1])
    seen: set[int] = set()
    end = time.monotonic() + PATIENCE
    while time.monotonic() < end:
        for process in psutil.Process().children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.status() != psutil.STATUS_ZOMBIE:
                    seen.add(process.pid)
                process.kill()
        try:
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        except ChildProcessError:
            break
        time.sleep(POLL)
    return status, len(seen)


def main() -> None:
    """Run the command and report how it ended."""
    timeout, report, command = float(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    adopt_orphans()
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)
    signal.set_wakeup_fd(wakeup_end)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    started = time.monotonic()
    probe = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1)  # the pipes belong to the probe alone: they end when its last process does
    os.dup2(quiet, 2)
    reason = wait(probe.pid, started + timeout, wakeup)
    seconds = time.monotonic() - started
    status, left_behind = kill_all(probe.pid)
    ended = {
        "reason": reason,
        "status": status,
        "left_behind": left_behind,
        "seconds": seconds,
        "peak_memory": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024,
    }
    with contextlib.suppress(BrokenPipeError):
        os.write(report, json.dumps(ended).encode())


if __name__ == "__main__":
    main()
