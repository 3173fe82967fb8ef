"""What a release states of itself, in the ways in which releases do."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness.author import release
from harness.core.errors import UnavailableError


def _read(folder: Path, *lines: str) -> release.Metadata:
    (folder / "PKG-INFO").write_text(
        "Metadata-Version: 2.1\nName: toy\nVersion: 1\n" + "\n".join(lines) + "\n\nwords\n"
    )
    return release.read_metadata(folder)


@pytest.mark.parametrize(
    ("line", "license_"),
    [
        ("License-Expression: BSD-2-Clause", "BSD-2-Clause"),
        ("License: MIT License", "MIT"),
        ("License: BSD 2-CLAUSE LICENSE", "BSD-2-Clause"),
        ("Classifier: License :: OSI Approved :: Apache Software License", "Apache-2.0"),
        ("License: BSD", ""),
        ("License: Permitted", ""),
        ("Summary: no licence", ""),
    ],
)
def test_a_licence_is_named_or_left_open(tmp_path: Path, line: str, license_: str) -> None:
    assert _read(tmp_path, line).license == license_


@pytest.mark.parametrize(
    ("lines", "repository"),
    [
        (["Project-URL: Homepage, https://github.com/a/b"], "https://github.com/a/b"),
        (
            ["Project-URL: Docs, https://github.com/a/docs", "Project-URL: Source, https://github.com/a/b/tree/main"],
            "b",
        ),
        (["Home-page: https://gitlab.com/a/b.git"], "https://gitlab.com/a/b"),
        (["Home-page: https://example.org/b", "Project-URL: Bug, https://evil.example/github.com/a/b"], ""),
    ],
)
def test_the_repository_is_where_links_lead(tmp_path: Path, lines: list[str], repository: str) -> None:
    url = _read(tmp_path, *lines).repository
    assert url.endswith(repository) if repository else not url


def test_requirements_that_cannot_be_read_are_none(tmp_path: Path) -> None:
    release = _read(tmp_path, "Requires-Dist: torch>=2", "Requires-Dist: (((", "Requires-Python: >=3.9")
    assert ([str(requirement) for requirement in release.requires], release.requires_python) == (["torch>=2"], ">=3.9")


def test_a_release_without_metadata_is_named(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match="neither PKG-INFO nor METADATA"):
        release.read_metadata(tmp_path)
