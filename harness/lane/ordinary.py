"""Runs a script that is its author's own, and prints the sentinel that the script does not print.

The script runs as a file, each time in a process of its own: ``python reproduce.py`` in a folder that holds a copy of
it and of the files beside it. A file of tests is run by pytest. What counts as the bug: an assertion, an exit with a
text or with 1, and an exception that a line of the script or of the module under test raised. Whatever else ends the
script is UNSUPPORTED, with one sentence and the next step.

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
#: What is printed above the script's own lines where a Triton kernel ran without a GPU.
INTERPRETED = "(Triton kernels ran in Triton's interpreter)"
#: How a run ends that a time limit ended.
TIMEOUT = "timeout"
#: What the file of a run's stack is called that a time limit ended.
STACK = ".stack"
#: Lines of a script's own output that stand before the sentinel, and characters of each and of what it raised.
MOST_LINES, WIDEST, MOST_TEXT = 20, 160, 300
#: Seconds in which a process that hangs writes its stack.
SECONDS_TO_WRITE = 0.5
#: What libraries and scripts say where they see no GPU.
NO_GPU = re.compile(
    r"not compiled with CUDA|No CUDA GPUs|CUDA driver|NVIDIA driver|CUDA (?:is )?(?:not |un)available|libcuda"
    r"|\d+ active drivers|Cannot access accelerator|with arguments from the '\w+' backend"
    r"|\b(?:needs?|requires?|without|no) (?:an? )?(?:CUDA|GPU)|(?:cuda|gpu)\.(?:is_available|device_count)",
    re.IGNORECASE,
)
#: Frames of a traceback that stand above how the script failed: the innermost.
MOST_FRAMES = 6
#: Functions that raise for whoever calls them: an assertion in one of these is the caller's.
ASSERTING = re.compile(r"/(?:testing|_testing|unittest|_pytest|pluggy)/|/contextlib\.py$|_sitebuiltins")
NO_MEMORY = ("MemoryError", "OutOfMemoryError", "KeyboardInterrupt")
#: A process that was started by another one sends its traceback as text.
FRAME = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+)')
RAISED = re.compile(r"^(?P<name>[A-Za-z_][\w.]*)(?:: (?P<text>.*))?$")
#: A frame in what faulthandler writes of a process that hangs.
HANGS = re.compile(r'File "(?P<file>[^"]+)", line (?P<line>\d+) in (?P<name>.*)')
Frames = list[tuple[str, int]]


def test_names(module: ast.Module) -> set[str]:
    """Name what pytest would collect of a script that leaves its tests to pytest; empty where it calls them itself."""
    functions = {node.name for node in module.body if isinstance(node, ast.FunctionDef) and node.name[:4] == "test"}
    classes = {
        node.name
        for node in module.body
        if isinstance(node, ast.ClassDef)
        and (node.name[:4] == "Test" or any("TestCase" in ast.unparse(base) for base in node.bases))
    }
    called = {ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
    return set() if functions & called else functions | classes


def typed(source: str, environment: dict[str, str]) -> str:
    """Return the command that runs a script: as a file, or by pytest, with its variables."""
    variables = "".join(f"{name}={shlex.quote(value)} " for name, value in environment.items())
    return f"{variables}python {'-m pytest ' if test_names(ast.parse(source)) else ''}reproduce.py"


def asserts(module: ast.Module) -> bool:
    """Whether a script can come to a verdict of its own: an assertion, an exception or an exit with a status."""
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
    """Completes Triton's interpreter as soon as triton is imported: without a GPU there is no other way to run it."""

    def find_spec(self, name: str, path: Any = None, _: Any = None) -> Any:  # noqa: ANN401 - importlib's own types
        """Let triton be loaded as it is, and completed after that."""
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
    """Add what Triton's interpreter lacks; let each autotuned kernel have its first configuration: no GPU times it."""
    from kit.interpreter import interpret  # noqa: PLC0415 - only where the script imports triton

    tuner: Any = importlib.import_module("triton.runtime.autotuner").Autotuner

    interpret(on=True)
    make = tuner.__init__

    def make_pinned(self: Any, fn: Any, arg_names: Any, configs: Any, *rest: Any, **named: Any) -> None:  # noqa: ANN401 - triton's
        make(self, fn, arg_names, configs[:1], *rest, **named)

    tuner.__init__ = make_pinned


