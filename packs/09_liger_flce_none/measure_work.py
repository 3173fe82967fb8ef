"""The matrix products of one step with reduction="none", tree by tree. Counted, never judged.

    python measure_work.py pristine=TREE/src patched=PATCHED_TREE/src release=RELEASE/src --output data/work.json

Each tree has a child process of its own, on the CPU under Triton's interpreter: the count depends on neither device
nor shape. The unit is one product of hidden [BT, H] and weight [V, H].
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

BT, H, V = 16, 4, 24
TRAINED = {"all": (True, True), "weight frozen": (True, False), "hidden frozen": (False, True)}


def count():
    """Print the products of forward and of backward for each choice of what is trained, of the tree on the path."""
    import torch
    from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Fused
    from torch.utils.flop_counter import FlopCounterMode

    found = {}
    for name, trained in TRAINED.items():
        tensors = [torch.randn(size).requires_grad_(on) for size, on in zip(((BT, H), (V, H)), trained, strict=True)]
        with FlopCounterMode(display=False) as counter:
            loss = Fused.apply(*tensors, torch.arange(BT), None, None, -100, 0.0, 0.0, "none")[0]
            forward = counter.get_total_flops()
            loss.backward(torch.rand(BT))
            step = counter.get_total_flops()
        unit = 2 * BT * H * V
        found[name] = {"forward": forward / unit, "backward": (step - forward) / unit, "step": step / unit}
    print(json.dumps(found))


def main():
    """Parse the arguments, ask a child for each tree, and write the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trees", nargs="*", metavar="NAME=SOURCE_ROOT")
    parser.add_argument("--output", type=Path, help="the JSON file to write")
    arguments = parser.parse_args()
    if not arguments.trees:
        count()
        return
    result = {}
    for tree in arguments.trees:
        name, _, source = tree.partition("=")
        paths = os.pathsep.join(filter(None, (str(Path(source).resolve()), os.environ.get("PYTHONPATH"))))
        environment = dict(os.environ, PYTHONPATH=paths, TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
        command = [sys.executable, "-P", __file__]
        result[name] = json.loads(subprocess.run(command, env=environment, stdout=subprocess.PIPE, check=True).stdout)
    text = json.dumps(result, indent=1) + "\n"
    if arguments.output:
        arguments.output.write_text(text)
    print(text, end="")


if __name__ == "__main__":
    main()
