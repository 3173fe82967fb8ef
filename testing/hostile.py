"""Hostile input, planted in a folder of its own: what must be refused in one line, and must take nothing else along.

Each case plants something and runs the real program over it; it raises AssertionError where that was taken. The tests
run every case, and `benchmarks/hostile.py` prints how many are refused. A case of another area is a function of a
folder, and one line in `CASES`.
"""

from __future__ import annotations

import functools
import hashlib
import json
import resource
import shutil
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.pack import judges, load
from testing import package_index, tampering, toys
from testing import workbench as benches
from testing.workbench import Workbench, until

SOUND = "01_confirmed"
#: Behind this line a toy contract writes what a case wants it to write, into the file of its results.
LAST_LINE = '    figure("max_error", error)\n'


@dataclass(frozen=True)
class Case:
    """One thing that must be refused: its attempt plants it in an empty folder, and asserts that it is not taken."""

    name: str
    attempt: Callable[..., None]  # of the folder and the arguments
    arguments: tuple[object, ...] = ()


def lay_hostile(bench: Workbench, number: int, said: bytes = b"") -> Path:
    """Lay a pack whose contract is sound but for the bytes that it writes between its results."""
    pack = toys.lay(bench.packs, SOUND, bench.sha256, hostile(number))
    (pack / "said").write_bytes(said)
    writes = f"stream.write(open({str(pack / 'said')!r}, 'rb').read())"
    said_by = f"    import os\n    with open(os.environ['REPRODUCER_RESULTS'], 'ab') as stream:\n        {writes}\n"
    toys.replace(pack / "contract.py", LAST_LINE, LAST_LINE + said_by)
    return pack


def hostile(number: int) -> str:
    """Name the hostile pack of a case."""
    return f"{900 + number}_hostile"


def one_line(ended: subprocess.CompletedProcess[str], status: int, *words: str) -> None:
    """Require one clear line, the exit status, and no traceback."""
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said, said
    assert ended.returncode == status, (ended.returncode, said)
    for word in words:
        assert word in said, (word, said)


# --- what a contract writes


CHECK = b'{"number": 9, "kind": "check", "name": "more", "role": "control", "ok": true, "measured": %s}\n'
OUTPUT = b'{"number": 9, "kind": "output", "name": "o", "dtype": "f", "shape": %s, "sha256": "x", "must_match": true}\n'
#: By what it is: the bytes, and what the reason has to say.
SAID: dict[str, tuple[bytes, str]] = {
    "a figure of 1e999": (
        b'{"number": 9, "kind": "figure", "name": "f", "value": 1e999}\n',
        "a number is too large for a float",
    ),
    "a number of 400 digits": (CHECK % (b"7" * 400), "more than 64 bits"),
    "a lone surrogate": (CHECK % b'"\\ud800"', "half a character"),
    "NUL in a text": (CHECK % b'"a\\u0000b"', "NUL"),
    "900 brackets": (CHECK % (b"[" * 900 + b"]" * 900), "brackets inside each other"),
    "100000 brackets": (CHECK % (b"[" * 100_000 + b"]" * 100_000), "brackets inside each other"),
    "NaN": (CHECK % b"NaN", "NaN is no JSON"),
    "40 MB": (CHECK % (b'"' + b"x" * 40_000_000 + b'"'), "more than 33554432 bytes"),
    "bytes that are not UTF-8": (CHECK % b'"\xff\xfe"', "not UTF-8"),
    "a NUL byte before the object": (b"\0" + CHECK % b"1", "not JSON"),
    "a line behind a bare carriage return": (b"50%\r" + CHECK % b"1", "not JSON"),
    "a byte order mark before the object": (b"\xef\xbb\xbf" + CHECK % b"1", "not JSON"),
    "one key twice": (CHECK.replace(b'"ok"', b'"ok": false, "ok"') % b"1", "stands there twice"),
    "a line beside those of the plugin": (CHECK % b"1", "a line is lost, or written twice"),
    "a number that was left out": (CHECK.replace(b"9", b"10") % b"1", "a line is lost, or written twice"),
    "a line without a number": (b'{"kind": "end", "status": 0}\n', "a line is lost, or written twice"),
    "a kind that is none": (b'{"number": 9, "kind": "verdict"}\n', "is not known"),
    "a list": (b"[9]\n", "it is no JSON object"),
    "a shape that is a text": (OUTPUT % b'""', "expected a list"),
    "a name of two lines": (b'{"number": 9, "kind": "figure", "name": "a\\nb", "value": 1}\n', "is no name"),
}


