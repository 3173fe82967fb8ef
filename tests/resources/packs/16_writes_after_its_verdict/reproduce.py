"""Prints a line after its sentinel."""

import sys

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
print("BUG_REPRODUCED")
print("one more thing")
sys.exit(10)
