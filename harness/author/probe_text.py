"""The probe of a new pack: header and docstring from the draft, the protocol block, and the script in a function."""

from __future__ import annotations

import textwrap

from harness.author.draft import Draft
from harness.author.script import INDENT
from harness.core.words import Fix
from harness.pack import probe

#: Stands wherever only the author knows what to write; `check` names each place that still has it.
OPEN = "TODO"
WIDTH = 118
#: What the script's function holds where no script was given.
NO_SCRIPT = f'{INDENT}raise NotImplementedError("{OPEN}: the lines that fail while the bug is there")'

LOAD = '''
def load(probe):
    """Load the modules under test; a parent package that imports more than they need is found, not executed."""
    for name in STUBS:
        sys.modules[name] = importlib.util.module_from_spec(importlib.util.find_spec(name))
    for name in MODULES:
        importlib.import_module(name)
    for name, module in sorted(sys.modules.items()):
        tested = any(name == one or name.startswith(f"{one}.") for one in PACKAGES) and name not in STUBS
        if tested and (getattr(module, "__file__", None) or "").endswith(".py"):
            probe.upstream(module)
'''
SCRIPT = '''
def script():
    """Fail while the bug is there: by an assertion, by sys.exit, or by an exception of the package under test."""
{body}
'''
CHECKS = '''
def failure_of(function):
    """Run a function with fixed seeds; return how it failed, by an assertion or by sys.exit, or nothing."""
    import torch

    torch.manual_seed(0)
    try:
        function()
    except AssertionError as error:
        return f"AssertionError: {error}"[:400]
    except SystemExit as error:
        return "" if error.code in (None, 0) else f"SystemExit: {error.code}"[:400]
    return ""


def fails():
    """Judge whether the script ends as it should."""
    failure = failure_of(script)
    return not failure, {"measured": failure or PASSED}
'''
REPEATS = '''
def ending():
    """Run the script; return how it ended, whatever raised."""
    try:
        return failure_of(script).partition(":")[0]
    except Exception as error:
        return type(error).__name__


def repeats():
    """Judge whether the script comes to its own verdict, and to the same one twice: else it shows nothing."""
    first, second = ending(), ending()
    return first == second and first in (ENDINGS or [first]), {"measured": [first, second]}
'''
CONTROL = '''
def control():
    """Fail, by an assertion or sys.exit, where something else is wrong than the bug."""
{body}


def stays_right():
    """Judge what is right with the bug and without it."""
    failure = failure_of(control)
    return not failure, {{"measured": failure or PASSED}}
'''
PIN = '''
def pin_autotuners():
    """Let each autotuned kernel have its first configuration: without a GPU there is nothing to time them by."""
    from triton.runtime.autotuner import Autotuner

    make = Autotuner.__init__

    def make_pinned(self, fn, arg_names, configs, *rest, **named):
        make(self, fn, arg_names, configs[:1], *rest, **named)

    Autotuner.__init__ = make_pinned
'''
JUDGE = '''
def judge(probe, target):
    """Judge the release that is on the path."""
{before}    import torch

    major, minor = torch.cuda.get_device_capability() if torch.cuda.is_available() else (0, 0)
    if target not in ("cpu", f"sm_{{major}}{{minor}}" + "a" * (major >= 9)):
        raise NotImplementedError(f"{{target}} is neither cpu nor the architecture of a GPU of this host")
    name, evidence = ("cpu", "{evidence}") if target == "cpu" else (torch.cuda.get_device_name(), "executed")
    probe.say("TARGET", target=target, evidence=evidence, device=name)
{pin}    load(probe)
    probe.judge("script", "defect", fails)
    probe.judge("repeats", "control", repeats)
{control}

if __name__ == "__main__":
    Probe().run(judge)
'''
HIDE_GPU = f"""{INDENT}if target == "cpu":
{INDENT}{INDENT}os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the script may choose a GPU where it sees one
"""
PINNED = f'{INDENT}if target == "cpu":\n{INDENT}{INDENT}pin_autotuners()\n'
INTERPRET = f'{INDENT}os.environ["TRITON_INTERPRET"] = str(int(target == "cpu"))  # read when triton is imported\n'


def text(draft: Draft, title: str) -> str:
    """Write reproduce.py."""
    before = HIDE_GPU + (INTERPRET if draft.triton else "")
    body = draft.script.body if draft.script and draft.script.body else NO_SCRIPT
    own = CONTROL.format(body=draft.control.body) if draft.control else ""
    call = f'{INDENT}probe.judge("stays_right", "control", stays_right)\n' if draft.control else ""
    pin, pinned = (PIN, PINNED) if draft.triton else ("", "")
    judge = JUDGE.format(before=before, evidence=draft.cpu_evidence, control=call, pin=pinned)
    functions = [one for one in (LOAD, SCRIPT.format(body=body), CHECKS, REPEATS, own, pin, judge) if one]
    constants = (
        f"PACKAGES = {_tuple(draft.upstream.modules)}\n"
        f"MODULES = {_tuple(draft.roots)}\n"
        f"STUBS = {_tuple(draft.stubs)}  # outermost first\n"
        f"ENDINGS = {_endings(draft)}  # how the script ends where it comes to a verdict; none: anyhow\n"
        'PASSED = "it did not fail"\n'
    )
    block = f"# fmt: off\n{probe.original_block()}# fmt: on\n"
    parts = [
        _header(draft),
        _docstring(draft, title),
        f"\n{block}import importlib\nimport importlib.util\n\n",
        constants,
    ]
    return "".join(parts) + "\n" + "\n".join(functions)


