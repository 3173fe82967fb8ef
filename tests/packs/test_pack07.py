"""Pack 07: its reference is the recurrence, its reading of CUDA tells a pointer from TMA."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from testing.workbench import REPOSITORY

FOLDER = REPOSITORY / "packs/07_mamba3_smem_flatten"
RECURRENCE = """
import json, sys, torch, contract

def distances(build, groups):
    case = contract.Case(build, 2, 21, 3, groups, False)
    given, dA = contract.example(case, "cpu")
    made = contract.reference(given, dA)
    x = {name: value.double() if torch.is_tensor(value) else value for name, value in given.items()}
    (B, S, H, P), (_, _, R, _, N) = x["v"].shape, x["q"].shape
    free = {name: x[name].clone().requires_grad_() for name in ("q", "k", "v", "dt")}
    free["dA"] = dA.double().requires_grad_()

    def turned(rows, angles):
        n = angles.shape[-1]
        a, b, cos, sin = rows[..., :n], rows[..., N // 2 : N // 2 + n], angles.cos()[:, None], angles.sin()[:, None]
        parts = (cos * a - sin * b, rows[..., n : N // 2], sin * a + cos * b, rows[..., N // 2 + n :])
        return torch.cat(parts, -1)

    def gated(rows, step):
        if x["z"] is not None:
            rows = rows * torch.nn.functional.silu(x["z"][:, step, None] * x["mimo_z"].transpose(0, 1))
        return rows if x["mimo_o"] is None else torch.einsum("brhp,hrp->bhp", rows, x["mimo_o"])

    state, before, outs = torch.zeros(B, H, N, P).double(), 0, []
    for step in range(S):
        q, k = (free[name][:, step] + x[name + "_bias"].transpose(0, 1) for name in "qk")
        values = free["v"][:, step, None] * x["mimo_v"].transpose(0, 1)
        q, k = q.expand(B, R, H, N), k.expand(B, R, H, N)
        dt, trap = free["dt"][:, :, step, None, None], x["trap"][:, :, step, None, None]
        state = (state + before * dt * (-trap).sigmoid()) * free["dA"][:, :, step, None, None].exp()
        now = dt * trap.sigmoid()
        out = torch.einsum("brhn,bhnp->brhp", turned(q, x["angles"][:, step]), state)
        out = out + torch.einsum("brhn,bchn,bchp->brhp", q, k, values) * now.permute(0, 2, 1, 3)
        out = out if x["D"] is None else out + x["D"][:, None] * values
        outs.append(gated(out, step))
        before = torch.einsum("brhn,brhp->bhnp", turned(k, x["angles"][:, step]), values)
        state = state + before * now
    found = torch.autograd.grad(torch.stack(outs, 1), list(free.values()), x["dout"])
    return contract.distances(dict(zip(free, found)), made)

print(json.dumps([distances(*case) for case in json.loads(sys.argv[1])]))
"""
WAYS = "import json, sys, contract; print(json.dumps(contract.ways(sys.stdin.read())))"
SHARED_MEMORY = "import sys, contract; print(contract.shared_memory(sys.stdin.read()))"


def _asked(code: str, *given: str, text: str = "") -> str:
    command = [sys.executable, "-B", "-c", code, *given]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run(
        command, cwd=FOLDER, env=environment, input=text, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_the_reference_is_the_recurrence() -> None:
    """Step by step, a length of no whole chunks, in float64; with and without z, D and mimo_o."""
    cases = list(itertools.product(("full", "bare", "gated_rows"), ("one", "each")))
    found = dict(zip(cases, json.loads(_asked(RECURRENCE, json.dumps(cases))), strict=True))
    for case, distances in found.items():
        assert set(distances) == {"q", "k", "v", "dt", "dA"}, case
        assert max(distances.values()) < 1e-12, (case, distances)


@pytest.mark.parametrize(
    ("parameters", "body", "wanted"),
    [
        ("const CUtensorMap K_desc, const CUtensorMap Q_desc", "Q K", {"tma": True, "Q": ["TMA"], "K": ["TMA"]}),
        ("const CUtensorMap K_desc, const half_t* Q", "K", {"tma": True, "Q": ["pointer"], "K": ["TMA"]}),
        ("const CUtensorMap K_desc, const CUtensorMap Q_desc, const half_t* Q", "K Q",
         {"tma": True, "Q": ["TMA", "pointer"], "K": ["TMA"]}),
        ("const half_t* K, const half_t* Q, const float* Q_BIAS", "",
         {"tma": False, "Q": ["pointer"], "K": ["pointer"]}),
        ("const CUtensorMap V_desc, const half_t* K", "V", {"tma": True, "Q": [], "K": ["pointer"]}),
    ],
)  # fmt: skip
def test_how_a_kernel_reaches_q_and_k(parameters: str, body: str, wanted: dict[str, Any]) -> None:
    loads = "".join(f"  tl::tma_load({name}_desc, mbarrier[0], (&(buffer[0])), 0, 0);\n" for name in body.split())
    declared = f'extern "C" __global__ void kernel({parameters})'
    source = f"{declared};\n{declared} {{\n{loads}}}\n"
    assert json.loads(_asked(WAYS, text=source)) == wanted


def test_the_shared_memory_is_the_last_argument_of_the_launch() -> None:
    launch = """
  (((TVMFFIAny*)stack_ffi_any)[38].v_int64) = ((int64_t)256);
  (((TVMFFIAny*)stack_ffi_any)[40].zero_padding) = 0;
  (((TVMFFIAny*)stack_ffi_any)[40].v_int64) = ((int64_t)223904);
  (((TVMFFIAny*)stack_ffi_any)[41].v_int64) = (int64_t)0;
"""
    assert _asked(SHARED_MEMORY, text=launch) == "223904\n"
