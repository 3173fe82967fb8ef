"""Judges a file that the patch does not change."""

import hashlib
import sys
from pathlib import Path

from toykernel import other

SHA256 = hashlib.sha256(Path(other.__file__).read_bytes()).hexdigest()
PATCHED = "zip(" in Path(other.__file__).with_name("scale.py").read_text()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "toykernel.other", "file": "{other.__file__}", "sha256": "{SHA256}"}}')
print('CHECK {"name": "weights", "role": "defect", "ok": %s}' % ("true" if PATCHED else "false"))
print("FIX_VALIDATED {}" if PATCHED else "BUG_REPRODUCED {}")
sys.exit(0 if PATCHED else 10)
