"""What each method of each of Transformer Engine's FP8 wrappers returns, by release. Never judged.

    PYTHONPATH=REPOSITORY python measure_wrappers.py --releases 2.9.0 2.10.0 ... [--cache DIR] [--below FOLDER]
    PYTHONPATH=REPOSITORY python measure_wrappers.py --real NAME [--out FOLDER]

The first measures releases on the CPU, the second the library that is installed here, on a GPU. A release's wheel is
fetched and unpacked, not installed; its Python is real, its compiled part the stub of contract.py, and each release is
measured in a process of its own. With --real, tensors come from the library's own quantizers. --below is a folder with
pydantic. Results go to data/wrappers.json, one entry for each release; at the end data/wrappers.md is written anew from
it. An entry is the type of the result, its logical dtype, whether its pointer is 0, and whether the call warns.
"""

import argparse
import inspect
import json
import os
import subprocess
import sys
import types
import unittest.mock
import warnings
from pathlib import Path

import contract
import torch

HERE = Path(__file__).resolve().parent
SHAPE = 128, 4, 4, contract.D
METHODS = {
    "itself": lambda x: x,
    "contiguous()": lambda x: x.contiguous(),
    "detach()": lambda x: x.detach(),
    "clone()": lambda x: x.clone(),
    "to(bfloat16)": lambda x: x.to(torch.bfloat16),
    "view(...)": lambda x: x.view(SHAPE[0] * SHAPE[1], *SHAPE[2:]),
    "reshape(...)": lambda x: x.reshape(SHAPE[0] * SHAPE[1], *SHAPE[2:]),
    "x[:128]": lambda x: x[: SHAPE[0]],
    "x[:64]": lambda x: x[: SHAPE[0] // 2],
    "x[0]": lambda x: x[0],
    "x[..., :512]": lambda x: x[..., :512],
    "permute(...)": lambda x: x.permute(1, 0, 2, 3),
    "transpose(0, 1)": lambda x: x.transpose(0, 1),
    "unsqueeze(0)": lambda x: x.unsqueeze(0),
    "squeeze(0)": lambda x: x.squeeze(0),
    "to(float32)": lambda x: x.to(torch.float32),
    "float()": lambda x: x.float(),
    "dequantize()": lambda x: x.dequantize(),
}
KINDS = {"float8": "Float8Tensor", "blockwise": "Float8BlockwiseQTensor", "mxfp8": "MXFP8Tensor"}
QUANTIZERS = {
    "float8": lambda t, e4m3: t.Float8CurrentScalingQuantizer(e4m3, device=torch.device("cuda")),
    "blockwise": lambda t, e4m3: t.Float8BlockQuantizer(e4m3, rowwise=True, columnwise=False),
    "mxfp8": lambda t, e4m3: t.MXFP8Quantizer(e4m3),
}


def tolerant(cls):
    """Let a constructor ignore keywords that came in later releases, and give None for those that went."""
    storage = next(base for base in cls.__mro__ if base.__name__.endswith(("Storage", "TensorBase")))
    known = inspect.signature(storage.__new__).parameters
    base = next(base for base in cls.__mro__ if base.__name__ == "QuantizedTensor")
    has_device = "device" in inspect.signature(base.__new__).parameters

    def make(**fields):
        ours = {"rowwise_data", "with_gemm_swizzled_scales", "is_2D_scaled", "columnwise_data", "quantizer"}
        kept = {name: value for name, value in fields.items() if name in known or name not in ours}
        if not has_device:
            del kept["device"]
        if "data_format" in known:
            module = sys.modules["transformer_engine_torch"]
            kept["data_format"] = getattr(module.Float8BlockScaleTensorFormat, "GEMM_READY", None)
        return cls(**kept)

    return make


def measure(*, real):
    """Return for each class and method what came out."""
    if not real:  # releases up to 2.10 take this from the package object
        package = sys.modules["transformer_engine.pytorch"] = types.ModuleType("transformer_engine.pytorch")
        torch.cuda.current_device = lambda: torch.device("cpu")  # where releases up to 2.12 put what they make
        torch.cuda.get_device_properties = unittest.mock.MagicMock()
        package.torch_version = lambda: tuple(int(part) for part in torch.__version__.split(".")[:2])
    tensors = contract.wrappers()
    device = "cuda" if real else "cpu"
    x = torch.randn(SHAPE, generator=torch.Generator(device).manual_seed(0), device=device).bfloat16()
    found = {}
    for kind, name in KINDS.items():
        made = tensors
        if not real:
            made = type("Made", (), {each: staticmethod(tolerant(getattr(tensors, each))) for each in KINDS.values()})
        try:
            if real:
                e4m3 = sys.modules["transformer_engine_torch"].DType.kFloat8E4M3
                wrapped = QUANTIZERS[kind](tensors, e4m3)(x)
            else:
                wrapped = contract.wrap(made, kind, x)
            found[name] = {method: outcome(call, wrapped) for method, call in METHODS.items()}
        except Exception as error:  # a class that cannot be made is an entry too
            found[name] = {"error": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
    return found


def outcome(call, wrapped):
    """Call one method, and describe what it returns."""
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = call(wrapped)
    except Exception as error:  # what it raises is the result
        text = f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"
        return {"raises": "needs a GPU" if "not compiled with CUDA" in text else text}
    entry = {"type": type(result).__name__, "dtype": str(result.dtype), "null": result.data_ptr() == 0}
    return entry | {"warns": bool(said)}


def table(results):
    """Write a Markdown table: rows are methods, columns classes, a cell groups the releases that agree."""
    releases = sorted(results, key=lambda name: ([int(part) for part in name.split()[0].split(".")], name))
    lines = [f"| method | {' | '.join(KINDS.values())} |", "| --- |" + " --- |" * len(KINDS)]
    for method in METHODS:
        cells = []
        for name in KINDS.values():
            groups = {}
            for release in releases:
                entry = results[release][name].get(method) or results[release][name]
                groups.setdefault(describe(entry), []).append(release)
            texts = list(groups)
            cells.append(
                texts[0] if len(groups) == 1 else "; ".join(f"{one}: {span(groups[one], releases)}" for one in texts)
            )
        lines.append(f"| `{method}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def describe(entry):
    """Say in few words what came out."""
    if "type" not in entry:
        return entry.get("raises", entry.get("error", "?")).split(":")[0]
    text = "plain" if entry["type"] == "Tensor" else "wrapped"
    return f"{text}, {entry['dtype'].removeprefix('torch.')}" + (", pointer 0" if entry["null"] else "")


def span(group, releases):
    """Name a group of releases: runs of neighbours shortened, and what a GPU measured after them."""
    plain = [one for one in releases if " " not in one]
    runs = []
    for one in (one for one in plain if one in group):
        if runs and plain.index(runs[-1][-1]) + 1 == plain.index(one):
            runs[-1].append(one)
        else:
            runs.append([one])
    texts = [run[0] if len(run) == 1 else f"{run[0]} to {run[-1]}" for run in runs]
    return ", ".join(texts + [one for one in group if " " in one])


def unpacked(cache, release):
    """Return a folder with a release's wheel, unpacked."""
    sys.path.insert(0, str(HERE.parents[1]))
    from harness.upstream import archive, download
    from harness.core.cache import Cache

    store = Cache(cache)
    found = download.resolve(store, "transformer-engine", release, wheels_only=True)
    wheel = download.fetch(store, found.package, found.file, found.sha256)
    return store.populate("unpacked", found.sha256[:32], lambda folder: archive.unpack(wheel, folder))


def main():
    """Measure what was asked for, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--releases", nargs="*", default=[])
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "reproducer-packs")
    parser.add_argument("--below", default="")
    parser.add_argument("--real", default="")
    parser.add_argument("--one", action="store_true", help="measure the release on the path, and print it")
    parser.add_argument("--out", type=Path, default=HERE / "data")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(real=False)))
        return
    path = options.out / "wrappers.json"
    results = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    if options.real:
        results[options.real] = measure(real=True)
    for release in options.releases:
        folders = os.pathsep.join([str(unpacked(options.cache, release)), options.below, str(HERE.parents[1])])
        command = [sys.executable, __file__, "--one"]
        environment = os.environ | {"PYTHONPATH": folders, "CUDA_VISIBLE_DEVICES": ""}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if ended.returncode:
            sys.exit(f"{release}: {ended.stderr[-1500:]}")
        results[release] = json.loads(ended.stdout.splitlines()[-1])
        print(release, flush=True)
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    (options.out / "wrappers.md").write_text(table(results), encoding="utf-8")


if __name__ == "__main__":
    main()
