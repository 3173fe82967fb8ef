# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["apache-tvm-ffi==0.1.9", "einops==0.8.2", "numpy==2.3.5", "tilelang==0.1.8", "torch==2.11.0"]
# ///
"""With TMA on, tilelang 0.1.8 refuses both kernels of Mamba-3's MIMO backward: "Cannot detect TMA layout".

mamba-ssm switches TMA and warp specialisation off in this file, so nobody meets the error today. With both on, the
copies of Q and K from global memory go into a rank-3 T.view of a shared buffer that has a swizzled layout, and tilelang
lowers a swizzled copy to TMA for rank 2 only (the control). The script lowers bwd_fwd; bwd_bwd copies K the same way.
https://github.com/tile-ai/tilelang/pull/2380 lifts the limit in later releases. No GPU and no nvcc are needed.

    PYTHONPATH=mamba_ssm-2.3.2.post1 uv run reproduce.py    # an unpacked sdist: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py                 # with the patch: FIX_VALIDATED, exit status 0
"""

import re
import sys
from importlib.util import find_spec, module_from_spec

import tilelang
import tilelang.language as T  # noqa: N812 - its usual name

sys.modules["mamba_ssm"] = module_from_spec(find_spec("mamba_ssm"))  # its __init__ needs compiled extensions
from mamba_ssm.ops.tilelang.mamba3 import mamba3_mimo_bwd


@T.prim_func
def copy_rank_2(X: T.Tensor((64, 64), "float16"), Y: T.Tensor((64, 64), "float16")):
    """Copy through a swizzled shared buffer of rank 2, which tilelang lowers to TMA."""
    with T.Kernel(1, threads=128):
        shared = T.alloc_shared((64, 64), "float16")
        T.annotate_layout({shared: tilelang.layout.make_swizzled_layout(shared)})
        T.copy(X, shared)
        T.copy(shared, Y)


def loads_by_tma(program):
    """Lower a program with TMA and warp specialisation on; return the arguments that it loads by TMA."""
    options = {"tl.disable_tma_lower": False, "tl.disable_warp_specialized": False, "tl.enable_fast_math": True}
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c")
    with tilelang.tvm.transform.PassContext(opt_level=3, config=options), target:
        source = tilelang.lower(program, target=target, enable_device_compile=False).kernel_source
    return set(re.findall(r"tl::tma_load\((\w+)_desc", source))


batch, length, heads, groups = map(T.dynamic, ("B", "S", "H", "G"))
sizes = {"N": 64, "P": 64, "R": 2, "hasZ": False, "hasD": False, "reduceO": False, "chunk_size": 32, "dtype": "float16"}
program = mamba3_mimo_bwd.mamba_mimo_bwd_fwd.get_tir(batch, length, heads, groups, **sizes)

if loads_by_tma(copy_rank_2) != {"X"}:
    print("UNSUPPORTED: this tilelang makes no TMA load of a swizzled copy of rank 2")
    sys.exit(125)
print("a swizzled copy of rank 2 is lowered to TMA")
try:
    loaded = loads_by_tma(program)
    print("bwd_fwd is lowered, and loads by TMA:", ", ".join(sorted(loaded)), "(right: Q and K among them)")
except tilelang.tvm.error.InternalError as error:
    if "Cannot detect TMA layout" not in str(error):
        raise
    loaded = set()
    print("bwd_fwd is refused:", str(error).strip().splitlines()[-1], "(right: lowered, Q and K loaded by TMA)")
print("FIX_VALIDATED" if {"Q", "K"} <= loaded else "BUG_REPRODUCED")
sys.exit(0 if {"Q", "K"} <= loaded else 10)
