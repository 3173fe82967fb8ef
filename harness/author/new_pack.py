"""A new pack from a script: its files are written, and its script is tried once."""

import json
import re
import shlex
import tempfile
from dataclasses import asdict
from pathlib import Path

from harness.author.release import Release
from harness.core import HarnessError, files
from harness.core.words import Evidence, Fix, Kind, LaneName
from harness.host.host import Host
from harness.lane.results import LaneRecord
from harness.pack import CPU, load
from harness.schedule import lanes
from harness.schedule.selection import Request, cells_of
from harness.schedule.session import Session

SLUG = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")
#: Seconds of a lane.
TIMEOUT = 600
REPORT = """# {title}

TODO: one sentence with the wrong and the right number, and when it does not happen.

```sh
pip install {packages}
python reproduce.py
```

{{{{script}}}}

**Cause.** TODO: the lines that do it, with a permalink.

**Related.** TODO: the threads of upstream on these lines.

**Environment.** {{{{environment}}}}

**Not tested.** TODO: other releases, dtypes and GPUs that nobody ran.

---

## How this was checked

{{{{verdicts}}}}
"""


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


def definition(release: Release, title: str, fails: str, targets: dict[str, Evidence], host: Host) -> str:
    """Write pack.toml; `targets` has the evidence on each target, and `fails` is the exception that is the bug."""
    upstream = release.upstream
    torch = ".".join((host.torch or "2").partition("+")[0].split(".")[:2])
    head = {
        "title": title,
        "kind": Kind.WRONG_RESULT if fails == "AssertionError" else Kind.CRASH,
        "fix": Fix.NONE,
        "leading_figure": "",
    }
    tables: dict[str, dict[str, object]] = {
        "upstream": asdict(upstream),
        "action": {"kind": "file", "text": f"Open an issue at {upstream.repository}."},
        "requires": {"python": release.requires_python, "torch": f">={torch}" if release.needs_torch else ""},
    }
    for target, evidence in targets.items():
        tables[f"targets.{target}"] = {"evidence": [evidence], "timeout_s": TIMEOUT}
    lines = [f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in head.items()]
    for name, table in tables.items():
        values = (f"{key} = {json.dumps(value, ensure_ascii=False)}" for key, value in table.items() if value)
        lines += ["", f"[{name}]", *values]
    return "\n".join(lines) + "\n"


def report(release: Release, title: str) -> str:
    """Write report.in.md, with a TODO for each sentence that only the author can write."""
    return REPORT.format(title=title, packages=shlex.join(release.header))


def write(folder: Path, texts: dict[str, str]) -> None:
    """Write every file of a pack, or none."""
    load.parse(texts["pack.toml"])  # the metadata of a release may hold what pack.toml must not
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.parent) as scratch:
        pack = Path(scratch) / folder.name
        for name, text in texts.items():
            files.write_atomic(pack / name, text)
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


def targets(host: Host, *, is_interpreted: bool) -> dict[str, Evidence]:
    """Return the evidence of a new pack on the target cpu, and on the GPU of this host."""
    on_cpu = Evidence.INTERPRETED if is_interpreted else Evidence.TRACED
    return {CPU: on_cpu} | ({host.auto_target: Evidence.EXECUTED} if host.auto_target != CPU else {})
