"""Ask tilelang's own analyzer for the proof that it fails at, with other limits, and written otherwise.

No GPU is needed. `PYTHONPATH=TILELANG python measure_proof.py data/proof.json` adds the entry of that tilelang. The
index is the one that the refusal of [64, 64] seen as [16, 256] with 256 threads names, rv the reduce variable.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import tilelang  # it brings the tvm that is imported below
from tvm import arith
from tvm.ir import Range

try:
    from tvm import tirx as tir  # 0.1.12 and later
except ImportError:
    from tvm import tir

#: Of Z3's steps; None: what the analyzer sets itself.
LIMITS = (None, 1, 10_000, 20_000, 50_000, 100_000, 1_000_000)


def index(rv: Any, i: Any) -> Any:
    """Return the index into a thread's registers."""
    mod, div = tir.floormod, tir.floordiv
    return div(mod(rv, 32), 8) * 4 + div(mod(i, 4), 2) * 2 + mod(rv, 2)


def subtracted(rv: Any) -> Any:
    """Take away the three segments of rv that threads own, as CheckThreadOwnedStepsProjectable does."""
    mod, div = tir.floormod, tir.floordiv
    return rv - mod(div(rv, 32), 2) * 32 - mod(div(rv, 64), 4) * 64 - mod(div(rv, 2), 4) * 2


def kept(rv: Any) -> Any:
    """Add up the two segments that are left: the same value."""
    return tir.floormod(rv, 2) + tir.floormod(tir.floordiv(rv, 8), 4) * 8


def proved(projected: Any, limit: int | None) -> bool:
    """Whether a new analyzer proves that the index is the same of rv and of what is left of it."""
    analyzer, rv, i = arith.Analyzer(), tir.Var("rv", "int32"), tir.Var("i", "int32")
    analyzer.bind(rv, Range(0, 256))
    analyzer.bind(i, Range(0, 16))
    if limit is not None:
        analyzer.set_z3_rlimit(limit)
    before = analyzer.simplify(index(rv, i))
    after = analyzer.simplify(index(analyzer.simplify(projected(rv)), i))
    return bool(analyzer.can_prove_equal(after, before))


def main() -> None:
    """Add the entry of this tilelang to the file that the command line names."""
    path = Path(sys.argv[1])
    found = {
        form.__name__: {str(limit or "default"): proved(form, limit) for limit in LIMITS} for form in (subtracted, kept)
    }
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    known[f"tilelang-{tilelang.__version__.replace('.', '-')}"] = found
    path.write_text(json.dumps(dict(sorted(known.items())), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
