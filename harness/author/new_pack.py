"""A new pack from a script: it is written, tried once, and completed with what the trial showed."""

from __future__ import annotations

import re
import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

from harness.author import pack_text
from harness.author.pack_text import Stated
from harness.author.release import Release
from harness.author.script import Script
from harness.core import files
from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName, LaneVerdict
from harness.host.host import Host
from harness.lane.ordinary import INTERPRETED
from harness.lane.record import LaneRecord
from harness.pack import load, rules
from harness.schedule import lanes
from harness.schedule.selection import Request, cells_of
from harness.schedule.session import Session

SLUG = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")
#: How the reason begins where a script ran several times.
RUNS = re.compile(r"^\d+ of \d+ runs: ")


def folder_for(packs: Path, slug: str) -> Path:
    """Return the folder of a new pack, under the next number. HarnessError: the slug is wrong, or a pack has it."""
    if not SLUG.fullmatch(slug):
        raise HarnessError(f"{slug!r} is no slug. Next: lower-case letters, digits and _, such as liger_flce_none")
    matches = [match for path in packs.glob("*") if (match := load.FOLDER_PATTERN.fullmatch(path.name))]
    namesake = next((match for match in matches if match["slug"] == slug), None)
    if namesake is not None:
        raise HarnessError(f"{namesake[0]} is there already. Next: remove it, or another slug")
    number = max((int(match["number"]) for match in matches), default=0) + 1
    return packs / f"{number:02}_{slug}"


def texts(script: Script, release: Release, draft: Stated, host: Host) -> dict[str, str]:
    """Return the texts of a new pack by the names of their files."""
    return {
        "requirements.txt": release.pinned,
        "reproduce.py": script.with_header(release.requires_python, release.header, release.day),
        "pack.toml": pack_text.definition(release, draft, host),
        "report.in.md": pack_text.report(release, draft),
    }


def write(folder: Path, texts: dict[str, str], source: Path, beside: tuple[str, ...]) -> None:
    """Write every file of a pack, or none: its texts, and the files `beside` the author's script in `source`."""
    rules.parse(texts["pack.toml"])  # the metadata of a release may hold what pack.toml must not
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        pack = Path(scratch) / folder.name
        for name, text in texts.items():
            files.write_atomic(pack / name, text)
        for name in beside:
            (pack / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name, pack / name)
        pack.rename(folder)


def trial(folder: Path, session: Session) -> tuple[LaneRecord | None, str]:
    """Run the script of a new pack once on the release; return the lane's record, or the reason why there is none."""
    pack = load.load_pack(folder)
    request = Request(lanes=(LaneName.PRISTINE,))
    (cell,) = cells_of([pack], "auto", request, session.host, session.cache)
    if cell.evidence is None:
        return None, f"not judged here: {cell.reason}"
    account = lanes.run(session, [cell])
    if account.interrupted:
        raise KeyboardInterrupt
    outcome = account.results.get(cell.name)
    return (outcome.pristine, outcome.judgement.reason) if outcome else (None, "no lane ended")


def record_trial(folder: Path, release: Release, draft: Stated, host: Host, lane: LaneRecord) -> None:
    """Write into a pack how its script fails, which alone is the bug, and whether a Triton kernel was interpreted."""
    ending = RUNS.sub("", lane.reason) if lane.verdict == LaneVerdict.BUG_REPRODUCED else ""
    name = re.split(r"[: ]", ending)[0]
    evidence = Evidence.INTERPRETED if INTERPRETED in lane.printed else Evidence.TRACED
    learned = replace(draft, script=replace(draft.script, fails=name), evidence=evidence)
    files.write_atomic(folder / "pack.toml", pack_text.definition(release, learned, host))
    files.write_atomic(folder / "report.in.md", pack_text.report(release, learned))
