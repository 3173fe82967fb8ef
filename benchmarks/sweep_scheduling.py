"""What scheduling a sweep costs: prints the figures beside the limits that the project sets itself.

Run it as ``python benchmarks/sweep_scheduling.py [makespan|cost]``. It measures, on toy packs:

- makespan: the wall time of a whole sweep of 40 real child processes on 1, 2, 4 and 8 toy GPUs, against the best that
  is possible: the longest lane, or all lanes' time divided by the GPUs. The lanes sleep for 1 to 5 s, as long as
  receipts said before that they would; a lane's time is that of its probe's process, so that what the harness needs
  around it counts against the sweep;
- cost: 1000 lanes that do nothing, with all that the engine does for each: what it takes and whether memory grows;
- resuming a night in which 1000 lanes have ended: until the queue is known to be empty, and the whole command.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY), str(REPOSITORY / "tests")]

import sweeps  # noqa: E402 - found through the path above
import toys  # noqa: E402 - likewise

from harness import files, host, pack, receipt  # noqa: E402 - likewise
from harness.cache import Cache  # noqa: E402 - likewise
from harness.sweep import night, planning  # noqa: E402 - likewise
from harness.sweep.account import Reporter  # noqa: E402 - likewise
from harness.sweep.cell import Cell, Task  # noqa: E402 - likewise
from harness.sweep.crew import Crew  # noqa: E402 - likewise
from harness.sweep.engine import Engine  # noqa: E402 - likewise
from harness.sweep.journal import Journal  # noqa: E402 - likewise
from harness.sweep.lane_end import LaneEnd  # noqa: E402 - likewise
from harness.sweep.night import Wish  # noqa: E402 - likewise
from harness.sweep.nvml import Device  # noqa: E402 - likewise
from harness.sweep.queue import Queue  # noqa: E402 - likewise
from harness.sweep.workshop import Attempt  # noqa: E402 - likewise
from harness.words import LaneName  # noqa: E402 - likewise

GPU_TOY = "41_executes_on_a_gpu"
SLOTS = (1, 2, 4, 8)
PACKS, SHORTEST, LONGEST, LIMIT = 20, 1.0, 5.0, 1.15
MANY, REPEAT = 100, 5
EVIDENCE = "sm_90a.executed.json"


def _print(what: str, value: float, limit: float, unit: str) -> None:
    mark = "within" if value <= limit else "OVER"
    print(f"{what}: {value:.3g} {unit} ({mark} the limit of {limit:g} {unit})", flush=True)


def _runner(folder: Path, nights: Path, *arguments: str) -> list[str]:
    places = ["--packs", str(folder / "packs"), "--cache", str(folder / "cache"), "--offline", "--nights", str(nights)]
    return [sys.executable, str(REPOSITORY / "runner.py"), "sweep", *places, *arguments]


def _ground(folder: Path) -> str:
    archive, sha256 = toys.sdist(folder)
    toys.seed(folder / "cache", archive, sha256)
    (folder / "packs").mkdir()
    return sha256


def makespan(folder: Path) -> None:
    """Print, for each number of GPUs, the wall time of a sweep over the best possible."""
    packs = sweeps.copies(folder / "packs", _ground(folder), PACKS, GPU_TOY)
    chance = random.Random(1)  # noqa: S311 - no secret
    for one in packs:
        seconds = chance.uniform(SHORTEST, LONGEST)
        (one / "seconds").write_text(f"{seconds:.3f}")
        (one / "receipts").mkdir()
        lanes = {name: {"seconds": seconds} for name in LaneName}
        (one / "receipts" / EVIDENCE).write_text(json.dumps({"lanes": lanes}))
    for count in SLOTS:
        state, nights = folder / "gpus.json", folder / f"nights-{count}"
        state.write_text(json.dumps({"devices": [{"name": "Toy H200", "capability": [9, 0]}] * count}))
        started = time.perf_counter()
        ended = subprocess.run(
            _runner(folder, nights), env=sweeps.environment(state), capture_output=True, text=True, check=False
        )
        wall = time.perf_counter() - started
        assert ended.returncode == 0, ended.stderr[-1000:]
        (journal,) = nights.glob("*/journal.jsonl")
        took = [json.loads(line)["record"]["seconds"] for line in journal.read_text().splitlines()]
        assert len(took) == 2 * PACKS
        best = max(*took, sum(took) / count)
        print(f"{count} GPU(s): {wall:.1f} s for {len(took)} lanes of {sum(took):.1f} s; best possible {best:.1f} s")
        _print(f"{count} GPU(s): makespan over the best possible", wall / best, LIMIT, "")


class Nothing:
    """A lane that does nothing, and ends as one of a real pack did."""

    def __init__(self, night_folder: Path) -> None:
        """Take what a real lane said from a committed receipt."""
        real = receipt.load(REPOSITORY / "packs/09_liger_flce_none/receipts/cpu.interpreted.json")
        self._records = {name: replace(real.lanes[name], outputs=()) for name in LaneName}
        self._night = night_folder

    def warm(self, cell: Cell) -> None:
        """Lay nothing out."""

    def attempt(self, task: Task, _: Device | None) -> Attempt:
        """End at once, with a log."""
        path = self._night / task.log
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("nothing\n")
        evidence = task.cell.evidence
        assert evidence is not None
        log = receipt.LogRecord(task.log, files.sha256_bytes(b"nothing\n"))
        record = self._records[task.lane]
        started = "2026-01-01T00:00:00+00:00"
        end = LaneEnd(
            task.key, task.name, task.cell.target, evidence, task.lane, task.number, started, 0.01, "cpu", ("", ""),
            "1.0", "toy", record, "", log,
        )  # fmt: skip
        return Attempt(end=end)

    def settle(self, cell: Cell) -> None:
        """Write no receipt."""


def _resident() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


def cost(folder: Path) -> None:
    """Print what 1000 lanes that do nothing cost, whether memory grows, and what resuming them takes."""
    sweeps.copies(folder / "packs", _ground(folder), MANY, toys.BASE)
    packs = [pack.load(path) for path in pack.folders(folder / "packs")]
    here, cache = host.detect(), Cache(folder / "cache", offline=True)
    wish = Wish(files.key_of((folder / "packs").resolve()), (), latest=False, repeat=REPEAT)
    nights = folder / "nights"
    with night.opened(nights, wish, night.now()) as tonight, Journal(tonight.folder / night.JOURNAL) as journal:
        cells = planning.cells(planning.selected(packs, ()), here, cache, latest=False)
        tasks = list(planning.unique_tasks(cells, here, REPEAT))
        marks: list[float] = []
        reporter = Reporter(lambda _: marks.append(_resident()), lambda _: None)
        cancel, cancel_end = os.pipe()
        engine = Engine(Crew(Nothing(tonight.folder), journal), journal, [], Queue(2), reporter)
        started = time.perf_counter()
        engine.run(tasks, cancel_end)
        wall = time.perf_counter() - started
        os.close(cancel)
        assert len(journal) == len(tasks) == 2 * MANY * REPEAT
        print(f"the journal of {len(tasks)} lanes: {journal.path.stat().st_size / 1e6:.1f} MB")
    _print(f"scheduling {len(tasks)} lanes, each", 1000 * wall / len(tasks), 20, "ms")
    _print("memory from the 100th lane to the last", marks[-1] - marks[99], 10, "MB more")
    started = time.perf_counter()
    with Journal(journal.path) as again:
        left = [task for task in planning.unique_tasks(cells, here, REPEAT) if task.key not in again]
    _print(f"reading a journal of {len(tasks)} lanes and finding none left", time.perf_counter() - started, 1, "s")
    assert not left
    started = time.perf_counter()
    subprocess.run(_runner(folder, nights, "--repeat", str(REPEAT)), capture_output=True, check=False)
    wall = time.perf_counter() - started
    results = json.loads((tonight.folder / night.RESULTS).read_text())
    assert (results["lanes_run"], results["lanes_resumed"]) == (0, len(tasks))
    print(f"the whole command that resumes them, with every receipt and page written: {wall:.2f} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="?", choices=["makespan", "cost"], help="default: both")
    what = parser.parse_args().what
    for name, measure in (("makespan", makespan), ("cost", cost)):
        if what in (None, name):
            with tempfile.TemporaryDirectory() as text:
                measure(Path(text))


if __name__ == "__main__":
    main()
