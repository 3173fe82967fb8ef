"""Whether a pack is sound: the rules of `runner.py check`."""

import fnmatch
import itertools
import re
from collections.abc import Iterator
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.core.cache import Cache
from harness.core.errors import Finding, HarnessError, UnavailableError, UnreachableError
from harness.core.words import Role, SuiteVerdict, Verdict
from harness.host.eligibility import strongest_evidence
from harness.host.host import Host
from harness.mutate import handwritten
from harness.pack import Pack, patch_text, script_text
from harness.pack.patch_text import PatchedFile
from harness.receipt import staleness
from harness.receipt.receipt import SUITE, Receipt, is_receipt
from harness.receipt.receipt import load as load_receipt
from harness.report import advisories, receipt_check, report
from harness.suites import receipt as suite_receipt
from harness.upstream import patch, tree
from harness.upstream.source import parse_source, pinned_source
from harness.upstream.tree import Tree

SOURCE_FOLDERS_REFUSED = re.compile(r"(?:^|/)(?:tests?|docs?|\.github)/")


def findings(pack: Pack, cache: Cache, host: Host) -> list[Finding]:
    """List everything that is wrong with a pack, all at once; the warnings come last."""
    receipts, found = _read_receipts(pack, host)
    pristine, misfits = _pinned_tree(pack, cache)
    found += map(Finding, (*_script_errors(pack), *_patch_errors(pack), *report.errors(pack)))
    found += misfits
    found += _ask_findings(pack, cache, [*receipts.values()])
    try:
        advisories.workaround(pack)
    except HarnessError as error:
        found.append(Finding(str(error)))
    found += handwritten.findings(pack, pristine)
    found += _suite_findings(pack, host)
    judged_targets = {receipt.target for path, receipt in receipts.items() if path.parent == pack.receipts}
    for name, target in pack.definition.targets.items():
        if name not in judged_targets:
            text = f"{name}: no receipt. Next: runner.py run {pack.name} --target {name}"
            found.append(Finding(text, is_warning=strongest_evidence(host, name, target) is None))
    return sorted(found, key=lambda finding: finding.is_warning)


def _suite_findings(pack: Pack, host: Host) -> Iterator[Finding]:
    """Compare the receipt of upstream's own tests with pack.toml; a warning if the host lacks their GPU."""
    suite = pack.definition.upstream_tests
    next_step = f"Next: runner.py upstream-tests {pack.name} --record"
    try:
        receipt = suite_receipt.load(pack.receipts)
    except HarnessError as error:
        yield Finding(str(error))
        return
    if receipt is None:
        if suite:
            yield Finding(f"receipts/{SUITE} is missing. {next_step}", is_warning=True)
        return
    if reasons := suite_receipt.reasons(pack, receipt):
        is_rerunnable = suite is not None and (not suite.gpu or bool(host.gpus))
        yield Finding(f"{SUITE}: STALE: {'; '.join(reasons)}. {next_step}", is_warning=not is_rerunnable)
    if receipt.verdict != SuiteVerdict.UNBROKEN:
        yield Finding(f"{SUITE}: shows {receipt.verdict}: {receipt.reason}")


def _ask_findings(pack: Pack, cache: Cache, receipts: list[Receipt]) -> Iterator[Finding]:
    """Try the patch of [ask] on its tree, and name its checks that are no defect check of any receipt."""
    ask, path = pack.definition.ask, pack.ask_patch
    if ask is None or path is None:
        return
    lanes = [lane for receipt in receipts for lane in receipt.lanes.values()]
    names = {check.name for lane in lanes for check in lane.checks if check.role == Role.DEFECT}
    missing = [glob for glob in ask.checks if names and not fnmatch.filter(names, glob)]
    yield from (Finding(f"ask.checks: no defect check of a receipt matches {glob!r}") for glob in missing)
    try:
        if path.exists():
            asked = tree.materialize(cache, pack.definition.upstream, parse_source(ask.origin, pack.definition))
            patch.apply(cache, asked, pack.definition.upstream, path, exact=True)
    except UnavailableError as error:
        yield Finding(f"ask.patch was not tried: {error}", is_warning=True)
    except patch.StalePatchError as error:
        yield Finding(f"{path.name} does not apply to ask.origin: {error}")


