"""Sweeps of toy packs, killed at random moments: used by the tests with a few kills, by the benchmark with 200."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from testing import toys
from testing.workbench import REPOSITORY, Workbench, empty, until

TOY = "40_runs_for_a_while"


def copies(packs: Path, sha256: str, count: int, behaviour: str = TOY) -> list[Path]:
    """Lay `count` packs of one behaviour, each under a name of its own."""
    return [toys.lay(packs, behaviour, sha256, f"{number:03d}_toy") for number in range(1, count + 1)]


def living(folder: Path) -> list[psutil.Process]:
    """List the living processes that have `folder` in their command line."""
    found = []
    for process in psutil.process_iter():
        try:
            if any(str(folder) in text for text in process.cmdline()) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def starts(pack: Path) -> Counter[str]:
    """Count how often each lane of a toy pack was started."""
    path = pack / "starts"
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return Counter(line.split()[0] for line in lines)


@dataclass
class Siege:
    """A sweep of toy packs that is killed again and again."""

    bench: Workbench
    packs: list[Path]  # of two lanes each
    jobs: int  # lanes at once
    chance: random.Random  # of the moments of the kills
    kills: int = 0  # how many sweeps were killed before they ended
    ended: int = 0  # how many sweeps were finished
    torn: int = 0  # how often a kill left half a line in the journal
    last: str = ""  # the last sweep that was finished
    known: dict[str, str] = field(default_factory=dict)  # the lanes of the sweep that goes on, as the journal has them

    def assault(self, longest: float) -> None:
        """Begin or continue the sweep, kill it after a random time of at most `longest` seconds, look at the ruins."""
        before = {pack.name: starts(pack) for pack in self.packs}
        command = self.bench.command("sweep", "--jobs", str(self.jobs))
        with subprocess.Popen(command, stdout=-3, stderr=subprocess.PIPE, text=True) as sweep:
            try:
                sweep.wait(self.chance.uniform(0.0, longest))
            except subprocess.TimeoutExpired:
                sweep.send_signal(signal.SIGKILL)
            said = sweep.stderr.read() if sweep.stderr else ""
        assert sweep.returncode in {0, -signal.SIGKILL}, said
        until(lambda: not living(self.bench.folder), 10)
        self._nothing_run_twice(before)
        self._nothing_lost()
        self.kills += sweep.returncode != 0
        newest = self._newest()
        if newest and json.loads((newest / "run.json").read_text(encoding="utf-8"))["finished"]:
            self._whole_run(newest)  # a kill may hit the moment between the end of the sweep and that of the command
        else:
            assert sweep.returncode != 0

    def _newest(self) -> Path | None:
        """Return the folder of the newest sweep, unless that was finished and looked at before."""
        newest = max(self.bench.sweeps.glob("*/run.json"), default=None)
        return None if newest is None or newest.parent.name == self.last else newest.parent

    def _nothing_run_twice(self, before: dict[str, Counter[str]]) -> None:
        """Check that no lane whose end stood in the journal when the command began was started by it."""
        for pack in self.packs:
            now = starts(pack)
            for lane in ("pristine", "patched"):
                if f"{pack.name}/cpu {lane}" in self.known:
                    assert now[lane] == before[pack.name][lane], f"{pack.name} {lane} was run again"

    def _nothing_lost(self) -> None:
        """Check that every line of the journal still stands there, no lane ended twice, and every file is whole."""
        newest = self._newest()
        if newest is None:
            return
        for path in newest.rglob("*.json"):
            if not path.name.startswith("."):
                json.loads(path.read_text(encoding="utf-8"))
        journal = newest / "journal.jsonl"
        text = journal.read_text(encoding="utf-8") if journal.exists() else ""
        lines, _, torn = text.rpartition("\n")
        self.torn += bool(torn)
        found = [json.loads(line) for line in lines.splitlines()]
        names = [end["task"] for end in found]
        assert len(set(names)) == len(names)
        now = {end["task"]: end["started"] + end["log"]["sha256"] for end in found}
        assert self.known.items() <= now.items(), "a finished lane was lost"
        self.known = now

    def _whole_run(self, folder: Path) -> None:
        """Check that a finished sweep has every lane once and every cell right; the next command begins another."""
        self.ended += 1
        results = json.loads((folder / "results.json").read_text(encoding="utf-8"))
        assert len(self.known) == 2 * len(self.packs)
        assert [cell["verdict"] for cell in results["cells"]] == ["CONFIRMED"] * len(self.packs)
        assert results["lanes_run"] + results["lanes_resumed"] == 2 * len(self.packs)
        assert len(list(folder.glob("receipts/*/*.json"))) == len(self.packs)
        assert not list(folder.rglob(".*"))
        self.known, self.last = {}, folder.name
        for pack in self.packs:
            (pack / "starts").unlink()


def siege(folder: Path, packs: int, jobs: int, seed: int) -> Siege:
    """Build one in an empty folder."""
    bench = empty(folder)
    chance = random.Random(seed)  # noqa: S311 - no secret
    return Siege(bench, copies(bench.packs, bench.sha256, packs), jobs, chance)


def prune(runs: Path, keep: int) -> None:
    """Remove all but the newest run folders."""
    for folder in sorted(path.parent for path in runs.glob("*/run.json"))[:-keep]:
        shutil.rmtree(folder)


def environment(state: Path) -> dict[str, str]:
    """Return what a runner with toy GPUs needs: NVML answers from the file `state`."""
    fake = REPOSITORY / "tests/resources/fake_nvml"
    return os.environ | {"PYTHONPATH": str(fake), "NCCL_FAKE_STATE": str(state)}
