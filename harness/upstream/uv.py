"""uv resolves requirements and lays out wheels; it never builds an sdist, and executes no code of a package.

The user's configuration of uv is not read. To resolve, uv asks the indexes that the user's pip is configured for.
Errors hold no URL, since an index may be private.
"""

import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from uv import find_uv_bin

from harness.core import files
from harness.upstream import package_index

#: The configuration with which everybody resolves requirements.
CONFIGURATION = files.REPOSITORY / "packs/uv.toml"
#: The user's own settings of uv and of Python, which a child does not inherit.
FOREIGN = re.compile(r"UV_.*|VIRTUAL_ENV|CONDA_PREFIX|PYTHON.*|PYC_.*")
URL = re.compile(r"(?:https?|file)://[^\s)]+")

#: A pin in the text that `resolve_pins` returns.
PIN = re.compile(r"(?m)^(?P<pin>[\w.-]+==[^\s;\\]+)")


class UvError(Exception):
    """The error of uv, on one line and without URLs."""


def run(arguments: Sequence[str], **variables: str) -> None:
    """Run uv with arguments such as ``pip install``, and with `variables` beside the caller's own.

    The caller's variables that configure uv or Python are left out. UvError: uv failed.
    """
    environment = {name: value for name, value in os.environ.items() if not FOREIGN.fullmatch(name)} | variables
    command = [find_uv_bin(), *arguments, "--no-progress", "--quiet", "--color", "never"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", check=False)
    if process.returncode != 0:
        message = " ".join(line.strip() for line in process.stderr.splitlines() if not line.startswith("warning:"))
        message = message.removeprefix("error: ").replace(" cause: ", ": ")
        raise UvError(URL.sub("the index", message) or f"uv ended with status {process.returncode}")


def resolve_pins(requirements: str, python: str = "", before: str = "") -> str:
    """Resolve the lines of a requirements.in into pinned lines, as an author would by CONTRIBUTING.md.

    `python` is the version for which to resolve (empty: every version). Files that were uploaded after `before`, a time
    in UTC by RFC 3339 (empty: now), are ignored. UvError: no versions meet the requirements.
    """
    main, *extra = package_index.endpoints()
    indexes = {"UV_DEFAULT_INDEX": main, "UV_INDEX": " ".join(extra), "UV_INDEX_STRATEGY": "unsafe-best-match"}
    with tempfile.TemporaryDirectory(prefix="requirements-") as folder:
        source, output = Path(folder) / "requirements.in", Path(folder) / "requirements.txt"
        source.write_text(requirements, encoding="utf-8")
        command = ["pip", "compile", "--config-file", str(CONFIGURATION), source.name, "--output-file", output.name]
        command += ["--no-universal", "--python-version", python] if python else []
        command += ["--exclude-newer", before] if before else []
        run([*command, "--directory", folder, "--python", sys.executable], **indexes)
        return output.read_text(encoding="utf-8")


def lay_out(requirements: Path, wheels: Path, site: Path, python: Path, cache: Path) -> None:
    """Lay out the wheels of one folder in another, `site`, with their bytecode and without network.

    `requirements` is a file with the version and the sha256 of each, `python` the interpreter, `cache` a folder of uv's
    own on the same file system, to which nobody else writes. Python does not compare the bytecode with its source: both
    are sealed. UvError: a wheel is missing, is not for that interpreter, or has another sha256.
    """
    inputs = ["--requirement", str(requirements), "--find-links", str(wheels)]
    outputs = ["--target", str(site), "--python", str(python), "--cache-dir", str(cache), "--link-mode", "hardlink"]
    limits = ["--no-config", "--offline", "--no-index", "--no-deps", "--require-hashes", "--only-binary", ":all:"]
    command = ["pip", "install", *inputs, *outputs, *limits, "--compile-bytecode"]
    run(command, PYC_INVALIDATION_MODE="UNCHECKED_HASH")
    (site / ".lock").unlink(missing_ok=True)
