"""The table of packs in README.md: written by the code, and never by hand."""

from __future__ import annotations

import re

import pytest

from harness.core.errors import HarnessError
from harness.core.words import ActionKind
from harness.report import advisories, packs_table
from testing.workbench import REPOSITORY

README = (REPOSITORY / "README.md").read_text(encoding="utf-8")


def test_the_readme_has_the_table_the_figure_and_the_first_run_that_receipts_give() -> None:
    assert packs_table.render_readme(README) == README, "python -m harness.report.packs_table"


def test_the_readme_opens_with_sentences_of_at_most_25_words() -> None:
    text = packs_table.first_figure(REPOSITORY / "packs").replace("**", "")
    sentences = re.split(r"(?<=[.:]) (?=[A-Z])", text.replace("\n", " "))
    assert len(sentences) == 3
    assert max(len(sentence.split()) for sentence in sentences) <= 25


def test_every_pack_stands_in_the_table_by_what_is_to_be_done_and_the_silent_bugs_first() -> None:
    packs = packs_table.every_pack()
    rows = [line for line in packs_table.text(packs).splitlines() if line.startswith("| [")]
    names = [match[1] for row in rows if (match := re.match(r"\| \[\d+\]\(packs/(\w+)\)", row))]
    assert sorted(names) == [pack.name for pack in packs]
    by_name = {pack.name: pack.definition for pack in packs}
    kinds = [[*ActionKind].index(action.kind) if (action := by_name[name].action) else -1 for name in names]
    assert kinds == sorted(kinds)
    silent = [by_name[name].kind in advisories.SILENT for name, kind in zip(names, kinds, strict=True) if kind == 0]
    assert silent == sorted(silent, reverse=True)


def test_a_readme_without_the_marks_is_refused() -> None:
    with pytest.raises(HarnessError, match="no marks of packs"):
        packs_table.replace_section("# Packs\n", "packs", "a table")
