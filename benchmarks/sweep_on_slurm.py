"""What a sweep on a Slurm cluster costs: prints the figures of docs/slurm.md, from toy lanes and a Slurm of its own.

Run it as ``python benchmarks/sweep_on_slurm.py [makespan|thousand|queue|collector]``. It measures:

- makespan: 40 lanes of 20 cells that sleep for 4 to 16 s, on five toy cards of a real Slurm on the loopback interface:
  from the start of the first task to the end of the last, against the best that is possible - the longest task, or all
  tasks' time divided by the cards; and what a task costs besides its lanes;
- thousand: 1000 lanes of 500 cells in one array, how often sbatch and squeue are called meanwhile, and what the
  collector needs. Lanes sleep for 0.1 s, and the two cores that all nodes share are what takes the time;
- queue: 3000 tasks in six arrays on 64 toy cards that do nothing: how long sbatch and squeue take, and how many tasks
  Slurm starts in a second, all nodes on this machine;
- collector: 500 packs on six architectures, 6000 lanes, whose tasks are not run: what they would publish is written
  from one that was. How long it takes to submit and to collect, what lies on the shared file system, and the page.
"""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import random
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from testing import slurm, sweeps, toys  # noqa: E402 - found through the path above
from testing.slurm import Cluster  # noqa: E402 - likewise

GPU_TOY, EVIDENCE = "41_executes_on_a_gpu", "sm_90a.executed.json"
CARDS = slurm.H200
PACKS, TARGETS = 500, ("sm_80", "sm_89", "sm_90a", "sm_100a", "sm_120a", "sm_121a")
LINE = re.compile(r"\[\s*([\d.]+) s\] (.*)")

#: A command of Slurm that is noted and then called.
SHIM = """#!/bin/sh
echo {name} >> {calls}
PATH={path}
exec {name} "$@"
"""

#: Slurm without tasks: the second question finds that all of them have published.
STUB = """#!{python}
import json, os, subprocess, sys, time
from pathlib import Path
state, command = Path({state!r}), Path(sys.argv[0]).name
options = dict(text.lstrip("-").partition("=")[::2] for text in sys.argv[1:])
template, plans = state / "template.json", state / "plans"
if command == "sbatch":
    known = plans.read_text().splitlines() if plans.exists() else []
    plan = options["wrap"].split()[-1]
    if not template.exists():
        variables = {{"SLURM_JOB_ID": "1", "SLURM_ARRAY_TASK_ID": "0", "CUDA_VISIBLE_DEVICES": "0"}}
        given = {{"stdout": subprocess.DEVNULL, "cwd": options["chdir"], "env": os.environ | variables}}
        subprocess.run(["sh", "-c", options["wrap"]], check=True, **given)
        (found,) = (Path(plan).parents[1] / "results").iterdir()
        template.write_bytes(found.read_bytes())
    else:
        plans.write_text("\\n".join([*known, plan]) + "\\n")
    print(len(known) + 1)
elif command == "squeue" and not plans.exists():
    print("1|0|COMPLETED|None")
elif command == "squeue":
    asked, started = state / "asked", time.monotonic()
    again = asked.exists()
    asked.touch()
    for number, plan in enumerate(plans.read_text().splitlines(), 1):
        array, results = json.loads(Path(plan).read_text()), Path(plan).parents[1] / "results"
        print(f"{{number}}|0-{{len(array['tasks']) - 1}}|{{'COMPLETED' if again else 'RUNNING'}}|None")
        for task, cells in enumerate(array["tasks"] if again else []):
            for at, cell in enumerate(cells):
                document = json.loads(template.read_text())
                document["keys"] = cell["keys"]
                for end, key in zip(document["ends"], cell["keys"]):
                    end["key"] = key
                name = f"{{array['number']:04d}}.{{task}}.{{at}}.{{number}}{{task:05d}}.0.json"
                (results / name).write_text(json.dumps(document))
    if again:
        beside = Path(plans.read_text().splitlines()[0]).parents[1]
        files = [path.stat().st_size for path in beside.rglob("*") if path.is_file()]
        (state / "noted").write_text(json.dumps([time.monotonic() - started, len(files), sum(files)]))
"""


def _ground(folder: Path) -> str:
    folder.mkdir(parents=True, exist_ok=True)
    archive, sha256 = toys.sdist(folder)
    toys.seed(folder / "cache", archive, sha256)
    (folder / "packs").mkdir()
    return sha256


def _command(folder: Path, *arguments: str) -> list[str]:
    places = ["--packs", str(folder / "packs"), "--cache", str(folder / "cache"), "--runs", str(folder / "sweeps")]
    return [sys.executable, str(REPOSITORY / "runner.py"), "sweep", "--slurm", "--offline", *places, *arguments]


