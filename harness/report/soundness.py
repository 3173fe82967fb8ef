"""Whether a pack is sound: the rules of `runner.py check`."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.core.words import Role, SuiteVerdict, Verdict
from harness.host.eligibility import strongest_evidence
from harness.host.host import Host
from harness.mutate import soundness as wrong_fixes
from harness.pack import script_text
from harness.pack.model import Pack
from harness.receipt import staleness
from harness.receipt.receipt import SUITE, Receipt, is_receipt
from harness.receipt.receipt import load as load_receipt
from harness.report import advisories, receipt_check, report
from harness.suites import receipt as suite_receipt
from harness.upstream import patch, tree
from harness.upstream.patch import PatchedFile
from harness.upstream.source import Source, parse_git_source, pinned_source
from harness.upstream.tree import Tree

SOURCE_FOLDERS_REFUSED = re.compile(r"(?:^|/)(?:tests?|docs?|\.github)/")


@dataclass(frozen=True)
class Finding:
    """A rule that a pack breaks; a warning does not make `check` fail."""

    pack: str
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Checker:
    """Checks one pack by the rules."""

    pack: Pack
    cache: Cache
    host: Host

    def findings(self) -> list[Finding]:
        """List everything that is wrong with the pack, all at once."""
        receipts, stale_findings, errors = self._judge_receipts()
        errors += self._script_errors() + self._patch_file_errors() + self._patch_tree_errors()
        errors += [*report.errors(self.pack), *self._ask_errors([*receipts.values()]), *self._workaround_errors()]
        warnings: list[str] = []
        errors += wrong_fixes.errors(self.pack, self._pinned_tree(), warnings)
        findings = [Finding(self.pack.name, text) for text in errors]
        findings += self._missing_receipts(receipts) + stale_findings
        findings += [Finding(self.pack.name, text, warning=True) for text in warnings]
        return findings + self._ask_findings() + self._suite_findings()

    def _pinned_tree(self) -> Tree | None:
        """Return the pinned tree; None where it cannot be fetched."""
        try:
            return tree.materialize(self.cache, self.pack.definition.upstream, pinned_source(self.pack.definition))
        except HarnessError:
            return None

    def _workaround_errors(self) -> list[str]:
        try:
            advisories.workaround(self.pack)
        except HarnessError as error:
            return [str(error)]
        return []

    def _suite_findings(self) -> list[Finding]:
        """Compare the receipt of upstream's own tests with pack.toml; a warning where the host lacks their GPU."""
        suite = self.pack.definition.upstream_tests
        next_step = f"Next: runner.py upstream-tests {self.pack.name} --record"
        try:
            receipt = suite_receipt.load(self.pack.receipts)
        except HarnessError as error:
            return [Finding(self.pack.name, str(error))]
        if receipt is None:
            text = f"receipts/{SUITE} is missing. {next_step}"
            return [Finding(self.pack.name, text, warning=True)] if suite else []
        reasons = suite_receipt.reasons(self.pack, receipt)
        is_rerunnable = suite is not None and (not suite.gpu or bool(self.host.gpus))
        findings = []
        if reasons:
            text = f"{SUITE}: STALE: {'; '.join(reasons)}. {next_step}"
            findings.append(Finding(self.pack.name, text, warning=not is_rerunnable))
        if receipt.verdict != SuiteVerdict.UNBROKEN:
            findings.append(Finding(self.pack.name, f"{SUITE}: shows {receipt.verdict}: {receipt.reason}"))
        return findings

    def _ask_findings(self) -> list[Finding]:
        """Say why the patch of [ask] does not apply to the tree of [ask]."""
        ask, path = self.pack.definition.ask, self.pack.ask_patch
        if ask is None or path is None or not path.exists():
            return []
        try:
            self._apply(path, parse_git_source(ask.origin))
        except UnavailableError as error:
            return [Finding(self.pack.name, f"ask.patch was not tried: {error}", warning=True)]
        except patch.StalePatchError as error:
            return [Finding(self.pack.name, f"{path.name} does not apply to ask.origin: {error}")]
        return []

    def _apply(self, path: Path, origin: Source) -> tuple[Tree, Tree]:
        """Return a tree, and its copy with the patch at `path`."""
        pristine = tree.materialize(self.cache, self.pack.definition.upstream, origin)
        return pristine, patch.apply(self.cache, pristine, self.pack.definition.upstream, path, exact=True)

    def _ask_errors(self, receipts: list[Receipt]) -> list[str]:
        """Name the checks of [ask] that are no defect check of any receipt, where there are receipts."""
        ask, lanes = self.pack.definition.ask, [lane for receipt in receipts for lane in receipt.lanes.values()]
        defect_names = {check.name for lane in lanes for check in lane.checks if check.role == Role.DEFECT}
        return [
            f"ask.checks: no defect check of a receipt matches {glob!r}"
            for glob in (ask.checks if ask else ())
            if defect_names and not any(fnmatch.fnmatchcase(name, glob) for name in defect_names)
        ]

    def _judge_receipts(self) -> tuple[dict[Path, Receipt], list[Finding], list[str]]:
        receipts: dict[Path, Receipt] = {}
        stale_findings: list[Finding] = []
        errors: list[str] = []
        loose_logs = set(self.pack.receipts.rglob("*.log"))
        for path in filter(is_receipt, sorted(self.pack.receipts.rglob("*.json"))):
            try:
                receipt = load_receipt(path)
            except HarnessError as error:
                errors.append(str(error))
                loose_logs -= set(path.parent.glob(f"{path.stem}.*.log"))  # the unreadable receipt may name one of them
                continue
            reasons = _stale_reasons(self.pack, receipt, path.parent.name)
            stale_findings += self._stale_findings(path, receipt, reasons)
            errors += _receipt_errors(self.pack, path, receipt, is_fresh=not reasons)
            loose_logs.discard(path.with_name(receipt.log.file))
            receipts[path] = receipt
        for log in sorted(loose_logs):
            errors.append(f"{log.relative_to(self.pack.folder).as_posix()}: no receipt names it. Next: remove it")
        return receipts, stale_findings, errors

    def _script_errors(self) -> list[str]:
        if not self.pack.script.exists():
            return ["reproduce.py is missing"]
        text = self.pack.script.read_text(encoding="utf-8", errors="replace")
        if self.pack.definition.ordinary is not None:  # an ordinary script, which prints no sentinel
            return [] if script_text.HEADER.search(text) else ["reproduce.py: it has no PEP 723 header"]
        pins, errors = script_text.read(text, has_patch=self.pack.definition.has_patch)
        return [f"reproduce.py: {error}" for error in errors] + _pin_errors(self.pack, pins)

    def _patch_file_errors(self) -> list[str]:
        if not self.pack.definition.has_patch:
            folder = self.pack.folder
            strays = (path for path in (*folder.glob("*.patch"), *folder.glob("mutants/**/*")) if path.is_file())
            names = sorted(path.relative_to(folder).as_posix() for path in strays)
            return [f'{name}: pack.toml says fix = "none"' for name in names]
        suite = self.pack.definition.upstream_tests
        paths = [self.pack.patch, self.pack.ask_patch, self.pack.suite_patch(suite) if suite else None]
        errors = [f"{path.name} is missing" for path in dict.fromkeys(paths) if path and not path.exists()]
        for path in (self.pack.patch, self.pack.own_head_patch, self.pack.ask_patch):
            if path is None or not path.exists():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            errors += [f"{path.name}: {error}" for error in patch_errors(text, self.pack)]
        test = self.pack.upstream_test_patch
        if test.exists():
            if suite is None:
                errors.append(f"{test.name}: pack.toml has no [upstream_tests] that says where it applies")
            files = patch.parse(test.read_text(encoding="utf-8", errors="replace"))
            errors += [] if files else [f"{test.name}: it names no file"]
            errors += [f"{test.name}: {error}" for error in _index_errors(files)]
        return errors

    def _patch_tree_errors(self) -> list[str]:
        upstream = self.pack.definition.upstream
        if not self.pack.patch.exists():
            return []
        try:
            pristine, patched = self._apply(self.pack.patch, pinned_source(self.pack.definition))
        except patch.StalePatchError as error:
            return [f"fix.patch does not apply to {upstream.package} {upstream.pin}: {error}"]
        except UnavailableError as error:
            return [f"fix.patch was not tried: {error}"]
        changed_files = set(patch.changed_files(pristine, patched))
        return [
            f"targets.{name}.loads: fix.patch does not change {path}"
            for name, target in self.pack.definition.targets.items()
            for path in target.loads
            if pristine.path_here(path, upstream.source_root) not in changed_files
        ]

    def _missing_receipts(self, receipts: dict[Path, Receipt]) -> list[Finding]:
        judged_targets = {receipt.target for path, receipt in receipts.items() if path.parent == self.pack.receipts}
        message = f"no receipt. Next: runner.py run {self.pack.name} --target"
        return [
            Finding(
                self.pack.name, f"{name}: {message} {name}", warning=strongest_evidence(self.host, name, target) is None
            )
            for name, target in self.pack.definition.targets.items()
            if name not in judged_targets
        ]

    def _stale_findings(self, path: Path, receipt: Receipt, reasons: list[str]) -> list[Finding]:
        """Say that a receipt is STALE: a warning where this host cannot make the receipt anew."""
        folder = path.parent.name
        if not reasons or folder not in ("receipts", "ask"):
            return []
        option, name = f"--target {receipt.target}", receipt.name
        if folder == "ask":
            option, name = "--upstream ask", f"ask/{receipt.name}"
        text = f"{name}: STALE: {'; '.join(reasons)}. Next: runner.py run {self.pack.name} {option}"
        return [Finding(self.pack.name, text, warning=not staleness.rerunnable(self.pack, receipt, self.host))]


