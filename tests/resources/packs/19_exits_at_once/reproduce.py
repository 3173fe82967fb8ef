"""Leaves by os._exit(0), without a verdict."""

import hashlib
import os
import sys
from pathlib import Path

from toykernel import scale

SHA256 = hashlib.sha256(Path(scale.__file__).read_bytes()).hexdigest()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "toykernel.scale", "file": "{scale.__file__}", "sha256": "{SHA256}"}}')
print('CHECK {"name": "weights", "role": "defect", "ok": false}')
sys.stdout.flush()
os._exit(0)