@functools.cache
def _said() -> tuple[int, dict[str, tuple[dict[str, Any], bytes]]]:
    """Run a pack for each of these beside a sound one, once for all cases: status, and by pack its row and receipt."""
    with tempfile.TemporaryDirectory() as folder:
        bench = benches.empty(Path(folder))
        for number, (said, _) in enumerate(SAID.values()):
            lay_hostile(bench, number, said)
        bench.lay(SOUND)
        status, rows = bench.rows("--lane", "pristine")
        return status, {row["pack"]: (row, Path(row["receipt"]).read_bytes()) for row in rows}


def say(_: Path, name: str) -> None:
    """Run a contract that writes it: its lane is an error that says so, and the other packs' rows are there."""
    status, rows = _said()
    assert (status, len(rows)) == (1, len(SAID) + 1)
    assert rows[SOUND][0]["verdict"] == "REPRODUCED", rows[SOUND]
    row, receipt = rows[hostile(list(SAID).index(name))]
    assert row["verdict"] == "ERROR", row
    assert SAID[name][1] in row["reason"], row
    assert json.loads(receipt)["verdict"] == "ERROR"


# --- receipts


#: By what it is: what a receipt is made of, given its document.
RECEIPTS: dict[str, Callable[[dict[str, Any]], bytes]] = {
    "bytes": lambda _: b"\x00\xff\xfe" * 1000,
    "nothing": lambda _: b"",
    "900 brackets": lambda _: b"[" * 900,
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
    "a key twice": lambda document: json.dumps(document).replace("{", '{"schema": 2, ', 1).encode(),
    "a verdict that is a list": lambda document: json.dumps(document | {"verdict": []}).encode(),
}


#: The verbs that read every pack's receipt, with their status where one cannot be read.
READERS = {"list": 2, "check": 1}


@functools.cache
def _read() -> dict[str, tuple[int, str, str]]:
    """Put each of these into a copy of a confirmed pack, and let each verb read all: status and both outputs."""
    with tempfile.TemporaryDirectory() as folder:
        bench = benches.confirmed(Path(folder))
        for number, content in enumerate(RECEIPTS.values()):
            pack = bench.packs / hostile(number)
            shutil.copytree(bench.packs / SOUND, pack)
            path = pack / "receipts/cpu.traced.json"
            path.write_bytes(content(json.loads(path.read_bytes()) | {"pack": pack.name}))
        found = {verb: bench.run(verb) for verb in READERS} | {"report": bench.run("report", hostile(0))}
        return {verb: (ended.returncode, ended.stdout, ended.stderr) for verb, ended in found.items()}


def read_receipt(_: Path, name: str) -> None:
    """Put such a receipt into a pack: each verb that reads it says so in one line, and shows the others."""
    pack = hostile(list(RECEIPTS).index(name))
    for verb, (status, said, errors) in _read().items():
        assert "Traceback" not in errors, errors
        assert status == READERS.get(verb, 2), (verb, status, errors)
        lines = [line for line in (said + errors).splitlines() if f"{pack}/receipts/cpu.traced.json" in line]
        assert len(lines) == 1 or verb not in READERS, (verb, lines, errors)
        assert verb == "check" or verb not in READERS or SOUND in said, said


# --- calls


def call(folder: Path, word: str, *arguments: str) -> None:
    """Make a call that is wrong: one line with this word, exit status 2, and nothing else."""
    given = [text.replace("FOLDER", str(folder)) for text in arguments]
    one_line(benches.sound(folder).run(*given), 2, word)


def full_output(folder: Path) -> None:
    """Let standard output be full."""
    bench = benches.sound(folder)
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            bench.command("list"), stdout=full, stderr=subprocess.PIPE, text=True, check=False, timeout=60
        )
    assert ended.returncode == 1, (ended.returncode, ended.stderr)
    assert ended.stderr.startswith("error: standard output cannot be written"), ended.stderr
    assert len(ended.stderr.splitlines()) == 1, ended.stderr


def bundle_into_folder(folder: Path) -> None:
    """Name a folder, and a full device, for the file of a bundle."""
    bench = benches.confirmed(folder)
    one_line(bench.run("report", "1", "--bundle", str(folder)), 2, "error:", "is a folder")
    one_line(bench.run("report", "1", "--bundle", "/dev/full"), 1, "error:", "cannot be written")


# --- definitions


