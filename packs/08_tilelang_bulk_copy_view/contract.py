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
"""tilelang >= 0.1.9 gives a pipelined tile one slot for two stages when it is written or read through a T.view.

Symptom: `for i in T.Pipelined(4, num_stages=2)` with a copy of tile i into `T.view(tile, [16, 4, 64])` and a T.gemm of
`tile`, or the other way round, lowers for sm_90a to a producer and a consumer that hand over two slots by two pairs of
barriers, while every tma_load goes to the same address: tile i + 1 may land on tile i while that is multiplied. Nothing
is reported. Copied into the view and read from the view, it is refused instead: "InternalError: Check failed:
(az->CanProveEqual(input_shape_product * rescale_num, shape_product * rescale_den))".

Cause: MultiVersionBufferRewriter::GetVersionedBuffers (src/cuda/transform/multi_version_buffer_rewriter.cc) versions a
buffer that the producer writes and the consumer reads, and counts both by BufferNode. A view is another BufferNode on
the same data, so neither is versioned, and the barriers are; used on both sides the view alone is, and its allocation
keeps its size. In 0.1.8 the pass ran after LowerTileOp, and the kernels had their slots.

Scope: lowering for sm_90a, to CUDA source (`compiled`; nothing is run, no nvcc is needed). `slots`: the waits of the
producer and the arrivals of the consumer are followed as PTX defines an mbarrier's phases: how many tiles can be
overwritten before the gemm that reads them has arrived; and each gemm has to read where its tile was written. What is
judged: T.view and T.reshape of a [64, 64] tile, to [16, 4, 64], [64, 64] and [128, 32]; written or read through it, or
both; two and three stages; with a swizzled layout annotated and without; bfloat16 and float16. Controls: no view; and
as workarounds the view in one stage, and T.Pipelined over a global tensor of the tile's shape.

Upstream: https://github.com/tile-ai/tilelang. Both verdicts without the runner, and without a GPU:

    uv run "$PACK/reproduce.py" --target sm_90a  # 0.1.15: BUG_REPRODUCED
    export OLD="--with tilelang==0.1.8 --with apache-tvm-ffi==0.1.9 --with numpy==2.3.5"
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

import ast, operator, re, typing

TILES, M, N = 4, 64, 64
REFUSAL = "rescale_num"
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.FloorDiv: operator.floordiv,
             ast.Mod: operator.mod, ast.BitAnd: operator.and_, ast.BitXor: operator.xor,
             ast.RShift: operator.rshift, ast.LShift: operator.lshift}  # fmt: skip


class Case(typing.NamedTuple):
    """One kernel: the shape of the view, what is written and what is read through it, and how it is pipelined."""

    shape: tuple
    through: str  # "written", "read", "both", "none"
    stages: int = 2
    way: str = "view"
    swizzled: bool = True
    dtype: str = "bfloat16"


CASES = {
    "written.16x4x64": Case((16, 4, 64), "written"),  # the form of mamba's MIMO kernels, in a pipeline
    "written.16x4x64.reshape": Case((16, 4, 64), "written", way="reshape"),
    "written.16x4x64.three_stages": Case((16, 4, 64), "written", stages=3),
    "written.16x4x64.not_annotated": Case((16, 4, 64), "written", swizzled=False),
    "written.64x64": Case((64, 64), "written"),
    "written.64x64.float16": Case((64, 64), "written", dtype="float16"),
    "written.128x32": Case((128, 32), "written"),
    "read.64x64": Case((64, 64), "read"),
    "read.64x64.not_annotated": Case((64, 64), "read", swizzled=False),
    "read.64x64.three_stages": Case((64, 64), "read", stages=3),
    "both.64x64": Case((64, 64), "both"),
    "both.64x64.not_annotated": Case((64, 64), "both", swizzled=False),
}
CONTROLS = {
    "no_view": Case((64, 64), "none"),
    "no_view.not_annotated": Case((64, 64), "none", swizzled=False),
    "workaround.no_view.three_stages": Case((64, 64), "none", stages=3),
    "workaround.written.64x64.one_stage": Case((64, 64), "written", stages=1),
    "workaround.read.64x64.one_stage": Case((64, 64), "read", stages=1),
}


def kernel(tilelang, case):
    """Return the program: the sum over four tiles of tile @ tile.T."""
    T, shape, dtype = tilelang.language, case.shape, case.dtype
    viewed = getattr(T, case.way)

    @T.prim_func
    def main(A: T.Tensor((TILES, *shape), dtype), C: T.Tensor((M, M), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((M, N), dtype)
            acc = T.alloc_fragment((M, M), "float32")
            if case.swizzled:
                T.annotate_layout({tile: tilelang.layout.make_swizzled_layout(tile)})
            T.clear(acc)
            for i in T.Pipelined(TILES, num_stages=case.stages):
                view = viewed(tile, list(shape))
                into = view if case.through in ("written", "both") else tile
                source = view if case.through in ("read", "both") else tile
                if len(shape) == 3:
                    T.copy(A[i, :, :, :], into)
                else:
                    T.copy(A[i, :, :], into)
                T.gemm(source, source, acc, transpose_B=True)
            T.copy(acc, C)

    return main


def lower(tilelang, target, case):
    """Lower a kernel to CUDA source."""
    arch = tilelang.tvm.target.Target({"kind": "cuda", "arch": target}, host="c")
    given = {"enable_host_codegen": False, "enable_device_compile": False}  # no nvcc, and no C compiler
    with tilelang.tvm.transform.PassContext(opt_level=3), arch:
        return tilelang.lower(kernel(tilelang, case), target=arch, **given).kernel_source


def evaluated(text, **names):
    """Evaluate an index of CUDA source for numbers."""

    def value(node):
        if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
            return OPERATORS[type(node.op)](value(node.left), value(node.right))
        if isinstance(node, ast.Constant):
            return node.value
        if not isinstance(node, ast.Name) or node.id not in names:
            raise NotImplementedError(f"this index is of another form: {text}")
        return names[node.id]

    return value(ast.parse(text.replace("/", "//").strip(), mode="eval").body)


def over_tiles(source, at, *texts):
    """Evaluate indices, in the loop over the tiles that encloses a place in the source, for each tile."""
    loops = re.findall(r"for \(int (\w+) = 0; \1 < (\d+); \+\+\1\) \{", source[:at])
    variable = next((name for name, count in reversed(loops) if int(count) == TILES), None)
    if variable is None:
        raise NotImplementedError("no loop over the tiles")
    return [[evaluated(text, **{variable: tile}) for text in texts] for tile in range(TILES)]


def found(pattern, source, begin=0, end=None):
    """Return the one match of a pattern in a part of the source."""
    matches = list(re.compile(pattern).finditer(source, begin, len(source) if end is None else end))
    if len(matches) != 1:
        raise NotImplementedError(f"{len(matches)} times in the source: {pattern}")
    return matches[0]


def followed(source):
    """Return of each tile where it is written and read, and how many gemms have ended by then; nothing if it hangs."""
    load = found(r"tl::tma_load\(\w+, \w+\[.+?\], \(&\(\w+\[(.+)\]\)\),", source)
    waits = list(re.finditer(r"mbarrier\[(.+)\]\.wait\((.+)\);", source[: load.start()]))
    gemm = found(r"initialize_wgmma_descriptor<[\d, ]+>\(desc_a, \(&\(\w+\[(.+)\]\)\)\);", source)
    offset = re.search(r"increase_descriptor_offset<int>\(desc_a, (.+)\);", source)
    released = found(r"mbarrier\[(.+)\]\.arrive\(\);", source, gemm.end())
    if not waits:
        raise NotImplementedError("the producer waits for nothing")
    places = over_tiles(source, load.start(), load[1], waits[-1][1], waits[-1][2])
    reads = over_tiles(source, gemm.start(), gemm[1], offset[1] if offset else "0", released[1])
    ended, tiles = 0, []
    for index, ((place, barrier, parity), (element, more, _)) in enumerate(zip(places, reads, strict=True)):
        # PTX: a wait for a parity ends when the phase of that parity has; before the first, that of parity 1 has
        while sum(arrived == barrier for *_, arrived in reads[:ended]) % 2 == parity:
            ended += 1
            if ended > index:  # that gemm has no tile yet
                return []
        tiles.append((place, element + more // 2, ended))  # the descriptor is moved by bytes, of 16-bit elements
    return tiles


def judge_slots(tilelang, target, case):
    """Count the tiles that can be overwritten before their gemm has ended, and those read from elsewhere."""
    try:
        tiles = followed(source := lower(tilelang, target, case))
    except NotImplementedError as error:  # it is lowered to other words than those that can be followed here
        return None, {"reason": str(error)}
    except tilelang.tvm.error.InternalError as error:
        if REFUSAL in str(error):
            return False, {"measured": "refused", "reason": str(error).strip().splitlines()[-1][:300]}
        return None, {"reason": f"refused for another reason: {str(error).strip().splitlines()[-1][:200]}"}
    if not tiles:
        return False, {"measured": "hangs", "reason": "the producer waits for a gemm that waits for the producer"}
    over = {k for i, (place, _, ended) in enumerate(tiles) for k in range(ended, i) if abs(tiles[k][0] - place) < M * N}
    elsewhere = [k for k, (place, read, _) in enumerate(tiles) if place != read]
    measured = {"overwritten": len(over), "read elsewhere": len(elsewhere), "slots": len({tile[0] for tile in tiles})}
    measured["barriers"] = len(re.findall(r"mbarrier\[\d+\]\.init", source))
    return not over and not elsewhere, {"measured": measured, "unit": f"of {TILES} tiles", "tolerance": 0}


def judge(probe, target):
    """Lower every kernel, and follow its tiles."""
    if target != "sm_90a":
        raise NotImplementedError(f"{target}: TMA and wgmma are followed; --target sm_90a needs no GPU")
    import tilelang

    probe.say("TARGET", target=target, evidence="compiled", device="none")
    probe.upstream(tilelang)
    for name, case in CONTROLS.items():
        probe.judge(f"slots.{name}", "control", judge_slots, tilelang, target, case)
    for name, case in CASES.items():
        probe.judge(f"slots.{name}", "defect", judge_slots, tilelang, target, case)
    wrong = [name for (role, ok), names in probe.judged.items() for name in names if (role, ok) == ("defect", False)]
    probe.say("FIGURE", name="kernels_wrong", value=len(wrong), unit=f"of {len(CASES)}")


if __name__ == "__main__":
    Probe().run(judge)
