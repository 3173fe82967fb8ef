"""What a pull request's comment says of a change: three lines of Markdown for each pack.

The code under test ran in the process that printed these names, reasons and figures: they are shown as code, in which
no mention, link or tag comes to life.
"""

from __future__ import annotations

from harness.core import markdown
from harness.core.words import LaneVerdict, Role
from harness.receipt import figures, strength
from harness.receipt.redaction import PrivateTextError, Scrubber
from harness.report import links
from harness.upstream.source import commit_of
from harness.verdict import change, pack_verdict
from harness.versions.two_trees import BASE, HEAD, Compared

#: Checks of one line: more are counted.
MOST_NAMES = 6
#: How a text names this repository while it has no address.
NAMELESS = "the repository of this pack"
#: What a lane printed before it ended so is shown by nobody.
UNJUDGED = (LaneVerdict.UNSUPPORTED, LaneVerdict.ERROR)


def text(found: list[Compared], scrub: Scrubber) -> str:
    """Write what all packs say."""
    return "\n".join(f"{_verdict(one, scrub)}\n- {_trees(one, scrub)}\n- {_strength(one)}\n" for one in found)


def _verdict(one: Compared, scrub: Scrubber) -> str:
    """Write which bug this is about, both verdicts, and what they say of the change."""
    definition, said = one.pack.definition, one.change
    words = [f"{name}: `{side.verdict}`" for name, side in ((BASE, one.base), (HEAD, one.head))]
    names = f": {_names(said.names, scrub)}" if said.names else ""
    page = one.pack.report if one.pack.report.exists() else one.pack.probe
    pack = links.to(f"packs/{one.pack.name}/{page.name}")
    about = f"{definition.title} ({definition.kind}, {one.target}, {one.evidence})"
    return f"{pack}: {about}. {', '.join(words)}: **{said.sentence}**{names}."


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


def _trees(one: Compared, scrub: Scrubber) -> str:
    """Write what the two trees are, and what was measured."""
    sides = ((BASE, one.base), (HEAD, one.head))
    parts = [", ".join(f"{name} is {_tree(side.version)}" for name, side in sides)]
    for name, side in sides:
        if side.verdict in UNJUDGED:
            parts.append(f"{name}: {_clean(side.reason or 'no reason', scrub)}")
            continue
        wrong = change.failed(side.record, Role.DEFECT) + change.failed(side.record, Role.CONTROL)
        parts += [f"wrong in {name}: {_names(wrong, scrub)}"] if wrong else []
    base, head = (side.record if side.verdict not in UNJUDGED else None for _, side in sides)
    figure = figures.leading(one.pack.definition.leading_figure, base, head)
    parts += [f"{_clean(figure, scrub)}{'' if base and head else f' ({BASE if base else HEAD})'}"] if figure else []
    differing = pack_verdict.differing_outputs(base, head) if base and head else []
    if differing:
        parts.append(f"outputs that differ bit for bit between the two: {_names(tuple(differing), scrub)}")
    return "; ".join(parts) + "."


def _tree(version: str) -> str:
    """Name a tree by its commit where nothing else is in it; GitHub makes a link of its digits."""
    known = {"": "not to be had", "path": "a folder that states no commit"}
    return f"commit {commit_of(version)[:12]}" if commit_of(version) else known.get(version) or markdown.code(version)


def _strength(one: Compared) -> str:
    """Say how strong the verdict is, what the words say, and how to see it again."""
    folder = f"packs/{one.pack.name}"
    probe = links.to(f"{folder}/{one.pack.probe.name}")
    said = f"Mutants that {probe} refused: {strength.summary(one.pack, one.target, one.evidence)}"
    call = markdown.code(
        f"runner.py pr-verdict {one.pack.name} --base path:BASE --head path:HEAD --target {one.target}"
    )
    return f"{said}. Again, in a clone of {links.repository_url() or NAMELESS}: {call}."
