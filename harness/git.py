"""Running git, for patches and for trees that come from a repository."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

from harness.errors import HarnessError

#: For what must not depend on a user's configuration, such as `git apply`.
PLAIN = {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_COUNT": "0"}


def run(
    arguments: list[str], folder: Path, extra: dict[str, str] | None = None, stdin: int = subprocess.DEVNULL
) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`; it never asks for a password and never looks for a repository above `folder`."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    environment = inherited | {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C.UTF-8",
        **{name: value for name, value in os.environ.items() if name.startswith("GIT_CONFIG_")},
        **(extra or {}),
    }
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            stdin=stdin,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise HarnessError("git is not installed. Next: apt-get install git") from None


def last_line(text: str) -> str:
    """Return the last line of git's own message that says something."""
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else "no message"
