"""toykernel scales each value by its own weight on each of two ranks, which share the values.

A rank that dies, hangs or disagrees is an error that names it and gives its last lines.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

EVIDENCE_WITHOUT_GPU = "traced"
RANKS = 2
SECONDS = 20.0  # for all ranks together: they take a tenth of a second, and a lane has 60
LAST = 20  # lines of a rank that are told
VALUES, WEIGHTS = [1.0, 2.0, 3.0, 4.0], [1.0, 0.5, 0.0, 2.0]


def gathered(name, mine, rank, folder):
    """Return what every rank brings: a collective through files, which waits until each has come."""
    files = [Path(folder, f"{name}.{other}") for other in range(RANKS)]
    write(files[rank], mine)
    print(f"waits for {name}", flush=True)
    while not all(file.exists() for file in files):
        time.sleep(0.01)
    return [json.loads(file.read_text()) for file in files]


def write(file, value):
    """Write a file whole or not at all."""
    file.with_suffix(".new" + file.suffix).write_text(json.dumps(value))
    file.with_suffix(".new" + file.suffix).rename(file)


def speak(rank, folder):
    """Be one rank: scale a part of the values, and add up those of all ranks."""
    from toykernel import scale

    mine = slice(rank * 2, rank * 2 + 2)
    print(f"scales {VALUES[mine]}", flush=True)
    ones = scale.scale(VALUES[mine], [1.0] * 2)
    total = sum(gathered("total", scale.total(ones), rank, folder))
    answer = {"scaled": scale.scale(VALUES[mine], WEIGHTS[mine]), "ones": ones, "total": total}
    write(Path(folder, f"answer.{rank}"), answer)


def answers(folder):
    """Run every rank; return their answers, or raise with the ranks that died or hang. None is left behind."""
    processes = []
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-P", __file__, str(rank), folder]
            with Path(folder, f"log.{rank}").open("w") as log:
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        until = time.monotonic() + SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            if any(process.poll() for process in processes):
                break  # the others may wait for it for ever
            time.sleep(0.01)
        return judged([process.poll() for process in processes], folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def judged(statuses, folder):
    """Return what the ranks wrote down, where all came to their end and agree."""
    files = [Path(folder, f"answer.{rank}") for rank in range(RANKS)]
    bad = {rank: f"ended with status {status}" for rank, status in enumerate(statuses) if status}
    if not bad:
        bad = {rank: f"hangs after {SECONDS:g} s" for rank, status in enumerate(statuses) if status is None}
        bad |= {rank: "left no answer" for rank in range(RANKS) if rank not in bad and not files[rank].exists()}
    refuse(bad, folder)
    found = [json.loads(file.read_text()) for file in files]
    totals = [one["total"] for one in found]
    refuse({rank: f"disagrees: totals {totals}" for rank in range(RANKS) if totals[rank] != totals[0]}, folder)
    return found


def refuse(bad, folder):
    """Raise with what is wrong of which rank, in the first line, and with their last lines."""
    told = ["; ".join(f"rank {rank} of {RANKS} {what}" for rank, what in bad.items())]
    for rank in bad:
        lines = Path(folder, f"log.{rank}").read_text(errors="replace").splitlines()[-LAST:]
        told += [f"last lines of rank {rank}:", *(f"    {line}" for line in lines)]
    if bad:
        raise RuntimeError("\n".join(told))


@pytest.fixture(scope="module")
def found():
    with tempfile.TemporaryDirectory() as folder:
        return answers(folder)


@pytest.mark.control
def test_ones(found):
    assert [value for one in found for value in one["ones"]] == VALUES


@pytest.mark.control
def test_total(found):
    assert [one["total"] for one in found] == [10.0, 10.0]


@pytest.mark.defect
def test_weights(found, figure):
    scaled = [value for one in found for value in one["scaled"]]
    error = max(abs(x - value * weight) for x, value, weight in zip(scaled, VALUES, WEIGHTS, strict=True))
    figure("max_error", error)
    assert error == 0.0, f"largest error {error}"


if __name__ == "__main__":
    speak(int(sys.argv[1]), sys.argv[2])
