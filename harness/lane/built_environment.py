"""Environments that a pack's own script has built in the cache, for packages without wheels.

Such an environment is a virtual one over the runner's interpreter, and sees all of its packages. Its own packages are
compiled against that interpreter's torch, and only its lanes see them.
"""

import sys
from pathlib import Path

from harness.core import files, seal
from harness.core.cache import Cache
from harness.core.seal import ChangedError
from harness.host.host import Host

KIND = "environments"


def key(host: Host, name: str) -> str:
    """Return the environment's key in the cache: another interpreter or torch has another ABI."""
    return f"{name}-{files.key_of(sys.prefix, host.python, host.torch)}"


def find_environment(cache: Cache, host: Host, name: str) -> Path | None:
    """Return the folder of a target's environment; None if the target names none, or it is not built here."""
    folder = cache.entry(KIND, key(host, name)) if name else None
    return folder if folder is not None and interpreter(folder).exists() else None


def check(cache: Cache, folder: Path | None) -> None:
    """Check that an environment is unchanged since a lane first used it: no index can restore it.

    ChangedError: it had changed, and has been removed.
    """
    if folder is None:
        return
    unchanged = seal.is_unchanged(cache, KIND, folder.name, folder)
    if unchanged is None:
        seal.keep(cache, KIND, folder.name, folder)
    elif not unchanged:
        seal.forget(cache, KIND, folder.name, folder)
        raise ChangedError(
            f"the environment {folder.name} is not what it was when it was first used; it has been removed. "
            "Next: run the script that builds it"
        )


def interpreter(folder: Path | None) -> Path:
    """Return the interpreter of an environment; for None, the runner's own."""
    return folder / "bin" / "python" if folder is not None else Path(sys.executable)
