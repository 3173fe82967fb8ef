"""Writing what a sweep leaves for readers: results.json, summary.md, junit.xml, index.html."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

from harness.core import files
from harness.receipt import receipt
from harness.sweep import run_folder, text_outputs
from harness.sweep.history import History
from harness.sweep.html import Page
from harness.sweep.results import Results


def write(results: Results, history: History, folder: Path, patches: dict[str, Path]) -> None:
    """Write every output of a sweep, each whole or not at all."""
    files.write_atomic(folder / run_folder.RESULTS, receipt.to_json(asdict(results)))
    files.write_atomic(folder / "summary.md", text_outputs.summary(results))
    files.write_atomic(folder / "junit.xml", text_outputs.junit(results))
    files.write_atomic(folder / "index.html", Page(results, history, folder, patches).pieces())
