"""Triton's interpreter, completed: kernels run on CPU tensors as they run on a GPU.

The interpreter of Triton 3.4 to 3.8 lacks three things that kernels of upstream use:

- Arguments that are Python floats stay Python floats. On a GPU they are fp32 scalars with methods such as `.to`.
- `libdevice` has no functions. Here tanh and rsqrt are made of Triton's own operations, in the dtype of the argument.
- `tl.maximum` and `tl.minimum` (and so `tl.max` and `tl.min`) return nan where one operand is nan. On a GPU they
  return the other operand, unless `propagate_nan` asks for nan.

Call `interpret()` before the first import of triton, and before upstream is imported.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from pathlib import Path
from typing import Any

from kit import current_target

_INTERPRETER_FILE = str(Path("triton", "runtime", "interpreter.py"))


def interpret(*, on: bool | None = None) -> None:
    """Interpret Triton kernels in this process and its children, where the target is not executed, or as `on` says.

    Raises RuntimeError where triton was imported before, with the other setting: its own functions are decorated then.
    """
    on = not current_target().executed if on is None else on
    os.environ["TRITON_INTERPRET"] = str(int(on))
    if "triton" in sys.modules:
        interpreter = importlib.import_module("triton.runtime.interpreter")
        if isinstance(importlib.import_module("triton.language").sigmoid, interpreter.InterpretedFunction) != on:
            raise RuntimeError("triton was imported before kit.interpreter.interpret() was called")
    if on:
        _complete()


def called_from_interpreter() -> bool:
    """Whether the interpreter is among the callers, for a TorchDispatchMode.

    The interpreter copies every tensor argument to the host and back, by operators that no GPU runs.
    """
    frame = inspect.currentframe()
    while frame is not None and not frame.f_code.co_filename.endswith(_INTERPRETER_FILE):
        frame = frame.f_back
    return frame is not None


@functools.cache
def _complete() -> None:
    """Add to the interpreter what it lacks, once."""
    np, tl = importlib.import_module("numpy"), importlib.import_module("triton.language")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    libdevice: Any = importlib.import_module("triton.language.extra.libdevice")
    convert = interpreter._implicit_cvt  # noqa: SLF001 - there is no public way

    def convert_floats_too(argument: Any) -> Any:  # noqa: ANN401 - any argument of a kernel
        if not isinstance(argument, float):
            return convert(argument)
        handle = interpreter.TensorHandle(np.array([argument], dtype=np.float32), tl.float32)
        return tl.tensor(handle, tl.float32)

    interpreter._implicit_cvt = convert_floats_too  # noqa: SLF001
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    libdevice.rsqrt = lambda x: 1 / tl.sqrt(x)
    for name, function in (("create_maxnumf", np.fmax), ("create_minnumf", np.fmin)):
        setattr(interpreter.InterpreterBuilder, name, lambda self, x, y, f=function: self.binary_op(x, y, f))
