"""What is left in 16 bits of the releases that have upstream's fix. Measured, never judged.

    python measure_half.py UNPACKED_0.8.5 [--head CHECKOUT] [--cache DIR]

Runs this pack's contract on the CPU, pristine lane alone, over releases of liger-kernel and a copy of the newest
without one cast: there the logits' gradient is multiplied in place by the fp32 weights. UNPACKED_0.8.5 is the folder in
which that release's own archive was unpacked, CHECKOUT the sources of the commit in [head] of pack.toml. Writes
data/half.json: for each tree the verdict, the names of the failed checks, and over_eps, from the contract's figures. It
says how far the mean over the entries of a gradient is off because weights were rounded before the
product: of the gradients the most, in units of the dtype's eps.
"""

import argparse
import hashlib
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACK = Path(__file__).resolve().parent
RELEASES = ("0.8.1", "0.8.2", "0.8.3", "0.8.4", "0.8.5")
FILE = "src/liger_kernel/ops/fused_linear_cross_entropy.py"
MODULE = "liger_kernel.ops.fused_linear_cross_entropy"
CAST = """\
            grad_logits_chunk = grad_logits_chunk * token_grad_output[start_idx:end_idx].unsqueeze(-1).to(
                grad_logits_chunk.dtype
            )
"""
NO_CAST = """\
            grad_logits_chunk.mul_(token_grad_output[start_idx:end_idx].unsqueeze(-1))
"""
ROUNDED = {dtype: f"weight_rounding_{dtype}" for dtype in ("bfloat16", "float16", "autocast")}  # figures, in eps


def judge(runner, specification):
    """Run the contract over one tree; return the receipt."""
    command = [*runner, "--upstream", specification]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    (row,) = json.loads(ended.stdout)
    return json.loads(Path(row["receipt"]).read_text())


def row(receipt):
    """Keep of a receipt what data/half.json says of a tree."""
    lane = receipt["lanes"]["pristine"]
    checks = {check["name"]: check for check in lane["checks"]}
    failed = [name for name, check in checks.items() if check["ok"] is False]
    figures = {figure["name"]: figure["value"] for figure in lane["figures"]}
    over = {dtype: figures[name] for dtype, name in ROUNDED.items()}
    judged = sum(check["ok"] is not None for check in checks.values())
    counts = {"judged": judged, "wrong": len(failed)}
    return {"verdict": lane["verdict"], **counts, "failed": failed, "over_eps": over}


def tested(receipt):
    """Return the hash of the file under test as the lane loaded it."""
    (sha256,) = (one["sha256"] for one in receipt["lanes"]["pristine"]["upstream"] if one["module"] == MODULE)
    return sha256


def without_the_cast(release, folder, sha256):
    """Copy the newest release and replace the one statement; the original has to be what was just judged."""
    if hashlib.sha256((release / FILE).read_bytes()).hexdigest() != sha256:
        sys.exit(f"{release} is not liger-kernel {RELEASES[-1]}")
    tree = folder / "tree"
    shutil.copytree(release, tree)
    text = (tree / FILE).read_text()
    if text.count(CAST) != 1:
        sys.exit(f"{FILE} does not have the statement once")
    (tree / FILE).write_text(text.replace(CAST, NO_CAST))
    return tree


def main():
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("newest", type=Path, metavar="UNPACKED_0.8.5")
    parser.add_argument("--head", type=Path, metavar="CHECKOUT")
    parser.add_argument("--runner", type=Path, default=PACK.parents[1] / "runner.py")
    parser.add_argument("--cache")
    arguments = parser.parse_args()
    runner = [sys.executable, str(arguments.runner), "run", PACK.name, "--packs", str(PACK.parent), "--target", "cpu"]
    runner += ["--lane", "pristine", "--json", *(["--cache", arguments.cache] if arguments.cache else [])]
    receipts = {f"release {version}": judge(runner, f"liger-kernel=={version}") for version in RELEASES}
    newest = receipts[f"release {RELEASES[-1]}"]
    with tempfile.TemporaryDirectory() as folder:
        tree = without_the_cast(arguments.newest, Path(folder), tested(newest))
        receipts[f"release {RELEASES[-1]} without the cast"] = judge(runner, f"path:{tree}")
    if arguments.head:
        receipts["default branch"] = judge(runner, f"path:{arguments.head}")
    host = {name: newest["host"][name] for name in ("torch", "triton")} | {"probe": newest["probe"]["sha256"]}
    trees = {name.replace(".", "_").replace(" ", "_"): row(receipt) for name, receipt in receipts.items()}
    data = PACK / "data"
    data.mkdir(exist_ok=True)
    (data / "half.json").write_text(json.dumps({"host": host} | trees, indent=1) + "\n")
    for name, one in trees.items():
        print(name, one["verdict"], one["wrong"], "of", one["judged"], "checks failed")


if __name__ == "__main__":
    main()
