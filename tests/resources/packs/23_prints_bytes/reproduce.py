"""Prints bytes that are not UTF-8, a NUL and a terminal escape, and is right otherwise."""

import sys

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]), flush=True)
sys.stdout.buffer.write(b"\xff\xfe\x00 \x1b[31mred\x1b[0m \xc3(\n")
sys.stdout.flush()
print("BUG_REPRODUCED")
sys.exit(10)
