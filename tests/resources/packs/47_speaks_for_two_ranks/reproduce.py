# /// script
# requires-python = ">=3.11"
# dependencies = ["toykernel==1.0"]
# ///
"""Scaling by per-value weights uses the first weight for every value, on each of two ranks.

Cause: `scale` multiplies by `weights[0]`. Scope: this function, on lists of numbers that
two ranks share. A rank that dies, hangs or disagrees is an error that names it and gives its last lines.
Upstream: https://example.org/toykernel/issues/1

With the release unpacked and $PACK naming this folder, both sentinels without the runner:

    unzip -q toykernel-1.0.zip
    PYTHONPATH=toykernel-1.0/src python "$PACK/reproduce.py" --target cpu
    git -C toykernel-1.0 apply -p1 "$PACK/fix.patch"
    PYTHONPATH=toykernel-1.0/src python "$PACK/reproduce.py" --target cpu
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, contextlib, ctypes, fnmatch, hashlib, json, os, sys, traceback
from pathlib import Path
class Probe:  # prints the lines that a runner reads, and draws the verdict from the checks among them
    def __init__(self):
        self.judged, self.tested, self.only = {}, [], None  # judged: (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # a module under test, as it was really loaded
        name, file, package = module.__name__, Path(module.__file__), module.__name__.partition(".")[0]
        self.tested.append(next((str(folder) for folder in file.parents if folder.name == package), str(file)))
        self.say("UPSTREAM", module=name, file=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def judge(self, name, role, measure, *given):  # measure(*given) returns ok, and by name what it measured
        try:
            wanted = fnmatch.fnmatchcase(name, self.only or "*")
            ok, values = measure(*given) if wanted else (None, {"reason": "--only leaves it out"})
        except Exception as error:  # code under test that raises is wrong; a fault of the probe or the host is not
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            host = isinstance(error, (ImportError, MemoryError, OSError)) or "out of memory" in str(error)
            refused = "returned an in" in str(error)  # autograd says: an invalid gradient, an incorrect number of them
            if host or not (refused or any(file.startswith(tuple(self.tested)) for file in files)):
                raise
            traceback.print_exc()
            ok, values = False, {"reason": f"it raised {type(error).__name__}: {error}"[:400]}
        self.check(name, role, ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    @contextlib.contextmanager
    def alone(self):  # around launches that are timed: no other lane of the runner uses this GPU meanwhile
        gate = Path(os.environ.get("REPRODUCER_GPU_GATE", os.devnull))  # a named pipe, where lanes share a GPU
        try:
            yield gate.read_text()  # ends when the other lanes are off it
        finally:
            gate.read_text()  # ends when they may use it again
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        parser.add_argument("--only", metavar="CHECK", help="run this check alone (a name or a glob): no verdict")
        target, self.only = vars(parser.parse_args()).values()
        reason = f"only {self.only} was run" if self.only else "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            traceback.print_exc()
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged and not self.only), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import subprocess
import tempfile
import time

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


def ranks(folder):
    """Run every rank; return their answers, or raise with the ranks that died or hang. None is left behind."""
    processes = []
    try:
        for rank in range(RANKS):
            command = [sys.executable, "-P", __file__, "--rank", str(rank), folder]
            with Path(folder, f"log.{rank}").open("w") as log:  # standard output is the probe's own
                processes.append(subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log))
        until = time.monotonic() + SECONDS
        while any(process.poll() is None for process in processes) and time.monotonic() < until:
            if any(process.poll() for process in processes):
                break  # the others may wait for it for ever
            time.sleep(0.01)
        return answers([process.poll() for process in processes], folder)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def answers(statuses, folder):
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


def judge(probe, target):
    """Compare what the ranks scaled with the products computed here."""
    if target != "cpu":
        raise NotImplementedError(f"no {target} here")
    probe.say("TARGET", target="cpu", evidence="traced", device="CPU")
    from toykernel import scale

    probe.upstream(scale)
    with tempfile.TemporaryDirectory() as folder:
        found = ranks(folder)
    scaled = [value for one in found for value in one["scaled"]]
    error = max(abs(x - value * weight) for x, value, weight in zip(scaled, VALUES, WEIGHTS, strict=True))
    probe.check("ones", "control", [value for one in found for value in one["ones"]] == VALUES, tolerance=0.0)
    probe.check("total", "control", found[0]["total"] == 10.0, tolerance=0.0)
    probe.check("weights", "defect", error == 0.0, measured=error, tolerance=0.0, unit="1")
    probe.say("FIGURE", name="max_error", value=error, unit="1", spread=None)
    for rank, one in enumerate(found):
        digest = hashlib.sha256(repr([one["ones"], one["total"]]).encode()).hexdigest()
        probe.say("OUTPUT", name=f"ones.{rank}", dtype="float", shape=[2], sha256=digest, must_match=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        speak(int(sys.argv[2]), sys.argv[3])
    else:
        Probe().run(judge)
