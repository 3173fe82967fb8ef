"""The author's script, and the release that a new pack is about: its file, its modules, what it requires as of its day.

The script becomes reproduce.py, with a PEP 723 header and a sentinel. The metadata of the release are those of its own
PKG-INFO or METADATA; nothing is executed.
"""

import ast
import contextlib
import datetime as dt
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from harness.core import Cache, HarnessError, UnavailableError
from harness.host.host import Host
from harness.pack.model import Upstream
from harness.pack.script_text import HEADER
from harness.upstream import dependencies, download, tree
from harness.upstream.source import Source, SourceKind

#: The folders of a repository in which its packages may lie. A wheel has them at its top.
ROOTS = ("", "src", "python", "lib")
#: Triton's interpreter imports numpy, before 2.4. No wheel of triton requires it.
OF_INTERPRETER = "numpy<2.4"
#: The Python that packs run on, and a version that none runs on.
PYTHON, OLDER_PYTHON = ">=3.10", "3.9"
#: Stands in pack.toml for a repository that the release does not state.
UNKNOWN = "https://example.org/TODO"
FORGES = re.compile(r"https?://(?:www\.)?(?P<place>(?:github|gitlab)\.com/[\w.-]+/[\w.-]+?)(?:\.git)?(?:[/#?].*)?")
#: Labels of a project's links, the likeliest to be its repository first.
LABELS = ("source", "repository", "code", "github", "homepage", "home")
#: Licences that upstreams of GPU libraries state in words or as a classifier.
LICENSES = {"apache": "Apache-2.0", "mit": "MIT", "bsd 2": "BSD-2-Clause", "bsd 3": "BSD-3-Clause"}
#: The lines that have to stay before a header: the interpreter's, and the encoding's.
PREAMBLE = re.compile(r"(?:#![^\n]*\n)?(?:#[^\n]*coding[:=][^\n]*\n)?")
#: Prints the sentinel of a script that ends in an exception; it stands before the script's own imports.
SENTINEL_HOOK = '''
import os
import sys


def print_sentinel(kind, error, trace):
    """Say BUG_REPRODUCED where the script ends in {fails}, and UNSUPPORTED where it ends in another exception."""
    sys.__excepthook__(kind, error, trace)
    word, status = ("BUG_REPRODUCED", 10) if kind.__name__ == "{fails}" else ("UNSUPPORTED", 125)
    print(f"{{word}}: {{kind.__name__}} in line {{trace.tb_lineno}}: {{' '.join(str(error).split())}}", flush=True)
    os._exit(status)


sys.excepthook = print_sentinel
'''


@dataclass(frozen=True)
class Script:
    """A script, read."""

    text: str  # of the file
    title: str  # the first line of its docstring, or empty
    imports: tuple[str, ...]  # the names of the packages that it imports, at its top or in a function
    body: int  # the number of lines before its first statement, without docstring and __future__ imports

    @property
    def is_interpreted(self) -> bool:
        """Whether it runs Triton kernels in Triton's interpreter where there is no GPU."""
        return "TRITON_INTERPRET" in self.text

    def as_reproducer(self, requires_python: str, packages: tuple[str, ...], fails: str) -> str:
        """Return the text of reproduce.py.

        A script that has a header keeps it, and one that says BUG_REPRODUCED prints its own sentinel. The bug of any
        other script is that it ends in the exception `fails`.
        """
        text = self.text
        if "BUG_REPRODUCED" not in text:
            lines = text.splitlines(keepends=True)
            end = [*lines[self.body :], "" if text.endswith("\n") else "\n", 'print("FIX_VALIDATED")\n']
            text = "".join([*lines[: self.body], SENTINEL_HOOK.format(fails=fails), *end])
        if HEADER.search(text):
            return text
        stated = f'# requires-python = "{requires_python}"\n# dependencies = {json.dumps(packages)}'
        return PREAMBLE.sub(lambda preamble: f"{preamble[0]}# /// script\n{stated}\n# ///\n", text, count=1)


