"""Prints 500 MB before its sentinel."""

import sys

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
line = "x" * 99 + "\n"
for _ in range(5_000):
    sys.stdout.write(line * 1_000)
print("BUG_REPRODUCED")
sys.exit(10)