def _read_receipts(pack: Pack, host: Host) -> tuple[dict[Path, Receipt], list[Finding]]:
    """Read and judge every receipt of a pack; a log that no receipt names is refused."""
    receipts: dict[Path, Receipt] = {}
    found: list[Finding] = []
    loose_logs = set(pack.receipts.rglob("*.log"))
    for path in filter(is_receipt, sorted(pack.receipts.rglob("*.json"))):
        try:
            receipt = load_receipt(path)
        except HarnessError as error:
            found.append(Finding(str(error)))
            loose_logs -= set(path.parent.glob(f"{path.stem}.*.log"))  # the unreadable receipt may name one of them
            continue
        folder = path.parent.name
        reasons = _stale_reasons(pack, receipt, folder)
        if reasons and folder in ("receipts", "ask"):
            found.append(_staleness(pack, receipt, reasons, host, is_asked=folder == "ask"))
        found += map(Finding, _receipt_errors(pack, path, receipt, is_fresh=not reasons))
        loose_logs.discard(path.with_name(receipt.log.file))
        receipts[path] = receipt
    names = sorted(log.relative_to(pack.folder).as_posix() for log in loose_logs)
    return receipts, found + [Finding(f"{name}: no receipt names it. Next: remove it") for name in names]


def _staleness(pack: Pack, receipt: Receipt, reasons: list[str], host: Host, *, is_asked: bool) -> Finding:
    option, folder = ("--upstream ask", "ask/") if is_asked else (f"--target {receipt.target}", "")
    text = f"{folder}{receipt.name}: STALE: {'; '.join(reasons)}. Next: runner.py run {pack.name} {option}"
    return Finding(text, is_warning=not staleness.rerunnable(pack, receipt, host))


def _script_errors(pack: Pack) -> list[str]:
    if not pack.script.exists():
        return ["reproduce.py is missing"]
    text = pack.script.read_text(encoding="utf-8", errors="replace")
    pins, errors = script_text.read(text, has_patch=pack.definition.has_patch)
    return [f"reproduce.py: {error}" for error in (*errors, *_pin_errors(pack, pins))]


def _patch_errors(pack: Pack) -> Iterator[str]:
    if not pack.definition.has_patch:
        strays = (path for path in (*pack.folder.glob("*.patch"), *pack.folder.glob("mutants/**/*")) if path.is_file())
        names = sorted(path.relative_to(pack.folder).as_posix() for path in strays)
        yield from (f'{name}: pack.toml says fix = "none"' for name in names)
        return
    suite = pack.definition.upstream_tests
    paths = [pack.patch, pack.ask_patch]
    yield from (f"{path.name} is missing" for path in dict.fromkeys(paths) if path and not path.exists())
    for path in (pack.patch, pack.own_head_patch, pack.ask_patch):
        if path is not None and path.exists():
            text = path.read_text(encoding="utf-8", errors="replace")
            yield from (f"{path.name}: {error}" for error in patch_errors(text, pack))
    test = pack.upstream_test_patch
    if test.exists():
        files = patch_text.parse(test.read_text(encoding="utf-8", errors="replace"))
        errors = [] if suite else ["pack.toml has no [upstream_tests] that says where it applies"]
        errors += [] if files else ["it names no file"]
        yield from (f"{test.name}: {error}" for error in [*errors, *_index_errors(files)])


def _pinned_tree(pack: Pack, cache: Cache) -> tuple[Tree | None, list[Finding]]:
    """Return the pinned tree, or None if it cannot be fetched, and what is wrong with fix.patch on it."""
    try:
        pristine = tree.materialize(cache, pack.definition.upstream, pinned_source(pack.definition))
    except HarnessError as error:
        finding = Finding(f"fix.patch was not tried: {error}", is_warning=isinstance(error, UnreachableError))
        return None, [finding] if pack.patch.exists() else []
    return pristine, [*map(Finding, _misfits(pack, cache, pristine))] if pack.patch.exists() else []


def _misfits(pack: Pack, cache: Cache, pristine: Tree) -> Iterator[str]:
    """Say where fix.patch does not fit the pinned tree, or leaves unchanged what a target has to load."""
    upstream = pack.definition.upstream
    try:
        patched = patch.apply(cache, pristine, upstream, pack.patch, exact=True)
    except patch.StalePatchError as error:
        yield f"fix.patch does not apply to {upstream.package} {upstream.pin}: {error}"
        return
    changed_files = set(patch.changed_files(pristine, patched))
    for name, target in pack.definition.targets.items():
        for file in target.loads:
            if pristine.path_here(file, upstream.source_root) not in changed_files:
                yield f"targets.{name}.loads: fix.patch does not change {file}"


