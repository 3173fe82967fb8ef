"""Reading a pack.toml: strict, and with all its errors at once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

import tomli
from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.core import structure
from harness.core.words import Evidence, Verdict, is_target
from harness.pack import values
from harness.pack.model import Action, Ask, Definition, Dependency, Upstream, UpstreamTests

SCHEMA = 1
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
ENVIRONMENT = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")
THREAD = re.compile(r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull|discussions)/\d+(?:#[\w-]+)?")
FILE_URL = re.compile(r"https://[\w.-]+(?:/[\w.+-]+)+")
ORIGIN = re.compile(r"git\+https://[\w.-]+(?:/[\w.-]+)+@[0-9a-f]{40}")
PATCH_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.patch")
VARIABLE = re.compile(r"[A-Z][A-Z0-9_]*")
#: What a lane sets itself, or what decides which code runs.
OWN_VARIABLES = re.compile(r"PATH|HOME|TMPDIR|(?:PYTHON|PYTEST|LD_|CUDA_VISIBLE|XDG_|REPRODUCER_).*")
PYTEST = "pytest"


def _version_errors(definition: Definition) -> list[str]:
    errors = []
    for path, text in (("upstream.version", definition.upstream.version), ("fixed_in", definition.fixed_in)):
        try:
            Version(text or "0")
        except InvalidVersion:
            errors.append(f"{path}: {text!r} is no version")
    for path in ("python", "torch", "triton"):
        text = getattr(definition.requires, path)
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            errors.append(f"requires.{path}: {text!r} is no version range such as '>=2.6,<3'")
    return errors


def _release_errors(upstream: Upstream) -> list[str]:
    errors = []
    if not upstream.version:
        errors.append("upstream.version: a release has one; a pinned commit has neither version, file nor sha256")
    if not SHA256_PATTERN.fullmatch(upstream.sha256):
        errors.append("upstream.sha256: not 64 lower-case hexadecimal digits")
    if not upstream.file.endswith((".tar.gz", ".zip", ".whl")) or "/" in upstream.file:
        errors.append(f"upstream.file: {upstream.file!r} is no .tar.gz, .zip or .whl of the index")
    if upstream.date is not None:
        errors.append("upstream.date: of a pinned commit; a release has none")
    if upstream.url and not (FILE_URL.fullmatch(upstream.url) and upstream.url.endswith(f"/{upstream.file}")):
        errors.append(f"upstream.url: {upstream.url!r} is no https:// URL of {upstream.file}")
    return errors


def _commit_errors(upstream: Upstream) -> list[str]:
    errors = []
    if upstream.version or upstream.sha256:
        errors.append("upstream.file: the key is missing; a pinned commit has neither version, file nor sha256")
    elif upstream.date is None:
        errors.append("upstream.date: a pinned commit states its date")
    if upstream.url or upstream.commit_unchecked:
        errors.append("upstream.url, upstream.commit_unchecked: of a release; a pinned commit has neither")
    if not upstream.repository.startswith("https://"):
        errors.append(f"upstream.repository: {upstream.repository!r} is no https:// URL")
    return errors


def _upstream_errors(definition: Definition) -> list[str]:
    upstream, head = definition.upstream, definition.head
    errors = _commit_errors(upstream) if upstream.is_commit else _release_errors(upstream)
    if not COMMIT_PATTERN.fullmatch(upstream.commit) and (upstream.commit or upstream.is_commit):
        errors.append("upstream.commit: not 40 lower-case hexadecimal digits")
    if not upstream.modules:
        errors.append("upstream.modules: name at least one import name")
    if head and not COMMIT_PATTERN.fullmatch(head.commit):
        errors.append("head.commit: not 40 lower-case hexadecimal digits")
    if head and upstream.is_compiled:
        errors.append("head: the pinned wheel is compiled, and a commit is judged without being built")
    if head and head.verdict == Verdict.FIXED_UPSTREAM and not head.fixed_by:
        errors.append("head.fixed_by: name the commit that fixed it")
    return errors


def _target_errors(definition: Definition) -> list[str]:
    errors = [] if definition.targets else ["targets: name at least one"]
    for name, target in definition.targets.items():
        path = f"targets.{name}"
        if not is_target(name):
            errors.append(f"{path}: no target such as cpu, sm_80, sm_90a (with the suffix from sm_90 on)")
        if not target.evidence:
            errors.append(f"{path}.evidence: name at least one of {', '.join(Evidence)}")
        if name == "cpu" and Evidence.EXECUTED in target.evidence:
            errors.append(f"{path}.evidence: executed means on a GPU of that architecture")
        if name != "cpu" and Evidence.INTERPRETED in target.evidence:
            errors.append(f"{path}.evidence: interpreted is evidence for the target cpu")
        if target.dependencies not in definition.dependencies and target.dependencies != "default":
            errors.append(
                f"{path}.dependencies: no set {target.dependencies!r}; there is {', '.join(definition.dependencies)}"
            )
        if target.environment and target.environment not in definition.environments:
            errors.append(
                f"{path}.environment: no environment {target.environment!r}; "
                f"there is {', '.join(definition.environments) or 'none'}"
            )
        if target.gpus < 1 or (target.gpus > 1 and Evidence.EXECUTED not in target.evidence):
            errors.append(f"{path}.gpus: at least 1, and more only where executed is admitted")
        errors.extend(
            f"{path}.loads: {file!r} is no relative path"
            for file in target.loads
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts
        )
    return errors


def _ranks_errors(definition: Definition, document: dict[str, Any]) -> list[str]:
    """Say which ranks do not fit a target's GPUs: NCCL wants one for each, and several share one on purpose alone."""
    errors = []
    for name, target in definition.targets.items():
        path = f"targets.{name}.ranks"
        if target.ranks < 1:
            errors.append(f"{path}: at least 1")
        shares = target.gpus == 1 and "gpus" in document["targets"][name]
        if Evidence.EXECUTED in target.evidence and target.ranks not in (1, target.gpus) and not shares:
            errors.append(
                f"{path}: {target.ranks} on {target.gpus} GPU{'s' * (target.gpus > 1)}; NCCL wants one GPU a rank "
                f"(gpus = {target.ranks}); write gpus = 1 where all ranks share one"
            )
    return errors


