"""Upstream's own tests: pytest under a lane's supervisor, in a copy of each tree."""

from __future__ import annotations

import os
import shutil
import socket
import xml.etree.ElementTree as ET
from dataclasses import dataclass
from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError, UnsupportedHereError
from harness.core.words import Evidence, SuiteVerdict
from harness.host.eligibility import version_mismatch
from harness.host.gpus import Device
from harness.host.host import cores
from harness.lane import built_environment, environment, process
from harness.lane.cell import Cell
from harness.lane.lane import jit_folder
from harness.pack.model import Pack, UpstreamTests
from harness.schedule.lane_runner import Prepared, Runner
from harness.schedule.session import Session
from harness.suites import comparison
from harness.suites.comparison import RED, CaseEnd, Comparison
from harness.upstream import patch
from harness.upstream.patch import StalePatchError
from harness.upstream.source import parse_git_source, pinned_source
from harness.upstream.tree import Tree
from harness.verdict.lane_verdict import abnormal_end

#: Options that override a suite's own configuration: no cache in the tree, every test runs, no colours in the log.
OPTIONS = ("-p", "no:cacheprovider", "--maxfail=0", "--color=no")
#: Exit statuses of pytest: all tests passed, some failed, none was collected.
PASSED, FAILED, NOTHING = 0, 1, 5


def suite_of(pack: Pack) -> UpstreamTests:
    """Return [upstream_tests] of pack.toml; HarnessError is raised where it is missing."""
    suite = pack.definition.upstream_tests
    if suite is None:
        raise HarnessError(f"{pack.name}: pack.toml has no [upstream_tests]. Next: see CONTRIBUTING.md")
    return suite


