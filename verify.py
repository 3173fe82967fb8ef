#!/usr/bin/env python3
"""Check a bundle or a receipt that somebody else sent; nothing in it is executed, and only Python itself is needed.

    python verify.py 09_liger_flce_none.zip        (or a receipt: sm_90a.executed.json, with its log beside it)

A receipt has to keep its schema, to follow from its own lanes, to say what its log says line by line, and to speak of
the pack.toml, probe, patch and committed receipts of the repository in which this file lies. A bundle may hold nothing
but files of that pack, receipts with their logs, and two texts that follow from these and are written here again.
What cannot be refuted from here is a lie that is told in the log and in the receipt alike, with figures and hashes that
nothing in this repository contradicts: that a run took place is seen by running the probe yourself.
Exit status 0: all of this holds; 1: it does not, and each line says where; 2: no such file.
"""

from __future__ import annotations

import ast
import datetime as dt
import fnmatch
import functools
import hashlib
import io
import json
import math
import re
import stat
import struct
import sys
import tokenize
import tomllib
import zipfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parent
PACKS = REPOSITORY / "packs"
KNOWN = (1, 2)  # schemas of receipts
LARGEST = 32 * 2**20  # bytes of a receipt, a log or a member
LARGEST_BUNDLE = 64 * 2**20  # bytes that a bundle may unpack to
MOST_MEMBERS = 1000
MOST_NAME = 200  # characters of a member's name
DEEPEST = 64  # levels of nesting in a receipt
MOST_DIGITS = 400
MOST_LINES = 100  # of refusal
SHORT = 60  # characters of a value in a line of refusal
FIRST_WITH_SUFFIX = 9  # from sm_90 on a target ends in "a"
BOTH = ["pristine", "patched"]
UNREADABLE = (zipfile.BadZipFile, zlib.error, struct.error, EOFError, RuntimeError, OSError, ValueError, LookupError)

STATUS = {"BUG_REPRODUCED": 10, "FIX_VALIDATED": 0, "CONTROL_FAILED": 125, "UNSUPPORTED": 125}
#: What a pristine lane decides alone, and what a patched one decides where the pristine one reproduced the bug.
ALONE = {"FIX_VALIDATED": "FIXED_UPSTREAM", "CONTROL_FAILED": "CONTROL_FAILED", "UNSUPPORTED": "UNSUPPORTED"}
PATCHED = {
    "FIX_VALIDATED": "CONFIRMED",
    "BUG_REPRODUCED": "FIX_INEFFECTIVE",
    "CONTROL_FAILED": "PATCH_BREAKS",
    "UNSUPPORTED": "PATCH_BREAKS",
}
VERDICTS = {*ALONE.values(), *PATCHED.values(), "REPRODUCED", "VALIDATED", "PATCH_STALE", "UNAVAILABLE", "ERROR"}
KINDS = {"wrong-result", "crash", "capability", "silent-fallback", "precision", "cleanup"}
EVIDENCE = ("executed", "interpreted", "compiled", "traced")  # the strongest first
ORIGINS = {"pinned", "release", "latest", "path", "git", "installed"}
IDENTICAL = "BITWISE_IDENTICAL"  # the claim that the runner states, from the outputs of both lanes
#: What GPUs are called, and their compute capability; a name that stands here with another one is a lie.
GPUS = {
    r"H100|H200|GH200|H20|H800": "9.0",
    r"A100|A800|A30": "8.0",
    r"A10|A10G|A16|A40|A2|RTX A\d{4}|RTX 30\d0": "8.6",
    r"L4|L40|L40S|L20|RTX 40\d0|RTX \d{4} Ada Generation": "8.9",
    r"B100|B200|GB200": "10.0",
    r"B300|GB300": "10.3",
    r"RTX 50\d0|RTX PRO \d{4} Blackwell": "12.0",
    r"GB10": "12.1",
    r"V100": "7.0",
    r"T4": "7.5",
}

Errors = Iterator[str]


# --- a receipt's text: strict JSON


class Leaf(NamedTuple):
    """What a single value has to be, in words and as a test."""

    words: str
    holds: Callable[[Any], bool]


class Maybe(NamedTuple):
    """A value of that shape, or null."""

    shape: Any


def pattern(words: str, expression: str) -> Leaf:
    """Return the leaf of a text that matches an expression as a whole."""
    return Leaf(words, lambda value: type(value) is str and re.fullmatch(expression, value) is not None)


def one_of(words: Iterable[str]) -> Leaf:
    """Return the leaf of a text that is one of these."""
    known = sorted(words)
    return Leaf(f"one of {', '.join(known)}", lambda value: type(value) is str and value in known)


TEXT = Leaf("text", lambda value: type(value) is str)
BOOL = Leaf("true or false", lambda value: type(value) is bool)
ANY = Leaf("a value", lambda _: True)
COUNT = Leaf("an integer from 0 on", lambda value: type(value) is int and 0 <= value < 2**63)
INTEGER = Leaf("an integer", lambda value: type(value) is int and abs(value) < 2**63)
SECONDS = Leaf("a number from 0 on", lambda value: type(value) in (int, float) and 0 <= value < 2**63)
DIGEST = pattern("a sha256", "[0-9a-f]{64}")
DATE = pattern("a date", r"\d{4}-\d\d-\d\d")
CHECK = {"name": TEXT, "role": one_of(["defect", "control"]), "ok": Maybe(BOOL)}
CHECK |= {"measured": ANY, "tolerance": ANY, "unit": TEXT, "reason": TEXT}
LANE = {
    "verdict": one_of({*STATUS, "ERROR"}),
    "reason": TEXT,
    "exit_status": INTEGER,
    "seconds": SECONDS,
    "peak_memory": COUNT,
    "left_behind": COUNT,
    "tree": DIGEST,
    "device": TEXT,
    "upstream": [{"module": TEXT, "file": TEXT, "sha256": DIGEST}],
    "checks": [CHECK],
    "figures": [{"name": TEXT, "value": ANY, "unit": TEXT, "spread": ANY}],
    "outputs": [{"name": TEXT, "dtype": TEXT, "shape": [COUNT], "sha256": DIGEST, "must_match": BOOL}],
    "claims": [TEXT],
    "waited": SECONDS,
}
RECEIPT = {
    "schema": INTEGER,
    "pack": pattern("a pack's name", r"\d\d_\w+"),
    "title": TEXT,
    "kind": one_of(KINDS),
    "target": pattern("a target such as cpu, sm_80 or sm_90a", r"cpu|sm_(?:[78]\d|(?:9\d|1[0-9]\d)a)"),
    "evidence": one_of(EVIDENCE),
    "verdict": one_of(VERDICTS),
    "reason": TEXT,
    "claims": [TEXT],
    "upstream": {
        "package": TEXT,
        "version": TEXT,
        "origin": one_of(ORIGINS),
        "sha256": DIGEST,
        "commit": pattern("a commit or empty", "(?:[0-9a-f]{40})?"),
    },
    "probe": {"sha256": DIGEST, "meaning": DIGEST},
    "fix": Maybe({"kind": one_of(["patch", "release", "tree"]), "name": TEXT, "sha256": DIGEST, "meaning": TEXT}),
    "dependencies": {
        "name": TEXT,
        "sha256": pattern("a sha256 or empty", "(?:[0-9a-f]{64})?"),
        "packages": {"*": TEXT},
    },
    "lanes": {"pristine?": LANE, "patched?": LANE},
    "host": dict.fromkeys(("python", "torch", "triton", "cuda", "driver", "system", "cudnn", "nccl"), TEXT)
    | {"gpus": [{"name": TEXT, "compute_capability": pattern("a compute capability", r"\d{1,2}\.\d")}]},
    "log": {"file": pattern("a bare file name", r"\w[\w.]{0,100}\.log"), "sha256": DIGEST},
    "command": TEXT,
    "started": TEXT,
    "seconds": SECONDS,
    "repeats": {"agreeing": COUNT, "of": COUNT},
    "ranks": COUNT,
    "strength": Maybe({"killed": COUNT, "of": COUNT, "unjudged": COUNT, "seed": INTEGER, "date": DATE}),
    "about?": [TEXT],
    "acknowledged": Maybe({"deviation": TEXT, "reason": TEXT, "date": TEXT}),
}
#: What a line of the log may leave out, by its word; what is left out reads as this.
LINES: dict[str, tuple[str, dict[str, Any]]] = {
    "UPSTREAM": ("upstream", {}),
    "CHECK": ("checks", {"measured": None, "tolerance": None, "unit": "", "reason": ""}),
    "FIGURE": ("figures", {"unit": "", "spread": None}),
    "OUTPUT": ("outputs", {}),
}


