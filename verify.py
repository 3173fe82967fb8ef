#!/usr/bin/env python3
"""Check a bundle or a receipt that somebody else sent; nothing in it is executed, and only Python itself is needed.

    python verify.py 09_liger_flce_none.zip        (or a receipt: sm_90a.executed.json, with its log beside it)

A bundle has to hold exactly the files of its manifest, by hash. A receipt has to keep the schema, its verdict has to
follow from its checks and exit statuses, its log has to be the one it names. Probe, patch, pack.toml and the judged
release have to be those of the repository in which this file lies. That the run took place cannot be seen from here:
run the probe yourself. Exit status 0: all of this holds; 1: not; 2: no such file.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import sys
import tokenize
import tomllib
import zipfile
import zlib
from pathlib import Path
from typing import Any

PACKS = Path(__file__).resolve().parent / "packs"
OURS = ("reproduce.py", "fix.patch", "fix.head.patch", "pack.toml")
LARGEST = 64 * 2**20  # bytes that a bundle may unpack to
UNREADABLE = (zipfile.BadZipFile, zlib.error, EOFError, SyntaxError, tokenize.TokenError)
STATUS = {"BUG_REPRODUCED": 10, "FIX_VALIDATED": 0, "CONTROL_FAILED": 125, "UNSUPPORTED": 125}
BOTH = {"FIX_VALIDATED": "CONFIRMED", "BUG_REPRODUCED": "FIX_INEFFECTIVE", "CONTROL_FAILED": "PATCH_BREAKS"}
ALONE = {"BUG_REPRODUCED": ("REPRODUCED", "PATCH_STALE"), "FIX_VALIDATED": ("FIXED_UPSTREAM", "VALIDATED")}


def texts(names: str, **others: Any) -> dict[str, Any]:
    """Return the shape of an object: these keys hold text, the others what is said of them."""
    return dict.fromkeys(names.split(), str) | others


CHECK = texts("name role unit reason", ok=object, measured=object, tolerance=object)
LANE = texts("verdict reason tree device", exit_status=int, peak_memory=int, left_behind=int, seconds=(int, float)) | {
    "upstream": [texts("module file sha256")],
    "checks": [CHECK],
    "figures": [texts("name unit", value=object, spread=object)],
    "outputs": [texts("name dtype sha256", shape=[int], must_match=bool)],
    "claims": [str],
}
RECEIPT = texts("pack title kind target evidence verdict reason command started", schema=int, seconds=(int, float)) | {
    "claims": [str],
    "upstream": texts("package version origin sha256"),
    "probe": texts("sha256 meaning"),
    "patch": object,
    "companions": texts("name sha256", packages={"*": str}),
    "lanes": {"*": LANE},
    "host": texts("python torch triton cuda driver gpu compute_capability system? cudnn? nccl?"),
    "log": texts("file sha256"),
    "repeats": {"agreeing": int, "of": int},
}


def sha256(data: bytes) -> str:
    """Return the sha256 of bytes."""
    return hashlib.sha256(data).hexdigest()


def misshapen(value: Any, shape: Any, where: str) -> list[str]:
    """List where a JSON value differs from a shape; a key that ends in "?" may be missing, "*" is any key."""
    if isinstance(shape, list) and isinstance(value, list):
        return [error for item in value for error in misshapen(item, shape[0], where)]
    if not isinstance(shape, dict) or not isinstance(value, dict):
        right = not isinstance(shape, (dict, list)) and isinstance(value, shape)
        return [] if right else [f"{where} is no {getattr(shape, '__name__', type(shape).__name__)}"]
    known = (
        {key.rstrip("?"): item for key, item in shape.items()} if "*" not in shape else dict.fromkeys(value, shape["*"])
    )
    errors = [f"{where} lacks {key}" for key in shape if key[-1] not in "?*" and key not in value]
    errors += [f"{where} has the unknown {key}" for key in value if key not in known]
    return errors + [
        error for key in value if key in known for error in misshapen(value[key], known[key], f"{where}.{key}")
    ]


def meaning(name: str, data: bytes) -> str:
    """Hash what a probe or a patch means: without comments, blank lines and docstring; from the first diff on."""
    text = data.decode()
    if name.endswith(".patch"):
        return sha256(text[max(text.find("diff --git "), 0) :].encode())
    lines, first = text.splitlines(), ast.parse(text).body[0]
    docstring = (
        range(first.lineno, (first.end_lineno or 0) + 1) if ast.get_docstring(ast.parse(text)) is not None else ()
    )
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            lines[token.start[0] - 1] = lines[token.start[0] - 1][: token.start[1]]
    kept = [line.rstrip() for number, line in enumerate(lines, 1) if number not in docstring and line.strip()]
    return sha256("\n".join(kept).encode())


def implied(checks: list[dict[str, Any]]) -> str:
    """Return the verdict that checks imply."""
    said = {(check["role"], check["ok"]) for check in checks}
    ends = {
        ("control", False): "CONTROL_FAILED",
        ("defect", False): "BUG_REPRODUCED",
        ("defect", True): "FIX_VALIDATED",
    }
    return next((verdict for key, verdict in ends.items() if key in said), "UNSUPPORTED")


def contradictions(receipt: dict[str, Any]) -> list[str]:
    """List where a receipt contradicts itself; verdicts of which nothing follows (ERROR, UNSUPPORTED) may stand."""
    lanes, errors, verdict = receipt["lanes"], [], receipt["verdict"]
    for name, lane in lanes.items():
        if lane["verdict"] in STATUS and lane["exit_status"] != STATUS[lane["verdict"]]:
            errors.append(f"{name} lane: {lane['verdict']} with exit status {lane['exit_status']}")
        if lane["verdict"] in ("BUG_REPRODUCED", "FIX_VALIDATED") and lane["verdict"] != implied(lane["checks"]):
            errors.append(f"{name} lane: {lane['verdict']}, but its checks imply {implied(lane['checks'])}")
    said = [lanes[name]["verdict"] for name in ("pristine", "patched") if name in lanes]
    must_match = [{one["name"]: one for one in lane["outputs"] if one["must_match"]} for lane in lanes.values()]
    follows: tuple[str, ...] = ALONE.get(said[0], ()) if said else ()
    if said[1:] and said[0] == "BUG_REPRODUCED":
        follows = (BOTH.get(said[1], "ERROR") if must_match[0] == must_match[1] else "PATCH_BREAKS",)
    if verdict not in (*follows, "ERROR", "UNSUPPORTED", "CONTROL_FAILED") or len(said) != len(lanes) or not said:
        errors.append(f"the verdict {verdict} does not follow from the lanes {', '.join(said)}")
    return errors


def receipt_errors(data: bytes, log: bytes | None, *, head: bool) -> list[str]:
    """List what is wrong with one receipt; `log` is None where it is missing, `head`: of upstream's default branch."""
    try:
        receipt = json.loads(data)
    except ValueError as error:
        return [f"not JSON: {error}"]
    errors = misshapen(receipt, RECEIPT, "receipt")
    if errors or receipt["schema"] != 1:
        return errors or [f"schema {receipt['schema']} is not the known 1"]
    folder = PACKS / Path(receipt["pack"]).name
    if not (folder / "pack.toml").is_file():
        return [f"this repository has no pack {receipt['pack']!r}"]
    patch = folder / ("fix.head.patch" if head and (folder / "fix.head.patch").exists() else "fix.patch")
    for path, theirs in ((folder / "reproduce.py", receipt["probe"]), (patch, receipt["patch"])):
        ours = path.read_bytes()
        if theirs and theirs.get("sha256") != sha256(ours) and theirs.get("meaning") != meaning(path.name, ours):
            errors.append(f"it was made with another {path.name} than the one in this repository")
    pinned = tomllib.loads((folder / "pack.toml").read_text("utf-8"))["upstream"]["sha256"]
    if receipt["upstream"]["origin"] == "pinned" and receipt["upstream"]["sha256"] != pinned:
        errors.append("it judged another release than pack.toml pins")
    if log is None or sha256(log) != receipt["log"]["sha256"]:
        errors.append(f"its log {receipt['log']['file']} is missing or another")
    return errors + contradictions(receipt)


