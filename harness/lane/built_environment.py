"""Environments that a pack's own script has made in the cache, for what no wheel offers.

Such an environment is a virtual one over the runner's interpreter, so that it sees all of its packages; what it adds
is compiled against that interpreter's torch, and is seen by nobody else.
"""

from __future__ import annotations

import sys
from pathlib import Path

from harness.core import files, seal
from harness.core.cache import Cache
from harness.core.seal import ChangedError
from harness.host.host import Host

KIND = "environments"


def key(host: Host, name: str) -> str:
    """Name the environment's place in the cache: another interpreter or torch has another ABI."""
    return f"{name}-{files.key_of(sys.prefix, host.python, host.torch)}"


def environment(cache: Cache, host: Host, name: str) -> Path | None:
    """Return the folder of a target's environment; None where it names none, or nobody has made it here."""
    folder = cache.entry(KIND, key(host, name)) if name else None
    return folder if folder is not None and interpreter(folder).exists() else None


def check(cache: Cache, folder: Path | None) -> None:
    """Check that an environment is what it was when a lane first used it: no index can give it again.

    ChangedError is raised where it is not; it has been removed.
    """
    if folder is None:
        return
    same = seal.kept(cache, KIND, folder.name, folder)
    if same is None:
        seal.keep(cache, KIND, folder.name, folder)
    elif not same:
        seal.forget(cache, KIND, folder.name, folder)
        raise ChangedError(
            f"the environment {folder.name} is not what it was when it was first used; it has been removed. "
            "Next: run the script that builds it"
        )


def prefix(folder: Path | None) -> str:
    """Return the folder of an environment, or that of the runner's own."""
    return str(folder or sys.prefix)


def interpreter(folder: Path | None) -> Path:
    """Return the interpreter of an environment, or the runner's own."""
    return folder / "bin" / "python" if folder is not None else Path(sys.executable)
