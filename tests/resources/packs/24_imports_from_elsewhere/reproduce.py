"""Judges a copy of the module under test that lies outside the tree."""

import sys
import tempfile
from pathlib import Path

package = Path(tempfile.mkdtemp(), "toykernel")
package.mkdir()
package.joinpath("__init__.py").touch()
package.joinpath("scale.py").write_text("def scale(values, weights):\n    return values\n")
sys.path.insert(0, str(package.parent))

from toykernel import scale

print("scaled:", scale.scale([1.0, 2.0], [1.0, 0.5]))
print("BUG_REPRODUCED")
sys.exit(10)
