"""Writing a new pack: all of its files, or none."""

from __future__ import annotations

import re
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness.author import fix, pack_text, probe_text
from harness.author.draft import Draft
from harness.core import files
from harness.core.errors import HarnessError
from harness.core.words import Fix
from harness.pack import load, rules
from harness.upstream import patch

SLUG = re.compile(r"[a-z0-9]+(?:_[a-z0-9]+)*")


@dataclass(frozen=True)
class Written:
    """A new pack's folder, and what of it could not be made, a line each."""

    folder: Path
    remarks: tuple[str, ...]


def folder_for(packs: Path, slug: str) -> Path:
    """Return the folder of a new pack: the next number that no pack has had.

    Raises:
        HarnessError: the slug cannot be a folder's name, or a pack has it.

    """
    if not SLUG.fullmatch(slug):
        raise HarnessError(f"{slug!r} is no slug. Next: lower-case letters, digits and _, such as liger_flce_none")
    taken = [match for path in packs.glob("*") if (match := load.FOLDER_PATTERN.fullmatch(path.name))]
    same = next((match for match in taken if match["slug"] == slug), None)
    if same is not None:
        raise HarnessError(f"{same[0]} is there already. Next: runner.py check {same[0]}, or another slug")
    number = max((int(match["number"]) for match in taken), default=0) + 1
    return packs / f"{number:02}_{slug}"


def title_of(draft: Draft, slug: str) -> str:
    """Return the first line of the script's docstring, else the slug in words."""
    said = draft.script.docstring.splitlines()[:1] if draft.script else []
    return said[0].strip().rstrip(".") if said else slug.replace("_", " ")


def write(folder: Path, draft: Draft, wanted_fix: str | None, tell: Callable[[str], None]) -> Written:
    """Write every file of a new pack.

    Args:
        folder: of it, not there yet.
        draft: what is known of it.
        wanted_fix: a patch's file or a commit of upstream; None: fix.patch is left to be written.
        tell: takes what is being done.

    Raises:
        HarnessError: something cannot be written.

    """
    title, remarks = title_of(draft, folder.name.partition("_")[2]), list(draft.remarks)
    folder.parent.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(prefix=".new-", dir=folder.parent))
    try:
        with tempfile.TemporaryDirectory(prefix="new-") as text:
            diff = _fix(draft, wanted_fix, Path(text), remarks, tell)
            mutant = _wrong_fix(draft, Path(text))
        loads = tuple(one.path for one in patch.parse(diff))
        written = {
            "requirements.in": draft.wanted,
            "requirements.txt": draft.pinned,
            "reproduce.py": probe_text.text(draft, title),
            "pack.toml": pack_text.definition(draft, title, loads),
            "report.in.md": pack_text.report(draft, title),
            "fix.patch": pack_text.fix(draft, diff) if diff else "",
            "mutants/whole/changes_nothing.patch": pack_text.wrong_fix(mutant) if mutant else "",
        }
        rules.parse(written["pack.toml"])  # a mistake of ours, or of the release's metadata, is found here
        for name, content in written.items():
            if content:
                files.write_atomic(made / name, content)
        made.chmod(0o755)
        made.rename(folder)
    finally:
        shutil.rmtree(made, ignore_errors=True)
    return Written(folder, tuple(remarks))


def _fix(draft: Draft, wanted: str | None, scratch: Path, remarks: list[str], tell: Callable[[str], None]) -> str:
    if wanted is None or draft.fix == Fix.NONE:
        return ""
    tell("putting upstream's fix on the release")
    for name in ("commit", "fix"):
        (scratch / name).mkdir()
    diff = fix.diff_of(wanted, draft.upstream.repository, scratch / "commit")
    try:
        return fix.on_release(draft.tree, draft.upstream, diff, scratch / "fix")
    except HarnessError as error:
        remarks.append(str(error))
        return ""


def _wrong_fix(draft: Draft, scratch: Path) -> str:
    file = draft.main_file
    if not file or draft.fix == Fix.NONE:
        return ""
    (scratch / "wrong").mkdir()
    return fix.wrong_fix(draft.tree, draft.upstream, file, scratch / "wrong")
