"""Takes its time, so that it can be interrupted."""

import os
import sys
import time
from pathlib import Path

Path(__file__).with_name("pid").write_text(str(os.getpid()))
if os.fork() == 0:
    Path(__file__).with_name("grandchild").write_text(str(os.getpid()))
    time.sleep(600)
time.sleep(600)
sys.exit(10)