def _toys(folder: Path, sha256: str, count: int, shortest: float, longest: float) -> None:
    """Lay packs whose lanes take as long as their receipts say."""
    chance = random.Random(1)  # noqa: S311 - no secret
    for pack in sweeps.copies(folder / "packs", sha256, count, GPU_TOY):
        seconds = chance.uniform(shortest, longest)
        (pack / "seconds").write_text(f"{seconds:.3f}")
        (pack / "receipts").mkdir()
        lanes = {name: {"seconds": seconds} for name in ("pristine", "patched")}
        (pack / "receipts" / EVIDENCE).write_text(json.dumps({"lanes": lanes}))


def _variables(folder: Path, cluster: Cluster | None = None) -> dict[str, str]:
    state = folder / "gpus.json"
    state.write_text(json.dumps({"devices": [{"name": "Toy H200", "capability": [9, 0]}] * 2}))
    return sweeps.environment(state) | (cluster.variables if cluster else {})


def _counted(folder: Path, variables: dict[str, str]) -> tuple[Path, dict[str, str]]:
    """Put commands before Slurm's that note each call."""
    calls, shims = folder / "calls", folder / "shims"
    shims.mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        (shims / name).write_text(SHIM.format(name=name, calls=calls, path=variables["PATH"]))
        (shims / name).chmod(0o755)
    return calls, variables | {"PATH": f"{shims}{os.pathsep}{variables['PATH']}"}


def _judged(folder: Path, cells: int) -> list[dict[str, object]]:
    """Return the ends of all lanes of the one sweep, each lane once."""
    (journal,) = (folder / "sweeps").glob("*/journal.jsonl")
    ends = [json.loads(line) for line in journal.read_text().splitlines()]
    assert len({end["task"] for end in ends}) == len(ends) == 2 * cells
    return ends


def _on_slurm(folder: Path, count: int, shortest: float, longest: float, poll: float) -> None:
    """Judge toy packs on five cards, and print what that took."""
    ground = folder / "ground"
    _toys(ground, _ground(ground), count, shortest, longest)
    with slurm.running(folder / "slurm") as cluster:
        calls, variables = _counted(folder, _variables(ground, cluster))
        started, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
        command = _command(ground, "--gpu-type", "sm_90a=h200", "--poll", str(poll))
        ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=False)
        wall, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
        assert ended.returncode == 0, ended.stdout[-2000:]
        number = ended.stderr.partition(" tasks, Slurm's job ")[2].split()[0]
        spans = cluster.spans(number)
    ends = _judged(ground, count)
    print(f"{len(ends)} lanes of {count} cells: the whole command took {wall:.1f} s, {dict(_calls(calls))}")
    print(f"the collector and Slurm's commands used {after.ru_utime - before.ru_utime:.1f} s of the cores")
    if len(spans) == count:  # Slurm forgets what ended five minutes ago
        took = [end - begin for begin, end in spans]
        best = max(*took, sum(took) / CARDS)
        whole = max(end for _, end in spans) - min(begin for begin, _ in spans)
        print(f"tasks: {sum(took):.0f} s in {whole:.0f} s on {CARDS} cards; best possible {best:.1f} s")
        print(f"makespan over the best possible: {whole / best:.3f}")
        lanes = sum(_longer(ends).values())
        print(f"a task beside the longer of its two lanes: {(sum(took) - lanes) / count:.1f} s")


def _longer(ends: list[dict[str, object]]) -> dict[str, float]:
    """Return how long the longer lane of each cell took; both run at once."""
    found: dict[str, float] = {}
    for end in ends:
        name = str(end["task"]).partition(" ")[0]
        found[name] = max(found.get(name, 0.0), float(str(end["seconds"])))
    return found


def _calls(path: Path) -> Counter[str]:
    return Counter(path.read_text().split())


def makespan(folder: Path) -> None:
    """Print how much longer 40 lanes take than the cards allow."""
    _on_slurm(folder, 20, 4.0, 16.0, 1.0)


def thousand(folder: Path) -> None:
    """Print what 1000 lanes in one array ask of Slurm."""
    _on_slurm(folder, 500, 0.1, 0.1, 5.0)


