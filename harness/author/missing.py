"""What a half-written pack still lacks, in the order in which it is done."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from harness.author.probe_text import OPEN
from harness.core.errors import HarnessError
from harness.pack.model import Pack
from harness.receipt import receipt

#: A place that only the author can fill: `TODO: the lines that do it.`
PLACE = re.compile(rf"(?P<label>\b\w+: )?\b{OPEN}\b[:. ]*(?P<what>[^\n\"]*)")
#: What is said of a place that has no more than the word.
NOTHING_SAID = f"{OPEN} still stands there"
#: Before what an issue needs, and before what this repository asks besides.
TO_FILE, TO_ADMIT = "to file an issue: ", "to be admitted here: "
CONTROLS = re.compile(r'probe\.(?:judge|check)\("(?P<name>[^"]+)", "control"')
#: Findings of `check` on a new pack that a step says already.
TOLD = re.compile(r"fix\.patch is missing|report\.in\.md: |README\.md: missing|[a-z0-9_]+: no receipt\.")


def is_new(pack: Pack) -> bool:
    """Whether a pack was never recorded: then its steps say what its report and receipts lack."""
    return not any(receipt.paths(pack.receipts))


def is_half_written(pack: Pack) -> bool:
    """Whether a pack still lacks what no whole one does: text, its patch, its commit, or its report and receipts."""
    upstream, folder = pack.definition.upstream, pack.folder
    if (pack.definition.has_patch and not pack.patch.exists()) or not (upstream.commit or upstream.is_compiled):
        return True
    if upstream.commit and upstream.commit_unchecked:
        return True
    texts = [folder / "reproduce.py", folder / "fix.patch", folder / "report.in.md"]
    if (
        any(path.exists() and OPEN in _opening(path) for path in texts)
        or OPEN in upstream.license + upstream.repository
    ):
        return True
    return not pack.report.exists() and is_new(pack)


def _opening(path: Path) -> str:
    """Return what an author writes of a file: not a patch's diff, nor the code of a probe below its protocol block."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".patch":
        return text.partition("diff --git ")[0]
    return text


def steps(pack: Pack) -> list[str]:
    """List what is missing, one line each, the next step first: what an issue needs, then what this repository asks."""
    text = pack.probe.read_text(encoding="utf-8", errors="replace") if pack.probe.exists() else None
    if text is None:
        return [f"{TO_FILE}reproduce.py: the probe. Next: CONTRIBUTING.md, step 3"]
    filed = [*_script(text), *_patch(pack), *_asked(pack), *_report(pack), *_shown(pack)]
    admitted = [*_control(text), *(f"reproduce.py: {what}" for what in _places(text)), *_commit_message(pack)]
    admitted += [*_definition(pack), *_mutants(pack), *_receipts(pack)]
    return [*(f"{TO_FILE}{one}" for one in filed), *(f"{TO_ADMIT}{one}" for one in admitted)]


def _script(text: str) -> Iterator[str]:
    if f'NotImplementedError("{OPEN}:' in text:
        yield "reproduce.py: script() holds nothing yet: the lines that fail while the bug is there"


def _control(text: str) -> Iterator[str]:
    if {match["name"] for match in CONTROLS.finditer(text)} == {"repeats"}:
        yield (
            "reproduce.py: a control of its own: a neighbouring path that is right with and without the patch, and "
            "would be wrong if the probe were broken"
        )


def _places(text: str) -> list[str]:
    found = (f"{match['label'] or ''}{match['what'] or NOTHING_SAID}".strip() for match in PLACE.finditer(text))
    return [one for one in dict.fromkeys(found) if not one.startswith("the lines that fail")]


def _patch(pack: Pack) -> Iterator[str]:
    if pack.definition.has_patch and not pack.patch.exists():
        yield (
            "fix.patch: the fix, made with git diff --full-index (where nobody has one: runner.py new --no-fix). Next, "
            f"with it: runner.py run {pack.name}"
        )


def _commit_message(pack: Pack) -> Iterator[str]:
    if not pack.definition.has_patch:
        return
    if pack.patch.exists() and OPEN in _opening(pack.patch):
        yield "fix.patch: its subject, and why it is right, in the words of a commit"
    for name, target in pack.definition.targets.items():
        if not target.loads:
            yield f"pack.toml: targets.{name}.loads: the files that fix.patch changes and this target runs"


def _asked(pack: Pack) -> Iterator[str]:
    definition = pack.definition
    asked = "".join(path.read_text(encoding="utf-8", errors="replace") for path in pack.folder.glob("report*.in.md"))
    if definition.searched is None and ("{{threads}}" in asked or "{{searched}}" in asked):
        yield "pack.toml: searched, and [[threads]]: what upstream has already. CONTRIBUTING.md has the form"
    if definition.ask is None and "{{ask}}" in asked:
        yield "pack.toml: [ask]: the one thing that the maintainer is asked to do"


def _shown(pack: Pack) -> Iterator[str]:
    """Say how the issue is written, of a pack that has no receipts of its own yet."""
    if is_new(pack):
        yield f"the issue itself. Next: runner.py run {pack.name}, then runner.py report {pack.name} --from last"


def _definition(pack: Pack) -> Iterator[str]:
    definition = pack.definition
    upstream, no_repository = definition.upstream, OPEN in definition.upstream.repository
    if no_repository:
        yield "pack.toml: upstream.repository: its URL"
    if not upstream.commit and not upstream.is_compiled:
        listed = "" if no_repository else f". Next: git ls-remote --tags {upstream.repository}"
        yield f"pack.toml: upstream.commit: that of the release's tag{listed}"
    elif upstream.commit and upstream.commit_unchecked:
        yield "pack.toml: upstream.commit: compare it with the release's tag, then take commit_unchecked out"
    if OPEN in upstream.license or not upstream.license:
        yield "pack.toml: upstream.license: as SPDX names it"
    if not definition.leading_figure:
        yield 'pack.toml: leading_figure: the name of one FIGURE line, once the probe says probe.say("FIGURE", ...)'


def _mutants(pack: Pack) -> Iterator[str]:
    own = {path.name for path in (pack.folder / "mutants").rglob("*.patch")}
    if pack.definition.has_patch and own <= {"changes_nothing.patch"}:
        yield f"mutants/: wrong fixes that a tired engineer could write. Next: runner.py mutate {pack.name}"


def _report(pack: Pack) -> Iterator[str]:
    template = pack.report_template
    if not template.exists():
        yield f"{template.name}: the report's template. Next: CONTRIBUTING.md, Reports"
        return
    for what in _places(template.read_text(encoding="utf-8", errors="replace")):
        yield f"{template.name}: {what}"


def _receipts(pack: Pack) -> Iterator[str]:
    try:
        there = {one.target for one in receipt.load_all(pack.receipts, lanes=False)}
    except HarnessError:
        return  # told with the receipts themselves
    for name in pack.definition.targets:
        if name not in there:
            yield f"{name}: no receipt. Next: runner.py run {pack.name} --target {name} --record"
    if pack.report_template.exists() and not pack.report.exists():
        yield f"{pack.report.name}. Next: runner.py report {pack.name} --write"
