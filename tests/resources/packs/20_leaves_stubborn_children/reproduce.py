"""Forks grandchildren that ignore SIGTERM and hold the pipes, one of them in a session of its own."""

import hashlib
import os
import signal
import sys
import time
from pathlib import Path

from toykernel import scale

SHA256 = hashlib.sha256(Path(scale.__file__).read_bytes()).hexdigest()
print('TARGET {"target": "cpu", "evidence": "traced", "device": "CPU"}')
print(f'UPSTREAM {{"module": "toykernel.scale", "file": "{scale.__file__}", "sha256": "{SHA256}"}}')

for session in (False, True):
    if os.fork() == 0:
        if session:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
print('CHECK {"name": "weights", "role": "defect", "ok": false}')
print("BUG_REPRODUCED {}", flush=True)
sys.stdout.flush()
sys.exit(10)