class RefusedError(ValueError):
    """A text that is refused before its content is looked at."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise RefusedError(f"the key {key!r} stands twice")
        found[key] = value
    return found


def _float(text: str) -> float:
    if not math.isfinite(float(text)):
        raise RefusedError(f"{text} is no finite number")
    return float(text)


def _integer(text: str) -> int:
    if len(text) > MOST_DIGITS:
        raise RefusedError(f"an integer of {len(text)} digits")
    return int(text)


def _constant(text: str) -> None:
    raise RefusedError(f"{text} is no JSON")


def _refuse_texts(value: Any) -> None:
    """Refuse what is nested too deep, and lone surrogates."""
    level = [value]
    for _ in range(DEEPEST):
        below: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                below += [*one.keys(), *one.values()]
            elif isinstance(one, list):
                below += one
            elif isinstance(one, str) and any("\ud800" <= character <= "\udfff" for character in one):
                raise RefusedError("a lone surrogate in a text")
        level = below
    if level:
        raise RefusedError(f"nested more than {DEEPEST} deep")


def parsed(data: bytes | str) -> dict[str, Any]:
    """Parse a JSON object, or raise RefusedError: no key twice, finite numbers, nothing deep, whole characters."""
    try:
        text = data.decode("utf-8") if isinstance(data, bytes) else data
        document = json.loads(
            text, object_pairs_hook=_unique, parse_float=_float, parse_int=_integer, parse_constant=_constant
        )
    except UnicodeDecodeError:
        raise RefusedError("not UTF-8") from None
    except RecursionError:
        raise RefusedError(f"nested more than {DEEPEST} deep") from None
    except json.JSONDecodeError as error:
        raise RefusedError(f"no JSON: {error}" if text.strip() else "empty") from None
    _refuse_texts(document)
    if not isinstance(document, dict):
        raise RefusedError("no JSON object")
    return document


def misshapen(value: Any, shape: Any, where: str = "") -> Errors:
    """Name where a JSON value differs from a shape; a key that ends in "?" may be missing, "*" is any key."""
    if isinstance(shape, Maybe):
        if value is not None:
            yield from misshapen(value, shape.shape, where)
    elif isinstance(shape, Leaf):
        if not shape.holds(value):
            yield f"{where}: {short(value)} is not {shape.words}"
    elif isinstance(shape, list):
        if not isinstance(value, list):
            yield f"{where}: not a list"
            return
        for number, item in enumerate(value):
            yield from misshapen(item, shape[0], f"{where}[{number}]")
    elif not isinstance(value, dict):
        yield f"{where}: not an object"
    else:
        yield from _misshapen_keys(value, shape, where)


def _misshapen_keys(value: dict[str, Any], shape: dict[str, Any], where: str) -> Errors:
    prefix = f"{where}." if where else ""
    yield from (f"{prefix}{key}: missing" for key in shape if key[-1] not in "?*" and key not in value)
    for key, item in value.items():
        inside = shape.get(key, shape.get(f"{key}?", shape.get("*")))
        if inside is None:
            yield f"{prefix}{key}: a key that receipts do not have"
        else:
            yield from misshapen(item, inside, prefix + key)


def short(value: Any) -> str:
    """Write a value in few characters."""
    text = repr(value)
    return text if len(text) <= SHORT else f"{text[:SHORT]}..."


def sha256(data: bytes) -> str:
    """Return the sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def exact(value: Any) -> str:
    """Write a JSON value so that equal texts are equal values of equal types: 1, 1.0 and true are three."""
    return json.dumps(value, sort_keys=True)


def renewed(old: dict[str, Any]) -> dict[str, Any]:
    """Return a receipt of schema 1 as one of schema 2, as harness/receipt/schema_1.py does, with every default."""
    try:
        new = {"ranks": 1, "strength": None, "acknowledged": None, **old, "schema": KNOWN[-1]}
        new["kind"] = "cleanup" if old["kind"] == "robustness" else old["kind"]
        patch, new["dependencies"] = new.pop("patch"), new.pop("companions")
        new["fix"] = None if patch is None else {"kind": "patch", "name": "", **patch}
        new["upstream"] = {**old["upstream"], "commit": commit_of(str(old["upstream"]["version"]))}
        host = {"system": "", "cudnn": "", "nccl": "", **old["host"]}
        gpu = {"name": host.pop("gpu"), "compute_capability": host.pop("compute_capability")}
        new["host"] = {**host, "gpus": [gpu] if gpu["name"] else []}
        new["lanes"] = {name: {"waited": 0.0, **lane} for name, lane in old["lanes"].items()}
    except KeyError as error:
        raise RefusedError(f"{error.args[0]}: missing") from None
    except (TypeError, AttributeError, ValueError):
        raise RefusedError("not an object where schema 1 has one") from None
    return new


def commit_of(version: str) -> str:
    """Return the commit that the version of a tree states; empty where it states none."""
    match = re.fullmatch(r"(?:commit|path at) ([0-9a-f]{40})", version)
    return match[1] if match else ""


# --- what this repository says


def meaning(name: str, data: bytes) -> str:
    """Hash what a probe or a patch means: without comments, blank lines and docstring; from the first diff on."""
    text = data.decode()
    if name.endswith(".patch"):
        return sha256(text[max(text.find("diff --git "), 0) :].encode())
    lines, first = text.splitlines(), ast.parse(text).body[0]
    docstring = range(first.lineno, (first.end_lineno or 0) + 1) if isinstance(first, ast.Expr) else ()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    kept = [line.rstrip() for number, line in enumerate(lines, 1) if number not in docstring and line.strip()]
    return sha256("\n".join(kept).encode())


@dataclass(frozen=True)
class Pack:
    """A pack of this repository: its folder, and its pack.toml as it stands."""

    folder: Path
    definition: dict[str, Any]

    @property
    def head(self) -> str:
        """The commit of upstream's default branch that pack.toml names; empty where it names none."""
        return str(self.definition.get("head", {}).get("commit", ""))

    @property
    def claims(self) -> set[str]:
        """Every claim that a probe of this pack may print."""
        targets = self.definition["targets"].values()
        found = {one for target in targets for key in ("claims", "claims_executed") for one in target.get(key, ())}
        return found - {IDENTICAL}

    @property
    def has_patch(self) -> bool:
        """Whether pack.toml speaks of one: without it there is no patched lane."""
        return bool(self.definition.get("fix", "patch") != "none")

    @property
    def unmeasured(self) -> str:
        """What stands for the strength where there is none."""
        return "not measured" if self.has_patch else "no patch"

    @property
    def ask(self) -> dict[str, Any]:
        """What upstream is asked to do; nothing where pack.toml does not say."""
        found: dict[str, Any] = self.definition.get("ask", {})
        return found

    def requirements(self, name: str) -> dict[str, tuple[str, str, str]] | None:
        """Map each package of a set to its version, its marker and its hashes; None: there is no such set."""
        file = "requirements.txt" if name == "default" else f"requirements.{Path(name).name}.txt"
        if not (self.folder / file).is_file():
            return None
        text = re.sub(r"(?m)(?:^|\s)#.*$", "", (self.folder / file).read_text("utf-8")).replace("\\\n", " ")
        found = {}
        for line in filter(str.strip, text.splitlines()):
            stated, *hashes = re.split(r"\s+--hash=", line.strip())
            pinned, _, marker = stated.partition(";")
            package, _, version = pinned.strip().partition("==")
            found[package] = (version, marker.strip(), " ".join(f"--hash={one}" for one in sorted(hashes)))
        return found

    def target(self, name: str) -> dict[str, Any]:
        """Return what pack.toml says of a target; nothing where it lists no such target."""
        found: dict[str, Any] = self.definition["targets"].get(name, {})
        return found

    def patches(self) -> dict[str, bytes]:
        """Map the name of each patch that a lane may run with to its bytes."""
        names = ["fix.patch", "fix.head.patch", *([self.ask["patch"]] if "patch" in self.ask else [])]
        paths = (self.folder / Path(name).name for name in names)
        return {path.name: path.read_bytes() for path in paths if path.is_file()}


@functools.cache
def pack_of(name: str) -> Pack | None:
    """Return a pack of this repository; None where it has none of that name."""
    folder = PACKS / name
    if not (folder / "pack.toml").is_file():
        return None
    return Pack(folder, tomllib.loads((folder / "pack.toml").read_text("utf-8")))


@functools.cache
def committed(name: str) -> list[dict[str, Any]]:
    """Return the committed receipts of a pack, those that can be read."""
    found = []
    for path in sorted((PACKS / name / "receipts").rglob("*.json")):
        try:
            found.append(document_of(path.read_bytes()))
        except RefusedError:
            continue
    return found


def document_of(data: bytes) -> dict[str, Any]:
    """Return a receipt's document in today's schema, or raise RefusedError."""
    document = parsed(data)
    schema = document.get("schema")
    if type(schema) is not int or schema not in KNOWN:
        raise RefusedError(f"schema: {short(schema)} is none of {', '.join(map(str, KNOWN))}")
    document = renewed(document) if schema == 1 else document
    errors = list(misshapen(document, RECEIPT))
    if errors:
        raise RefusedError(*errors)
    return document


@dataclass(frozen=True)
class Case:
    """One receipt to be checked, of a sound shape: its document, its log, and the pack of this repository."""

    receipt: dict[str, Any]
    log: str
    pack: Pack
    schema: int

    @property
    def lanes(self) -> dict[str, dict[str, Any]]:
        """The lanes that ran."""
        found: dict[str, dict[str, Any]] = self.receipt["lanes"]
        return found

    @property
    def judged(self) -> dict[str, dict[str, Any]]:
        """The lanes that say something about upstream."""
        return {name: lane for name, lane in self.lanes.items() if lane["verdict"] not in ("ERROR", "UNSUPPORTED")}

    @property
    def target(self) -> dict[str, Any]:
        """What pack.toml says of its target."""
        return self.pack.target(self.receipt["target"])

    @functools.cached_property
    def patch(self) -> bytes | None:
        """The patch of this repository that it was made with, by hash or by meaning; None where there is none."""
        fix = self.receipt["fix"]
        if fix is None or fix["kind"] != "patch":
            return None
        for name, data in self.pack.patches().items():
            if fix["name"] in ("", name) and states(fix, name, data):
                return data
        return None


def states(recorded: dict[str, Any], name: str, data: bytes) -> bool:
    """Whether a receipt's hashes are those of a file here: the bytes may differ in what means nothing."""
    return bool(recorded["meaning"] == meaning(name, data))


# --- one check each: the receipt against itself


def wrong_lane_verdict(case: Case) -> Errors:
    """A lane's verdict has to follow from its checks, and its exit status from its verdict."""
    for name, lane in case.lanes.items():
        verdict, status = lane["verdict"], lane["exit_status"]
        if verdict in STATUS and status != STATUS[verdict]:
            yield f"lanes.{name}.exit_status: {status} beside {verdict}"
        follows = implied(lane["checks"])
        if verdict in STATUS and verdict not in ("UNSUPPORTED", follows):
            yield f"lanes.{name}.verdict: {verdict}, but its checks imply {follows} (lanes.{name}.checks)"
        if verdict == "ERROR" and not lane["reason"]:
            yield f"lanes.{name}.reason: ERROR without a reason"


