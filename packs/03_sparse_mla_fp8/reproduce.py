# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["megatron-core==0.19.2", "transformer-engine==2.12.0", "pydantic==2.12.5", "torch==2.13.0"]
# ///
"""Megatron's fused sparse MLA copies an FP8 query and key to bfloat16, 2 times their bytes, or gets 2 NULL pointers.

No warning says so. A Float8Tensor of Transformer Engine (TE) has the dtype it stands for, and data_ptr() 0. The
dispatcher sees the dtype, and dequantizes. SparseMLA.apply gives the kernel NULL if batch >= 2 and 256 divides all
lengths. Since https://github.com/NVIDIA/Megatron-LM/pull/5049. Without a GPU or TE's extension, kernels are mocks.

    uv run reproduce.py                        # megatron-core 0.19.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import os
import sys
import warnings
from pathlib import Path
from sysconfig import get_path
from unittest.mock import MagicMock

import torch

compiled = any(Path(get_path("purelib")).rglob("transformer_engine_torch*.so"))
torch.set_default_device("cuda" if torch.cuda.is_available() and compiled else "cpu")
DEVICE = torch.get_default_device().type
if DEVICE == "cpu":  # first Megatron alone: where it sees Transformer Engine, it asks for the compiled extension
    sys.modules |= {"tilelang": MagicMock(), "transformer_engine": None}
from megatron.core import fp8_utils
from megatron.core.transformer.experimental_attention_variant.ops import sparse_mla, tilelang_dsa

if DEVICE == "cpu":  # then Transformer Engine's tensor classes, with a mock of the extension
    del sys.modules["transformer_engine"]
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # transformer_engine then loads no library
    extension = MagicMock(dequantize=lambda x, _: torch.zeros(x.shape).bfloat16(), **{"DType.kFloat8E4M3.name": "FP8"})
    sys.modules |= {"transformer_engine_torch": extension, "transformer_engine.pytorch": MagicMock(__spec__=None)}
    import transformer_engine

    transformer_engine.pytorch.__path__ = [f"{transformer_engine.__path__[0]}/pytorch"]
from transformer_engine.pytorch.tensor import Float8Tensor, QuantizedTensor
from transformer_engine_torch import DType

fp8_utils.FP8_TENSOR_CLASS, fp8_utils.HAVE_TE_FP8_TENSOR_CLASS = QuantizedTensor, True
kernel, operands = sparse_mla.sparse_mla_fwd_interface, []
indices = torch.randint(256, (2, 256, 64), dtype=torch.int32)


def noted(query, key, indices, **options):
    """Stand before the kernel: note query and key, and launch it unless a pointer is NULL, which tilelang refuses."""
    operands.extend((query, key))
    if DEVICE == "cuda" and query.data_ptr() and key.data_ptr():
        return kernel(query, key, indices, **options)
    return torch.zeros(2, 256, 16, 512).bfloat16(), torch.zeros(2, 256, 16)


def is_right(name, bits, *layout):
    """Call an entry point with bfloat16 (16 bits) or FP8 (8), and judge what the kernel gets."""
    pair = [torch.ones(*layout, heads, 576).bfloat16() for heads in (16, 1)]
    if bits == 8:
        form = {"device": DEVICE, "fp8_dtype": DType.kFloat8E4M3, "fp8_scale_inv": torch.ones(1)}
        pair = [Float8Tensor(shape=x.shape, dtype=x.dtype, data=x.byte() * 56, **form) for x in pair]  # byte 56 is 1.0
    operands.clear()
    with warnings.catch_warnings(record=True, action="always") as caught:
        if name == "SparseMLA.apply":
            sparse_mla.SparseMLA.apply(*pair, indices[:, :, None], 0.04)
        else:
            tilelang_dsa.fused_sparse_mla_absorbed(*pair, indices, 0.04, 512)
    told, null = [x.message for x in caught if "megatron" in x.filename], sum(x.data_ptr() == 0 for x in operands)
    times = sum(x.nbytes for x in operands if x.data_ptr()) / sum(x.numel() * bits / 8 for x in pair)
    print(f"{name}, {bits} bits: {null} NULL pointers, bytes x {times:g}, warnings: {told}; right: 0, x 1 or a warning")
    return null == 0 and (0 < times <= 1 or len(told) > 0)


sparse_mla.sparse_mla_fwd_interface = noted
if not is_right("dispatcher", 16, 256, 2) & is_right("SparseMLA.apply", 16, 2, 256):
    print("UNSUPPORTED: plain bfloat16 is wrong too")
    sys.exit(125)
fixed = is_right("dispatcher", 8, 256, 2) & is_right("SparseMLA.apply", 8, 2, 256)
print("FIX_VALIDATED" if fixed else "BUG_REPRODUCED")
sys.exit(0 if fixed else 10)
