"""What every release on the index gives. Measured, never judged.

    python measure_releases.py [--cache DIR]

Runs this pack on the CPU, pristine lane alone, over all releases of liger-kernel; writes data/releases.md (runs of
releases that behave alike).
"""

import argparse
import itertools
import json
import subprocess
import sys
from pathlib import Path

PACK = Path(__file__).resolve().parent
SAYS = {
    "REPRODUCED": "silently wrong gradients",
    "FIXED_UPSTREAM": "right",
    "UNSUPPORTED": "not judged",
    "ERROR": "not judged, the script fails",
}


def releases():
    """List the versions that the index has, the oldest first, as pip sees them."""
    command = [sys.executable, "-m", "pip", "index", "versions", "liger-kernel"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in answer.splitlines() if line.startswith("Available versions:"))
    return [text.strip() for text in line.partition(":")[2].split(",")][::-1]


def behaviour(row):
    """Say in one line what a release does; a reason is shortened to what releases share."""
    judged = row["verdict"] in ("REPRODUCED", "FIXED_UPSTREAM")
    reason = "" if judged else ": " + row["reason"].removeprefix("NotImplementedError: ")
    return SAYS.get(row["verdict"], row["verdict"]) + reason


def write(rows):
    """Write the table of the runs of releases that behave alike."""
    data = PACK / "data"
    data.mkdir(exist_ok=True)
    lines = ['| releases | with `reduction="none"` |', "| --- | --- |"]
    for text, group in itertools.groupby(rows, behaviour):
        versions = [row["version"] for row in group]
        span = versions[0] if len(versions) == 1 else f"{versions[0]} to {versions[-1]}"
        lines.append(f"| {span} | {text.replace('|', '/')} |")
    (data / "releases.md").write_text("\n".join(lines) + "\n")


def main():
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runner", type=Path, default=PACK.parents[1] / "runner.py")
    parser.add_argument("--cache")
    arguments = parser.parse_args()
    base = [sys.executable, str(arguments.runner), "run", PACK.name, "--packs", str(PACK.parent), "--target", "cpu"]
    base += ["--lane", "pristine", "--json", *(["--cache", arguments.cache] if arguments.cache else [])]
    rows = []
    for version in releases():
        command = [*base, "--upstream", f"liger-kernel=={version}"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        (row,) = json.loads(ended.stdout)
        rows.append({"version": version, "verdict": row["verdict"], "reason": row["reason"]})
        print(version, row["verdict"], row["reason"], flush=True)
    write(rows)


if __name__ == "__main__":
    main()
