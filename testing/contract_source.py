"""Values that stand in the source of a contract or of the kit, read without importing torch or upstream."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

from testing.workbench import REPOSITORY


def values(path: str, **names: Any) -> dict[str, Any]:  # noqa: ANN401 - any value may be named
    """Evaluate what a file assigns at its top, where these names, torch.float32 and the lines before suffice."""
    known = {"torch": SimpleNamespace(float32="float32")} | names
    for node in ast.parse((REPOSITORY / path).read_text(encoding="utf-8")).body:
        target = node.targets[0] if isinstance(node, ast.Assign) else getattr(node, "target", None)
        if isinstance(target, ast.Name) and isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            try:
                known[target.id] = eval(ast.unparse(node.value), dict(known))  # noqa: S307 - our own file
            except (NameError, AttributeError):
                continue
    return known
