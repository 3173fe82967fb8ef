"""A runner that is interrupted while a script of the toy pack that needs long hangs."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable
from typing import TypeVar

import psutil

from testing.workbench import Workbench

Found = TypeVar("Found")


def until(look: Callable[[], Found], seconds: float = 20.0) -> Found:
    """Look until something is there, and return it."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


def interrupted(workbench: Workbench, *arguments: str, **environment: str) -> str:
    """Interrupt the runner as Ctrl-C does, once a lane of the toy hangs; return its standard output.

    It has to end with 130, and none of its processes may be left.
    """
    command = workbench.command(*arguments)
    with subprocess.Popen(command, env=os.environ | environment, stdout=-1, stderr=-1, text=True) as runner:
        until((workbench.packs / "37_needs_long/grandchild").exists)
        children = psutil.Process(runner.pid).children(recursive=True)
        runner.send_signal(signal.SIGINT)
        output, _ = runner.communicate(timeout=30)
    assert (runner.returncode, bool(children)) == (130, True)
    assert psutil.wait_procs(children, timeout=20)[1] == []
    return output
