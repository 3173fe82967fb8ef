"""Whether what a pack asks of its upstream holds: its patch, the checks that it names, its receipts."""

from __future__ import annotations

import fnmatch

from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import Role
from harness.pack.model import Pack
from harness.receipt import receipt, staleness
from harness.receipt.receipt import Receipt
from harness.upstream import patch, tree
from harness.upstream.source import of_git


def missing_files(pack: Pack) -> list[str]:
    """Name the patches that pack.toml speaks of and the folder lacks."""
    suite = pack.definition.upstream_tests
    wanted = [*([pack.ask_patch] if pack.ask_patch else []), *([pack.suite_patch(suite)] if suite else [])]
    errors = [f"{path.name} is missing" for path in dict.fromkeys(wanted) if path != pack.patch and not path.exists()]
    if pack.upstream_test_patch.exists():
        if suite is None:
            errors.append("upstream_test.patch: pack.toml has no [upstream_tests] that says where it applies")
        listed = patch.parse(pack.upstream_test_patch.read_text(encoding="utf-8", errors="replace"))
        errors += [] if listed else ["upstream_test.patch: it names no file"]
        errors += [
            f"upstream_test.patch: {one.path}: its index line is abbreviated; use git diff --full-index"
            for one in listed
            if not one.after
        ]
    return errors


def check_errors(pack: Pack) -> list[str]:
    """Name what [ask] calls a check and no receipt of the pack knows as a defect check, where there are receipts."""
    asked = pack.definition.ask
    if asked is None or not asked.checks:
        return []
    known: set[str] = set()
    for path in sorted(filter(receipt.is_receipt, pack.receipts.rglob("*.json"))):
        try:
            lanes = receipt.load(path).lanes.values()
        except HarnessError:
            continue  # told with the receipts themselves
        known |= {check.name for lane in lanes for check in lane.checks if check.role == Role.DEFECT}
    return [
        f"ask.checks: no defect check of a receipt matches {glob!r}"
        for glob in asked.checks
        if known and not any(fnmatch.fnmatchcase(name, glob) for name in known)
    ]


def stale(pack: Pack, cache: Cache) -> str:
    """Say why the patch does not apply to the tree that [ask] names; empty where it does, or there is none.

    Raises:
        UnavailableError: the tree cannot be had.

    """
    asked, path = pack.definition.ask, pack.ask_patch
    if asked is None or path is None or not path.exists():
        return ""
    upstream = pack.definition.upstream
    pristine = tree.materialize(cache, upstream, of_git(asked.origin))
    try:
        patch.apply(cache, pristine, upstream, path, exact=True)
    except patch.StalePatchError as error:
        return f"{path.name} does not apply to ask.origin: {error}"
    return ""


def receipt_errors(pack: Pack, one: Receipt) -> list[str]:
    """Say where a receipt of the patch that upstream is asked to merge speaks of something else than pack.toml."""
    asked = pack.definition.ask
    if asked is None or not asked.patch:
        return ["pack.toml asks for no patch"]
    found = staleness.reasons(pack, one)
    if one.upstream.commit != of_git(asked.origin).value:
        found.append("ask.origin changed")
    if one.about != asked.checks:
        found.append("ask.checks changed")
    return found