def read_script(path: Path) -> Script:
    """Read a script. HarnessError: it is no Python, has tests that it does not call, or needs a module beside it."""
    try:
        text = path.read_text(encoding="utf-8")
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise HarnessError(f"{path.name}: no Python: {error}. Next: run it by itself first") from None
    called = {ast.unparse(node.func) for node in ast.walk(module) if isinstance(node, ast.Call)}
    functions = [node.name for node in module.body if isinstance(node, ast.FunctionDef)]
    tests = [name for name in functions if name.startswith("test") and name not in called]
    if tests:
        raise HarnessError(f"{path.name}: nothing calls {tests[0]}. Next: call it at the end of the file")
    imports = tuple(dict.fromkeys(_imports(module)))
    beside = [name for name in imports if (path.parent / f"{name}.py").is_file()]
    if beside:
        raise HarnessError(f"{path.name} imports {beside[0]}.py beside it. Next: one file, which upstream can paste")
    title = (ast.get_docstring(module) or "").partition("\n")[0].strip().rstrip(".")
    return Script(text, title, imports, _lines_of_head(module, text))


def _imports(module: ast.Module) -> Iterator[str]:
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def _lines_of_head(module: ast.Module, text: str) -> int:
    """Count the lines that have to stay in front: comments, the docstring, imports from __future__."""
    head: list[ast.stmt] = [
        node for node in module.body if isinstance(node, ast.ImportFrom) and node.module == "__future__"
    ]
    if ast.get_docstring(module) is not None:
        head.append(module.body[0])
    if head:
        return max(node.end_lineno or 0 for node in head)
    header = HEADER.search(text)
    preamble = PREAMBLE.match(text)
    return text.count("\n", 0, header.end() + 1 if header else preamble.end() if preamble else 0)


@dataclass(frozen=True)
class Metadata:
    """The statements of a release about itself; a text is empty if the release does not state it."""

    license: str  # the SPDX name, or the release's own expression
    repository: str  # its URL on GitHub or GitLab
    requires_python: str  # a version range
    requires: tuple[Requirement, ...]  # its dependencies, with extras and markers


def read_metadata(folder: Path) -> Metadata:
    """Read the metadata of an unpacked sdist or wheel; UnavailableError: there is none."""
    path = next(filter(Path.is_file, (folder / "PKG-INFO", *folder.glob("*.dist-info/METADATA"))), None)
    if path is None:
        raise UnavailableError(
            f"{folder.name}: neither PKG-INFO nor METADATA in the release. Next: write pack.toml by hand"
        )
    raw, _ = parse_email(path.read_bytes())
    requires = []
    for line in raw.get("requires_dist", []):
        with contextlib.suppress(InvalidRequirement, UndefinedEnvironmentName):  # an obsolete form
            requires.append(Requirement(line))
    return Metadata(_license(raw), _repository(raw), raw.get("requires_python", ""), tuple(requires))


def _license(raw: RawMetadata) -> str:
    expression = raw.get("license_expression", "").strip()
    if expression:
        return expression
    classifiers = [line for line in raw.get("classifiers", []) if line.startswith("License ::")]
    for text in (raw.get("license", ""), *(line.rpartition("::")[2] for line in classifiers)):
        for word, name in LICENSES.items():
            if re.search(rf"\b{word}", text.lower().replace("-", " ")):
                return name
    return ""


def _repository(raw: RawMetadata) -> str:
    links = raw.get("project_urls", {})
    ranked = sorted(links, key=lambda label: next((n for n, word in enumerate(LABELS) if word in label.lower()), 99))
    for url in (*(links[label] for label in ranked), raw.get("home_page", "")):
        match = FORGES.fullmatch(url.strip())
        if match:
            return f"https://{match['place']}"
    return ""


@dataclass(frozen=True)
class Release:
    """A release, resolved."""

    upstream: Upstream  # as pack.toml states it; its commit may be unknown
    requires_python: str  # the range
    pinned: str  # the text of requirements.txt
    header: tuple[str, ...]  # the packages in the header of the script
    needs_torch: bool  # whether the script imports torch or triton


def requirements_of(texts: tuple[str, ...]) -> list[Requirement]:
    """Read the values of ``--with``. HarnessError: a value is neither PACKAGE nor PACKAGE==VERSION."""
    try:
        requirements = [Requirement(text) for text in texts]
    except InvalidRequirement as error:
        raise HarnessError(f"--with: {str(error).splitlines()[0]}. Next: --with PACKAGE==VERSION") from None
    if any(requirement.url for requirement in requirements):
        raise HarnessError("--with names a URL. Next: --with PACKAGE==VERSION")
    return requirements


