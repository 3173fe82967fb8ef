"""What tilelang makes of the forward kernel of two trees, without a GPU. Never judged.

    python measure_lowering.py --tree pristine=FOLDER --tree patched=FOLDER --dependencies FOLDER

--dependencies is a merged folder with tilelang 0.1.8, such as that of pack.toml's set `library`. Each tree's bf16
kernel, and the FP8 kernel where there is one, is lowered for sm_90a (64 heads, top-k 2048) in a process of its own.
Results go to data/lowering.json: the sha256 of the CUDA source of each.
"""

import hashlib
import json
import sys
from pathlib import Path

import trees

HERE = Path(__file__).resolve().parent
MODULE = "megatron.core.transformer.experimental_attention_variant.ops.tilelang_sparse_mla_fwd"


def measure():
    """Return the hash of each kernel's CUDA source. Runs in a child."""
    import importlib
    import inspect

    import tilelang
    from tilelang import tvm

    sys.modules["transformer_engine"] = None  # its compiled parts are not needed for this
    function = importlib.import_module(MODULE).sparse_mla_fwd
    found, target = {}, tvm.target.Target({"kind": "cuda", "arch": "sm_90a"}, host="c")
    kinds = {"bf16": {}, "float8": {"fp8": True}}
    if "fp8" not in inspect.signature(function.func).parameters:
        del kinds["float8"]
    for kind, options in kinds.items():
        program = function.get_tir(64, 512, 64, 2048, 1, 0.04, **options)
        with target, tvm.transform.PassContext(config=function.pass_configs):
            lowered = tilelang.lower(program, target=target, enable_device_compile=False)
        found[kind] = hashlib.sha256(lowered.kernel_source.encode()).hexdigest()
    return found


def main():
    """Measure every tree, and write the results."""
    options = trees.parser(__doc__.splitlines()[0]).parse_args()
    if options.one:
        print(json.dumps(measure()))
        return
    results = trees.results(__file__, options)
    (HERE / "data" / "lowering.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
