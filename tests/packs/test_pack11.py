"""In pack 11 a rank that dies, hangs or disagrees is an exception that names it, and leaves nothing behind.

Where the module under test raised on some ranks alone, that is a check's matter, also when the others wait for them.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/11_megatron_hybrid_linear_ce"
RANKS = """
import os, pathlib, sys, tempfile, time, types, reproduce, torch
def speak(work, rank, count, folder):
    pathlib.Path(folder, f"pid{rank}").write_text(str(os.getpid()))
    pathlib.Path(folder, f"log{rank}").write_text("last words")
    while rank == 1 and not pathlib.Path(folder, "pid0").exists():
        time.sleep(0.01)
    if work.end is None:
        torch.save({"plain": {"error": "it raised"} if rank == 1 else {}}, f"{folder}/{rank}")
        return
    if rank == 1:
        work.end()
    time.sleep(600)
reproduce.speak = speak
ways = {"dies": lambda: os._exit(3), "ends early": lambda: os._exit(0), "is killed": lambda: os.kill(os.getpid(), 9)}
ways |= {"hangs": lambda: None, "disagrees": None}
given = {"target": "cpu", "seconds": 5.0 if sys.argv[1] == "disagrees" else 1.0, "end": ways[sys.argv[1]]}
work = types.SimpleNamespace(checks=[("plain", None, None)], **given)
with tempfile.TemporaryDirectory() as folder:
    try:
        reproduce.ranks(work, 3, folder)
    except RuntimeError as error:
        print("refused:", error)
    for file in pathlib.Path(folder).glob("pid*"):
        print("alive" if pathlib.Path("/proc", file.read_text()).exists() else "gone")
"""
SAYS = {
    "dies": "rank 1 of 3 died: exit status 3",
    "ends early": "rank 1 of 3 ended without results",
    "is killed": "rank 1 of 3 died: exit status -9",
    "hangs": "rank 0 of 3 hangs after 1.0 s; rank 1 of 3 hangs after 1.0 s; rank 2 of 3 hangs after 1.0 s",
    "disagrees": "rank 1 of 3 disagrees: plain raised on ranks [False, True, False]",
}


@pytest.mark.parametrize("how", SAYS)
def test_a_rank_that_does_not_answer_is_named_and_no_process_is_left(how: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", RANKS, how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    said, *rest = ended.stdout.splitlines()
    assert said == f"refused: {SAYS[how]}", ended.stderr
    assert "    last words" in rest
    assert "alive" not in rest


ALONE = """
import pathlib, sys, tempfile, time, types, reproduce, torch
raised = {"plain": {"error": "it raised", "upstream": True}}
def speak(work, rank, count, folder):
    if rank != 1 and work.waits:
        time.sleep(600)
    torch.save(raised if rank == 1 else {"plain": {}}, f"{folder}/{rank}")
    if work.waits:
        pathlib.Path(folder, "alone").write_text("plain")
reproduce.speak = speak
given = {"target": "cpu", "seconds": 30.0, "waits": sys.argv[1] == "wait"}
work = types.SimpleNamespace(checks=[("plain", None, None)], **given)
with tempfile.TemporaryDirectory() as folder:
    print(reproduce.ranks(work, 3, folder))