def _endings(draft: Draft) -> str:
    return '("", "AssertionError", "SystemExit")' if draft.script and draft.script.fails else "()"


def _tuple(names: tuple[str, ...]) -> str:
    inner = ", ".join(f'"{name}"' for name in names)
    return f"({inner}{',' if len(names) == 1 else ''})"


def pins(draft: Draft) -> dict[str, str]:
    """Map each package of the probe's header to its version, in the header's order."""
    own = {draft.upstream.package: draft.upstream.version} if draft.has_wheel else {}
    interpreter = {name: version for name, version in (("torch", draft.torch), ("triton", draft.triton)) if version}
    return dict(sorted((own | {name: one.version for name, one in draft.members.items()} | interpreter).items()))


def _header(draft: Draft) -> str:
    lines = [f'#   "{name}=={version}",' for name, version in pins(draft).items()]
    wanted = f'# requires-python = "{draft.requires.python}"'
    return "\n".join(["# /// script", wanted, "# dependencies = [", *lines, "# ]", "# ///", ""])


def _docstring(draft: Draft, title: str) -> str:
    upstream = draft.upstream
    said = draft.script.docstring if draft.script else ""
    checkout = f"CHECKOUT/{upstream.source_root}".rstrip("/")
    lines = [
        f"{title.rstrip('.')}.",
        "",
        *_filled(f"Symptom: {said or f'{OPEN}: what a user sees, and with which values'}"),
        "",
        f"Cause: {OPEN}: the lines that do it.",
        "",
        f"Scope: {OPEN}: for which values, dtypes and options this is shown, and for which it is not.",
        "",
        *_filled(f"Ran on target cpu ({draft.cpu_evidence}): {draft.ran_on_cpu}."),
        "",
        f"Upstream: {upstream.repository or f'{OPEN}: the repository, or where else its issues are written'}",
        "",
        f"For a checkout: PYTHONPATH={checkout} uv run reproduce.py",
        "",
        *_commands(draft),
    ]
    return '"""' + "\n".join(line.replace("\\", "\\\\").replace('"""', "'''") for line in lines) + '\n"""\n'


def _filled(paragraph: str) -> list[str]:
    """Break a paragraph into lines that ruff takes."""
    return textwrap.wrap(paragraph, WIDTH, break_long_words=False, break_on_hyphens=False)


def _commands(draft: Draft) -> list[str]:
    upstream = draft.upstream
    if draft.fix == Fix.NONE:
        why = "The wheel's code is compiled, so nothing is patched:"
        path = "" if draft.has_wheel else f"PYTHONPATH={f'CHECKOUT/{upstream.source_root}'.rstrip('/')} "
        said = why if upstream.is_compiled else "There is no patch yet:"
        return [said, "", f"    {path}uv run reproduce.py   # BUG_REPRODUCED"]
    folder, unpack = _unpacking(upstream.file)
    root = f"{folder}/{upstream.source_root}".rstrip("/")
    if upstream.is_wheel:
        root = folder
    strip = 1 + (len(upstream.source_root.split("/")) if upstream.is_wheel and upstream.source_root else 0)
    run = f'    PYTHONPATH={root} python "$PACK/reproduce.py"'
    apply = f'git -C {folder} apply -p{strip} "$PACK/fix.patch"'
    packages = ", ".join(name for name in pins(draft) if name != upstream.package)
    return [
        f"Both sentinels without the runner, from a folder that holds the release's own {upstream.file}, with PACK set",
        f"to the absolute path of this file's folder and with {packages} installed. The second line",
        "ends in BUG_REPRODUCED, the fourth in FIX_VALIDATED:",
        "",
        f"    {unpack}",
        run,
        f'    GIT_CEILING_DIRECTORIES="$PWD" {apply}',
        run,
    ]


def _unpacking(file: str) -> tuple[str, str]:
    """Return the folder that an archive unpacks to, and the command that does it."""
    if file.endswith(".tar.gz"):
        return file.removesuffix(".tar.gz"), f"tar xzf {file}"
    folder = file.removesuffix(".zip") if file.endswith(".zip") else "release"
    return folder, f"python -m zipfile -e {file} {'.' if file.endswith('.zip') else folder}"
