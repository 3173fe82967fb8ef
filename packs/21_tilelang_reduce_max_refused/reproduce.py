# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["tilelang==0.1.15", "apache-tvm-ffi==0.1.11", "numpy==2.3.5", "torch==2.13.0", "z3-solver==4.15.4.0"]
# ///
"""tilelang 0.1.13 to 0.1.15 refuse T.reduce_max of a [16, 128] T.gemm result with 256 threads; 0.1.12 lowers it.

Control: a [16, 64] result. Cause: the check of https://github.com/tile-ai/tilelang/pull/2424 asks Z3 to prove two
indices equal. They are equal for every value, but Z3 reaches its step limit. Nothing is launched, so no GPU is needed.

    uv run reproduce.py                        # release 0.1.15: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a built checkout with a fix (there is no patch here): exit status 0
"""

import tilelang
import tilelang.language as T  # noqa: N812 - its usual name


def lower(keys):
    """Lower the maximum of each of 16 rows of K @ K.T to CUDA source; return "lowered", or why it is refused."""

    @T.prim_func
    def main(K: T.Tensor((keys, 64), "bfloat16"), M: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=256) as _:
            k, scores = T.alloc_shared((keys, 64), "bfloat16"), T.alloc_fragment((16, keys), "float32")
            largest = T.alloc_fragment((16,), "float32")
            T.copy(K, k)
            T.gemm(k[:16, :], k, scores, transpose_B=True, clear_accum=True)
            T.reduce_max(scores, largest, dim=1)
            T.copy(largest, M)

    try:
        with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c") as target:
            tilelang.lower(main, target, enable_host_codegen=False, enable_device_compile=False)
    except tilelang.tvm.error.InternalError as error:
        return next(line for line in str(error).splitlines() if "thread-owned reduce segment" in line)
    return "lowered"


narrow, wide = lower(64), lower(128)
print(f"64 keys: {narrow} (right: lowered)\n128 keys: {wide} (right: lowered)")
if narrow != "lowered":
    print("UNSUPPORTED: a reduction that 0.1.15 lowers is refused, too")
    raise SystemExit(125)
print("FIX_VALIDATED" if wide == "lowered" else "BUG_REPRODUCED")
raise SystemExit(0 if wide == "lowered" else 10)