def bundle_errors(path: Path) -> list[str]:
    """List what is wrong with a bundle."""
    with zipfile.ZipFile(path) as bundle:
        infos = bundle.infolist()
        names = [info.filename for info in infos]
        if len(set(names)) != len(names) or sum(info.file_size for info in infos) > LARGEST:
            return [f"a name stands in it twice, or it unpacks to more than {LARGEST} bytes"]
        top = names[0].partition("/")[0] if names else ""
        content = {name.removeprefix(f"{top}/"): bundle.read(name) for name in names}
    if any(name.startswith("/") or ".." in name or "\\" in name or not name.startswith(f"{top}/") for name in names):
        return ["a name leads out of its one folder"]
    listed = json.loads(content.pop("MANIFEST.json", b"{}")).get("files", {})
    errors = [
        f"{name}: has another hash than the manifest says, or is not in it"
        for name in content
        if listed.get(name) != sha256(content[name])
    ]
    errors += [f"{name}: missing" for name in sorted(set(listed) - set(content))]
    for ours in (PACKS / top / name for name in OURS):
        if content.get(ours.name) != (ours.read_bytes() if ours.is_file() else None):
            errors.append(f"{ours.name}: not the one in this repository")
    receipts = [name for name in content if name.startswith("receipts/") and name.endswith(".json")]
    for name in receipts:
        log = content.get(name.removesuffix(".json") + ".log")
        errors += [f"{name}: {error}" for error in receipt_errors(content[name], log, head="/head/" in name)]
    return errors + ([] if receipts else ["no receipt in it"])


def errors_of(path: Path) -> list[str]:
    """List what is wrong with a file; one that cannot even be read is wrong, too."""
    try:
        if path.suffix == ".zip":
            return bundle_errors(path)
        log = path.with_suffix(".log")
        said = log.read_bytes() if log.is_file() else None
        return receipt_errors(path.read_bytes(), said, head=path.parent.name == "head")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, *UNREADABLE) as error:
        return [f"cannot be read: {type(error).__name__}: {error}"]


def main() -> int:
    """Check the one file that is named."""
    path = Path(*sys.argv[1:])
    if not path.is_file():
        print("usage: python verify.py BUNDLE.zip | RECEIPT.json", file=sys.stderr)
        return 2
    errors = errors_of(path)
    for error in errors:
        print(f"WRONG: {ascii(error)[1:-1]}")  # what a stranger wrote may hold terminal escapes
    print(f"{path.name}: {'not to be trusted' if errors else 'all that can be checked from here holds'}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
