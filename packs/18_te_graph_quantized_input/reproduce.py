# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "pydantic==2.12.5", "torch==2.13.0", "transformer-engine==2.20.2"]
# ///
"""A graphed callable of Transformer Engine computes with the captured values of a quantized argument.

Captured with 1.0 and called with 3.0, ReLU gives 1.0 where it should give 3.0. No error. Plain tensors are right.

Cause: graph.py copies an argument into the graph's static tensor where their data_ptr() differ. A quantized tensor
keeps its data in inner tensors, and its own data_ptr() is 0, as of every other: nothing is copied. No thread is known.

    uv run reproduce.py                                  # release 2.20.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=TransformerEngine uv run reproduce.py     # patched checkout: FIX_VALIDATED, exit status 0
"""

import enum
import importlib
import os
import sys
import types
from unittest.mock import MagicMock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

# This runs from the wheel, without the compiled extension and what loads it: graph.py and IdentityTensor, a quantized
# tensor of plain data, are Python alone. All classes of quantized tensors are copied by the same line of graph.py.
TE = "transformer_engine.pytorch"
MOCKED = ["onnx_extensions", "triton", "triton.pad", "ops", "ops.op", "ops.fuser", "module", "module.base"]
MOCKED += ["attention", "attention.linear_attention", "attention.linear_attention.base"]
CLASSES = ["Sequential", "BasicOperation", "OperationFuser", "TransformerEngineBaseModule", "LinearAttentionBase"]
os.environ["NVTE_PROJECT_BUILDING"] = "1"
[folder] = importlib.util.find_spec("transformer_engine").submodule_search_locations
for name, path in (("transformer_engine", folder), (TE, f"{folder}/pytorch")):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__path__ = [path]
for name in MOCKED:  # graph.py asks whether the callable is of these classes
    sys.modules[f"{TE}.{name}"] = MagicMock(**{name: type(name, (), {}) for name in CLASSES})
compiled = sys.modules["transformer_engine_torch"] = MagicMock(get_cublasLt_version=lambda: 130000)
compiled.DType = enum.IntEnum("DType", "kByte kInt32 kFloat32 kFloat16 kBFloat16 kFloat8E4M3 kFloat8E5M2 kFloat4E2M1")


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph where there is no GPU: operators are recorded, and called again on the same tensors."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.steps = [*getattr(self, "steps", []), (function, args, kwargs or {}, result)]
        return result

    def replay(self):
        for function, args, kwargs, result in self.steps:
            result.copy_(function(*args, **kwargs))


device = "cuda" if torch.cuda.is_available() else "cpu"
if device == "cpu":
    torch._C._graph_pool_handle = MagicMock()  # noqa: SLF001 - graph.py imports it
tensor, graph = (importlib.import_module(f"{TE}.{name}") for name in ("tensor", "graph"))
if device == "cpu":
    torch.cuda = MagicMock(CUDAGraph=RecordedGraph, graph=lambda graph, **_: graph)
    torch.cuda.get_device_properties = lambda _: types.SimpleNamespace(major=9, minor=0)

if not hasattr(tensor, "IdentityQuantizer"):
    print("UNSUPPORTED: this release has no IdentityTensor")
    sys.exit(125)
result = {}
for kind, quantize in (("plain", torch.clone), ("quantized", tensor.IdentityQuantizer())):
    one, three = (quantize(torch.full((4, 4), value, device=device)) for value in (1.0, 3.0))
    with torch.no_grad():
        result[kind] = graph.make_graphed_callables(torch.nn.ReLU().eval(), (one,))(three)[0, 0].item()
    print(f"ReLU, captured with 1.0 and called with a {kind} tensor of 3.0: {result[kind]}, expected 3.0")
if result["plain"] != 3:
    print("UNSUPPORTED: a plain tensor is wrong already")
    sys.exit(125)
print("FIX_VALIDATED" if result["quantized"] == 3 else "BUG_REPRODUCED")
sys.exit(0 if result["quantized"] == 3 else 10)
