"""The judges of a pack: its script, its contract, and the modules of the kit that the contract imports.

A receipt is stale once their meaning changes; comments, a docstring or a commit message are no part of it.
"""

import functools
import re
from collections.abc import Callable
from pathlib import Path

from harness.core import files
from harness.pack.model import Pack

#: Runs every contract and decides nothing: a change of it makes no receipt stale.
PLUGIN = "kit.plugin"
#: The reason for a STALE receipt or record.
CHANGED = "the script or the contract changed"
#: `import kit.x`, or `from kit.x import NAMES`, on one line or in brackets.
IMPORT = re.compile(
    r"^[ \t]*(?:import[ ]+(?P<whole>kit[\w.]*)"
    r"|from[ ]+(?P<module>kit(?:\.\w+)*)[ ]+import[ ]+(?P<names>\([^)]*\)|[^\n]*))",
    re.MULTILINE,
)
#: A string, of one line or of three quotes.
STRING = (
    r'"""(?:\\.|[^\\])*?"""'
    r"|'''(?:\\.|[^\\])*?'''"
    r'|"(?:\\.|[^"\\\n])*"'
    r"|'(?:\\.|[^'\\\n])*'"
)
#: A comment stands after a space, or alone on its line: Python 3.12 takes f"{x["#"]}", where the # begins none.
COMMENT_OR_STRING = re.compile(rf"(?<!\S)#[^\n]*|(?P<string>{STRING})", re.DOTALL)
#: The docstring of a module, after nothing but comments, and alone on its lines.
DOCSTRING = re.compile(rf"\A(?:[ \t\f]*(?:#[^\n]*)?\n)*[rRuU]?(?>{STRING})[ \t]*(?:#[^\n]*)?(?:\n|\Z)", re.DOTALL)


@functools.lru_cache(maxsize=64)
def _imported(source: str) -> set[str]:
    """Return the kit's modules that a file imports, and the names that it takes from them.

    It reads the text: `list` needs this for every pack, and a parser takes ten times as long.
    """
    modules: set[str] = set()
    for match in IMPORT.finditer(source):
        module = match["module"] or match["whole"]
        names = re.findall(r"\w+", re.sub(r"#.*", "", match["names"] or ""))
        modules |= {module, *(f"{module}.{name}" for name in names)}
    return modules


@functools.cache
def _kit_file(module: str) -> Path | None:
    """Return the file of a module that can change a verdict; None for another name."""
    path = files.REPOSITORY.joinpath(*module.split("."))
    sources = () if module == PLUGIN else (path.with_suffix(".py"), path / "__init__.py")
    return next(filter(Path.is_file, sources), None)


def _stamp(path: Path) -> tuple[int, int, int]:
    """Return what changes with the content of a file, for this process."""
    stat = path.stat()
    return stat.st_mtime_ns, stat.st_ctime_ns, stat.st_size


@functools.lru_cache(maxsize=256)
def _kit_files(contract: Path, _stamp: tuple[int, int, int]) -> tuple[Path, ...]:
    """Return the kit's files that a contract imports, directly or not, in the order of their names."""
    kit_files: set[Path] = set()
    try:
        unread = [contract.read_text(encoding="utf-8")]
    except UnicodeDecodeError:  # a run reports it
        return ()
    while unread:
        sources = {file for module in _imported(unread.pop()) if (file := _kit_file(module))} - kit_files
        kit_files |= sources
        unread += [file.read_text(encoding="utf-8") for file in sources]
    return tuple(sorted(kit_files))


def files_of(pack: Pack) -> list[Path]:
    """Return the files that judge a pack: its script, its contract, and the kit's files in the order of their names."""
    if not pack.contract.is_file():
        return [pack.script]
    return [pack.script, pack.contract, *_kit_files(pack.contract, _stamp(pack.contract))]


def script_meaning(source: str) -> str:
    """Return the sha256 of a script without its comments, blank lines and module docstring.

    It hashes the text, since syntax trees and token streams differ between Python versions. Parsing and tokenizing take
    16 times as long, and `list` asks for every script and contract.
    """
    source = source.replace("\r\n", "\n").replace("\r", "\n")
    source = DOCSTRING.sub("", source)
    lines = COMMENT_OR_STRING.sub(lambda match: match["string"] or "", source).split("\n")
    return files.sha256_bytes("\n".join(line.rstrip() for line in lines if line.strip()).encode())


def patch_meaning(text: str) -> str:
    """Return the sha256 of a patch from its first ``diff --git`` on."""
    start = text.find("diff --git ")
    return files.sha256_bytes(text[max(start, 0) :].encode())


def meaning(path: Path) -> str:
    """Return the sha256 of the meaning of a script or a patch; of its bytes if it cannot be read as either."""
    data = path.read_bytes()
    try:
        text = data.decode()
        return script_meaning(text) if path.suffix == ".py" else patch_meaning(text)
    except UnicodeDecodeError:
        return files.sha256_bytes(data)


@functools.lru_cache(maxsize=1024)  # `list` asks for the same files again for each receipt
def _hash(read: Callable[[Path], str], path: Path, _stamp: tuple[int, int, int]) -> str:
    return read(path)


def _joined(pack: Pack, read: Callable[[Path], str]) -> str:
    hashes = [_hash(read, path, _stamp(path)) for path in files_of(pack)]
    return hashes[0] if len(hashes) == 1 else files.sha256_bytes("\n".join(hashes).encode())


def sha256(pack: Pack) -> str:
    """Return one hash of the bytes of the files that judge a pack; OSError: the script cannot be read."""
    return _joined(pack, files.sha256_file)


def meaning_of(pack: Pack) -> str:
    """Return one hash of the meaning of these files, without comments and module docstrings; OSError likewise."""
    return _joined(pack, meaning)


def changed(pack: Pack, sha256_before: str, meaning_before: str) -> bool:
    """Whether the judges of a pack differ in meaning from those with these hashes; they do if there is no script."""
    if not pack.script.exists():
        return True
    return sha256(pack) != sha256_before and meaning_of(pack) != meaning_before
