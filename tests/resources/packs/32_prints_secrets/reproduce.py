"""Prints its environment and what looks like a token."""

import os
import sys

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
print("environment", sorted(os.environ.items()))
print("authorization: ghp_" + "A1b2C3d4" * 5)
print("BUG_REPRODUCED")
sys.exit(10)
