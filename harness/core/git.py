"""Running git, for patches and for trees that come from a repository."""

import os
import subprocess
from pathlib import Path

from harness.core.errors import HarnessError

#: For commands that show files, apply a patch or lay out a commit. They read no configuration and no attributes of a
#: user or of an archive, since both may name filters and commands.
PLAIN = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_CONFIG_COUNT": "0",
    "GIT_ATTR_NOSYSTEM": "1",
}
PLAIN_SETTINGS = ("-c", f"core.attributesFile={os.devnull}", "-c", f"core.hooksPath={os.devnull}")


def start(arguments: list[str], folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Run git in `folder` with this environment and wait for its end; bytes that are not UTF-8 are replaced."""
    try:
        return subprocess.run(
            ["git", *arguments],
            cwd=folder,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise HarnessError("git is not installed. Next: apt-get install git") from None


def run(
    arguments: list[str], folder: Path, extra: dict[str, str] | None = None, *, plain: bool = False
) -> subprocess.CompletedProcess[str]:
    """Run git in `folder`; it never asks for a password and never looks for a repository above `folder`.

    With `plain` it reads no configuration but that of the repository `folder`. Otherwise it also reads the user's: a
    fetch needs the proxy and the credentials.
    """
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    configuration = {name: value for name, value in os.environ.items() if name.startswith("GIT_CONFIG_")}
    environment = inherited | {
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
        "GIT_TERMINAL_PROMPT": "0",
        "LC_ALL": "C.UTF-8",
        **(PLAIN if plain else configuration),
        **(extra or {}),
    }
    return start([*PLAIN_SETTINGS, *arguments] if plain else arguments, folder, environment)


def last_line(text: str) -> str:
    """Return the last line of git's message that is not blank."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "no message")
