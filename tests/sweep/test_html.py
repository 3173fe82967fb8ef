"""index.html in a real browser: headless Chromium, where one is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from harness.schedule.session import GpuFault
from harness.sweep import outputs
from harness.sweep.run_folder import ChangeRow, FigureRow, Results
from testing import nights

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
BROWSER = next((path for name in BROWSERS if (path := shutil.which(name))), "")
TARGETS = ("cpu", "sm_80", "sm_90a", "sm_100a", "sm_120a", "sm_121a")
TITLE = "A title that says <what> goes wrong & where, at the length at which titles of real packs are written"
#: Says in the page's title how far it is scrolled sideways, how wide it is, and where it is wider than the window.
MEASURE = """<script>
for (const one of document.querySelectorAll('details')) one.open = OPEN;
const wide = [...document.querySelectorAll('body *')].filter(one => !one.closest('pre, .wide')
  && one.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5).length;
const page = document.documentElement;
document.title = ['MEASURED', page.scrollWidth, page.clientWidth, wide].join(' ');
</script>"""


def _page(folder: Path, results: Results, log: str) -> Path:
    """Write the page of a sweep each of whose lanes said that."""
    for lane in (lane for row in results.cells for lane in row.lanes):
        (folder / lane.log).parent.mkdir(parents=True, exist_ok=True)
        (folder / lane.log).write_text(log)
    (folder / "index.html").write_text(outputs.page(results, folder))
    return folder / "index.html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write the page of a large sweep: 14 packs on 6 targets, logs with long lines."""
    figures = (
        FigureRow("a_figure_with_a_very_long_name_as_scripts_have_them_too", "ms", 1.5, 1.25, 0.1, None),
        FigureRow("max_error", "1", 0.25, {"loss": 1e-7, "grad": 2e-7}, None, None),
    )
    packs = [f"{number:02d}_a_pack_with_a_long_name" for number in range(1, 15)]
    rows = [
        replace(nights.cell(pack, target, figures=figures), title=TITLE, figure="max_error 0.25 -> 0.0031")
        for pack in packs
        for target in TARGETS
    ]
    change = ChangeRow("patch stale", worse=True, text="some-upstream 2.3.2.post1: was CONFIRMED")
    rows[3] = replace(rows[3], verdict="PATCH_STALE", changes=(change,), reason="x" * 300)
    rows[5] = replace(rows[5], verdict="FLAKY", agreeing=2, runs=3, changes=(replace(change, kind="flaky"),))
    rows[8] = replace(rows[8], verdict="NOT_HERE", reason="no sm_100a GPU here", lanes=(), figures=())
    rows.insert(1, replace(rows[0], name=f"{rows[0].name}@latest", release="latest", version="2.4.0"))
    gpus = (GpuFault("gpu 0", "NVIDIA H200", "", ""), GpuFault("gpu 1", "NVIDIA H200", "Xid 79", "a/sm_90a unpatched"))
    results = replace(nights.results(0, rows), status=1, gpus=gpus)
    return _page(tmp_path_factory.mktemp("sweep"), results, ("log " + "y" * 400 + "<b>&\n") * 50)


def test_the_page_needs_no_network_and_no_script(page: Path) -> None:
    text = page.read_text()
    assert "<script" not in text
    assert "@import" not in text
    assert not re.search(r"(?:src|href|url)\s*[=(]\s*[\"']?\s*(?:https?:)?//", text)
    assert text.count("<pre>") == 4, "the logs of each cell that needs attention; the others are linked"
    assert "<b>&" not in text
    assert text.count('.pristine.log">log</a>') > 80
    assert len(text) < 3e5, "84 cells"


def test_the_matrix_comes_first_and_says_each_verdict(page: Path) -> None:
    body = page.read_text().partition("<main>")[2]
    assert body.index('<table class="matrix"') < body.index("What changed or needs attention") < body.index("<section")
    first = re.search(r'<a class="said bad"[^>]*aria-label="([^"]*)">(\w+)</a>', body)
    assert first
    label = "01_a_pack_with_a_long_name on sm_100a, pinned: PATCH_STALE, needs attention"
    assert first.groups() == (label, "PATCH_STALE")
    assert body.count(">CONFIRMED</a>") == 14 * 6 - 3
    targets = set(re.findall(r'href="#([^"]*)"', body))
    assert targets <= set(re.findall(r'id="([^"]*)"', body)), "every link of the matrix leads somewhere"


def test_a_target_that_this_host_cannot_judge_has_no_column_unless_it_was_lost(tmp_path: Path) -> None:
    away = nights.cell("01_toy", "sm_100a", "NOT_HERE")
    cells = [nights.cell("01_toy"), away, nights.cell("02_away", "sm_100a", "NOT_HERE")]
    text = outputs.page(nights.results(0, cells), tmp_path)
    assert "Not judged on this host: 02_away, sm_100a." in text
    assert '<th scope="col">sm_100a' not in text
    lost = replace(away, changes=(ChangeRow("newly unsupported", worse=True, text="no GPU"),))
    text = outputs.page(nights.results(0, [cells[0], lost]), tmp_path)
    assert "Not judged" not in text
    assert '<th scope="col">sm_100a' in text


def _luminance(colour: str) -> float:
    """Return the relative luminance of WCAG 2.2."""
    digits = colour.lstrip("#")
    digits = digits if len(digits) == 6 else "".join(2 * one for one in digits)
    parts = [int(digits[index : index + 2], 16) / 255 for index in (0, 2, 4)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("scheme", [0, 1])
def test_text_and_lines_have_the_contrast_of_wcag_aa(scheme: int) -> None:
    style = (outputs.FOLDER / "html.css").read_text().split("--ink")[scheme + 1]
    colours = dict(re.findall(r"--([a-z-]+): (#[0-9a-f]+)", "--ink" + style.partition("}")[0]))

    def contrast(one: str, other: str) -> float:
        dark, light = sorted((_luminance(colours[one]), _luminance(colours[other])))
        return (light + 0.05) / (dark + 0.05)

    for text in ("ink", "soft", "good", "bad", "warn"):
        assert min(contrast(text, "paper"), contrast(text, "card")) >= 4.5, text
    for ground in ("good", "bad", "warn"):
        assert contrast("on", ground) >= 4.5, ground
    assert contrast("none", "card") >= 3


@pytest.mark.skipif(not BROWSER, reason="no Chromium here; apt-get install chromium")
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
