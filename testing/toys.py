"""Toy upstreams and toy packs: built here, run by real child processes."""

from __future__ import annotations

import hashlib
import importlib.metadata
import shutil
import tomllib
import zipfile
from pathlib import Path

from packaging.tags import sys_tags

from harness.core.errors import HarnessError
from harness.pack import load

RESOURCES = Path(__file__).resolve().parents[1] / "tests/resources"
BASE = "01_confirmed"


def _zip(archive: Path, members: dict[str, bytes]) -> str:
    """Write a zip whose bytes depend on its members alone; return its sha256."""
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_STORED) as bundle:
        for name, data in members.items():
            bundle.writestr(zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0)), data)
    return hashlib.sha256(archive.read_bytes()).hexdigest()


def zip_folder(folder: Path, archive: Path) -> str:
    """Write a folder into a zip whose bytes depend on its files alone; return its sha256."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]
    return _zip(archive, {path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in files})


def sdist(folder: Path, version: str = "1.0") -> tuple[Path, str]:
    """Build the sdist of the toy upstream into `folder`; return its path and sha256."""
    archive = folder / f"toykernel-{version}.zip"
    return archive, zip_folder(RESOURCES / "upstream" / f"toykernel-{version}", archive)


def wheel_of_installed(name: str, folder: Path) -> tuple[Path, str]:
    """Build a wheel of a package that is installed here and pure Python; return its path and sha256."""
    distribution = importlib.metadata.distribution(name)
    archive = folder / f"{name}-{distribution.version}-py3-none-any.whl"
    members = {}
    for file in sorted(distribution.files or []):
        source = Path(str(distribution.locate_file(file)))
        if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():
            members[file.as_posix()] = source.read_bytes()
    return archive, _zip(archive, members)


def wheel(folder: Path, file: str, members: dict[str, str]) -> tuple[Path, str]:
    """Build a wheel of that file name from texts, with the metadata that it lacks; return its path and sha256."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = folder / file
    name, version, tag = file.removesuffix(".whl").split("-", 2)
    stated = {
        "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "WHEEL": f"Wheel-Version: 1.0\nGenerator: toys\nRoot-Is-Purelib: true\nTag: {tag}\n",
        "RECORD": "",
    }
    members = {f"{name}-{version}.dist-info/{one}": text for one, text in stated.items()} | members
    return archive, _zip(archive, {name: text.encode() for name, text in members.items()})


def compiled_wheel(folder: Path, version: str, *, right: bool = False) -> tuple[Path, str]:
    """Build a wheel of the toy upstream for this platform alone, whose code reads a file of toyhelper's wheel."""
    text = (RESOURCES / "upstream/toykernel-1.0/src/toykernel/scale.py").read_text(encoding="utf-8")
    wrong, repaired = "[value * weights[0] for value in values]", "[v * w for v, w in zip(values, weights)]"
    assert wrong in text
    text = text.replace(wrong, repaired) if right else text
    library = 'from pathlib import Path\n(Path(__file__).parents[1] / "toyhelper/library.txt").read_text()\n'
    members = {"toykernel/__init__.py": "", "toykernel/scale.py": text + library}
    platform = next(iter(sys_tags())).platform
    return wheel(folder, f"toykernel-{version}-cp38-abi3-{platform}.whl", members)


def pin(pack: Path, package: str, version: str, *hashes: str, name: str = "default") -> None:
    """Add a package to a dependency set of a pack."""
    file = pack / ("requirements.txt" if name == "default" else f"requirements.{name}.txt")
    line = " ".join([f"{package}=={version}", *(f"--hash=sha256:{one}" for one in hashes)])
    file.write_text((file.read_text() if file.exists() else "") + line + "\n")


def seed(cache: Path, archive: Path, sha256: str) -> None:
    """Put a file into a cache as a download would."""
    folder = cache / "downloads" / sha256
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(archive, folder / archive.name)


def lay(packs: Path, behaviour: str, sha256: str, name: str = "") -> Path:
    """Lay a toy pack into `packs`: the sound one, and over it the files of the pack named for its behaviour.

    `name` is its folder's, where not that of the behaviour. What a toy leaves beside its files it leaves there, also
    where a copy of them runs. An ``edit.toml`` stands for a copy of one of the sound pack's files (or of those of the
    pack that it names as its `base`) with one text replaced, or several `edits`, and for what it is `without`.
    A script alone has nothing to compare, and so claims nothing.
    """
    target, edit = packs / (name or behaviour), RESOURCES / "packs" / behaviour / "edit.toml"
    change = tomllib.loads(edit.read_text(encoding="utf-8")) if edit.exists() else {}
    shutil.copytree(RESOURCES / "packs" / BASE, target)
    for one in (change.get("base", BASE), behaviour):
        shutil.copytree(RESOURCES / "packs" / one, target, dirs_exist_ok=True)
    (target / "edit.toml").unlink(missing_ok=True)
    for file in change.get("without", []):
        (target / file).unlink()
    for one in change.get("edits") or [change] * ("file" in change):
        replace(target / one["file"], one["old"], one["new"])
    for file in target.glob("*.py"):
        text = file.read_text(encoding="utf-8").replace("Path(__file__)", f"Path({str(file)!r})")
        file.write_text(text, encoding="utf-8")
    replace(target / "pack.toml", "@SHA256@", sha256)
    definition = tomllib.loads((target / "pack.toml").read_text(encoding="utf-8"))
    if not (target / "contract.py").exists() and definition["targets"].get("cpu", {}).get("claims"):
        replace(target / "pack.toml", 'claims = ["BITWISE_IDENTICAL"]\n', "")
    if definition.get("fix") == "none":
        (target / "fix.patch").unlink()
        replace(target / "report.in.md", "{{diff}}\n\n", "")
    return target


def refusal(pack: Path) -> str:
    """Load a pack; return why its definition is refused, in one line, or nothing where it is not."""
    try:
        load.load_pack(pack)
    except HarnessError as error:
        (line,) = str(error).splitlines()
        return line
    return ""


def replace(file: Path, old: str, new: str) -> None:
    """Replace a text that has to stand in a file."""
    text = file.read_text(encoding="utf-8")
    assert old in text, (file, old)
    file.write_text(text.replace(old, new), encoding="utf-8")


def blind(pack: Path, *, blind: bool = True) -> None:
    """Let the script and the contract of a toy see no bug any more, or see it again."""
    for file, sees, sees_none in (
        ("reproduce.py", "if scaled == right else", "if True else"),
        ("contract.py", "assert error == 0.0,", "assert True,"),
    ):
        replace(pack / file, *((sees, sees_none) if blind else (sees_none, sees)))