#: By what it is: old text, new text of a pack.toml.
DEFINITIONS: dict[str, tuple[str, str]] = {
    "a claim that is a bracket": ('claims = ["BITWISE_IDENTICAL"]', 'claims = ["("]'),
    "a claim that is nothing": ('claims = ["BITWISE_IDENTICAL"]', 'claims = [""]'),
    "a claim that is a verdict": ('claims = ["BITWISE_IDENTICAL"]', 'claims = ["FIX_VALIDATED"]'),
    "claims that are a text": ('claims = ["BITWISE_IDENTICAL"]', 'claims = "BITWISE_IDENTICAL"'),
    "an infinite time": ("timeout_s = 60", "timeout_s = inf"),
    "a time that is no number": ("timeout_s = 60", "timeout_s = nan"),
    "a time of 400 digits": ("timeout_s = 60", "timeout_s = " + "9" * 400),
    "a time of 5000 digits": ("timeout_s = 60", "timeout_s = " + "9" * 5000),
    "900 brackets": ("timeout_s = 60", "timeout_s = " + "[" * 900 + "]" * 900),
    "a file with NUL": ('file = "toykernel-1.0.zip"', 'file = "toykernel\\u0000.zip"'),
    "a file elsewhere": ('file = "toykernel-1.0.zip"', 'file = "..\\\\toykernel-1.0.zip"'),
    "a package that is a path": ('package = "toykernel"', 'package = "../toykernel"'),
    "a repository that is an option": (
        'repository = "https://example.org/toykernel"',
        'repository = "--upload-pack=touch x"',
    ),
    "a root outside": ('source_root = "src"', 'source_root = "../.."'),
}


@functools.cache
def _defined() -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    """Put each of these into a pack beside a sound one, and check and run them all."""
    with tempfile.TemporaryDirectory() as folder:
        bench = benches.empty(Path(folder))
        for number, (old, new) in enumerate(DEFINITIONS.values()):
            toys.replace(lay_hostile(bench, number) / "pack.toml", old, new)
        bench.lay(SOUND)
        return bench.run("check"), bench.run("run", "--lane", "pristine", "--json")


def define(_: Path, name: str) -> None:
    """Put such a value into a pack.toml: the pack is refused in one line, status 2, and the others are judged."""
    pack = hostile(list(DEFINITIONS).index(name))
    for ended in _defined():
        one_line(ended, 2, f"error: {pack}/pack.toml")
        assert sum(pack in line for line in ended.stderr.splitlines()) == 1, ended.stderr
    assert [row["verdict"] for row in json.loads(_defined()[1].stdout)] == ["REPRODUCED"]


# --- sweeps


def _unfinished(folder: Path) -> tuple[Workbench, Path]:
    """Run a sweep and make it look as if it had been killed before its end."""
    bench = benches.sound(folder)
    bench.swept()
    toys.replace(bench.newest / "run.json", '"finished": true', '"finished": false')
    return bench, bench.newest


def _goes_on(bench: Workbench, lanes_run: int) -> None:
    assert [cell["verdict"] for cell in bench.swept().values()] == ["CONFIRMED"]
    assert json.loads((bench.newest / "results.json").read_bytes())["lanes_run"] == lanes_run


def journal_of_another_shape(folder: Path) -> None:
    """Give every line of a journal another shape: its lanes are run again."""
    bench, run = _unfinished(folder)
    journal = run / "journal.jsonl"
    lines = [json.loads(line) for line in journal.read_text(encoding="utf-8").splitlines()]
    damaged = [json.dumps(line | {"record": {"verdict": "BUG_REPRODUCED"}}) for line in lines]
    journal.write_text("\n".join([*damaged, "[" * 900, "{}", "\x00"]) + "\n", encoding="utf-8")
    _goes_on(bench, 2)


def log_is_gone(folder: Path) -> None:
    """Remove the log of a lane that ended: that lane is run again."""
    bench, run = _unfinished(folder)
    next(run.rglob("logs/**/*.patched.log")).unlink()
    _goes_on(bench, 1)


def dated_in_the_future(folder: Path) -> None:
    """Date an unfinished run years ahead, as a clock that was wrong does: it is not the one to go on with."""
    bench, run = _unfinished(folder)
    record = json.loads((run / "run.json").read_bytes()) | {"started": "2099-01-01T00:00:00+00:00"}
    (run / "run.json").write_text(json.dumps(record), encoding="utf-8")
    run.rename(run.with_name("20990101T000000Z"))
    bench.swept()
    new, _ = sorted(bench.sweeps.glob("*/run.json"))
    results = json.loads(new.with_name("results.json").read_bytes())
    assert (results["lanes_run"], results["lanes_resumed"]) == (2, 0)