def _stale_reasons(pack: Pack, receipt: Receipt, folder: str) -> list[str]:
    """Say why a receipt is STALE; a receipt in the folder ``ask`` also has to agree with [ask] of pack.toml."""
    reasons, ask = staleness.reasons(pack, receipt), pack.definition.ask
    if folder != "ask":
        return reasons
    if ask is None or not ask.patch:
        return ["pack.toml asks for no patch"]
    reasons += ["ask.origin changed"] if receipt.upstream.commit != parse_git_source(ask.origin).value else []
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
        verdict = Verdict.CONFIRMED if is_asked else target.verdict if is_own or head is None else head.verdict
        if receipt.verdict != verdict:
            errors.append(f"shows {receipt.verdict}, pack.toml expects {verdict}")
        missing_claims = [claim for claim in target.claims_of(receipt.evidence) if claim not in receipt.claims]
        if missing_claims and is_own:
            errors.append(f"lacks the claims {', '.join(missing_claims)}")
    name = path.relative_to(pack.folder).as_posix()
    return [f"{name}: {error}" for error in errors]


def _pin_errors(pack: Pack, pins: dict[str, str]) -> list[str]:
    """Compare the pins of a script's header with pack.toml."""
    upstream = pack.definition.upstream
    expected_versions = {canonicalize_name(upstream.package): {upstream.version or "of no release: a commit is pinned"}}
    for members in pack.definition.dependencies.values():
        for package, dependency in members.items():
            expected_versions.setdefault(canonicalize_name(package), set()).add(dependency.version)
    return [
        f"reproduce.py: its header pins {name}=={pins[name]}, pack.toml says {' or '.join(sorted(versions))}"
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
    files = patch.parse(text)
    if not files or body.count("\ndiff --git ") + 1 != len(files):
        errors.append("some file of it cannot be read (binary, renamed?)")
    errors += _index_errors(files)
    errors += [f"{file.path} is no source" for file in files if SOURCE_FOLDERS_REFUSED.search(file.path)]
    return errors


def duplicate_numbers(packs: list[Pack]) -> list[Finding]:
    """Name the packs that share a number: a number is never used again."""
    first_by_number: dict[str, str] = {}
    findings = []
    for pack in packs:
        number = pack.name.partition("_")[0]
        first_name = first_by_number.setdefault(number, pack.name)
        if first_name != pack.name:
            findings.append(Finding(pack.name, f"its number {number} is that of {first_name}"))
    return findings
