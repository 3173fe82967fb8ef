"""A workbench of toy packs, a cache, and the real runner as a child process."""

from __future__ import annotations

import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from harness.core import cache
from harness.core.cache import Cache
from harness.host import nvml
from harness.pack import load, requirements
from harness.pack.model import Pack
from harness.report import report, soundness
from harness.upstream import dependencies, tree
from harness.upstream.source import parse_source
from harness.upstream.tree import Tree
from testing import toys

VERBS_OF_LANES = {"run", "check", "sweep", "versions", "pr-verdict", "mutate", "upstream-tests"}
VERBS_OF_PACKS = VERBS_OF_LANES | {"list", "fetch", "report", "new"}
Found = TypeVar("Found")
REPOSITORY = Path(__file__).resolve().parent.parent


def until(look: Callable[[], Found | None], seconds: float = 20.0) -> Found:
    """Look until something is there, and return it."""
    end = time.monotonic() + seconds
    while not (found := look()):
        assert time.monotonic() < end, "it never came"
        time.sleep(0.02)
    return found


@dataclass(frozen=True)
class Workbench:
    """A folder of toy packs with a cache that holds their upstream."""

    folder: Path
    sha256: str  # of that upstream's archive
    variables: dict[str, str] = field(default_factory=dict)  # that the runner finds in its environment

    @property
    def packs(self) -> Path:
        return self.folder / "packs"

    @property
    def cache(self) -> Path:
        return self.folder / "cache"

    @property
    def sweeps(self) -> Path:
        """The folder of the run folders."""
        return self.folder / "sweeps"

    @property
    def newest(self) -> Path:
        """The newest run folder."""
        return max(self.sweeps.glob("*/run.json")).parent

    def lay(self, behaviour: str, name: str = "", **files: str) -> Path:
        """Lay a toy pack, named for its behaviour unless another name is given, with small files that steer it."""
        pack = toys.lay(self.packs, behaviour, self.sha256, name)
        for file, text in files.items():
            (pack / file.replace("_json", ".json")).write_text(text)
        return pack

    def gpus(self, *states: dict[str, object]) -> Path:
        """Give the host toy GPUs; return the file of their state."""
        path = self.folder / "gpus.json"
        base = {"name": "Toy H200", "capability": [9, 0]}
        path.write_text(json.dumps({"devices": [base | state for state in states]}))
        self.variables["PYTHONPATH"] = str(REPOSITORY / "tests/resources/fake_nvml")
        self.variables["NCCL_FAKE_STATE"] = str(path)
        self.variables["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(len(states))))
        return path

    def command(self, *arguments: str) -> list[str]:
        """Build the command line of the runner, with this workbench's folders where the verb takes them."""
        verb = arguments[0] if arguments else ""
        places = ["--packs", str(self.packs)] if verb in VERBS_OF_PACKS else []
        if verb in VERBS_OF_LANES and "--cache" not in arguments:
            places += ["--cache", str(self.cache)]
        if verb in VERBS_OF_LANES and "--online" not in arguments:
            places += ["--offline"]
        if verb == "sweep" and "--runs" not in arguments:
            places += ["--runs", str(self.sweeps)]
        rest = [text for text in arguments if text != "--online"]
        return [sys.executable, "-W", "error", str(REPOSITORY / "runner.py"), *rest[:1], *places, *rest[1:]]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the runner to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=os.environ | self.variables | environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
        )

    def run_on_terminal(self, *arguments: str, **environment: str) -> bytes:
        """Run the runner to its end on a terminal, and return what the terminal was sent."""
        ours, theirs = pty.openpty()
        variables = os.environ | self.variables | environment | {"TERM": "xterm"}
        with subprocess.Popen(self.command(*arguments), stdin=theirs, stdout=theirs, stderr=theirs, env=variables):
            os.close(theirs)
            sent = b""
            try:
                while piece := os.read(ours, 1 << 16):
                    sent += piece
            except OSError:  # the terminal's other end is closed
                os.close(ours)
        return sent

    @property
    def receipts(self) -> Path:
        """The folder of the newest run's receipts."""
        return max(self.cache.glob("runs/*/receipts"))

    def recorded(self, *arguments: str) -> None:
        """Run packs and put their receipts into them."""
        ended = self.run("run", "--record", *arguments)
        assert ended.returncode == 0, ended.stdout + ended.stderr
        for folder in sorted(self.packs.iterdir()):
            if folder.joinpath("receipts").is_dir():
                report.write(load.load_pack(folder))

    def rows(self, *arguments: str, **environment: str) -> tuple[int, list[dict[str, Any]]]:
        """Run packs and return the exit status and the rows of the JSON table."""
        ended = self.run("run", "--json", *arguments, **environment)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended.returncode, json.loads(ended.stdout)["rows"] if ended.stdout else []

    def sweep(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run a sweep to its end."""
        ended = self.run("sweep", *arguments, **environment)
        assert "Traceback" not in ended.stderr, ended.stderr
        return ended

    def swept(self, *arguments: str, status: int = 0, **environment: str) -> dict[str, dict[str, Any]]:
        """Run a sweep that ends so, and return its cells by name."""
        ended = self.sweep(*arguments, **environment)
        assert ended.returncode == status, ended.stderr + ended.stdout
        return self.cells()

    def results(self) -> dict[str, Any]:
        """Return the newest sweep's results."""
        document: dict[str, Any] = json.loads((self.newest / "results.json").read_text())
        return document

    def cells(self) -> dict[str, dict[str, Any]]:
        """Return the newest sweep's cells by name."""
        return {cell["name"]: cell for cell in self.results()["cells"]}

    def ends(self) -> list[dict[str, Any]]:
        """Return the lines of the newest sweep's journal."""
        return [json.loads(line) for line in (self.newest / "journal.jsonl").read_text().splitlines()]

    def interrupted(self, *arguments: str, **environment: str) -> str:
        """Interrupt the runner as Ctrl-C does, once a lane of the toy that needs long hangs; return its output.

        It has to end with 130, and none of its processes may be left.
        """
        command = self.command(*arguments)
        with subprocess.Popen(command, env=os.environ | environment, stdout=-1, stderr=-1, text=True) as runner:
            until((self.packs / "37_needs_long/grandchild").exists)
            children = psutil.Process(runner.pid).children(recursive=True)
            runner.send_signal(signal.SIGINT)
            output, _ = runner.communicate(timeout=30)
        assert (runner.returncode, bool(children)) == (130, True)
        assert psutil.wait_procs(children, timeout=20)[1] == []
        return output

    def findings(self) -> str:
        """Return what `check` says of the one pack, without a process of its own."""
        (folder,) = self.packs.glob("[0-9]*")
        one = load.load_pack(folder)
        return "\n".join(finding.text for finding in soundness.findings(one, Cache(self.cache), nvml.detect()))

    def gives(self, status: int, verdict: str, *arguments: str, reason: str = "", **environment: str) -> dict[str, Any]:
        """Run the one pack; return its row, which has to have this verdict, and this text in its reason."""
        ended, (row,) = self.rows(*arguments, **environment)
        assert (ended, row["verdict"], reason in row["reason"]) == (status, verdict, True), row
        return row


def unpacked(one: Pack) -> Tree:
    """Lay out the release that a real pack judges, in the user's cache."""
    return tree.materialize(Cache(cache.default_root()), one.definition.upstream, parse_source(None, one.definition))


def installed(one: Pack) -> Path:
    """Lay out what a real pack wants beside it on the target cpu, in the user's cache."""
    name, tag = one.definition.targets["cpu"].dependencies, nvml.detect().python_tag
    members = requirements.named_set(one.definition, name, tag)
    layout = dependencies.layout(Cache(cache.default_root()), members, Path(sys.executable), tag)
    layout.lay_out()
    return layout.folder


def confirmed(folder: Path) -> Workbench:
    """Judge the sound toy pack in a folder; return its workbench."""
    made = sound(folder)
    made.recorded("1")
    return made


def copied(bench: Workbench, folder: Path) -> Workbench:
    """Copy packs and cache of a workbench into a folder; return the workbench there."""
    for name in ("packs", "cache"):
        shutil.copytree(bench.folder / name, folder / name)
    return Workbench(folder, bench.sha256)


def sound(folder: Path) -> Workbench:
    """Build a workbench with the sound toy pack alone."""
    made = empty(folder)
    made.lay(toys.BASE)
    return made


def empty(folder: Path) -> Workbench:
    """Build a workbench without packs, whose cache holds the toy upstream's release 1.0."""
    archive, sha256 = toys.sdist(folder)
    (folder / "packs").mkdir()
    toys.seed(folder / "cache", archive, sha256)
    return Workbench(folder, sha256)
