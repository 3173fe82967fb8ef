"""Reading a pack.toml: strict, and with all its errors at once."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import tomli
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.core import files, structure
from harness.core.words import BITWISE_IDENTICAL, Evidence, LaneVerdict, Verdict, is_target
from harness.pack.model import Definition, Dependency, Target, Upstream
from harness.pack.requirements import SHA256

SCHEMA = 1
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
ENVIRONMENT = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull|discussions)/\d+(?:#[\w-]+)?")
FILE_URL = re.compile(r"https://[\w.-]+(?:/[\w.+-]+)+")
ORIGIN = re.compile(r"git\+https://[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40}")
PATCH_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.patch")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
#: What a lane sets itself, or what decides which code runs.
OWN_VARIABLES = re.compile(r"PATH|HOME|TMPDIR|(?:PYTHON|PYTEST|LD_|CUDA_VISIBLE|XDG_|REPRODUCER_).*")
#: The least and the most of a target's numbers: seconds (a lane of a month is a mistake), counts and GiB.
LIMITS = {
    "timeout_s": (0.001, 31 * 24 * 3600.0),
    "gpus": (1, 1024),
    "ranks": (1, 1024),
    "processes": (1, 1024),
    "gpu_memory_gib": (0, 1 << 20),
}
PACKAGE = re.compile(r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?")
CLAIM = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*")
#: A claim of such a name would be read as something else.
TAKEN = {"TARGET", "UPSTREAM", "CHECK", "FIGURE", "OUTPUT", *LaneVerdict}
#: Never a path or an option of git's.
REPOSITORY = re.compile(r"https?://[^\s]+")
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
NO_ORIGIN = "is no git+https://HOST/OWNER/REPO@COMMIT with 40 digits"


def _control_errors(document: object) -> Iterator[str]:
    """Say which texts hold control characters: no path, no argument and no table takes them. No recursion."""
    waiting = [("", document)]
    while waiting:
        path, value = waiting.pop()
        if isinstance(value, str) and CONTROL.search(value):
            yield f"{path[:80]!r}: it holds control characters"
        elif isinstance(value, dict):
            for key, item in value.items():
                inner = f"{path}.{key}".lstrip(".")
                if CONTROL.search(key):
                    yield f"{inner[:80]!r}: it holds control characters"
                waiting.append((inner, item))
        elif isinstance(value, list):
            waiting += [(f"{path}[{index}]", item) for index, item in enumerate(value)]


def _is_sentence(text: str) -> bool:
    return bool(text.strip()) and "\n" not in text


def _is_relative(text: str) -> bool:
    path = PurePosixPath(text)
    return not path.is_absolute() and ".." not in path.parts


def _version_errors(definition: Definition) -> Iterator[str]:
    for path, text in (("upstream.version", definition.upstream.version), ("fixed_in", definition.fixed_in)):
        try:
            Version(text or "0")
        except InvalidVersion:
            yield f"{path}: {text!r} is no version"
    for path in ("python", "torch", "triton"):
        text = getattr(definition.requires, path)
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            yield f"requires.{path}: {text!r} is no version range such as '>=2.6,<3'"


def _release_errors(upstream: Upstream) -> Iterator[str]:
    if not upstream.version:
        yield "upstream.version: a release has one; a pinned commit has neither version, file nor sha256"
    if not SHA256.fullmatch(upstream.sha256):
        yield "upstream.sha256: not 64 lower-case hexadecimal digits"
    if not upstream.file.endswith((".tar.gz", ".zip", ".whl")) or "/" in upstream.file:
        yield f"upstream.file: {upstream.file!r} is no .tar.gz, .zip or .whl of the index"
    if upstream.date is not None:
        yield "upstream.date: of a pinned commit; a release has none"
    if upstream.url and not (FILE_URL.fullmatch(upstream.url) and upstream.url.endswith(f"/{upstream.file}")):
        yield f"upstream.url: {upstream.url!r} is no https:// URL of {upstream.file}"


def _commit_errors(upstream: Upstream) -> Iterator[str]:
    if upstream.version or upstream.sha256:
        yield "upstream.file: the key is missing; a pinned commit has neither version, file nor sha256"
    elif upstream.date is None:
        yield "upstream.date: a pinned commit states its date"
    if upstream.url or upstream.commit_unchecked:
        yield "upstream.url, upstream.commit_unchecked: of a release; a pinned commit has neither"
    if not upstream.repository.startswith("https://"):
        yield f"upstream.repository: {upstream.repository!r} is no https:// URL"


def _upstream_errors(definition: Definition) -> Iterator[str]:
    upstream, head = definition.upstream, definition.head
    yield from _commit_errors(upstream) if upstream.is_commit else _release_errors(upstream)
    if not COMMIT_PATTERN.fullmatch(upstream.commit) and (upstream.commit or upstream.is_commit):
        yield "upstream.commit: not 40 lower-case hexadecimal digits"
    if not upstream.modules:
        yield "upstream.modules: name at least one import name"
    if head and not COMMIT_PATTERN.fullmatch(head.commit):
        yield "head.commit: not 40 lower-case hexadecimal digits"
    if head and upstream.is_compiled:
        yield "head: the pinned wheel is compiled, and a commit is judged without being built"
    if head and head.verdict == Verdict.FIXED_UPSTREAM and not head.fixed_by:
        yield "head.fixed_by: name the commit that fixed it"


def _target_errors(definition: Definition) -> Iterator[str]:
    if not definition.targets:
        yield "targets: name at least one"
    for name, target in definition.targets.items():
        path = f"targets.{name}"
        if not is_target(name):
            yield f"{path}: no target such as cpu, sm_80, sm_90a (with the suffix from sm_90 on)"
        if not target.evidence:
            yield f"{path}.evidence: name at least one of {', '.join(Evidence)}"
        if name == "cpu" and Evidence.EXECUTED in target.evidence:
            yield f"{path}.evidence: executed means on a GPU of that architecture"
        if name != "cpu" and Evidence.INTERPRETED in target.evidence:
            yield f"{path}.evidence: interpreted is evidence for the target cpu"
        sets, environments = definition.dependencies, definition.environments
        if target.dependencies not in sets and target.dependencies != "default":
            yield f"{path}.dependencies: no set {target.dependencies!r}; there is {', '.join(sets)}"
        if target.environment and target.environment not in environments:
            there = ", ".join(environments) or "none"
            yield f"{path}.environment: no environment {target.environment!r}; there is {there}"
        if target.gpus > 1 and Evidence.EXECUTED not in target.evidence:
            yield f"{path}.gpus: more than 1 only where executed is admitted"
        yield from (f"{path}.loads: {file!r} is no relative path" for file in target.loads if not _is_relative(file))


def _environment_errors(definition: Definition) -> Iterator[str]:
    for name, built in definition.environments.items():
        path = f"environments.{name}"
        if not ENVIRONMENT.fullmatch(name):
            yield f"{path}: no name of lower-case letters, digits and -"
        if PurePosixPath(built.script).name != built.script:
            yield f"{path}.script: {built.script!r} is no file of the pack's folder"
        for package, digest in built.files.items():
            if not PACKAGE.fullmatch(package):
                yield f"{path}.files.{package}: no name of a package"
            if not SHA256.fullmatch(digest):
                yield f"{path}.files.{package}: not 64 lower-case hexadecimal digits"


def _ranks_errors(definition: Definition, document: dict[str, Any]) -> Iterator[str]:
    """Say which ranks do not fit a target's GPUs: NCCL wants one for each, and several share one on purpose alone."""
    for name, target in definition.targets.items():
        shares = target.gpus == 1 and "gpus" in document["targets"][name]
        if Evidence.EXECUTED in target.evidence and target.ranks not in (1, target.gpus) and not shares:
            yield (
                f"targets.{name}.ranks: {target.ranks} on {target.gpus} GPU{'s' * (target.gpus > 1)}; "
                f"NCCL wants one GPU a rank (gpus = {target.ranks}); write gpus = 1 where all ranks share one"
            )


