"""Whether a pack is sound: every rule that `runner.py check` holds it to."""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name

from harness.core.cache import Cache
from harness.core.errors import HarnessError, UnavailableError
from harness.core.words import Role, SuiteVerdict, Verdict
from harness.host.eligibility import evidence_here
from harness.host.host import Host
from harness.mutate import soundness as wrong_fixes
from harness.pack import script_text
from harness.pack.model import Pack
from harness.receipt import receipt, staleness
from harness.receipt.receipt import Receipt
from harness.report import advisories, receipt_check, report
from harness.suites import receipt as suite_receipt
from harness.upstream import patch, tree
from harness.upstream.patch import PatchedFile
from harness.upstream.source import Source, of_git, pinned
from harness.upstream.tree import Tree

SOURCE_FOLDERS_REFUSED = re.compile(r"(?:^|/)(?:tests?|docs?|\.github)/")


@dataclass(frozen=True)
class Finding:
    """One rule that a pack breaks; a warning does not make `check` fail."""

    pack: str
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Checker:
    """Holds one pack to the rules."""

    pack: Pack
    cache: Cache
    host: Host

    def findings(self) -> list[Finding]:
        """List everything that is wrong with the pack, all at once."""
        every, stale, errors = self._receipts()
        own = [one for path, one in every.items() if path.parent == self.pack.receipts]
        errors += self._probe() + self._patch_text() + self._patch_on_tree() + [*report.errors(self.pack)]
        errors += self._ask_checks([*every.values()]) + self._workaround()
        wrong, warnings = wrong_fixes.errors(self.pack, self._pristine())
        found = [Finding(self.pack.name, text) for text in (*errors, *wrong)] + self._without_receipt(own)
        found += stale
        found += [Finding(self.pack.name, text, warning=True) for text in warnings]
        return found + self._ask_on_tree() + self._suite_receipt()

    def _pristine(self) -> Tree | None:
        """Return the pinned tree; None where it cannot be had."""
        try:
            return tree.materialize(self.cache, self.pack.definition.upstream, pinned(self.pack.definition))
        except HarnessError:
            return None

    def _workaround(self) -> list[str]:
        try:
            advisories.workaround(self.pack)
        except HarnessError as error:
            return [str(error)]
        return []

    def _suite_receipt(self) -> list[Finding]:
        """Hold the receipt of upstream's own tests to pack.toml; only a host with a GPU makes some of them anew."""
        suite = self.pack.definition.upstream_tests
        again = f"Next: runner.py upstream-tests {self.pack.name} --record"
        try:
            one = suite_receipt.load(self.pack.receipts)
        except HarnessError as error:
            return [Finding(self.pack.name, str(error))]
        if one is None:
            text = f"receipts/{receipt.SUITE} is missing. {again}"
            return [Finding(self.pack.name, text, warning=True)] if suite else []
        why = suite_receipt.reasons(self.pack, one)
        here = suite is not None and (not suite.gpu or bool(self.host.gpus))
        found = [Finding(self.pack.name, f"{receipt.SUITE}: STALE: {'; '.join(why)}. {again}", not here)] if why else []
        if one.verdict != SuiteVerdict.UNBROKEN:
            found.append(Finding(self.pack.name, f"{receipt.SUITE}: shows {one.verdict}: {one.reason}"))
        return found

    def _ask_on_tree(self) -> list[Finding]:
        """Say why the patch does not apply to the tree that [ask] names."""
        asked, path = self.pack.definition.ask, self.pack.ask_patch
        if asked is None or path is None or not path.exists():
            return []
        try:
            self._applied(path, of_git(asked.origin))
        except UnavailableError as error:
            return [Finding(self.pack.name, f"ask.patch was not tried: {error}", warning=True)]
        except patch.StalePatchError as error:
            return [Finding(self.pack.name, f"{path.name} does not apply to ask.origin: {error}")]
        return []

    def _applied(self, path: Path, origin: Source) -> tuple[Tree, Tree]:
        """Return a tree, and its copy with a patch."""
        pristine = tree.materialize(self.cache, self.pack.definition.upstream, origin)
        return pristine, patch.apply(self.cache, pristine, self.pack.definition.upstream, path, exact=True)

    def _ask_checks(self, receipts: list[Receipt]) -> list[str]:
        """Name what [ask] calls a check and no receipt knows as a defect check, where there are receipts."""
        asked, lanes = self.pack.definition.ask, [lane for one in receipts for lane in one.lanes.values()]
        known = {check.name for lane in lanes for check in lane.checks if check.role == Role.DEFECT}
        return [
            f"ask.checks: no defect check of a receipt matches {glob!r}"
            for glob in (asked.checks if asked else ())
            if known and not any(fnmatch.fnmatchcase(name, glob) for name in known)
        ]

    def _receipts(self) -> tuple[dict[Path, Receipt], list[Finding], list[str]]:
        found: dict[Path, Receipt] = {}
        stale: list[Finding] = []
        errors: list[str] = []
        loose = set(self.pack.receipts.rglob("*.log"))
        for path in filter(receipt.is_receipt, sorted(self.pack.receipts.rglob("*.json"))):
            try:
                one = receipt.load(path)
            except HarnessError as error:
                errors.append(str(error))
                loose -= set(path.parent.glob(f"{path.stem}.*.log"))  # whether one is its own cannot be known
                continue
            why = _ask_reasons(self.pack, one) if path.parent.name == "ask" else staleness.reasons(self.pack, one)
            stale += self._stale(path, one, why)
            errors += _receipt_errors(self.pack, path, one, is_fresh=not why)
            loose.discard(path.with_name(one.log.file))
            found[path] = one
        for log in sorted(loose):
            errors.append(f"{log.relative_to(self.pack.folder).as_posix()}: no receipt names it. Next: remove it")
        return found, stale, errors

    def _probe(self) -> list[str]:
        if not self.pack.probe.exists():
            return ["reproduce.py is missing"]
        text = self.pack.probe.read_text(encoding="utf-8", errors="replace")
        if self.pack.definition.script is not None:  # its author's own
            return [] if script_text.HEADER.search(text) else ["reproduce.py: it has no PEP 723 header"]
        pins, errors = script_text.read(text, has_patch=self.pack.definition.has_patch)
        return [f"reproduce.py: {error}" for error in errors] + _pin_errors(self.pack, pins)

    def _patch_text(self) -> list[str]:
        if not self.pack.definition.has_patch:
            beside = (
                *self.pack.folder.glob("*.patch"),
                *(path for path in self.pack.folder.glob("mutants/**/*") if path.is_file()),
            )
            places = sorted(path.relative_to(self.pack.folder).as_posix() for path in beside)
            return [f'{place}: pack.toml says fix = "none"' for place in places]
        suite = self.pack.definition.upstream_tests
        paths = [self.pack.patch, self.pack.ask_patch, self.pack.suite_patch(suite) if suite else None]
        missing = [path.name for path in dict.fromkeys(paths) if path and not path.exists()]
        errors = [f"{name} is missing" for name in missing]
        for path in (self.pack.patch, self.pack.own_head_patch, self.pack.ask_patch):
            if path is None or not path.exists():
                continue
            text = path.read_text(encoding="utf-8", errors="replace")
            errors += [f"{path.name}: {error}" for error in patch_errors(text, self.pack)]
        test = self.pack.upstream_test_patch
        if test.exists():
            if suite is None:
                errors.append(f"{test.name}: pack.toml has no [upstream_tests] that says where it applies")
            listed = patch.parse(test.read_text(encoding="utf-8", errors="replace"))
            errors += [] if listed else [f"{test.name}: it names no file"]
            errors += [f"{test.name}: {error}" for error in _abbreviated(listed)]
        return errors

    def _patch_on_tree(self) -> list[str]:
        upstream = self.pack.definition.upstream
        if not self.pack.patch.exists():
            return []
        try:
            pristine, patched = self._applied(self.pack.patch, pinned(self.pack.definition))
        except patch.StalePatchError as error:
            return [f"fix.patch does not apply to {upstream.package} {upstream.pin}: {error}"]
        except UnavailableError as error:
            return [f"fix.patch was not tried: {error}"]
        changed = set(patch.changed_files(pristine, patched))
        return [
            f"targets.{name}.loads: fix.patch does not change {path}"
            for name, target in self.pack.definition.targets.items()
            for path in target.loads
            if pristine.path_here(path, upstream.source_root) not in changed
        ]

    def _without_receipt(self, receipts: list[Receipt]) -> list[Finding]:
        seen = {one.target for one in receipts}
        again = f"no receipt. Next: runner.py run {self.pack.name} --target"
        return [
            Finding(self.pack.name, f"{name}: {again} {name}", warning=evidence_here(self.host, name, target) is None)
            for name, target in self.pack.definition.targets.items()
            if name not in seen
        ]

    def _stale(self, path: Path, one: Receipt, why: list[str]) -> list[Finding]:
        """Say that a receipt is STALE: a warning where this host cannot make it anew."""
        folder = path.parent.name
        if not why or folder not in ("receipts", "ask"):
            return []
        option, name = f"--target {one.target}", one.name
        if folder == "ask":
            option, name = "--upstream ask", f"ask/{one.name}"
        text = f"{name}: STALE: {'; '.join(why)}. Next: runner.py run {self.pack.name} {option}"
        return [Finding(self.pack.name, text, warning=not staleness.rerunnable(self.pack, one, self.host))]


