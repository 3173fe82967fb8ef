"""Writing what a night leaves for readers: results.json, summary.md, junit.xml, index.html."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
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
    _write_pieces(folder / "index.html", Page(results, history, folder, patches).pieces())


def _write_pieces(path: Path, pieces: Iterable[str]) -> None:
    """Write a large file as `files.write_atomic` does, without holding it in memory."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8", newline="") as stream:
            stream.writelines(pieces)
            stream.flush()
            os.fsync(stream.fileno())
        Path(name).chmod(0o644)
        Path(name).replace(path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise
