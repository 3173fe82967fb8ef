"""``runner.py verify``: check a bundle or a receipt that somebody else sent, with verify.py."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import click

from harness.commands import options


@click.command("verify")
@click.argument("file", type=click.Path(path_type=Path))
def command(file: Path) -> int:
    """Check a bundle or a receipt against its own log and against the packs and receipts of this repository.

    It runs verify.py, a single file that needs nothing but Python.

    Exit status 0: all that can be checked holds; 1: it does not; 2: no such file.
    """
    ended = subprocess.run([sys.executable, "-I", str(options.REPOSITORY / "verify.py"), str(file)], check=False)
    return ended.returncode