def interpreted() -> bool:
    """Whether a Triton kernel ran in Triton's interpreter, in this process."""
    interpreter = sys.modules.get("triton.runtime.interpreter")
    return hasattr(getattr(interpreter, "interpreter_builder", None), "grid_dim")


def is_own(file: str, folder: str) -> bool:
    """Whether a file is the script, lies beside it, or is of the module under test."""
    return file.startswith((folder + os.sep, os.environ["REPRODUCER_TREE"] + os.sep))


def is_of_release(files: list[str], folder: str) -> bool:
    """Whether the innermost file that is the script's or the release's is of the release."""
    own = [file for file in files if is_own(file, folder)]
    return bool(own) and not own[-1].startswith(folder + os.sep)


def traced(frames: list[traceback.FrameSummary], folder: str) -> list[str]:
    """Write the innermost frames from the script on, as Python does; nothing where none is of the release.

    They are named without the folders in which script, release and packages lie.
    """
    while frames and not frames[0].filename.startswith(folder + os.sep):
        frames = frames[1:]
    if not is_of_release([frame.filename for frame in frames], folder):
        return []
    places = (folder, os.environ["REPRODUCER_TREE"], *sorted(filter(None, sys.path), key=len, reverse=True))
    lines = []
    for frame in frames[-MOST_FRAMES:]:
        file = next((frame.filename[len(one) + 1 :] for one in places if frame.filename.startswith(one + os.sep)), "")
        lines.append(f'  File "{file or Path(frame.filename).name}", line {frame.lineno}, in {frame.name}')
        lines += [f"    {frame.line}"] if frame.line else []
    return ["Traceback (most recent call last):", *lines]


def raised(error: BaseException) -> tuple[str, str, Frames]:
    """Return the name, the text and the frames of an exception; of one that another process sent, those of its text."""
    name, text = type(error).__name__, str(error)
    frames = [(frame.filename, frame.lineno or 0) for frame in traceback.extract_tb(error.__traceback__)]
    sent = text if name == "ProcessRaisedException" else str(error.__cause__)
    if name == "ProcessRaisedException" or "RemoteTraceback" in type(error.__cause__).__name__:
        frames = [(match["file"], int(match["line"])) for match in FRAME.finditer(sent)]
        said = [match for line in sent.splitlines() if (match := RAISED.match(line))]
        if said and name == "ProcessRaisedException":
            name, text = said[-1]["name"].rpartition(".")[2], said[-1]["text"] or ""
    return name, text, frames


def judged(error: BaseException, folder: str) -> dict[str, Any]:
    """Say whether what ended a script is the bug, nothing at all, or something that lets nothing be judged."""
    name, text, frames = raised(error)
    lines = [(file, line) for file, line in frames if file.startswith(folder + os.sep)]
    source = linecache.getline(*lines[-1]).strip() if lines else ""
    plain = " ".join(text.partition("\n +")[0].split())  # pytest explains each name of an assertion after that
    said = f"{name}: {plain}"[:MOST_TEXT].removesuffix(": ")
    place = f"line {lines[-1][1]}: {source}" if lines else "no line of the script"
    why = reason_to_leave_open(error, said, place, frames, folder)
    found: dict[str, Any] = {"kind": OPEN if why else BUG, "name": name, "said": said, "source": source, "why": why}
    found["trace"] = traced(list(traceback.extract_tb(error.__traceback__)), folder)
    ended_well = isinstance(error, SystemExit) and error.code in {None, 0}
    return {"kind": RIGHT} if ended_well else found | {"line": lines[-1][1] if lines else 0}


