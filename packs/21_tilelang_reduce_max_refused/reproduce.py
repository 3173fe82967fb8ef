# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["tilelang==0.1.15", "apache-tvm-ffi==0.1.11", "numpy==2.3.5", "torch==2.13.0", "z3-solver==4.15.4.0"]
# ///
"""tilelang 0.1.13 to 0.1.15 refuse T.reduce_max after T.gemm where 8 warps share a row; 0.1.12 lowers it.

They refuse a [16, 128] float32 result with 256 threads. With 128 threads, or with 64 keys, 0.1.15 must lower it; 0.1.13
refuses 128 threads, too. The check came with https://github.com/tile-ai/tilelang/pull/2424. No GPU is needed.

    uv run reproduce.py                        # release 0.1.15: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a built checkout with a fix (there is no patch here): exit status 0
"""

import sys

import tilelang
import tilelang.language as T  # noqa: N812 - its usual name


def lowers(keys, threads):
    """Lower the maximum of each of the 16 rows of Q @ K.T to CUDA source."""

    @T.prim_func
    def main(Q: T.Tensor((16, 64), "bfloat16"), K: T.Tensor((keys, 64), "bfloat16"), M: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=threads) as _:
            q, k = T.alloc_shared((16, 64), "bfloat16"), T.alloc_shared((keys, 64), "bfloat16")
            scores, largest = T.alloc_fragment((16, keys), "float32"), T.alloc_fragment((16,), "float32")
            T.copy(Q, q)
            T.copy(K, k)
            T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
            T.reduce_max(scores, largest, dim=1)
            T.copy(largest, M)

    refusal = ""
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c") as target:
        try:
            tilelang.lower(main, target, enable_host_codegen=False, enable_device_compile=False)
        except tilelang.tvm.error.InternalError as error:
            refusal = str(error).strip().splitlines()[-1].split(": ")[2]
            assert "thread-owned reduce segment" in refusal, refusal
    print(f"{keys} keys, {threads} threads: {refusal or 'lowered'} (right: lowered)")
    return not refusal


if not (lowers(64, 256) and lowers(128, 128)):
    print("UNSUPPORTED: reductions that 0.1.15 lowers are refused, too")
    sys.exit(125)
right = lowers(128, 256)
print("FIX_VALIDATED" if right else "BUG_REPRODUCED")
sys.exit(0 if right else 10)
