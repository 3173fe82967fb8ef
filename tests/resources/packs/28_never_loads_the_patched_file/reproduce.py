"""Reads the file that the patch changes, and loads another one."""

import sys
from pathlib import Path

from toykernel import other

patched = "zip(" in Path(other.__file__).with_name("scale.py").read_text()
print("FIX_VALIDATED" if patched else "BUG_REPRODUCED")
sys.exit(0 if patched else 10)