def reason_to_leave_open(error: BaseException, said: str, place: str, frames: Frames, folder: str) -> str:
    """Say why what ended a script is not its bug, and what to do next; empty where it is the bug."""
    inner = list(frames)
    while inner and not is_own(inner[-1][0], folder) and ASSERTING.search(inner[-1][0]):
        inner.pop()  # an assertion library, for the line that called it
    last = inner[-1][0] if inner else ""
    of_release = is_of_release([file for file, _ in frames], folder)
    if isinstance(error, SystemExit):
        code = error.code
        is_ours = isinstance(code, str) or (code == 1 and type(code).__name__ != "ExitCode")
        by = "argparse" if any(file.endswith("argparse.py") for file, _ in frames) else "no assertion"
        return "" if is_ours and is_own(last, folder) else f"{by} ended it ({said}; {place}). Next: assert instead"
    no_gpu = os.environ.get("CUDA_VISIBLE_DEVICES") == "" and NO_GPU.search(f"{said} {place}")
    next_step = {
        "device='cpu' where no GPU is, or a host with a GPU": bool(no_gpu),
        "--with the package that has it, or another release": isinstance(error, ImportError),
        "a host and a Python on which it runs": isinstance(error, SyntaxError) or type(error).__name__ in NO_MEMORY,
        "assert what should hold instead": not (is_own(last, folder) or of_release),
    }
    step = next((text for text, holds in next_step.items() if holds), "")
    by = "it needs a GPU: " if no_gpu else ""
    return f"{by}{said}, raised in {Path(last).name or 'another process'} ({place}). Next: {step}" if step else ""


class Judge:
    """A plugin of pytest: how each test ended."""

    def __init__(self, folder: str) -> None:
        self.folder, self.failed, self.passed = folder, list[dict[str, Any]](), 0

    def pytest_exception_interact(self, call: Any) -> None:  # noqa: ANN401 - pytest's own type
        """Judge what a test, or the import of the file, raised."""
        error = call.excinfo.value
        is_wrapped = type(error).__name__ == "CollectError" and error.__cause__ is not None
        self.failed.append(judged(error.__cause__ if is_wrapped else error, self.folder))

    def pytest_runtest_logreport(self, report: Any) -> None:  # noqa: ANN401 - likewise
        """Count the tests that passed."""
        self.passed += report.when == "call" and report.passed

    def outcome(self, status: int) -> dict[str, Any]:
        """Return the bug where one test shows it; else what kept one from being judged."""
        ranked = sorted(self.failed, key=lambda one: one["kind"] != BUG)
        if ranked:
            return ranked[0]
        if status == 0 and self.passed:
            return {"kind": RIGHT}
        return {"kind": OPEN, "why": f"pytest ended with status {status}, and no test passed or failed. Next: run it"}


def run_here(script: str) -> dict[str, Any]:
    """Run the script in this process, as its main module; return how it ended."""
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
        found = judged(error, folder)
        if not isinstance(error, SystemExit):
            traceback.print_exception(error)
        return found
    return {"kind": RIGHT, "asserts": asserts(module)}


def child(script: str, outcome: str) -> None:
    """Run the script, and write how it ended; a process that it forked writes nothing."""
    own = os.getpid()
    with Path(outcome).with_suffix(STACK).open("w", encoding="utf-8") as stack:
        faulthandler.register(signal.SIGUSR1, file=stack, all_threads=False)
        found = run_here(script)
        faulthandler.unregister(signal.SIGUSR1)
    if os.getpid() == own:
        Path(outcome).write_text(json.dumps(found | {"interpreted": interpreted()}), encoding="utf-8")
        sys.stdout.flush()


# --- in the process of the lane


