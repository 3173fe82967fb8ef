"""The reports of a pack: for whom each is, its template, and the text that is committed beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from harness.pack.model import Pack
from harness.report import form, upstream_templates
from harness.report.template import Upstream

TEMPLATE, WRITTEN = "report{}.in.md", "REPORT{}.md"
#: What a template in the form is written to.
PAGE = "README.md"


@dataclass(frozen=True)
class Report:
    """One report.

    Attributes:
        name: of the upstream that reads it, as ``--for`` takes it; empty for one that is not known.
        template: ``report.in.md``: words, and placeholders for everything measured.
        written: what the template renders to from the committed receipts: ``README.md`` of one in the form.
        in_form: whether the template is in the form that upstream reads.

    """

    name: str
    template: Path
    written: Path
    in_form: bool = False

    @property
    def upstream(self) -> Upstream:
        """What its reader's own template asks for."""
        return upstream_templates.BY_NAME.get(self.name, upstream_templates.GENERIC)


def _report(pack: Pack, name: str, suffix: str) -> Report:
    template = pack.folder / TEMPLATE.format(suffix)
    in_form = template.is_file() and form.is_in(template.read_text(encoding="utf-8", errors="replace"))
    return Report(name, template, pack.folder / (PAGE if in_form else WRITTEN.format(suffix)), in_form)


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
