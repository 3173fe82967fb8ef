"""uv, which resolves requirements and lays out wheels: it never builds an sdist, and executes nothing that it is given.

Nobody's own configuration of uv is read. Where it resolves, it asks the indexes that the user's pip is configured for.
No message of it that is passed on holds a URL, since an index may be private.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from harness.core import files
from harness.core.errors import HarnessError
from harness.upstream import package_index

#: How requirements are resolved: the same for everybody.
CONFIGURATION = files.REPOSITORY / "packs/uv.toml"
#: What stands between a child and its work: the user's own settings of uv and of Python.
FOREIGN = re.compile(r"UV_.*|VIRTUAL_ENV|CONDA_PREFIX|PYTHON.*|PYC_.*")
URL = re.compile(r"(?:https?|file)://[^\s)]+")

#: A package and its version in what `compiled` returns.
PIN = re.compile(r"(?m)^(?P<pin>[\w.-]+==[^\s;\\]+)")


class UvError(Exception):
    """What uv answered, on one line and without URLs."""


def run(arguments: Sequence[str], **variables: str) -> None:
    """Run uv with arguments such as ``pip install``, and with variables beside the caller's own.

    What of those configures uv or Python is left out. HarnessError: there is no uv. UvError: it failed.
    """
    try:
        from uv import find_uv_bin  # noqa: PLC0415 - only what resolves or lays out needs it

        binary = find_uv_bin()
    except (ImportError, FileNotFoundError):
        raise HarnessError("uv is not installed. Next: pip install uv") from None
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)}
    command = [binary, *arguments, "--no-progress", "--quiet", "--color", "never"]
    ended = subprocess.run(command, env=kept | variables, capture_output=True, text=True, errors="replace", check=False)
    if ended.returncode != 0:
        said = " ".join(line.strip() for line in ended.stderr.splitlines() if not line.startswith("warning:"))
        said = said.removeprefix("error: ").replace(" cause: ", ": ")
        raise UvError(URL.sub("the index", said) or f"uv ended with status {ended.returncode}")


def compiled(requirements: str, python: str = "", before: str = "") -> str:
    """Resolve the lines of a requirements.in into those that pin them, as an author would by CONTRIBUTING.md.

    `python` is the version that they are resolved for (empty: every one), `before` the time from which on the index has
    nothing, in UTC, as RFC 3339 writes it (empty: now). UvError is raised where nothing meets them.
    """
    main, *others = package_index.of_user().endpoints()
    indexes = {"UV_DEFAULT_INDEX": main, "UV_INDEX": " ".join(others), "UV_INDEX_STRATEGY": "unsafe-best-match"}
    with tempfile.TemporaryDirectory(prefix="requirements-") as folder:
        given, made = Path(folder) / "requirements.in", Path(folder) / "requirements.txt"
        given.write_text(requirements, encoding="utf-8")
        command = ["pip", "compile", "--config-file", str(CONFIGURATION), given.name, "--output-file", made.name]
        command += ["--no-universal", "--python-version", python] if python else []
        command += ["--exclude-newer", before] if before else []
        run([*command, "--directory", folder, "--python", sys.executable], **indexes)
        return made.read_text(encoding="utf-8")


def lay_out(requirements: Path, wheels: Path, site: Path, python: Path, cache: Path) -> None:
    """Lay out the wheels of one folder in another, `site`, with their bytecode; no network is reached.

    `requirements` is a file that states version and sha256 of each, `python` the interpreter that they are for, `cache`
    a folder of uv's own on the same file system, to which nobody else writes. Each compiled file states that its source
    need not be looked at: both are sealed. UvError is raised where a wheel is missing, is not for that interpreter, or
    is another one than the sha256 says.
    """
    given = ["--requirement", str(requirements), "--find-links", str(wheels)]
    made = ["--target", str(site), "--python", str(python), "--cache-dir", str(cache), "--link-mode", "hardlink"]
    safe = ["--no-config", "--offline", "--no-index", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command = ["pip", "install", *given, *made, *safe, "--compile-bytecode"]
    run(command, PYC_INVALIDATION_MODE="UNCHECKED_HASH")
    (site / ".lock").unlink(missing_ok=True)
