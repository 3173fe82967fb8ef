"""Leaves by os._exit(0), without a sentinel."""

import os
import sys

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
sys.stdout.flush()
os._exit(0)
