"""pack.toml and report.in.md of a new pack."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict, dataclass

from harness.author.release import Release
from harness.core.words import Evidence, Fix, Kind
from harness.host.host import Host
from harness.pack.model import CPU, OrdinaryScript

#: The keys of [upstream], in their order.
UPSTREAM = (
    "package", "version", "file", "sha256", "repository", "commit", "source_root", "license",
    "modules",
)  # fmt: skip
#: Seconds of a lane besides those of its runs, and the fewest that it gets.
BESIDE_RUNS, SHORTEST_LANE = 120.0, 600.0


@dataclass(frozen=True)
class Stated:
    """What a new pack states besides its release."""

    title: str  # the symptom
    command: str  # runs the script by hand
    script: OrdinaryScript  # how a lane runs the script
    targets: tuple[str, ...]  # cpu, and the GPU of this host
    evidence: Evidence = Evidence.TRACED  # how the bug is seen on the target cpu


def definition(release: Release, draft: Stated, host: Host) -> str:
    """Write pack.toml."""
    upstream, script = release.upstream, draft.script
    torch = ".".join((host.torch or "2").partition("+")[0].split(".")[:2])
    kind = Kind.WRONG_RESULT if script.fails in {"", "AssertionError", "SystemExit"} else Kind.CRASH
    tables: dict[str, dict[str, object]] = {
        "upstream": {key: getattr(upstream, key) for key in UPSTREAM},
        "action": {"kind": "file", "text": f"Open an issue at {upstream.repository}."},
        "requires": {"python": release.requires_python, "torch": f">={torch}" if release.needs_torch else ""},
        "ordinary": asdict(script),
    }
    seconds = max(SHORTEST_LANE, script.repeat * script.timeout_s + BESIDE_RUNS)
    for target in draft.targets:
        tables[f"targets.{target}"] = {
            "evidence": [draft.evidence if target == CPU else Evidence.EXECUTED],
            "timeout_s": seconds,
        }
    head = {"title": draft.title, "kind": kind, "fix": Fix.NONE, "leading_figure": ""}
    lines = [f"{key} = {_value(value)}" for key, value in head.items()]
    for name, table in tables.items():
        lines += ["", f"[{name}]", *(f"{key} = {_value(value)}" for key, value in table.items() if value)]
    return "\n".join(lines) + "\n"


def _value(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_value(item)}" for key, item in value.items()) + " }"
    return json.dumps(value, ensure_ascii=False)


def report(release: Release, draft: Stated) -> str:
    """Write report.in.md, with a TODO for each sentence that only the author can write."""
    install = f"pip install {shlex.join(release.header)}"
    expected = f"within {draft.script.timeout_s:g} s" if draft.script.fails == "timeout" else "without an error"
    parts = [
        f"# {draft.title}",
        f"{{{{ending}}}} Expected: it ends {expected}.",
        f"```sh\n{install}\n{draft.command}\n```",
        "{{script}}",
        "**Since.** {{since}}",
        "**Cause.** TODO: the lines that do it, with a permalink.",
        "**Related.**\n{{threads}}",
        "**Environment.** {{environment}}",
        "**Not tested.** TODO: other releases, dtypes and GPUs that nobody ran.",
        "---",
        "## How this was checked",
        "{{verdicts}}",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"
