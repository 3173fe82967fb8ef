"""Compare `runner.py versions` with a nox session for each release: pack 09, its newest 16 releases, on the CPU.

    python benchmarks/releases.py --cache CACHE [--sessions 16] [--shared-sessions 16]

Three ways to do the same, in one run, one after the other, with every download done beforehand:

- ``nox``: what its users get by default: for each release a virtualenv of its own, `pip install` of the release with
  torch, triton and the pack's dependencies from pip's warm cache and local wheels, then the probe.
- ``nox --system-site-packages``: the most that a user can save by hand: torch and triton are seen from outside,
  the release is installed with --no-deps and the dependencies beside it, then the probe.
- ``versions``: a fresh cache that holds the downloads and nothing else, then the same once more.

``--sessions`` below 16 measures that many sessions, spread over the releases, and extrapolates; what is extrapolated is
called so. The floor is (imports + probe) x releases / cores: the probe started by hand, one process on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY))

from harness.core.cache import Cache  # noqa: E402 - likewise
from harness.host import host  # noqa: E402 - found through the path above
from harness.pack import load  # noqa: E402 - found through the path above
from harness.pack.model import Pack  # noqa: E402 - likewise
from harness.upstream import dependencies, tree  # noqa: E402 - found through the path above
from harness.upstream.dependencies import DependencySet  # noqa: E402 - likewise
from harness.upstream.source import Source, SourceKind  # noqa: E402 - likewise
from harness.versions import candidates  # noqa: E402 - likewise

PACK = next((REPOSITORY / "packs").glob("09_*"))
RELEASES = 16
JUDGED = (0, 10, 125)
NOXFILE = """
import nox

nox.options.reuse_existing_virtualenvs = False


@nox.session(venv_params={venv_params})
@nox.parametrize("release", {releases})
def judge(session, release):
    session.install(*{no_deps}, f"liger-kernel=={{release}}")
    session.install({others})
    session.run("python", {probe!r}, "--target", "cpu", success_codes=[0, 10, 125], silent=True)
"""


@dataclass(frozen=True)
class Timed:
    """A way to do it: its sessions' wall times, in seconds."""

    name: str
    seconds: list[float]

    @property
    def total(self) -> float:
        """Seconds for all releases: measured where every session ran, else extrapolated from the mean."""
        return statistics.mean(self.seconds) * RELEASES

    def line(self, ours: float) -> str:
        """Say it, and how many times as long it takes as ours."""
        how = "measured" if len(self.seconds) == RELEASES else f"extrapolated from {len(self.seconds)} sessions"
        spread = f"{min(self.seconds):.1f} to {max(self.seconds):.1f} s a session"
        return f"{self.name}: {self.total:.0f} s for {RELEASES} releases ({how}; {spread}): {self.total / ours:.1f} x"


def nox(folder: Path, name: str, releases: list[str], others: list[str], *, shared: bool) -> Timed:
    """Run a session for each of these releases, each as a call of nox of its own so that each has its time."""
    tool = folder / "tool"
    if not tool.exists():
        subprocess.run([sys.executable, "-m", "venv", str(tool)], check=True)
        subprocess.run([str(tool / "bin/python"), "-m", "pip", "install", "--quiet", "nox"], check=True)
    noxfile = folder / f"noxfile_{len(others)}.py"
    torch, triton = f"torch=={host.detect().torch}", f"triton=={host.detect().triton}"
    noxfile.write_text(
        NOXFILE.format(
            venv_params=["--system-site-packages"] if shared else [],
            releases=releases,
            no_deps=["--no-deps"] if shared else [torch, triton],
            others=", ".join(repr(one) for one in others),
            probe=str(PACK / "reproduce.py"),
        ),
        encoding="utf-8",
    )
    seconds = []
    for release in releases:
        session = f"judge(release='{release}')"
        command = [str(tool / "bin/nox"), "-f", str(noxfile), "--envdir", str(folder / "envs"), "-s", session]
        started = time.perf_counter()
        ended = subprocess.run(
            [*command, "--force-python", sys.executable], capture_output=True, text=True, check=False
        )
        seconds.append(time.perf_counter() - started)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
        print(f"  {name}, {release}: {seconds[-1]:.1f} s", flush=True)
        shutil.rmtree(folder / "envs")
    return Timed(name, seconds)


