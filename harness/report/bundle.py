"""The file to attach to an issue: script, contract, patches, pack.toml, receipts, report, and how to run them again.

A bundle that somebody sent is judged by its zip, by its receipts, and by what this repository would send with these.
This cannot show that a run took place.
"""

import io
import re
import struct
import tempfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

from harness.core import Exit, HarnessError, markdown
from harness.lane import LaneRecord
from harness.pack.model import Pack
from harness.receipt import staleness
from harness.receipt.receipt import Receipt, is_receipt, load, load_all, strongest
from harness.receipt.redaction import Scrubber
from harness.report import receipt_check, report
from harness.upstream.source import SourceKind

RERUN = "RERUN.md"
PARTS = ("reproduce.py", "contract.py", "fix.patch", "fix.head.patch", "ask.patch", "upstream_test.patch", "pack.toml")
#: The folders of receipts in a bundle, and the option of `run` that judges each anew.
FOLDERS = {"": "", "head": " --upstream head", "ask": " --upstream ask"}
#: The date of every member, so that the same pack gives the same bytes.
DATE = (2026, 1, 1, 0, 0, 0)
#: The attributes of every member: a file that all may read.
PLAIN_FILE = 0o644 << 16
#: The members of a bundle that somebody sent, and their bytes unpacked, at most.
MOST_MEMBERS, MOST_BYTES = 500, 1 << 27
#: The name of a receipt or of its log in a bundle.
RECEIPT = re.compile(r"receipts/(?:(?:head|ask)/)?\w[\w.-]{0,120}\.(?:json|log)", re.ASCII)


def rerun(pack: Pack, receipts: list[Receipt]) -> str:
    """Write how to run a bundle again; CHECKOUT stands for a checkout of the pinned release, at its tag's commit."""
    upstream = pack.definition.upstream
    verdicts = (
        f"- {receipt.target}: {receipt.verdict} ({receipt.evidence}, {markdown.inert(receipt.host.gpu) or 'no GPU'})"
        for receipt in receipts
    )
    name = "bundle_readme.md" if pack.definition.has_patch else "bundle_readme_unpatched.md"
    template = Path(__file__).with_name(name).read_text(encoding="utf-8")
    root = f"CHECKOUT/{upstream.source_root}".rstrip("/")
    return template.format(
        title=pack.definition.title,
        package=upstream.package,
        version=upstream.version or upstream.date,
        repository=upstream.repository,
        commit=upstream.commit or "unknown",
        verdicts="\n".join(verdicts),
        root=root,
        path="" if upstream.is_compiled else f"PYTHONPATH={root} ",
    )


def _refuse_stale(pack: Pack) -> None:
    for folder, option in FOLDERS.items():
        for receipt in load_all(pack.receipts / folder):
            if reasons := staleness.reasons(pack, receipt):
                path = Path(folder, receipt.name)
                raise HarnessError(
                    f"{pack.name}: {path} is STALE: {'; '.join(reasons)}. "
                    f"Next: runner.py run {pack.name} --target {receipt.target}{option} --record",
                    status=Exit.DEVIATES,
                )


def members(pack: Pack) -> dict[str, bytes]:
    """Map the name of each member of a pack's bundle to its bytes."""
    _refuse_stale(pack)
    best = strongest(load_all(pack.receipts))
    for receipt in best.values():
        if receipt.upstream.origin != SourceKind.PINNED or receipt.target not in pack.definition.targets:
            raise HarnessError(
                f"{pack.name}: {receipt.name} is a receipt of {receipt.upstream.version} ({receipt.upstream.origin}), "
                f"and a bundle is about the pinned release on the targets of pack.toml. Next: runner.py run {pack.name}"
            )
    receipts = [best[name] for name in pack.definition.targets if name in best]
    if not receipts:
        raise HarnessError(f"{pack.name}: no receipt to bundle. Next: runner.py run {pack.name}")
    sets = sorted(path.name for path in pack.folder.glob("requirements*"))
    paths = {name: pack.folder / name for name in (*PARTS, *sets)}
    for suffix in ("*.json", "*.log"):
        for path in filter(is_receipt, sorted(pack.receipts.rglob(suffix))):
            paths[f"receipts/{path.relative_to(pack.receipts).as_posix()}"] = path
    files = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
    return {RERUN: rerun(pack, receipts).encode(), **files, "README.md": report.render(pack).encode()}


def build(pack: Pack, scrubber: Scrubber) -> bytes:
    """Build the zip; PrivateTextError names a member with private text."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in members(pack).items():
            scrubber.require_clean(name, data.decode(errors="replace"))
            bundle.writestr(_member(f"{pack.name}/{name}"), data)
    return stream.getvalue()


def _member(name: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(name, DATE)
    member.compress_type = zipfile.ZIP_DEFLATED
    member.external_attr = PLAIN_FILE
    return member


def _is_plain(info: zipfile.ZipInfo) -> bool:
    """Whether a member's header has what the runner writes, besides its place, its sizes and its checksum."""
    plain, own = _member(info.filename), {"header_offset", "CRC", "compress_size", "file_size"}
    names = [name for name in zipfile.ZipInfo.__slots__ if name not in own and not name.startswith("_")]
    return all(getattr(info, name, None) == getattr(plain, name, None) for name in names)