def _ask_reasons(pack: Pack, one: Receipt) -> list[str]:
    """Say where a receipt of the patch that upstream is asked to merge speaks of something else than pack.toml."""
    asked = pack.definition.ask
    if asked is None or not asked.patch:
        return ["pack.toml asks for no patch"]
    found = staleness.reasons(pack, one)
    found += ["ask.origin changed"] if one.upstream.commit != of_git(asked.origin).value else []
    return found + (["ask.checks changed"] if one.about != asked.checks else [])


def _abbreviated(listed: tuple[PatchedFile, ...]) -> list[str]:
    short = [one.path for one in listed if not one.after]
    return [f"{path}: its index line is abbreviated; use git diff --full-index" for path in short]


def _receipt_errors(pack: Pack, path: Path, one: Receipt, *, is_fresh: bool) -> list[str]:
    """Say what of a receipt does not hold, and where it shows something else than pack.toml expects."""
    is_asked, is_own = path.parent.name == "ask", path.parent == pack.receipts
    errors = receipt_check.errors(pack, path, one, is_fresh=is_fresh)
    target, head = pack.definition.targets.get(one.target), pack.definition.head
    if target is None:
        errors.append(f"pack.toml lists no target {one.target}")
    else:
        expected = Verdict.CONFIRMED if is_asked else target.verdict if is_own or head is None else head.verdict
        if one.verdict != expected:
            errors.append(f"shows {one.verdict}, pack.toml expects {expected}")
        missing = [claim for claim in target.claims_of(one.evidence) if claim not in one.claims]
        if missing and is_own:
            errors.append(f"lacks the claims {', '.join(missing)}")
    name = path.relative_to(pack.folder).as_posix()
    return [f"{name}: {error}" for error in errors]


