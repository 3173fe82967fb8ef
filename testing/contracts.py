"""Contracts of real packs, loaded as modules: what they read can be tested without a lane."""

from __future__ import annotations

import importlib.util
from types import ModuleType

import pytest

from testing.workbench import REPOSITORY


def load(pack: str) -> ModuleType:
    """Load a contract that imports nothing of its upstream at its top."""
    pytest.importorskip("torch")  # it takes torch's warning of a missing numpy, too
    spec = importlib.util.spec_from_file_location(f"contract_of_{pack}", REPOSITORY / "packs" / pack / "contract.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
