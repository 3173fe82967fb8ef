"""Ask tilelang's analyzer for the proof that it fails at, with more of Z3's steps and of another form.

    PYTHONPATH=TILELANG:DEPENDENCIES python measure_proof.py

No GPU is needed. The index is the one that the refusal of reproduce.py's [16, 128] names. Writes data/proof.json.
"""

import json
from pathlib import Path

import tilelang
from tvm import arith, tirx  # of tilelang's wheel
from tvm.ir import Range

LIMITS = {"own limit": None, "50,000 steps": 50_000}


def index(rv, i):
    """Return the index into a thread's registers."""
    return rv % 16 // 8 * 4 + i // 8 * 2 + rv % 2


FORMS = {  # of rv, without the segments that threads own
    "subtracted": lambda rv: rv - rv // 16 % 8 * 16 - rv // 2 % 4 * 2,  # as CheckThreadOwnedStepsProjectable has it
    "kept": lambda rv: rv % 2 + rv // 8 % 2 * 8,  # the sum of the other segments
}


def proved(form, limit):
    """Whether a new analyzer proves that the index stays the same."""
    analyzer, rv, i = arith.Analyzer(), tirx.Var("rv", "int32"), tirx.Var("i", "int32")
    analyzer.bind(rv, Range(0, 128))
    analyzer.bind(i, Range(0, 16))
    if limit:
        analyzer.set_z3_rlimit(limit)
    after = analyzer.simplify(index(analyzer.simplify(form(rv)), i))
    return bool(analyzer.can_prove_equal(after, analyzer.simplify(index(rv, i))))


found = {"tilelang": tilelang.__version__}
for name, form in FORMS.items():
    found[name] = {words: proved(form, limit) for words, limit in LIMITS.items()}
Path(__file__).with_name("data").joinpath("proof.json").write_text(json.dumps(found, indent=1) + "\n")