def _fix_errors(definition: Definition) -> list[str]:
    """Say what a pack without a patch states that only a patch could give."""
    if definition.has_patch:
        compiled = definition.upstream.is_compiled
        return ['fix: a wheel of compiled code cannot be patched; say fix = "none"'] if compiled else []
    errors = [
        f"targets.{name}.verdict: {target.verdict}; without a patch it is {Verdict.REPRODUCED}"
        for name, target in definition.targets.items()
        if target.verdict != Verdict.REPRODUCED
    ]
    errors += [
        f"targets.{name}.loads: without a patch no file is changed"
        for name, target in definition.targets.items()
        if target.loads
    ]
    if definition.head is not None and definition.head.verdict not in (Verdict.REPRODUCED, Verdict.FIXED_UPSTREAM):
        errors.append(f"head.verdict: {definition.head.verdict}; without a patch it is {Verdict.REPRODUCED}")
    if definition.ask is not None and definition.ask.patch:
        errors.append("ask.patch: the pack says that it has none")
    if definition.upstream_tests is not None:
        errors.append("upstream_tests: they are run without and with a patch, and there is none")
    return errors


def _environment_errors(definition: Definition) -> list[str]:
    errors = []
    for name, built in definition.environments.items():
        path = f"environments.{name}"
        if not ENVIRONMENT.fullmatch(name):
            errors.append(f"{path}: no name of lower-case letters, digits and -")
        if PurePosixPath(built.script).name != built.script:
            errors.append(f"{path}.script: {built.script!r} is no file of the pack's folder")
        errors += [
            f"{path}.files.{package}: not 64 lower-case hexadecimal digits"
            for package, digest in built.files.items()
            if not SHA256_PATTERN.fullmatch(digest)
        ]
    return errors


def _prior_art_errors(definition: Definition) -> list[str]:
    errors = []
    searched = definition.searched
    if searched and not (searched.queries and all(query.strip() for query in searched.queries)):
        errors.append("searched.queries: name the words that were searched for")
    urls = [thread.url for thread in definition.threads]
    for index, thread in enumerate(definition.threads):
        path = f"threads[{index}]"
        if not THREAD.fullmatch(thread.url):
            errors.append(
                f"{path}.url: {thread.url!r} is no https://github.com/OWNER/REPO/pull/N (issues, discussions)"
            )
        if urls.index(thread.url) != index:
            errors.append(f"{path}.url: {thread.url} stands there twice")
        if not thread.says.strip() or "\n" in thread.says:
            errors.append(f"{path}.says: one sentence, on one line")
    return errors


def _action_errors(action: Action | None) -> list[str]:
    if action is None or (action.text.strip() and "\n" not in action.text and action.text.endswith(".")):
        return []
    return ["action.text: one sentence on one line: file what where, fixed by what, or why nothing"]


