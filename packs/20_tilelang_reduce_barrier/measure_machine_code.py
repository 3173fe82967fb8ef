"""What the machine code of the kernel `sum` has between the last read of the workspace and the store to it.

    python measure_machine_code.py --nvdisasm FILE [--target sm_90a]

Needs nvcc, nvdisasm (of Triton's wheel), tilelang and this repository on PYTHONPATH; no GPU. Measured, never judged:
data/machine_code.json has the barriers and the accesses to shared memory, from the last barrier before that read to
the instruction after the store.
"""

import argparse
import json
import re
import subprocess
import tempfile
from pathlib import Path

import contract
import tilelang

from kit.cuda_source import lower

HERE = Path(__file__).parent


def main():
    """Lower, compile, disassemble, and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nvdisasm", required=True)
    parser.add_argument("--target", default="sm_90a")
    given = parser.parse_args()
    source, error, _ = lower(contract.kernel(tilelang.language, contract.CASES["sum"]), given.target)
    if error:
        raise SystemExit(error)
    folder, number = Path(tilelang.__file__).parent, given.target.removeprefix("sm_")
    with tempfile.TemporaryDirectory() as work:
        file, cubin = Path(work, "kernel.cu"), Path(work, "kernel.cubin")
        file.write_text(source)
        includes = [f"-I{folder / 'src'}", f"-I{folder / '3rdparty/cutlass/include'}"]
        arch = f"arch=compute_{number},code={given.target}"
        command = ["nvcc", "-std=c++17", "-O3", "-gencode", arch, *includes, "-cubin", "-o", str(cubin), str(file)]
        subprocess.run(command, check=True, capture_output=True)
        listing = subprocess.run([given.nvdisasm, str(cubin)], check=True, capture_output=True, text=True).stdout
    lines = re.findall(r"^\s+/\*\w+\*/\s+(.*(?:BAR\.|LDS|LDSM|STS|STSM)[^;]*);", listing, re.MULTILINE)
    store = next(place for place, line in enumerate(lines) if line.startswith("STSM"))
    start = max(place for place in range(store) if lines[place].startswith("BAR"))
    between = [line.strip() for line in lines[start : store + 2]]
    found = {"tilelang": tilelang.__version__, "target": given.target, "instructions": between}
    (HERE / "data/machine_code.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