def _require_layout(data: bytes, archive: zipfile.ZipFile) -> None:
    """Raise HarnessError where another program could extract other files: members follow each other, and no more."""
    position = directory = 0
    for info in archive.infolist():
        header = info.FileHeader()  # as it stands before a member that the runner wrote
        if info.header_offset != position or not data.startswith(header, position):
            raise HarnessError(f"member {info.filename[:60]!r}: something stands before it, or in its header")
        position += len(header) + info.compress_size
        directory += zipfile.sizeCentralDir + len(info.filename.encode())  # type: ignore[attr-defined]
    count = len(archive.infolist())
    end = struct.pack("<4s4H2LH", b"PK\5\6", 0, 0, count, count, directory, position, 0)
    if data[position + directory :] != end:
        raise HarnessError("it is no bundle: something stands beside its members")


def _unpacked(data: bytes, info: zipfile.ZipInfo) -> bytes:
    """Unpack a member; HarnessError: it is not the one deflate stream of the bytes that it states."""
    start = info.header_offset + len(info.FileHeader())
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    content = inflater.decompress(data[start : start + info.compress_size], info.file_size + 1)
    if not inflater.eof or inflater.unused_data or len(content) != info.file_size or zlib.crc32(content) != info.CRC:
        raise HarnessError(f"member {info.filename[:60]!r}: it does not hold what it states")
    return content


def _read_members(data: bytes) -> dict[str, bytes]:
    """Read a zip as the runner writes it; HarnessError is raised for any other file.

    Names are taken as they are: those that no bundle has are refused afterwards.
    """
    content: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            if not data.startswith(b"PK\3\4"):
                raise HarnessError("it is no bundle: something stands around the zip")
            if len(infos) > MOST_MEMBERS or sum(info.file_size for info in infos) > MOST_BYTES:
                raise HarnessError(f"it is no bundle: it has more than {MOST_MEMBERS} members or {MOST_BYTES} bytes")
            _require_layout(data, archive)
            for info in infos:
                if not _is_plain(info):
                    raise HarnessError(f"member {info.filename[:60]!r}: no plain file as a bundle has it")
                if info.filename in content:
                    raise HarnessError(f"member {info.filename[:60]!r}: it stands there twice")
                content[info.filename] = _unpacked(data, info)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, EOFError, zlib.error) as error:
        raise HarnessError(f"it is no zip that can be read: {error}") from None
    return content


def _receipt_errors(pack: Pack, path: Path) -> list[str]:
    try:
        receipt = load(path)
    except HarnessError as error:
        return [str(error)]
    problems = receipt_check.errors(pack, path, receipt, is_fresh=True)
    problems += [f"it is STALE: {reason}" for reason in staleness.reasons(pack, receipt)]
    return problems or _differences(pack, receipt, path)


def _differences(pack: Pack, sent: Receipt, path: Path) -> list[str]:
    """Say where a receipt that was sent has other facts than this repository's for the same target."""
    name = path.relative_to(next(folder for folder in path.parents if folder.name == "receipts"))
    own = load(pack.receipts / name) if (pack.receipts / name).exists() else None
    if own is None or staleness.reasons(pack, own):
        return []
    lanes = sent.lanes.keys() & own.lanes.keys()
    facts = {lane: (_facts(sent.lanes[lane]), _facts(own.lanes[lane])) for lane in sorted(lanes)}
    return [
        f"{lane} lane: {name}: other than in this repository's receipt"
        for lane, (theirs, ours) in facts.items()
        for name in theirs
        if theirs[name] != ours[name]
    ]


def _facts(lane: LaneRecord) -> dict[str, object]:
    """Return what two lanes on one tree, target and contract have in common."""
    return {
        "tree": lane.tree,
        "script": lane.script,
        "upstream": set(lane.upstream),
        "checks": {(check.name, check.role) for check in lane.checks},
        "figures": {figure.name for figure in lane.figures},
        "outputs": {(output.name, output.dtype, output.shape) for output in lane.outputs},
    }


def _text_errors(pack: Pack, content: dict[str, bytes]) -> list[str]:
    """Compare each member with the bundle that this repository would make from these receipts."""
    expected = members(pack)
    problems = [f"{name}: it is missing" for name in expected if name not in content]
    problems += [f"{name[:200]}: no bundle of this pack has it" for name in content if name not in expected]
    names = (name for name, text in expected.items() if content.get(name, text) != text)
    return problems + [f"{name}: it differs from this repository's" for name in names]


def errors(data: bytes, packs: list[Pack]) -> list[str]:
    """Say what is wrong with a bundle by the packs of this repository; empty where it is sound."""
    try:
        return _errors(_read_members(data), packs)
    except HarnessError as error:
        return [str(error)]


def _errors(content: dict[str, bytes], packs: list[Pack]) -> list[str]:
    folders = {name.partition("/")[0] for name in content}
    pack = next((pack for pack in packs if {pack.name} == folders), None)
    if pack is None:
        return [f"it is of no pack of this repository: {', '.join(sorted(folders))[:80]}"]
    content = {name.partition("/")[2]: member for name, member in content.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in filter(RECEIPT.fullmatch, content):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content[name])
        paths = sorted(Path(folder).rglob("*.json"))
        problems = [f"{path.relative_to(folder)}: {error}" for path in paths for error in _receipt_errors(pack, path)]
        return problems or _text_errors(replace(pack, receipts_elsewhere=Path(folder, "receipts")), content)
