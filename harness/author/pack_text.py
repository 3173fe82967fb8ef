"""pack.toml, the report's template and the first wrong fix of a new pack."""

from __future__ import annotations

import json

from harness.author.draft import Draft
from harness.author.probe_text import OPEN
from harness.core.words import Evidence, Fix, Verdict
from harness.pack.model import CPU
from harness.pack.rules import SCHEMA

UNCHECKED = "nothing has compared it with the release's tag: take this line out once something has"
WRONG = "It adds a comment alone, so the bug is still there."


def definition(draft: Draft, title: str, loads: tuple[str, ...]) -> str:
    """Write pack.toml; `loads` are the files that fix.patch changes, none where it is still to be written."""
    upstream = draft.upstream
    lines = [
        f"schema = {SCHEMA}",
        f"title = {_text(title)}",
        f"kind = {_text(draft.kind)}",
        *([] if draft.fix == Fix.PATCH else [f"fix = {_text(draft.fix)}  # {_why_no_patch(draft)}"]),
        "# The name of one FIGURE line of the probe: the number that tables show. Empty until the probe measures one.",
        'leading_figure = ""',
        "",
        "[upstream]",
        f"package = {_text(upstream.package)}",
        f"version = {_text(upstream.version)}",
        f"file = {_text(upstream.file)}",
        f"sha256 = {_text(upstream.sha256)}",
        *([f"url = {_text(upstream.url)}"] if upstream.url else []),
        f"repository = {_text(upstream.repository or f'https://example.org/{OPEN}')}",
        "# Of the release's tag: git ls-remote --tags REPOSITORY",
        f"commit = {_text(upstream.commit)}",
        *([f"commit_unchecked = true  # {UNCHECKED}"] if upstream.commit_unchecked else []),
        "# The folder of the repository that goes on PYTHONPATH; empty: its root.",
        f"source_root = {_text(upstream.source_root)}",
        f"license = {_text(upstream.license or OPEN)}",
        "# The import names under test: a lane refuses a module of these that comes from anywhere but its tree.",
        f"modules = [{', '.join(map(_text, upstream.modules))}]",
        "",
        "[action]",
        'kind = "file"',
        f'text = "Open an issue at {upstream.repository or OPEN}."',
        "",
        "[requires]  # the runner's own interpreter has to lie in these",
        f"python = {_text(draft.requires.python)}",
        f"torch = {_text(draft.requires.torch)}",
        *([f"triton = {_text(draft.requires.triton)}"] if draft.requires.triton else []),
    ]
    for target in draft.targets:
        lines += ["", *_target(draft, target, loads)]
    return "\n".join(lines) + "\n"


def _why_no_patch(draft: Draft) -> str:
    if draft.upstream.is_compiled:
        return "the wheel's code is compiled: nothing can be patched"
    return 'nobody has one yet; with a fix.patch take this out, and state verdict = "CONFIRMED" and loads'


def _target(draft: Draft, target: str, loads: tuple[str, ...]) -> list[str]:
    evidence = draft.cpu_evidence if target == CPU else Evidence.EXECUTED
    files = ", ".join(map(_text, loads))
    said = (
        "The files that fix.patch changes and this target runs, by their paths in the repository: a patched lane that"
    )
    return [
        f"[targets.{target}]",
        f"evidence = [{_text(evidence)}]",
        f"verdict = {_text(Verdict.CONFIRMED if draft.fix == Fix.PATCH else Verdict.REPRODUCED)}",
        *([f"# {said}", "# never loaded one of them proves nothing."] if draft.fix == Fix.PATCH else []),
        f"loads = [{files}]",
    ]


def _text(value: str) -> str:
    return json.dumps(value, ensure_ascii=False)


def report(draft: Draft, title: str) -> str:
    """Write report.in.md: what the runner fills in, and the sentences that only its author can write."""
    ran = f"On target cpu ({draft.cpu_evidence}) {draft.ran_on_cpu}."
    patch = f"**Fix.** {OPEN}: what the patch does.\n\n{{{{diff}}}}" if draft.fix == Fix.PATCH else ""
    parts = [
        f"# {title}",
        f"{OPEN}: the wrong and the right number, in one sentence, and when it does not happen.",
        "{{script}}",
        "It ends in {{check:cpu:script}}." if draft.script else "",
        f"**Cause.** {OPEN}: the lines that do it, with a permalink.",
        patch,
        "**Related.**\n\n{{threads}}",
        "**Environment.** {{environment}}",
        f"**Not tested.** {OPEN}: what nobody ran.",
        "---",
        "## How this was checked",
        f"{ran}\n\n{{{{verdicts}}}}",
    ]
    return "\n\n".join(filter(None, parts)) + "\n"


def fix(draft: Draft, diff: str) -> str:
    """Write fix.patch: the head that its author fills in, and the diff."""
    licence = f"SPDX-License-Identifier: {draft.upstream.license}"
    head = f"Subject: {OPEN}: what the patch does\n\n{OPEN}: why.\n\n{licence}\n---\n"
    return head + diff


def wrong_fix(diff: str) -> str:
    """Write a mutant: why it is wrong, and its diff."""
    return f"{WRONG}\n\n{diff}"
