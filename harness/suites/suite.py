"""Upstream's own tests: pytest under a lane's supervisor, in a copy of each tree."""

import datetime as dt
import os
import shutil
import socket
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from harness.core import HarnessError, UnsupportedHereError, files
from harness.core.seal import Layout
from harness.core.words import TestResult
from harness.host.eligibility import version_mismatch
from harness.host.host import Device, cores
from harness.lane import Cell, environment, process, results
from harness.lane.lane import LOADED, WITNESS, witness_variables
from harness.lane.process import Command
from harness.pack.model import TESTS, Pack, UpstreamTests
from harness.receipt import writer
from harness.receipt.receipt import DependencyRecord, UpstreamRecord, patch_record
from harness.schedule.lane_runner import Runner
from harness.schedule.session import Session
from harness.suites import receipt
from harness.suites.receipt import SCHEMA, CaseEnd, Change, SuiteReceipt
from harness.upstream import patch
from harness.upstream.patch import StalePatchError
from harness.upstream.source import parse_source
from harness.upstream.tree import Tree
from harness.verdict.lane_verdict import abnormal_end

#: Options that override a suite's own configuration: no cache in the tree, every test runs, no colours in the log, and
#: a report that names the file of each test.
OPTIONS = ("-p", "no:cacheprovider", "--maxfail=0", "--color=no", "-o", "junit_family=xunit1")


@dataclass(frozen=True)
class Suite:
    """Upstream's tests for one pack, and where they run."""

    cell: Cell
    tests: UpstreamTests
    dependencies: Layout
    devices: tuple[Device, ...]
    session: Session

    def run(self, name: str, tree: Tree, *, listing: bool = False) -> dict[str, CaseEnd]:
        """Run the suite in a copy of a tree, since tests may write into it; with `listing`, pytest only lists them.

        HarnessError: the run as a whole fails.
        """
        present = tuple(file for file in self.tests.files if not listing or (tree.folder / file).exists())
        if not present:
            return {}
        cache, label = self.session.cache, f"{self.cell.pack.name}: {name}"
        cache.tell(label)
        with cache.guard(), cache.scratch("lane-") as work:
            copy, report = environment.make_folders(work, work / "jit"), work / "report.xml"
            shutil.copytree(tree.folder, copy, dirs_exist_ok=True)
            (work / "pytest.ini").touch()  # pytest searches upwards: nothing above the cache configures the suite
            plan = ("--setup-plan",) if listing else ()
            options = (*OPTIONS, *plan, f"--rootdir={copy}", f"--junitxml={report}", "--", *present)
            command = self._command(work, copy / tree.source_root, (*self.tests.arguments, *options))
            seal = self.dependencies.lay_out()
            end = process.run(command)
            files.write_atomic(self.session.folder / f"{label}.log", end.log)
            self.dependencies.check(seal, while_it_ran=True)
            try:
                ends = receipt.read(report, end.status, listing=listing)
                if not listing and any(case.result == TestResult.PASSED for case in ends.values()):
                    self._require_tree(work / LOADED, copy / tree.source_root)
            except ValueError as error:
                raise HarnessError(f"{name}: {abnormal_end(end, command.timeout) or error}") from None
            return ends

    def _require_tree(self, notes: Path, root: Path) -> None:
        """Raise ValueError unless the modules under test were loaded, and from this tree alone."""
        loaded, problem = results.read_loaded(notes)
        modules = self.cell.pack.definition.upstream.modules
        under_test = [line for line in loaded if line.module.partition(".")[0] in modules]
        if problem or not under_test:
            raise ValueError(problem or f"no module of {', '.join(modules)} was loaded as Python loads a file")
        for line in under_test:
            if not line.lies_in(str(root)):
                raise ValueError(f"{line.module} was loaded from elsewhere: {line.file}")

    def _command(self, work: Path, root: Path, arguments: tuple[str, ...]) -> Command:
        """Return the command that runs pytest in the folder of a lane; `root` goes on PYTHONPATH."""
        with socket.create_server(("127.0.0.1", 0)) as server:  # two suites at once must not share a port
            port = server.getsockname()[1]
        share = environment.Share(len(cores()), 1, ",".join(device.token for device in self.devices))
        paths = [WITNESS, root, self.dependencies.folder]
        return Command(
            arguments=(str(environment.interpreter(self.cell.environment)), "-P", "-m", "pytest", *arguments),
            environment={
                **environment.build(os.environ, work, work / "jit", paths, share),
                "MASTER_ADDR": "127.0.0.1",  # torch.distributed listens there
                "MASTER_PORT": str(port),
                **witness_variables(root, self.cell.pack.definition.upstream.modules, work),
                **self.tests.environment,
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # no plugin that nobody named
            },
            folder=work / "cwd",
            timeout=self.tests.timeout_s,
            gate=work / "gate" if self.devices else None,
            locks=self.session.lock_files(self.devices),
        )


