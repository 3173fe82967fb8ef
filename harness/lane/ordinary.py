"""Runs a script that prints no sentinel, and prints the sentinel for it.

The script runs as a file, each time in a process of its own: ``python reproduce.py`` in a folder that holds a copy of
it and of the files beside it. pytest runs a file of tests. The bug is an assertion, an exit with a text or with 1, or
an exception that a line of the script or of the module under test raised. Any other end of the script is UNSUPPORTED,
with one sentence and the next step.

Usage: ordinary.py SCRIPT SETTINGS, the settings as JSON; `OrdinaryScript` in the pack's model has their meaning.
"""

from __future__ import annotations

import ast
import contextlib
import faulthandler
import importlib
import importlib.machinery
import json
import linecache
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import traceback
import types
from pathlib import Path
from typing import Any

BUG, RIGHT, OPEN = "BUG_REPRODUCED", "FIX_VALIDATED", "UNSUPPORTED"
STATUS = {BUG: 10, RIGHT: 0, OPEN: 125}
#: Printed above the script's own lines if a Triton kernel ran without a GPU.
INTERPRETED = "(Triton kernels ran in Triton's interpreter)"
#: The failure of a run that exceeds its time limit.
TIMEOUT = "timeout"
#: The suffix of the file in which such a run writes its stack.
STACK = ".stack"
#: Lines of a script's own output that stand before the sentinel, and characters of each line and of an exception.
MOST_LINES, WIDEST, MOST_TEXT = 20, 160, 300
#: Seconds in which a process that hangs writes its stack.
SECONDS_TO_WRITE = 0.5
#: Messages of libraries and scripts that see no GPU.
NO_GPU = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|CUDA driver|NVIDIA driver|CUDA (?:is )?(?:not |un)available|libcuda"
    r"|\d+ active drivers|Cannot access accelerator|with arguments from the '\w+' backend"
    r"|\b(?:needs?|requires?|without|no) (?:an? )?(?:CUDA|GPU)|(?:cuda|gpu)\.(?:is_available|device_count)",
    re.IGNORECASE,
)
#: The innermost frames of a traceback that stand above the sentinel.
MOST_FRAMES = 6
#: Files of functions that assert for their caller.
ASSERTING = re.compile(r"/(?:testing|_testing|unittest|_pytest|pluggy)/|/contextlib\.py$|_sitebuiltins")
NO_MEMORY = ("MemoryError", "OutOfMemoryError", "KeyboardInterrupt")
#: The traceback that a child process sends to its parent is text.
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
#: A frame in faulthandler's stack of a process that hangs.
HANGS = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.*)')
Frames = list[tuple[str, int]]


