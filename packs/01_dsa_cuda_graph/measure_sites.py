"""List the lines of upstream at which the host waits for the GPU in eager mode, site by site.

    PYTHONPATH=TREE python measure_sites.py cpu    > data/eager_waits.cpu.json
    PYTHONPATH=TREE python measure_sites.py sm_90a > data/eager_waits.sm_90a.json

On a GPU, PyTorch itself names them (torch.cuda.set_sync_debug_mode); on the CPU, the probe's own tracer does.
A sequence of calls is warm before it is listened to. No verdict depends on this.
"""

import concurrent.futures
import contextlib
import importlib.util
import json
import multiprocessing
import os
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from unittest import mock

FILE = Path(__file__).with_name("reproduce.py")
SPEC = importlib.util.spec_from_file_location("reproduce", FILE)
probe = importlib.util.module_from_spec(SPEC)
sys.modules["reproduce"] = probe  # by this name processes find its functions
SPEC.loader.exec_module(probe)


@contextlib.contextmanager
def watched(torch):
    """Yield the places at which PyTorch says that the host waits."""
    events = []

    def note(message, *_, **__):
        frames = [x for x in traceback.extract_stack() if "/megatron/" in x.filename]
        if "synchroniz" in str(message):
            events.extend(f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in frames[-1:])

    with warnings.catch_warnings(), mock.patch("warnings.showwarning", note):
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        yield events
        torch.cuda.set_sync_debug_mode("default")


def waits(name: str, rank: int, target: str, folder: str) -> list[str] | None:
    """Call one site twice, and list where the second call waits; None where the tree has no such site."""
    up, gpu, group = probe.begin(name, rank, target, folder)
    with watched(up.torch) if gpu else probe.counterfeit(up.torch) as events:
        up.device = up.device if gpu else up.torch.device("cuda:0")
        made = probe.sites(up, group)[name]
        step, sets, *_ = made() if callable(made) else made
        if step is None:
            return None
        step(*up.put(sets[0]))
        tensors = up.put(sets[0])
        events.clear()
        step(*tensors)
        return list(events)


def main() -> None:
    """Walk the sites and print one object: the lines of each, with how often they wait."""
    target, context = sys.argv[1], multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch"])
    pool = concurrent.futures.ProcessPoolExecutor(
        max_workers=min(16, os.cpu_count()),
        mp_context=context,
        max_tasks_per_child=1,
    )
    with tempfile.TemporaryDirectory() as folder, pool:
        count = 2 if target == "cpu" else pool.submit(probe.describe).result()[-1]
        able = [name for name in probe.NAMES if count > 1 or not name.startswith("two_ranks.")]
        started = {
            name: [pool.submit(waits, name, rank, target, folder) for rank in range(1 + name.startswith("two_ranks."))]
            for name in able
        }
        found = {name: [each.result() for each in ranks] for name, ranks in started.items()}
    for name, ranks in found.items():
        found[name] = None if None in ranks else {line: ranks[-1].count(line) for line in sorted(set(ranks[-1]))}
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
