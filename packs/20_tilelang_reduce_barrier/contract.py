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
"""tilelang >= 0.1.10 lets one buffer follow another of a wider type in the same shared memory with no barrier between.

Symptom: with fewer rows than the warps of a block can divide, `T.reduce_sum(scores, row, dim=1)` exchanges partial sums
through shared memory (tl::AllReduce, its workspace). `T.copy(scores, p)` after it is stored by stmatrix, at the
address of that workspace, while slower warps still read from it: rows get wrong sums. In the machine code the one
warp's store is the instruction after the other's load.

Cause: ThreadSync (PointerAccessIsDisjoint in src/transform/thread_storage_sync.cc) compares the ranges that two
pointers reach in elements of each, not in bytes. A float32 workspace of 128 at byte 10240 is [2560, 2688), and the
bfloat16 buffer at byte 10240 begins at 5120: "disjoint", so that no barrier is put there. Both begin at 0, or
elements of one size (`same_size`), and there is one.

Scope: `barrier.*` follow the CUDA source of each kernel from the last read of the workspace to the first store into
shared memory, and count the bytes of the workspace that it hits with no barrier between (`compiled`, no nvcc is
needed). `launches.*` are made where a GPU is (`executed`): inputs are -1, 0 and 1, so that every number is exact, and
each launch is compared with float64. What is judged:

    T.reduce_sum, reduce_max, reduce_min, reduce_abssum; bfloat16, float16; 128 and 256 threads; 16 and 32 rows
    a store of p by stmatrix (sm_90a and later), and by cp.async: T.async_copy (sm_80 too)

The controls `workaround.*` are the same kernels with T.sync_threads(), or without reuse of shared memory.

Upstream: https://github.com/tile-ai/tilelang. Both verdicts without the runner, and without a GPU:

    uv run "$PACK/reproduce.py" --target sm_90a  # 0.1.15: BUG_REPRODUCED
    export OLD="--with tilelang==0.1.9 --with apache-tvm-ffi==0.1.9 --with numpy==2.3.5 --with torch==2.13.0"
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

import ast, contextlib, multiprocessing, operator, re, typing

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
             ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.RShift: operator.rshift}  # fmt: skip
BYTES = {"float": 4, "bfloat16_t": 2, "half_t": 2}
ROW = 16  # bytes that one address of stmatrix or cp.async stands for
WIDTH = 64  # of the keys, and their number: so that q, p and the scores can all be multiplied by k
BLOCKS = 132 * 64  # of one launch
LAUNCHES = 50
NO_REUSE = {"tl.disable_shared_memory_reuse": True}


class Case(typing.NamedTuple):
    """One kernel: the scores of so many rows are reduced, and then p is stored."""

    reduction: str = "reduce_sum"
    dtype: str = "bfloat16"
    threads: int = 128
    rows: int = 16
    scores: str = "float32"
    way: str = "copy"


CASES = {  # each is one kernel
    "reduce_sum": Case(),
    "reduce_max": Case("reduce_max"),
    "reduce_min": Case("reduce_min"),
    "reduce_abssum": Case("reduce_abssum"),
    "float16": Case(dtype="float16"),
    "256_threads": Case(threads=256),
    "32_rows.256_threads": Case(rows=32, threads=256),
    "async_copy": Case(way="async_copy"),
}
CONTROLS = {
    "workaround.sync_threads": Case(way="sync_threads"),
    "workaround.no_reuse": Case(way="no_reuse"),
    "same_size": Case(dtype="float16", scores="float16"),
    "32_rows.128_threads": Case(rows=32),  # each thread stores twice, in a loop: that is never taken for disjoint
    "64_rows": Case(rows=64),  # each warp has rows of its own, and needs no workspace
}
WITHOUT_STMATRIX = {"sm_75", "sm_80", "sm_86", "sm_89"}  # single stores: for these there always is a barrier
BY_STMATRIX = {name for name, case in CASES.items() if case.way == "copy"}


def kernel(T, case):
    """Return the program: out = (q + p) @ k and the row's reduction, where p = q @ k.T is stored after that."""
    reduction, dtype, threads, rows, scores_dtype, way = case
    reduced = getattr(T, reduction)

    @T.prim_func
    def main(
        Q: T.Tensor((rows, WIDTH), dtype),
        K: T.Tensor((WIDTH, WIDTH), dtype),
        P: T.Tensor((rows, WIDTH), dtype),
        Out: T.Tensor((BLOCKS, rows, WIDTH), "float32"),
    ):
        with T.Kernel(BLOCKS, threads=threads) as block:
            q = T.alloc_shared((rows, WIDTH), dtype)
            k = T.alloc_shared((WIDTH, WIDTH), dtype)
            p = T.alloc_shared((rows, WIDTH), dtype)
            scores = T.alloc_fragment((rows, WIDTH), scores_dtype)
            row = T.alloc_fragment((rows,), scores_dtype)
            out = T.alloc_fragment((rows, WIDTH), "float32")
            T.copy(Q, q)
            T.copy(K, k)
            T.gemm(q, k, scores, transpose_B=True, clear_accum=True)
            reduced(scores, row, dim=1)
            if way == "async_copy":
                T.async_copy(P, p)
                T.ptx_wait_group(0)
            else:
                if way == "sync_threads":
                    T.sync_threads()
                T.copy(scores, p)
            T.gemm(q, k, out, clear_accum=True)
            T.gemm(p, k, out)
            for i, j in T.Parallel(rows, WIDTH):
                out[i, j] += row[i]
            T.copy(out, Out[block, 0:rows, 0:WIDTH])

    return main


