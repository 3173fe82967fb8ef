"""Make data/compiled.json of what measure_compiled.sh printed.

python summarise_compiled.py < OUTPUT > data/compiled.json
"""

import json
import re
import sys


def main():
    """Read both trees' part of the output: the script's value and sentinel, and the contract's counts."""
    found = {}
    for part in re.split(r"(?m)^=== ", sys.stdin.read())[1:]:
        one = {}
        release, torch, gpu = re.search(r"transformer-engine (\S+) .*?torch (\S+) (.+)", part).groups()
        found |= {"release": release, "torch": torch, "gpu": gpu}
        one["float8"] = float(re.search(r"called with 3\.0: (\S+), expected 3\.0 \(Float8Tensor\)", part)[1])
        one["script"] = re.search(r"(?m)^(BUG_REPRODUCED|FIX_VALIDATED)$", part)[1]
        one |= {word: int(number) for number, word in re.findall(r"(\d+) (passed|failed)", part)}
        one.setdefault("failed", 0)
        found["patched" if "unpatched" in found else "unpatched"] = one
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
