"""Generated input at every reader: no traceback, and no verdict that an independent model does not give.

300 examples each, or 20,000 with ``HYPOTHESIS_PROFILE=long``. What must come out is decided where the input is made:
each generated line knows whether it is sound and what it says, each archive which files it may lay out.
"""

from __future__ import annotations

import copy
import io
import json
import math
import os
import tarfile
import tempfile
import warnings
import zipfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from harness.core.errors import HarnessError, UnavailableError
from harness.core.structure import StructureError
from harness.core.words import Evidence, Kind, LaneVerdict, Role, Verdict
from harness.host.host import Gpu, Host
from harness.lane import results
from harness.lane.results import CheckLine, FigureLine, LaneRecord, LogRecord, OutputLine, UpstreamLine
from harness.pack import load
from harness.receipt import receipt
from harness.receipt.receipt import (
    DependencyRecord,
    Hashed,
    PatchRecord,
    Receipt,
    UpstreamRecord,
)
from harness.upstream import archive
from harness.verdict import lane_verdict
from testing import toys

EVERY = settings(deadline=None, database=None, suppress_health_check=list(HealthCheck))
settings.register_profile("ci", EVERY, max_examples=300, derandomize=True)
settings.register_profile("long", EVERY, max_examples=20_000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# --- what a contract found


@dataclass(frozen=True)
class Said:
    """Some lines of a contract's results, without their numbers, and what must be judged from them."""

    events: tuple[dict[str, Any], ...]
    word: str
    name: str = ""
    role: str = ""
    ok: bool | None = None


NAMES = st.text(
    st.characters(min_codepoint=33, max_codepoint=0x2FF, exclude_categories=("C", "Z")), min_size=1, max_size=4
)
TEXTS = st.text(st.characters(exclude_categories=["C"]), max_size=8)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**63) | st.floats(allow_nan=False, allow_infinity=False)
    | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
#: What no line of the results survives, by how it is done to a sound one.
DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut": lambda line: line[:-1],
    "another line before it": lambda line: b"log\n" + line,
    "NUL first": lambda line: b"\0" + line,
    "carriage return first": lambda line: b"50%\r" + line,
    "NUL inside": lambda line: line[:-1] + b', "x": "\0"}',
    "escaped NUL": lambda line: line[:-1] + b', "reason": "\\u0000"}',
    "not UTF-8": lambda line: line[:-1] + b', "reason": "\xff"}',
    "half a character": lambda line: line[:-1] + b', "reason": "\\ud812"}',
    "infinity": lambda line: line[:-1] + b', "reason": 1e999}',
    "no number": lambda line: line[:-1] + b', "reason": NaN}',
    "400 digits": lambda line: line[:-1] + b', "reason": ' + b"1" * 400 + b"}",
    "brackets": lambda line: line[:-1] + b', "reason": ' + b"[" * 900 + b"]" * 900 + b"}",
    "a key twice": lambda line: line[:-1] + b', "kind": "check"}',
    "unknown key": lambda line: line[:-1] + b', "colour": 1}',
    "more behind it": lambda line: line + b" {}",
    "written twice": lambda line: line + b"\n" + line,
    "lost": lambda _: b"",
}


@st.composite
def _checks(draw: st.DrawFn) -> Said:
    name, role, ok = draw(NAMES), draw(st.sampled_from([*Role])), draw(st.sampled_from([True, False, None]))
    check = {"kind": "check", "name": name, "role": role, "ok": ok, "seconds": 0.1}
    return Said(({"kind": "begin", "name": name}, check), "check", name, role, ok)


@st.composite
def _figures(draw: st.DrawFn) -> Said:
    figure = {"kind": "figure", "name": draw(NAMES), "value": draw(VALUES), "unit": "ms", "spread": draw(VALUES)}
    return Said((figure,), "figure", str(figure["name"]))


@st.composite
def _outputs(draw: st.DrawFn) -> Said:
    tensor = {"dtype": "f", "shape": [2], "sha256": "x", "must_match": True}
    output = {"kind": "output", "name": draw(NAMES), **tensor}
    return Said((output,), "output", str(output["name"]))


CLAIM = Said(({"kind": "claim", "word": "CLAIMED"},), "claim")
SPOKEN = st.lists(st.one_of(_checks(), _checks(), _figures(), _outputs(), st.just(CLAIM)), max_size=8)
TARGET = {"kind": "target", "target": "cpu", "evidence": "traced", "device": "CPU"}


