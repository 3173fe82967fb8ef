"""A target's own environment: used by its lanes where it has been made, and named by what it depends on."""

from __future__ import annotations

import dataclasses
import shlex
import sys

from harness.host import nvml
from harness.lane import environment
from testing import toys
from testing.workbench import Workbench


def _lay(workbench: Workbench, name: str) -> None:
    built = f'environment = "{name}"\n\n[environments."{name}"]\nscript = "build.py"\nfiles = {{}}\n'
    toys.replace(workbench.lay("01_confirmed") / "pack.toml", "timeout_s = 60", f"timeout_s = 60\n{built}")


def test_lanes_run_in_the_environment_of_their_target_once_it_is_there(workbench: Workbench) -> None:
    _lay(workbench, "toy")
    marker = workbench.folder / "marker"
    assert workbench.run("run", "1").returncode == 0
    folder = workbench.cache / environment.BUILT / environment.environment_key(nvml.detect(), "toy")
    interpreter = folder / "bin/python"
    interpreter.parent.mkdir(parents=True)
    own = shlex.quote(sys.executable)
    interpreter.write_text(f'#!/bin/sh\necho lane >> {shlex.quote(str(marker))}\nexec {own} "$@"\n')
    interpreter.chmod(0o755)
    assert not marker.exists()
    process = workbench.run("run", "1")
    assert process.returncode == 0, process.stderr
    assert marker.read_text().splitlines() == ["lane"] * 4, "the script and the contract of both lanes"


def test_an_environment_belongs_to_one_interpreter_and_one_torch() -> None:
    base = nvml.detect()
    hosts = (base, dataclasses.replace(base, torch="1.0"), dataclasses.replace(base, python="3.99.0"))
    keys = {environment.environment_key(variant, "toy") for variant in hosts} | {
        environment.environment_key(base, "other")
    }
    assert len(keys) == 4


def test_a_name_that_is_no_name_is_an_error(workbench: Workbench) -> None:
    _lay(workbench, "../toy")
    process = workbench.run("check")
    assert process.returncode == 2
    assert "'../toy' is not a name of lower-case letters" in process.stdout + process.stderr
