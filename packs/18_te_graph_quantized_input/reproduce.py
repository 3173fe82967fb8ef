# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "pydantic==2.12.5", "torch==2.13.0", "transformer-engine==2.20.2"]
# ///
"""A graphed callable of Transformer Engine computes with the captured values of a quantized argument.

Captured with 1.0 and called with 3.0, ReLU gives 1.0 where it should give 3.0. No error. Plain tensors are right.
graph.py copies an argument where its data_ptr() is not that of the graph's own tensor. Of quantized tensors it is 0.

    python reproduce.py                        # release 2.20.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT python reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import enum
import importlib.util
import os
import sys
import types
from unittest.mock import MagicMock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TE, GPU = "transformer_engine.pytorch", torch.cuda.is_available()


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph where there is no GPU: operators are recorded, and called again on the same tensors."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.steps = [*getattr(self, "steps", []), (function, args, kwargs or {}, result)]
        return result

    def replay(self):
        for function, args, kwargs, result in self.steps:
            result.copy_(function(*args, **kwargs))


def mock():
    """Mock the compiled extension and what loads it; graph.py and the tensor classes are real."""
    for name in [name for name in sys.modules if name.startswith("transformer_engine")]:
        del sys.modules[name]
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    [folder] = importlib.util.find_spec("transformer_engine").submodule_search_locations
    for name, path in (("transformer_engine", folder), (TE, f"{folder}/pytorch")):
        sys.modules[name] = MagicMock(__path__=[path], __spec__=None)
    classes = ["Sequential", "BasicOperation", "OperationFuser", "TransformerEngineBaseModule", "LinearAttentionBase"]
    mocked = "onnx_extensions triton triton.pad ops ops.op ops.fuser module module.base attention "
    for name in (mocked + "attention.linear_attention attention.linear_attention.base").split():
        sys.modules[f"{TE}.{name}"] = MagicMock(**{name: type(name, (), {}) for name in classes})
    compiled = sys.modules["transformer_engine_torch"] = MagicMock(get_cublasLt_version=lambda: 130000)
    types_of_data = "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1"
    compiled.DType = enum.IntEnum("DType", types_of_data)
    if not GPU:
        torch._C._graph_pool_handle = MagicMock()  # noqa: SLF001 - graph.py imports it
    tensor, graph = (importlib.import_module(f"{TE}.{name}") for name in ("tensor", "graph"))
    if not GPU:
        torch.cuda = MagicMock(CUDAGraph=RecordedGraph, graph=lambda graph, **_: graph)
        torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(major=9, minor=0)
    return tensor.IdentityQuantizer(), graph.make_graphed_callables


try:
    te = importlib.import_module(TE if GPU else "transformer_engine_needs_a_gpu")
    quantizer = te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cuda"))
    make, name = te.make_graphed_callables, "Float8Tensor"
except (ImportError, OSError, RuntimeError):
    (quantizer, make), name = mock(), "IdentityTensor, the compiled extension is a mock"
result = {}
for kind, quantize in (("plain tensor", torch.clone), (name, quantizer)):
    one, three = (quantize(torch.full((32, 32), value, device="cuda" if GPU else "cpu")) for value in (1.0, 3.0))
    with torch.no_grad():
        result[kind] = make(torch.nn.ReLU().eval(), (one,))(three)[0, 0].item()
    print(f"ReLU, captured with 1.0 and called with 3.0: {result[kind]}, expected 3.0 ({kind})")
if result["plain tensor"] != 3:
    sys.exit(print("UNSUPPORTED: a plain tensor is wrong already") or 125)
fixed = abs(result[name] - 3) < 0.2  # FP8 has 3 bits after the first
print("FIX_VALIDATED" if fixed else "BUG_REPRODUCED")
sys.exit(0 if fixed else 10)
