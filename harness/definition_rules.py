"""Reading a pack.toml: strict, and with all its errors at once."""

from __future__ import annotations

import re
import tomllib
from pathlib import PurePosixPath

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.version import InvalidVersion, Version

from harness import strict
from harness.definition import Definition
from harness.words import Evidence, Verdict, is_target

SCHEMA = 1
SHA256_PATTERN = re.compile(r"[0-9a-f]{64}")
COMMIT_PATTERN = re.compile(r"[0-9a-f]{40}")
TAG_PATTERN = re.compile(r"cp3\d+|any")
ENVIRONMENT = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")


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


def _upstream_errors(definition: Definition) -> list[str]:
    upstream, head = definition.upstream, definition.head
    errors = []
    if not SHA256_PATTERN.fullmatch(upstream.sha256):
        errors.append("upstream.sha256: not 64 lower-case hexadecimal digits")
    if not COMMIT_PATTERN.fullmatch(upstream.commit):
        errors.append("upstream.commit: not 40 lower-case hexadecimal digits")
    if not upstream.file.endswith((".tar.gz", ".zip", ".whl")) or "/" in upstream.file:
        errors.append(f"upstream.file: {upstream.file!r} is no .tar.gz, .zip or .whl of the index")
    if not upstream.modules:
        errors.append("upstream.modules: name at least one import name")
    if head and not COMMIT_PATTERN.fullmatch(head.commit):
        errors.append("head.commit: not 40 lower-case hexadecimal digits")
    if head and head.verdict == Verdict.FIXED_UPSTREAM and not head.fixed_by:
        errors.append("head.fixed_by: name the commit that mended it")
    return errors


def _companion_errors(definition: Definition) -> list[str]:
    errors = []
    for name, members in definition.companions.items():
        for package, companion in members.items():
            for tag, digest in companion.sha256.items():
                path = f"companions.{name}.{package}.sha256.{tag}"
                if not TAG_PATTERN.fullmatch(tag):
                    errors.append(f"{path}: no Python tag such as cp311, or any")
                if not SHA256_PATTERN.fullmatch(digest):
                    errors.append(f"{path}: not 64 lower-case hexadecimal digits")
            if not companion.sha256:
                errors.append(f"companions.{name}.{package}.sha256: name at least one Python tag")
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
        if target.companions not in definition.companions and target.companions != "default":
            errors.append(
                f"{path}.companions: no set {target.companions!r}; there is {', '.join(definition.companions)}"
            )
        if target.timeout_s <= 0:
            errors.append(f"{path}.timeout_s: must be positive, in seconds")
        if target.environment and not ENVIRONMENT.fullmatch(target.environment):
            errors.append(f"{path}.environment: {target.environment!r} is no name of lower-case letters, digits and -")
        errors.extend(
            f"{path}.loads: {file!r} is no relative path"
            for file in target.loads
            if PurePosixPath(file).is_absolute() or ".." in PurePosixPath(file).parts
        )
    return errors


def parse(text: str) -> Definition:
    """Parse a pack.toml, or raise StructureError with all its errors."""
    try:
        document = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise strict.StructureError([f"not TOML: {error}"]) from None
    definition = strict.structure(document, Definition)
    errors = [] if definition.schema == SCHEMA else [f"schema: {definition.schema} is not the known {SCHEMA}"]
    errors += _version_errors(definition) + _upstream_errors(definition)
    errors += _companion_errors(definition) + _target_errors(definition)
    if errors:
        raise strict.StructureError(errors)
    return definition
