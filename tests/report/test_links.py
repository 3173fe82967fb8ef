"""Links to this repository: absolute ones where it has an address, none where it has not."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from harness.pack import load
from harness.pack.model import Pack
from harness.report import links, report
from testing import clones
from testing.workbench import REPOSITORY, Workbench

URL = "https://example.org/somebody-with-a-long-name/reproducer-packs"
PACKS = [load.load_pack(folder) for folder in load.folders(REPOSITORY / "packs")]
LINK = re.compile(r"\]\(([^)\s]*)\)")


@pytest.fixture
def address(monkeypatch: pytest.MonkeyPatch) -> str:
    """Give this repository an address for one test."""
    monkeypatch.setattr(links, "repository_url", lambda: URL)
    return URL


@pytest.mark.parametrize("pack", PACKS, ids=lambda one: one.name)
@pytest.mark.usefixtures("address")
def test_a_report_links_with_absolute_urls_to_what_is_there(pack: Pack) -> None:
    found = LINK.findall(report.render(pack, is_draft=True))
    assert all(url.startswith("https://") for url in found)
    for url in found:
        path = url.removeprefix(f"{URL}/blob/main/")
        assert path == url or (REPOSITORY / path).exists(), f"{url} leads nowhere"


@pytest.mark.parametrize("pack", PACKS, ids=lambda one: one.name)
def test_without_an_address_it_links_nothing_of_ours(pack: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "repository_url", lambda: "")
    assert "/blob/main/packs/" not in report.render(pack, is_draft=True)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("see `data/a.md` there", f"see [`data/a.md`]({URL}/blob/main/packs/01_x/data/a.md) there"),
        ("`packs/02_y` and `packs/03_z`", f"[`packs/02_y`]({URL}/blob/main/packs/02_y) and `packs/03_z`"),
        ("[`data/a.md`](https://example.org)", "[`data/a.md`](https://example.org)"),
        ("`scale.py`, `data/*.md`, `../02_y`, `data/../data/a.md`", None),
        ("```sh\n# in the repository of this pack\n```\n", f"```sh\n# in {URL}\n```\n"),
        ("```sh\ncat `data/a.md`\n```\n", None),
        ("~~~\n`data/a.md`\n~~~\n", None),
    ],
)
@pytest.mark.usefixtures("address")
def test_files_are_linked_where_they_are_named_as_code(tmp_path: Path, text: str, wanted: str | None) -> None:
    for name in ("01_x/data/a.md", "02_y/b"):
        (tmp_path / "packs" / name).parent.mkdir(parents=True)
        (tmp_path / "packs" / name).touch()
    assert links.linked(text, tmp_path / "packs/01_x") == (text if wanted is None else wanted)


@pytest.mark.usefixtures("address")
def test_a_link_counts_for_its_words() -> None:
    text = f"`a.md`, [`b.md`]({URL}/blob/main/b.md), git clone {URL} x, [c](https://example.org/c)"


@pytest.mark.parametrize("url", ["", URL])
def test_one_command_writes_the_address_wherever_it_has_a_place(workbench: Workbench, url: str) -> None:
    clone = clones.lay(workbench)
    before = {name: (REPOSITORY / name).read_text(encoding="utf-8") for name in links.WRITTEN}
    for name, text in before.items():
        (clone / name).parent.mkdir(parents=True, exist_ok=True)
        (clone / name).write_text(text, encoding="utf-8")
    clones.address(clone, url)
    for said in ["written", "as it was"] if url else ["as it was"]:
        command = [sys.executable, "-m", "harness.report.links"]
        ended = subprocess.run(command, cwd=clone, capture_output=True, text=True, check=False)
        assert (ended.returncode, ended.stderr) == (0, "")
        assert ended.stdout == "".join(f"{name}: {said}\n" for name in links.WRITTEN)
    for name, text in before.items():
        after = (clone / name).read_text(encoding="utf-8")
        assert after == text if not url else "URL-OF-THIS-REPOSITORY" not in after
