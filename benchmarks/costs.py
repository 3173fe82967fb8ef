"""What the harness costs, and that a killed sweep goes on: prints each figure beside the limit that it has to hold.

Run it as ``python benchmarks/costs.py [lanes|list|makespan|kills] [--kills 200] [--seed 1]``. Everything runs the real
command over toy packs, with a warm cache and without a network. It measures:

- lanes: what the runner takes for a lane besides the lane's own processes, by the journal of a sweep;
- list: `list` of 100 copies of the real packs with their receipts, and that it does not import torch;
- makespan: a sweep of 40 lanes on 1, 2, 4 and 8 toy GPUs against the best possible, which is the longest lane, or the
  time of all lanes divided by the GPUs;
- kills: SIGKILL of a sweep at random moments. The first lane that is lost, run twice, orphaned or half written ends it.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import random
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from harness.core.words import LaneName  # noqa: E402 - found through the path above
from testing import sweeps, toys  # noqa: E402 - likewise

GPU_TOY = "41_executes_on_a_gpu"
LANE_PACKS, LANE_LIMIT = 20, 100.0
LISTED, LIST_LIMIT, REPEATS = 100, 0.5, 5
SPAN_PACKS, SHORTEST, LONGEST, SPAN_LIMIT = 20, 1.0, 5.0, 1.1
GPUS = (1, 2, 4, 8)
KILLED_PACKS, KILLED_JOBS, LONGEST_LIFE = 20, 4, 3.0


def _print(what: str, value: float, limit: float, unit: str) -> None:
    mark = "within" if value <= limit else "OVER"
    print(f"{what}: {value:.3g}{unit} ({mark} the limit of {limit:g}{unit})", flush=True)


def _sweep(folder: Path, runs: Path, jobs: int, environment: dict[str, str] | None = None) -> list[dict[str, Any]]:
    """Sweep the packs of a folder; return the ends of its lanes."""
    places = ["--packs", str(folder / "packs"), "--cache", str(folder / "cache"), "--offline", "--runs", str(runs)]
    command = [sys.executable, str(REPOSITORY / "runner.py"), "sweep", *places, "--jobs", str(jobs)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-1000:]
    (journal,) = runs.glob("*/journal.jsonl")
    return [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]


def _toys(folder: Path, count: int, behaviour: str) -> list[Path]:
    archive, sha256 = toys.sdist(folder)
    toys.seed(folder / "cache", archive, sha256)
    (folder / "packs").mkdir()
    return sweeps.copies(folder / "packs", sha256, count, behaviour)


def lanes(folder: Path) -> None:
    """Print what the runner takes for a lane, at the median and the 95th percentile."""
    _toys(folder, LANE_PACKS, toys.BASE)
    costs = sorted(
        1000 * (end["seconds"] - end["record"]["seconds"]) for end in _sweep(folder, folder / "sweeps", jobs=1)
    )
    print(f"runner's own cost per lane, median of {len(costs)}: {costs[len(costs) // 2]:.3g} ms")
    _print("runner's own cost per lane, 95th percentile", costs[int(0.95 * len(costs))], LANE_LIMIT, " ms")


def listing(folder: Path) -> None:
    """Print the time of `list` over copies of the real packs."""
    packs = folder / "packs"
    packs.mkdir()
    real = sorted((REPOSITORY / "packs").glob("[0-9]*_*"))
    for number in range(1, LISTED + 1):
        source = real[number % len(real)]
        target = packs / f"{number:03d}_{source.name.partition('_')[2]}"
        shutil.copytree(source, target)
        for receipt in target.rglob("receipts/**/*.json"):
            receipt.write_text(receipt.read_text().replace(f'"{source.name}"', f'"{target.name}"'))
    verb = [str(REPOSITORY / "runner.py"), "list", "--packs", str(packs)]
    took = []
    for _ in range(REPEATS):
        began = time.perf_counter()
        ended = subprocess.run([sys.executable, *verb], capture_output=True, check=False)
        took.append(time.perf_counter() - began)
        assert ended.returncode == 0, ended.stderr.decode()[-1000:]
    _print(f"list of {LISTED} copies of the real packs, best of {REPEATS}", min(took), LIST_LIMIT, " s")
    traced = subprocess.run([sys.executable, "-X", "importtime", *verb], capture_output=True, check=False)
    assert b"| torch" not in traced.stderr, "it imports torch"


def makespan(folder: Path) -> None:
    """Print, for each number of GPUs, the span of a sweep's lanes over the best possible."""
    chance = random.Random(1)  # noqa: S311 - no secret
    for pack in _toys(folder, SPAN_PACKS, GPU_TOY):
        seconds = chance.uniform(SHORTEST, LONGEST)
        (pack / "seconds").write_text(f"{seconds:.3f}")
        (pack / "receipts").mkdir()
        expected = {name: {"seconds": seconds} for name in LaneName}
        (pack / "receipts/sm_90a.executed.json").write_text(json.dumps({"lanes": expected}))
    for count in GPUS:
        state = folder / "gpus.json"
        state.write_text(json.dumps({"devices": [{"name": "Toy H200", "capability": [9, 0]}] * count}))
        ends = _sweep(folder, folder / f"sweeps-{count}", count, sweeps.environment(state))
        took = [end["record"]["seconds"] for end in ends]
        assert len(took) == 2 * SPAN_PACKS
        best = max(*took, sum(took) / count)
        begun = [dt.datetime.fromisoformat(end["started"]).timestamp() for end in ends]
        span = max(at + end["seconds"] for at, end in zip(begun, ends, strict=True)) - min(begun)
        print(f"{count} GPU(s): {len(took)} lanes of {sum(took):.1f} s in {span:.1f} s; best possible {best:.1f} s")
        _print(f"{count} GPU(s): makespan over the best possible", span / best, SPAN_LIMIT, "")


def kills(folder: Path, wanted: int, seed: int) -> None:
    """Kill a sweep of 40 lanes, 4 at once, again and again; each next command continues it."""
    began = time.monotonic()
    one = sweeps.siege(folder, KILLED_PACKS, KILLED_JOBS, seed)
    while one.kills < wanted:
        one.assault(LONGEST_LIFE)
        sweeps.prune(one.bench.sweeps, keep=2)
    print(
        f"{one.kills} SIGKILLs of a sweep of {2 * KILLED_PACKS} lanes (seed {seed}), {one.ended} sweeps finished "
        f"meanwhile, {one.torn} torn journal lines, {time.monotonic() - began:.0f} s: "
        "no finished lane lost, none run twice, no orphan, no broken file"
    )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="?", choices=["lanes", "list", "makespan", "kills"], help="default: all")
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    for name, measure in (("lanes", lanes), ("list", listing), ("makespan", makespan)):
        if asked.what in (None, name):
            with tempfile.TemporaryDirectory() as text:
                measure(Path(text))
    if asked.what in (None, "kills"):
        with tempfile.TemporaryDirectory() as text:
            kills(Path(text), asked.kills, asked.seed)


if __name__ == "__main__":
    main()
