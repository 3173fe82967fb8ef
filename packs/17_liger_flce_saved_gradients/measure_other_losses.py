"""What the other losses of the release do with the gradients that they save. Measured, never judged.

    PYTHONPATH=TREE/src python measure_other_losses.py

Runs each on the CPU (Triton's interpreter, or plain PyTorch): two backwards with 2 through a retained graph, two with
1, and one with a frozen input. Writes data/other_losses.json and data/other_losses.md.
"""

import importlib
import importlib.util
import json
import os
import sys
from pathlib import Path

DATA = Path(__file__).resolve().parent / "data"
BT, H, V = 8, 4, 16
PREFERENCE = {"orpo_loss": "ORPO", "cpo_loss": "CPO", "simpo_loss": "SimPO"}


def prepare():
    """Load the release without the transformers library, on an interpreter that takes floats; return its losses."""
    os.environ["TRITON_INTERPRET"] = "1"
    parent = "liger_kernel.transformers"
    sys.modules[parent] = importlib.util.module_from_spec(importlib.util.find_spec(parent))
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt  # noqa: SLF001 - there is no public door

    def scalar(x):
        if not isinstance(x, float):
            return convert(x)
        return tl.tensor(interpreter.TensorHandle(np.array([x], dtype=np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = scalar  # noqa: SLF001
    torch.manual_seed(0)
    return torch, losses(torch)


def losses(torch):
    """Return, by name, functions of (is the input trained) that give a loss and its leaves."""
    rand = torch.randn

    def chunked(module, name):
        return getattr(importlib.import_module(f"liger_kernel.chunked_loss.{module}"), f"LigerFusedLinear{name}Loss")

    def plain(on):
        from liger_kernel.ops.cross_entropy import LigerCrossEntropyFunction

        x = rand(BT, V).requires_grad_(on)
        return LigerCrossEntropyFunction.apply(x * 1, torch.arange(BT), None), [x]

    def fused(name, *teacher):
        module = importlib.import_module(f"liger_kernel.ops.fused_linear_{name}")
        function = getattr(module, {"jsd": "LigerFusedLinearJSDFunction"}.get(name, "LigerFusedLinearKLDivFunction"))

        def make(on):
            leaves = [rand(BT, H).requires_grad_(on), rand(V, H).requires_grad_()]
            return function.apply(*leaves, *teacher), leaves

        return make

    def pairs(module, name, *, before=(), after=(), **options):
        loss = chunked(module, name)(compiled=False, **options)

        def make(on):
            x, w, b = rand(4, 6, H).requires_grad_(on), rand(V, H).requires_grad_(), rand(V).requires_grad_()
            first = (x, w) if name in ("KTO", "GRPO") else (w, x)
            return loss(*first, torch.randint(V, (4, 6)), *before, b, *after), [x, w, b]

        return make

    def distilled(module, name):
        loss = chunked(module, name)(compiled=False)

        def make(on):
            leaves = [rand(BT, H).requires_grad_(on), rand(V, H).requires_grad_()]
            return loss(*leaves, rand(BT, H), rand(V, H), torch.randint(V, (BT,))), leaves

        return make

    reference = (rand(4, 6, H), rand(V, H), rand(V))
    liked = torch.tensor([True, False, True, False])
    found = {"cross entropy": plain, "fused linear JSD": fused("jsd", rand(BT, H), rand(V, H))}
    found["fused linear KL divergence"] = fused("kl_div", rand(BT, V).softmax(-1))
    found |= {f"chunked {name}": pairs(module, name) for module, name in PREFERENCE.items()}
    found["chunked DPO"] = pairs("dpo_loss", "DPO", after=reference)
    found["chunked KTO"] = pairs("kto_loss", "KTO", after=(liked, *reference))
    masks = (torch.ones(4, 6), rand(4))
    found["chunked GRPO"] = pairs("grpo_loss", "GRPO", before=masks, use_ref_model=False, beta=0.0)
    found["chunked JSD"] = distilled("jsd_loss", "JSD")
    found["chunked cosine similarity"] = distilled("cosine_similarity_loss", "CosineSimilarity")
    return found


def row(torch, make):
    """Go backward through one loss; return what came."""
    loss, leaves = make(on=True)
    loss = loss[0] if isinstance(loss, tuple) else loss

    def back(scale):
        return torch.autograd.grad(loss, leaves, torch.tensor(scale), retain_graph=True)

    first = back(2.0)
    kept = [x.clone() for x in first]
    found = {"second_over_first": max(float(x.norm() / y.norm()) for x, y in zip(back(2.0), kept, strict=True))}
    found["first_changed"] = not all(torch.equal(x, y) for x, y in zip(first, kept, strict=True))
    one, again = back(1.0), back(1.0)
    found["saved_given_away"] = any(x.data_ptr() == y.data_ptr() for x, y in zip(one, again, strict=True))
    loss, leaves = make(on=False)
    loss, trained = loss[0] if isinstance(loss, tuple) else loss, leaves[1:]
    gradients = torch.autograd.grad(loss, trained, torch.tensor(1.0), allow_unused=True) if trained else ()
    return found | {"trained_on_frozen_input": all(x is not None for x in gradients) if trained else None}


def main():
    """Measure and write."""
    torch, makers = prepare()
    rows = {name: row(torch, make) for name, make in makers.items()}
    (DATA / "other_losses.json").write_text(json.dumps(rows, indent=1) + "\n")
    lines = [
        "| loss | second / first | with g = 1 it returns | weight on a frozen input |",
        "| --- | --- | --- | --- |",
    ]
    for name, each in rows.items():
        frozen = {None: "-", True: "trained", False: "no gradient"}[each["trained_on_frozen_input"]]
        given = "the saved tensor itself" if each["saved_given_away"] else "another one"
        lines.append(f"| {name} | {each['second_over_first']:.3g} | {given} | {frozen} |")
    (DATA / "other_losses.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
