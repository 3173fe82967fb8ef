"""What an upstream's own issue template asks for, whatever form it has."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.author import issue_template
from harness.core.errors import HarnessError

MARKDOWN = """---
name: Bug report
about: A bug
---
<!-- words -->
## Describe the bug
text
**Expected behavior**
A clear **word** in a line.
### Environment:
"""
FORM = """name: Bug
body:
  - type: markdown
    attributes:
      value: "label: none"
  - type: checkboxes
    attributes:
      label: Ticks
  - type: textarea
    id: what
    attributes:
      label: 'What happened?'
    validations:
      required: true
  - type: dropdown
    attributes:
      label: Backend
"""


def test_headings_of_markdown_and_labels_of_a_form(tmp_path: Path) -> None:
    (tmp_path / "bug.md").write_text(MARKDOWN)
    assert issue_template.headings(tmp_path / "bug.md") == ["Describe the bug", "Expected behavior", "Environment"]
    (tmp_path / "bug.yml").write_text(FORM)
    assert issue_template.headings(tmp_path / "bug.yml") == ["What happened?", "Backend"]


def test_it_is_found_in_a_checkout(tmp_path: Path) -> None:
    folder = tmp_path / ".github/ISSUE_TEMPLATE"
    folder.mkdir(parents=True)
    for name in ("config.yml", "feature.yml", "bug_report.yml"):
        (folder / name).write_text(FORM)
    assert issue_template.find(tmp_path) == folder / "bug_report.yml"


@pytest.mark.parametrize("text", ["", "words alone\n", "\x00\xff"])
def test_what_asks_for_nothing_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "bug.md").write_text(text)
    with pytest.raises(HarnessError, match="neither headings nor fields"):
        issue_template.headings(tmp_path / "bug.md")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HarnessError, match="no template of a bug report"):
        issue_template.find(tmp_path / "empty")
