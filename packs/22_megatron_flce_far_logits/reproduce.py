# /// script
# requires-python = ">=3.12,<3.13"
# dependencies = ["numpy==2.3.5", "packaging==26.3", "torch==2.13.0"]
# ///
"""cross_entropy_fusion_impl="linear": a token whose logits are all below about -104 has the loss -inf.

Control: logits of 0. Cause: forward_dp_epilogue, which runs alone here, starts its running maximum at 0 and loads 0 for
absent splits, so exp(logit - maximum) underflows. Only on dev, since https://github.com/NVIDIA/Megatron-LM/pull/2256

    PYTHONPATH=CHECKOUT uv run reproduce.py    # branch dev: BUG_REPRODUCED, exit status 10; patched: FIX_VALIDATED, 0
"""

import os

import torch

device = "cuda" if torch.cuda.is_available() else "cpu"
os.environ["TRITON_INTERPRET"] = "1" if device == "cpu" else "0"  # before triton is imported
try:
    try:
        from megatron.core.fusions.linear_cross_entropy.triton.kernels import forward_dp_epilogue  # with #3345
    except ImportError:
        from megatron.core.fusions.linear_cross_entropy.blackwell.triton import forward_dp_epilogue
except ImportError as error:
    print(f"UNSUPPORTED: {error}")
    raise SystemExit(125) from error
levels = torch.tensor([0.0, -50.0, -95.0, -150.0], device=device)  # four tokens of 20 equal logits, in two splits
maxima = levels[:, None].repeat(1, 2)  # of each split
sums = torch.full((4, 2), 10.0, device=device)  # of exp(logit - maximum) over the 10 classes of a split
loss = levels.clone()  # the label's logit, which the kernel replaces by the loss
labels, valid_tokens = torch.zeros(4, dtype=torch.int64, device=device), torch.tensor([4], device=device)
maximum, total, reduced = torch.empty(3, 4, device=device)  # outputs; backward reads maximum and total
forward_dp_epilogue[(1,)](
    4, 2, -100, labels, 1, valid_tokens, maxima, 2, 1, sums, 2, 1, maximum, 1, total, 1, loss, 1, reduced, REDUCTION=0
)  # fmt: skip
expected = sums.sum(1).log()
logsumexp = maximum + total.log()
right = ((loss - expected).abs() < 1e-4) & ((logsumexp - levels - expected).abs() < 1e-4)
for numbers in zip(levels, loss, expected, logsumexp, levels + expected, strict=True):
    print("20 logits of {:6}: loss {:.5f}, expected {:.5f}; logsumexp {:.4f}, expected {:.4f}".format(*numbers))
if not right[0]:
    print("UNSUPPORTED: the loss is wrong for logits of 0, too")
    raise SystemExit(125)
print("FIX_VALIDATED" if right.all() else "BUG_REPRODUCED")
raise SystemExit(0 if right.all() else 10)