def implied(checks: list[dict[str, Any]]) -> str:
    """Return the verdict that checks imply."""
    said = {(check["role"], check["ok"]) for check in checks}
    if ("control", False) in said:
        return "CONTROL_FAILED"
    if ("defect", False) in said:
        return "BUG_REPRODUCED"
    return "FIX_VALIDATED" if ("defect", True) in said else "UNSUPPORTED"


def named_twice(case: Case) -> Errors:
    """A lane may name a check, a figure, an output or a module once."""
    for lane, record in case.lanes.items():
        for what, key in (("checks", "name"), ("figures", "name"), ("outputs", "name"), ("upstream", "module")):
            counts = Counter(line[key] for line in record[what])
            yield from (f"lanes.{lane}.{what}: {short(one)} twice" for one, count in counts.items() if count > 1)


def mute_checks(case: Case) -> Errors:
    """A check that was not judged has to say why."""
    for lane, record in case.lanes.items():
        for check in record["checks"]:
            if check["ok"] is None and not check["reason"]:
                yield f"lanes.{lane}.checks: {short(check['name'])} is not judged and gives no reason"


def lanes_compared(case: Case) -> list[str]:
    """Name the checks that the two lanes do not judge alike: what one judged, the other must, in the same role."""
    first, second = ({one["name"]: one for one in lane["checks"]} for lane in case.lanes.values())
    found = []
    for name in sorted({*first, *second}):
        ours, theirs = first.get(name), second.get(name)
        if theirs is None and ours is not None and ours["ok"] is not None:
            found.append(f"{name} is gone from the patched lane")
        elif ours is None or theirs is None:
            continue  # a check may be one that only the patched tree gets to
        elif ours["role"] != theirs["role"]:
            found.append(f"{name} is a {ours['role']} in one lane and a {theirs['role']} in the other")
        elif ours["ok"] is not None and theirs["ok"] is None:
            found.append(f"{name} is not judged in the patched lane")
    return found


def uncompared_checks(case: Case) -> Errors:
    """A fix is confirmed only where both lanes judge the same checks."""
    if list(case.lanes) == BOTH and case.receipt["verdict"] == "CONFIRMED":
        yield from (f"lanes.patched.checks: {one}" for one in lanes_compared(case))


def differing_outputs(case: Case) -> list[str]:
    """Name the outputs that had to match and do not, or that one lane lacks."""
    first, second = ({one["name"]: one for one in lane["outputs"] if one["must_match"]} for lane in case.lanes.values())
    return sorted(name for name in {*first, *second} if first.get(name) != second.get(name))


def follows(case: Case) -> str:
    """Return the verdict that follows from the lanes."""
    pristine, patched = case.lanes.get("pristine"), case.lanes.get("patched")
    if pristine is None:
        alone = {**ALONE, **PATCHED, "UNSUPPORTED": "UNSUPPORTED", "FIX_VALIDATED": "VALIDATED"}
        return alone.get(patched["verdict"], "ERROR") if patched else "ERROR"
    if pristine["verdict"] != "BUG_REPRODUCED":
        return ALONE.get(pristine["verdict"], "ERROR")
    if patched is None:
        return "PATCH_STALE" if case.receipt["verdict"] == "PATCH_STALE" else "REPRODUCED"
    verdict = PATCHED.get(patched["verdict"], "ERROR")
    if case.receipt.get("about") and verdict in ("CONFIRMED", "FIX_INEFFECTIVE"):
        verdict = follows_for_some(case, case.receipt["about"])
    return "PATCH_BREAKS" if verdict == "CONFIRMED" and differing_outputs(case) else verdict


def follows_for_some(case: Case, about: list[str]) -> str:
    """Return the verdict on a patch that is about the defect checks that these globs name: others may stay wrong."""
    before, after = (
        {one["name"]: one["ok"] for one in lane["checks"] if one["role"] == "defect" and one["ok"] is not None}
        for lane in case.lanes.values()
    )
    wanted = [name for name in before if any(fnmatch.fnmatchcase(name, glob) for glob in about)]
    if not wanted or any(before[name] for name in wanted) or before.keys() - after.keys():
        return "ERROR"
    if any(right and not after[name] for name, right in before.items()):
        return "PATCH_BREAKS"
    return "CONFIRMED" if all(after[name] for name in wanted) else "FIX_INEFFECTIVE"


def another_ask(case: Case) -> Errors:
    """A verdict on some of the checks is one on the patch that pack.toml asks for, on the tree and checks named there.

    And the other way round: that patch, where it is not fix.patch, is judged on nothing else.
    """
    receipt, ask = case.receipt, case.pack.ask
    about, fix = receipt.get("about", []), receipt["fix"] or {"name": ""}
    if not about and fix["name"] not in ("", "fix.patch", "fix.head.patch"):
        yield f"about: empty, with {short(fix['name'])}"
    if about and (about != ask.get("checks") or fix["name"] != ask.get("patch")):
        yield "about: not the checks of pack.toml's [ask], with its patch"
    elif about and receipt["upstream"]["commit"] != ask["origin"].rpartition("@")[2]:
        yield f"upstream.commit: {short(receipt['upstream']['commit'])} is not ask.origin's"


def wrong_verdict(case: Case) -> Errors:
    """The verdict has to follow from the lanes; ERROR may always be said, with a reason and no claim."""
    verdict, expected = case.receipt["verdict"], follows(case)
    if list(case.lanes) not in (BOTH, BOTH[:1], BOTH[1:]):
        yield f"lanes: {', '.join(case.lanes) or 'none'}; a receipt has pristine, patched, or both in this order"
    elif verdict == "ERROR":
        if not case.receipt["reason"]:
            yield "reason: ERROR without a reason"
    elif verdict != expected:
        said = ", ".join(lane["verdict"] for lane in case.lanes.values())
        differing = differing_outputs(case) if list(case.lanes) == BOTH else []
        why = f"; outputs differ: {', '.join(differing)}" if differing else ""
        yield f"verdict: {verdict} does not follow from the lanes ({said}{why}): {expected} does"


def wrong_reason(case: Case) -> Errors:
    """A verdict's reason is that of the lane which decided it."""
    verdict, reason, lanes = case.receipt["verdict"], case.receipt["reason"], case.lanes
    if verdict == "CONFIRMED" and reason:
        yield f"reason: CONFIRMED needs none, and says {short(reason)}"
    if verdict in (*ALONE.values(), "REPRODUCED") and "pristine" in lanes and reason != lanes["pristine"]["reason"]:
        yield f"reason: {short(reason)} is not the pristine lane's"
    if verdict == "PATCH_STALE" and not reason:
        yield "reason: PATCH_STALE without a reason"


def wrong_claims(case: Case) -> Errors:
    """The claims are those of the deciding lane, and the runner's own where outputs had to match."""
    receipt, lanes = case.receipt, case.lanes
    lane = lanes.get(
        {"CONFIRMED": "patched", "VALIDATED": "patched", "REPRODUCED": "pristine"}.get(receipt["verdict"], "")
    )
    expected = list(lane["claims"]) if lane else []
    if lane and receipt["verdict"] == "CONFIRMED" and any(one["must_match"] for one in lane["outputs"]):
        expected.append(IDENTICAL)
    claims = receipt["claims"]
    yield from (f"claims: {short(one)} follows from no lane" for one in claims if one not in expected)
    if receipt["repeats"]["of"] == 1:
        yield from (f"claims: {short(one)} is left out" for one in expected if one not in claims)


def unknown_claims(case: Case) -> Errors:
    """A probe may print the claims that its pack.toml lists, and never the runner's own."""
    known = case.pack.claims
    for name, lane in case.lanes.items():
        for claim in lane["claims"]:
            if claim not in known:
                yield f"lanes.{name}.claims: {short(claim)} is no claim that pack.toml lists"


def impossible_repeats(case: Case) -> Errors:
    """Of several runs all must agree, else they are no verdict."""
    agreeing, of = case.receipt["repeats"]["agreeing"], case.receipt["repeats"]["of"]
    if not 1 <= agreeing <= of:
        yield f"repeats: {agreeing} of {of} runs"
    elif agreeing < of and case.receipt["verdict"] != "ERROR":
        yield f"repeats: {agreeing} of {of} runs agree, which is ERROR and not {case.receipt['verdict']}"


def impossible_counts(case: Case) -> Errors:
    """Ranks are those that pack.toml states; no more wrong fixes are refused than there were."""
    strength = case.receipt["strength"]
    stated = case.target.get("ranks", 1)
    if case.receipt["ranks"] not in (1, stated):  # an older runner wrote 1 in every receipt
        yield f"ranks: {case.receipt['ranks']}; pack.toml says {stated}"
    if strength is not None and strength["killed"] + strength["unjudged"] > strength["of"]:
        yield f"strength: {strength['killed']} killed and {strength['unjudged']} unjudged of {strength['of']}"


def impossible_times(case: Case) -> Errors:
    """A run took at least as long as its lanes, began in the past, and after the commit that it judged."""
    lanes = sum(lane["seconds"] for lane in case.lanes.values())
    if case.receipt["seconds"] + 0.01 < lanes:
        yield f"seconds: {case.receipt['seconds']}, less than its lanes' {lanes:.3f}"
    try:
        started = dt.datetime.fromisoformat(case.receipt["started"])
    except ValueError:
        yield f"started: {short(case.receipt['started'])} is no date"
        return
    if started.tzinfo is None:
        yield "started: a date without a time zone"
        return
    try:
        day = started.astimezone(dt.UTC)
    except (ValueError, OverflowError):
        yield f"started: {short(case.receipt['started'])} is no date"
        return
    if day > dt.datetime.now(dt.UTC) + dt.timedelta(days=1):
        yield f"started: {case.receipt['started']} lies in the future"
    made = case.pack.definition.get("head", {}).get("date")
    if case.pack.head and case.receipt["upstream"]["commit"] == case.pack.head and day.date() < made:
        yield f"started: {case.receipt['started']}, before the commit of {made} that it judged"


