"""The one file to attach: probe, patches, pack.toml, receipts, report, and how to run it again in two lines."""

from __future__ import annotations

import io
import zipfile
from pathlib import Path

from harness import __version__, facts, files, markdown, receipt, report
from harness.errors import HarnessError
from harness.pack import Pack
from harness.privacy import Scrubber
from harness.receipt import Receipt

SCHEMA = 1
MANIFEST = "MANIFEST.json"
PARTS = ("reproduce.py", "fix.patch", "fix.head.patch", "pack.toml")
#: Every member carries this date: the same pack gives the same bytes.
DATE = (2026, 1, 1, 0, 0, 0)


def rerun(pack: Pack, target: str) -> list[str]:
    """Return the two lines that show both sentinels, in the unpacked bundle, for a target.

    CHECKOUT stands for a checkout of the pinned release, whose tag's commit the text above them names.
    """
    root = f"CHECKOUT/{pack.definition.upstream.source_root}".rstrip("/")
    judge = f"PYTHONPATH={root} uv run reproduce.py --target {target}"
    return [judge, f'git -C CHECKOUT apply "$PWD/fix.patch" && {judge}']


def readme(pack: Pack, receipts: list[Receipt]) -> str:
    """Write the bundle's first page."""
    upstream, leading = pack.definition.upstream, receipts[0]
    first, second = rerun(pack, leading.target)
    verdicts = "\n".join(
        f"- {one.target}: {one.verdict} ({one.evidence}, {one.host.gpu or 'no GPU'})" for one in receipts
    )
    return f"""# {pack.definition.title}

{upstream.package} {upstream.version} ({upstream.repository}, commit {upstream.commit})

{verdicts}

To run it again, in this folder, with CHECKOUT at that commit. The first line ends in BUG_REPRODUCED (exit status 10),
the second in FIX_VALIDATED (0):

{markdown.fenced(f"{first}{chr(10)}{second}", "sh")}

`python verify.py FILE.zip`, of the repository that this pack is from, says whether this bundle is what it seems.
"""


def members(pack: Pack) -> dict[str, str]:
    """Map the name of each member of a pack's bundle to its text.

    Raises:
        HarnessError: there is no receipt, or the report cannot be filled.

    """
    best = receipt.strongest(receipt.load_all(pack.receipts))
    receipts = [best[name] for name in pack.definition.targets if name in best]
    if not receipts:
        raise HarnessError(f"{pack.name}: no receipt to bundle. Next: runner.py run {pack.name}")
    paths = [pack.folder / name for name in PARTS] + sorted(pack.receipts.rglob("*.json"))
    paths += sorted(pack.receipts.rglob("*.log"))
    found = {path.relative_to(pack.folder).as_posix(): _text(path) for path in paths if path.exists()}
    names = [name for name in facts.reports(pack) if (pack.folder / "REPORT.md").exists()]
    reports = {f"report.{name or 'upstream'}.md": report.build(pack, "issue", name) for name in names}
    return {"README.md": readme(pack, receipts), **found, **reports}


def _text(path: Path) -> str:
    return path.read_bytes().decode(errors="surrogateescape")


def build(pack: Pack, scrubber: Scrubber) -> bytes:
    """Build the zip; refuse where something private is in any member, and name that member."""
    content = {name: text.encode(errors="surrogateescape") for name, text in members(pack).items()}
    for name, data in content.items():
        scrubber.require_clean(name, data.decode(errors="replace"))
    manifest = {
        "schema": SCHEMA,
        "pack": pack.name,
        "runner": __version__,
        "files": {name: files.sha256_bytes(data) for name, data in sorted(content.items())},
    }
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as bundle:
        for name, data in {MANIFEST: receipt.to_json(manifest).encode(), **content}.items():
            member = zipfile.ZipInfo(f"{pack.name}/{name}", DATE)
            member.compress_type = zipfile.ZIP_DEFLATED
            member.external_attr = 0o644 << 16
            bundle.writestr(member, data)
    return stream.getvalue()
