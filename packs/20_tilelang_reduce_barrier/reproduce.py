# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["tilelang==0.1.15", "apache-tvm-ffi==0.1.11", "numpy==2.3.5", "torch==2.13.0", "z3-solver==4.15.4.0"]
# ///
"""tilelang >= 0.1.10: T.reduce_sum over several warps gives wrong sums, as the next store may overwrite its workspace.

On an H200 about four blocks of ten are wrong: no barrier stands before the store to p (float16), though p and the
workspace (float32) begin at the same byte. Control: both are float16. Cause: PointerAccessIsDisjoint (in
src/transform/thread_storage_sync.cc) compares ranges in elements of two sizes, not in bytes. Launches on Hopper or
newer; elsewhere reads the CUDA source. For equal indices it was fixed in https://github.com/tile-ai/tilelang/pull/2293

    uv run reproduce.py                        # release 0.1.15: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a built checkout with a fix (there is no patch here): exit status 0
"""

import re
import sys

import tilelang
import tilelang.language as T  # noqa: N812 - its usual name
import torch

tilelang.set_log_level("WARNING")
GRID, F16, F32 = 8448, "float16", "float32"


def kernel(dtype):
    """Sum the rows of scores = q @ k.T, and store the scores to p, which is needed later, as q and k are."""

    @T.prim_func
    def main(
        Q: T.Tensor((16, 64), F16), K: T.Tensor((64, 64), F16), Row: T.Tensor((GRID, 16), dtype),
        Out: T.Tensor((16, 64), F32),
    ):  # fmt: skip
        with T.Kernel(GRID, threads=128) as block:
            q, k, p = T.alloc_shared((16, 64), F16), T.alloc_shared((64, 64), F16), T.alloc_shared((16, 64), F16)
            scores, row = T.alloc_fragment((16, 64), dtype), T.alloc_fragment((16,), dtype)
            out = T.alloc_fragment((16, 64), F32)
            T.copy(Q, q)
            T.copy(K, k)
            T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
            T.reduce_sum(scores, row, dim=1)
            T.copy(scores, p)  # slower warps may still read partial sums from the same bytes
            T.gemm(q, k, out, clear_accum=True)
            T.gemm(p, k, out)
            T.copy(row, Row[block, :])
            T.copy(out, Out)

    return main


def launches_wrong(dtype):
    """Launch the kernel 50 times on -1, 0 and 1, of which every sum is exact."""
    q, k = (torch.randint(-1, 2, (rows, 64), device="cuda").half() for rows in (16, 64))
    right = (q.double() @ k.double().T).sum(1)
    run = tilelang.compile(kernel(dtype), out_idx=[2, 3])
    wrong = sum((run(q, k)[0] != right).any(1).sum().item() for _ in range(50))
    print(f"scores of {dtype}, p of float16: {wrong} of {50 * GRID} blocks have a wrong sum; expected: 0")
    return wrong > 0


def lowers_wrong(dtype):
    """Read in the CUDA source where both buffers begin, and what stands between the read of one and the store."""
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c") as target:
        lowered = tilelang.lower(kernel(dtype), target, enable_host_codegen=False, enable_device_compile=False)
    byte = dict(re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)\)", lowered.kernel_source))
    between = re.search(r"(?s)\*\)workspace\)(.*?)\*\)p\)", lowered.kernel_source)
    barrier = bool(between) and "__syncthreads" in between[1]
    print(f"scores of {dtype}, p of float16: first bytes are {byte}; barrier between: {barrier} (right: True)")
    return byte.get("workspace") == byte.get("p") and not barrier


on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability() >= (9, 0)  # older ones have no stmatrix
is_wrong = launches_wrong if on_gpu else lowers_wrong
if is_wrong(F16):
    print("UNSUPPORTED: not even buffers of one element size are right")
    sys.exit(125)
wrong = is_wrong(F32)
print("BUG_REPRODUCED" if wrong else "FIX_VALIDATED")
sys.exit(10 if wrong else 0)
