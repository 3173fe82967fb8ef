"""Run pack 01's functions from the tree on the path over random and adversarial inputs; print what they gave.

Not a test by itself: tests/test_pack01.py runs it on the pristine and on the patched tree and compares.
"""

# ruff: noqa: ANN401 - torch and upstream are modules that are imported where the tree is

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import itertools
import json
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

FILE = Path(__file__).resolve().parents[1] / "packs/01_dsa_cuda_graph/reproduce.py"
TRIALS = 40


def positions(cu: list[int], size: int, rank: int, count: int) -> list[int]:
    """List one rank's rows of packed sequences, and then those beyond the last sequence, one by one."""
    rows: list[int] = []
    for begin, end in itertools.pairwise(cu):
        half = (end - begin) // size // 2
        rows += [*range(begin + rank * half, begin + (rank + 1) * half)]
        rows += [*range(end - (rank + 1) * half, end - rank * half)]
    return rows + [cu[-1] + rank * count + i for i in range(count - len(rows))]


def cumulative(draw: random.Random, unit: int) -> list[int]:
    """Draw cumulative lengths: sequences of zero tokens are common, and now and then all of them are."""
    longest = draw.choice([0, 1, 1, 3, 3])
    lengths = [unit * draw.choice([0, draw.randint(0, longest)]) for _ in range(draw.randint(1, 6))]
    return [sum(lengths[:i]) for i in range(len(lengths) + 1)]


class Trials:
    """What every call gave, in eager mode and where it is told that it is captured."""

    def __init__(self, probe: Any, torch: Any) -> None:
        """Take the probe and torch, as modules."""
        self.probe, self.torch = probe, torch
        self.digests: dict[str, Any] = {}
        self.captured: dict[str, list[str]] = {}
        self.wrong: dict[str, int] = {}

    def _run(self, function: Callable[..., Any], *tensors: Any) -> list[Any] | str:
        try:
            found = function(*(x.clone() for x in tensors))
        except (ValueError, RuntimeError, AssertionError, IndexError) as error:
            return type(error).__name__
        found = list(vars(found).values()) if hasattr(found, "__dataclass_fields__") else found
        return [x.detach().clone() for x in (found if isinstance(found, (tuple, list)) else (found,))]

    def call(self, name: str, function: Callable[..., Any], *tensors: Any, wanted: list[Any] | None = None) -> None:
        """Call it in eager mode, then as if under capture, and note what differs.

        Args:
            name: of the property.
            function: what is called.
            tensors: its inputs.
            wanted: the reference's tensors; None where there is none.

        """
        eager = self._run(function, *tensors)
        parts = eager if isinstance(eager, str) else [[str(x.dtype), [*x.shape], x.tolist()] for x in eager]
        state = self.digests.setdefault(name, hashlib.sha256())
        state.update(repr(parts).encode())
        if wanted is not None and not isinstance(eager, str):
            same = all(x.shape == y.shape and self.torch.equal(x, y) for x, y in zip(eager, wanted, strict=True))
            self.wrong[name] = self.wrong.get(name, 0) + (not same)
        with mock.patch("torch.cuda.is_current_stream_capturing", return_value=True):
            captured = self._run(function, *tensors)
        if isinstance(eager, str):
            return  # what eager mode refuses cannot be compared
        if isinstance(captured, str) or any(
            x.shape != y.shape or not self.torch.equal(x, y) for x, y in zip(captured, eager, strict=True)
        ):
            self.captured.setdefault(name, []).append(repr(parts)[:200])


def pack(trials: Trials, up: Any, draw: random.Random, kind: str) -> None:
    """Positions, key order and segments of packed sequences."""
    torch, size = up.torch, draw.randint(1, 4)
    rank, unit, device = draw.randrange(size), 2 * size, torch.device("cpu" if kind == "host" else "cuda:0")
    cu = cumulative(draw, unit)
    if draw.random() < 0.1:
        cu = [x + (i == len(cu) - 1) for i, x in enumerate(cu)]  # not divisible: the host refuses it
    local, tail = cu[-1] // size, draw.choice([0, 0, 1, 5])
    tensor, empty = torch.tensor(cu, dtype=draw.choice([torch.int32, torch.int64])), cu[-1] == 0
    options = {"output_size": local + tail, "cu_seqlens_cover_output": tail == 0 and draw.random() < 0.5}
    one = trials.probe.need(up.dsa_layout, "build_packed_allgather_cp_local_positions", device=device)
    wanted = [torch.tensor(positions(cu, size, rank, local + tail), dtype=torch.int64)]
    if size == 1:
        wanted = [torch.arange(local + tail)]
    known = None if (empty and size > 1) or cu[-1] % unit else wanted
    name = f"{kind}.positions" + ".empty" * empty
    trials.call(name, lambda x: one(x, size, rank, **options), tensor, wanted=known)
    if not cu[-1] % unit:
        order = up.dsa_layout.build_packed_allgather_cp_query_positions_and_key_reorder
        name = f"{kind}.order" + ".empty" * empty
        trials.call(name, lambda x: order(x, x, size, rank, device, local + tail), tensor)
    if size > 1:
        layout = up.dsa_layout.build_packed_cp_indexer_layout
        full = {"cp_size": size, "cp_rank": rank, "key_size": cu[-1]}
        trials.call(f"{kind}.layout", lambda x: layout(x, x, **full), tensor)
        pair, rows = torch.tensor([0, 2 * local * size]), {**full, "key_size": 2 * local, "local_key_layout": True}
        trials.call(f"{kind}.layout.local", lambda x: layout(x, x, **rows), pair)


