"""How long `history` and a sweep's page take after 300 nights of 30 packs, and how large the page is.

    python benchmarks/page_of_a_year.py [--nights N] [--packs N]

Toy nights are written as sweeps write them, on two targets with three timings of both lanes; none is run.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from harness.sweep import database, history
from harness.sweep.html import Page
from testing import nights

Answer = TypeVar("Answer")
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
#: Lays out every section, also those off the screen, which the style leaves for later.
SCRIPT = """<script>onload = () => {
  for (const one of document.querySelectorAll('section')) one.style.contentVisibility = 'visible';
  document.body.offsetHeight;
  document.title = performance.now();
}</script>"""


def timed(what: str, action: Callable[[], Answer]) -> Answer:
    """Do something, and print the seconds that it took, and how many of them the processor worked for it."""
    began, worked = time.perf_counter(), time.process_time()
    found = action()
    print(f"| {what} | {time.perf_counter() - began:.2f} s ({time.process_time() - worked:.2f} s) |", flush=True)
    return found


def laid_out(page: Path, browser: str) -> float:
    """Return the milliseconds from the beginning of the navigation until Chromium has laid out the whole page."""
    copy = page.with_name("measured.html")
    copy.write_text(page.read_text().replace("</body>", f"{SCRIPT}</body>"))
    profile = f"--user-data-dir={page.parent / 'profile'}"
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", profile, "--dump-dom", copy.as_uri()]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    found = re.search(r"<title>(.*?)</title>", said)
    assert found
    return float(found[1])


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--nights", type=int, default=300)
    parser.add_argument("--packs", type=int, default=30)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        *before, now = nights.year(given.packs, given.nights)
        for night in before:
            nights.lay(folder / "runs", night)
        for lane in (lane for row in now.cells for lane in row.lanes):
            (folder / lane.log).parent.mkdir(parents=True, exist_ok=True)
            (folder / lane.log).write_text("a line of a log that a lane wrote\n" * 300)
        print(
            f"| {given.nights} nights of {given.packs} packs on 2 targets | seconds (of the processor) |\n| --- | --- |"
        )
        runs = folder / "runs"
        timed("the database from nothing", lambda: database.update(runs))
        timed("the database when nothing is new", lambda: database.update(runs))
        timed("`history` of one pack", lambda: database.read(runs, "01_toy"))
        past = timed("every cell of every night, for the page", lambda: database.read(runs)).cells
        strips = timed("the strips", lambda: history.read(runs, now.run))
        page = folder / "index.html"
        pieces = Page(now, strips, folder, {}, past).pieces
        timed("writing the page", lambda: page.write_text("".join(pieces())))
        print(f"| the page | {page.stat().st_size / 1e6:.2f} MB |")
        print(f"| {database.NAME} | {(runs / database.NAME).stat().st_size / 1e6:.1f} MB |")
        browser = next((path for one in BROWSERS if (path := shutil.which(one))), None)
        if browser:
            print(f"| Chromium, until the whole page is laid out | {laid_out(page, browser) / 1000:.2f} s |")


if __name__ == "__main__":
    main()
