"""Says nothing and never ends."""

import time

time.sleep(600)
