"""Says that the bug is there and exits with 0."""

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
print("BUG_REPRODUCED")