@dataclass(frozen=True)
class Suite:
    """Upstream's tests for one pack, with its trees and its dependency set laid out."""

    cell: Cell
    tests: UpstreamTests
    prepared: Prepared
    devices: tuple[Device, ...]
    session: Session

    def compared(self) -> Comparison:
        """Run the tests without and with the patch, and compare. Both runs have the test of the pack."""
        pack, pristine, patched = self.cell.pack, self.prepared.pristine, self.prepared.patched
        if patched is None:
            return Comparison(SuiteVerdict.PATCH_STALE, f"{self.prepared.patch}: {self.prepared.stale}")
        try:
            before, after = self._with_test(pristine), self._with_test(patched)
        except StalePatchError as error:
            return Comparison(SuiteVerdict.PATCH_STALE, f"upstream_test.patch: {error}")
        upstream_tests = self.run("the list of tests", pristine, listing=True)
        ends = self.run("without the patch", before), self.run("with the patch", after)
        return comparison.compare(upstream_tests, *ends, adds=pack.upstream_test_patch.exists())

    def _with_test(self, tree: Tree) -> Tree:
        """Apply upstream_test.patch, if there is one. It need not fit exactly, since fix.patch may touch its files."""
        test, upstream = self.cell.pack.upstream_test_patch, self.cell.pack.definition.upstream
        return patch.apply(self.session.cache, tree, upstream, test, exact=False) if test.exists() else tree

    def run(self, name: str, tree: Tree, *, listing: bool = False) -> dict[str, CaseEnd]:
        """Run the suite, and return the end of each test; with `listing`, pytest only lists them.

        The tests run in a copy of the tree, since they may write into it. HarnessError is raised where the run as a
        whole fails.
        """
        present = [file for file in self.tests.files if not listing or (tree.folder / file).exists()]
        if not present:
            return {}
        cache, host, label = self.session.cache, self.session.host, f"{self.cell.pack.name}: {name}"
        cache.tell(label)
        layout, locks = self.prepared.dependencies, cache.root / "locks"
        locks.mkdir(parents=True, exist_ok=True)
        members, toolchain = self.prepared.dependency_set.sha256, (host.python, host.torch, host.triton)
        key = files.key_of("upstream-tests", tree.key, members, *toolchain, self.cell.target)
        with cache.guard(), cache.scratch("lane-") as work, jit_folder(cache, key, work) as jit:
            copy, report, gate = environment.make_folders(work, jit), work / "report.xml", work / "gate"
            shutil.copytree(tree.folder, copy, dirs_exist_ok=True)
            (work / "pytest.ini").touch()  # pytest searches upwards: nothing above the cache configures the suite
            plan = ("--setup-plan",) if listing else ()
            python = str(built_environment.interpreter(self.cell.environment))
            options = (*OPTIONS, *plan, f"--rootdir={copy}", f"--junitxml={report}", "--", *present)
            visible = ",".join(device.token for device in self.devices)
            share = environment.Share(len(cores()), 1, visible)
            paths = [copy / tree.source_root, layout.folder]
            command = process.Command(
                arguments=(python, "-P", "-m", "pytest", *self.tests.arguments, *options),
                environment={
                    **environment.build(os.environ, work, jit, paths, share),
                    # torch.distributed listens there; two suites at once must not share a port
                    "MASTER_ADDR": "127.0.0.1",
                    "MASTER_PORT": str(_free_port()),
                    **self.tests.environment,
                    "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no plugin that nobody named
                },
                folder=copy,
                timeout=self.cell.timeout or self.tests.timeout_s,
                locks=tuple(locks / f"gpu-{files.key_of(device.token)}.lock" for device in self.devices),
                gate=gate if self.devices else None,
            )
            seal = layout.lay_out()
            end = process.run(command)
            files.write_atomic(self.session.folder / f"{label}.log", end.log)
            layout.check(seal, while_it_ran=True)
            if reason := abnormal_end(end, command.timeout):
                raise HarnessError(f"{name}: {reason}")
            try:
                return _tests(report, copy, end.status, listing=listing)
            except ValueError as error:
                raise HarnessError(f"{name}: {error}") from None


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def _tests(report: Path, tree: Path, status: int, *, listing: bool) -> dict[str, CaseEnd]:
    """Return the end of each test. ValueError: report and exit status do not agree, or no test ran."""
    try:
        tests, modules = comparison.read(report, tree)
    except (OSError, ET.ParseError):
        raise ValueError(f"it ended with status {status} before pytest did") from None
    broken = [f"{name}: {end.reason}" for name, end in modules.items() if end.result in RED]
    if broken:
        raise ValueError(f"cannot be collected: {'; '.join(broken)}")
    if status not in (PASSED, FAILED, NOTHING):
        raise ValueError(f"pytest ended with status {status}")
    if not tests and not listing:
        skipped = "; ".join(f"{name}: {end.reason}" for name, end in modules.items())
        raise ValueError("no test was collected" + (f" (skipped: {skipped})" if skipped else ""))
    has_red = any(end.result in RED for end in tests.values())
    if has_red != (status == FAILED):
        raise ValueError(f"pytest ended with status {status}, and {'a' if has_red else 'no'} test failed")
    return {**tests, **modules}


def lay_out(pack: Pack, session: Session, timeout: float | None, *, gpu: bool) -> Suite:
    """Lay out the trees and the dependency set of upstream's tests.

    `gpu` shows a GPU also to tests that do not need one. UnsupportedHereError is raised where this host lacks a GPU, or
    lies outside the pack's range. HarnessError is raised where pack.toml names no suite, or a tree or wheel cannot be
    fetched.
    """
    tests, cache, host = suite_of(pack), session.cache, session.host
    wants_gpu = tests.gpu or gpu
    target = host.auto_target if wants_gpu else "cpu"
    devices = tuple(device for device in session.devices if device.gpu.target == target)
    reason = version_mismatch(pack, host)
    if wants_gpu and not devices:
        reason = "no GPU here, and upstream's tests need one" if tests.gpu else "no GPU here"
    if reason:
        raise UnsupportedHereError(reason)
    environment_name = pack.definition.stated(target).environment
    cell = Cell(
        pack=pack,
        target=target,
        evidence=Evidence.EXECUTED if devices else Evidence.TRACED,
        source=parse_git_source(tests.origin) if tests.origin else pinned_source(pack.definition),
        dependencies=(tests.dependencies,),
        timeout=timeout,
        patch=pack.suite_patch(tests),
        environment=built_environment.find_environment(cache, host, environment_name) if environment_name else None,
    )
    prepared = Runner(session).prepare(cell)
    return Suite(cell, tests, prepared, devices, session)
