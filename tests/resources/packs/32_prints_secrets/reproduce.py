"""Prints what its environment holds, as a careless probe would, and a token of its own."""

import hashlib
import os
import sys
from pathlib import Path

from toykernel import scale

SHA256 = hashlib.sha256(Path(scale.__file__).read_bytes()).hexdigest()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "toykernel.scale", "file": "{scale.__file__}", "sha256": "{SHA256}"}}')

print("environment", sorted(os.environ.items()))
print("authorization: ghp_" + "A1b2C3d4" * 5)
print('CHECK {"name": "weights", "role": "defect", "ok": false}')
print("BUG_REPRODUCED {}")
sys.exit(10)