def versions(cache: Path, releases: list[str]) -> float:
    """Run the verb over these releases; return its wall time."""
    within = f">={releases[0]},<={releases[-1]}"
    command = [sys.executable, str(REPOSITORY / "runner.py"), "versions", "9", "--target", "cpu", "--range", within]
    started = time.perf_counter()
    ended = subprocess.run(
        [*command, "--cache", str(cache), "--offline", "--json"], capture_output=True, text=True, check=False
    )
    seconds = time.perf_counter() - started
    found = json.loads(ended.stdout)
    assert len(found["rows"]) == len(releases), ended.stderr[-2000:]
    print(f"  {found['line']}", flush=True)
    return seconds


def beside(subject: Pack) -> DependencySet:
    """Return the packages that the probe wants besides torch, triton and the release."""
    return dependencies.named(subject.definition, "default", host.detect().python_tag)


def floor(cache: Cache, releases: list[str]) -> float:
    """Return the mean wall time of the probe started by hand on one core, with the bytecode it already has."""
    subject = load.load_pack(PACK)
    site = dependencies.materialize(cache, beside(subject), Path(sys.executable), host.detect().python_tag)
    core = host.cores()[0]
    seconds = []
    for release in releases:
        source = tree.materialize(cache, subject.definition.upstream, Source(SourceKind.RELEASE, release))
        environment = os.environ | {
            "PYTHONPATH": f"{source.import_root}:{site}",
            "CUDA_VISIBLE_DEVICES": "",
            "TRITON_CACHE_DIR": str(cache.root / "by-hand" / release),
        }
        command = [sys.executable, "-P", str(subject.probe), "--target", "cpu"]
        started = time.perf_counter()
        ended = subprocess.run(
            command,
            env=environment,
            capture_output=True,
            check=False,
            preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        )
        seconds.append(time.perf_counter() - started)
        assert ended.returncode in JUDGED, ended.stderr[-2000:]
    return statistics.mean(seconds)


def downloads(cache: Cache) -> list[str]:
    """Fetch what all ways need beforehand; return the newest releases, the oldest first."""
    subject = load.load_pack(PACK)
    chosen = [one.label for one in candidates.releases(cache, subject, "")][-RELEASES:]
    for release in chosen:
        tree.materialize(cache, subject.definition.upstream, Source(SourceKind.RELEASE, release))
    dependencies.fetch(cache, beside(subject))
    return chosen


def spread(releases: list[str], number: int) -> list[str]:
    """Choose `number` of the releases, evenly."""
    return [releases[index * len(releases) // number] for index in range(number)]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True, help="a cache to take downloads from, or to fill")
    parser.add_argument("--sessions", type=int, default=RELEASES, help="nox sessions to measure")
    parser.add_argument("--shared-sessions", type=int, default=RELEASES, help="and with --system-site-packages")
    arguments = parser.parse_args()
    releases = downloads(Cache(arguments.cache.absolute()))
    others = [f"{name}=={version}" for name, version in beside(load.load_pack(PACK)).versions.items()]
    with tempfile.TemporaryDirectory(dir=arguments.cache) as name:
        folder = Path(name)
        fresh = folder / "cache"
        for kind in ("downloads", "releases"):
            shutil.copytree(arguments.cache / kind, fresh / kind)
        first = versions(fresh, releases)
        print(f"versions, from downloads: {first:.0f} s", flush=True)
        second = versions(fresh, releases)
        print(f"versions, once more: {second:.0f} s", flush=True)
        ways = [
            nox(folder, "nox", spread(releases, arguments.sessions), others, shared=False),
            nox(folder, "nox --system-site-packages", spread(releases, arguments.shared_sessions), others, shared=True),
        ]
        bare = floor(Cache(fresh, offline=True), spread(releases, 4))
    cores = len(host.cores())
    print(
        f"{RELEASES} releases, {releases[0]} to {releases[-1]}, on {cores} cores; load average {os.getloadavg()[1]:.1f}"
    )
    print(f"versions: {first:.0f} s from downloads, {second:.0f} s once more")
    for way in ways:
        print(way.line(first))
    least = bare * RELEASES / cores
    print(f"floor: {bare:.1f} s x {RELEASES} / {cores} = {least:.0f} s")
    print(f"versions takes {first / least:.2f} x the floor from downloads, {second / least:.2f} x once more")


if __name__ == "__main__":
    main()
