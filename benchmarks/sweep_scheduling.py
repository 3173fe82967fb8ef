"""What scheduling a sweep costs: prints the figures beside the limits that the project sets itself.

Run it as ``python benchmarks/sweep_scheduling.py [makespan|cost]``. It measures, on toy packs:

- makespan: from the start of the first lane to the end of the last, of a sweep of 40 real child processes, 1, 2, 4 and
  8 at once on as many toy GPUs, against the best that is possible: the longest lane, or all lanes' time divided by the
  lanes at once. The lanes sleep for 1 to 5 s, as long as receipts said before that they would; a lane's time is that
  of its probe's process, so that what the harness needs around it counts against the sweep;
- cost: 1000 lanes that do nothing, with all that the scheduler does for each, receipts included: what it takes and
  whether memory grows;
- resuming a sweep of which 1000 lanes have ended: until the queue is known to be empty, and the whole command, which
  judges and compares every cell and writes the page again.
"""

from __future__ import annotations

import argparse
import datetime as dt
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
sys.path.insert(0, str(REPOSITORY))

from harness.core import files  # noqa: E402 - found through the path above
from harness.core.cache import Cache  # noqa: E402 - likewise
from harness.core.words import LaneName  # noqa: E402 - likewise
from harness.host import host  # noqa: E402 - likewise
from harness.lane.record import LaneRecord  # noqa: E402 - likewise
from harness.pack import load  # noqa: E402 - likewise
from harness.receipt import receipt  # noqa: E402 - likewise
from harness.schedule.journal import FileJournal, LaneEnd  # noqa: E402 - likewise
from harness.schedule.judging import CellJudge  # noqa: E402 - likewise
from harness.schedule.places import Placement, Places  # noqa: E402 - likewise
from harness.schedule.runner import Attempt, Prepared  # noqa: E402 - likewise
from harness.schedule.scheduler import Listener, Scheduler  # noqa: E402 - likewise
from harness.schedule.task import Task, unique_tasks  # noqa: E402 - likewise
from harness.schedule.workers import WorkerPool  # noqa: E402 - likewise
from harness.sweep import run_folder, selection  # noqa: E402 - likewise
from harness.sweep.columns import Moving  # noqa: E402 - likewise
from harness.sweep.run_folder import SweepRequest  # noqa: E402 - likewise
from harness.verdict.cell import Cell  # noqa: E402 - likewise
from testing import laid_out, sweeps, toys  # noqa: E402 - likewise

GPU_TOY = "41_executes_on_a_gpu"
SLOTS = (1, 2, 4, 8)
PACKS, SHORTEST, LONGEST, LIMIT = 20, 1.0, 5.0, 1.15
MANY, REPEAT = 100, 5
EVIDENCE = "sm_90a.executed.json"


def _print(what: str, value: float, limit: float, unit: str) -> None:
    mark = "within" if value <= limit else "OVER"
    print(f"{what}: {value:.3g} {unit} ({mark} the limit of {limit:g} {unit})", flush=True)


def _runner(folder: Path, runs: Path, *arguments: str) -> list[str]:
    places = ["--packs", str(folder / "packs"), "--cache", str(folder / "cache"), "--offline", "--runs", str(runs)]
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
        state, runs = folder / "gpus.json", folder / f"sweeps-{count}"
        state.write_text(json.dumps({"devices": [{"name": "Toy H200", "capability": [9, 0]}] * count}))
        started = time.perf_counter()
        ended = subprocess.run(
            _runner(folder, runs, "--jobs", str(count)),
            env=sweeps.environment(state),
            capture_output=True,
            text=True,
            check=False,
        )
        wall = time.perf_counter() - started
        assert ended.returncode == 0, ended.stderr[-1000:]
        (journal,) = runs.glob("*/journal.jsonl")
        ends = [json.loads(line) for line in journal.read_text().splitlines()]
        took = [end["record"]["seconds"] for end in ends]
        assert len(took) == 2 * PACKS
        best = max(*took, sum(took) / count)
        begun = [dt.datetime.fromisoformat(end["started"]).timestamp() for end in ends]
        span = max(at + end["seconds"] for at, end in zip(begun, ends, strict=True)) - min(begun)
        print(f"{count} GPU(s): {len(took)} lanes of {sum(took):.1f} s in {span:.1f} s; best possible {best:.1f} s")
        print(f"{count} GPU(s): the whole command took {wall:.1f} s")
        _print(f"{count} GPU(s): makespan over the best possible", span / best, LIMIT, "")


