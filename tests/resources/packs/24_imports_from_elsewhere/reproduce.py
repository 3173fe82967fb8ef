"""Judges a copy of the module under test that lies outside the tree."""

import hashlib
import importlib.util
import sys
import tempfile
from pathlib import Path

file = Path(tempfile.mkdtemp()) / "scale.py"
file.write_text("def scale(values, weights):\n    return values\n")
spec = importlib.util.spec_from_file_location("toykernel.scale", file)
sha256 = hashlib.sha256(file.read_bytes()).hexdigest()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "{spec.name}", "file": "{file}", "sha256": "{sha256}"}}')
print('CHECK {"name": "weights", "role": "defect", "ok": false}')
print("BUG_REPRODUCED {}")
sys.exit(10)