def malformed_baselines(folder: Path) -> None:
    """Damage everything that an earlier run left for comparison."""
    bench = benches.sound(folder)
    bench.swept()
    run = bench.newest
    time.sleep(1.1)  # the next run has another name
    for content in (b"\xff\x00", b'{"cells": [{"name": [], "verdict": 1e999}]}', b"[" * 900, b'{"cells": 5}'):
        (run / "results.json").write_bytes(content)
        next(run.glob("receipts/*/*.json")).write_bytes(content)
        bench.swept("--baseline", str(bench.sweeps))


def no_room_for_runs(folder: Path) -> None:
    """Let no file of the run folder grow: the line names that folder, not the cache."""
    bench = benches.sound(folder)
    one_line(bench.run("run"), 0)  # the cache has everything
    ended = subprocess.run(
        bench.command("sweep"),
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (4000, 4000)),
    )
    assert "Traceback" not in ended.stderr, ended.stderr
    assert ended.returncode == 1, (ended.returncode, ended.stderr)
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("error: no room in the folder of runs "), ended.stderr


# --- what ran


def edited_while_it_runs(folder: Path) -> None:
    """Edit probe and patch while the lanes run: the receipt states the hashes of what ran."""
    bench = benches.empty(folder)
    pack = bench.lay("42_waits_for_a_word")
    probe, patch = pack / "reproduce.py", pack / "fix.patch"
    ran = [judges.sha256(load.load_pack(pack)), hashlib.sha256(patch.read_bytes()).hexdigest()]
    with subprocess.Popen(bench.command("run", "--jobs", "1"), stdout=-1, stderr=-1, text=True) as runner:
        until((pack / "began").exists, 60)
        probe.write_text("raise SystemExit(0)\n", encoding="utf-8")
        patch.write_text("", encoding="utf-8")
        (pack / "word").touch()
        said = runner.communicate(timeout=60)
    assert runner.returncode == 0, said
    (path,) = bench.cache.glob("runs/*/receipts/*/*.json")
    receipt = json.loads(path.read_bytes())
    assert receipt["verdict"] == "CONFIRMED", receipt
    assert [receipt["probe"]["sha256"], receipt["fix"]["sha256"]] == ran
    assert "inputs-" not in path.read_text(encoding="utf-8")


# --- one write


def three_at_once(folder: Path) -> None:
    """Let three runners write the receipts of one folder at once, four times: each receipt has its own log alone."""
    bench = benches.sound(folder)
    one_line(bench.run("run"), 0)
    for _ in range(4):
        commands = [bench.command("run", "--record", "--timeout", str(50 + one)) for one in range(3)]
        runners = [subprocess.Popen(command, stdout=-3, stderr=subprocess.PIPE, text=True) for command in commands]
        said = [runner.communicate(timeout=120)[1] for runner in runners]
        assert [runner.returncode for runner in runners] == [0, 0, 0], said
        (receipt,) = bench.packs.glob("*/receipts/*.json")
        log = json.loads(receipt.read_bytes())["log"]
        names = {path.name for path in receipt.parent.iterdir()}
        assert names == {receipt.name, log["file"]}, names
        assert hashlib.sha256(receipt.with_name(log["file"]).read_bytes()).hexdigest() == log["sha256"]


# --- an index


#: By what it is: type and body of a page.
PAGES: dict[str, tuple[str, bytes]] = {
    "text/plain": ("text/plain", b"hello"),
    "another API version": (
        "application/vnd.pypi.simple.v1+json",
        b'{"meta": {"api-version": "9.0"}, "name": "toykernel", "files": []}',
    ),
    "files that are a text": (
        "application/vnd.pypi.simple.v1+json",
        b'{"meta": {"api-version": "1.0"}, "name": "toykernel", "files": "none"}',
    ),
    "a file without a URL": (
        "application/vnd.pypi.simple.v1+json",
        b'{"meta": {"api-version": "1.0"}, "name": "toykernel", "files": [{"filename": 5}]}',
    ),
    "no JSON": ("application/vnd.pypi.simple.v1+json", b"{"),
    "a version of HTML that is unknown": (
        "text/html",
        b'<html><head><meta name="pypi:repository-version" content="9.0"></head></html>',
    ),
    "900 brackets": ("application/vnd.pypi.simple.v1+json", b"[" * 5000),
}


