"""The packages that an interpreter has installed, from their metadata; none of them is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from harness.audit.environment import Environment, Named, named
from harness.core import strict_json
from harness.core.errors import HarnessError

#: Seconds.
LONGEST = 120
NEXT = "Next: --python BIN, with Python 3.8 or newer"
#: Run by the other interpreter, which may be older. The folder that it runs in goes off the path before anything is
#: imported. Of two packages of one name the first on the path is the one that an import finds.
SCRIPT = """
import sys
sys.path[:] = [place for place in sys.path if place]
import importlib.metadata, json
rows = []
for one in importlib.metadata.distributions():
    try:
        name, version = one.metadata["Name"], one.version
        origin = one.read_text("direct_url.json") or ""
    except Exception:
        name, version, origin = None, None, ""
    rows.append([name, version, origin])
sys.stdout.buffer.write(json.dumps({"python": sys.version.split()[0], "rows": rows}).encode())
"""
#: Of a row that the script prints.
COLUMNS = 3
FOLDERS = ("bin/python", "Scripts/python.exe")


def _inside(folder: Path) -> Path | None:
    return next((folder / name for name in FOLDERS if (folder / name).exists()), None)


def usual(here: Path) -> Path:
    """Return the interpreter that a user means who names none.

    It is that of the active virtual or conda environment, else of `.venv` in the folder `here`, else the `python3` or
    `python` on the path. The folder of the interpreter that runs this is left out of the path: uvx puts it there.

    Raises:
        HarnessError: there is none.

    """
    active = [Path(os.environ[name]) for name in ("VIRTUAL_ENV", "CONDA_PREFIX") if os.environ.get(name)]
    for folder in (*active, here / ".venv"):
        found = _inside(folder)
        if found is not None:
            return found
    own = Path(sys.executable).parent
    path = os.pathsep.join(one for one in os.environ.get("PATH", os.defpath).split(os.pathsep) if Path(one) != own)
    on_path = shutil.which("python3", path=path) or shutil.which("python", path=path)
    if on_path is None:
        raise HarnessError(f"no Python here: no active environment, no .venv, none on the path. {NEXT}")
    return Path(on_path)


def _ask(binary: Path) -> object:
    """Run the script in an empty folder, and return what it printed."""
    try:
        with tempfile.TemporaryDirectory() as empty:
            ended = subprocess.run(
                [str(binary), "-c", SCRIPT],
                cwd=empty,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=LONGEST,
                check=False,
            )
    except OSError as error:
        raise HarnessError(f"--python {binary}: it cannot be run ({error.strerror}). {NEXT}") from None
    except subprocess.TimeoutExpired:
        raise HarnessError(f"--python {binary}: no answer in {LONGEST} s. {NEXT}") from None
    if ended.returncode != 0:
        said = ended.stderr.decode(errors="replace").strip().splitlines() or ["nothing"]
        raise HarnessError(f"--python {binary}: exit status {ended.returncode}: {said[-1][:200]}. {NEXT}")
    try:
        return strict_json.loads(ended.stdout)
    except strict_json.StrictJsonError:
        raise HarnessError(f"--python {binary}: it does not answer as Python does. {NEXT}") from None


def _no_release(origin: str) -> str:
    """Say why an installation is none of a release: pip keeps in direct_url.json where it came from otherwise."""
    if not origin:
        return ""
    try:
        document = strict_json.loads(origin)
    except strict_json.StrictJsonError:
        return "installed from a place that its direct_url.json does not tell"
    if not isinstance(document, dict) or "archive_info" in document:
        return "installed from a file or URL, not from the package index"
    return "installed from a checkout" if "vcs_info" in document else "installed from a folder"


def installed(binary: Path) -> Environment:
    """Read what an interpreter has installed.

    It is started as its user starts it, so that its site-packages, its user's and PYTHONPATH count, and reads metadata
    files alone.

    Raises:
        HarnessError: it is no Python that can be run.

    """
    binary = Path(shutil.which(str(binary)) or binary).absolute()
    answer = _ask(binary)
    rows = answer.get("rows") if isinstance(answer, dict) else None
    if not isinstance(answer, dict) or not isinstance(rows, list):
        raise HarnessError(f"--python {binary}: it does not answer as Python does. {NEXT}")
    found: dict[str, Named] = {}
    broken = 0
    for row in rows:
        name, version, origin = row if isinstance(row, list) and len(row) == COLUMNS else (None, None, None)
        if not isinstance(name, str) or not isinstance(version, str):
            broken += 1
            continue
        one = named(name, version, reason=_no_release(str(origin or "")))
        found.setdefault(one.name, one)
    unread = (f"{broken} installed package(s) whose metadata cannot be read",) if broken else ()
    return Environment(f"Python {answer.get('python')} at {binary}", tuple(found.values()), unread)