def once(script: Path, settings: dict[str, Any], folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Run the script once; return how it ended, and the last lines that it printed."""
    folder.mkdir()
    for name in (script.name, *settings["beside"]):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(script.parent / name, folder / name)
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    if os.environ.get("REPRODUCER_TARGET") == "cpu":
        kept["TRITON_INTERPRET"] = "1"
    outcome, output = folder.with_suffix(".json"), folder.with_suffix(".txt")
    command = [sys.executable, "-P", __file__, "--child", str(folder / script.name), str(outcome)]
    with output.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, env=kept | settings["environment"], stdout=stream, process_group=0
        )
        try:
            process.wait(settings["timeout_s"] or None)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGUSR1)  # it writes where it hangs
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS_TO_WRITE)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            said, trace = f"{TIMEOUT}: no end after {settings['timeout_s']:g} s", hanging(outcome, str(folder))
            found = {"kind": BUG, "name": TIMEOUT, "said": said, "line": 0, "source": "", "trace": trace}
            outcome.write_text(json.dumps(found), encoding="utf-8")
    text = output.read_text(encoding="utf-8", errors="replace")
    sys.stderr.write(text)
    lines = [line[:WIDEST] for line in text.splitlines()[-MOST_LINES:]]
    if outcome.exists():
        return json.loads(outcome.read_text(encoding="utf-8")), lines
    status = process.returncode
    how = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended by os._exit({status})"
    return {"kind": OPEN, "why": f"it was {how}. Next: run that part in a subprocess, and assert its status"}, lines


def hanging(outcome: Path, folder: str) -> list[str]:
    """Write the frames of a process that hung, the innermost last; nothing where none is of the release."""
    stack = outcome.with_suffix(STACK)
    text = stack.read_text(encoding="utf-8", errors="replace") if stack.exists() else ""
    found = [(match["file"], int(match["line"]), match["name"]) for match in HANGS.finditer(text)]
    return traced([traceback.FrameSummary(*one) for one in reversed(found)], folder)


def checked(found: dict[str, Any], fails: str) -> dict[str, Any]:
    """Return how a run ended, where the bug is a failure of one name, or is not known yet."""
    if found["kind"] == RIGHT and not fails and not found.get("asserts", True):
        return found | {"kind": OPEN, "why": "it ended well, and it asserts nothing. Next: assert what the bug breaks"}
    if found["kind"] == BUG and fails and found["name"] != fails:
        return found | {"kind": OPEN, "why": f"it fails in another way than by {fails}: {found['said']}"}
    return found


def main(script: Path, settings: dict[str, Any]) -> int:
    """Run the script as often as is asked for, and print its last lines, how it failed, and the sentinel."""
    count = settings["repeat"]
    with tempfile.TemporaryDirectory(dir=Path.cwd()) as scratch:
        runs = [once(script, settings, Path(scratch, str(number))) for number in range(count)]
    ends = [(checked(found, settings["fails"]), lines) for found, lines in runs]
    wrong = [one for one in ends if one[0]["kind"] == BUG]
    opened = [one for one in ends if one[0]["kind"] == OPEN]
    found, lines = (wrong or opened or ends)[0]
    if any(one.get("interpreted") for one, _ in ends):
        lines = [INTERPRETED, *lines]
    lines = [*lines, *(found.get("trace", []) if found["kind"] == BUG else [])]
    often = f"{len(wrong)} of {count} runs: " if count > 1 else ""
    sentinel: str = found["kind"]
    if sentinel == BUG:
        sentinel += f": {often}{found['said']}" + (
            f" (line {found['line']}: {found['source']})" if found["line"] else ""
        )
    elif sentinel == OPEN:
        sentinel += f": {' '.join(found['why'].split())}"
    sys.stdout.write("\n".join([*lines, sentinel, ""]))
    sys.stdout.flush()
    return STATUS[found["kind"]]


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    else:
        sys.exit(main(Path(sys.argv[1]), json.loads(sys.argv[2])))
