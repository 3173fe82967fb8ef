"""What everything stands on: words, errors, files, the cache, strict parsing; nothing here knows a pack.

What most modules need of it has its name here.
"""

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError, UnsupportedHereError, unknown_name
from harness.core.words import NO_EXPECTATION, UNJUDGED, Evidence, Exit, Kind, LaneName, LaneVerdict, Role, Verdict

__all__ = [
    "NO_EXPECTATION", "UNJUDGED", "Cache", "Evidence", "Exit", "HarnessError", "Kind", "LaneName", "LaneVerdict",
    "Role", "UnavailableError", "UnsupportedHereError", "Verdict", "unknown_name",
]  # fmt: skip