def _pin_errors(pack: Pack, pins: dict[str, str]) -> list[str]:
    """Compare a header's pins with pack.toml."""
    upstream = pack.definition.upstream
    wanted = {canonicalize_name(upstream.package): {upstream.version or "of no release: a commit is pinned"}}
    for members in pack.definition.dependencies.values():
        for package, dependency in members.items():
            wanted.setdefault(canonicalize_name(package), set()).add(dependency.version)
    return [
        f"reproduce.py: its header pins {name}=={pins[name]}, pack.toml says {' or '.join(sorted(versions))}"
        for name, versions in wanted.items()
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
    listed = patch.parse(text)
    if not listed or body.count("\ndiff --git ") + 1 != len(listed):
        errors.append("some file of it cannot be read (binary, renamed?)")
    errors += _abbreviated(listed)
    errors += [f"{one.path} is no source" for one in listed if SOURCE_FOLDERS_REFUSED.search(one.path)]
    return errors


def duplicate_numbers(packs: list[Pack]) -> list[Finding]:
    """Say which packs share a number: a number is never reused."""
    seen: dict[str, str] = {}
    findings = []
    for pack in packs:
        number = pack.name.partition("_")[0]
        if number in seen:
            findings.append(Finding(pack.name, f"its number {number} is that of {seen[number]}"))
        seen.setdefault(number, pack.name)
    return findings