def rotate(trials: Trials, up: Any, draw: random.Random) -> None:
    """RoPE of packed sequences, and a rank's part of a table."""
    torch, size = up.torch, draw.randint(1, 3)
    rank, cu = draw.randrange(size), cumulative(draw, 2 * size)
    config = SimpleNamespace(apply_rope_fusion=False, rotary_interleaved=draw.random() < 0.5)
    options = {"mscale": draw.choice([1.0, 1.3]), "mla_rotary_interleaved": draw.random() < 0.5}
    options["cp_group"] = trials.probe.ranks(size, rank)
    rows = cu[-1] // size + draw.choice([0] * 9 + [1])  # one row too many is refused
    t = torch.randn(rows, 2, 10).to(draw.choice([torch.float32, torch.bfloat16]))
    freqs = torch.randn(cu[-1] if draw.random() < 0.5 and cu[-1] else 40, 1, 1, 8)
    apply = up.rope_utils.apply_rotary_pos_emb
    lengths = torch.tensor(cu, dtype=torch.int32)
    trials.call("rope", lambda t, f, c: apply(t, f, config, cu_seqlens=c, **options), t, freqs, lengths)
    table = torch.randn(2 * size * draw.randint(1, 4), 1, 1, 4)
    trials.call("rope.part", lambda x: up.rope_utils.get_pos_emb_on_this_cp_rank(x, 0, options["cp_group"]), table)


def score(trials: Trials, up: Any, draw: random.Random) -> None:
    """Top-k masks with -1 everywhere, nowhere and between real zeros; bounds; gradients of loss and sparse kernel."""
    torch, width = up.torch, draw.randint(1, 7)
    topk = torch.rand(2, 9, 11).argsort()[..., :width]
    topk = draw.choice([topk, topk * 0 - 1, topk * 0, topk % 2 - 1, topk.masked_fill(topk > draw.randint(-1, 11), -1)])

    chunk = draw.randint(1, 12)

    def scatter(indices: Any) -> Any:
        mask = torch.full((2, 9, 11), -torch.inf, device=torch.device("cuda:0"))
        up.dsa_masking.scatter_topk_into_index_mask(mask, indices, seq_chunk_size=chunk)
        return mask

    wanted = torch.full((2, 9, 11), -torch.inf)
    for place in itertools.product(range(2), range(9)):
        for key in topk[place].tolist():
            if key >= 0:
                wanted[(*place, key)] = 0
    trials.call("scatter", scatter, topk, wanted=[wanted])
    cu = cumulative(draw, 3)
    starts = [begin for begin, end in itertools.pairwise(cu) for _ in range(begin, end)]
    known = [torch.tensor(starts, dtype=torch.int64), torch.arange(1, cu[-1] + 1)]
    trials.call("varlen", up.dsa_masking.generate_varlen_mask_params, torch.tensor(cu), wanted=known)
    sites = trials.probe.sites(up, trials.probe.ranks(1))
    step, sets, *_ = sites["cudnn_backward"]
    tensors = [*sets[0][:6], *(torch.randint(0, high, shape).int() for high, shape in ((32, (32, 6)), (7, (32,))))]
    tensors[-1] = tensors[-1] * draw.choice([0, 1, 1, 1])
    module = up.dsa_cudnn_kernels

    def refuse_empty_rows() -> None:
        space = vars(module)["_cudnn_dsa"]
        kernel = space.sparse_attention_backward_wrapper

        def strict(*args: Any, topk_length: Any, **options: Any) -> Any:
            if not bool((topk_length > 0).all()):
                raise RuntimeError("a row without keys reached the kernel")
            return kernel(*args, topk_length=topk_length, **options)

        space.sparse_attention_backward_wrapper = strict

    with mock.patch.object(module, "_ensure_dsa_namespace", refuse_empty_rows):
        trials.call("sparse_backward", step, *tensors)
    step, sets, *_ = sites["indexer_loss"]
    trials.call("indexer_loss", step, *sets[0])


@contextlib.contextmanager
def on_host() -> Iterator[None]:
    """Leave tensors what they are; nothing here is ever captured."""
    with mock.patch("torch.cuda.is_current_stream_capturing", return_value=False):
        yield


def main() -> None:
    """Run all trials with fixed seeds, and print one JSON object."""
    spec = importlib.util.spec_from_file_location("reproduce", FILE)
    assert spec is not None and spec.loader is not None  # noqa: PT018 - it is one fact
    probe = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(probe)
    up = probe.load()
    trials = Trials(probe, up.torch)
    for kind in ("host", "device"):
        draw = random.Random(1)  # noqa: S311 - no secret
        up.torch.manual_seed(1)
        with on_host() if kind == "host" else probe.counterfeit(up.torch):
            up.device = up.torch.device("cpu" if kind == "host" else "cuda:0")
            for _ in range(TRIALS):
                pack(trials, up, draw, kind)
                if kind == "device":
                    rotate(trials, up, draw)
                    score(trials, up, draw)
    digests = {name: state.hexdigest() for name, state in trials.digests.items()}
    json.dump({"eager": digests, "captured": trials.captured, "wrong": trials.wrong}, sys.stdout)


if __name__ == "__main__":
    main()