def _implied(checks: list[Said]) -> str:
    """Return the verdict of these checks: DESIGN's table, written down a second time."""
    if any(check.ok is False and check.role == "control" for check in checks):
        return "CONTROL_FAILED"
    if any(check.ok is False and check.role == "defect" for check in checks):
        return "BUG_REPRODUCED"
    if any(check.ok is True and check.role == "defect" for check in checks):
        return "FIX_VALIDATED"
    return "UNSUPPORTED"


@given(
    said=SPOKEN,
    damage=st.none() | st.tuples(st.sampled_from(sorted(DAMAGES)), st.integers(0, 30)),
    honest=st.booleans(),
    told=st.sampled_from([0, 1, 2, 5]),
    status=st.sampled_from([0, 1, 2, 5, -9]),
)
def test_a_contract_is_believed_exactly_where_every_line_of_it_is_sound(
    *, tmp_path: Path, said: list[Said], damage: tuple[str, int] | None, honest: bool, told: int, status: int
) -> None:
    checks = [one for one in said if one.word == "check"]
    wrong = any(one.ok is False for one in checks)
    if honest:
        told = status = int(wrong)
    events = [TARGET, *(event for one in said for event in one.events), {"kind": "end", "status": told}]
    lines = [json.dumps({"number": number, **event}).encode() for number, event in enumerate(events, start=1)]
    if damage is not None:
        place = damage[1] % len(lines)
        lines[place] = DAMAGES[damage[0]](lines[place])
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"\n".join(lines) + b"\n")
    found = results.read(file, status, ("CLAIMED",))
    sound = damage is None and len({one.name for one in checks}) == len(checks)
    believed = sound and told == status and status in {0, 1, 5} and wrong == (status == 1)
    assert (not found.problems) == believed, (found.problems, lines)
    if believed:
        assert lane_verdict.verdict_of_checks(found.checks) == _implied(checks)
        assert [(one.name, one.role, one.ok) for one in found.checks] == [
            (one.name, one.role, one.ok) for one in checks
        ]
        assert [one.name for one in found.figures] == [one.name for one in said if one.word == "figure"]
        assert [one.name for one in found.outputs] == [one.name for one in said if one.word == "output"]
        json.dumps(asdict(found), allow_nan=False).encode()


PIECES = st.lists(
    st.sampled_from(
        [b'{"kind": "end", ', b'"number": 1', b"check", b"{", b"}", b'"', b"\n", b"\r", b"\0", b"[", b"\\ud800"]
    )
    | st.binary(max_size=6)
)


@given(PIECES, st.sampled_from([0, 1, 5, -11]))
def test_no_bytes_end_the_reader_of_a_contract(tmp_path: Path, pieces: list[bytes], status: int) -> None:
    file = tmp_path / "results.jsonl"
    file.write_bytes(b"".join(pieces))
    assert results.read(file, status, ("(",)).problems, "nothing that is only noise is believed"


# --- receipts

RECORD = LaneRecord(
    LaneVerdict.BUG_REPRODUCED, "", 10, 1.5, 4096, 0, "ab", "CPU",
    (UpstreamLine("toykernel.scale", "$TREE/src/toykernel/scale.py", "ab"),),
    (CheckLine("weights", Role.DEFECT, ok=False, reason="3.0 and not 2.0", seconds=0.1),),
    (FigureLine("max_error", 3.0, "1", None),), (OutputLine("total", "float", (2, 3), "ab", must_match=True),),
    ("CLAIMED",),
)  # fmt: skip
WHOLE = Receipt(
    receipt.SCHEMA, "01_confirmed", "scale uses the first weight", Kind.WRONG_RESULT, "cpu", Evidence.TRACED,
    Verdict.CONFIRMED, "", ("BITWISE_IDENTICAL",), UpstreamRecord("toykernel", "1.0", "pinned", "ab"),
    Hashed("ab", "cd"), PatchRecord("fix.patch", "ab", "cd"),
    DependencyRecord("default", "ab", {"numpy": "2.0"}),
    {"pristine": RECORD, "patched": RECORD}, Host("3.11.7", "2.13.0", "3.6.0", gpus=(Gpu("H200", "9.0"),)),
    LogRecord("cpu.traced.0123456789ab.log", "ab"), "runner.py run 1", "2026-01-01T00:00:00+00:00", 3.0,
)  # fmt: skip
DOCUMENT = json.loads(receipt.to_json(receipt.document_of(WHOLE)))
ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=12) | st.just("../../etc/passwd"),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=5), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


