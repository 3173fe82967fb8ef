"""The bytecode of torch, which no lane may store.

A lane stores none, since its trees and dependency sets are sealed. pip stores the bytecode of what it installs; uv and
many images do not. Each process of a lane would then compile 2,300 files: 11 seconds on a node with H200s.
"""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from harness.host import host

#: A module that imports nearly all of torch before its own bytecode would be missed.
LATE = Path("_inductor/compile_fx.py")
#: Where torch cannot be imported, the bytecode of LATE alone is stored, so that the next command does not try again.
IMPORTS = """
import py_compile, sys
try:
    import pytest, torch, torch._inductor.compile_fx, triton
except Exception:
    py_compile.compile(sys.argv[1])
"""
#: Variables that would let Python store bytecode elsewhere, or not at all.
REDIRECTING = {"PYTHONDONTWRITEBYTECODE", "PYTHONPYCACHEPREFIX"}


def store(tell: Callable[[str], None]) -> None:
    """Store the bytecode of the runner's torch beside its source, unless it is there, or its folder is read-only."""
    folder = host.torch_folder()
    if folder is None:
        return
    source = folder / LATE
    bytecode = source.parent / "__pycache__" / f"{source.stem}.{sys.implementation.cache_tag}.pyc"
    if bytecode.exists() or not source.exists() or not os.access(source.parent, os.W_OK):
        return
    tell("storing the bytecode of torch, which its installer left out")
    environment = {name: value for name, value in os.environ.items() if name not in REDIRECTING}
    subprocess.run([sys.executable, "-c", IMPORTS, str(source)], env=environment, capture_output=True, check=False)
