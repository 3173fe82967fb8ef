"""Triton kernels compiled for an architecture without its GPU, and what a contract runs in other processes.

Triton's interpreter replaces the compiler for a whole process: a contract that needs both compiles in a worker.
"""
# ruff: noqa: ANN401 - Triton and MLIR have no types; what a worker returns is anything that can be pickled

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple
from unittest import mock

_FOLDERS: list[str] = []  # of the packages that import_below has found


def import_below(name: str) -> ModuleType:
    """Import a module, or raise ImportError. The __init__ of its top package is not run: it imports compiled code."""
    package = name.partition(".")[0]
    if package not in sys.modules:
        spec = importlib.util.find_spec(package)
        if spec is None:
            raise ImportError(f"no {package} on the path; give its source: PYTHONPATH=CHECKOUT")
        sys.modules[package] = importlib.util.module_from_spec(spec)  # has a __path__, and is never executed
        _FOLDERS.extend(spec.submodule_search_locations or ())
    return importlib.import_module(name)


def load_contract(name: str, file: str) -> None:
    """Load a contract where it is not loaded, under its name in the parent, so that its classes can be unpickled."""
    if name in sys.modules:
        return
    for end in (place for place, letter in enumerate(name) if letter == "."):
        sys.modules.setdefault(name[:end], ModuleType(name[:end]))
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{file} is no Python file")
    sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(sys.modules[name])


def _answer(name: str, function: str, arguments: Any, named: Any) -> tuple[type[Exception] | None, Any]:
    try:
        return None, getattr(sys.modules[name], function)(*arguments, **named)
    except Exception as error:
        files = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        tested = isinstance(error, AssertionError) or any(file.startswith(tuple(_FOLDERS)) for file in files)
        if isinstance(error, (ImportError, MemoryError, OSError)) or (
            isinstance(error, NotImplementedError) and not tested
        ):
            raise
        text = "".join(traceback.format_exception(error))[-4000:]  # the parent may not know the class
        return AssertionError if tested and "out of memory" not in text else RuntimeError, text


@contextmanager
def workers(name: str, **environment: str) -> Iterator[Callable[..., Callable[[], Any]]]:
    """Give submit(function, *arguments, **named), which calls a function of a contract, by its name, in a new process.

    The contract is given by its __name__. submit returns a function that waits for the result; it raises AssertionError
    where the code under test raised, RuntimeError where the contract did. Arguments and results are pickled.
    """
    with ProcessPoolExecutor(1, get_context("spawn"), load_contract, (name, str(sys.modules[name].__file__))) as pool:

        def submit(function: str, *arguments: Any, **named: Any) -> Callable[[], Any]:
            with mock.patch.dict(os.environ, environment):  # to submit starts the process, which keeps it
                future = pool.submit(_answer, name, function, arguments, named)

            def result() -> Any:
                failure, value = future.result()
                if failure:
                    raise failure(value)
                return value

            return result

        yield submit


def launch(module: ModuleType, kernel: str, call: Callable[[], object]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return what `call` launches a module's kernel with, by position and by name. Nothing runs, nor needs a GPU."""
    tensor = importlib.import_module("torch").Tensor
    with mock.patch.object(tensor, "is_cuda", new=True), mock.patch.object(module, kernel) as launched:
        call()
    passed, named = launched.__getitem__.return_value.call_args
    return passed, named


class RefusedError(Exception):
    """The compiler refuses a kernel; the text is the compiler's."""


class Compiled(NamedTuple):
    """A kernel of one architecture."""

    parameters: list[str]  # without constants, as the IR has them
    stages: dict[str, Any]  # IR: "source" precedes every pass, "ttir" follows common subexpression elimination
    assembly: dict[str, Any]  # "ptx" is text, "cubin" is bytes
    shared: int  # bytes of shared memory
    context: object  # of MLIR, which the stages live in


def compile_for(target: str, kernel: Any, passed: tuple[Any, ...], named: dict[str, Any]) -> Compiled:
    """Compile a triton.jit function for "sm_90a" or another name, as a launch with these arguments would.

    Raises RefusedError.
    """
    compiler, backend = (importlib.import_module(f"triton.{part}.compiler") for part in ("compiler", "backends"))
    ir, driver = importlib.import_module("triton._C.libtriton").ir, importlib.import_module("triton.runtime").driver
    gpu, context = backend.GPUTarget("cuda", int(target.strip("sm_a")), 32), ir.context()
    active = mock.Mock(get_current_target=lambda: gpu, get_current_device=lambda: 0, get_current_stream=lambda _: 0)
    ir.load_dialects(context)
    compiler.make_backend(gpu).load_dialects(context)
    with mock.patch.object(driver, "_active", active):
        try:
            binary = kernel.warmup(*passed, grid=(1,), **named)
        except (importlib.import_module("triton.compiler.errors").CompilationError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "PassManager::run failed" not in str(error):
                raise
            raise RefusedError(str(error)) from error
    files = {Path(name).suffix: path for name, path in binary.metadata_group.items()}
    stages = {name: ir.parse_mlir_module(files[f".{name}"], context) for name in ("source", "ttir")}
    parameters = [name for name, kind in binary.src.signature.items() if kind != "constexpr"]
    return Compiled(parameters, stages, binary.asm, binary.metadata.shared, context)


class Operation(NamedTuple):
    """An operation of MLIR, such as tt.dot: its name, and the values that it takes."""

    name: str
    operands: list[int]


def dataflow(module: Any) -> tuple[list[Operation], dict[int, Operation], set[int]]:
    """Return a module's operations, the one that made each value, and the values of 8 or 16 floating-point bits.

    What a loop carries is made, by "scf.yield", of its first value and of the value that the loop yields.
    """
    nodes: list[Any] = []
    module.walk(nodes.append)  # an operation follows what lies in it, so that a loop follows its yield
    operations = [Operation(x.get_name(), [x.get_operand(i).id() for i in range(x.get_num_operands())]) for x in nodes]
    made: dict[int, Operation] = {}
    narrow: set[int] = set()
    for number, operation in enumerate(operations):
        results = [nodes[number].get_result(i) for i in range(nodes[number].get_num_results())]
        made |= {value.id(): operation for value in results}
        narrow |= {value.id() for value in results if re.search(r"(b?f16|f8\w+)>?$", str(value.get_type()))}
        if operation.name == "scf.for":
            block, ends = nodes[number - 1].get_block(), operations[number - 1].operands
            for i, pair in enumerate(zip(operation.operands[3:], ends, strict=True)):
                made[results[i].id()] = made[block.arg(i + 1).id()] = Operation("scf.yield", [*pair])
    return operations, made, narrow
