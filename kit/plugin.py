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
import gc
import hashlib
import importlib
import json
import os
import time
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
    is_fault = isinstance(error, HOST_FAULTS) or "out of memory" in str(error)
    tested = os.environ.get("REPRODUCER_MODULES", "").split(",")
    if is_fault or (isinstance(error, ImportError) and (error.name or "?").partition(".")[0] not in tested):
        return None, text
    tree = Path(os.environ.get("REPRODUCER_TREE", os.devnull)).resolve()
    if REFUSED_BY_AUTOGRAD in str(error) or any(Path(file).resolve().is_relative_to(tree) for file in files):
        return False, f"it raised {text}"
    if isinstance(error, NotImplementedError):
        return None, text
    raise ContractError(text)


def _role(item: pytest.Item) -> str:
    """Return the mark of a test; one of the test itself or of its parameter goes before one of its module."""
    own = {mark.name for mark in item.own_markers} & ROLES.keys()
    roles = own or {mark.name for mark in item.iter_markers()} & ROLES.keys()
    if len(roles) != 1:
        marks = " and ".join(sorted(roles)) or "no mark"
        raise pytest.UsageError(f"{item.nodeid} has {marks}; it needs one of {', '.join(ROLES)}")
    return roles.pop()


class Recorder:
    """Judges tests, keeps figures, outputs and claims, and writes the results where a file is named."""

    def __init__(self, file: Path | None) -> None:
        self._stream = file.open("a", encoding="utf-8") if file else None
        self._process = os.getpid()
        self._number = 0
        self._frozen = False  # whether what was imported is exempt from garbage collection
        self._recorded: set[object] = set()  # kinds and names
        self.figures: list[str] = []
        self._name, self._begun = "", 0.0  # of the test that runs
        self._judged: tuple[bool | None, str] = (True, "")

    def write(self, kind: str, **fields: object) -> None:
        """Write a line, of each figure and output once; a process that was forked from this one writes none."""
        if kind in ("figure", "output"):
            if (kind, fields["name"]) in self._recorded:
                raise ValueError(f"a second {kind} named {fields['name']!r}")
            self._recorded.add((kind, fields["name"]))
        if self._stream is None or os.getpid() != self._process:
            return
        self._number += 1
        # JSON has neither NaN nor infinity: they become strings.
        fields = json.loads(json.dumps(fields), parse_constant=str)
        self._stream.write(json.dumps({"number": self._number, "kind": kind, **fields}) + "\n")
        self._stream.flush()

    @pytest.hookimpl(wrapper=True)
    def pytest_collection(self) -> Generator[None, object, object]:
        """Collect no garbage while contracts import upstream: Megatron and torch are 400,000 objects that stay."""
        gc.disable()
        try:
            return (yield)
        finally:
            gc.enable()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_call(self) -> None:
        """Before the first test, exempt what is imported from garbage collection: a full one took 0.3 s."""
        if not self._frozen:
            gc.freeze()
            self._frozen = True

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Refuse a test without a mark, leave out a contract that needs another GPU, and write the target."""
        target, evidence = current_target(), dict[Any, str]()
        device = importlib.import_module("torch").cuda.get_device_name() if target.executed else "cpu"
        for module in dict.fromkeys(item.module for item in items):
            stated = getattr(module, "EVIDENCE_WITHOUT_GPU", "")  # a word, or a word for each target
            without_gpu = stated.get(target.name, "") if isinstance(stated, dict) else stated
            evidence[module] = "executed" if target.executed else without_gpu
            if evidence[module]:
                self.write("target", target=target.name, evidence=evidence[module], device=device)
        for item in items:
            _role(item)
            if not evidence[item.module]:
                needed = target.name.replace("cpu", "any architecture")
                item.add_marker(pytest.mark.skip(reason=f"needs a GPU of {needed}"))

    def pytest_exception_interact(self, call: pytest.CallInfo[Any], report: Any) -> None:  # noqa: ANN401 - of any kind
        if isinstance(report, pytest.CollectReport) and call.excinfo is not None:
            error = call.excinfo.value.__cause__ or call.excinfo.value  # pytest raises its own from a failed import
            self.write("problem", reason=f"collection: {type(error).__name__}: {error}"[:LONGEST_REASON])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._name, self._begun, self._judged = nodeid.partition("::")[2], time.monotonic(), (True, "")
        self.write("begin", name=self._name)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> Generator[None, Any, Any]:
        report = yield
        if call.excinfo is not None and self._judged[0] is not False:
            try:
                self._judged = judged(call.excinfo.value, [str(entry.path) for entry in call.excinfo.traceback])
                if self._judged[0] is None:  # pytest has failed it, or skips it already
                    report.outcome = "skipped"
                    report.longrepr = (str(item.path), item.location[1] or 0, f"Skipped: {self._judged[1]}")
            except ContractError as error:
                self._judged = (None, str(error))
                self.write("problem", reason=f"{self._name}: {error}")
        if call.when == "teardown":
            (ok, reason), seconds = self._judged, round(time.monotonic() - self._begun, 3)
            self.write("check", name=self._name, role=_role(item), ok=ok, reason=reason, seconds=seconds)
        return report

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        self.write("end", status=int(exitstatus))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.figures:
            terminalreporter.section("figures")
            terminalreporter.write("".join(self.figures))


RECORDER = pytest.StashKey[Recorder]()


@pytest.fixture(scope="session")
def recorder(pytestconfig: pytest.Config) -> Recorder:
    """Return what keeps figures, outputs and claims."""
    return pytestconfig.stash[RECORDER]


@pytest.fixture(scope="session")
def figure(recorder: Recorder) -> Callable[..., None]:
    """Return the function that records a measured value, with its name, unit and spread."""

    def record(name: str, value: object, unit: str = "1", spread: object = None) -> None:
        recorder.write("figure", name=name, value=value, unit=unit, spread=spread)
        recorder.figures.append(f"{name} = {value} {unit}\n")

    return record


@pytest.fixture(scope="session")
def output(recorder: Recorder) -> Callable[..., None]:
    """Return the function that records a tensor by its name and hash.

    The runner compares the hashes of both lanes; `must_match` says that they have to be the same.
    """

    def record(name: str, tensor: Any, *, must_match: bool = True) -> None:  # noqa: ANN401 - torch is not imported
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        fields = {"dtype": str(data.dtype), "shape": [*data.shape], "sha256": sha256}
        recorder.write("output", name=name, **fields, must_match=must_match)

    return record


@pytest.fixture(scope="session")
def claim(recorder: Recorder) -> Callable[[str], None]:
    """Return the function that records a claim, which is a word that pack.toml lists."""
    return lambda word: recorder.write("claim", word=word)


def pytest_configure(config: pytest.Config) -> None:
    """Register the marks and the recorder."""
    for role, meaning in ROLES.items():
        config.addinivalue_line("markers", f"{role}: {meaning}")
    file = os.environ.get("REPRODUCER_RESULTS")
    config.stash[RECORDER] = Recorder(Path(file) if file else None)
    config.pluginmanager.register(config.stash[RECORDER])
