"""The reports of a pack: for whom each is, its template, and the text that is committed beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.pack.model import Pack
from harness.report import upstream_templates
from harness.report.template import Upstream

TEMPLATE, WRITTEN = "report{}.in.md", "REPORT{}.md"


@dataclass(frozen=True)
class Report:
    """One report.

    Attributes:
        name: of the upstream that reads it, as ``--for`` takes it; empty for one that is not known.
        template: ``report.in.md``: words, and placeholders for everything measured.
        written: ``REPORT.md``: what the template renders to from the committed receipts.

    """

    name: str
    template: Path
    written: Path

    @property
    def upstream(self) -> Upstream:
        """What its reader's own template asks for."""
        return upstream_templates.BY_NAME.get(self.name, upstream_templates.GENERIC)


def _report(pack: Pack, name: str, suffix: str) -> Report:
    return Report(name, pack.folder / TEMPLATE.format(suffix), pack.folder / WRITTEN.format(suffix))


def of_pack(pack: Pack) -> dict[str, Report]:
    """Map each upstream that a pack reports to, by name, to its report: the pack's own first."""
    definition = pack.definition
    own = upstream_templates.of_package(definition.report_to or definition.upstream.package).name
    names = {path.name.split(".", 2)[1] for path in pack.folder.glob("REPORT.?*.md")}
    names |= {path.name.split(".", 2)[1] for path in pack.folder.glob("report.?*.in.md")} - {"in"}
    return {own: _report(pack, own, "")} | {name: _report(pack, name, f".{name}") for name in sorted(names)}


def judged(pack: Pack) -> str:
    """Name the project whose tree the pack judges."""
    return upstream_templates.of_package(pack.definition.upstream.package).name
