"""The real packs as they lie here; `.ci/run` runs their lanes.

They need the package index once; what they fetch stays in the user's cache.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from harness.core import git
from harness.core.errors import HarnessError
from harness.pack import load
from harness.pack.model import Pack
from harness.report import bundle, report
from testing.workbench import REPOSITORY, unpacked

PACKS = [load.load_pack(folder) for folder in sorted((REPOSITORY / "packs").glob("*_*"))]


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_a_pack_has_a_contract_that_imports_the_kit_alone(one: Pack) -> None:
    text = one.contract.read_text(encoding="utf-8")
    assert "EVIDENCE_WITHOUT_GPU" in text
    assert not re.search(r"(?m)^\s*(?:from|import) (?:harness|testing)\b", text)


@pytest.mark.parametrize("one", PACKS, ids=lambda one: one.name)
def test_its_bundle_is_made_and_holds(one: Pack) -> None:
    try:
        sent = bundle.build(one, report.scrubber(one))
    except HarnessError as error:
        if "STALE" not in str(error):
            raise
        pytest.skip(str(error))
    assert bundle.errors(sent, PACKS) == []


def test_the_three_patches_for_mamba_apply_in_series(tmp_path: Path) -> None:
    series = [one for one in PACKS if one.definition.upstream.package == "mamba-ssm"]
    assert {one.definition.upstream.sha256 for one in series} == {series[0].definition.upstream.sha256}
    content = tmp_path / "tree"
    shutil.copytree(unpacked(series[0]).folder, content)
    for one in series:
        applied = git.run(["apply", "-p1", "--whitespace=nowarn", str(one.patch)], content, git.PLAIN)
        assert applied.returncode == 0, f"{one.name}: {applied.stderr}"
        assert git.run(["apply", "-p1", "--reverse", "--check", str(one.patch)], content, git.PLAIN).returncode == 0
