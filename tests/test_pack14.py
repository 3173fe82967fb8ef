"""Pack 14's sweeps go on from their files: what is there is not measured again, and what is missing is."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from conftest import REPOSITORY

FOLDER = REPOSITORY / "packs/14_sparse_mla_precision"
ASK = """
import json, pathlib, sys
import measure_context
import measure_flash_norm
rows, _ = measure_context.appended(pathlib.Path(sys.argv[1]), ())
both = {"context": lambda: measure_context.left(rows, ("pristine", "patched"))}
both["flash_norm"] = lambda: measure_flash_norm.left(rows)
print(json.dumps(list(both[sys.argv[2]]())))
"""


def _left(path: Path) -> list[Any]:
    command = [sys.executable, "-c", ASK, str(path), path.stem]
    ended = subprocess.run(command, cwd=FOLDER, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    found: list[Any] = json.loads(ended.stdout)
    return found


def test_a_sweep_goes_on_from_its_file(tmp_path: Path) -> None:
    text = (FOLDER / "data/context.csv").read_text()
    copy = tmp_path / "context.csv"
    copy.write_text(text)
    assert _left(copy) == []
    lines = text.splitlines(keepends=True)
    copy.write_text("".join(lines[:-1]))
    last = list(csv.DictReader(lines))[-1]
    ((case, trees),) = _left(copy)
    assert (case["tokens"], trees) == (int(last["tokens"]), [last["tree"]])


def test_the_sweep_of_the_norm_goes_on_too(tmp_path: Path) -> None:
    lines = (FOLDER / "data/flash_norm.csv").read_text().splitlines(keepends=True)
    copy = tmp_path / "flash_norm.csv"
    copy.write_text("".join(lines))
    assert _left(copy) == []
    copy.write_text("".join(lines[:-1]))
    last = list(csv.DictReader(lines))[-1]
    (case,) = _left(copy)
    assert (case["score"], case["seed"]) == (float(last["score"]), int(last["seed"]))
