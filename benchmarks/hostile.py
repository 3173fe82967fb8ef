"""Try everything that nobody may believe, and count what is refused: the tests that are marked `hostile`, by kind.

Run it as ``python benchmarks/hostile.py [-n 2]``. Each test is one attempt: a receipt, a bundle, an archive, a text, a
lane or a call that lies. Exit status 1: one was believed.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def main() -> int:
    """Run the marked tests, and print a line for each kind."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-n", default="2", help="processes (default: 2)")
    processes = parser.parse_args().n
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        options = ("-q", "--no-header", "-m", "hostile", "-n", processes, "--dist", "loadfile", f"--junitxml={report}")
        command = [sys.executable, "-m", "pytest", *options]
        status = subprocess.run(command, cwd=REPOSITORY, stdout=sys.stderr, check=False).returncode
        cases = [*ET.parse(report).iter("testcase")]  # noqa: S314 - our own pytest wrote it
    tried, believed = Counter[str](), Counter[str]()
    for case in cases:
        for kind in case.findall("properties/property[@name='hostile']"):
            tried[kind.attrib["value"]] += 1
            believed[kind.attrib["value"]] += any(case.find(end) is not None for end in ("failure", "error", "skipped"))
    for kind in sorted(tried):
        print(f"{kind}: refused {tried[kind] - believed[kind]} of {tried[kind]}")
    print(f"refused {tried.total() - believed.total()} of {tried.total()}")
    return 1 if status or believed.total() else 0


if __name__ == "__main__":
    sys.exit(main())
