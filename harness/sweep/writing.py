"""Writing what a night leaves for readers: results.json, summary.md, junit.xml, index.html."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from harness import files, receipt
from harness.sweep import digest, night
from harness.sweep.history import History
from harness.sweep.page import Page
from harness.sweep.results import Results


def write(results: Results, history: History, folder: Path, patches: dict[str, Path]) -> None:
    """Write every output of a night, each whole or not at all."""
    files.write_atomic(folder / night.RESULTS, receipt.to_json(asdict(results)))
    files.write_atomic(folder / "summary.md", digest.summary(results))
    files.write_atomic(folder / "junit.xml", digest.junit(results))
    files.write_atomic(folder / "index.html", Page(results, history, folder, patches).pieces())
