"""What a template of an upstream is made of."""

from __future__ import annotations

from dataclasses import dataclass

REPORT, RECEIPT, HUMAN = "REPORT.md", "receipt", "you"


@dataclass(frozen=True)
class Section:
    """One part of a template.

    Attributes:
        label: as the template writes it; a heading of REPORT.md that contains it, or one of `also`, is that part.
        source: who fills it: the pack's report, the receipt, or only a human.
        facts: for a receipt's part, what it lists: the template's word, and the name of the fact in `facts.py`.
        ticks: for a human's part, what he has to have done, in our words.
        required: whether the template marks it so, or has no way of marking.
        also: other headings that are accepted for it.

    """

    label: str
    source: str = REPORT
    facts: tuple[tuple[str, str], ...] = ()
    ticks: tuple[str, ...] = ()
    required: bool = True
    also: tuple[str, ...] = ()


@dataclass(frozen=True)
class Upstream:
    """One upstream: its name on the command line and in ``REPORT.<name>.md``, its packages, and what it asks for.

    Attributes:
        name: empty for the form that serves an upstream which is not known.
        packages: as the package index calls them.
        templates: where they stand in its repository, and the commit at which they were read.
        sections: of its bug report.
        regression: of its own form for regressions, where it has one.
        duties: what only the author of a pull request can do.

    """

    name: str
    packages: tuple[str, ...]
    templates: str
    sections: tuple[Section, ...]
    duties: tuple[str, ...]
    regression: tuple[Section, ...] = ()
