"""Whatever a script starts ends with it, and what it prints costs no memory."""

from __future__ import annotations

import subprocess
import sys

import psutil

from testing import sweeps
from testing.workbench import Workbench


def test_stubborn_grandchildren_neither_outlive_nor_hold_up_a_lane(workbench: Workbench) -> None:
    workbench.lay("20_leaves_stubborn_children")
    status, (row,) = workbench.rows("--lane", "unpatched")
    assert (status, row["verdict"]) == (0, "REPRODUCED")
    assert not sweeps.living(workbench.folder)


def test_a_script_that_has_no_group_yet_is_killed_all_the_same() -> None:
    """An interruption may come between the script's fork and its setsid."""
    script = """
import os, time
from harness.lane import supervisor
script = os.fork()
if script == 0:
    time.sleep(60)
    os._exit(0)
print(supervisor.kill_all(script)[0])
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=True)
    assert ended.stdout == "-9\n"


def test_500_megabytes_of_output_cost_neither_memory_nor_the_verdict(workbench: Workbench) -> None:
    workbench.lay("22_prints_500_megabytes")
    command = workbench.command("run", "--json", "--lane", "unpatched")
    with psutil.Popen(command, stdout=-3, stderr=-3) as runner:
        peak = 0
        while runner.poll() is None:
            try:
                peak = max(peak, runner.memory_info().rss)
                runner.wait(0.02)
            except psutil.Error:
                continue
    assert runner.returncode == 0
    assert peak < 100e6
    (log,) = workbench.cache.glob("runs/*/logs/*/*.log")
    text = log.read_text()
    assert len(text) < 400_000
    assert "bytes are left out here" in text
    assert text.rstrip().endswith("BUG_REPRODUCED")
