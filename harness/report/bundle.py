"""The one file to attach: probe, patches, pack.toml, receipts, report, and how to run it again in two lines."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from harness.core.errors import HarnessError
from harness.core.words import Exit
from harness.pack.model import Pack
from harness.receipt import receipt, staleness
from harness.receipt.receipt import Receipt
from harness.receipt.redaction import Scrubber
from harness.report import report
from harness.upstream.source import SourceKind

RERUN = "RERUN.md"
PARTS = ("reproduce.py", "contract.py", "fix.patch", "fix.head.patch", "ask.patch", "upstream_test.patch", "pack.toml")
#: The folders of receipts that go with it, and what of `run` judges each anew.
FOLDERS = {"": "", "head": " --upstream head", "ask": " --upstream ask"}
#: Every member carries this date: the same pack gives the same bytes.
DATE = (2026, 1, 1, 0, 0, 0)


def rerun(pack: Pack, receipts: list[Receipt]) -> str:
    """Write how to run it again.

    CHECKOUT stands there for a checkout of the pinned release, at its tag's commit.
    """
    upstream = pack.definition.upstream
    verdicts = (f"- {one.target}: {one.verdict} ({one.evidence}, {one.host.gpu or 'no GPU'})" for one in receipts)
    template = Path(__file__).with_name(
        "bundle_readme.md" if pack.definition.has_patch else "bundle_readme_unpatched.md"
    )
    root = f"CHECKOUT/{upstream.source_root}".rstrip("/")
    return template.read_text(encoding="utf-8").format(
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
        for one in receipt.load_all(pack.receipts / folder):
            why = staleness.reasons(pack, one)
            if why:
                place = (pack.receipts / folder / one.name).relative_to(pack.receipts)
                raise HarnessError(
                    f"{pack.name}: {place} is STALE: {'; '.join(why)}. "
                    f"Next: runner.py run {pack.name} --target {one.target}{option} --record",
                    status=Exit.DEVIATES,
                )


def members(pack: Pack) -> dict[str, bytes]:
    """Map the name of each member of a pack's bundle to its bytes.

    HarnessError is raised where there is no receipt, one is not of the pinned release or STALE, or a report cannot be
    filled.
    """
    _refuse_stale(pack)
    best = receipt.strongest(receipt.load_all(pack.receipts))
    for one in best.values():
        if one.upstream.origin != SourceKind.PINNED or one.target not in pack.definition.targets:
            raise HarnessError(
                f"{pack.name}: {one.name} is a receipt of {one.upstream.version} ({one.upstream.origin}), and a bundle "
                f"is about the pinned release on the targets of pack.toml. Next: runner.py run {pack.name}"
            )
    receipts = [best[name] for name in pack.definition.targets if name in best]
    if not receipts:
        raise HarnessError(f"{pack.name}: no receipt to bundle. Next: runner.py run {pack.name}")
    sets = sorted(path.name for path in pack.folder.glob("requirements*"))
    paths = {name: pack.folder / name for name in (*PARTS, *sets)}
    for suffix in ("*.json", "*.log"):
        for path in filter(receipt.is_receipt, sorted(pack.receipts.rglob(suffix))):
            paths[f"receipts/{path.relative_to(pack.receipts).as_posix()}"] = path
    found = {name: path.read_bytes() for name, path in paths.items() if path.exists()}
    return {RERUN: rerun(pack, receipts).encode(), **found, "README.md": report.render(pack).encode()}


def build(pack: Pack, scrubber: Scrubber) -> bytes:
    """Build the zip; refuse where something private is in any member, and name that member."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in members(pack).items():
            scrubber.require_clean(name, data.decode(errors="replace"))
            member = zipfile.ZipInfo(f"{pack.name}/{name}", DATE)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            bundle.writestr(member, data)
    return stream.getvalue()
