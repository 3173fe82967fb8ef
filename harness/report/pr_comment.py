"""The comment on a pull request about a change: three lines of Markdown for each pack.

The code under test ran in the process that printed these names, reasons and figures. They are shown as code, so that no
mention, link or tag in them takes effect.
"""

from harness.core import LaneVerdict, Role, markdown
from harness.lane.results import check_names
from harness.receipt import figures, strength
from harness.receipt.redaction import Scrubber
from harness.report import links
from harness.upstream.source import commit_of
from harness.verdict import pack_verdict
from harness.verdict.change import BASE, HEAD, Compared

#: Names of checks in one line; further checks are counted.
MOST_NAMES = 6
#: The name of this repository while it has no address.
NAMELESS = "the repository of this pack"
#: Verdicts of a lane whose checks and figures are not shown.
UNJUDGED = (LaneVerdict.UNSUPPORTED, LaneVerdict.ERROR)


def text(comparisons: list[Compared], scrub: Scrubber) -> str:
    """Write the lines of all packs."""
    return "\n".join(
        f"{_verdict_line(comparison, scrub)}\n- {_trees_line(comparison, scrub)}\n- {_strength_line(comparison)}\n"
        for comparison in comparisons
    )


def _verdict_line(comparison: Compared, scrub: Scrubber) -> str:
    definition, result = comparison.pack.definition, comparison.change
    words = [f"{name}: `{side.verdict}`" for name, side in ((BASE, comparison.base), (HEAD, comparison.head))]
    names = f": {_name_list(result.names, scrub)}" if result.names else ""
    page = comparison.pack.report if comparison.pack.report.exists() else comparison.pack.script
    pack = links.link(f"packs/{comparison.pack.name}/{page.name}")
    about = f"{definition.title} ({definition.kind}, {comparison.target}, {comparison.evidence})"
    return f"{pack}: {about}. {', '.join(words)}: **{result.sentence}**{names}."


def _name_list(names: tuple[str, ...], scrub: Scrubber) -> str:
    spans = [_as_code(name, scrub) for name in names[:MOST_NAMES]]
    omitted = len(names) - len(spans)
    return ", ".join([*spans, *([f"{omitted} more"] if omitted else [])])


def _as_code(text: str, scrub: Scrubber) -> str:
    """Write text from a lane as code; private text is withheld."""
    scrubbed = scrub.scrub(text)
    label = next(scrub.findings(scrubbed), "")
    return f"(withheld: it holds {label})" if label else markdown.code(scrubbed)


def _trees_line(comparison: Compared, scrub: Scrubber) -> str:
    sides = ((BASE, comparison.base), (HEAD, comparison.head))
    parts = [", ".join(f"{name} is {_tree_name(side.version)}" for name, side in sides)]
    for name, side in sides:
        if side.verdict in UNJUDGED:
            parts.append(f"{name}: {_as_code(side.reason or 'no reason', scrub)}")
            continue
        checks = side.record.checks if side.record else ()
        wrong_names = check_names(checks, Role.DEFECT, ok=False) + check_names(checks, Role.CONTROL, ok=False)
        parts += [f"wrong in {name}: {_name_list(wrong_names, scrub)}"] if wrong_names else []
    base, head = (side.record if side.verdict not in UNJUDGED else None for _, side in sides)
    figure = figures.leading(comparison.pack.definition.leading_figure, base, head)
    parts += [f"{_as_code(figure, scrub)}{'' if base and head else f' ({BASE if base else HEAD})'}"] if figure else []
    outputs = pack_verdict.differing_outputs(base, head) if base and head else []
    if outputs:
        parts.append(f"outputs that differ bit for bit between the two: {_name_list(tuple(outputs), scrub)}")
    return "; ".join(parts) + "."


def _tree_name(version: str) -> str:
    """Name a tree by its commit where it holds the commit unchanged; GitHub makes a link of the digits."""
    names = {"": "not to be had", "path": "a folder that states no commit"}
    return f"commit {commit_of(version)[:12]}" if commit_of(version) else names.get(version) or markdown.code(version)


def _strength_line(comparison: Compared) -> str:
    pack, target = comparison.pack, comparison.target
    script = links.link(f"packs/{pack.name}/{pack.script.name}")
    summary = strength.summary(pack, target, comparison.evidence)
    call = markdown.code(f"runner.py pr-verdict {pack.name} --base path:BASE --head path:HEAD --target {target}")
    repository = links.repository_url() or NAMELESS
    return f"Mutants that {script} refused: {summary}. Again, in a clone of {repository}: {call}."
