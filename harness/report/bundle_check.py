"""Whether a bundle that somebody sent holds: its zip, each receipt by the one judge, and all else by this repository.

It cannot show that a run took place.
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
from harness.receipt import receipt, staleness
from harness.report import bundle, receipt_check

MOST_MEMBERS = 500
#: Bytes of one member, unpacked.
MOST_BYTES = 1 << 25
#: Likewise, of all members.
MOST_IN_ALL = 1 << 27
LONGEST_NAME = 200
#: A member's name: it leads nowhere out of the pack's folder.
NAME = re.compile(r"\w[\w.-]*(?:/\w[\w.-]*)*", re.ASCII)


def _members(data: bytes) -> dict[str, bytes]:
    """Read a zip as the runner writes it: plain files of bounded size under names that lead nowhere else.

    HarnessError is raised where it is none.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as opened:
            infos = opened.infolist()
            problem = next(_zip_problems(data, opened, infos), "")
            if problem:
                raise HarnessError(problem)
            content = {}
            for info in infos:
                with opened.open(info) as member:  # of one that inflates to more than it states, no more is held
                    content[info.filename] = member.read(info.file_size + 1)
            return content
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, EOFError, zlib.error) as error:
        raise HarnessError(f"it is no zip that can be read: {error}") from None


def _zip_problems(data: bytes, opened: zipfile.ZipFile, infos: list[zipfile.ZipInfo]) -> Iterator[str]:
    if opened.comment or not data.startswith(b"PK\x03\x04") or len(infos) > MOST_MEMBERS:
        yield f"it is no bundle: something stands around the zip, or it has more than {MOST_MEMBERS} members"
    if sum(info.file_size for info in infos) > MOST_IN_ALL:
        yield f"its members state more than {MOST_IN_ALL} bytes"
    names = [info.filename.casefold() for info in infos]
    folders = {str(folder) for name in names for folder in PurePosixPath(name).parents}
    yield from (f"{name} is a file and a folder" for name in names if name in folders)
    for info in infos:
        mode, packed = info.external_attr >> 16, (info.compress_type, info.flag_bits & 1)
        plain = stat.S_IFMT(mode) in (0, stat.S_IFREG) and not mode & 0o111 and packed == (zipfile.ZIP_DEFLATED, 0)
        if not plain or not NAME.fullmatch(info.filename) or len(info.filename) > LONGEST_NAME:
            yield f"member {info.filename[:60]!r}: no plain file of the pack's folder"
        elif names.count(info.filename.casefold()) > 1:
            yield f"member {info.filename}: it stands there twice"
        elif info.file_size > MOST_BYTES:
            yield f"member {info.filename}: it is larger than {MOST_BYTES} bytes"


def _receipt_errors(pack: Pack, path: Path) -> list[str]:
    try:
        one = receipt.load(path)
    except HarnessError as error:
        return [str(error)]
    found = receipt_check.errors(pack, path, one, is_fresh=True)
    return found + [f"it is STALE: {reason}" for reason in staleness.reasons(pack, one)]


def _text_errors(pack: Pack, content: dict[str, bytes]) -> list[str]:
    """Compare each member with what this repository would send with these receipts."""
    try:
        wanted = bundle.members(pack)
    except HarnessError as error:
        return [str(error)]
    missing = [f"{name}: it is missing" for name in wanted if name not in content]
    strange = [f"{name}: no bundle of this pack has it" for name in content if name not in wanted]
    differing = [name for name, text in wanted.items() if content.get(name, text) != text]
    return missing + strange + [f"{name}: it differs from this repository's" for name in differing]


def errors(data: bytes, packs: list[Pack]) -> list[str]:
    """Say what of a bundle, a zip, does not hold by the packs of this repository; nothing where all of it does."""
    try:
        content = _members(data)
    except HarnessError as error:
        return [str(error)]
    tops = {name.partition("/")[0] for name in content}
    pack = next((pack for pack in packs if {pack.name} == tops), None)
    if pack is None:
        return [f"it is of no pack of this repository: {', '.join(sorted(tops))[:80]}"]
    content = {name.partition("/")[2]: member for name, member in content.items()}
    with tempfile.TemporaryDirectory() as folder:
        for name in (name for name in content if name.startswith("receipts/")):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content[name])
        places = sorted(name for name in content if name.startswith("receipts/") and name.endswith(".json"))
        found = [f"{place}: {error}" for place in places for error in _receipt_errors(pack, Path(folder, place))]
        sent = replace(pack, receipts_elsewhere=Path(folder, "receipts"))
        return found or _text_errors(sent, content)
