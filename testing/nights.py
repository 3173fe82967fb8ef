"""Toy run folders: what many sweeps would have left, written in no time."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from harness.core import LaneName
from harness.schedule.session import GpuFault
from harness.sweep.run_folder import SCHEMA, CellRow, FigureRow, HostRow, LaneRow, Results


def figure(name: str, value: object, unit: str = "ms", patched: object = None, spread: object = None) -> FigureRow:
    """Build a figure."""
    return FigureRow(name, unit, value, patched, spread, None if patched is None else spread)


def cell(
    pack: str = "01_toy", target: str = "cpu", verdict: str = "CONFIRMED", figures: Sequence[FigureRow] = ()
) -> CellRow:
    """Build a cell of the pinned release."""
    on_gpu = target != "cpu"
    return CellRow(
        name=f"{pack}/{target}",
        pack=pack,
        title=f"What the toy pack {pack} shows",
        kind="wrong-result",
        upstream="toykernel",
        release="pinned",
        version="1.0",
        target=target,
        evidence="executed" if on_gpu else "interpreted",
        verdict=verdict,
        reason="",
        agreeing=1,
        runs=1,
        seconds=8.0,
        lanes=tuple(
            LaneRow(name, (verdict,), 4.0, "gpu 0" if on_gpu else "cpu", f"logs/{pack}/{target}.{name}.log")
            for name in LaneName
        ),
        figures=tuple(figures),
    )


def results(night: int, cells: Sequence[CellRow]) -> Results:
    """Build the results of one night, counted from 2026-01-01."""
    moment = dt.datetime(2026, 1, 1, 2, tzinfo=dt.UTC) + dt.timedelta(days=night)
    return Results(
        schema=SCHEMA,
        run=moment.strftime("%Y%m%dT%H%M%SZ"),
        started=moment.isoformat(),
        seconds=60.0,
        finished=True,
        status=0,
        baseline="the committed receipts",
        lanes_run=2 * len(cells),
        lanes_resumed=0,
        host=HostRow("3.12.3", "2.11.0", "3.6.0", "13.0", "580.1", 4),
        gpus=(GpuFault("gpu 0", "NVIDIA H200", "", ""),),
        notes=(),
        cells=tuple(cells),
    )


def lay(runs: Path, found: Results) -> Path:
    """Write the folder of one finished run."""
    folder = runs / found.run
    folder.mkdir(parents=True, exist_ok=True)
    record = {"started": found.started, "finished": True, "request": [], "faults": []}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "results.json").write_text(json.dumps(asdict(found)))
    return folder
