"""What a pull request's comment says of a change: three lines of Markdown for each pack.

The code under test ran in the process that printed these names, reasons and figures: they are shown as code, in which
no mention, link or tag comes to life.
"""

from __future__ import annotations

import re

from harness.core import markdown
from harness.core.words import Kind, LaneVerdict, Role
from harness.receipt import figures, strength
from harness.receipt.redaction import PrivateTextError, Scrubber
from harness.report import links
from harness.upstream.source import GIT_PATTERN, commit_of
from harness.verdict import change, pack_verdict
from harness.verdict.change import Side
from harness.versions.two_trees import BASE, HEAD, Compared, Trees

SHA = re.compile(r"\b[0-9a-f]{40}\b")
#: Checks of one line: more are counted.
MOST_NAMES = 6
#: How a text names this repository while it has no address.
NAMELESS = "the repository of this pack"
WORDS = "README.md#what-a-verdict-says"
#: What a lane printed before it ended so is shown by nobody.
UNJUDGED = (LaneVerdict.UNSUPPORTED, LaneVerdict.ERROR)
#: A cleanup is no bug: what its two words mean, and the sentences that speak of one.
CLEANUP_WORDS = {LaneVerdict.BUG_REPRODUCED: "shown", LaneVerdict.FIX_VALIDATED: "gone"}
CLEANUP_SENTENCES = {
    change.FIXES.sentence: "this change removes it",
    change.NO_FIX.sentence: "this change leaves it as it was",
    change.BOTH_RIGHT.sentence: "it is in neither",
    change.PARTLY_FIXED.sentence: "this change removes only a part of it",
}


def text(found: list[Compared], trees: Trees, scrub: Scrubber) -> str:
    """Write what all packs say."""
    return "\n".join(f"{_verdict(one, scrub)}\n- {_trees(one, trees, scrub)}\n- {_strength(one)}\n" for one in found)


def _verdict(one: Compared, scrub: Scrubber) -> str:
    """Write which bug this is about, both verdicts, and what they say of the change."""
    definition, said = one.pack.definition, one.change
    words = [f"{name}: {_word(one, side)}" for name, side in ((BASE, one.base), (HEAD, one.head))]
    names = f": {_names(said.names, scrub)}" if said.names else ""
    page = one.pack.report if one.pack.report.exists() else one.pack.probe
    pack = links.to(f"packs/{one.pack.name}/{page.name}")
    sentence = CLEANUP_SENTENCES.get(said.sentence, said.sentence) if definition.kind == Kind.CLEANUP else said.sentence
    about = f"{definition.title} ({definition.kind}, {one.target}, {one.evidence})"
    return f"{pack}: {about}. {', '.join(words)}: **{sentence}**{names}."


def _word(one: Compared, side: Side) -> str:
    if one.pack.definition.kind == Kind.CLEANUP:
        word = CLEANUP_WORDS.get(side.verdict, side.verdict.lower().replace("_", " "))
    else:
        word = f"`{side.verdict}`"
    return links.named(word, WORDS)


def _names(names: tuple[str, ...], scrub: Scrubber) -> str:
    shown = [_clean(name, scrub) for name in names[:MOST_NAMES]]
    more = len(names) - len(shown)
    return ", ".join([*shown, *([f"{more} more"] if more else [])])


def _clean(text: str, scrub: Scrubber) -> str:
    """Write text from a lane as code; one that still looks private is withheld."""
    try:
        return markdown.code(scrub.document(text, "it"))
    except PrivateTextError as error:
        return f"(withheld: it holds {str(error).partition(' holds ')[2].partition('.')[0]})"


def _trees(one: Compared, trees: Trees, scrub: Scrubber) -> str:
    """Write what the two trees are, and what was measured."""
    sides = ((BASE, one.base, trees.base), (HEAD, one.head, trees.head))
    parts = [", ".join(f"{name} is {_tree(side.version, spec)}" for name, side, spec in sides)]
    for name, side, _ in sides:
        if side.verdict in UNJUDGED:
            parts.append(f"{name}: {_clean(side.reason or 'no reason', scrub)}")
            continue
        wrong = change.failed(side.record, Role.DEFECT) + change.failed(side.record, Role.CONTROL)
        parts += [f"wrong in {name}: {_names(wrong, scrub)}"] if wrong else []
    base, head = (side.record if side.verdict not in UNJUDGED else None for _, side, _ in sides)
    figure = figures.leading(one.pack.definition.leading_figure, base, head)
    parts += [f"{_clean(figure, scrub)}{'' if base and head else f' ({BASE if base else HEAD})'}"] if figure else []
    differing = pack_verdict.differing_outputs(base, head) if base and head else []
    if differing:
        parts.append(f"outputs that differ bit for bit between the two: {_names(tuple(differing), scrub)}")
    return "; ".join(parts) + "."


def _tree(version: str, spec: str) -> str:
    """Name a tree by its commit, with a link where nothing else is in it."""
    match = SHA.search(version)
    if match is None:
        known = {"": "not to be had", "path": "a folder that states no commit"}
        return known.get(version) or markdown.code(version)
    if not commit_of(version):
        return f"{markdown.code(match[0][:12])} with modified files"
    git = GIT_PATTERN.fullmatch(spec)
    return f"commit {links.commit(match[0], git['url'] if git else '')}"


def _strength(one: Compared) -> str:
    """Say how strong the verdict is, what the words say, and how to see it again."""
    folder = f"packs/{one.pack.name}"
    probe = links.to(f"{folder}/{one.pack.probe.name}")
    found = strength.find(one.pack, one.target, one.evidence)
    if found is None:
        said = f"Strength of {probe}: {strength.nothing(one.pack)}"
    else:
        record = links.named(found.date, f"{folder}/receipts/{strength.file_name(one.target, one.evidence)}")
        stale = ", STALE" if strength.is_visibly_stale(one.pack, found) else ""
        said = f"Strength: {probe} refused {found.whole.killed} of {found.whole.of} wrong fixes, {record}{stale}"
    call = markdown.code(
        f"runner.py pr-verdict {one.pack.name} --base path:BASE --head path:HEAD --target {one.target}"
    )
    return f"{said}. Again, in a clone of {links.repository_url() or NAMELESS}: {call}."