def index(folder: Path, kind: str, body: bytes) -> None:
    """Answer so where a release is looked up: the row has one line, and says nothing of the URL."""
    bench = benches.sound(folder)
    with package_index.answering(kind, body) as url:
        private = url.replace("http://", "http://ada:correct-horse@")
        ended = bench.run("run", "--online", "--upstream", "toykernel==1.1", PIP_INDEX_URL=private)
    said = ended.stdout + ended.stderr
    assert "Traceback" not in said, said
    assert ended.returncode in {1, 2}, said
    assert "toykernel: the package index" in said or "no such package" in said, said
    assert "correct-horse" not in said, said


CASES: list[Case] = [
    *(Case(f"a probe says {name}", say, (name,)) for name in SAID),
    *(Case(f"a receipt holds {name}", read_receipt, (name,)) for name in RECEIPTS),
    *(Case(f"a pack.toml holds {name}", define, (name,)) for name in DEFINITIONS),
    *(Case(f"an index answers with {name}", index, given) for name, given in PAGES.items()),
    Case("--timeout inf", call, ("--timeout", "run", "--timeout", "inf")),
    Case("--timeout nan", call, ("--timeout", "run", "--timeout", "nan")),
    Case("--budget without end", call, ("--budget", "sweep", "--budget", "9" * 400 + "h")),
    Case("--repeat without end", call, ("--repeat", "run", "--repeat", "9" * 30)),
    Case("a number of 5000 digits for a pack", call, ("error:", "list", "9" * 5000)),
    Case("a cache at /dev/null", call, ("is no folder", "run", "--cache", "/dev/null")),
    Case("a cache below /dev/null", call, ("is no folder", "run", "--cache", "/dev/null/x")),
    Case("a cache with a colon", call, ("PYTHONPATH", "run", "--cache", "FOLDER/a:b")),
    Case("runs at /dev/null", call, ("is no folder", "sweep", "--runs", "/dev/null")),
    Case("a probe and a patch that are edited while they run", edited_while_it_runs),
    Case("a full standard output", full_output),
    Case("a folder and a full device for a bundle", bundle_into_folder),
    Case("a journal of another shape", journal_of_another_shape),
    Case("a log that is gone", log_is_gone),
    Case("a run dated in the future", dated_in_the_future),
    Case("malformed baselines", malformed_baselines),
    Case("no room for a sweep", no_room_for_runs),
    Case("three runners on one folder", three_at_once),
    *(Case(f"in the cache {name}", tampering.changed, (name,)) for name in tampering.CHANGES),
    *(Case(f"a probe writes into {name}", tampering.writes, (name,)) for name in tampering.WRITES),
    *(Case(f"a probe {name} where it is patched", tampering.unlike, (name,)) for name in tampering.UNLIKE),
    Case("a flipped bit of a download", tampering.flipped_download),
    Case("git's configuration in an archive", tampering.git_configuration),
    Case("an option of git for a URL", tampering.option_for_a_url),
    Case("a member that unpacks to more than the limit", tampering.bomb),
    Case("a member with a name of 300 characters", tampering.long_name),
    Case("a file name of the index that leads out of the cache", tampering.name_outside),
    Case("a supervisor that is killed", tampering.killed_supervisor),
    *(Case(f"a lane nests {tampering.DEEP} folders in {name}", tampering.nests, (name,)) for name in tampering.FOLDERS),
    Case("a lane names a file that is no text", tampering.names_a_file_that_is_no_text),
    Case("an archive with 5000 folders in each other", tampering.archive_of_5000_folders),
    Case("an exception that acts on a terminal", tampering.acts_on_a_terminal),
    Case("an exception that acts in Markdown", tampering.acts_in_markdown),
    Case("a bundle that inflates to more than it states", tampering.inflating_member),
    Case("a pax header of 768 MiB", tampering.inflating_header, (tarfile.XHDTYPE,)),
    Case("a GNU name of 768 MiB", tampering.inflating_header, (tarfile.GNUTYPE_LONGNAME,)),
    Case("a tree at /proc/self", tampering.origin, ("/proc/self",)),
    Case("a tree at a path of 5000 characters", tampering.origin, ("/" + "x" * 5000,)),
]


def refused(case: Case, folder: Path) -> str:
    """Try a case in a folder; return what was wrong, or nothing where it was refused."""
    try:
        case.attempt(folder, *case.arguments)
    except (AssertionError, subprocess.SubprocessError, OSError, ValueError, KeyError) as error:
        return f"{type(error).__name__}: {error}"
    return ""
