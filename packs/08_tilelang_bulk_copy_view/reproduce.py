# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["tilelang==0.1.15", "apache-tvm-ffi==0.1.11", "numpy==2.3.5", "torch==2.13.0", "z3-solver==4.15.4.0"]
# ///
"""A tilelang loop of two stages loads every tile to one address if it copies through T.view: tiles are overwritten.

Each stage has its own barriers, so tile i + 1 may land on tile i while the gemm reads it: on an H200 50 of 50 launches
are wrong, without an error. Control: launches without the view.
Cause: GetVersionedBuffers (src/cuda/transform/multi_version_buffer_rewriter.cc) counts what the producer writes and the
consumer reads by BufferNode, and a view is another BufferNode on the same data. Since release 0.1.9:
https://github.com/tile-ai/tilelang/pull/2002. Launches on a Hopper GPU; elsewhere reads the CUDA source, without nvcc.

    uv run reproduce.py                        # release 0.1.15: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a built checkout with a fix (there is no patch here): exit status 0
"""

import re
import sys

import tilelang
import torch

T = tilelang.language
tilelang.set_log_level("WARNING")
TILES = 64


def kernel(view):
    """Sum tile @ tile.T over the tiles, each of which is copied through a view of the tile's own shape."""

    @T.prim_func
    def main(A: T.Tensor((TILES, 64, 64), "bfloat16"), C: T.Tensor((64, 64), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((64, 64), "bfloat16")
            acc = T.alloc_fragment((64, 64), "float32")
            T.clear(acc)
            for i in T.Pipelined(TILES, num_stages=2):
                T.copy(A[i, :, :], T.view(tile, [64, 64]) if view else tile)
                T.gemm(tile, tile, acc, transpose_B=True)
            T.copy(acc, C)

    return main


def launches_wrong(view):
    """Launch the kernel 50 times, and compare with float64. The sums are of integers, hence exact."""
    tiles = torch.randint(-1, 2, (TILES, 64, 64), device="cuda").bfloat16()
    right = torch.einsum("tik,tjk->ij", tiles.double(), tiles.double()).float()
    run = tilelang.compile(kernel(view), out_idx=[1])
    wrong = sum(not torch.equal(run(tiles), right) for _ in range(50))
    print(f"through a view: {view}. {wrong} of 50 launches are wrong (right: 0)")
    return wrong > 0


def lowers_wrong(view):
    """Read in the CUDA source to which element of shared memory tile i is loaded."""
    with tilelang.tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c") as target:
        lowered = tilelang.lower(kernel(view), target, enable_host_codegen=False, enable_device_compile=False)
    element = re.search(r"tl::tma_load\(\w+, \w+\[.+?\], \(&\(\w+\[(.+)\]\)\),", lowered.kernel_source)[1]
    print(f"through a view: {view}. Tile i is loaded to element {element} (right: one that depends on i)")
    return not re.search(r"\bi\b", element)


is_hopper = torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
is_wrong = launches_wrong if is_hopper else lowers_wrong
if is_wrong(view=False):
    print("UNSUPPORTED: the loop without a view is wrong, too")
    sys.exit(125)
wrong = is_wrong(view=True)
print("BUG_REPRODUCED" if wrong else "FIX_VALIDATED")
sys.exit(10 if wrong else 0)