def queue(folder: Path) -> None:
    """Print what Slurm's own commands take with 3000 tasks."""
    nodes = {f"big{number}": 16 for number in range(4)}
    with slurm.running(folder / "slurm", nodes) as cluster:
        marks = []
        for number in range(len(TARGETS)):
            started = time.perf_counter()
            job = ["sbatch", "--parsable", f"--array=0-{PACKS - 1}", "--gres=gpu:h200:1", "--output=/dev/null"]
            assert cluster.ask(*job, "--wrap", "true").strip().isdecimal(), number
            marks.append(time.perf_counter() - started)
        print(f"sbatch, an array of {PACKS} tasks: {1000 * max(marks):.0f} ms at most")
        whole, asked, over, begun = len(TARGETS) * PACKS, [], 0, time.perf_counter()
        while over < whole:
            time.sleep(2)
            started = time.perf_counter()
            lines = cluster.ask("squeue", "--noheader", "--states=all", "--format=%F|%K|%T|%r").splitlines()
            asked.append(time.perf_counter() - started)
            over = sum("COMPLETED" in line for line in lines)
        rate = whole / (time.perf_counter() - begun)
        print(f"squeue, {whole} tasks: {1000 * max(asked):.0f} ms at most, {1000 * min(asked):.0f} ms at least")
        print(f"Slurm ran {rate:.0f} tasks a second on {sum(nodes.values())} cards, all on this machine")


def collector(folder: Path) -> None:
    """Print what the command itself needs for 500 packs on six architectures."""
    ground, state, stubs = folder / "ground", folder / "state", folder / "stubs"
    sha256 = _ground(ground)
    state.mkdir()
    stubs.mkdir()
    for name in ("sbatch", "squeue", "scancel"):
        (stubs / name).write_text(STUB.format(python=sys.executable, state=str(state)))
        (stubs / name).chmod(0o755)
    variables = _variables(ground)
    variables["PATH"] = f"{stubs}{os.pathsep}{variables['PATH']}"
    toys.lay(ground / "packs", GPU_TOY, sha256, "001_toy")
    first = _command(ground, "--gpu-type", "sm_90a=t", "--poll", "0.2")
    ended = subprocess.run(first, env=variables, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr[-1000:]
    shutil.rmtree(ground / "sweeps")
    shutil.rmtree(ground / "packs")
    (ground / "packs").mkdir()
    for pack in sweeps.copies(ground / "packs", sha256, PACKS, GPU_TOY):
        text = (pack / "pack.toml").read_text()
        head, _, body = text.partition("[targets.sm_90a]\n")
        (pack / "pack.toml").write_text(head + "\n".join(f"[targets.{target}]\n{body}" for target in TARGETS))
    types = [text for target in TARGETS for text in ("--gpu-type", f"{target}=t{target[3:]}")]
    started = time.perf_counter()
    ended = subprocess.run(_command(ground, *types), env=variables, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - started
    assert ended.returncode == 0, ended.stderr[-1000:]
    _judged(ground, len(TARGETS) * PACKS)
    lines = [(float(match[1]), match[2]) for match in map(LINE.match, ended.stderr.splitlines()) if match]
    submitted = max(at for at, text in lines if "Slurm's job" in text)
    begun, last = (pick(at for at, text in lines if ": BUG_" in text or ": FIX_" in text) for pick in (min, max))
    wrote, files, size = json.loads((state / "noted").read_text())
    print(f"{2 * len(TARGETS) * PACKS} lanes of {PACKS} packs on {len(TARGETS)} architectures, {dt.date.today()}")  # noqa: DTZ011
    print(f"planned, laid out and submitted: {submitted:.1f} s; collected, with receipts: {last - begun:.1f} s")
    print(
        f"judged, compared, page: {wall - last:.1f} s; the whole command, with the stub's {wrote:.1f} s: {wall:.1f} s"
    )
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    print(f"memory of the collector: {peak:.0f} MiB at most")
    print(f"beside the run folder, before it is removed: {files} files, {size / 2**20:.1f} MiB")
    run = next((ground / "sweeps").glob("*/run.json")).parent
    found = [path.stat().st_size for path in run.rglob("*") if path.is_file()]
    print(f"the run folder: {len(found)} files, {sum(found) / 2**20:.1f} MiB")
    for name in ("index.html", "results.json", "journal.jsonl"):
        print(f"{name}: {(run / name).stat().st_size / 2**20:.1f} MiB")


PARTS = {"makespan": makespan, "thousand": thousand, "queue": queue, "collector": collector}


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("what", nargs="?", choices=list(PARTS), help="default: all")
    what = parser.parse_args().what
    if slurm.MISSING and what != "collector":
        parser.error(slurm.REASON)
    for name, measure in PARTS.items():
        if what in (None, name):
            with tempfile.TemporaryDirectory() as text:
                measure(Path(text))


if __name__ == "__main__":
    main()