def build(name, target, executed):
    """Lower a kernel to CUDA source, or compile it. Return the kernel, its source, and what it was refused with."""
    import tilelang

    case = {**CONTROLS, **CASES}[name]
    named = {"kind": "cuda", "arch": target}
    arch = tilelang.tvm.target.Target(named) if executed else tilelang.tvm.target.Target(named, host="c")
    config = NO_REUSE if case.way == "no_reuse" else {}
    made = None
    try:
        program = kernel(tilelang.language, case)
        if executed:
            made = tilelang.compile(program, target=arch, pass_configs=config)
            source = made.get_kernel_source()
        else:
            with tilelang.tvm.transform.PassContext(opt_level=3, config=config), arch:
                given = {"enable_host_codegen": False, "enable_device_compile": False}  # no nvcc, and no C compiler
                source = tilelang.lower(program, target=arch, **given).kernel_source
    except Exception as error:  # it goes to the parent as text: not every error of TVM's can be pickled
        text = str(error).strip().splitlines()
        return None, "", f"{type(error).__name__}: {text[-1] if text else ''}"
    return made, source, ""


def source_of(name, target, executed):
    """Build in a process of its own: it leaves what it compiled in the cache. Return source and error."""
    return build(name, target, executed)[1:]


def in_thread(text, **names):
    """Evaluate an index of CUDA source: of numbers that are not negative, so that / is Python's //."""

    def value(node):
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant):
            return node.value
        if not isinstance(node, ast.Name) or node.id not in names:
            raise NotImplementedError(f"this index is of another form: {text}")
        return names[node.id]

    python = text.replace("((int)threadIdx.x)", "t").replace("/", "//")
    return value(ast.parse(python.strip(), mode="eval").body)


def balanced(text):
    """Return what stands before the bracket that closes one opened before this text."""
    depth = 1
    for place, letter in enumerate(text):
        depth += (letter == "[") - (letter == "]")
        if depth == 0:
            return text[:place]
    raise NotImplementedError("an index that does not end")


def hit(source, threads):
    """Return how many bytes of the workspace the first store after its last read hits (None: there is no workspace).

    And whether a barrier stands between them: then these are not counted.
    """
    starts = {name: int(start) for name, start in re.findall(r"void\* (\w+) = .*buf_dyn_shmem \+ (\d+)\)\);", source)}
    starts["buf_dyn_shmem"] = 0  # releases before 0.1.10 give no names to what lies in it
    place = r"\(\(\((\w+)\*\)(\w+)\)\["  # of ((float*)workspace)[
    exchanges = [*re.finditer(r"tl::AllReduce<[^;]*?\(&" + place, source)]
    if not exchanges:
        return None, False
    dtype, name = exchanges[-1].groups()
    start = starts[name] + BYTES[dtype] * in_thread(balanced(source[exchanges[-1].end() :]))
    rest = source[exchanges[-1].end() :].partition(";")[2]
    store = re.search(r"(?:ptx_stmatrix\w*_x(\d)|cp_async_gs<16>)\(\(&" + place, rest)
    first = re.search(r"\(\((?:\w+)\*\)(?:" + "|".join(starts) + r")\)", rest)
    if first is None:
        raise NotImplementedError("nothing is stored after the reduction")
    if re.search(r"__syncthreads\(|__sync_thread_partial|bar\.sync", rest[: first.start()]):
        return 0, True
    if store is None or store.start() > first.start():
        raise NotImplementedError(f"the first store is of another form: {rest[first.start() : first.start() + 80]}")
    index, base, size = balanced(rest[store.end() :]), starts[store[3]], BYTES[store[2]]
    lanes = 8 * int(store[1] or 4)  # x2 takes the addresses of 16 lanes of a warp, x4 those of all
    rows = {base + size * in_thread(index, t=t) for t in range(threads) if t % 32 < lanes}
    reached = {row + byte for row in rows for byte in range(ROW)}
    return len(reached & {*range(start, start + BYTES[dtype] * threads)}), False


