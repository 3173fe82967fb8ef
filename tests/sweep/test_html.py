"""index.html in a real browser: headless Chromium, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.sweep.history import History, Mark
from harness.sweep.html import Page
from harness.sweep.results import CellRow, ChangeRow, FigureRow, GpuRow, HostRow, LaneRow, Results

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), None)
TARGETS = ("cpu", "sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_121a")
#: Says in the page's title how far it is scrolled sideways, how wide it is, and where it is wider than the window.
MEASURE = """<script>
for (const one of document.querySelectorAll('details')) one.open = OPEN;
const wide = [...document.querySelectorAll('body *')].filter(one => !one.closest('pre, .wide')
  && one.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5).length;
const page = document.documentElement;
document.title = ['MEASURED', page.scrollWidth, page.clientWidth, wide].join(' ');
</script>"""


def _row(pack: str, target: str) -> CellRow:
    base = CellRow(
        name=f"{pack}/{target}",
        pack=pack,
        title="A title that says <what> goes wrong & where, at the length at which titles of real packs are written",
        kind="wrong-result",
        upstream="some-upstream",
        release="pinned",
        version="2.3.2.post1",
        target=target,
        evidence="executed",
        verdict="CONFIRMED",
        reason="",
    )
    lanes = tuple(LaneRow(lane, ("BUG_REPRODUCED",), 12.5, "gpu 0", f"logs/{lane}.log") for lane in ("pristine",))
    figures = (
        FigureRow("a_figure_with_a_very_long_name_as_probes_have_them_too", "ms", 1.5, 1.25, 0.1, None),
        FigureRow("max_error", "1", 0.25, {"loss": 1e-7, "grad": 2e-7}, None, None),
    )
    return replace(
        base, agreeing=1, runs=1, seconds=37.5, figure="max_error 0.25 -> 0.0031", lanes=lanes, figures=figures
    )


def _results() -> Results:
    rows = [_row(f"{number:02d}_{'a_pack_with_a_long_name'}", target) for number in range(1, 15) for target in TARGETS]
    change = ChangeRow("patch stale", worse=True, text="some-upstream 2.3.2.post1: was CONFIRMED")
    rows[3] = replace(rows[3], verdict="PATCH_STALE", changes=(change,), reason="x" * 300)
    rows[5] = replace(rows[5], verdict="FLAKY", agreeing=2, runs=3, changes=(replace(change, kind="flaky"),))
    rows[8] = replace(rows[8], verdict="NOT_HERE", reason="no sm_100a GPU here", lanes=(), figures=())
    rows.insert(1, replace(rows[0], name=f"{rows[0].name}@latest", release="latest", version="2.4.0"))
    host = HostRow("3.12.3", "2.11.0+cu130", "3.6.0", "13.0", "580.1", 2)
    gpus = (GpuRow("gpu 0", "NVIDIA H200", "", ""), GpuRow("gpu 1", "NVIDIA H200", "Xid 79", "a/sm_90a pristine"))
    return Results(
        schema=2,
        run="20261121T020000Z",
        started="2026-11-21T02:00:00+00:00",
        seconds=4000.0,
        finished=True,
        status=1,
        baseline="the committed receipts",
        lanes_run=160,
        lanes_resumed=0,
        host=host,
        gpus=gpus,
        notes=(),
        cells=tuple(rows),
    )


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of a large sweep: 14 packs on 6 targets, 30 runs of history, logs with long lines."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "logs").mkdir()
    (folder / "logs/pristine.log").write_text("\n".join("log " + "y" * 400 + "<b>&" for _ in range(50)))
    patch = folder / "fix.patch"
    patch.write_text("diff --git a/x b/x\n" + "+" + "z" * 300 + "</pre>\n")
    results = _results()
    earlier = [Mark(f"202611{day:02d}T020000Z", "CONFIRMED", worse=False) for day in range(1, 31)]
    history = History({row.name: earlier for row in results.cells})
    path = folder / "index.html"
    path.write_text("".join(Page(results, history, folder, {row.pack: patch for row in results.cells}).pieces()))
    return path


def test_the_page_needs_no_network_and_no_script(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text
    assert "@import" not in text
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?\s*(?:https?:)?//", text)
    assert text.count("<pre>") > 100
    assert "<b>&" not in text.partition("<body>")[2]
    assert "</pre>\n\n</details>" in text or "</pre>\n</details>" in text


def test_the_page_of_many_runs_stays_small(page: Path) -> None:
    assert page.stat().st_size < 4e6


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here; apt-get install chromium")
@pytest.mark.parametrize("width", [390, 1600])
@pytest.mark.parametrize("opened", [False, True])
def test_nothing_is_wider_than_the_window(page: Path, tmp_path: Path, width: int, *, opened: bool) -> None:
    measured = tmp_path / "measured.html"
    script = MEASURE.replace("OPEN", str(opened).lower())
    measured.write_text(page.read_text().replace("</body>", f"{script}</body>"))
    # headless Chromium has a smallest window of 500 px; a frame of the wanted width has none
    frame = tmp_path / "frame.html"
    frame.write_text(
        f'<!DOCTYPE html><body style="margin:0"><iframe id="f" src="measured.html" style="border:0;width:{width}px;'
        'height:900px"></iframe><script>f.onload = () => document.body.append(f.contentDocument.title)</script>'
    )
    command = [
        BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--allow-file-access-from-files",
        f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={max(width, 500)},900", "--dump-dom", frame.as_uri(),
    ]  # fmt: skip
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    found = re.search(r"MEASURED (\d+) (\d+) (\d+)", ended.stdout)
    assert found, ended.stderr[-2000:]
    scroll, client, wider = (int(text) for text in found.groups())
    assert client == width
    assert (scroll, wider) == (width, 0)