class Nothing:
    """A lane that does nothing, and ends as one of a real pack did."""

    def __init__(self, judge: CellJudge) -> None:
        """Take what a real lane said from a committed receipt."""
        real = receipt.load(REPOSITORY / "packs/09_liger_flce_none/receipts/cpu.interpreted.json")
        self._records: dict[LaneName, LaneRecord] = {name: replace(real.lanes[name], outputs=()) for name in LaneName}
        self._judge = judge

    def prepare(self, cell: Cell) -> Prepared:
        """Lay nothing out."""
        return laid_out.nothing(cell.version)

    def attempt(self, task: Task, prepared: Prepared, placement: Placement, locks: tuple[Path, ...]) -> Attempt:
        """End at once, with a log."""
        assert not locks
        path = self._judge.folder / task.log
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("nothing\n")
        evidence = task.cell.evidence
        assert evidence is not None
        log = receipt.LogRecord(task.log, files.sha256_bytes(b"nothing\n"))
        end = LaneEnd(
            key=task.key,
            task=task.name,
            target=task.cell.target,
            evidence=evidence,
            lane=task.lane,
            number=task.number,
            started="2026-01-01T00:00:00+00:00",
            seconds=0.01,
            place=placement.name,
            gpus=(),
            version="1.0",
            tree="toy",
            patch=prepared.patch if task.lane == LaneName.PATCHED else "",
            record=self._records[task.lane],
            log=log,
        )
        return Attempt(end=end)

    def finish(self, cell: Cell) -> None:
        """Write the receipt behind a cell's last lane, as the real one does."""
        judged = None if self._judge.missing(cell) else self._judge.judged(cell)
        if judged is not None:
            self._judge.receipt(judged)


def _resident() -> float:
    return float(psutil.Process().memory_info().rss) / 1e6


def cost(folder: Path) -> None:
    """Print what 1000 lanes that do nothing cost, whether memory grows, and what resuming them takes."""
    sweeps.copies(folder / "packs", _ground(folder), MANY, toys.BASE)
    packs = [load.load_pack(path) for path in load.folders(folder / "packs")]
    here, cache = host.detect(), Cache(folder / "cache", offline=True)
    request = SweepRequest(files.key_of((folder / "packs").resolve()), (), latest=False, repeat=REPEAT)
    runs = folder / "sweeps"
    with (
        run_folder.opened(runs, request, run_folder.now()) as today,
        FileJournal(today.path / run_folder.JOURNAL) as journal,
    ):
        cells = selection.cells(selection.selected(packs, ()), here, cache, Moving())
        tasks = list(unique_tasks(cells, here, REPEAT))
        marks: list[float] = []
        cancel, cancel_end = os.pipe()
        judge = CellJudge(cache, here, today.path, journal, REPEAT, lambda _: "runner.py sweep")
        work = Nothing(judge)
        workers = WorkerPool(work, journal, work.finish, None, folder)
        scheduler = Scheduler(workers, journal, Places(2, []), Listener(ended=lambda *_: marks.append(_resident())))
        started = time.perf_counter()
        scheduler.run(tasks, cancel_end)
        wall = time.perf_counter() - started
        os.close(cancel)
        assert len(journal) == len(tasks) == 2 * MANY * REPEAT
        print(f"the journal of {len(tasks)} lanes: {journal.path.stat().st_size / 1e6:.1f} MB")
    _print(f"scheduling {len(tasks)} lanes, each", 1000 * wall / len(tasks), 11, "ms")
    _print("memory from the 100th lane to the last", marks[-1] - marks[99], 10, "MB more")
    started = time.perf_counter()
    with FileJournal(journal.path) as again:
        left = [task for task in unique_tasks(cells, here, REPEAT) if task.key not in again]
    _print(f"reading a journal of {len(tasks)} lanes and finding none left", time.perf_counter() - started, 1, "s")
    assert not left
    started = time.perf_counter()
    subprocess.run(_runner(folder, runs, "--repeat", str(REPEAT)), capture_output=True, check=False)
    wall = time.perf_counter() - started
    results = json.loads((today.path / run_folder.RESULTS).read_text())
    assert (results["lanes_run"], results["lanes_resumed"]) == (0, len(tasks))
    print(f"the whole command that resumes them and writes the page: {wall:.2f} s")


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
