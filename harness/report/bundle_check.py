"""Whether a bundle that somebody sent is sound: its zip, its receipts judged again, and all else by this repository.

This cannot show that a run took place.
"""

from __future__ import annotations

import io
import re
import tempfile
import zipfile
import zlib
from dataclasses import replace
from pathlib import Path

from harness.core.errors import HarnessError
from harness.pack.model import Pack
from harness.receipt import staleness
from harness.receipt.receipt import load as load_receipt
from harness.report import bundle, receipt_check

MOST_MEMBERS = 500
#: Bytes of all members, unpacked.
MOST_BYTES = 1 << 27
#: The name of a receipt or of its log in a bundle.
RECEIPT = re.compile(r"receipts/(?:(?:head|ask)/)?\w[\w.-]{0,120}\.(?:json|log)", re.ASCII)


def _read_members(data: bytes) -> dict[str, bytes]:
    """Read a zip as the runner writes it; HarnessError is raised for any other file.

    Names are taken as they are: those that no bundle has are refused afterwards.
    """
    content: dict[str, bytes] = {}
    try:
        with zipfile.ZipFile(io.BytesIO(data)) as archive:
            infos = archive.infolist()
            if archive.comment or not data.startswith(b"PK\x03\x04"):
                raise HarnessError("it is no bundle: something stands around the zip")
            if len(infos) > MOST_MEMBERS or sum(info.file_size for info in infos) > MOST_BYTES:
                raise HarnessError(f"it is no bundle: it has more than {MOST_MEMBERS} members or {MOST_BYTES} bytes")
            for info in infos:
                if info.external_attr != bundle.PLAIN_FILE or info.compress_type != zipfile.ZIP_DEFLATED:
                    raise HarnessError(f"member {info.filename[:60]!r}: no plain file as a bundle has it")
                if info.filename in content:
                    raise HarnessError(f"member {info.filename[:60]!r}: it stands there twice")
                with archive.open(info) as member:  # reads at most one byte more than the member states
                    content[info.filename] = member.read(info.file_size + 1)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, OSError, ValueError, EOFError, zlib.error) as error:
        raise HarnessError(f"it is no zip that can be read: {error}") from None
    return content


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
    problems += [f"{name[:200]}: no bundle of this pack has it" for name in content if name not in expected]
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
        for name in filter(RECEIPT.fullmatch, content):
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content[name])
        paths = sorted(Path(folder).rglob("*.json"))
        problems = [f"{path.relative_to(folder)}: {error}" for path in paths for error in _receipt_errors(pack, path)]
        return problems or _text_errors(replace(pack, receipts_elsewhere=Path(folder, "receipts")), content)