def judge_barrier(case, source):
    """Count the bytes of the workspace that are stored to with no barrier after their last read."""
    found, barrier = hit(source, case.threads)
    reason = "no workspace" if found is None else "a barrier stands between" if barrier else ""
    return not found, {"measured": found or 0, "unit": "bytes of the workspace", "tolerance": 0, "reason": reason}


def reference(torch, case):
    """Return inputs of -1, 0 and 1, P, and the output in float64: all of them are integers, and small enough."""
    generator = torch.Generator().manual_seed(20)
    q, k = (torch.randint(-1, 2, (rows, WIDTH), generator=generator).double() for rows in (case.rows, WIDTH))
    scores = q @ k.T
    by_name = {"reduce_sum": scores.sum(1), "reduce_max": scores.amax(1), "reduce_min": scores.amin(1)}
    row = by_name.get(case.reduction, scores.abs().sum(1))
    wanted = (q + scores) @ k + row[:, None]
    return [tensor.to(getattr(torch, case.dtype)) for tensor in (q, k, scores)], wanted


def judge_launches(torch, case, made):
    """Count the launches with a wrong number; say of how many blocks these are, and the largest error."""
    inputs, wanted = reference(torch, case)
    inputs, wanted = [tensor.cuda() for tensor in inputs], wanted.float().cuda()
    launches, blocks, largest = 0, 0, 0.0
    for _ in range(LAUNCHES):
        out = torch.full((BLOCKS, case.rows, WIDTH), float("nan"), device="cuda")
        made(*inputs, out)
        wrong = (out != wanted).flatten(1).any(1).sum().item()  # NaN is unequal, too
        launches, blocks = launches + (wrong > 0), blocks + wrong
        largest = max(largest, (out - wanted).abs().nan_to_num(nan=float("inf")).max().item() if wrong else 0)
    reason = f"{blocks} of {BLOCKS * LAUNCHES} blocks, largest error {largest:g}"
    return not launches, {"measured": launches, "unit": f"of {LAUNCHES} launches", "tolerance": 0, "reason": reason}


def judge_kernel(probe, name, target, answer, torch):
    """Judge one kernel: its source, and its launches where there is a GPU. Return whether a barrier lacks."""
    case, role = {**CONTROLS, **CASES}[name], "defect" if name in CASES else "control"
    source, error = answer
    if error.startswith("AttributeError"):  # an older release has no such copy, or no such option
        for check in ("barrier", "launches"):
            probe.check(f"{check}.{name}", role, None, reason=error[:200])
        return False
    if not source:
        raise NotImplementedError(f"{name} is not lowered: {error[:300]}")
    probe.judge(f"barrier.{name}", role, judge_barrier, case, source)
    if torch is None:
        probe.check(f"launches.{name}", role, None, reason="on a GPU only")
    else:
        probe.judge(f"launches.{name}", role, judge_launches, torch, case, build(name, target, executed=True)[0])
    with contextlib.suppress(NotImplementedError):
        return bool(hit(source, case.threads)[0])
    return False


def judge(probe, target):
    """Build every kernel, several at once, and judge each."""
    if not re.fullmatch(r"sm_\d+a?", target):
        raise NotImplementedError(f"{target}: these are GPU kernels; --target sm_90a needs no GPU")
    import tilelang, torch

    executed = torch.cuda.is_available() and target.rstrip("a") == "sm_{}{}".format(*torch.cuda.get_device_capability())
    evidence, device = ("executed", torch.cuda.get_device_name()) if executed else ("compiled", "none")
    probe.say("TARGET", target=target, evidence=evidence, device=device)
    probe.upstream(tilelang)
    names = [
        name
        for name in {**CONTROLS, **CASES}
        if not (name in BY_STMATRIX and target in WITHOUT_STMATRIX)
        and any(fnmatch.fnmatchcase(f"{check}.{name}", probe.only or "*") for check in ("barrier", "launches"))
    ]
    processes = min(len(names), os.cpu_count() or 1, 8) if executed else 2
    with multiprocessing.get_context("spawn" if executed else "fork").Pool(processes, maxtasksperchild=1) as pool:
        answers = pool.starmap(source_of, [(name, target, executed) for name in names], chunksize=1)
    lacking = 0
    for name, answer in zip(names, answers, strict=True):
        lacking += judge_kernel(probe, name, target, answer, torch if executed else None)
    probe.say("FIGURE", name="kernels_without_barrier", value=lacking, unit=f"of {len({*names} & {*CASES})}")


if __name__ == "__main__":
    Probe().run(judge)