def _fix_errors(definition: Definition) -> Iterator[str]:
    """Say what a pack without a patch states that only a patch could give."""
    if definition.has_patch:
        if definition.upstream.is_compiled:
            yield 'fix: a wheel of compiled code cannot be patched; say fix = "none"'
        return
    for name, target in definition.targets.items():
        if target.verdict != Verdict.REPRODUCED:
            yield f"targets.{name}.verdict: {target.verdict}; without a patch it is {Verdict.REPRODUCED}"
        if target.loads:
            yield f"targets.{name}.loads: without a patch no file is changed"
    if definition.head is not None and definition.head.verdict not in (Verdict.REPRODUCED, Verdict.FIXED_UPSTREAM):
        yield f"head.verdict: {definition.head.verdict}; without a patch it is {Verdict.REPRODUCED}"
    if definition.ask is not None:
        yield "ask.patch: the pack says that it has none"
    if definition.upstream_tests is not None:
        yield "upstream_tests: they are run without and with a patch, and there is none"


def _prior_art_errors(definition: Definition) -> Iterator[str]:
    searched = definition.searched
    if searched and not (searched.queries and all(query.strip() for query in searched.queries)):
        yield "searched.queries: name the words that were searched for"
    urls = [thread.url for thread in definition.threads]
    for index, thread in enumerate(definition.threads):
        path = f"threads[{index}]"
        if not THREAD.fullmatch(thread.url):
            yield f"{path}.url: {thread.url!r} is no https://github.com/OWNER/REPO/pull/N (issues, discussions)"
        if urls.index(thread.url) != index:
            yield f"{path}.url: {thread.url} stands there twice"
        if not _is_sentence(thread.says):
            yield f"{path}.says: one sentence, on one line"


def _ask_errors(definition: Definition) -> Iterator[str]:
    ask, action = definition.ask, definition.action
    if ask is not None:
        if not PATCH_NAME.fullmatch(ask.patch) or ask.patch == "fix.patch":
            yield f"ask.patch: {ask.patch!r} is no patch beside fix.patch, such as ask.patch"
        if not ORIGIN.fullmatch(ask.origin):
            yield f"ask.origin: {ask.origin!r} {NO_ORIGIN}"
        if not ask.checks or not all(name.strip() for name in ask.checks):
            yield "ask.checks: name the defect checks that are wrong there"
    if action is not None and not (_is_sentence(action.text) and action.text.endswith(".")):
        yield "action.text: one sentence on one line: file what where, fixed by what, or why nothing"


