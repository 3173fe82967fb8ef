"""A workbench of toy packs, a cache, and the real runner as a child process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.core import cache
from harness.core.cache import Cache
from harness.host import host
from harness.pack import load
from harness.pack.model import Pack
from harness.report import report
from harness.upstream import dependencies, tree
from harness.upstream.source import parse_source
from harness.upstream.tree import Tree
from testing import toys

VERBS_OF_LANES = {"run", "check", "sweep", "versions", "pr-verdict", "mutate", "upstream-tests"}
VERBS_OF_PACKS = VERBS_OF_LANES | {"list", "fetch", "report", "new"}
REPOSITORY = Path(__file__).resolve().parent.parent


@dataclass(frozen=True)
class Workbench:
    """A folder of toy packs with a cache that holds their upstream."""

    folder: Path
    sha256: str

    @property
    def packs(self) -> Path:
        """The folder of the toy packs."""
        return self.folder / "packs"

    @property
    def cache(self) -> Path:
        """The cache."""
        return self.folder / "cache"

    def lay(self, behaviour: str, name: str = "") -> Path:
        """Lay a toy pack, named for its behaviour unless another name is given."""
        return toys.lay(self.packs, behaviour, self.sha256, name)

    def command(self, *arguments: str) -> list[str]:
        """Build the command line of the runner, with this workbench's folders where the verb takes them."""
        verb = arguments[0] if arguments else ""
        places = ["--packs", str(self.packs)] if verb in VERBS_OF_PACKS else []
        if verb in VERBS_OF_LANES and "--cache" not in arguments:
            places += ["--cache", str(self.cache)]
        if verb in VERBS_OF_LANES and "--online" not in arguments:
            places += ["--offline"]
        rest = [text for text in arguments if text != "--online"]
        return [sys.executable, "-W", "error", str(REPOSITORY / "runner.py"), *rest[:1], *places, *rest[1:]]

    def run(self, *arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
        """Run the runner to its end."""
        return subprocess.run(
            self.command(*arguments),
            env=os.environ | environment,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=120,
            check=False,
        )

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
        return ended.returncode, json.loads(ended.stdout) if ended.stdout else []

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
    name, tag = one.definition.targets["cpu"].dependencies, host.detect().python_tag
    members = dependencies.named(one.definition, name, tag)
    layout = dependencies.layout(Cache(cache.default_root()), members, Path(sys.executable), tag)
    layout.lay_out()
    return layout.folder


def confirmed(folder: Path) -> Workbench:
    """Judge the sound toy pack in a folder; return its workbench."""
    made = empty(folder)
    made.lay("01_confirmed")
    made.recorded("1")
    return made


def empty(folder: Path) -> Workbench:
    """Build a workbench without packs, whose cache holds the toy upstream's release 1.0."""
    archive, sha256 = toys.sdist(folder)
    (folder / "packs").mkdir()
    toys.seed(folder / "cache", archive, sha256)
    return Workbench(folder, sha256)
