# /// script
# requires-python = ">=3.11"
# dependencies = ["toykernel==1.0"]
# ///
"""Scaling by per-value weights uses the first weight for every value.

Cause: `scale` multiplies by `weights[0]`. Upstream: https://example.org/toykernel/issues/1

    uv run reproduce.py                            # the release 1.0: BUG_REPRODUCED
    PYTHONPATH=CHECKOUT/src python reproduce.py    # a checkout with the patch: FIX_VALIDATED
"""

import sys

from toykernel import scale

values, weights = [1.0, 2.0, 3.0], [1.0, 0.5, 0.0]
right = [1.0, 1.0, 0.0]
try:
    ones, scaled = scale.scale(values, [1.0, 1.0, 1.0]), scale.scale(values, weights)
except NotImplementedError as error:
    print(f"UNSUPPORTED: {error}")
    sys.exit(125)
if ones != values:
    print("UNSUPPORTED: weights of one change the values")
    sys.exit(125)
print(f"scaled: {scaled}, right: {right}")
print("FIX_VALIDATED" if scaled == right else "BUG_REPRODUCED")
sys.exit(0 if scaled == right else 10)