def judge(pack: Pack, tests: UpstreamTests, session: Session) -> SuiteReceipt:
    """Run upstream's tests without and with the patch, both with the test of the pack, and compare.

    UnsupportedHereError: this host lacks a GPU, lies outside the pack's range, or skips every test. StalePatchError: a
    patch does not apply. HarnessError: a tree or a wheel cannot be fetched, a run as a whole fails, or the receipt
    looks private.
    """
    started, cache, host, upstream = dt.datetime.now(dt.UTC), session.cache, session.host, pack.definition.upstream
    target = host.auto_target if tests.gpu else "cpu"
    devices = tuple(device for device in session.devices if device.gpu.target == target)
    if tests.gpu and not devices:
        raise UnsupportedHereError("no GPU here, and upstream's tests are to run on one")
    if reason := version_mismatch(pack, host):
        raise UnsupportedHereError(reason)
    cell = Cell(
        pack=pack,
        target=target,
        evidence=None,  # a suite has none
        source=parse_source(tests.origin or None, pack.definition),
        dependencies=(TESTS,),
        patch=pack.suite_patch,
        environment=environment.find_environment(cache, host, pack.definition.stated(target).environment),
    )
    prepared = Runner(session).prepare(cell)
    pristine, members = prepared.pristine, prepared.dependency_set
    if prepared.patched is None:
        raise StalePatchError(f"{prepared.patch}: {prepared.stale}")
    trees, own = [pristine, prepared.patched], pack.upstream_test_patch
    if own.exists():  # it need not fit exactly, since fix.patch may touch its files
        try:
            trees = [patch.apply(cache, tree, upstream, own, exact=False) for tree in trees]
        except StalePatchError as error:
            raise StalePatchError(f"{own.name}: {error}") from None
    suite = Suite(cell, tests, prepared.dependencies, devices, session)
    listed = suite.run("the list of tests", pristine, listing=True)
    before, after = suite.run("without the patch", trees[0]), suite.run("with the patch", trees[1])
    rows = receipt.compare(listed, before, after, adds=own.exists())
    verdict, reason = receipt.verdict(rows, adds=own.exists())
    unscrubbed = SuiteReceipt(
        schema=SCHEMA,
        pack=pack.name,
        verdict=verdict,
        reason=reason,
        upstream=UpstreamRecord(upstream.package, pristine.version, cell.source.kind, pristine.sha256, pristine.commit),
        files=tests.files,
        arguments=tests.arguments,
        environment=tests.environment,
        patch=patch_record(pack.suite_patch),
        test_patch=patch_record(own) if own.exists() else None,
        dependencies=DependencyRecord(members.name, members.sha256, members.versions),
        host=writer.host_record(host, tuple(device.gpu for device in devices)),
        before=dict(Counter[str](sorted(row.before for row in rows))),
        after=dict(Counter[str](sorted(row.after for row in rows))),
        tests=tuple(row for row in rows if row.change != Change.SAME),
        command=session.command(cell),
        started=started.isoformat(timespec="milliseconds"),
        seconds=round((dt.datetime.now(dt.UTC) - started).total_seconds(), 3),
    )
    scrub = writer.scrubber(pack, cache, host, members, {})
    scrubbed: SuiteReceipt = scrub.document(unscrubbed, "upstream_tests", writer.without_lane_folders)
    return scrubbed
