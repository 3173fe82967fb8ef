"""Lower tilelang programs for an architecture without a GPU, and read the CUDA source that tilelang makes.

No nvcc and no C compiler run. tilelang is imported by the first call, so that a contract can be read without it.
"""

from __future__ import annotations

import ast
import concurrent.futures
import contextlib
import hashlib
import importlib
import json
import multiprocessing
import os
import re
import sys
import traceback
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import kit
from kit.compiled import load_contract
from kit.plugin import judged

T = typing.TypeVar("T")
Untyped: typing.TypeAlias = typing.Any  # what tilelang or multiprocessing hands out
Number: typing.TypeAlias = typing.Any  # an int, or an integer tensor
HOST_ERRORS = (ImportError, MemoryError, NotImplementedError, OSError)  # never the fault of the tree under test
ARITHMETIC = (ast.Expression, ast.BinOp, ast.operator, ast.Constant, ast.Name, ast.Load)


class Lowered(typing.NamedTuple):
    """What became of one program: its source, or the error that it was refused with."""

    source: str  # CUDA; "" where the program is refused
    error: str  # "InternalError: the last line of the message"; "" where the program is lowered
    shared_bytes: int  # dynamic shared memory of one block


def lower(program: Untyped, architecture: str, options: Mapping[str, object] | None = None) -> Lowered:
    """Lower a program (a PrimFunc) to CUDA source for an architecture such as sm_90a, with tilelang's pass options."""
    tilelang = importlib.import_module("tilelang")
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": architecture}, host="c")
    with tilelang.tvm.transform.PassContext(opt_level=3, config=dict(options or {})), target:
        lowered, error = attempt(
            lambda: tilelang.lower(program, target=target, enable_host_codegen=False, enable_device_compile=False)
        )
    if lowered is None:
        return Lowered("", error, 0)
    sizes = re.findall(r'"dyn_shared_memory_buf": (\d+)', lowered.device_mod.script())
    return Lowered(lowered.kernel_source, "", int(sizes[0]) if sizes else 0)


def options_of(function: Untyped) -> dict[str, object]:
    """Return the pass options that a function made by @tilelang.jit has, as `lower` takes them."""
    return {getattr(option, "value", option): value for option, value in (function.pass_configs or {}).items()}


def attempt(call: Callable[[], T]) -> tuple[T | None, str]:
    """Return what a call returns and "", or None and the call's exception as text. An error of the host is raised."""
    try:
        return call(), ""
    except HOST_ERRORS:
        raise
    except Exception as error:  # noqa: BLE001 - TVM has classes that cannot be pickled: only the text leaves a process
        lines = str(error).strip().splitlines() or [""]
        return None, f"{type(error).__name__}: {lines[-1].strip()}"


def remembered(identity: object, make: Callable[[], T]) -> T:
    """Return what `make` returns, made of JSON's types; take it from tilelang's cache where it was made before.

    The identity's repr has to name everything that the value depends on, except tilelang itself.
    """
    file = remembered_file(identity, ".json", lambda path: path.write_text(json.dumps(make()), encoding="utf-8"))
    return typing.cast("T", json.loads(file.read_text(encoding="utf-8")))


def remembered_file(identity: object, suffix: str, write: Callable[[Path], object]) -> Path:
    """Return a file of tilelang's cache folder; `write` writes it where it was not written before."""
    tilelang = importlib.import_module("tilelang")
    digest = hashlib.sha256(repr((tilelang.__version__, identity)).encode()).hexdigest()
    file = Path(tilelang.env.TILELANG_CACHE_DIR, f"contract-{digest}{suffix}")
    if not file.exists():
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_name(f"{os.getpid()}-{file.name}")
        write(partial)
        partial.replace(file)
    return file


def in_processes(
    function: Callable[..., T], tasks: Sequence[tuple[object, ...]], environment: Mapping[str, str] | None = None
) -> list[T]:
    """Return function(*task) for each task, each from a process of its own; `kit.processes()` of them run at once.

    The function stands at the top level of a module. AssertionError is raised where the code under test raised, and
    what it raises itself is raised here; a process that dies raises BrokenProcessPool. Processes are spawned where they
    have an environment of their own, or CUDA has begun in this one, for CUDA survives no fork.
    """
    torch, module = sys.modules.get("torch"), sys.modules[function.__module__]
    spawned = environment is not None or (torch is not None and torch.cuda.is_initialized())
    context = multiprocessing.get_context("spawn" if spawned else "fork")
    load = (load_contract, (module.__name__, str(module.__file__), environment)) if spawned else ()

    def result(task: tuple[object, ...]) -> T:
        with concurrent.futures.ProcessPoolExecutor(1, context, *load) as pool:
            return pool.submit(_judged, function, task).result()

    with concurrent.futures.ThreadPoolExecutor(kit.processes()) as threads:
        return list(threads.map(result, tasks))


def _judged(function: Callable[..., T], task: tuple[object, ...]) -> T:
    """Call a function; judge what it raises where its frames are known."""
    try:
        return function(*task)
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        ok, reason = judged(error, files)
        if ok is None:
            raise
        raise AssertionError(reason) from None


def index_value(text: str, **names: Number) -> Number:
    """Evaluate an index of CUDA source, or of an error of TVM's: of numbers >= 0, or of integer tensors.

    threadIdx.x is named `thread`. Raise NotImplementedError where the index is of another form.
    """
    python = re.sub(r"(?<!/)/(?!/)", "//", text.strip().replace("((int)threadIdx.x)", "thread"))
    with contextlib.suppress(NameError, SyntaxError):
        index = ast.parse(python, mode="eval")
        if all(isinstance(node, ARITHMETIC) for node in ast.walk(index)):
            return eval(compile(index, "index", "eval"), {"__builtins__": {}}, names)  # noqa: S307 - arithmetic alone
    raise NotImplementedError(f"this index is of another form: {text}")


def only_match(pattern: str, source: str, begin: int = 0) -> re.Match[str]:
    """Return the one match of a pattern from a place on; raise NotImplementedError for none or several."""
    matches = list(re.compile(pattern).finditer(source, begin))
    if len(matches) != 1:
        raise NotImplementedError(f"{len(matches)} times in the source: {pattern}")
    return matches[0]
