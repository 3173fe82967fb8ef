# /// script
# requires-python = ">=3.11"
# dependencies = [
#   "tilelang==0.1.15",
#   "apache-tvm-ffi==0.1.11",
#   "cloudpickle==3.1.2",
#   "ml-dtypes==0.6.0",
#   "numpy==2.3.5",
#   "psutil==7.2.2",
#   "torch==2.13.0",
#   "torch-c-dlpack-ext==0.1.5",
#   "tqdm==4.70.1",
#   "typing-extensions==4.16.0",
#   "z3-solver==4.15.4.0",
# ]
# ///
"""tilelang >= 0.1.13 refuses to lower a reduction of a view of a gemm's result that 0.1.12 lowers to right code.

Symptom: `T.reduce_sum(T.view(acc, [16, 256]), out, dim=-1)`, acc a float32 fragment [64, 64] that T.gemm made with 256
threads: "InternalError: Check failed: (analyzer->CanProveEqual(projected_index, simplified_index)) is false: ReduceOp
cannot lower a layout where a source index depends on a thread-owned reduce segment".

Cause: since 5dfa0f5d6 (pull request 2424), in the form of 2047357e7 (2647), CheckThreadOwnedStepsProjectable in
src/backend/common/op/reduce.h subtracts the segments of the reduce variable that threads own, and asks the analyzer
whether the fragment's index is the same without them. It is, for every value; but Z3, which the analyzer asks last,
reaches its limit of steps first (measure_proof.py: 50,000 are enough; the sum of the other segments needs no Z3).

Scope: lowering for sm_90a, to CUDA source (`compiled`; nothing is run, no nvcc is needed), each kernel in a process of
its own: in 0.1.13 the answer depends on what was lowered before (`again`). What is judged:

    accumulator [M, N] of a gemm of bfloat16    [64, 64], [64, 128]; float32, float16
    its view [rows, width], by T.view or T.reshape    [16, 256], [8, 512], [16, 512] (that of mamba_mimo_bwd_bwd)
    T.reduce_sum, reduce_max, reduce_min, reduce_abssum, reduce_absmax; threads 128, 256

`sums`: the CUDA source of a reduce_sum of float32 is followed for every thread, from the registers where PTX says that
wgmma leaves the accumulator to the output: each element has to be in its own sum, once.
`message`: the two indices that the refusal names are the same for all values; else the refusal would be right.
The controls `workaround.*` are kernels that do the same otherwise: in two reductions, or by way of shared memory.

Upstream: https://github.com/tile-ai/tilelang. Both verdicts without the runner, and without a GPU:

    uv run "$PACK/reproduce.py" --target sm_90a  # 0.1.15: BUG_REPRODUCED
    export OLD="--with tilelang==0.1.12 --with apache-tvm-ffi==0.1.11 --with numpy==2.3.5"
    uv run --no-project $OLD python "$PACK/reproduce.py" --target sm_90a  # FIX_VALIDATED
"""