def _places(document: object, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        document.items() if isinstance(document, dict) else enumerate(document) if isinstance(document, list) else ()
    )
    return [path, *(place for key, item in inner for place in _places(item, (*path, key)))]


def _with(document: Any, place: tuple[Any, ...], value: object) -> Any:  # noqa: ANN401 - any document
    if not place:
        return value
    changed = copy.deepcopy(document)
    inner = changed
    for key in place[:-1]:
        inner = inner[key]
    inner[place[-1]] = value
    return changed


def _holds(found: object, written: object) -> bool:
    """Whether a document says all that another one says, word for word; it may add what was left out."""
    if isinstance(written, dict) and isinstance(found, dict):
        return all(key in found and _holds(found[key], item) for key, item in written.items())
    return type(found) is type(written) and found == written


def _read_receipt(data: bytes) -> Receipt | None:
    try:
        return receipt.parse(data, "packs/01/cpu.traced.json")
    except HarnessError:
        return None


@given(place=st.sampled_from(_places(DOCUMENT)), value=ANY, plain=st.booleans())
def test_a_receipt_is_read_as_it_stands_or_refused_in_one_line(
    *, place: tuple[Any, ...], value: object, plain: bool
) -> None:
    document = _with(DOCUMENT, place, value)
    data = json.dumps(document, ensure_ascii=plain).encode(errors="surrogatepass")
    found = _read_receipt(data)
    if found is not None:
        said = json.loads(receipt.to_json(receipt.document_of(found)))
        assert _holds(said, document), "nothing was coerced or left out"
        assert receipt.strongest([found, WHOLE])
        assert PurePosixPath(found.log.file).name == found.log.file
        assert found.verdict in list(Verdict)
        assert math.isfinite(found.seconds)


@given(st.binary(max_size=60), st.integers(0, 4000))
def test_no_bytes_end_the_reader_of_receipts(data: bytes, where: int) -> None:
    whole = json.dumps(DOCUMENT).encode()
    assert _read_receipt(data) is None
    found = _read_receipt(whole[:where] + data + whole[where + len(data) :])
    assert found is None or json.loads(receipt.to_json(receipt.document_of(found)))


# --- pack.toml

PACK_TOML = (toys.RESOURCES / "packs/01_confirmed/pack.toml").read_text(encoding="utf-8").replace("@SHA256@", "0" * 64)
TOML_VALUES = st.one_of(
    st.sampled_from(["inf", "nan", "-1", "0", "9" * 400, "9" * 5000, "true", "[]",
                     '[""]', '["("]', '""', '"../x"', '"a\\u0000b"',
                     "{}", "1979-05-27", "[" * 900 + "]" * 900, '"--upload-pack=x"', "1e999", '["CHECK"]', '"a:b"']),
    st.text(st.characters(codec="utf-8"), max_size=10).map(json.dumps), st.text(max_size=8),
)  # fmt: skip
KEYED = [number for number, line in enumerate(PACK_TOML.splitlines()) if " = " in line]


@given(st.sampled_from(KEYED), TOML_VALUES)
def test_a_definition_is_sound_or_refused_with_its_errors(number: int, value: str) -> None:
    lines = PACK_TOML.splitlines()
    lines[number] = f"{lines[number].partition(' = ')[0]} = {value}"
    try:
        found = load.parse("\n".join(lines) + "\n")
    except StructureError:
        return
    target = found.targets["cpu"]
    assert 0 < target.timeout_s < math.inf
    assert all(claim.replace("_", "A").isalnum() and claim.upper() == claim for claim in found.claims)
    assert not {*found.claims} & {"CHECK", "TARGET", *LaneVerdict}
    for name in (found.upstream.package, found.upstream.file):
        assert PurePosixPath(name).name == name
        assert not {"\0", "\\"} & {*name}
    assert found.upstream.repository.startswith("http")
    assert ".." not in PurePosixPath(found.upstream.source_root).parts


@given(st.text(max_size=200))
def test_no_text_ends_the_reader_of_definitions(text: str) -> None:
    with pytest.raises(StructureError):
        load.parse(text)


