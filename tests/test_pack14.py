"""Pack 14's sweep goes on from its file: what is there is not measured again, and what is missing is."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

from conftest import REPOSITORY

FOLDER = REPOSITORY / "packs/14_sparse_mla_precision"
ASK = """
import json, pathlib, sys
import measure_context
rows, _ = measure_context.appended(pathlib.Path(sys.argv[1]), ())
print(json.dumps(list(measure_context.left(rows, ("pristine", "patched")))))
"""


def _left(path: Path) -> list[tuple[dict[str, object], list[str]]]:
    ended = subprocess.run(
        [sys.executable, "-c", ASK, str(path)], cwd=FOLDER, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    found: list[tuple[dict[str, object], list[str]]] = json.loads(ended.stdout)
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
