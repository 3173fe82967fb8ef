"""docs/releases.svg: which releases of each upstream have which bug, as far as they were judged; a test compares it.

``python -m harness.report.packs_table`` writes it, with README's tables. Shapes say what colours say, and both have a
light and a dark form with a background of its own, so that it can be read whatever the page around it looks like.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from xml.sax.saxutils import escape

from packaging.version import Version

from harness.core.words import LaneVerdict
from harness.pack.model import Pack
from harness.report import advisories
from harness.versions.timeline import RIGHT, WRONG

#: Pixels: where kinds begin, where releases do, how far these are apart, the height of a row, the page's edge.
KINDS, RELEASES, STEP, ROW, EDGE = 240, 362, 56, 24, 16
#: Releases of one upstream, the newest that were judged; how many there are stands beside its name.
MOST = 10
LEGEND = "the release has the bug", "it is right", "could not be judged, or was not"
STYLE = """
svg { font: 13px system-ui, sans-serif; }
.page { fill: #ffffff; } text { fill: #1f2328; } .quiet { fill: #59636e; } .head { font-weight: 600; }
.release { fill: #59636e; font-size: 11px; }
.line { stroke: #d1d9e0; } .wrong { fill: #b3261e; } .right { fill: none; stroke: #1a7f37; stroke-width: 2.5; }
.unknown { fill: #818b98; }
@media (prefers-color-scheme: dark) {
.page { fill: #0d1117; } text { fill: #f0f6fc; } .quiet, .release { fill: #9198a1; }
.line { stroke: #3d444d; } .wrong { fill: #ff7b72; } .right { stroke: #3fb950; } .unknown { fill: #656c76; }
}
"""


@dataclass(frozen=True)
class Row:
    """One bug: its pack, the upstream, the kind, and what was found of each release that was tried."""

    pack: str
    upstream: str
    kind: str
    verdicts: dict[str, LaneVerdict]


def rows(packs: Iterable[Pack]) -> list[Row]:
    """List the bugs that releases have, by upstream and number of the pack."""
    found = []
    for pack in packs:
        if advisories.document(pack) is not None:
            lanes = advisories.known(pack).lanes
            verdicts = {version: advisories.decisive(some).verdict for version, some in lanes.items()}
            found.append(Row(pack.name, pack.definition.upstream.package, str(pack.definition.kind), verdicts))
    return sorted(found, key=lambda row: (row.upstream, row.pack))


def columns(of_upstream: list[Row]) -> list[str]:
    """List every release that one bug at least could be judged on, the oldest first."""
    judged = {version for row in of_upstream for version, said in row.verdicts.items() if said in (WRONG, RIGHT)}
    return sorted(judged, key=Version)


def drawing(found: list[Row]) -> str:
    """Draw the bugs of every upstream below each other."""
    blocks = [(name, list(some)) for name, some in groupby(found, key=lambda row: row.upstream)]
    most = max((len(columns(some)) for _, some in blocks), default=1)
    width = RELEASES + min(most, MOST) * STEP + EDGE
    parts, height = [_legend(EDGE + ROW // 2)], EDGE + 2 * ROW
    for name, some in blocks:
        parts.append(_block(name, some, height, width))
        height += (len(some) + 1) * ROW + ROW // 2
    opening = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    )
    title = "Which releases have which bug, as far as they were judged"
    page = f'<rect class="page" width="{width}" height="{height}" rx="6"/>'
    return "\n".join(
        [f'{opening} role="img">', f"<title>{title}</title>", f"<style>{STYLE}</style>", page, *parts, "</svg>\n"]
    )


def _legend(middle: int) -> str:
    parts, left = [], EDGE + 6
    for said, text in zip((WRONG, RIGHT, LaneVerdict.UNSUPPORTED), LEGEND, strict=True):
        parts += [_mark(said, left, middle), _text(text, left + 14, middle, "quiet")]
        left += 40 + 7 * len(text)
    return "\n".join(parts)


def _block(name: str, of_upstream: list[Row], top: int, width: int) -> str:
    """Draw the rows of one upstream below the names of its releases."""
    every, middle = columns(of_upstream), top + ROW // 2
    releases = every[-MOST:]
    parts = [_text(name, EDGE, middle, "head")]
    if len(every) > MOST:
        parts.append(_text(f"{MOST} of {len(every)} judged", KINDS, middle, "quiet"))
    parts += [_text(version, _center(place), middle, "release", "middle") for place, version in enumerate(releases)]
    parts.append(f'<line class="line" x1="{EDGE}" x2="{width - EDGE}" y1="{top + ROW}" y2="{top + ROW}"/>')
    for row in of_upstream:
        middle += ROW
        parts += [_text(row.pack, EDGE, middle), _text(row.kind, KINDS, middle, "quiet")]
        parts += [_of(row, version, place, middle) for place, version in enumerate(releases)]
    return "\n".join(parts)


def _of(row: Row, version: str, place: int, middle: int) -> str:
    return _mark(row.verdicts.get(version, LaneVerdict.UNSUPPORTED), _center(place), middle)


def _center(place: int) -> int:
    return RELEASES + place * STEP + STEP // 2


def _mark(said: LaneVerdict, x: int, y: int) -> str:
    """Draw a verdict: a full square, a ring, or a small dot."""
    if said == WRONG:
        return f'<rect class="wrong" x="{x - 6}" y="{y - 6}" width="12" height="12"/>'
    if said == RIGHT:
        return f'<circle class="right" cx="{x}" cy="{y}" r="5"/>'
    return f'<circle class="unknown" cx="{x}" cy="{y}" r="2"/>'


def _text(text: str, x: int, y: int, style: str = "", anchor: str = "start") -> str:
    kind = f' class="{style}"' if style else ""
    return f'<text{kind} x="{x}" y="{y}" dy=".35em" text-anchor="{anchor}">{escape(text)}</text>'
