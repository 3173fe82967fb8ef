"""Whether a bundle that somebody sent is sound: its zip, its receipts judged again, and all else by this repository.

This cannot show that a run took place.
"""

from __future__ import annotations

import io
import re
import stat
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath

from harness.core.errors import HarnessError
from harness.pack.model import Pack
from harness.receipt import staleness
from harness.receipt.receipt import load as load_receipt
from harness.report import bundle, receipt_check

MOST_MEMBERS = 500
#: Bytes of one member, unpacked.
MOST_BYTES = 1 << 25
#: Bytes of all members, unpacked.
MOST_IN_ALL = 1 << 27
LONGEST_NAME = 200
#: The name of a member, which leads nowhere out of the pack's folder.
NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*", re.ASCII)


def _read_members(data: bytes) -> dict[str, bytes]:
    """Read a zip as the runner writes it: plain files of bounded size under names that lead nowhere else.

    HarnessError is raised for any other file.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            problem = next(_zip_problems(data, archive, infos), "")
            if problem:
                raise HarnessError(problem)
            content = {}
            for info in infos:
                with archive.open(info) as member:  # reads at most one byte more than the member states
                    content[info.filename] = member.read(info.file_size + 1)
            return content
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, EOFError, zlib.error) as error:
        raise HarnessError(f"it is no zip that can be read: {error}") from None


def _zip_problems(data: bytes, archive: zipfile.ZipFile, infos: list[zipfile.ZipInfo]) -> Iterator[str]:
    if archive.comment or not data.startswith(b"PK\x03\x04") or len(infos) > MOST_MEMBERS:
        yield f"it is no bundle: something stands around the zip, or it has more than {MOST_MEMBERS} members"
    if sum(info.file_size for info in infos) > MOST_IN_ALL:
        yield f"its members state more than {MOST_IN_ALL} bytes"
    names = [info.filename.casefold() for info in infos]
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    yield from (f"{name} is a file and a folder" for name in names if name in folders)
    for info in infos:
        mode, packing = info.external_attr >> 16, (info.compress_type, info.flag_bits & 1)
        is_plain = stat.S_IFMT(mode) in (0, stat.S_IFREG) and not mode & 0o111 and packing == (zipfile.ZIP_DEFLATED, 0)
        if not is_plain or not NAME.fullmatch(info.filename) or len(info.filename) > LONGEST_NAME:
            yield f"member {info.filename[:60]!r}: no plain file of the pack's folder"
        elif names.count(info.filename.casefold()) > 1:
            yield f"member {info.filename}: it stands there twice"
        elif info.file_size > MOST_BYTES:
            yield f"member {info.filename}: it is larger than {MOST_BYTES} bytes"


def _receipt_errors(pack: Pack, path: Path) -> list[str]:
    try:
        receipt = load_receipt(path)
    except HarnessError as error:
        return [str(error)]
    problems = receipt_check.errors(pack, path, receipt, is_fresh=True)
    return problems + [f"it is STALE: {reason}" for reason in staleness.reasons(pack, receipt)]


def _text_errors(pack: Pack, content: dict[str, bytes]) -> list[str]:
    """Compare each member with the bundle that this repository would make from these receipts."""
    try:
        expected = bundle.members(pack)
    except HarnessError as error:
        return [str(error)]
    problems = [f"{name}: it is missing" for name in expected if name not in content]
    problems += [f"{name}: no bundle of this pack has it" for name in content if name not in expected]
    names = (name for name, text in expected.items() if content.get(name, text) != text)
    return problems + [f"{name}: it differs from this repository's" for name in names]


def errors(data: bytes, packs: list[Pack]) -> list[str]:
    """Say what is wrong with a bundle by the packs of this repository; empty where it is sound."""
    try:
        content = _read_members(data)
    except HarnessError as error:
        return [str(error)]
    folders = {name.partition("/")[0] for name in content}
    pack = next((pack for pack in packs if {pack.name} == folders), None)
    if pack is None:
        return [f"it is of no pack of this repository: {', '.join(sorted(folders))[:80]}"]
    content = {name.partition("/")[2]: member for name, member in content.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in content if name.startswith("receipts/")):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content[name])
        names = sorted(name for name in content if name.startswith("receipts/") and name.endswith(".json"))
        problems = [f"{name}: {error}" for name in names for error in _receipt_errors(pack, Path(folder, name))]
        return problems or _text_errors(replace(pack, receipts_elsewhere=Path(folder, "receipts")), content)
