#!/usr/bin/env python3
"""Run reproducer packs: script and contract on two trees, a verdict for each pack and target.

The verbs are in harness/commands; this file only starts them.
"""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

try:
    from harness.commands import main
except ModuleNotFoundError as error:
    sys.exit(f"error: {error.name} is not installed for {sys.executable}. Next: sh setup.sh, which makes .venv")

if __name__ == "__main__":
    sys.exit(main())
