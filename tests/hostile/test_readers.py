"""What contracts, receipts and callers write: refused in one line, and nothing else is taken along."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.lane import results
from testing.workbench import Workbench

SOUND = "01_confirmed"

# --- what a contract writes

BEFORE = b"""{"number": 1, "kind": "target", "target": "cpu", "evidence": "traced", "device": "CPU"}
{"number": 2, "kind": "begin", "name": "test"}
{"number": 3, "kind": "check", "name": "test", "role": "control", "ok": true}
"""
END = b'{"number": 4, "kind": "end", "status": 0}\n'
CHECK = b'{"number": 4, "kind": "check", "name": "more", "role": "control", "ok": true, "reason": %s}\n'
FIGURE = b'{"number": 4, "kind": "figure", "name": %s, "value": %s}\n'
OUTPUT = b'{"number": 4, "kind": "output", "name": "o", "dtype": "f", "shape": %s, "sha256": "x", "must_match": true}\n'


@pytest.mark.hostile("results of a contract")
@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (FIGURE % (b'"f"', b"1e999"), "a number is too large for a float"),
        (FIGURE % (b'"a\\nb"', b"1"), "is no name"),
        (OUTPUT % b'""', "expected a list"),
        (CHECK % (b"7" * 400), "more than 64 bits"),
        (CHECK % b'"\\ud800"', "half a character"),
        (CHECK % b'"a\\u0000b"', "NUL"),
        (CHECK % (b"[" * 900 + b"]" * 900), "brackets inside each other"),
        (CHECK % (b"[" * 100_000 + b"]" * 100_000), "brackets inside each other"),
        (CHECK % b"NaN", "NaN is no JSON"),
        (CHECK % (b'"' + b"x" * 40_000_000 + b'"'), "more than 33554432 bytes"),
        (CHECK % b'"\xff\xfe"', "not UTF-8"),
        (b"\0" + CHECK % b"1", "not JSON"),
        (b"50%\r" + CHECK % b"1", "not JSON"),
        (b"\xef\xbb\xbf" + CHECK % b"1", "not JSON"),
        (CHECK.replace(b'"ok"', b'"ok": false, "ok"') % b"1", "stands there twice"),
        (CHECK % b'""', "a line is lost, or written twice"),
        (CHECK.replace(b"4", b"5") % b'""', "a line is lost, or written twice"),
        (b'{"kind": "end", "status": 0}\n', "a line is lost, or written twice"),
        (b'{"number": 4, "kind": "verdict"}\n', "is not known"),
        (b"[4]\n", "it is no JSON object"),
    ],
    ids=[
        "1e999", "a name of two lines", "a shape that is a text", "400 digits", "a lone surrogate", "NUL",
        "900 brackets", "100000 brackets", "NaN", "40 MB", "not UTF-8", "NUL first", "behind a carriage return",
        "a byte order mark", "a key twice", "beside the plugin's", "a number left out", "no number", "no kind",
        "a list",
    ],
)  # fmt: skip
def test_a_line_that_no_plugin_wrote_is_told(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(BEFORE + END)
    assert results.read(file, 0, ()).problems == ()
    file.write_bytes(BEFORE + line + END)
    assert reason in results.read(file, 0, ()).problems[0]


# --- receipts

#: By what it is: what a receipt is made of, given its document.
RECEIPTS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "bytes": lambda _: b"\x00\xff\xfe" * 1000,
    "nothing": lambda _: b"",
    "half of it": lambda document: json.dumps(document).encode()[:500],
    "900 brackets": lambda _: b"[" * 900,
    "5000 digits": lambda document: json.dumps(document).replace('"schema": 3', '"schema": 3' + "0" * 5000).encode(),
    "another type": lambda document: json.dumps(document | {"claims": "TEXT"}).encode(),
    "an infinity": lambda document: json.dumps(document).replace('"seconds": ', '"seconds": 1e999, "x": ', 1).encode(),
    "a log elsewhere": lambda document: json.dumps(
        document | {"log": {"file": "../../pack.toml", "sha256": ""}}
    ).encode(),
    "a moment that is none": lambda document: json.dumps(document | {"started": "yesterday"}).encode(),
    "a moment without a zone": lambda document: json.dumps(document | {"started": "2026-01-01T00:00:00"}).encode(),
    "a lane that is none": lambda document: json.dumps(
        document | {"lanes": {"third": document["lanes"]["pristine"]}}
    ).encode(),
    "a key twice": lambda document: json.dumps(document).replace("{", '{"schema": 3, ', 1).encode(),
    "a verdict that is a list": lambda document: json.dumps(document | {"verdict": []}).encode(),
}
NAMES = {what: f"{900 + number}_hostile" for number, what in enumerate(RECEIPTS)}


@pytest.fixture
def many(recorded: Workbench) -> Workbench:
    """Copy the sound pack for each of these receipts."""
    for what, content in RECEIPTS.items():
        pack = recorded.packs / NAMES[what]
        shutil.copytree(recorded.packs / SOUND, pack)
        path = pack / "receipts/cpu.traced.json"
        path.write_bytes(content(json.loads(path.read_bytes()) | {"pack": pack.name}))
    return recorded


@pytest.mark.hostile("receipts")
@pytest.mark.parametrize(("verb", "status"), [("list", 2), ("check", 1)])
def test_each_receipt_that_is_none_is_one_line_beside_the_sound_one(many: Workbench, verb: str, status: int) -> None:
    ended = many.run(verb)
    said = ended.stdout + ended.stderr
    assert (ended.returncode, "Traceback" in said) == (status, False), said
    lines = {name: [line for line in said.splitlines() if f"{name}/receipts/cpu" in line] for name in NAMES.values()}
    assert {name: len(found) for name, found in lines.items()} == dict.fromkeys(NAMES.values(), 1), said
    assert verb == "check" or SOUND in ended.stdout, "check names no pack that is sound"


@pytest.mark.hostile("receipts")
def test_no_report_is_made_of_a_receipt_that_is_none(many: Workbench) -> None:
    ended = many.run("report", NAMES["bytes"])
    assert (ended.returncode, "Traceback" in ended.stderr) == (2, False), ended.stderr


# --- calls


@pytest.mark.hostile("calls")
@pytest.mark.parametrize(
    ("word", "arguments"),
    [
        ("--timeout", ("run", "--timeout", "inf")),
        ("--timeout", ("run", "--timeout", "nan")),
        ("--budget", ("sweep", "--budget", "9" * 400 + "h")),
        ("--repeat", ("run", "--repeat", "9" * 30)),
        ("error:", ("list", "9" * 5000)),
        ("is no folder", ("run", "--cache", "/dev/null")),
        ("is no folder", ("run", "--cache", "/dev/null/x")),
        ("PYTHONPATH", ("run", "--cache", "/tmp/a:b")),  # noqa: S108 - it is refused
        ("is no folder", ("sweep", "--runs", "/dev/null")),
        ("is no folder", ("run", "--cache", "/proc/x")),
        ("error:", ("run", "--upstream", "path:/proc/self")),
        ("error:", ("run", "--upstream", "path:/" + "x" * 5000)),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, tuple) else value,
)
def test_a_call_that_cannot_be_meant_is_refused(workbench: Workbench, word: str, arguments: tuple[str, ...]) -> None:
    workbench.lay(SOUND)
    ended = workbench.run(*arguments)
    said = ended.stdout + ended.stderr
    assert (ended.returncode, "Traceback" in said, word in said) == (2, False, True), said
    assert "x" * 200 not in said, "a text that is too long is cut"


def test_a_full_standard_output_is_told(workbench: Workbench) -> None:
    workbench.lay(SOUND)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            workbench.command("list"), stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert ended.returncode == 1, (ended.returncode, ended.stderr)
    assert ended.stderr.startswith("error: standard output cannot be written"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


@pytest.mark.parametrize(
    ("place", "status", "said"),
    [(".", 2, "is a folder"), ("/dev/full", 1, "free room"), ("no/x.zip", 2, "in a folder")],
)
def test_a_bundle_is_written_into_a_file(judged: Workbench, place: str, status: int, said: str) -> None:
    ended = judged.run("report", SOUND, "--bundle", place)
    assert (ended.returncode, said in ended.stderr, "Traceback" in ended.stderr) == (status, True, False), ended.stderr
