"""What the harness itself costs: prints the figures that README.md quotes the limits of.

Run it as ``python benchmarks/harness_cost.py``. It measures, on toy packs, with a warm cache:

- the runner's own cost per lane: wall time of `lane.run` less the wall time of the same probe started by hand;
- `list` and `check` of 100 packs, as processes of their own, and whether they import torch;
- the memory of the runner while a lane prints 500 MB;
- with ``--pack 09``, the wall time of the first run of a real pack (its JIT caches emptied, its downloads kept);
- with ``--real CACHE``, `list` and `check` of 100 copies of the real packs with their receipts; CACHE has their trees.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from harness.core.cache import Cache  # noqa: E402 - found through the path above
from harness.core.words import Evidence, LaneName  # noqa: E402 - likewise
from harness.host import host  # noqa: E402 - likewise
from harness.lane import lane  # noqa: E402 - likewise
from harness.pack import load  # noqa: E402 - likewise
from harness.upstream import dependencies, tree  # noqa: E402 - likewise
from harness.upstream.source import parse_source  # noqa: E402 - likewise
from testing import toys  # noqa: E402 - likewise

LANES = 40
PACKS = 100
REPEATS = 5


def _print(what: str, value: float, limit: float, unit: str) -> None:
    mark = "within" if value <= limit else "OVER"
    print(f"{what}: {value:.3g} {unit} ({mark} the limit of {limit:g} {unit})")


def _seconds(command: list[str], **options: object) -> float:
    started = time.perf_counter()
    ended = subprocess.run(command, capture_output=True, check=False, **options)  # type: ignore[call-overload]
    assert ended.returncode in {0, 1, 10}, ended.stderr.decode()[-500:]
    return time.perf_counter() - started


def lane_cost(folder: Path, sha256: str) -> None:
    """Print the cost of a lane over a bare probe, at the median and the 95th percentile."""
    subject = load.load_pack(toys.lay(folder / "one", toys.BASE, sha256))
    cache, here = Cache(folder / "cache", offline=True), host.detect()
    upstream = subject.definition.upstream
    pristine = tree.materialize(cache, upstream, parse_source(None, subject.definition))
    dependency_set = dependencies.named(subject.definition, "default", here.python_tag)
    one = lane.Lane(
        name=LaneName.PRISTINE,
        probe=subject.probe,
        tree=pristine,
        dependency_set=dependency_set,
        dependencies=dependencies.layout(cache, dependency_set, Path(sys.executable), here.python_tag),
        target="cpu",
        evidence=Evidence.TRACED,
        modules=upstream.modules,
        must_load=(),
        claims=(),
        timeout=60,
    )
    bare = [sys.executable, "-P", str(subject.probe), "--target", "cpu"]
    environment = os.environ | {"PYTHONPATH": str(pristine.import_root)}
    costs = []
    for number in range(LANES):
        started = time.perf_counter()
        lane.run(cache, here, one, folder / "logs" / f"{number}.log")
        costs.append(time.perf_counter() - started - _seconds(bare, env=environment))
    costs = sorted(1000 * cost for cost in costs[1:])
    print(f"runner's own cost per lane, median of {len(costs)}: {statistics.median(costs):.3g} ms")
    _print("runner's own cost per lane, 95th percentile", costs[int(0.95 * len(costs))], 100, "ms")


def many_packs(folder: Path, sha256: str) -> None:
    """Print the time of `list` and `check` over many packs with receipts, and that neither imports torch."""
    packs = folder / "packs"
    source = toys.lay(packs, toys.BASE, sha256)
    runner, cache = [sys.executable, str(REPOSITORY / "runner.py")], str(folder / "cache")
    _seconds([*runner, "run", "--record", "--packs", str(packs), "--cache", cache, "--offline"])
    for number in range(2, PACKS + 1):
        _copy(source, packs / f"{number:02d}_confirmed")
    _small_verbs("packs", packs, cache, {"list": 0.5, "check": 0.5})


def _copy(source: Path, target: Path) -> None:
    """Copy a pack under another name, its receipts with it."""
    shutil.copytree(source, target)
    for receipt in target.rglob("receipts/**/*.json"):
        receipt.write_text(receipt.read_text().replace(f'"{source.name}"', f'"{target.name}"'))


def real_packs(folder: Path, cache: Path) -> None:
    """Print the time of `list` and `check` over copies of the real packs."""
    packs = folder / "real"
    packs.mkdir()
    real = sorted((REPOSITORY / "packs").glob("[0-9]*_*"))
    for number in range(1, PACKS + 1):
        source = real[number % len(real)]
        _copy(source, packs / f"{number:03d}_{source.name.partition('_')[2]}")
    _small_verbs("copies of the real packs", packs, str(cache), {"list": 0.5, "check": 1.5})


def _small_verbs(what: str, packs: Path, cache: str, limits: dict[str, float]) -> None:
    runner = [sys.executable, str(REPOSITORY / "runner.py")]
    for verb in (["list"], ["check", "--cache", cache, "--offline"]):
        command = [*runner, verb[0], "--packs", str(packs), *verb[1:]]
        _seconds(command)
        best = min(_seconds(command) for _ in range(REPEATS))
        _print(f"{verb[0]} of {PACKS} {what}, best of {REPEATS}", best, limits[verb[0]], "s")
        traced = subprocess.run([sys.executable, "-X", "importtime", *command[1:]], capture_output=True, check=False)
        assert b"| torch" not in traced.stderr, "it imports torch"


def memory(folder: Path, sha256: str) -> None:
    """Print the runner's peak memory while a lane prints 500 MB."""
    packs = folder / "noisy"
    toys.lay(packs, "22_prints_500_megabytes", sha256)
    command = [sys.executable, str(REPOSITORY / "runner.py"), "run", "--packs", str(packs), "--lane", "pristine"]
    command += ["--cache", str(folder / "cache"), "--offline"]
    peak = 0
    with psutil.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as runner:
        while runner.poll() is None:
            try:
                peak = max(peak, runner.memory_info().rss)
                runner.wait(0.01)
            except psutil.Error:
                continue
    _print("runner's memory while a lane prints 500 MB", peak / 1e6, 100, "MB")


def first_run(name: str) -> None:
    """Print the wall time of a real pack's first run on cpu, with downloads and trees in the cache already."""
    with tempfile.TemporaryDirectory() as folder:
        cache = Path(folder) / "cache"
        runner = [sys.executable, str(REPOSITORY / "runner.py")]
        _seconds([*runner, "fetch", name, "--dest", str(cache)])
        command = [*runner, "run", name, "--target", "cpu", "--cache", str(cache), "--offline", "--receipts", folder]
        _print(f"first run of pack {name} on cpu, both lanes, cache filled", _seconds(command), 12, "s")
        print(f"second run of it: {_seconds(command):.3g} s")


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--pack", help="also the first run of this pack, such as 09")
    parser.add_argument("--real", type=Path, metavar="CACHE", help="also list and check of copies of the real packs")
    given = parser.parse_args()
    name = given.pack
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        archive, sha256 = toys.sdist(folder)
        toys.seed(folder / "cache", archive, sha256)
        lane_cost(folder, sha256)
        many_packs(folder, sha256)
        memory(folder, sha256)
        if given.real:
            real_packs(folder, given.real.absolute())
    if name:
        first_run(name)


if __name__ == "__main__":
    main()
