"""Prints 500 MB between its first line and its verdict."""

import hashlib
import sys
from pathlib import Path

from toykernel import scale

SHA256 = hashlib.sha256(Path(scale.__file__).read_bytes()).hexdigest()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "toykernel.scale", "file": "{scale.__file__}", "sha256": "{SHA256}"}}')

line = "x" * 99 + "\n"
for _ in range(5_000):
    sys.stdout.write(line * 1_000)
print('CHECK {"name": "weights", "role": "defect", "ok": false}')
print("BUG_REPRODUCED {}")
sys.exit(10)