def _stale_reasons(pack: Pack, receipt: Receipt, folder: str) -> list[str]:
    """Say why a receipt is STALE; a receipt in the folder ``ask`` also has to agree with [ask] of pack.toml."""
    reasons, ask = staleness.reasons(pack, receipt), pack.definition.ask
    if folder != "ask":
        return reasons
    if ask is None:
        return ["pack.toml asks for no patch"]
    commit = parse_source(ask.origin, pack.definition).value
    reasons += ["ask.origin changed"] if receipt.upstream.commit != commit else []
    return reasons + (["ask.checks changed"] if receipt.about != ask.checks else [])


def _index_errors(files: tuple[PatchedFile, ...]) -> list[str]:
    paths = [file.path for file in files if not file.after]
    return [f"{path}: its index line is abbreviated; use git diff --full-index" for path in paths]


def _receipt_errors(pack: Pack, path: Path, receipt: Receipt, *, is_fresh: bool) -> list[str]:
    """Say what is wrong with a receipt, and where it shows something else than pack.toml expects."""
    is_asked, is_own = path.parent.name == "ask", path.parent == pack.receipts
    errors = receipt_check.errors(pack, path, receipt, is_fresh=is_fresh)
    target, head = pack.definition.targets.get(receipt.target), pack.definition.head
    if target is None:
        errors.append(f"pack.toml lists no target {receipt.target}")
    else:
        stated = pack.definition.expected if is_own or head is None else head.verdict
        verdict = Verdict.CONFIRMED if is_asked else stated
        if receipt.verdict != verdict:
            errors.append(f"shows {receipt.verdict}, pack.toml expects {verdict}")
        missing_claims = [claim for claim in target.claims_of(receipt.evidence) if claim not in receipt.claims]
        if missing_claims and is_own:
            errors.append(f"lacks the claims {', '.join(missing_claims)}")
    name = path.relative_to(pack.folder).as_posix()
    return [f"{name}: {error}" for error in errors]


def _pin_errors(pack: Pack, pins: dict[str, str]) -> list[str]:
    upstream = pack.definition.upstream
    expected_versions = {canonicalize_name(upstream.package): {upstream.version or "of no release: a commit is pinned"}}
    for members in pack.definition.dependencies.values():
        for package, dependency in members.items():
            expected_versions.setdefault(canonicalize_name(package), set()).add(dependency.version)
    return [
        f"its header pins {name}=={pins[name]}, pack.toml says {' or '.join(sorted(versions))}"
        for name, versions in expected_versions.items()
        if name in pins and pins[name] not in versions
    ]


def patch_errors(text: str, pack: Pack) -> list[str]:
    """Say how a patch differs from the commit that upstream would merge."""
    head, _, body = text.partition("diff --git ")
    errors = [] if text.strip() else ["it is empty"]
    if not head.startswith("Subject: "):
        errors.append("it does not open with 'Subject: '")
    if f"SPDX-License-Identifier: {pack.definition.upstream.license}" not in head:
        errors.append(f"it has no line 'SPDX-License-Identifier: {pack.definition.upstream.license}'")
    if re.search(r"(?m)^(?:From|Signed-off-by|Author): ", head):
        errors.append("From and sign-off are a human's (git commit -s); leave them out")
    files = patch_text.parse(text)
    if not files or body.count("\ndiff --git ") + 1 != len(files):
        errors.append("some file of it cannot be read (binary, renamed?)")
    errors += _index_errors(files)
    errors += [f"{file.path} is no source" for file in files if SOURCE_FOLDERS_REFUSED.search(file.path)]
    return errors


def duplicate_numbers(packs: list[Pack]) -> dict[str, Finding]:
    """Name the packs that share a number with one before them: a number is never used again."""
    numbered = sorted((pack.name.partition("_")[0], pack.name) for pack in packs)
    return {
        name: Finding(f"its number {number} is that of {other}")
        for (number_before, other), (number, name) in itertools.pairwise(numbered)
        if number == number_before
    }
