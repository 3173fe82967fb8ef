"""Whether tilelang's own example of the two kernels works at other dimensions. Measured, never judged.

    PYTHONPATH=COMPANIONS:REPOSITORY python measure_tilelang.py --examples FOLDER --tree NAME --target sm_90a

FOLDER is examples/deepseek_v32 of a checkout of tile-ai/tilelang, as it is or with fix.tilelang.patch; --tree is what
to call it. Needs a GPU. Both kernels are launched through the example's interfaces at the named shapes, and out, dQ and
dKV are compared with float64, as relative errors in the Frobenius norm. Results are added to
data/tilelang_launched.json, and data/tilelang_launched.md is written anew.
"""

import argparse
import importlib
import json
import sys
from pathlib import Path

import contract

HERE = Path(__file__).parent
SHAPES = (
    (512, 64, 64),
    (512, 64, 16),
    (64, 64, 16),
    (64, 64, 64),
    (192, 64, 64),
    (128, 128, 16),
    (192, 32, 64),
    (96, 64, 64),
)
COMMIT = "a35008a42531c62b976ae4cec3855d4383db0f3c"


def example(torch, shape):
    """Make query, key [S, 1, heads, dims], indices [1, S, K] of the past, -1 where there are too few, and dO."""
    (latent, rope, heads), length, random = shape, contract.LENGTH, torch.Generator("cuda").manual_seed(7)
    sizes = ((length, 1, heads, latent + rope), (length, 1, 1, latent + rope), (length, 1, heads, latent))
    query, key, d_out = (torch.randn(*size, generator=random, device="cuda").bfloat16() for size in sizes)
    weights = torch.rand(length, length, generator=random, device="cuda").tril().topk(contract.TOP_K)
    return query, key, weights.indices.masked_fill(weights.values == 0, -1)[None], d_out


def gathered(query, key, indices, scale, latent):
    """Attend to the chosen rows alone, in the precision of query, for one batch."""
    chosen, valid = key[:, 0, 0][indices[0].clamp(0)], indices[0, :, None] >= 0
    scores = query[:, 0] @ chosen.mT * scale
    return (scores.masked_fill(~valid, float("-inf")).softmax(-1) @ chosen[..., :latent])[:, None]


def said(error):
    """Return an error's name and last line."""
    return f"{type(error).__name__}: {['', *str(error).strip().splitlines()][-1]}"


def launched(torch, shape):
    """Launch both kernels through their interfaces; return the errors of what they give, or what they raise."""
    forward, backward = (importlib.import_module(f"sparse_mla_{way}") for way in ("fwd", "bwd"))
    inputs = example(torch, shape)
    exact = contract.trained(gathered, [x.double() if x.is_floating_point() else x for x in inputs])
    turned = (inputs[place].transpose(0, 1) for place in (0, 1, 3))
    query, key, d_out = (torch.empty(x.shape, dtype=x.dtype, device=x.device).copy_(x) for x in turned)  # own strides
    later = inputs[2].masked_fill(inputs[2] < 0, key.shape[1] - 1)  # the example has no -1; it masks what comes later
    indices, scale = later[:, :, None].int(), {"sm_scale": contract.SCALE}

    def error(found, wanted):
        return float((found.transpose(0, 1).double() - wanted).norm() / wanted.norm())

    result = {}
    try:
        out, lse = forward.sparse_mla_fwd_interface(query, key, indices, d_v=shape[0], **scale)
        result["forward"] = {"out": error(out, exact[0])}
        dq, dkv = backward.sparse_mla_bwd(query, key, out, d_out, indices, lse, **scale)
        result["backward"] = {"dq": error(dq, exact[1]), "dkv": error(dkv, exact[2])}
    except Exception as problem:
        result["backward" if "forward" in result else "forward"] = {"error": said(problem)}
    return result


def seen(one):
    """Return what a table says of one kernel."""
    if "error" in one:
        return f"`{one['error']}`"
    return ", ".join(f"{name} {value:.1e}" for name, value in one.items())


def table(cells):
    """Markdown: a row per tree and shape."""
    lines = ["| example | tilelang | latent + RoPE | heads | forward | backward |", "|" + " --- |" * 6]
    for cell in cells:
        found = (seen(cell["result"].get(way, {})) for way in ("forward", "backward"))
        dim, tail, heads = cell["shape"]
        lines.append(f"| {cell['tree']} | {cell['tilelang']} | {dim}+{tail} | {heads} | {' | '.join(found)} |")
    return "\n".join(lines) + "\n"


def main():
    """Measure every shape, and write after each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--examples", type=Path, required=True)
    parser.add_argument("--tree", required=True)
    parser.add_argument("--target", default="sm_90a")
    parser.add_argument("--output", type=Path, default=HERE / "data" / "tilelang_launched.json")
    arguments = parser.parse_args()
    output = arguments.output
    sys.path.insert(0, str(arguments.examples))
    torch, tilelang = (importlib.import_module(name) for name in ("torch", "tilelang"))
    for shape in SHAPES:
        cell = {"tree": arguments.tree, "commit": COMMIT, "tilelang": tilelang.__version__, "target": arguments.target}
        cell |= {"device": torch.cuda.get_device_name(), "shape": shape, "result": launched(torch, shape)}
        cells = json.loads(output.read_text()) if output.exists() else []
        cells.append(cell)
        output.write_text(json.dumps(cells, indent=1) + "\n")
        output.with_suffix(".md").write_text(table(cells))
        print(json.dumps(cell), flush=True)


if __name__ == "__main__":
    main()
