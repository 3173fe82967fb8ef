"""Toy run folders: what many sweeps would have left, written in no time."""

from __future__ import annotations

import datetime as dt
import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

from harness.sweep.results import SCHEMA, CellRow, FigureRow, GpuRow, HostRow, LaneRow, Results

FIRST = dt.datetime(2026, 1, 1, 2, tzinfo=dt.UTC)
GPU = "NVIDIA H200"


def figure(name: str, value: object, unit: str = "ms", patched: object = None, spread: object = None) -> FigureRow:
    """Build a figure."""
    return FigureRow(name, unit, value, patched, spread, None if patched is None else spread)


def cell(
    pack: str = "01_toy", target: str = "cpu", verdict: str = "CONFIRMED", figures: Sequence[FigureRow] = ()
) -> CellRow:
    """Build a cell of the pinned release."""
    on_gpu = target != "cpu"
    lanes = tuple(
        LaneRow(name, (verdict,), 4.0, "gpu 0" if on_gpu else "cpu", f"logs/{pack}/{target}.{name}.log")
        for name in ("pristine", "patched")
    )
    row = CellRow(
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
    )
    return replace(row, agreeing=1, runs=1, seconds=8.0, lanes=lanes, figures=tuple(figures))


def results(night: int, cells: Sequence[CellRow], *, driver: str = "580.1", torch: str = "2.11.0") -> Results:
    """Build the results of one night, counted from 2026-01-01."""
    moment = FIRST + dt.timedelta(days=night)
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
        host=HostRow("3.12.3", torch, "3.6.0", "13.0", driver, 4),
        gpus=(GpuRow("gpu 0", GPU, "", ""),),
        notes=(),
        cells=tuple(cells),
    )


def lay(runs: Path, found: Results, *, finished: bool = True) -> Path:
    """Write the folder of one run."""
    folder = runs / found.run
    folder.mkdir(parents=True, exist_ok=True)
    record = {"schema": 1, "started": found.started, "finished": finished, "request": {}}
    (folder / "run.json").write_text(json.dumps(record))
    (folder / "results.json").write_text(json.dumps(asdict(replace(found, finished=finished))))
    return folder


def year(packs: int, count: int, *, timings: int = 3, seed: int = 1) -> Iterator[Results]:
    """Yield nights of packs on two targets, each with timings that vary and an error that does not.

    The driver changes in the middle, torch at two thirds, one pack's release last; one cell in fifty is an error.
    """
    chance = random.Random(seed)  # noqa: S311 - no secret
    for night in range(count):
        cells = [
            replace(
                _nightly(f"{number:02d}_toy", target, timings, chance),
                version="1.1" if (night, number) == (count - 1, 1) else "1.0",
            )
            for number in range(1, packs + 1)
            for target in ("cpu", "sm_90a")
        ]
        late = night > count // 2
        yield results(
            night, cells, driver="590.2" if late else "580.1", torch="2.12.0" if night > count * 2 // 3 else "2.11.0"
        )


def _nightly(pack: str, target: str, timings: int, chance: random.Random) -> CellRow:
    figures = [
        FigureRow(f"time_{index}", "ms", chance.gauss(10, 0.2), chance.gauss(8, 0.2), 0.3, 0.25)
        for index in range(timings)
    ]
    verdict = "ERROR" if chance.random() < 1 / 50 else "CONFIRMED"
    return cell(pack, target, verdict, [*figures, figure("max_error", 0.4623, "1", patched=1.064e-07)])
