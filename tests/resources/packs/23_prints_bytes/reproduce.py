"""Prints bytes that are not UTF-8, a NUL and a terminal escape, and is right otherwise."""

import hashlib
import sys
from pathlib import Path

from toykernel import scale

SHA256 = hashlib.sha256(Path(scale.__file__).read_bytes()).hexdigest()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "toykernel.scale", "file": "{scale.__file__}", "sha256": "{SHA256}"}}')

sys.stdout.flush()
sys.stdout.buffer.write(b"\xff\xfe\x00 \x1b[31mred\x1b[0m \xc3(\n")
sys.stdout.flush()
print('CHECK {"name": "weights", "role": "defect", "ok": false}')
print("BUG_REPRODUCED {}")
sys.exit(10)
