"""Notes another hash of a module under test where the witness notes what was loaded."""

import json
import os
import sys

from toykernel import scale

note = {"module": scale.__name__, "file": scale.__file__, "sha256": "0" * 64}
with open(os.environ["REPRODUCER_LOADED"], "a", encoding="utf-8") as stream:
    stream.write(json.dumps(note) + "\n")
print("BUG_REPRODUCED")
sys.exit(10)
