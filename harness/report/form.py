"""The form of a report: its order, and what upstream has to read.

Above the line stands the text for upstream; below it, in the pack's README.md alone, how it was checked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from harness.core.words import ActionKind
from harness.pack.model import Pack

#: With this placeholder a template is in the form.
SCRIPT = "{{script}}"
LINE = "\n\n---\n"
HOW = "## How this was checked"
#: How each part begins, in the order of the form, and what stands in it.
PARTS = {
    SCRIPT: "",
    "**Cause.**": "",
    "**Fix.**": "",
    "**Related.**": "{{threads}}",
    "**Environment.**": "{{environment}}",
    "**Not tested.**": "",
}
#: Of a pack that asks upstream for nothing.
OPTIONAL = {"**Fix.**"}
CLOSED = (ActionKind.FIXED, ActionKind.NOTHING)
MOST_WORDS, MOST_LINES, MOST_THREADS = 300, 60, 3
#: Words of this repository's own: an upstream's reader knows none of them.
OURS = re.compile(
    r"\b\w*(?:CONFIRMED|REPRODUCED|VALIDATED)\b"
    r"|(?i:\b(?:strengths?|lanes?|evidence|probes?|packs?|contracts?|receipts?|mutants?|at first sight|against it)\b)"
)
FENCED = re.compile(r"(?ms)^(?P<fence>`{3,}|~{3,})(?P<language>\w*)[^\n]*\n.*?^(?P=fence)[ \t]*$")
CODE = re.compile(r"`[^`\n]*`")
URL = re.compile(r"(?<=\])\([^)\s]*\)|https?://\S+")
TAG = re.compile(r"</?(?:details|summary)>")
WORD = re.compile(r"\S*\w\S*")


def is_in(template: str) -> bool:
    """Whether a template is in the form."""
    return SCRIPT in template


def halves(template: str) -> tuple[str, str]:
    """Return what stands above the line and below it, without the heading: pack.toml has the title."""
    above, _, below = template.strip().partition(LINE)
    first, _, rest = above.partition("\n")
    return (rest if first.startswith("# ") else above).strip(), below.strip()


def above(text: str) -> str:
    """Return of a rendered report what stands above the line."""
    return text.partition(f"{LINE}\n{HOW}")[0]


def heading(pack: Pack) -> str:
    """Write the heading; below it, of a pack that asks upstream for nothing, why."""
    action = pack.definition.action
    closed = f"\n\n*{action.text}*" if action is not None and action.kind in CLOSED else ""
    return f"# {pack.definition.title}{closed}"


def template_errors(pack: Pack, template: str) -> Iterator[str]:
    """Say where a template leaves the order of the form."""
    yield from _title_errors(pack, template)
    above, below = halves(template)
    yield from _order_errors(pack, above)
    if not below.startswith(f"{HOW}\n") or "{{verdicts}}" not in below:
        yield f"below the line (---) stand {HOW} and {{{{verdicts}}}}"
    if len(pack.definition.threads) > MOST_THREADS:
        yield f"pack.toml has {len(pack.definition.threads)} threads; the {MOST_THREADS} that matter are enough"


def _title_errors(pack: Pack, template: str) -> Iterator[str]:
    action, title = pack.definition.action, pack.definition.title
    if action is None:
        yield "pack.toml has no [action]: kind is file, filed, fixed or nothing; text is one sentence"
    if template.startswith("# ") and template.partition("\n")[0] not in (f"# {title}", "# {{title}}"):
        yield "its heading is not the title of pack.toml; write # {{title}}"
    if title.startswith("["):
        yield "the title begins with a tag; a form of upstream adds its own"
    if pack.definition.upstream.version and pack.definition.upstream.version in title.split():
        yield "the title names a version; the environment has it"


def _order_errors(pack: Pack, above: str) -> Iterator[str]:
    action = pack.definition.action
    closed = action is not None and action.kind in CLOSED
    starts = {part: [match.start() for match in re.finditer(rf"(?m)^{re.escape(part)}", above)] for part in PARTS}
    for part, places in starts.items():
        if len(places) != 1 and not (closed and part in OPTIONAL and not places):
            yield f"{part} stands {len(places)} times at the beginning of a line above the line, not once"
    order = [places[0] for places in starts.values() if places]
    if order != sorted(order):
        yield f"its parts are in another order than {' '.join(PARTS)}"
    if not above.partition(SCRIPT)[0].strip():
        yield f"no sentence stands before {SCRIPT}: what is wrong, by how much, and when not"
    ends = [*sorted(order)[1:], len(above)]
    texts = {part: above[places[0] : ends[sorted(order).index(places[0])]] for part, places in starts.items() if places}
    yield from (f"{part} lacks {PARTS[part]}" for part, text in texts.items() if PARTS[part] not in text)
    if pack.definition.has_patch and not closed and "{{diff" not in texts.get("**Fix.**", "{{diff"):
        yield "**Fix.** lacks {{diff}}: the pack has a patch"


def prose(text: str) -> str:
    """Return a text without code, output, addresses and tags: what a person reads word by word."""
    for dropped in (FENCED, CODE, URL, TAG):
        text = dropped.sub("", text)
    return text


def text_errors(above: str) -> Iterator[str]:
    """Say what of a rendered report upstream would not read, or not understand."""
    words = len(WORD.findall(CODE.sub("x", TAG.sub("", URL.sub("", FENCED.sub("", above))))))
    if words > MOST_WORDS:
        yield f"{words} words beside code and output, more than {MOST_WORDS}"
    shown = FENCED.sub(lambda match: "" if match["language"] in ("python", "diff") else match[0], above)
    lines = len(shown.splitlines())
    if lines > MOST_LINES:
        yield f"{lines} lines beside script and diff, more than {MOST_LINES}"
    ours = dict.fromkeys(match[0] for match in OURS.finditer(prose(above)))
    yield from (f"{word!r} above the line is a word of this repository" for word in ours)
