"""Dies as the out-of-memory killer would have it."""

import os
import signal

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
os.kill(os.getpid(), signal.SIGKILL)
