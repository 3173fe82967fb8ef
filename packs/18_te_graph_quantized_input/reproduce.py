# /// script
# requires-python = ">=3.11,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "pydantic==2.12.5", "torch==2.13.0", "transformer-engine==2.20.2"]
# ///
"""A graphed callable of Transformer Engine computes with the captured values of a quantized argument.

Captured with 1.0 and called with 3.0, ReLU gives 1.0 where it should give 3.0. No error. Control: plain tensors.
graph.py copies an argument only if its data_ptr() differs from that of the graph's tensor. Quantized tensors report 0.
Without a GPU or TE's compiled part it uses IdentityTensor; without a GPU, a recording for a graph. Only forward runs.

    uv run reproduce.py                        # release 2.20.2: BUG_REPRODUCED, exit status 10
    PYTHONPATH=CHECKOUT uv run reproduce.py    # a checkout with the patch: FIX_VALIDATED, exit status 0
"""

import importlib.util
import sys
from unittest.mock import MagicMock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

TE, DEVICE = "transformer_engine.pytorch", "cuda" if torch.cuda.is_available() else "cpu"


def with_extension():
    """Return Transformer Engine's function and a quantizer; raise where there is no GPU or no compiled extension."""
    torch.cuda.init()
    te = importlib.import_module(TE)
    return te.make_graphed_callables, te.Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device("cuda"))


class RecordedGraph(TorchDispatchMode):
    """A CUDA graph where there is no GPU: operators are recorded, and called again on the same tensors."""

    steps = ()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.steps += ((function, args, kwargs or {}, result),)
        return result

    def replay(self):
        for function, args, kwargs, result in self.steps:
            result.copy_(function(*args, **kwargs))


def without_extension():
    """Import graph.py, and IdentityTensor with its base class. All else of Transformer Engine is one mock."""
    if DEVICE == "cpu":
        torch._C._graph_pool_handle = MagicMock()  # noqa: SLF001 - graph.py imports it
        torch.cuda = MagicMock(CUDAGraph=RecordedGraph, graph=lambda graph, **_: graph)
        sys.modules["torch._dynamo"] = MagicMock(disable=lambda function, *_, **__: function)  # nothing is compiled
    classes = "BasicOperation DelayedScaling LinearAttentionBase OperationFuser Sequential TransformerEngineBaseModule"
    mock = MagicMock(**dict.fromkeys(classes.split(), type("Absent", (), {})))  # for isinstance()
    names = "attention.linear_attention.base constants distributed module.base ops ops.fuser ops.op quantization utils"
    sys.modules |= dict.fromkeys([f"{TE}.{name}" for name in names.split()], mock)
    sys.modules |= dict.fromkeys(("transformer_engine_torch", "transformer_engine.common.recipe"), mock)
    [folder] = importlib.util.find_spec("transformer_engine").submodule_search_locations
    for name in ("transformer_engine", TE, f"{TE}.tensor", f"{TE}.tensor.storage"):  # packages of the real modules
        sys.modules[name] = MagicMock(__path__=["/".join([folder, *name.split(".")[1:]])], __spec__=None)
    tensor, graph = (importlib.import_module(f"{TE}.{name}") for name in ("tensor.identity_tensor", "graph"))
    return graph.make_graphed_callables, tensor.IdentityQuantizer()


try:
    (make, quantizer), quantized = with_extension(), "Float8Tensor"
except (AssertionError, ImportError, OSError, RuntimeError) as error:
    (make, quantizer), quantized = without_extension(), f"IdentityTensor and mocks, after {error!r:.80}"
result = {}
for kind, quantize in (("plain tensor", torch.clone), (quantized, quantizer)):
    ones, threes = (quantize(torch.full((32, 32), value, device=DEVICE)) for value in (1.0, 3.0))
    with torch.no_grad():
        result[kind] = make(torch.nn.ReLU().eval(), (ones,))(threes)[0, 0].item()
    print(f"ReLU, captured with 1.0 and called with 3.0: {result[kind]}, expected 3.0 ({kind})")
if result["plain tensor"] != 3:
    print("UNSUPPORTED: a plain tensor is wrong already")
    sys.exit(125)
is_fixed = abs(result[quantized] - 3) < 0.2  # E4M3 errs by at most 1/16 of 3
print("FIX_VALIDATED" if is_fixed else "BUG_REPRODUCED")
sys.exit(0 if is_fixed else 10)
