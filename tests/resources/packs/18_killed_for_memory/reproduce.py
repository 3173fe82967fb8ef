"""Dies as the out-of-memory killer would have it."""

import hashlib
import os
import signal
from pathlib import Path

from toykernel import scale

SHA256 = hashlib.sha256(Path(scale.__file__).read_bytes()).hexdigest()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "toykernel.scale", "file": "{scale.__file__}", "sha256": "{SHA256}"}}')
print('CHECK {"name": "weights", "role": "defect", "ok": false}')
os.kill(os.getpid(), signal.SIGKILL)