def impossible_trees(case: Case) -> Errors:
    """The lanes judge two trees, and the pristine one is the tree that the receipt names."""
    pristine, patched = case.lanes.get("pristine"), case.lanes.get("patched")
    if pristine and pristine["tree"] != case.receipt["upstream"]["sha256"]:
        yield "lanes.pristine.tree: not the upstream.sha256 of the receipt"
    if patched and patched["tree"] == case.receipt["upstream"]["sha256"]:
        yield "lanes.patched.tree: the pristine tree, unpatched"


# --- one check each: the receipt against pack.toml


def another_pack(case: Case) -> Errors:
    """Kind, title and package are the pack's."""
    stated, receipt = case.pack.definition, case.receipt
    pairs = (
        ("kind", receipt["kind"], stated["kind"]),
        ("title", receipt["title"], stated["title"]),
        ("upstream.package", receipt["upstream"]["package"], stated["upstream"]["package"]),
    )
    yield from (f"{name}: {short(said)}; pack.toml says {short(ours)}" for name, said, ours in pairs if said != ours)


def pinned(stated: dict[str, Any]) -> dict[str, str]:
    """Return what a receipt says of the tree that pack.toml pins: a release's archive, or a commit."""
    if "version" in stated:
        return {"version": stated["version"], "sha256": stated["sha256"]}
    return {"version": f"commit {stated['commit']}", "commit": stated["commit"]}


def another_release(case: Case) -> Errors:
    """What is said to be pinned is what pack.toml pins; what is said to be something else is not."""
    upstream, stated = case.receipt["upstream"], case.pack.definition["upstream"]
    if upstream["origin"] == "pinned":
        for key, ours in pinned(stated).items():
            if upstream[key] != ours:
                yield f"upstream.{key}: {short(upstream[key])}; pack.toml pins {short(ours)} (upstream.origin)"
    if upstream["origin"] == "release" and upstream["version"] in (stated.get("version"), ""):
        yield f"upstream.origin: release, of the pinned version {stated.get('version')}"
    if upstream["origin"] not in ("pinned", "latest") and upstream["sha256"] == stated.get("sha256"):
        yield f"upstream.origin: {upstream['origin']}, with the archive that pack.toml pins (upstream.version)"


def wrong_commit(case: Case) -> Errors:
    """A commit is what the version says, and only a checkout has one."""
    upstream = case.receipt["upstream"]
    if upstream["commit"] != commit_of(upstream["version"]):
        yield f"upstream.commit: {short(upstream['commit'])}, not that of upstream.version {short(upstream['version'])}"
    if upstream["origin"] == "git" and not commit_of(upstream["version"]):
        yield f"upstream.version: {short(upstream['version'])} names no commit, as upstream.origin git has to"
    of_release = upstream["origin"] in ("release", "latest")
    of_release |= upstream["origin"] == "pinned" and "version" in case.pack.definition["upstream"]
    if of_release and upstream["commit"]:
        yield f"upstream.commit: {upstream['commit']}; upstream.origin {upstream['origin']} has none"


def wrong_command(case: Case) -> Errors:
    """The command asks for the pack, the target and the upstream that the receipt is about."""
    words = case.receipt["command"].split()
    upstream, number = case.receipt["upstream"], case.receipt["pack"].partition("_")[0]
    asked = [words[at + 1] for at, word in enumerate(words[:-1]) if word == "--upstream"]
    if asked == ["head"] and upstream["commit"] != case.pack.head:
        yield f"command: it asks for head, {short(case.pack.head)}; the receipt judged {short(upstream['version'])}"
    targets = {words[at + 1] for at, word in enumerate(words[:-1]) if word == "--target"}
    if targets and not targets & {"all", "auto", case.receipt["target"]}:
        yield f"command: it asks for {', '.join(sorted(targets))}, not for {case.receipt['target']}"
    runs = re.match(r"runner\.py run((?: \d{1,4})+)(?!\S)", case.receipt["command"])
    if runs and int(number) not in map(int, runs[1].split()):
        yield f"command: it runs pack{runs[1]}, not {number}"


def unlisted_target(case: Case) -> Errors:
    """Target and evidence are listed in pack.toml."""
    receipt, target = case.receipt, case.target
    if not target:
        yield f"target: pack.toml lists no {receipt['target']}"
    elif receipt["evidence"] not in target["evidence"]:
        yield f"evidence: pack.toml admits {', '.join(target['evidence'])} for {receipt['target']}"


def wrong_gpus(case: Case) -> Errors:
    """What was executed on a GPU names the GPUs that the target asks for; nothing else names any."""
    receipt, host = case.receipt, case.receipt["host"]
    gpus = host["gpus"]
    if receipt["evidence"] != "executed" or receipt["target"] == "cpu":
        if gpus:
            yield f"host.gpus: {receipt['evidence']} on {receipt['target']} uses none"
        return
    if len(gpus) != case.target.get("gpus", 1) and not (case.schema == 1 and len(gpus) == 1):  # schema 1 named but one
        yield f"host.gpus: {len(gpus)}; pack.toml asks for {case.target.get('gpus', 1)}"
    for gpu in gpus:
        if architecture(gpu["compute_capability"]) != receipt["target"]:
            yield f"host.gpus: compute capability {gpu['compute_capability']} is not {receipt['target']}"
        if capability(gpu["name"]) not in ("", gpu["compute_capability"]):
            yield f"host.gpus: {short(gpu['name'])} has compute capability {capability(gpu['name'])}"
    if "+cpu" in host["torch"]:
        yield f"host.torch: {host['torch']} uses no GPU"
    if not host["driver"]:
        yield "host.driver: empty, with a GPU"


def architecture(compute_capability: str) -> str:
    """Return the target of a compute capability: ``sm_80`` of 8.0, ``sm_90a`` of 9.0."""
    major, minor = compute_capability.split(".")
    return f"sm_{major}{minor}" + ("a" if int(major) >= FIRST_WITH_SUFFIX else "")


def capability(name: str) -> str:
    """Return the compute capability of a GPU by its name; empty where the name is not known."""
    for names, found in GPUS.items():
        if re.search(rf"(?<![\w]){'(?:' + names + ')'}(?![\w])", name):
            return found
    return ""


def wrong_device(case: Case) -> Errors:
    """A lane that names a GPU names the host's."""
    gpus = {gpu["name"] for gpu in case.receipt["host"]["gpus"]}
    for name, lane in case.lanes.items():
        if gpus and lane["device"].startswith("NVIDIA ") and lane["device"] not in gpus:
            yield f"lanes.{name}.device: {short(lane['device'])}; host.gpus has {', '.join(sorted(gpus))}"


def outside_ranges(case: Case) -> Errors:
    """Python, torch and triton lie in the ranges of pack.toml."""
    requires, host = case.pack.definition["requires"], case.receipt["host"]
    for name in ("python", "torch", "triton"):
        missing = not host[name] and name != "triton"
        if missing or (host[name] and not within(host[name], requires.get(name, ""))):
            yield f"host.{name}: {short(host[name])} is not {requires.get(name, 'any version')}"


def within(version: str, ranges: str) -> bool:
    """Whether a version's release lies in ranges such as ``>=3.11,<3.13``; other operators are not judged here."""
    mine = release(version)
    for one in filter(None, ranges.split(",")):
        match = re.fullmatch(r"\s*(>=|<=|<|>)\s*([\d.]+)\s*", one)
        if match is None:
            continue
        bound = release(match[2])
        if not {">=": mine >= bound, "<=": mine <= bound, "<": mine < bound, ">": mine > bound}[match[1]]:
            return False
    return bool(mine)


