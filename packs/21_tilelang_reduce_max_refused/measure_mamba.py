"""Lower both backward kernels of mamba-ssm's Mamba-3 MIMO with the tilelang that is there, and note what became of it.

No GPU is needed. `PYTHONPATH=MAMBA:TILELANG python measure_mamba.py data/mamba.json` adds the entry of that tilelang;
MAMBA is mamba-ssm 2.3.2.post1, unpacked. The kernels get what mamba_mimo_bwd_combined passes them, in the default sizes
of the module Mamba3 (d_state 128, headdim 64, mimo_rank 4, chunk_size 16); each is lowered in a process of its own.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import importlib.util
import json
import multiprocessing
import sys
import unittest.mock
from pathlib import Path
from typing import Any

B, S, H, G, R, N, P, CHUNK, DIVISOR = 1, 128, 4, 1, 4, 128, 64, 16, 4
KERNELS = ("bwd_fwd", "bwd_bwd")


def load() -> Any:
    """Import the real module below a package that is not executed: its __init__ imports compiled code."""
    spec = importlib.util.find_spec("mamba_ssm")
    if spec is None:
        raise SystemExit("no mamba_ssm on PYTHONPATH")
    sys.modules.setdefault("mamba_ssm", importlib.util.module_from_spec(spec))
    return importlib.import_module("mamba_ssm.ops.tilelang.mamba3.mamba3_mimo_bwd")


def arguments(torch: Any) -> dict[str, Any]:
    """Make arguments of mamba_mimo_bwd_combined; their values play no part."""
    zeros, low = torch.zeros, torch.bfloat16
    given = {name: zeros(B, S, H, P, dtype=low) for name in ("dout", "v", "z")}
    given |= {name: zeros(B, S, R, G, N, dtype=low) for name in "qk"}
    given |= {name: zeros(H, R, N) for name in ("q_bias", "k_bias")}
    given |= {name: zeros(H, R, P) for name in ("mimo_v", "mimo_o", "mimo_z")}
    given |= {name: zeros(B, H, S) for name in ("dt", "dA_cs", "dA_cs_rev")}
    given |= {"D": zeros(H), "trap": zeros(B, H, S, dtype=low), "angles": zeros(B, S, H, N // DIVISOR)}
    given |= {"segsum": zeros(B, H, S // CHUNK, CHUNK, CHUNK)}
    return {**given, "chunk_size": CHUNK, "rotary_dim_divisor": DIVISOR, "dtype": low}


def requested(module: Any) -> dict[str, tuple[Any, Any]]:
    """Return what mamba-ssm's own entry point gives each jit function."""
    calls: dict[str, tuple[Any, Any]] = {}

    def record(kernel: str, *args: Any, **kwargs: Any) -> Any:
        def run(*_: Any) -> None:
            calls[kernel] = args, kwargs
            if len(calls) == len(KERNELS):
                raise StopIteration  # before the first that needs a GPU

        return run

    recorders = {f"mamba_mimo_{kernel}": functools.partial(record, kernel) for kernel in KERNELS}
    with contextlib.suppress(StopIteration), unittest.mock.patch.multiple(module, **recorders):
        module.mamba_mimo_bwd_combined(**arguments(module.torch))
    return calls


def lower(kernel: str) -> str:
    """Lower one kernel for sm_90a with its own options; return `lowers`, or what it is refused with."""
    module = load()
    tilelang = module.tilelang
    args, kwargs = requested(module)[kernel]
    function = getattr(module, f"mamba_mimo_{kernel}")
    program = function.get_tir(*args, **kwargs)
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c")
    options = {getattr(name, "value", name): value for name, value in function.pass_configs.items()}
    try:
        with tilelang.tvm.transform.PassContext(opt_level=3, config=options), target:
            tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
    except tilelang.tvm.error.InternalError as error:
        return str(error).strip().splitlines()[-1]
    return "lowers"


def main() -> None:
    """Add the entry of this tilelang to the file that the command line names."""
    path = Path(sys.argv[1])
    version = load().tilelang.__version__
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        found = dict(zip(KERNELS, pool.map(lower, KERNELS, chunksize=1), strict=True))
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[f"tilelang-{version.replace('.', '-')}"] = found
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
