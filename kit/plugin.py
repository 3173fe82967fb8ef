"""The pytest plugin of contracts: the marks, the fixtures that record, and the file of results.

Each test of a contract has one mark: `defect` (wrong while the bug is there) or `control` (right with and without the
patch). Where the environment variable REPRODUCER_RESULTS names a file, the plugin writes one JSON object a line:

    {"kind": "target", "target", "evidence", "device"}      how the contract sees the bug, before the first test
    {"kind": "begin", "name"}                               a test begins
    {"kind": "check", "name", "role", "ok", "reason", "seconds"}    ok is null where it is not judged
    {"kind": "figure", "name", "value", "unit", "spread"}
    {"kind": "output", "name", "dtype", "shape", "sha256", "must_match"}
    {"kind": "claim", "word"}
    {"kind": "problem", "reason"}                           an error of the contract itself
    {"kind": "end", "status"}                               pytest's exit status, last

Each line has a running number, so that a lost line is seen. Without the variable a contract is an ordinary pytest run,
and its figures stand in the summary.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import pytest

from kit.target import current_target

ROLES = {"defect": "wrong while the bug is there", "control": "right with and without the patch"}
LONGEST_REASON = 400  # characters, as a reason stands in a table
REFUSED_BY_AUTOGRAD = "returned an in"  # its refusal of wrong gradients, which it raises in its own frames
#: What a host lacks, wherever it is raised.
HOST_FAULTS = (MemoryError, OSError)


class Recorder:
    """Keeps figures, outputs and claims, and writes the results where a file is named."""

    def __init__(self, file: Path | None) -> None:
        self._stream = file.open("a", encoding="utf-8") if file else None
        self._process = os.getpid()
        self._number = 0
        self._names: set[tuple[str, str]] = set()
        self._judged: tuple[bool | None, str] | None = None
        self._seconds = 0.0
        self.figures: list[tuple[str, object, str]] = []

    def write(self, kind: str, **fields: object) -> None:
        """Write a line; a process that was forked from this one writes none."""
        if self._stream is None or os.getpid() != self._process:
            return
        self._number += 1
        # JSON has neither NaN nor infinity: they become strings.
        fields = json.loads(json.dumps(fields), parse_constant=str)
        self._stream.write(json.dumps({"number": self._number, "kind": kind, **fields}) + "\n")
        self._stream.flush()

    def write_once(self, kind: str, name: str, **fields: object) -> None:
        """Write a line whose name no line of this kind has."""
        if (kind, name) in self._names:
            raise ValueError(f"a second {kind} named {name!r}")
        self._names.add((kind, name))
        self.write(kind, name=name, **fields)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_finish(self, session: pytest.Session) -> None:
        target, device = current_target(), "cpu"
        if target.executed:
            import torch  # noqa: PLC0415 - it is here, since a GPU was seen

            device = torch.cuda.get_device_name()
        modules = {item.path: item.module for item in _of_contracts(session.items)}
        for evidence in filter(None, map(_evidence, modules.values())):
            self.write("target", target=target.name, evidence=evidence, device=device)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.write("problem", reason=f"collection: {_last_line(report.longreprtext)}")

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._judged, self._seconds = None, 0.0
        self.write("begin", name=_name(nodeid))

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        self._seconds += call.duration
        if call.excinfo is not None and (self._judged is None or self._judged[0] is not False):
            try:
                self._judged = judged(call.excinfo.value, [str(entry.path) for entry in call.excinfo.traceback])
                if self._judged[0] is None:  # pytest has failed it, or skips it already
                    report.outcome = "skipped"
                    report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {self._judged[1]}")
            except ContractError as error:
                self._judged = (None, str(error))
                self.write("problem", reason=f"{_name(item.nodeid)}: {error}")
        if call.when == "teardown":
            ok, reason = self._judged or (True, "")
            fields = {"role": _role(item), "ok": ok, "reason": reason, "seconds": round(self._seconds, 3)}
            self.write("check", name=_name(item.nodeid), **fields)
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write("end", status=int(exitstatus))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.figures:
            terminalreporter.section("figures")
        for name, value, unit in self.figures:
            terminalreporter.write_line(f"{name} = {value} {unit}")


class ContractError(Exception):
    """An exception of the contract itself: it says nothing of the code under test."""


def judged(error: BaseException, files: list[str]) -> tuple[bool | None, str]:
    """Say what an exception means for a check: wrong (False) or not judged (None), and why.

    `files` are those of the frames that it passed through. ContractError: neither the code under test nor the host is
    at fault.
    """
    said = str(error).partition("\nassert ")[0]
    text = f"{type(error).__name__}: {said}"[:LONGEST_REASON]
    if isinstance(error, pytest.skip.Exception):
        return None, said or "skipped"
    if isinstance(error, (AssertionError, pytest.fail.Exception)):
        return False, said[:LONGEST_REASON]
    if isinstance(error, HOST_FAULTS) or "out of memory" in str(error):
        return None, text
    if isinstance(error, ImportError) and (error.name or "").partition(".")[0] not in _tested_modules():
        return None, text
    if REFUSED_BY_AUTOGRAD in str(error) or any(_is_tested(file) for file in files):
        return False, f"it raised {text}"
    if isinstance(error, NotImplementedError):
        return None, text
    raise ContractError(text)


def _tested_modules() -> set[str]:
    return set(filter(None, os.environ.get("REPRODUCER_MODULES", "").split(",")))


def _is_tested(file: str) -> bool:
    tree = os.environ.get("REPRODUCER_TREE")
    return bool(tree) and Path(file).resolve().is_relative_to(Path(str(tree)).resolve())


def _last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    raised = [line.removeprefix("E").strip() for line in lines if line.startswith("E ")]
    return (raised or lines or ["no reason"])[-1][:LONGEST_REASON]


def _of_contracts(items: list[pytest.Item]) -> list[Any]:
    return [item for item in items if item.path.name == "contract.py"]


def _name(nodeid: str) -> str:
    return nodeid.partition("::")[2]


def _role(item: pytest.Item) -> str:
    """Return the mark of a test; one of the test itself or of its parameter goes before one of its module."""
    own = {mark.name for mark in item.own_markers} & ROLES.keys()
    roles = own or {mark.name for mark in item.iter_markers()} & ROLES.keys()
    if len(roles) != 1:
        marks = " and ".join(sorted(roles)) or "no mark"
        raise pytest.UsageError(f"{item.nodeid} has {marks}; it needs one of {', '.join(ROLES)}")
    return roles.pop()


def _evidence(module: Any) -> str:  # noqa: ANN401 - a contract, which has no type
    """Return how a contract sees the bug here; empty where it needs a GPU that is not here.

    EVIDENCE_WITHOUT_GPU of the contract is a word, or a word for each target.
    """
    if current_target().executed:
        return "executed"
    stated = getattr(module, "EVIDENCE_WITHOUT_GPU", "")
    return str(stated.get(current_target().name, "") if isinstance(stated, dict) else stated)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks and the recorder."""
    for role, meaning in ROLES.items():
        config.addinivalue_line("markers", f"{role}: {meaning}")
    file = os.environ.get("REPRODUCER_RESULTS")
    config.pluginmanager.register(Recorder(Path(file) if file else None), "reproducer-recorder")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Refuse a test without a mark, and leave out a contract that needs another GPU."""
    for item in _of_contracts(items):
        _role(item)
        if not _evidence(item.module):
            needed = current_target().name.replace("cpu", "any architecture")
            item.add_marker(pytest.mark.skip(reason=f"needs a GPU of {needed}"))


@pytest.fixture(scope="session")
def recorder(pytestconfig: pytest.Config) -> Recorder:
    """Return what keeps figures, outputs and claims."""
    recorder = pytestconfig.pluginmanager.get_plugin("reproducer-recorder")
    assert isinstance(recorder, Recorder)  # noqa: S101 - pytest_configure registers it
    return recorder


@pytest.fixture(scope="session")
def figure(recorder: Recorder) -> Callable[..., None]:
    """Return the function that records a measured value, with its name, unit and spread."""

    def record(name: str, value: object, unit: str = "1", spread: object = None) -> None:
        recorder.write_once("figure", name, value=value, unit=unit, spread=spread)
        recorder.figures.append((name, value, unit))

    return record


@pytest.fixture(scope="session")
def output(recorder: Recorder) -> Callable[..., None]:
    """Return the function that records a tensor by its name and hash.

    The runner compares the hashes of both lanes; `must_match` says that they have to be the same.
    """

    def record(name: str, tensor: Any, must_match: bool = True) -> None:  # noqa: ANN401, FBT001, FBT002 - torch is not imported
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        fields = {"dtype": str(data.dtype), "shape": [*data.shape], "sha256": sha256}
        recorder.write_once("output", name, **fields, must_match=must_match)

    return record


@pytest.fixture(scope="session")
def claim(recorder: Recorder) -> Callable[[str], None]:
    """Return the function that records a claim, which is a word that pack.toml lists."""
    return lambda word: recorder.write("claim", word=word)