# --- archives

PARTS = st.sampled_from(["a", "b", "src", "..", ".", "", "c.py", "C:", "é", "x" * 100, "a\\b", ".git"])
MEMBERS = st.lists(
    st.tuples(
        st.lists(PARTS, min_size=1, max_size=3).map("/".join), st.sampled_from("fffdlhp"), st.binary(max_size=20)
    ),
    max_size=4,
)


def _tar(members: list[tuple[str, str, bytes]]) -> bytes:
    stream = io.BytesIO()
    kinds = {
        "f": tarfile.REGTYPE,
        "d": tarfile.DIRTYPE,
        "l": tarfile.SYMTYPE,
        "h": tarfile.LNKTYPE,
        "p": tarfile.FIFOTYPE,
    }
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, kind, data in members:
            info = tarfile.TarInfo(name)
            info.type, info.linkname = kinds[kind], "/etc/passwd" if kind in "lh" else ""
            info.size = len(data) if kind == "f" else 0
            tar.addfile(info, io.BytesIO(data) if kind == "f" else None)
    return stream.getvalue()


def _zip(members: list[tuple[str, str, bytes]]) -> bytes:
    stream = io.BytesIO()
    modes = {"f": 0o100644, "d": 0o040755, "l": 0o120777, "h": 0o100644, "p": 0o010644}
    with warnings.catch_warnings(action="ignore"), zipfile.ZipFile(stream, "w") as bundle:  # of names that stand twice
        for name, kind, data in members:
            info = zipfile.ZipInfo(name + ("/" if kind == "d" else ""))
            info.external_attr = modes[kind] << 16
            bundle.writestr(info, b"" if kind == "d" else data)
    return stream.getvalue()


def _unpacked(data: bytes, name: str) -> dict[str, bytes] | None:
    """Unpack in a folder of its own; return the files, or None where it was refused; nothing may lie beside them."""
    with tempfile.TemporaryDirectory() as outer:
        file, folder = Path(outer, name), Path(outer, "deep/tree")
        file.write_bytes(data)
        folder.mkdir(parents=True)
        try:
            archive.unpack(file, folder)
            refused = False
        except UnavailableError:
            refused = True
        everything = [path for path in Path(outer).rglob("*") if not path.is_relative_to(folder)]
        assert {*everything} == {file, folder.parent}, everything
        assert not any(path.is_symlink() or path.is_fifo() for path in folder.rglob("*"))
        files = {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
        return None if refused else files


@given(MEMBERS, st.sampled_from(["x.tar.gz", "x.zip"]))
def test_an_archive_lays_out_its_files_or_is_refused(members: list[tuple[str, str, bytes]], name: str) -> None:
    found = _unpacked(_tar(members) if name.endswith("gz") else _zip(members), name)
    if found is None:
        return
    zipped = name == "x.zip"
    assert {kind for _, kind, _ in members} <= set("fdh" if zipped else "fd"), "a link or a device was taken"
    regular = [
        (PurePosixPath(path).as_posix(), data)
        for path, kind, data in members
        if kind in "fh"
        and not (zipped and path.endswith("/"))  # a zip knows folders by their last character
        and ".git" not in PurePosixPath(path.lower()).parts  # a repository never leaves its archive
        and PurePosixPath(path).suffix not in archive.LEFT_OUT
    ]
    assert found == dict(regular)
    # tarfile takes the slashes behind a folder's name away, so that "/" is one without a name: nothing is written.
    names = [path.rstrip("/") if kind == "d" and not zipped else path for path, kind, _ in members]
    assert not any(".." in PurePosixPath(name).parts or name.startswith("/") for name in names)
    assert len(regular) == len({path for path, _ in regular})


@given(
    MEMBERS,
    st.sampled_from(["x.tar.gz", "x.zip"]),
    st.lists(st.tuples(st.integers(0, 600), st.integers(0, 255)), max_size=6),
    st.integers(0, 600),
)
def test_a_damaged_archive_ends_in_one_line(
    members: list[tuple[str, str, bytes]], name: str, flips: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(_tar(members) if name.endswith("gz") else _zip(members))
    for where, value in flips:
        if where < len(data):
            data[where] = value
    _unpacked(bytes(data[: len(data) - cut] if cut < len(data) else data), name)
