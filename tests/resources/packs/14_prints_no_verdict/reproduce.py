"""Ends well without a sentinel."""

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
