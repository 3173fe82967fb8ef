# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["tilelang==0.1.15", "apache-tvm-ffi==0.1.11", "numpy==2.3.5", "torch==2.13.0", "z3-solver==4.15.4.0"]
# ///
"""tilelang 0.1.13 to 0.1.15 refuse reductions of a gemm's result that 0.1.12 lowers: here [64, 64] viewed as [16, 256].

A plain T.reduce_max(acc, out, dim=1) of a [16, 128] result is refused, too, with 256 threads; of [16, 64] it lowers.
Cause: CheckThreadOwnedStepsProjectable (src/backend/common/op/reduce.h, since #2424 and #2647) asks the analyzer to
prove that two indices are equal. They are equal for every value, but Z3 reaches its limit of steps before the proof.

https://github.com/tile-ai/tilelang/pull/2647. Needs neither a GPU nor nvcc.
    uv run reproduce.py                        # the release 0.1.15: BUG_REPRODUCED
    PYTHONPATH=CHECKOUT python reproduce.py    # a checkout, patched and built: FIX_VALIDATED
"""

import sys

import tilelang

T = tilelang.language
BF16 = "bfloat16"


def kernel(rows, columns, width):
    """Multiply into acc [rows, columns], and write the largest value of each row of acc, seen as [16, width]."""

    @T.prim_func
    def main(A: T.Tensor((rows, 64), BF16), B: T.Tensor((columns, 64), BF16), C: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=256) as _:
            a = T.alloc_shared((rows, 64), BF16)
            b = T.alloc_shared((columns, 64), BF16)
            acc = T.alloc_fragment((rows, columns), "float32")
            out = T.alloc_fragment((16,), "float32")
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc, transpose_B=True, clear_accum=True)
            T.reduce_max(acc if width == columns else T.view(acc, [16, width]), out, dim=1)
            T.copy(out, C)

    return main


def is_refused(rows, columns, width):
    """Lower one kernel to CUDA source, and say whether tilelang refuses it for the reason above."""
    message = "lowered"
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c") as target:
        try:
            tilelang.lower(kernel(rows, columns, width), target, enable_host_codegen=False, enable_device_compile=False)
        except tilelang.tvm.error.InternalError as error:
            if "thread-owned reduce segment" not in str(error):
                raise
            message = str(error).strip().splitlines()[-1].split(": ")[2]
    print(f"[{rows}, {columns}] reduced in rows of {width}: {message} (right: lowered)")
    return message != "lowered"


if is_refused(16, 64, 64):
    print("UNSUPPORTED: the reduction that 0.1.15 lowers is refused, too")
    sys.exit(125)
wrong = [is_refused(64, 64, 256), is_refused(16, 128, 128)]
print("BUG_REPRODUCED" if any(wrong) else "FIX_VALIDATED")
sys.exit(10 if any(wrong) else 0)