# fmt: off
# --- protocol: begin (the same in every probe; the original is harness/protocol.py)
import argparse, contextlib, ctypes, fnmatch, hashlib, json, os, sys, traceback
from pathlib import Path
class Probe:  # prints the lines that a runner reads, and draws the verdict from the checks among them
    def __init__(self):
        self.judged, self.tested, self.only = {}, [], None  # judged: (role, ok) -> the names of these checks
    def say(self, word, **fields):  # JSON has neither NaN nor infinity: they become strings
        print(word, json.dumps(json.loads(json.dumps(fields), parse_constant=str)), flush=True)
    def upstream(self, module):  # a module under test, as it was really loaded
        name, file, package = module.__name__, Path(module.__file__), module.__name__.partition(".")[0]
        self.tested.append(next((str(folder) for folder in file.parents if folder.name == package), str(file)))
        self.say("UPSTREAM", module=name, file=str(file), sha256=hashlib.sha256(file.read_bytes()).hexdigest())
    def check(self, name, role, ok, **values):  # ok is None where this cannot be judged here
        self.judged.setdefault((role, ok), []).append(name)
        self.say("CHECK", name=name, role=role, ok=ok, **values)
    def judge(self, name, role, measure, *given):  # measure(*given) returns ok, and by name what it measured
        try:
            wanted = fnmatch.fnmatchcase(name, self.only or "*")
            ok, values = measure(*given) if wanted else (None, {"reason": "--only leaves it out"})
        except Exception as error:  # code under test that raises is wrong; a fault of the probe or the host is not
            files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
            host = isinstance(error, (ImportError, MemoryError, OSError)) or "out of memory" in str(error)
            refused = "returned an in" in str(error)  # autograd says: an invalid gradient, an incorrect number of them
            if host or not (refused or any(file.startswith(tuple(self.tested)) for file in files)):
                raise
            traceback.print_exc()
            ok, values = False, {"reason": f"it raised {type(error).__name__}: {error}"[:400]}
        self.check(name, role, ok, **values)
    def output(self, name, tensor, must_match=True):  # the runner compares the two lanes'
        data = tensor.detach().cpu().contiguous()
        sha256 = hashlib.sha256(ctypes.string_at(data.data_ptr(), data.nbytes)).hexdigest()
        self.say("OUTPUT", name=name, dtype=str(data.dtype), shape=[*data.shape], sha256=sha256, must_match=must_match)
    @contextlib.contextmanager
    def alone(self):  # around launches that are timed: no other lane of the runner uses this GPU meanwhile
        gate = Path(os.environ.get("REPRODUCER_GPU_GATE", os.devnull))  # a named pipe, where lanes share a GPU
        try:
            yield gate.read_text()  # ends when the other lanes are off it
        finally:
            gate.read_text()  # ends when they may use it again
    def run(self, judge):  # judge(probe, target) loads upstream and makes the checks
        parser = argparse.ArgumentParser(description="Judge one bug; the last line is the verdict.")
        parser.add_argument("--target", help="cpu, sm_90a, ... (default: this host's GPU, else cpu)")
        parser.add_argument("--only", metavar="CHECK", help="run this check alone (a name or a glob): no verdict")
        target, self.only = vars(parser.parse_args()).values()
        reason = f"only {self.only} was run" if self.only else "no defect check could be judged here"
        try:
            if target is None:
                import torch
                arch = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
                target = "sm_{}{}".format(*arch) + "a" * (arch >= (9, 0)) if arch else "cpu"
            judge(self, target)
        except (ImportError, NotImplementedError) as error:  # a package or a mode cannot be had
            self.judged, reason = {}, f"{type(error).__name__}: {error}"
        except Exception:
            traceback.print_exc()
            sys.exit(125)
        ends = {("control", False): ("CONTROL_FAILED", 125), ("defect", False): ("BUG_REPRODUCED", 10),
                ("defect", True): ("FIX_VALIDATED", 0), None: ("UNSUPPORTED", 125)}
        key = next((key for key in ends if key in self.judged and not self.only), None)
        self.say(ends[key][0], reason=", ".join(self.judged.get(key, [reason])))
        sys.exit(ends[key][1])
# --- protocol: end
# fmt: on

import ast, collections, multiprocessing, operator, re, typing

REFUSAL = "thread-owned reduce"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
             ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.RShift: operator.rshift}  # fmt: skip


class Case(typing.NamedTuple):
    """One kernel: a gemm of [M, 64] and [64, N], and a reduction of its result seen in rows of that width."""

    threads: int
    M: int
    N: int
    width: int
    way: str
    dtype: str


CASES = {  # each is one kernel
    "16x256.256_threads": Case(256, 64, 64, 256, "view.reduce_sum", "float32"),  # the reported one
    "8x512.256_threads": Case(256, 64, 64, 512, "view.reduce_sum", "float32"),
    "8x512.128_threads": Case(128, 64, 64, 512, "view.reduce_sum", "float32"),
    "mamba.16x512.256_threads": Case(256, 64, 128, 512, "view.reduce_sum", "float32"),
    "reshape": Case(256, 64, 64, 256, "reshape.reduce_sum", "float32"),
    "float16": Case(256, 64, 64, 256, "view.reduce_sum", "float16"),
    "reduce_max": Case(256, 64, 64, 256, "view.reduce_max", "float32"),
    "reduce_min": Case(256, 64, 64, 256, "view.reduce_min", "float32"),
    "reduce_abssum": Case(256, 64, 64, 256, "view.reduce_abssum", "float32"),
    "reduce_absmax": Case(256, 64, 64, 256, "view.reduce_absmax", "float32"),
}
AGAIN = "16x256.128_threads"
CONTROLS = {
    AGAIN: Case(128, 64, 64, 256, "view.reduce_sum", "float32"),
    "32x128.256_threads": Case(256, 64, 64, 128, "view.reduce_sum", "float32"),
    "no_view.256_threads": Case(256, 64, 64, 64, "view.reduce_sum", "float32"),
    "mamba.16x512.workaround.two_reductions": Case(256, 64, 128, 512, "two", "float32"),
    "workaround.two_reductions": Case(256, 64, 64, 256, "two", "float32"),
    "workaround.shared_memory": Case(256, 64, 64, 256, "shared", "float32"),
}


