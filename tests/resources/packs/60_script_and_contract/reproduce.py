# /// script
# requires-python = ">=3.11"
# dependencies = ["toykernel==1.0"]
# ///
"""Scaling by per-value weights uses the first weight for every value.

Cause: `scale` multiplies by `weights[0]`. Upstream: https://example.org/toykernel/issues/1
Release: uv run reproduce.py. Checkout: PYTHONPATH=CHECKOUT/src python reproduce.py
"""

import sys

from toykernel.scale import scale

values, weights = [1.0, 2.0, 3.0], [1.0, 0.5, 0.0]
scaled = scale(values, weights)
if scale(values, [1.0, 1.0, 1.0]) != values:
    print("UNSUPPORTED: weights of one change the values")
    sys.exit(125)
print(f"scaled {scaled}, right is [1.0, 1.0, 0.0]")
if scaled != [1.0, 1.0, 0.0]:
    print("BUG_REPRODUCED")
    sys.exit(10)
print("FIX_VALIDATED")