def _ask_errors(ask: Ask | None) -> list[str]:
    if ask is None:
        return []
    errors = []
    given = {"patch": ask.patch, "origin": ask.origin, "date": ask.date, "checks": ask.checks}
    missing = [name for name, value in given.items() if not value]
    if 0 < len(missing) < len(given):
        errors.append(f"ask: with one of {', '.join(given)} all four stand there; {', '.join(missing)} is missing")
    if ask.patch and (not PATCH_NAME.fullmatch(ask.patch) or ask.patch == "fix.patch"):
        errors.append(f"ask.patch: {ask.patch!r} is no patch beside fix.patch, such as ask.patch")
    if ask.origin and not ORIGIN.fullmatch(ask.origin):
        errors.append(f"ask.origin: {ask.origin!r} is no git+https://HOST/OWNER/REPO@COMMIT with 40 digits")
    if not all(name.strip() for name in ask.checks):
        errors.append("ask.checks: an empty name")
    return errors


def _workaround_errors(definition: Definition) -> list[str]:
    one = definition.workaround
    if one is None:
        return []
    errors = [] if one.text.strip() and "\n" not in one.text else ["workaround.text: what a user can do, on one line"]
    if not one.checks or not all(name.strip() for name in one.checks):
        errors.append("workaround.checks: name the controls that show that it works")
    return errors


def _versions_errors(definition: Definition) -> list[str]:
    named = all(name.strip() for name in definition.versions.checks)
    return [] if named else ["versions.checks: an empty name"]


def _suite_errors(definition: Definition, suite: UpstreamTests | None) -> list[str]:
    if suite is None:
        return []
    errors = [] if suite.files else ["upstream_tests.files: name at least one"]
    errors += [f"upstream_tests.files: {file!r} is no relative path" for file in suite.files if not _is_inside(file)]
    if suite.origin and not ORIGIN.fullmatch(suite.origin):
        errors.append(
            f"upstream_tests.origin: {suite.origin!r} is no git+https://HOST/OWNER/REPO@COMMIT with 40 digits"
        )
    if suite.patch and not PATCH_NAME.fullmatch(suite.patch):
        errors.append(f"upstream_tests.patch: {suite.patch!r} is no patch of the pack's folder")
    members = definition.dependencies.get(suite.dependencies)
    if members is None:
        there = ", ".join(definition.dependencies) or "none"
        errors.append(f"upstream_tests.dependencies: no set {suite.dependencies!r}; there is {there}")
    elif PYTEST not in {str(canonicalize_name(name)) for name in members}:
        errors.append(f"upstream_tests.dependencies: the set {suite.dependencies!r} lacks pytest")
    for name in suite.environment:
        if not VARIABLE.fullmatch(name) or OWN_VARIABLES.fullmatch(name):
            errors.append(f"upstream_tests.environment: {name} is no variable that a suite may set")
    if suite.timeout_s <= 0:
        errors.append("upstream_tests.timeout_s: must be positive, in seconds")
    return errors


def _is_inside(file: str) -> bool:
    """Whether a path leads to something inside the repository, and could be taken for no option."""
    path = PurePosixPath(file)
    return bool(file) and not path.is_absolute() and ".." not in path.parts and file[0] != "-" and "::" not in file


def parse(text: str, sets: Mapping[str, dict[str, Dependency]] = {}) -> Definition:
    """Parse a pack.toml with the dependency sets beside it, or raise StructureError with all its errors."""
    try:
        document = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 900 brackets
        raise structure.StructureError([f"not TOML: {error}"]) from None
    hidden = values.text_errors(document)
    if hidden:
        raise structure.StructureError(hidden)
    if "dependencies" in document:
        raise structure.StructureError(["dependencies: they stand in requirements.txt, which uv makes"])
    definition = replace(structure.structure(document, Definition), dependencies=dict(sets))
    errors = [] if definition.schema == SCHEMA else [f"schema: {definition.schema} is not the known {SCHEMA}"]
    errors += _version_errors(definition) + _upstream_errors(definition)
    if definition.strength.generated < 0:
        errors.append("strength.generated: a number of mutants, 0 or more")
    errors += _target_errors(definition) + _environment_errors(definition)
    errors += _ranks_errors(definition, document)
    errors += _fix_errors(definition) + _prior_art_errors(definition)
    errors += _ask_errors(definition.ask) + _action_errors(definition.action)
    errors += _suite_errors(definition, definition.upstream_tests) + _workaround_errors(definition)
    errors += _versions_errors(definition)
    errors += values.errors(definition)
    if errors:
        raise structure.StructureError(errors)
    return definition
