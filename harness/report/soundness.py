"""Whether a pack is sound: the rules of `runner.py check`."""

from __future__ import annotations

import fnmatch
import itertools
import re
from dataclasses import dataclass, field
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
from harness.upstream.source import parse_git_source, pinned_source
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
    _found: list[Finding] = field(default_factory=list)

    def findings(self) -> list[Finding]:
        """List everything that is wrong with the pack, all at once."""
        receipts = self._judge_receipts()
        self._check_script()
        self._check_patch_files()
        pristine = self._check_patch_on_tree()
        self._say(*report.errors(self.pack))
        self._check_ask([*receipts.values()])
        try:
            advisories.workaround(self.pack)
        except HarnessError as error:
            self._say(str(error))
        warnings: list[str] = []
        self._say(*wrong_fixes.errors(self.pack, pristine, warnings))
        self._say(*warnings, warning=True)
        self._check_suite()
        judged_targets = {receipt.target for path, receipt in receipts.items() if path.parent == self.pack.receipts}
        for name, target in self.pack.definition.targets.items():
            if name not in judged_targets:
                text = f"{name}: no receipt. Next: runner.py run {self.pack.name} --target {name}"
                self._say(text, warning=strongest_evidence(self.host, name, target) is None)
        return sorted(self._found, key=lambda finding: finding.warning)

    def _say(self, *texts: str, warning: bool = False) -> None:
        self._found.extend(Finding(self.pack.name, text, warning) for text in texts)

    def _check_suite(self) -> None:
        """Compare the receipt of upstream's own tests with pack.toml; a warning where the host lacks their GPU."""
        suite = self.pack.definition.upstream_tests
        next_step = f"Next: runner.py upstream-tests {self.pack.name} --record"
        try:
            receipt = suite_receipt.load(self.pack.receipts)
        except HarnessError as error:
            self._say(str(error))
            return
        if receipt is None:
            if suite:
                self._say(f"receipts/{SUITE} is missing. {next_step}", warning=True)
            return
        if reasons := suite_receipt.reasons(self.pack, receipt):
            is_rerunnable = suite is not None and (not suite.gpu or bool(self.host.gpus))
            self._say(f"{SUITE}: STALE: {'; '.join(reasons)}. {next_step}", warning=not is_rerunnable)
        if receipt.verdict != SuiteVerdict.UNBROKEN:
            self._say(f"{SUITE}: shows {receipt.verdict}: {receipt.reason}")

    def _check_ask(self, receipts: list[Receipt]) -> None:
        """Try the patch of [ask] on its tree, and name its checks that are no defect check of any receipt."""
        ask, path = self.pack.definition.ask, self.pack.ask_patch
        if ask is None or path is None:
            return
        lanes = [lane for receipt in receipts for lane in receipt.lanes.values()]
        names = {check.name for lane in lanes for check in lane.checks if check.role == Role.DEFECT}
        missing = [glob for glob in ask.checks if names and not fnmatch.filter(names, glob)]
        self._say(*(f"ask.checks: no defect check of a receipt matches {glob!r}" for glob in missing))
        try:
            if path.exists():
                asked = tree.materialize(self.cache, self.pack.definition.upstream, parse_git_source(ask.origin))
                patch.apply(self.cache, asked, self.pack.definition.upstream, path, exact=True)
        except UnavailableError as error:
            self._say(f"ask.patch was not tried: {error}", warning=True)
        except patch.StalePatchError as error:
            self._say(f"{path.name} does not apply to ask.origin: {error}")

    def _judge_receipts(self) -> dict[Path, Receipt]:
        receipts: dict[Path, Receipt] = {}
        loose_logs = set(self.pack.receipts.rglob("*.log"))
        for path in filter(is_receipt, sorted(self.pack.receipts.rglob("*.json"))):
            try:
                receipt = load_receipt(path)
            except HarnessError as error:
                self._say(str(error))
                loose_logs -= set(path.parent.glob(f"{path.stem}.*.log"))  # the unreadable receipt may name one of them
                continue
            reasons = _stale_reasons(self.pack, receipt, path.parent.name)
            if reasons and path.parent.name in ("receipts", "ask"):
                self._say_stale(receipt, reasons, is_asked=path.parent.name == "ask")
            self._say(*_receipt_errors(self.pack, path, receipt, is_fresh=not reasons))
            loose_logs.discard(path.with_name(receipt.log.file))
            receipts[path] = receipt
        names = sorted(log.relative_to(self.pack.folder).as_posix() for log in loose_logs)
        self._say(*(f"{name}: no receipt names it. Next: remove it" for name in names))
        return receipts

    def _say_stale(self, receipt: Receipt, reasons: list[str], *, is_asked: bool) -> None:
        """Say that a receipt is STALE: a warning where this host cannot make the receipt anew."""
        option, folder = ("--upstream ask", "ask/") if is_asked else (f"--target {receipt.target}", "")
        text = f"{folder}{receipt.name}: STALE: {'; '.join(reasons)}. Next: runner.py run {self.pack.name} {option}"
        self._say(text, warning=not staleness.rerunnable(self.pack, receipt, self.host))

    def _check_script(self) -> None:
        if not self.pack.script.exists():
            self._say("reproduce.py is missing")
            return
        text = self.pack.script.read_text(encoding="utf-8", errors="replace")
        if self.pack.definition.ordinary is not None:  # an ordinary script, which prints no sentinel
            self._say(*([] if script_text.HEADER.search(text) else ["reproduce.py: it has no PEP 723 header"]))
            return
        pins, errors = script_text.read(text, has_patch=self.pack.definition.has_patch)
        self._say(*(f"reproduce.py: {error}" for error in [*errors, *_pin_errors(self.pack, pins)]))

    def _check_patch_files(self) -> None:
        if not self.pack.definition.has_patch:
            folder = self.pack.folder
            strays = (path for path in (*folder.glob("*.patch"), *folder.glob("mutants/**/*")) if path.is_file())
            names = sorted(path.relative_to(folder).as_posix() for path in strays)
            self._say(*(f'{name}: pack.toml says fix = "none"' for name in names))
            return
        suite = self.pack.definition.upstream_tests
        paths = [self.pack.patch, self.pack.ask_patch, self.pack.suite_patch(suite) if suite else None]
        self._say(*(f"{path.name} is missing" for path in dict.fromkeys(paths) if path and not path.exists()))
        for path in (self.pack.patch, self.pack.own_head_patch, self.pack.ask_patch):
            if path is not None and path.exists():
                text = path.read_text(encoding="utf-8", errors="replace")
                self._say(*(f"{path.name}: {error}" for error in patch_errors(text, self.pack)))
        test = self.pack.upstream_test_patch
        if test.exists():
            files = patch.parse(test.read_text(encoding="utf-8", errors="replace"))
            errors = [] if suite else ["pack.toml has no [upstream_tests] that says where it applies"]
            errors += [] if files else ["it names no file"]
            self._say(*(f"{test.name}: {error}" for error in [*errors, *_index_errors(files)]))

    def _check_patch_on_tree(self) -> Tree | None:
        """Apply fix.patch to the pinned tree, and return that tree; None where it cannot be fetched."""
        upstream, path = self.pack.definition.upstream, self.pack.patch
        try:
            pristine = tree.materialize(self.cache, upstream, pinned_source(self.pack.definition))
        except HarnessError as error:
            if path.exists():
                self._say(f"fix.patch was not tried: {error}")
            return None
        if not path.exists():
            return pristine
        try:
            patched = patch.apply(self.cache, pristine, upstream, path, exact=True)
        except patch.StalePatchError as error:
            self._say(f"fix.patch does not apply to {upstream.package} {upstream.pin}: {error}")
            return pristine
        changed_files = set(patch.changed_files(pristine, patched))
        for name, target in self.pack.definition.targets.items():
            for file in target.loads:
                if pristine.path_here(file, upstream.source_root) not in changed_files:
                    self._say(f"targets.{name}.loads: fix.patch does not change {file}")
        return pristine


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
    files = patch.parse(text)
    if not files or body.count("\ndiff --git ") + 1 != len(files):
        errors.append("some file of it cannot be read (binary, renamed?)")
    errors += _index_errors(files)
    errors += [f"{file.path} is no source" for file in files if SOURCE_FOLDERS_REFUSED.search(file.path)]
    return errors


def duplicate_numbers(packs: list[Pack]) -> list[Finding]:
    """Name the packs that share a number: a number is never used again."""
    numbered = sorted((pack.name.partition("_")[0], pack.name) for pack in packs)
    return [
        Finding(name, f"its number {number} is that of {other}")
        for (number_before, other), (number, name) in itertools.pairwise(numbered)
        if number == number_before
    ]