def kernel(T, case):
    """Return the program: a gemm of [M, 64] and [64, N], and the reduction of a view of its result."""
    threads, M, N, width, way, dtype = case
    rows, (view, _, reduction) = M * N // width, way.partition(".")
    viewed, reduced = getattr(T, view, T.view), getattr(T, reduction or "reduce_sum")

    @T.prim_func
    def main(A: T.Tensor((M, 64), "bfloat16"), B: T.Tensor((N, 64), "bfloat16"), C: T.Tensor((rows,), dtype)):
        with T.Kernel(1, threads=threads) as _:
            a = T.alloc_shared((M, 64), "bfloat16")
            b = T.alloc_shared((N, 64), "bfloat16")
            acc = T.alloc_fragment((M, N), dtype)
            out = T.alloc_fragment((rows,), dtype)
            T.copy(A, a)
            T.copy(B, b)
            T.gemm(a, b, acc, transpose_B=True, clear_accum=True)
            if way == "two":
                row = T.alloc_fragment((M,), dtype)
                reduced(acc, row, dim=1)
                reduced(viewed(row, [rows, width // N]), out, dim=-1)
            elif way == "shared":
                shared = T.alloc_shared((M, N), dtype)
                T.copy(acc, shared)
                reduced(viewed(shared, [rows, width]), out, dim=-1)
            else:
                reduced(viewed(acc, [rows, width]), out, dim=-1)
            T.copy(out, C)

    return main


def lower(name, target, times):
    """Lower a kernel to CUDA source so many times. Return the source, or what it was refused with, of each."""
    import tilelang

    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    got = []
    for _ in range(times):
        program = kernel(tilelang.language, {**CONTROLS, **CASES}[name])
        try:
            with tilelang.tvm.transform.PassContext(opt_level=3), arch:
                given = {"enable_host_codegen": False, "enable_device_compile": False}  # no nvcc, and no C compiler
                got.append((tilelang.lower(program, target=arch, **given).kernel_source, ""))
        except Exception as error:  # it goes to the parent as text: not every error of TVM's can be pickled
            text = str(error).strip().splitlines()
            got.append(("", f"{type(error).__name__}: {text[-1] if text else ''}"))
    return got


def evaluated(text, **names):
    """Evaluate an index, of CUDA source or of a refusal, for numbers or for arrays of them."""

    def value(node):
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant):
            return node.value
        if not isinstance(node, ast.Name) or node.id not in names:
            raise NotImplementedError(f"this index is of another form: {text}")
        return names[node.id]

    return value(ast.parse(text.strip(), mode="eval").body)


def in_thread(text, thread, **names):
    """Evaluate an index of CUDA source: of numbers that are not negative, so that / is Python's //."""
    return evaluated(text.replace("((int)threadIdx.x)", "t").replace("/", "//"), t=thread, **names)


def found(pattern, source):
    """Return the groups of a pattern that has to stand there once."""
    matches = re.findall(pattern, source)
    if len(matches) != 1:
        raise NotImplementedError(f"{len(matches)} times in the source: {pattern}")
    return matches[0]


def element(case, columns, thread, register):
    """Return the place in [M, N], row by row, of an accumulator's register (PTX, wgmma.m64nNk16, D)."""
    group, warp, lane = thread // 128, thread // 32 % 4, thread % 32
    row = 16 * warp + 8 * (register // 2 % 2) + lane // 4
    return row * case.N + columns * group + 8 * (register // 4) + 2 * (lane % 4) + register % 2


def sums(case, source):
    """Follow every thread through the source. Return the elements in each sum, by its place in the output."""
    rows, columns = map(int, found(r"tl::wgmma_ss<(?:[\w:]+, ){3}(\d+), (\d+), 16,", source))
    if (rows, columns * case.threads // 128) != (case.M, case.N):
        raise NotImplementedError(f"wgmma of [{rows}, {columns}] by {case.threads} threads")
    index, register = found(r"out\[(\w+)\] = \(out\[\w+\] \+ acc\[(.+)\]\);", source)
    local, kept = int(found(r"int rv = 0; rv < (\d+);", source)), int(found(r"float out\[(\d+)\];", source))
    steps = [(int(one), int(two)) for one, two in re.findall(r"tl::AllReduce<tl::SumOp, (\d+), (\d+),", source)]
    end = source[source.rfind("tl::AllReduce") :]
    guard, threads, got = found(r"if \((.+) == 0\) \{", end), range(case.threads), {}
    for one in range(kept):
        held = []
        for t in threads:
            registers = [in_thread(register, t, rv=rv, **{index: one}) for rv in range(local)]
            held.append(collections.Counter(element(case, columns, t, register) for register in registers))
        for width, scale in steps:  # AllReduce: with the threads whose numbers differ in one bit, from width/2 to scale
            for bit in (width >> shift for shift in range(1, width.bit_length()) if width >> shift >= scale):
                held = [held[t] + held[t ^ bit] for t in threads]
        for t in threads:
            if in_thread(guard, t) == 0:
                got.setdefault(place(end, t, one), collections.Counter()).update(held[t])
    return got


def place(end, thread, one):
    """Return where a thread stores its sum of that number: one by one, or several in one vector."""
    if scalar := re.search(r"\bC\[(.+)\] = out\[(\w+)\];", end):
        return in_thread(scalar[1], thread, **{scalar[2]: one})
    vector = found(r"\*\(float\d\*\)\(C \+ (.+)\) = \*\(float\d\*\)\(out \+ 0\);", end)
    return in_thread(vector, thread) + one


def judge_lowers(answers):
    """Take a refusal for the bug; where there is any other error, nothing can be said."""
    refused = [error for _, error in answers if error]
    if others := [error for error in refused if REFUSAL not in error]:
        raise NotImplementedError(f"another error: {others[0][:300]}")
    return not refused, {"measured": len(refused), "unit": f"of {len(answers)} refused", "reason": "".join(refused[:1])}


def judge_sums(case, source):
    """Count the sums that do not have each of their elements once."""
    try:
        got, rows = sums(case, source), case.M * case.N // case.width
    except NotImplementedError as error:  # it is lowered to other words than those that can be followed here
        return None, {"reason": str(error)}
    wanted = {row: collections.Counter(range(row * case.width, (row + 1) * case.width)) for row in range(rows)}
    wrong = sorted(row for row in {*got, *wanted} if got.get(row) != wanted.get(row))
    return not wrong, {"measured": len(wrong), "unit": f"of {rows} sums are wrong", "tolerance": 0}


def judge_message(case, refusal):
    """Count the values at which the two indices that a refusal names differ."""
    names = re.search(r" src_index=(.+), projected_src_index=(.+), reduce_var=(\w+), projected_reduce_var=", refusal)
    if names is None:
        return None, {"reason": f"the refusal names no two indices: {refusal[:200]}"}
    import torch

    row, value = torch.cartesian_prod(torch.arange(case.M * case.N // case.width), torch.arange(case.width)).unbind(1)
    first, second = (evaluated(text, i=row, **{names[3]: value}) for text in names.groups()[:2])
    differ = int((first != second).sum())
    return differ == 0, {"measured": differ, "unit": f"of {len(row)} values at which they differ", "tolerance": 0}


def judge_kernel(probe, name, case, answers):
    """Judge what became of one kernel. Return whether it was refused."""
    role = "defect" if name in CASES else "control"
    (source, error), followed = answers[0], case.way == "view.reduce_sum" and case.dtype == "float32"
    probe.judge(f"lowers.{name}", role, judge_lowers, answers)
    if followed and source:
        probe.judge(f"sums.{name}", role, judge_sums, case, source)
    elif followed:
        probe.check(f"sums.{name}", role, None, reason="it is refused")
    if error and role == "defect":
        probe.judge(f"message.{name}", "control", judge_message, case, error)
    return bool(error)


def judge(probe, target):
    """Lower every kernel, each in a process of its own."""
    if target != "sm_90a":
        raise NotImplementedError(f"{target}: the registers are those of wgmma; --target sm_90a needs no GPU")
    import tilelang

    probe.say("TARGET", target=target, evidence="compiled", device="none")
    probe.upstream(tilelang)
    tasks = [(name, target, 3 if name == AGAIN else 1) for name in {**CONTROLS, **CASES}]
    with multiprocessing.get_context("fork").Pool(2, maxtasksperchild=1) as pool:
        answers = dict(zip({**CONTROLS, **CASES}, pool.starmap(lower, tasks, chunksize=1), strict=True))
    for name, case in CONTROLS.items():
        judge_kernel(probe, name, case, answers[name][:1])
    probe.judge(f"again.{AGAIN}", "defect", judge_lowers, answers[AGAIN][1:])
    refused = sum(judge_kernel(probe, name, case, answers[name]) for name, case in CASES.items())
    probe.say("FIGURE", name="kernels_refused", value=refused, unit=f"of {len(CASES)}")


if __name__ == "__main__":
    Probe().run(judge)