def release(version: str) -> tuple[int, ...]:
    """Return the numbers of a version's release, without zeros at its end; empty where it is no version."""
    match = re.match(r"\d{1,9}(?:\.\d{1,9})*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while len(numbers) > 1 and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def wrong_dependencies(case: Case) -> Errors:
    """The dependency set is one of the pack's, with its versions and the hash of the requirements that hold there."""
    found = case.receipt["dependencies"]
    name, _, singles = found["name"].partition("+")
    members = case.pack.requirements(name)
    if members is None and name != "default":
        yield f"dependencies.name: the pack has no set {short(name)}"
        return
    members = members or {}
    if singles:  # wheels that somebody chose himself: only the rest of the set can be compared
        members = {one: its for one, its in members.items() if f"{one}==" not in singles}
    theirs = {one: version for one, version in found["packages"].items() if not singles or one in members}
    always = {one for one, its in members.items() if not its[1]}
    if not always <= theirs.keys() or any(members.get(one, ("",))[0] != version for one, version in theirs.items()):
        yield f"dependencies.packages: not the versions of the set {name}"
        return
    lines = sorted(f"{one}=={members[one][0]} {members[one][2]}\n" for one in theirs)
    if not singles and found["sha256"] != sha256("".join(lines).encode()):
        yield f"dependencies.sha256: not that of the set {name}"


# --- one check each: the receipt against the probe, the patches and the committed receipts


def another_probe(case: Case) -> Errors:
    """It was made with the probe of this repository: by its bytes, or by what it means."""
    probe = case.receipt["probe"]
    if not states(probe, "reproduce.py", (case.pack.folder / "reproduce.py").read_bytes()):
        yield "probe: it was made with another reproduce.py than the one in this repository"


def another_patch(case: Case) -> Errors:
    """A patched lane was made with a patch of this repository, and there is none without such a lane."""
    fix, stale = case.receipt["fix"], case.receipt["verdict"] == "PATCH_STALE"
    if not case.pack.has_patch and ("patched" in case.lanes or fix is not None):
        yield 'fix: a patched lane; pack.toml says fix = "none"'
    if ("patched" in case.lanes) != (fix is not None) and not stale:
        yield "fix: a patch without a patched lane, or the other way round"
    if fix is None:
        return
    if fix["kind"] != "patch":
        if case.pack.patches() and case.receipt["upstream"]["origin"] == "pinned":
            yield f"fix.kind: {fix['kind']}; the pack fixes its pinned release by a patch"
        return
    if fix["name"] not in ("", *case.pack.patches()):
        yield f"fix.name: {short(fix['name'])} is no patch of the pack"
    elif case.patch is None:
        yield f"fix: it was made with another {fix['name'] or 'fix.patch'} than the one in this repository"


def wrong_modules(case: Case) -> Errors:
    """The modules under test come from the lane's tree, and are those that pack.toml names."""
    modules = case.pack.definition["upstream"]["modules"]
    for name, lane in case.judged.items():
        where = f"lanes.{name}.upstream"
        if not lane["upstream"]:
            yield f"{where}: empty: nothing says what was judged"
        for line in lane["upstream"]:
            parts = line["file"].split("/")
            stem = line["module"].replace(".", "/")
            if line["module"].split(".")[0] not in modules:
                yield f"{where}: {short(line['module'])} is none of {', '.join(modules)}"
            elif parts[0] != "$TREE" or {"", ".", ".."} & {*parts[1:]}:
                yield f"{where}: {short(line['module'])} was loaded from outside the tree: {short(line['file'])}"
            elif not re.search(
                rf"/{re.escape(stem)}(?:/__init__)?\.\w+$", re.sub(r"\.[\w-]+\.so$", ".so", line["file"])
            ):
                yield f"{where}: {short(line['file'])} is no file of {short(line['module'])}"


def files_of(lane: dict[str, Any], source_root: str) -> dict[str, str]:
    """Map the files that a lane loaded, by their path in the upstream repository, to their sha256."""
    found = {}
    for line in lane["upstream"]:
        path = line["file"].removeprefix("$TREE/")
        missing = source_root and not path.startswith(f"{source_root}/")
        found[f"{source_root}/{path}" if missing else path] = line["sha256"]
    return found


def changed_by(patch: bytes) -> set[str]:
    """Return the paths that a patch changes."""
    return set(re.findall(r"(?m)^(?:---|\+\+\+) [ab]/([^\t\n]+)", patch.decode(errors="replace")))


def unpatched_files(case: Case) -> Errors:
    """The patch changes the files that it names and no other, and the pack's own files are loaded."""
    if case.patch is None or "patched" not in case.judged:
        return
    root = case.pack.definition["upstream"].get("source_root", "")
    changed, patched = changed_by(case.patch), files_of(case.lanes["patched"], root)
    for path in case.target.get("loads", ()):
        if path in changed and path not in patched:
            yield f"lanes.patched.upstream: {path} was never loaded"
    if "pristine" not in case.judged:
        return
    for path, digest in files_of(case.lanes["pristine"], root).items():
        if path in patched and (patched[path] == digest) == (path in changed):
            module = path.removeprefix(f"{root}/").removesuffix(".py").replace("/", ".")
            what = (
                "the same file in both lanes, though the patch changes it"
                if path in changed
                else "changed, though not by the patch"
            )
            yield f"lanes.patched.upstream: {module}: {what}"


def other_files(case: Case) -> Errors:
    """Of the same tree, committed receipts saw the same files."""
    root = case.pack.definition["upstream"].get("source_root", "")
    for other in committed(case.pack.folder.name):
        if not same_tree(case.receipt["upstream"], other["upstream"]):
            continue
        for name, lane in case.judged.items():
            if name not in other["lanes"] or (name == "patched" and not same_fix(case.receipt, other)):
                continue
            seen = files_of(other["lanes"][name], root)
            for path, digest in files_of(lane, root).items():
                if seen.get(path, digest) != digest:
                    module = path.removeprefix(f"{root}/").removesuffix(".py").replace("/", ".")
                    yield f"lanes.{name}.upstream: {module} is another file than committed receipts saw in that tree"


def same_tree(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two receipts judged one tree: by its hash, or by its commit."""
    return bool(one["sha256"] == other["sha256"] or (one["commit"] and one["commit"] == other["commit"]))


def same_fix(one: dict[str, Any], other: dict[str, Any]) -> bool:
    """Whether two receipts were made with the same patch."""
    return bool(one["fix"] and other["fix"] and one["fix"]["meaning"] == other["fix"]["meaning"])


# --- one check each: the receipt against its log


def wrong_log_name(case: Case) -> Errors:
    """A log is named for its receipt, and by its hash where the name holds one."""
    receipt, log = case.receipt, case.receipt["log"]
    name = f"{receipt['target']}.{receipt['evidence']}"
    if log["file"] not in (f"{name}.log", f"{name}.{log['sha256'][:12]}.log"):
        yield f"log.file: {short(log['file'])} is not {name}.log, nor {name}.{log['sha256'][:12]}.log"


def sections(log: str) -> list[tuple[str, str]]:
    """Return the lanes of a log, in order, each with its text."""
    parts = re.split(r"(?m)^== (pristine|patched) lane ==$", log)
    return list(zip(parts[1::2], parts[2::2], strict=True))


def wrong_log(case: Case) -> Errors:
    """A log holds the receipt's lanes and no other."""
    lanes = [name for name, _ in sections(case.log)]
    if not case.log.startswith("== "):
        yield "log: something stands before its first lane"
    if lanes != list(case.lanes):
        yield f"log: it holds the lanes {', '.join(lanes) or 'none'}; lanes.{' and lanes.'.join(case.lanes)} are wanted"


@dataclass(frozen=True)
class Said:
    """What a lane said in its log: the lines of each word, and whether the middle of the log is left out."""

    lines: dict[str, list[dict[str, Any]]]
    malformed: list[str]
    cut: bool


def said_in(text: str, claims: Iterable[str]) -> Said:
    """Read the protocol lines of one lane's log."""
    lines: dict[str, list[dict[str, Any]]] = {}
    malformed = []
    words = "|".join(map(re.escape, sorted({"TARGET", *LINES, *STATUS, IDENTICAL, *claims})))
    for match in re.finditer(rf"(?m)^({words})(?![A-Za-z0-9_])(.*)$", text):
        try:
            lines.setdefault(match[1], []).append(parsed(match[2].strip()))
        except RefusedError as error:
            malformed.append(f"{match[1]}: {error}")
    return Said(lines, malformed, "bytes are left out here ...]" in text)


def silent_log(case: Case) -> Errors:
    """A receipt says what its log says, line by line and in this order."""
    if [name for name, _ in sections(case.log)] != list(case.lanes):
        return
    for name, text in sections(case.log):
        lane = case.lanes[name]
        if lane["verdict"] == "ERROR":
            continue  # a broken protocol has no lines to compare
        said = said_in(text, case.pack.claims)
        yield from (f"lanes.{name}: the log has a malformed line: {short(one)}" for one in said.malformed)
        claims = [word for word in said.lines if word in case.pack.claims | {IDENTICAL}]
        if claims != lane["claims"] and not said.cut:
            yield f"lanes.{name}.claims: {short(lane['claims'])}; the log says {short(claims)}"
        yield from said_verdict(name, lane, said)
        yield from said_target(case, name, lane, said)
        for word, (what, defaults) in LINES.items():
            theirs = [{**defaults, **line} for line in said.lines.get(word, [])]
            yield from said_lines(f"lanes.{name}.{what}", lane[what], theirs, cut=said.cut)


def said_verdict(name: str, lane: dict[str, Any], said: Said) -> Errors:
    """A lane's log has one verdict line, the receipt's, with its reason."""
    found = [(word, line.get("reason", "")) for word in STATUS for line in said.lines.get(word, [])]
    words = [word for word, _ in found]
    if words != [lane["verdict"]]:
        yield f"lanes.{name}.verdict: {lane['verdict']}; the log says {', '.join(words) or 'nothing'}"
    elif found[0][1] != lane["reason"]:
        yield f"lanes.{name}.reason: {short(lane['reason'])}; the log says {short(found[0][1])}"


def said_target(case: Case, name: str, lane: dict[str, Any], said: Said) -> Errors:
    """A lane's log has one TARGET line, of the receipt's target, evidence and device."""
    found = said.lines.get("TARGET", [])
    wanted = {"target": case.receipt["target"], "evidence": case.receipt["evidence"], "device": lane["device"]}
    if found != [wanted] and lane["verdict"] != "UNSUPPORTED":
        yield f"lanes.{name}.device: the log's TARGET line is {short(found)}, the receipt's {short(wanted)}"


def said_lines(where: str, ours: list[dict[str, Any]], theirs: list[dict[str, Any]], *, cut: bool) -> Errors:
    """The lines of a receipt are those of the log; where the log was cut, it may lack some."""
    mine, other = [exact(line) for line in ours], [exact(line) for line in theirs]
    if mine == other:
        return
    here, there = {*mine}, {*other}
    for line in ours:
        if exact(line) not in there and not cut:
            yield f"{where}: {short(line.get('name', line.get('module')))} is not what the log says"
    for line in theirs:
        if exact(line) not in here:
            yield f"{where}: {short(line.get('name', line.get('module')))} stands otherwise in the log"
    if sorted(mine) == sorted(other):
        yield f"{where}: not in the order of the log"


CHECKS: tuple[Callable[[Case], Errors], ...] = (
    another_pack,
    another_release,
    wrong_commit,
    wrong_command,
    unlisted_target,
    another_probe,
    another_patch,
    wrong_lane_verdict,
    named_twice,
    mute_checks,
    uncompared_checks,
    wrong_verdict,
    another_ask,
    wrong_reason,
    wrong_claims,
    unknown_claims,
    impossible_repeats,
    impossible_counts,
    impossible_times,
    impossible_trees,
    wrong_gpus,
    wrong_device,
    outside_ranges,
    wrong_dependencies,
    wrong_modules,
    unpatched_files,
    other_files,
    wrong_log_name,
    wrong_log,
    silent_log,
)


def receipt_errors(data: bytes, log_of: Callable[[str], bytes | None]) -> list[str]:
    """List what is wrong with one receipt; `log_of` returns a log by its bare name, None where it is missing."""
    try:
        receipt = document_of(data)
    except RefusedError as error:
        return [str(one) for one in error.args]
    pack = pack_of(receipt["pack"])
    if pack is None:
        return [f"pack: this repository has no {short(receipt['pack'])}"]
    log = log_of(receipt["log"]["file"])
    if log is None:
        return [f"log.file: {receipt['log']['file']} is missing"]
    if sha256(log) != receipt["log"]["sha256"]:
        return [f"log.sha256: {receipt['log']['file']} is another log"]
    try:
        case = Case(receipt, log.decode("utf-8"), pack, parsed(data)["schema"])
    except UnicodeDecodeError:
        return [f"log: {receipt['log']['file']} is not UTF-8"]
    return list(dict.fromkeys(error for check in CHECKS for error in check(case)))


# --- the texts of a bundle, written again


#: Between these, three digits are written without an exponent.
WHOLE_FROM, WHOLE_TO = 1e2, 1e9


def number(value: object) -> str:
    """Write a measured value as reports do: three significant digits, nothing of JSON."""
    if isinstance(value, float):
        text = f"{value:.3g}"
        return f"{float(text):.0f}" if WHOLE_FROM <= abs(value) < WHOLE_TO else text
    if isinstance(value, dict):
        return ", ".join(f"{name} {number(one)}" for name, one in value.items())
    if isinstance(value, list):
        return ", ".join(map(number, value))
    if value is None or isinstance(value, bool):
        return {None: "-", True: "yes", False: "no"}[value]
    return str(value)


CLEANUP_WORDS = {
    "CONFIRMED": "shown; gone with the patch, and the results are the same",
    "REPRODUCED": "shown",
    "VALIDATED": "gone with the patch",
    "FIXED_UPSTREAM": "no longer there",
}


def said(receipt: dict[str, Any]) -> str:
    """Write a verdict; that of a cleanup, which is no bug, in words."""
    verdict = str(receipt["verdict"])
    if receipt["kind"] != "cleanup":
        return verdict
    return CLEANUP_WORDS.get(verdict, verdict.lower().replace("_", " "))


def gpu_of(receipt: dict[str, Any]) -> str:
    """Return the name of a receipt's GPUs, with their number where there are several."""
    gpus = receipt["host"]["gpus"]
    return f"{len(gpus)} x {gpus[0]['name']}" if len(gpus) > 1 else gpus[0]["name"] if gpus else ""


def strongest(receipts: Iterable[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Map each target to its receipt of the strongest evidence."""
    ordered = sorted(receipts, key=lambda one: -EVIDENCE.index(one["evidence"]))
    return {one["target"]: one for one in ordered}


def readme(pack: Pack, receipts: dict[str, dict[str, Any]]) -> str:
    """Write a bundle's first page, from the template that the runner fills, too."""
    upstream = pack.definition["upstream"]
    best = strongest(one for place, one in receipts.items() if place.count("/") == 1)
    ordered = [best[target] for target in pack.definition["targets"] if target in best]
    root = f"CHECKOUT/{upstream.get('source_root', '')}".rstrip("/")
    name = "bundle_readme.md" if pack.has_patch else "bundle_readme_unpatched.md"
    return (
        (REPOSITORY / "harness" / "report" / name)
        .read_text("utf-8")
        .format(
            title=pack.definition["title"],
            package=upstream["package"],
            version=upstream.get("version") or upstream["date"],
            repository=upstream["repository"],
            commit=upstream["commit"] + ", unchecked" * bool(upstream["commit"] and upstream.get("commit_unchecked")),
            verdicts="\n".join(
                f"- {one['target']}: {one['verdict']} ({one['evidence']}, {gpu_of(one) or 'no GPU'})" for one in ordered
            ),
            root=root,
            path="" if re.search(r"(?<!-any)\.whl$", upstream.get("file", "")) else f"PYTHONPATH={root} ",
            target=ordered[0]["target"],
        )
    )


class Report:
    """What the placeholders of a report stand for, from a bundle's receipts and the pack's data."""

    def __init__(self, pack: Pack, receipts: dict[str, dict[str, Any]]) -> None:
        """Take the pack, and the receipts of the bundle by their member's name."""
        self.pack = pack
        self.receipts: dict[str, dict[str, Any]] = strongest(
            one for place, one in receipts.items() if place.count("/") == 1
        )
        for folder in ("head", "ask"):
            others = strongest(one for place, one in receipts.items() if place.startswith(f"receipts/{folder}/"))
            self.receipts |= {f"{folder}:{target}": one for target, one in others.items()}

    def value(self, form: str, rest: str | None, template: str) -> str | None:
        """Return the text of a placeholder; None where it is no figure and has to be looked through word by word."""
        if rest is None:
            return self.part(form, template)
        if form in ("data", "table"):
            return self.data(form, rest)
        if form not in ("verdict", "figure", "number", "check"):
            return None
        prefix, place = ("head:", rest.removeprefix("head:")) if rest.startswith("head:") else ("", rest)
        target, _, name = place.partition(":")
        receipt = self.receipts[prefix + target]
        if form == "verdict":
            return self.verdict(receipt)
        name, _, lane = name.partition(":")
        lines = receipt["lanes"][lane or "pristine"]["checks" if form == "check" else "figures"]
        line = next(one for one in lines if one["name"] == name)
        unit = f" {line['unit']}" if line["unit"] not in ("", "1") and form != "number" else ""
        if form == "check" and line["measured"] is None and line["reason"]:
            return f"{line['reason']}{unit}"
        return f"{number(line['measured' if form == 'check' else 'value'])}{unit}"

    def part(self, form: str, template: str) -> str | None:
        """Return a part that the runner writes whole; None for the patch, the command lines and what was run besides.

        These hold words of pack.toml, of the patches and of the runner's own alone.
        """
        definition = self.pack.definition
        if form == "ask":
            return str(definition["ask"]["text"]).strip()
        if form == "searched":
            searched = definition["searched"]
            queries = ", ".join(f"“{query}”" for query in searched["queries"])
            return f"Searched on {searched['date']} for {queries}."
        if form == "threads":
            return self.threads(template)
        if form == "strength":
            return self.strengths()
        return self.verdicts() if form == "verdicts" else None

    def threads(self, template: str) -> str:
        """Write what upstream has already on the same lines."""
        lines = []
        own = self.pack.definition["upstream"]["repository"].rstrip("/").lower()
        for one in self.pack.definition.get("threads", []):
            project, _, count = re.split(r"/(issues|pull|discussions)/(?=\d)", one["url"], maxsplit=1)
            count = re.match(r"\d+", count)[0]  # type: ignore[index]  # what was split there begins with a digit
            named = "" if project.lower() == own else project.removeprefix("https://github.com/")
            lines.append(f"- [{named}#{count}]({one['url']}), {one['state']}, {one['date']}: {one['says']}")
        lines = lines or ["No thread on the same lines was found."]
        headings = (line for line in template.splitlines() if re.match(r"\s*(#|\*\*[^*]+\*\*:?\s*$)", line))
        headed = any("already there" in line.lower() for line in headings)
        return "\n".join(lines if headed else ["**Already there**", *lines])

    def strength(self, receipt: dict[str, Any]) -> tuple[int, int, int, str, bool] | None:
        """Return how many wrong fixes were killed, of how many, how many others judge, when, and if it is STALE."""
        place = self.pack.folder / "receipts" / f"strength.{receipt['target']}.{receipt['evidence']}.json"
        if not place.is_file():
            return None
        record = json.loads(place.read_text("utf-8"))
        names = ("killed", "of", "elsewhere")
        killed, of, elsewhere = (sum(record[who].get(name, 0) for who in ("own", "made")) for name in names)
        files = {"probe": "reproduce.py", "patch": "fix.patch"}
        stale = any(
            meaning(file, (self.pack.folder / file).read_bytes()) != record[name]["meaning"]
            for name, file in files.items()
        )
        return killed, of, elsewhere, record["date"], stale

    def first_sight(self, receipt: dict[str, Any]) -> str:
        """Say how many wrong fixes were killed, of how many, that the probe had not met before."""
        place = self.pack.folder / "receipts" / f"first_sight.{receipt['target']}.{receipt['evidence']}.json"
        if not place.is_file():
            return ""
        record = json.loads(place.read_text("utf-8"))
        killed, of = (sum(record[who][name] for who in ("own", "made")) for name in ("killed", "of"))
        return f"{killed}/{of} at first sight"

    def strengths(self) -> str:
        """Say how many wrong fixes the probe refused, target by target."""
        found = []
        for target in self.pack.definition["targets"]:
            receipt = self.receipts.get(target)
            strength = self.strength(receipt) if receipt else None
            if receipt and strength:
                killed, of, elsewhere, date, stale = strength
                more = f" ({elsewhere} more in code that only another target runs)" if elsewhere else ""
                text = f"{target} ({receipt['evidence']}): killed {killed} of {of} wrong fixes{more}, {date}"
                found.append(", ".join(filter(None, (text, "STALE" if stale else "", self.first_sight(receipt)))))
        return f"Strength: {'; '.join(found) or self.pack.unmeasured}."

    def verdicts(self) -> str:
        """Write the rows of the table of verdicts, and its heading."""
        definition = self.pack.definition
        upstream, head, ask = (definition.get(name, {}) for name in ("upstream", "head", "ask"))
        columns = {"": f"{upstream['package']} {upstream.get('version') or upstream['date']}"}
        if head:
            columns["head:"] = f"default branch, {head['commit'][:12]} of {head['date']}"
        if any(name.startswith("ask:") for name in self.receipts):
            columns["ask:"] = f"{ask['patch']}, on {ask['origin'].rpartition('@')[2][:12]} of {ask['date']}"
        rows = [["target", "evidence", "GPU or host", *columns.values(), "strength"]]
        rows.append(["---"] * len(rows[0]))
        for target in (name for name in definition["targets"] if name in self.receipts):
            one, strength = self.receipts[target], self.strength(self.receipts[target])
            found = [self.receipts.get(prefix + target) for prefix in columns]
            cells = [self.cell(other, one["evidence"]) for other in found]
            killed, of, elsewhere, date, stale = strength or (0, 0, 0, "", False)
            more = f" (+{elsewhere} elsewhere)" if elsewhere else ""
            strong = f"{killed}/{of}{more}, {date}{' STALE' if stale else ''}" if strength else self.pack.unmeasured
            strong = "; ".join(filter(None, (strong, self.first_sight(one))))
            rows.append([target, one["evidence"], gpu_of(one) or "CPU", *cells, strong])
        return "\n".join(f"| {' | '.join(row)} |" for row in rows)

    def cell(self, receipt: dict[str, Any] | None, of_row: str) -> str:
        """Write a verdict, with its evidence where that is not the row's."""
        if receipt is None:
            return "not judged"
        return said(receipt) + (f" ({receipt['evidence']})" if receipt["evidence"] != of_row else "")

    def verdict(self, receipt: dict[str, Any]) -> str:
        """Write a verdict with its kind, evidence and device."""
        evidence, of = receipt["evidence"], receipt["repeats"]["of"]
        repeats = f", {receipt['repeats']['agreeing']} of {of} runs" if of > 1 else ""
        device = gpu_of(receipt) or ("CPU" if evidence != "compiled" else f"compiled for {receipt['target']}")
        return f"{said(receipt)} ({receipt['kind']}; {evidence}, {device}{repeats})"

    def data(self, form: str, rest: str) -> str:
        """Return a value, or a whole table, of a file in the pack's data."""
        name, _, keys = rest.partition(":")
        text = (self.pack.folder / "data" / Path(name).name).read_text("utf-8")
        if form == "table":
            return text.strip()
        value = json.loads(text)
        for key in keys.split("."):
            value = value[int(key)] if isinstance(value, list) else value[key]
        return number(value)

    @functools.cached_property
    def words(self) -> set[str]:
        """Every word of the receipts, the pack's files and what the sources of reports write."""
        paths = [self.pack.folder / "pack.toml"]
        paths += [*(self.pack.folder / "data").glob("*.json"), *self.pack.folder.glob("*.patch")]
        paths += [self.pack.folder / "receipts" / "upstream_tests.json", REPOSITORY / "pyproject.toml"]
        texts = [
            json.dumps(list(self.receipts.values()), ensure_ascii=False),
            *(gpu_of(receipt) for receipt in self.receipts.values()),
            *(path.read_text("utf-8") for path in paths if path.is_file()),
        ]
        texts += [counts_of(path.read_text("utf-8")) for path in self.pack.folder.glob("*.patch")]
        texts += [path.name for path in self.pack.folder.iterdir()]
        texts += [written_by(path.read_text("utf-8")) for path in (REPOSITORY / "harness" / "report").glob("*.py")]
        return {word for text in texts for word in WORD.findall(text)}

    def unknown(self, text: str) -> list[str]:
        """List the words of a text that stand nowhere; a hash may be cut to twelve digits."""
        hashes = {word[:12] for word in self.words if re.fullmatch("[0-9a-f]{40,64}", word)}
        return [word for word in WORD.findall(text) if word not in self.words and word not in hashes]


def written_by(source: str) -> str:
    """Return the text constants of a Python source but for what is no value of anything, as docstrings are."""
    tree = ast.parse(source)
    unused = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    constants = (node for node in ast.walk(tree) if isinstance(node, ast.Constant) and id(node) not in unused)
    return " ".join(node.value for node in constants if isinstance(node.value, str))


def counts_of(patch: str) -> str:
    """Write how many lines a patch adds to each of its files, and removes."""
    found = []
    for file in re.split(r"(?m)^diff --git ", patch)[1:]:
        lines = file.partition("\n@@")[2].split("\n")[1:]
        found += [str(sum(line.startswith(sign) for line in lines)) for sign in "+-"]
    return " ".join(found)


WORD = re.compile(r"\w(?:[\w.]*\w)?")
#: Code fences, and how many lines of words may stand beside them in a part
#: that is compared word by word: one, where the part is not named here.
FENCED = re.compile(r"(?ms)^(`{3,})[^\n]*\n.*?^\1$")
WORDED_LINES = {"patch": 2}
PLACEHOLDER = re.compile(r"\{\{([a-z_]+)(?::([^{}]+))?\}\}")


def unfenced(text: str) -> list[str]:
    """List the lines of words that stand in no code fence."""
    return [line for line in FENCED.sub("", text).splitlines() if line.strip()]


def report_names(pack: Pack) -> set[str]:
    """Return the names of a pack's reports, as bundles hold them."""
    found = (
        re.fullmatch(r"(?i:report)((?:\.(?!in\.)[a-z0-9-]+)?)(?:\.in)?\.md", one.name) for one in pack.folder.iterdir()
    )
    return {f"REPORT{match[1]}.md" for match in found if match}


def template_of(pack: Pack, name: str) -> Path | None:
    """Return the template of a bundle's report, such as ``REPORT.md``; None where the pack has no such report."""
    stem = name.removesuffix(".md")
    here = (pack.folder / one for one in (f"{stem.replace('REPORT', 'report', 1)}.in.md", f"{stem}.in.md", name))
    return next((path for path in here if path.is_file()), None)


def report_errors(report: Report, name: str, text: str) -> Errors:
    """A bundle's report is this repository's template, filled from the bundle's receipts: nothing else stands in it."""
    path = template_of(report.pack, name)
    if path is None:
        yield f"{name}: the pack has no such report"
        return
    template = path.read_text("utf-8").strip() + "\n"
    parts = PLACEHOLDER.split(template)
    at, pending, literal, before = 0, False, "", ""
    try:
        for literal, form, rest in zip(parts[0::3], [*parts[1::3], ""], [*parts[2::3], ""], strict=True):
            start = _start(text, at, literal, pending=pending, last=not form)
            unknown = report.unknown(text[at:start]) if pending and start >= 0 else []
            if pending and len(unfenced(text[at:start])) > WORDED_LINES.get(before, 1):
                yield f"{name}: line {_line(text, at)}: more than {before} says"
                return
            if start < 0 or unknown or (not form and start + len(literal) != len(text)):
                yield f"{name}: {_differs(text, at, literal, unknown)}"
                return
            at, value = start + len(literal), report.value(form, rest, template) if form else ""
            pending = value is None or form == "verdicts"  # words of the runner's own follow the table
            if value is not None and not text.startswith(value, at):
                yield f"{name}: line {_line(text, at)}: {form} {rest or ''} is {short(value)} by the receipts"
                return
            at, before = at + len(value or ""), form
    except (LookupError, StopIteration, TypeError, ValueError, OSError) as error:
        yield f"{name}: {form} {rest or ''} cannot be had from the receipts: {type(error).__name__}"


def _start(text: str, at: int, literal: str, *, pending: bool, last: bool) -> int:
    """Return where a template's next words begin, right here or behind what was not compared; -1: nowhere."""
    if pending and last:
        return len(text) - len(literal) if text.endswith(literal) and len(text) - len(literal) >= at else -1
    if pending:
        return text.find(literal, at)
    return at if text.startswith(literal, at) else -1


def _line(text: str, at: int) -> int:
    return text.count("\n", 0, at) + 1


def _differs(text: str, at: int, literal: str, unknown: list[str]) -> str:
    if unknown:
        return f"line {_line(text, at)} or after: {short(unknown[0])} stands in no receipt"
    same = next(
        (i for i, (a, b) in enumerate(zip(text[at:], literal, strict=False)) if a != b),
        min(len(text) - at, len(literal)),
    )
    return f"line {_line(text, at + same)}: not what this repository's template says"


# --- bundles

FILES = ("reproduce.py", "fix.patch", "fix.head.patch", "ask.patch", "upstream_test.patch", "pack.toml")
MANIFEST = {"schema": INTEGER, "pack": TEXT, "runner": TEXT, "files": {"*": DIGEST}}
MEMBER = re.compile(r"receipts/(?:(?:head|latest|ask)/)?(?:cpu|sm_\d+a?)\.[a-z]+(?:\.[0-9a-f]{12})?\.(?:json|log)")


def outside_zip(data: bytes, infos: list[zipfile.ZipInfo], comment: bytes) -> Errors:
    """A zip begins with its first member and ends with its directory: nothing stands before or behind."""
    if comment:
        yield "zip: it has a comment"
    if not data.startswith(b"PK\x03\x04") or any(info.header_offset > len(data) for info in infos):
        yield "zip: something stands before its first member"
    if data[-22:-18] != b"PK\x05\x06" and not comment:
        yield "zip: something stands behind its directory"
    if infos and min(info.header_offset for info in infos) != 0:
        yield "zip: something stands before its first member"


def wrong_members(infos: list[zipfile.ZipInfo]) -> Errors:
    """Members are few, small, plain files with plain names in one folder, each once."""
    if len(infos) > MOST_MEMBERS:
        yield f"zip: {len(infos)} members, more than {MOST_MEMBERS}"
        return
    top = infos[0].filename.partition("/")[0] if infos else ""
    seen: set[str] = set()
    for info in infos:
        name = info.filename
        yield from (f"{short(name)}: {problem}" for problem in _wrong_member(info, top))
        if name.lower() in seen:
            yield f"{short(name)}: stands in it twice"
        seen.add(name.lower())
    if sum(info.file_size for info in infos) > LARGEST_BUNDLE:
        yield f"zip: it unpacks to more than {LARGEST_BUNDLE} bytes"


def _wrong_member(info: zipfile.ZipInfo, top: str) -> Errors:
    name, mode = info.orig_filename, info.external_attr >> 16
    if len(name) > MOST_NAME or not name.isprintable():
        yield f"a name of {len(name)} characters, or with some that do not print"
    elif "\\" in name or ":" in name or name.startswith("/") or ".." in name.split("/"):
        yield "a name that leads out of its folder"
    elif not name.startswith(f"{top}/"):
        yield f"outside the folder {short(top)}"
    if stat.S_ISLNK(mode):
        yield "a symbolic link"
    elif info.is_dir():
        yield "a folder"
    elif mode & ~0o100666:
        yield f"the mode {mode:o}, of no plain file"
    if info.flag_bits & 1:
        yield "encrypted"
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
        yield f"compressed by method {info.compress_type}"
    if info.file_size > LARGEST:
        yield f"{info.file_size} bytes, more than {LARGEST}"


def wrong_manifest(content: dict[str, bytes], top: str) -> Errors:
    """The manifest names every member with its hash, and no other."""
    try:
        manifest = parsed(content["MANIFEST.json"])
    except KeyError:
        yield "MANIFEST.json: missing"
        return
    except RefusedError as error:
        yield f"MANIFEST.json: {error}"
        return
    errors = list(misshapen(manifest, MANIFEST, "MANIFEST.json"))
    yield from errors
    if errors:
        return
    if manifest["schema"] != 1:
        yield f"MANIFEST.json: schema {manifest['schema']} is none that is known"
    if manifest["pack"] != top:
        yield f"MANIFEST.json: pack: {short(manifest['pack'])} in the folder {short(top)}"
    for name in sorted({*manifest["files"], *content} - {"MANIFEST.json"}):
        if name not in content:
            yield f"{short(name)}: missing"
        elif name not in manifest["files"]:
            yield f"{short(name)}: not in MANIFEST.json"
        elif manifest["files"][name] != sha256(content[name]):
            yield f"{short(name)}: another hash than in MANIFEST.json"


def other_files_of_pack(pack: Pack, content: dict[str, bytes]) -> Errors:
    """The pack's own files are there, byte for byte, and nothing that a bundle does not hold."""
    files = (*FILES, *sorted(path.name for path in pack.folder.glob("requirements*")))
    for name in files:
        ours = pack.folder / name
        if content.get(name) != (ours.read_bytes() if ours.is_file() else None):
            yield f"{name}: not the one in this repository"
    for name in content:
        report = re.fullmatch(r"REPORT(?:\.[a-z0-9-]+)?\.md", name)
        if not (name in (*files, "MANIFEST.json", "README.md") or report or MEMBER.fullmatch(name)):
            yield f"{short(name)}: bundles hold no such file"
    yield from (f"{name}: missing" for name in sorted(report_names(pack) - {*content}))


def wrong_place(pack: Pack, place: str, receipt: dict[str, Any]) -> Errors:
    """A receipt lies where its pack, target, evidence and upstream belong."""
    folder, _, name = place.rpartition("/")
    if receipt["pack"] != pack.folder.name:
        yield f"pack: {receipt['pack']}, in a bundle of {pack.folder.name}"
    if name != f"{receipt['target']}.{receipt['evidence']}.json":
        yield f"target: this is a receipt of {receipt['target']}.{receipt['evidence']}"
    upstream = receipt["upstream"]
    if folder == "receipts" and upstream["origin"] != "pinned":
        yield f"upstream.origin: {upstream['origin']}; here lie receipts of the pinned release"
    if folder == "receipts/head" and (not pack.head or upstream["commit"] != pack.head):
        yield f"upstream.commit: {short(upstream['commit'])}; here lie receipts of {short(pack.head)}"
    if (folder == "receipts/ask") != bool(receipt.get("about")):
        yield "about: what upstream is asked to merge is judged in receipts/ask, and nothing else is"
    if folder == "receipts/latest" and upstream["origin"] not in ("latest", "release"):
        yield f"upstream.origin: {upstream['origin']}; here lie receipts of newer releases"


def wrong_receipts(pack: Pack, content: dict[str, bytes]) -> Errors:
    """Each receipt is sound, lies where it belongs, and has its log; there is no log besides."""
    logs = {name for name in content if name.endswith(".log")}
    names = [name for name in content if MEMBER.fullmatch(name) and name.endswith(".json")]
    for name in names:
        folder = name.rpartition("/")[0]
        errors = receipt_errors(content[name], lambda file, folder=folder: content.get(f"{folder}/{file}"))  # type: ignore[misc]
        yield from (f"{name}: {error}" for error in errors)
        try:
            receipt = document_of(content[name])
        except RefusedError:
            continue
        logs.discard(f"{folder}/{receipt['log']['file']}")
        yield from (f"{name}: {error}" for error in wrong_place(pack, name, receipt))
    yield from (f"{short(name)}: a log that no receipt names" for name in sorted(logs))
    if not any(name.count("/") == 1 for name in names):
        yield "receipts: no receipt of the pinned release"


def wrong_texts(pack: Pack, content: dict[str, bytes]) -> Errors:
    """The first page and the reports say what the receipts say."""
    receipts = {
        name: document_of(data)
        for name, data in content.items()
        if name.startswith("receipts/") and name.endswith(".json")
    }
    if content.get("README.md") != readme(pack, receipts).encode():
        yield "README.md: not what follows from pack.toml and the receipts"
    report = Report(pack, receipts)
    for name in (name for name in content if name.startswith("REPORT")):
        try:
            yield from report_errors(report, name, content[name].decode("utf-8"))
        except UnicodeDecodeError:
            yield f"{name}: not UTF-8"


def opened(data: bytes) -> tuple[dict[str, bytes], list[str]]:
    """Return the members of a zip by their whole names, and what is wrong with it as a zip; then no members."""
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as bundle:
            infos = bundle.infolist()
            errors = [*outside_zip(data, infos, bundle.comment), *wrong_members(infos)]
            if errors or not infos:
                return {}, errors or ["zip: it holds nothing"]
            return {info.filename: bundle.read(info) for info in infos}, []
    except UNREADABLE as error:
        return {}, [f"zip: cannot be read: {type(error).__name__}: {error}"]


def bundle_errors(data: bytes) -> list[str]:
    """List what is wrong with a bundle; the texts in it are looked at where all else is right."""
    members, errors = opened(data)
    if errors:
        return errors
    top = next(iter(members)).partition("/")[0]
    content = {name.removeprefix(f"{top}/"): member for name, member in members.items()}
    pack = pack_of(top)
    if pack is None:
        return [f"pack: this repository has no {short(top)}"]
    errors = [*wrong_manifest(content, top), *other_files_of_pack(pack, content), *wrong_receipts(pack, content)]
    return errors or list(wrong_texts(pack, content))


def beside(path: Path, file: str) -> bytes | None:
    """Return the log that lies beside a receipt; None where it does not, or is no plain file of a sane size."""
    log = path.parent / file
    return log.read_bytes() if log.is_file() and log.stat().st_size <= LARGEST else None


def errors_of(path: Path) -> list[str]:
    """List what is wrong with a file; one that cannot even be read is wrong, too."""
    size = path.stat().st_size
    if size > (LARGEST_BUNDLE if path.suffix == ".zip" else LARGEST):
        return [f"{size} bytes, more than any bundle or receipt"]
    data = path.read_bytes()
    if path.suffix != ".zip":
        return receipt_errors(data, lambda file: beside(path, file))
    return bundle_errors(data)


def notes_of(path: Path) -> Iterator[str]:
    """Say of a sound receipt that it is about another tree, or deviates from what pack.toml expects."""
    if path.suffix == ".zip":
        return
    receipt = document_of(path.read_bytes())
    pack = pack_of(receipt["pack"])
    upstream, stated = receipt["upstream"], (pack.definition if pack else {})
    expected = stated["targets"][receipt["target"]]["verdict"]
    if pack and upstream["commit"] and upstream["commit"] == pack.head:
        expected = stated["head"]["verdict"]
    elif upstream["origin"] != "pinned":
        yield f"it is about {upstream['version']} ({upstream['origin']}), of which pack.toml says nothing"
        return
    if receipt["verdict"] != expected:
        yield f"its verdict is {receipt['verdict']}; pack.toml expects {expected}"


def main() -> int:
    """Check the one file that is named."""
    path = Path(*sys.argv[1:])
    if not path.is_file():
        print("usage: python verify.py BUNDLE.zip | RECEIPT.json", file=sys.stderr)
        return 2
    try:
        errors = errors_of(path)
    except OSError as problem:
        errors = [f"cannot be read: {problem}"]
    for error in errors[:MOST_LINES]:
        print(f"WRONG: {ascii(error)[1:-1]}")  # what a stranger wrote may hold terminal escapes
    if errors[MOST_LINES:]:
        print(f"WRONG: and {len(errors) - MOST_LINES} more")
    for note in () if errors else notes_of(path):
        print(f"note: {ascii(note)[1:-1]}")
    print(f"{ascii(path.name)[1:-1]}: {'not to be trusted' if errors else 'all that can be checked from here holds'}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
