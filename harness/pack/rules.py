"""Reading a pack.toml strictly, with all its errors at once. `forms` has the type of each key."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import tomli

from harness.core import structure
from harness.core.words import Evidence, Fix, Verdict
from harness.pack.model import CPU, TESTS, Definition, Dependency, Upstream


def _upstream_errors(upstream: Upstream) -> Iterator[str]:
    release = bool(upstream.version and upstream.file and upstream.sha256) and upstream.date is None
    release_fields = (upstream.version, upstream.file, upstream.sha256)
    commit = bool(upstream.commit and upstream.date and upstream.repository.startswith("https://"))
    if not release and (any(release_fields) or not commit):
        yield "upstream: a release has version, file and sha256; a commit has commit, date and an https:// repository"


def _patch_errors(definition: Definition) -> Iterator[str]:
    """Refuse keys that need a patch in a pack without one, and keys that a compiled upstream cannot have."""
    head = definition.head
    if definition.upstream.is_compiled and (head or definition.has_patch):
        yield 'fix, head: a compiled wheel is judged as it is, without a patch (fix = "none") and without a commit'
    if head and head.verdict == Verdict.FIXED_UPSTREAM and not head.fixed_by:
        yield "head.fixed_by: name the commit that fixed it"
    if not definition.has_patch:
        if head and head.verdict not in (Verdict.REPRODUCED, Verdict.FIXED_UPSTREAM):
            yield "head: without a patch the verdict is REPRODUCED, or FIXED_UPSTREAM"
        if any(target.loads for target in definition.targets.values()):
            yield "targets: without a patch no file is changed"
        if definition.ask or definition.upstream_tests:
            yield "ask, upstream_tests: without a patch there is neither"


def _target_errors(definition: Definition, document: dict[str, Any]) -> Iterator[str]:
    for name, target in definition.targets.items():
        path, executes = f"targets.{name}", Evidence.EXECUTED in target.evidence
        if not target.evidence:
            yield f"{path}.evidence: name at least one of {', '.join(Evidence)}"
        if name == CPU and executes:
            yield f"{path}.evidence: executed means on a GPU of that architecture"
        if name != CPU and Evidence.INTERPRETED in target.evidence:
            yield f"{path}.evidence: interpreted is evidence for the target cpu"
        if target.environment not in ("", *definition.environments):
            yield f"{path}.environment: there is no environment {target.environment!r}"
        if target.gpus > 1 and not executes:
            yield f"{path}.gpus: more than 1 only where executed is admitted"
        # NCCL wants a GPU for each rank; several ranks share one only if pack.toml says so.
        shares = target.gpus == 1 and "gpus" in document["targets"][name]
        if executes and target.ranks not in (1, target.gpus) and not shares:
            yield (
                f"{path}.ranks: {target.ranks} on {target.gpus} GPU{'s' * (target.gpus > 1)}; "
                f"NCCL wants one GPU a rank (gpus = {target.ranks}); write gpus = 1 where all ranks share one"
            )


def _set_errors(definition: Definition) -> Iterator[str]:
    used = {f"targets.{name}": target.dependencies for name, target in definition.targets.items()}
    used |= {"upstream_tests": TESTS} if definition.upstream_tests else {}
    for path, name in used.items():
        if name not in ("default", *definition.dependencies):
            available = ", ".join(definition.dependencies) or "none"
            yield f"{path}.dependencies: no set {name!r}; there is {available}"


def _complete(document: dict[str, Any], patched: tuple[str, ...]) -> None:
    """Give each target the pack's defaults for the keys that it does not state."""
    base = {"loads": () if document.get("fix") == Fix.NONE else patched, "claims": document.pop("claims", ())}
    targets = document.get("targets")
    if isinstance(targets, dict):
        document["targets"] = {name: base | keys if isinstance(keys, dict) else keys for name, keys in targets.items()}


def parse(text: str, sets: Mapping[str, dict[str, Dependency]] = {}, patched: tuple[str, ...] = ()) -> Definition:
    """Parse a pack.toml with the dependency sets beside it; StructureError holds all its errors.

    `patched` are the files of its fix.patch.
    """
    try:
        document = tomli.loads(text)
    except (ValueError, RecursionError) as error:  # a number of 5000 digits, 900 brackets
        raise structure.StructureError([f"not TOML: {error}"]) from None
    if "dependencies" in document:
        raise structure.StructureError(["dependencies: they stand in requirements.txt, which uv makes"])
    _complete(document, patched)
    definition = replace(structure.structure(document, Definition), dependencies=dict(sets))
    errors = [*_upstream_errors(definition.upstream), *_patch_errors(definition), *_set_errors(definition)]
    errors += _target_errors(definition, document)
    if errors:
        raise structure.StructureError(errors)
    return definition