def _suite_errors(definition: Definition) -> Iterator[str]:
    suite = definition.upstream_tests
    if suite is None:
        return
    if not suite.files:
        yield "upstream_tests.files: name at least one"
    # What begins with a hyphen could be taken for an option.
    odd = [file for file in suite.files if not _is_relative(file) or file[:1] in {"", "-"} or "::" in file]
    yield from (f"upstream_tests.files: {file!r} is no relative path" for file in odd)
    if suite.origin and not ORIGIN.fullmatch(suite.origin):
        yield f"upstream_tests.origin: {suite.origin!r} {NO_ORIGIN}"
    if suite.patch and not PATCH_NAME.fullmatch(suite.patch):
        yield f"upstream_tests.patch: {suite.patch!r} is no patch of the pack's folder"
    members = definition.dependencies.get(suite.dependencies)
    if members is None:
        there = ", ".join(definition.dependencies) or "none"
        yield f"upstream_tests.dependencies: no set {suite.dependencies!r}; there is {there}"
    elif not any(canonicalize_name(name) == "pytest" for name in members):
        yield f"upstream_tests.dependencies: the set {suite.dependencies!r} lacks pytest"
    refused = [name for name in suite.environment if not VARIABLE.fullmatch(name) or OWN_VARIABLES.fullmatch(name)]
    yield from (f"upstream_tests.environment: {name} is no variable that a suite may set" for name in refused)
    if suite.timeout_s <= 0:
        yield "upstream_tests.timeout_s: must be positive, in seconds"


def _check_errors(definition: Definition) -> Iterator[str]:
    one = definition.workaround
    if one is not None and not _is_sentence(one.text):
        yield "workaround.text: what a user can do, on one line"
    if one is not None and not (one.checks and all(name.strip() for name in one.checks)):
        yield "workaround.checks: name the controls that show that it works"
    if not all(name.strip() for name in definition.versions.checks):
        yield "versions.checks: an empty name"


def _name_errors(definition: Definition) -> Iterator[str]:
    """Say which names of the upstream no reader may use as paths, arguments or patterns."""
    upstream = definition.upstream
    if not PACKAGE.fullmatch(upstream.package):
        yield f"upstream.package: {upstream.package!r} is no name of a package"
    if upstream.file and not files.is_bare_name(upstream.file):  # none where a commit is pinned
        yield f"upstream.file: {upstream.file[:80]!r} is no name of a file"
    if not _is_relative(upstream.source_root) or "\\" in upstream.source_root:
        yield f"upstream.source_root: {upstream.source_root!r} leads out of the repository"
    if not REPOSITORY.fullmatch(upstream.repository):
        yield f"upstream.repository: {upstream.repository!r} is no http(s) URL"
    yield from (f"upstream.modules: {name!r} is no import name" for name in upstream.modules if not name.isidentifier())


def _limit_errors(path: str, target: Target) -> Iterator[str]:
    for key, (least, most) in LIMITS.items():
        value = getattr(target, key)
        if not least <= value <= most:
            yield f"{path}.{key}: {value!r} is not between {least} and {most}"
    everywhere = tuple(claim for claim in target.claims if claim != BITWISE_IDENTICAL)
    for key, claims in (("claims", everywhere), ("claims_executed", target.claims_executed)):
        for claim in claims:
            if not CLAIM.fullmatch(claim) or claim in TAKEN:
                yield f"{path}.{key}: {claim!r} is no claim such as MEMORY_SAVE_VERIFIED, or a word of the verdicts"


def _errors(definition: Definition, document: dict[str, Any]) -> Iterator[str]:
    if definition.schema != SCHEMA:
        yield f"schema: {definition.schema} is not the known {SCHEMA}"
    if definition.strength.generated < 0:
        yield "strength.generated: a number of mutants, 0 or more"
    for found in (
        *(_version_errors, _upstream_errors, _target_errors, _environment_errors, _fix_errors),
        *(_prior_art_errors, _ask_errors, _suite_errors, _check_errors, _name_errors),
    ):
        yield from found(definition)
    yield from _ranks_errors(definition, document)
    for name, target in definition.targets.items():
        yield from _limit_errors(f"targets.{name}", target)


def parse(text: str, sets: Mapping[str, dict[str, Dependency]] = {}) -> Definition:
    """Parse a pack.toml with the dependency sets beside it, or raise StructureError with all its errors."""
    try:
        document = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 900 brackets
        raise structure.StructureError([f"not TOML: {error}"]) from None
    errors = list(_control_errors(document))
    if "dependencies" in document and not errors:
        errors = ["dependencies: they stand in requirements.txt, which uv makes"]
    if not errors:
        definition = replace(structure.structure(document, Definition), dependencies=dict(sets))
        errors = list(_errors(definition, document))
    if errors:
        raise structure.StructureError(errors)
    return definition
