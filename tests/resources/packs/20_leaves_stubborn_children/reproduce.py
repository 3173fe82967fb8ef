"""Forks grandchildren that ignore SIGTERM and hold the pipes, one of them in a session of its own."""

import os
import signal
import sys
import time

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
for session in (False, True):
    if os.fork() == 0:
        if session:
            os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.fork() == 0:
            time.sleep(600)
        time.sleep(600)
print("BUG_REPRODUCED")
sys.exit(10)