"""


@pytest.mark.parametrize("others", ["end", "wait"])
def test_where_the_module_under_test_raised_on_one_rank_alone_a_check_is_left_to_say_so(others: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", ALONE, others]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    raised = {"plain": {"error": "it raised", "upstream": True}}
    assert ended.stdout == f"{[raised] if others == 'wait' else [{'plain': {}}, raised, {'plain': {}}]}\n"


def test_a_rank_that_raised_knows_whether_the_others_end_the_same_check(tmp_path: Path) -> None:
    code = "import pathlib, sys, reproduce; reproduce.PATIENCE = 0.1; folder = pathlib.Path(sys.argv[1]);"
    code += "(folder / 'ended0').write_bytes(b'..'); (folder / 'ended1').write_bytes(b'.');"
    code += "print([reproduce.together(folder, number, count) for number, count in ((1, 2), (2, 2), (1, 3))])"
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", code, str(tmp_path)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    assert ended.stdout == "[True, False, False]\n"


LOST = """
import contextlib, functools, json, sys, tempfile, time, types, reproduce, torch
how = sys.argv[1]
reproduce.PATIENCE = 1.0
attempt = reproduce.attempt
def gpu(fault, raised):
    def ask():
        if fault:
            raise torch.AcceleratorError(f"CUDA error: {fault}")
        return not raised or how != "a collective is never done"
    event = types.SimpleNamespace(record=ask, query=ask)
    return types.SimpleNamespace(cuda=types.SimpleNamespace(synchronize=ask, Event=lambda: event))
def on_a_gpu(function, tested, _, __):
    faults = {"an assert": "device-side assert triggered", "another fault": "an illegal memory access"}
    odd = function.args[0].rank in {"an assert everywhere": (0, 1)}.get(how, (1,)) and function.func is second
    fault = faults.get(how.removesuffix(" everywhere")) if odd else None
    return attempt(function, tested, gpu(fault, odd), types.SimpleNamespace(type="cuda"))
class Upstream:
    def __init__(self, torch, device):
        self.rank = torch.distributed.get_rank()
    def stand_in(self):
        pass
    def parallel(self, *_):
        return contextlib.nullcontext()
def first(upstream, case):
    return {"found": torch.ones(2)}
def second(upstream, case):
    if upstream.rank == 1 and how == "a collective is never done":
        raise reproduce.NoTensorError("none")
    if upstream.rank == 0 and how == "an assert":
        torch.distributed.barrier()  # which the other never enters
    if upstream.rank == 0 and how == "a collective nobody waits for":
        upstream.left = torch.distributed.all_reduce(torch.ones(2), async_op=True)
    return {"found": torch.ones(3)}
reproduce.attempt, reproduce.Upstream = on_a_gpu, Upstream
checks = [(each.__name__, each, reproduce.Case()) for each in (first, second)]
checks.append(("third", first, reproduce.Case(ranks=2)))
work = types.SimpleNamespace(target="cpu", seconds=40.0, checks=checks, tested=["/nowhere"])
start = time.monotonic()
with tempfile.TemporaryDirectory() as folder:
    for each in reproduce.ranks(work, 2, folder):
        print(json.dumps({name: [one.get(key) for key in ("error", "upstream")] for name, one in each.items()}))
assert time.monotonic() - start < 20, "it waits"
"""
ASSERTED = "it raised AcceleratorError: CUDA error: device-side assert triggered"
FAULTY = "it raised AcceleratorError: CUDA error: an illegal memory access"
NEVER = "what it was asked for is not done after 1.0 s"
FOUND = {name: [None, None] for name in ("first", "second", "third")}
TOLD = {
    "an assert": [{"second": [f"{ASSERTED}; the GPU is lost: {ASSERTED.removeprefix('it raised ')}", True]}],
    "another fault": [{"second": [f"{FAULTY}; the GPU is lost: {FAULTY.removeprefix('it raised ')}", False]}],
    "a collective is never done": [{"second": [f"it raised NoTensorError: none; the GPU is lost: {NEVER}", True]}],
    "a collective nobody waits for": [FOUND, FOUND],
}


@pytest.mark.parametrize("how", [*TOLD, "an assert everywhere"])
def test_a_gpu_that_is_lost_ends_its_rank_and_the_check_that_lost_it_is_left(how: str) -> None:
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    command = [sys.executable, "-B", "-c", LOST, how]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
    said = [json.loads(line) for line in ended.stdout.splitlines()]
    if how == "an assert everywhere":  # as many ranks tell of it as end before one of them is seen to have
        assert said in (TOLD["an assert"], 2 * TOLD["an assert"])
    else:
        assert said == TOLD[how]
