"""The file to attach to an issue: script, contract, patches, pack.toml, receipts, report, and how to run them again."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.pack.model import Pack
from harness.receipt import staleness
from harness.receipt.receipt import Receipt, is_receipt, load_all, strongest
from harness.receipt.redaction import Scrubber
from harness.report import report
from harness.upstream.source import SourceKind

RERUN = "RERUN.md"
PARTS = ("reproduce.py", "contract.py", "fix.patch", "fix.head.patch", "ask.patch", "upstream_test.patch", "pack.toml")
#: The folders of receipts in a bundle, and the option of `run` that judges each anew.
FOLDERS = {"": "", "head": " --upstream head", "ask": " --upstream ask"}
#: The date of every member, so that the same pack gives the same bytes.
DATE = (2026, 1, 1, 0, 0, 0)
#: The attributes of every member: a file that all may read.
PLAIN_FILE = 0o644 << 16


def rerun(pack: Pack, receipts: list[Receipt]) -> str:
    """Write how to run a bundle again; CHECKOUT stands for a checkout of the pinned release, at its tag's commit."""
    upstream = pack.definition.upstream
    verdicts = (
        f"- {receipt.target}: {receipt.verdict} ({receipt.evidence}, {receipt.host.gpu or 'no GPU'})"
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
            reasons = staleness.reasons(pack, receipt)
            if reasons:
                path = Path(folder, receipt.name)
                raise HarnessError(
                    f"{pack.name}: {path} is STALE: {'; '.join(reasons)}. "
                    f"Next: runner.py run {pack.name} --target {receipt.target}{option} --record",
                    status=Exit.DEVIATES,
                )


def members(pack: Pack) -> dict[str, bytes]:
    """Map the name of each member of a pack's bundle to its bytes.

    HarnessError is raised where the pack has no receipt, a receipt is STALE or not of the pinned release, or the report
    cannot be filled.
    """
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
            member = zipfile.ZipInfo(f"{pack.name}/{name}", DATE)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = PLAIN_FILE
            bundle.writestr(member, data)
    return stream.getvalue()