def test_names(module: ast.Module) -> set[str]:
    """Name the tests of a script that pytest has to run; none if the script calls them itself."""
    functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name[:4] == "test"}
    classes = {
        node.name
        for node in module.body
        if isinstance(node, ast.ClassDef)
        and (node.name[:4] == "Test" or any("TestCase" in ast.unparse(base) for base in node.bases))
    }
    called = {ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
    return set() if functions & called else functions | classes


def command_line(source: str, environment: dict[str, str]) -> str:
    """Return the command that runs a script, with its variables: python, or pytest for a file of tests."""
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
    return f"{variables}python {'-m pytest ' if test_names(ast.parse(source)) else ''}reproduce.py"


def can_fail(module: ast.Module) -> bool:
    """Whether a script can fail by itself: by an assertion, an exception or an exit with a status."""
    for node in ast.walk(module):
        if isinstance(node, ast.Assert | ast.Raise):
            return True
        if isinstance(node, ast.Call):
            name = ast.unparse(node.func)
            if "assert" in name or name.endswith((".fail", ".raises")):
                return True
            if name in {"exit", "quit", "sys.exit"} and node.args:
                return True
    return False


# --- in the process of the script


class AtTriton:
    """Completes Triton's interpreter once triton is imported: without a GPU, kernels run nowhere else."""

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> Any:  # noqa: ANN401 - importlib's own types
        """Let the interpreter be completed after triton was loaded."""
        if name != "triton":
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(name, path)
        loader = spec.loader if spec else None
        if loader is not None:
            load = loader.exec_module

            def exec_module(module: types.ModuleType) -> None:
                load(module)
                complete_interpreter()

            loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def complete_interpreter() -> None:
    """Complete Triton's interpreter; autotuned kernels get their first configuration, since no GPU times them."""
    from kit.interpreter import interpret  # noqa: PLC0415 - only where the script imports triton

    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner

    interpret(on=True)
    make = tuner.__init__

    def make_pinned(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401 - triton's
        make(self, fn, arg_names, configs[:1], *rest, **named)

    tuner.__init__ = make_pinned


def used_interpreter() -> bool:
    """Whether a Triton kernel ran in Triton's interpreter, in this process."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    return hasattr(getattr(interpreter, "interpreter_builder", None), "grid_dim")


def is_own(file: str, folder: str) -> bool:
    """Whether a file is the script, lies beside it, or belongs to the release."""
    return file.startswith((folder + os.sep, os.environ["REPRODUCER_TREE"] + os.sep))


def is_of_release(files: list[str], folder: str) -> bool:
    """Whether the innermost of the script's and the release's own files belongs to the release."""
    own_files = [file for file in files if is_own(file, folder)]
    return bool(own_files) and not own_files[-1].startswith(folder + os.sep)


def release_traceback(frames: list[traceback.FrameSummary], folder: str) -> list[str]:
    """Write the innermost frames from the script on, as Python does; none if the failure is not in the release.

    Files are named relative to the folders of script, release and packages.
    """
    while frames and not frames[0].filename.startswith(folder + os.sep):
        frames = frames[1:]
    if not is_of_release([frame.filename for frame in frames], folder):
        return []
    roots = (folder, os.environ["REPRODUCER_TREE"], *sorted(filter(None, sys.path), key=len, reverse=True))
    lines = []
    for frame in frames[-MOST_FRAMES:]:
        path = frame.filename
        file = next((path[len(root) + 1 :] for root in roots if path.startswith(root + os.sep)), Path(path).name)
        lines.append(f'  File "{file}", line {frame.lineno}, in {frame.name}')
        lines += [f"    {frame.line}"] if frame.line else []
    return ["Traceback (most recent call last):", *lines]


def exception_parts(error: BaseException) -> tuple[str, str, Frames]:
    """Return name, text and frames of an exception; of a child process's exception, by the text that it sent."""
    name, text = type(error).__name__, str(error)
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    sent = text if name == "ProcessRaisedException" else str(error.__cause__)
    if name == "ProcessRaisedException" or "RemoteTraceback" in type(error.__cause__).__name__:
        frames = [(match["file"], int(match["line"])) for match in FRAME.finditer(sent)]
        named_errors = [match for line in sent.splitlines() if (match := RAISED.match(line))]
        if named_errors and name == "ProcessRaisedException":
            name, text = named_errors[-1]["name"].rpartition(".")[2], named_errors[-1]["text"] or ""
    return name, text, frames


def judge_exception(error: BaseException, folder: str) -> dict[str, Any]:
    """Judge the exception that ended a script: it is the bug, a good end, or a reason to leave the verdict open."""
    if isinstance(error, SystemExit) and error.code in {None, 0}:
        return {"kind": RIGHT}
    name, text, frames = exception_parts(error)
    lines = [(file, line) for file, line in frames if file.startswith(folder + os.sep)]
    source = linecache.getline(*lines[-1]).strip() if lines else ""
    plain = " ".join(text.partition("\n +")[0].split())  # pytest explains each name of an assertion after that
    message = f"{name}: {plain}"[:MOST_TEXT].removesuffix(": ")
    place = f"line {lines[-1][1]}: {source}" if lines else "no line of the script"
    reason = reason_to_leave_open(error, message, place, frames, folder)
    trace = release_traceback(list(traceback.extract_tb(error.__traceback__)), folder)
    outcome: dict[str, Any] = {"kind": OPEN if reason else BUG, "name": name, "said": message, "source": source}
    return outcome | {"why": reason, "trace": trace, "line": lines[-1][1] if lines else 0}


def reason_to_leave_open(error: BaseException, message: str, place: str, frames: Frames, folder: str) -> str:
    """Say why the exception that ended a script is not its bug, and the next step; empty if it is the bug."""
    stack = list(frames)
    while stack and not is_own(stack[-1][0], folder) and ASSERTING.search(stack[-1][0]):
        stack.pop()  # a frame of an assertion library, which stands for its caller
    last = stack[-1][0] if stack else ""
    of_release = is_of_release([file for file, _ in frames], folder)
    if isinstance(error, SystemExit):
        code = error.code
        is_ours = isinstance(code, str) or (code == 1 and type(code).__name__ != "ExitCode")
        if is_ours and is_own(last, folder):
            return ""
        cause = "argparse" if any(file.endswith("argparse.py") for file, _ in frames) else "no assertion"
        return f"{cause} ended it ({message}; {place}). Next: assert instead"
    no_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") == "" and NO_GPU.search(f"{message} {place}")
    next_step = {
        "device='cpu' where no GPU is, or a host with a GPU": bool(no_gpu),
        "--with the package that has it, or another release": isinstance(error, ImportError),
        "a host and a Python on which it runs": isinstance(error, SyntaxError) or type(error).__name__ in NO_MEMORY,
        "assert what should hold instead": not (is_own(last, folder) or of_release),
    }
    step = next((text for text, holds in next_step.items() if holds), "")
    cause = "it needs a GPU: " if no_gpu else ""
    return f"{cause}{message}, raised in {Path(last).name or 'another process'} ({place}). Next: {step}" if step else ""


class Judge:
    """A plugin of pytest that judges each test."""

    def __init__(self, folder: str) -> None:
        self.folder, self.failed, self.passed = folder, list[dict[str, Any]](), 0

    def pytest_exception_interact(self, call: Any) -> None:  # noqa: ANN401 - pytest's own type
        """Judge the exception of a test, or of the import of its file."""
        error = call.excinfo.value
        is_wrapped = type(error).__name__ == "CollectError" and error.__cause__ is not None
        self.failed.append(judge_exception(error.__cause__ if is_wrapped else error, self.folder))

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - likewise
        """Count the tests that passed."""
        self.passed += report.when == "call" and report.passed

    def outcome(self, status: int) -> dict[str, Any]:
        """Return the bug if a test shows it; else the reason why a test was not judged."""
        ranked = sorted(self.failed, key=lambda failure: failure["kind"] != BUG)
        if ranked:
            return ranked[0]
        if status == 0 and self.passed:
            return {"kind": RIGHT}
        return {"kind": OPEN, "why": f"pytest ended with status {status}, and no test passed or failed. Next: run it"}


def run_here(script: str) -> dict[str, Any]:
    """Run the script in this process, as its main module; return its outcome."""
    folder = str(Path(script).parent)
    sys.argv, sys.path[:0] = [script], [folder]
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.meta_path.insert(0, AtTriton())
    source = Path(script).read_bytes()
    module = ast.parse(source)
    if test_names(module):
        import pytest  # noqa: PLC0415 - only a file of tests needs it

        judge = Judge(folder)
        options = ["-c", os.devnull, "--rootdir", folder, "-p", "no:cacheprovider", "-q", "--disable-warnings"]
        return judge.outcome(int(pytest.main([*options, "--tb=no", script], plugins=[judge])))
    main = types.ModuleType("__main__")
    main.__file__ = script
    sys.modules["__main__"] = main
    try:
        exec(compile(source, script, "exec"), main.__dict__)  # noqa: S102 - the script is what is run
    except BaseException as error:  # noqa: BLE001 - whatever ends it is judged
        error.__traceback__ = error.__traceback__.tb_next if error.__traceback__ else None
        outcome = judge_exception(error, folder)
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        return outcome
    return {"kind": RIGHT, "asserts": can_fail(module)}


def run_as_child(script: str, outcome_file: str) -> None:
    """Run the script, and write its outcome; a process that it forked writes nothing."""
    pid = os.getpid()
    with Path(outcome_file).with_suffix(STACK).open("w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        outcome = run_here(script)
        faulthandler.unregister(signal.SIGUSR1)
    if os.getpid() == pid:
        Path(outcome_file).write_text(json.dumps(outcome | {"interpreted": used_interpreter()}), encoding="utf-8")
        sys.stdout.flush()


# --- in the process of the lane


def run_once(script: Path, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the script once; return its outcome, and the last lines that it printed."""
    folder.mkdir()
    for name in (script.name, *settings["beside"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script.parent / name, folder / name)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    if os.environ.get("REPRODUCER_TARGET") == "cpu":
        environment["TRITON_INTERPRET"] = "1"
    outcome_file, output = folder.with_suffix(".json"), folder.with_suffix(".txt")
    command = [sys.executable, "-P", __file__, "--child", str(folder / script.name), str(outcome_file)]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env=environment | settings["environment"], stdout=stream, process_group=0
        )
        try:
            process.wait(settings["timeout_s"] or None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it writes its stack
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_WRITE)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            message = f"{TIMEOUT}: no end after {settings['timeout_s']:g} s"
            trace = hang_traceback(outcome_file, str(folder))
            outcome = {"kind": BUG, "name": TIMEOUT, "said": message, "line": 0, "source": "", "trace": trace}
            outcome_file.write_text(json.dumps(outcome), encoding="utf-8")
    text = output.read_text(encoding="utf-8", errors="replace")
    sys.stderr.write(text)
    lines = [line[:WIDEST] for line in text.splitlines()[-MOST_LINES:]]
    if outcome_file.exists():
        return json.loads(outcome_file.read_text(encoding="utf-8")), lines
    status = process.returncode
    end = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended by os._exit({status})"
    return {"kind": OPEN, "why": f"it was {end}. Next: run that part in a subprocess, and assert its status"}, lines


def hang_traceback(outcome_file: Path, folder: str) -> list[str]:
    """Write the frames of a process that hung, the innermost last; none if it did not hang in the release."""
    stack = outcome_file.with_suffix(STACK)
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    calls = [(match["file"], int(match["line"]), match["name"]) for match in HANGS.finditer(text)]
    return release_traceback([traceback.FrameSummary(*call) for call in reversed(calls)], folder)


def check_outcome(outcome: dict[str, Any], fails: str) -> dict[str, Any]:
    """Return the outcome of a run; the verdict is open if the script asserts nothing, or fails in another way."""
    if outcome["kind"] == RIGHT and not fails and not outcome.get("asserts", True):
        reason = "it ended well, and it asserts nothing. Next: assert what the bug breaks"
        return outcome | {"kind": OPEN, "why": reason}
    if outcome["kind"] == BUG and fails and outcome["name"] != fails:
        return outcome | {"kind": OPEN, "why": f"it fails in another way than by {fails}: {outcome['said']}"}
    return outcome


def main(script: Path, settings: dict[str, Any]) -> int:
    """Run the script as often as the settings say; print its last lines, its failure and the sentinel."""
    count = settings["repeat"]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        runs = [run_once(script, settings, Path(scratch, str(number))) for number in range(count)]
    ends = [(check_outcome(outcome, settings["fails"]), lines) for outcome, lines in runs]
    wrong = [end for end in ends if end[0]["kind"] == BUG]
    left_open = [end for end in ends if end[0]["kind"] == OPEN]
    outcome, lines = (wrong or left_open or ends)[0]
    if any(run.get("interpreted") for run, _ in ends):
        lines = [INTERPRETED, *lines]
    lines = [*lines, *(outcome.get("trace", []) if outcome["kind"] == BUG else [])]
    share = f"{len(wrong)} of {count} runs: " if count > 1 else ""
    sentinel: str = outcome["kind"]
    if sentinel == BUG:
        place = f" (line {outcome['line']}: {outcome['source']})" if outcome["line"] else ""
        sentinel += f": {share}{outcome['said']}{place}"
    elif sentinel == OPEN:
        sentinel += f": {' '.join(outcome['why'].split())}"
    sys.stdout.write("\n".join([*lines, sentinel, ""]))
    sys.stdout.flush()
    return STATUS[outcome["kind"]]


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        run_as_child(*sys.argv[2:])
    else:
        sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
