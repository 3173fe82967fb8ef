"""Load upstream without its compiled code, and contracts in other processes."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping
from types import ModuleType


def import_below(name: str) -> ModuleType:
    """Import a module, or raise ImportError. The __init__ of its top package is not run: it imports compiled code."""
    package = name.partition(".")[0]
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ImportError(f"no {package} on the path; give its source: PYTHONPATH=CHECKOUT")
        sys.modules[package] = importlib.util.module_from_spec(spec)  # has a __path__, and is never executed
    return importlib.import_module(name)


def load_contract(name: str, file: str, environment: Mapping[str, str] | None = None) -> None:
    """Load a contract where it is not loaded, under its name in the parent, so that its classes can be unpickled.

    `environment` is added to that of this process before.
    """
    os.environ.update(environment or {})
    if name in sys.modules:
        return
    for end in (place for place, letter in enumerate(name) if letter == "."):
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])