def resolve(  # noqa: PLR0913 - one parameter for each thing that the caller states
    packages: list[Requirement], script: Script, cache: Cache, host: Host, tell: Callable[[str], None], *, deps: bool
) -> Release:
    """Resolve the first package as the release under test, and the others for its script.

    `deps` says whether the requirements of the release are resolved, too.
    """
    if cache.offline:
        raise HarnessError("new asks the package index. Next: without --offline")
    subject, *companions = packages
    name = f"{subject.name}{_extras(subject)}"
    tell(f"looking up {subject.name}")
    version = next((spec.version for spec in subject.specifier if spec.operator == "=="), None)
    try:
        release = download.resolve(cache, subject.name, version, wheels_only=True)
    except HarnessError:  # no wheel for this Python: the source distribution is judged without a build
        release = download.resolve(cache, subject.name, version)
    version = release.version
    bare = Upstream(release.package, UNKNOWN, "", (), "", version, release.file, release.sha256)
    folder = tree.materialize(cache, bare, Source(SourceKind.PINNED, version)).folder
    project = read_metadata(folder)
    if project.requires_python and not SpecifierSet(project.requires_python).contains(host.python):
        raise HarnessError(
            f"{subject.name} {version} needs Python {project.requires_python}, and this is {host.python}. "
            "Next: run new with such a Python"
        )
    root, modules = _modules(folder, script, f"{subject.name} {version}")
    upstream = replace(
        bare,
        repository=project.repository or UNKNOWN,
        license=project.license or "TODO",
        modules=modules,
        source_root=root,
    )
    tell("resolving what it requires")
    required = [f"{name}=={version}"] if deps and bare.is_wheel else []
    if deps and not bare.is_wheel:
        required = [
            str(need) for need in project.requires if need.marker is None or need.marker.evaluate({"extra": ""})
        ]
    required += [OF_INTERPRETER] if script.is_interpreted else []
    pinned = _compiled([*required, *map(str, companions)], host.python, release.date)
    # the release under test is not installed: its tree is on PYTHONPATH
    own_pin = rf"(?m)^{re.escape(canonicalize_name(subject.name))}(?:\[.*\])?==.*\n(?:[ \t].*\n)*"
    pinned = re.sub(own_pin, "", pinned)
    interpreters = {"torch": host.torch, "triton": host.triton}
    header = [f"{name}=={version}", *(_pin(package, pinned) for package in companions)]
    header += [
        f"{package}=={installed.partition('+')[0]}" if installed else package
        for package, installed in interpreters.items()
        if package in script.imports
    ]
    needs_torch = not interpreters.keys().isdisjoint(script.imports)
    return Release(upstream, _python(project.requires_python), pinned, tuple(dict.fromkeys(header)), needs_torch)


def _pin(requirement: Requirement, pinned: str) -> str:
    """Pin a requirement to the version that was resolved, so that it means the same on another day."""
    versions = dict(pin.split("==") for pin in dependencies.PIN.findall(pinned))  # uv writes canonical names
    version = versions.get(canonicalize_name(requirement.name))
    return f"{requirement.name}{_extras(requirement)}=={version}" if version else str(requirement)


def _compiled(requirements: list[str], python: str, day: str) -> str:
    """Resolve requirements as of the day after a release, or as of today where that day had no wheels for this Python.

    `day` is that of the release, YYYY-MM-DD; empty where the index states none.
    """
    after = f"{dt.date.fromisoformat(day) + dt.timedelta(days=2)}T00:00:00Z" if day else ""
    reason = ""
    for date in dict.fromkeys((after, "")):
        try:
            return dependencies.resolve_pins("\n".join(requirements), python, date)
        except dependencies.UvError as error:
            reason = reason or str(error)
    raise HarnessError(f"{reason}. Next: --no-deps, and --with each package that the script needs")


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


def _modules(folder: Path, script: Script, release: str) -> tuple[str, tuple[str, ...]]:
    """Return the source root, and the modules that the script imports from there."""
    for root in ROOTS:
        names = {path.stem for path in (folder / root).glob("*") if path.is_dir() or path.suffix in {".py", ".so"}}
        modules = tuple(name for name in script.imports if name in names)
        if modules:
            return root, modules
    packages = {path.parent.name for path in folder.rglob("__init__.py") if len(path.relative_to(folder).parts) < 4}  # noqa: PLR2004 - PACKAGE below a root
    raise HarnessError(
        f"the script imports no module of {release}: it imports {', '.join(script.imports) or 'none'}, and the release "
        f"has {', '.join(sorted(packages - {'tests', 'test'})[:8]) or 'none'}. Next: name first, with --with, the "
        "package that has the bug"
    )


def _python(versions: str) -> str:
    """Return the Python versions of a release; PYTHON where they hold one that no pack runs on."""
    return PYTHON if not versions or SpecifierSet(versions).contains(OLDER_PYTHON) else versions.replace(" ", "")
