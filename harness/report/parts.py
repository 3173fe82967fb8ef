"""The parts of a report that the runner writes whole: script, diff, threads, environment, verdicts."""

import itertools
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from harness.core import NO_EXPECTATION, Evidence, Kind, LaneName, LaneVerdict, Verdict, markdown
from harness.lane.results import LaneRecord
from harness.pack.model import Head, Pack, Thread
from harness.receipt import staleness, strength
from harness.receipt.receipt import Receipt
from harness.suites import receipt as suite_receipt
from harness.suites.receipt import Change, SuiteReceipt

THREAD = re.compile(r"https://github\.com/(?P<project>[^/]+/[^/]+)/(?:issues|pull|discussions)/(?P<number>\d+)")
COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
PATCH_NAME = re.compile(r"(?:data/)?[A-Za-z0-9][\w.-]*\.patch")
INDEX = re.compile(r"(?m)^index [0-9a-f]{40}\.\.[0-9a-f]{40}.*\n")
CHANGED = re.compile(r"(?m)^(?:\+(?!\+\+ )|-(?!-- ))")
#: Lines that a diff adds and removes, up to which a report shows it unfolded.
MOST_INLINE = 25
#: The parts without an argument, by the names of their methods.
WHOLE = ("script", "threads", "environment", "verdicts", "searched")
HEAD, ASK = "head:", "ask:"
NOT_JUDGED, NO_CODE, NOT_YET = "not judged", "has no such code", "(output is not recorded yet)"
JUDGED = (LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED)
#: Lines of a script's output that a report shows.
MOST_PRINTED = 30
#: Reasons, the most frequent first, that a report gives for checks that were not judged.
MOST_REASONS = 2
#: A line that a library logs in between, which a report leaves out.
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\[TileLang:")
#: What the verdicts in the table mean.
LEGEND = {
    Verdict.CONFIRMED: "CONFIRMED: the tree has {}, and with the patch it does not.",
    Verdict.REPRODUCED: "REPRODUCED: the tree has {}; no patch was judged.",
    Verdict.FIXED_UPSTREAM: "FIXED_UPSTREAM: the tree does not have {}.",
}
#: The verdicts on a pack whose tree has the bug without the patch.
WRONG = (Verdict.CONFIRMED, Verdict.REPRODUCED)
#: How a list of trees begins, by what `tree_statement` says about them.
HEADINGS = {
    "has the bug": "Same bug",
    "has the code": "Same code",
    "is right": "Right",
    "": "Judged",
    NO_CODE: "No such code",
    NOT_JUDGED: "Not judged",
}


def tree_statement(verdict: Verdict, kind: Kind) -> str:
    """Say what a verdict means for the tree without the patch; empty where it means nothing."""
    return f"has {kind.what}" if verdict in WRONG else "is right" if verdict == Verdict.FIXED_UPSTREAM else ""


def unjudged_statement(head: Head) -> str:
    """Say what pack.toml tells of a default branch that no receipt judges."""
    return NO_CODE if head.verdict == Verdict.UNSUPPORTED else NOT_JUDGED


class MissingError(LookupError):
    """A placeholder names something that no receipt, data file or pack.toml holds."""


@dataclass(frozen=True)
class Parts:
    """The parts of one report."""

    pack: Pack
    receipts: dict[str, Receipt]  # the strongest by target, whose name follows ``head:`` or ``ask:`` for other trees
    is_draft: bool = False  # whether an output that no receipt holds is called missing, instead of an error

    # --- for upstream

    def script(self) -> str:
        """Write reproduce.py, and what it printed on the release and with the patch."""
        if not self.pack.script.exists():
            raise MissingError("reproduce.py is missing")
        source = markdown.fenced(self.pack.script.read_text(encoding="utf-8"), "python")
        receipt = self.receipts.get(self._shown_name())
        if receipt is None and self.is_draft:
            return f"{source}\n\n{NOT_YET}"
        if receipt is None:
            command = f"runner.py run {self.pack.name} --record"
            raise MissingError(f"no receipt holds what today's script printed; record again. Next: {command}")
        tree = f"{receipt.upstream.package} {_short_version(receipt.upstream.version)}"
        trees = {LaneName.PRISTINE: tree, LaneName.PATCHED: f"{tree} with {self._fix_name(receipt)}"}
        runs = [
            f"$ python reproduce.py  # {trees[name]}, {receipt.host.gpu or 'no GPU'}\n"
            f"{_last_lines(receipt.lanes[name].printed)}"
            for name in LaneName
            if name in receipt.lanes and receipt.lanes[name].printed
        ]
        shown_runs = runs if any(map(_is_judged, receipt.lanes.values())) else runs[:1]
        return f"{source}\n\n{markdown.fenced(chr(10).join(shown_runs), 'text')}"

    def _shown_name(self) -> str:
        """Name the receipt whose output is shown; empty where no receipt has the output of today's script.

        A receipt in which the script judged comes first, then the patch that upstream is asked to merge, then a GPU.
        """
        names = [f"{prefix}{target}" for prefix in (ASK, "") for target in self._targets()]
        candidates = {name: self.receipts[name] for name in names if self._has_current_output(name)}
        judged = [name for name, receipt in candidates.items() if _is_judged(receipt.lanes[LaneName.PRISTINE])]
        order = {name: (not name.startswith(ASK), not receipt.host.gpu) for name, receipt in candidates.items()}
        return min(judged or order, key=order.__getitem__, default="")

    def _has_current_output(self, name: str) -> bool:
        receipt = self.receipts.get(name)
        pristine = receipt and receipt.lanes.get(LaneName.PRISTINE)
        return bool(receipt and pristine and pristine.printed and not staleness.reasons(self.pack, receipt))

    def _fix_name(self, receipt: Receipt) -> str:
        """Name the patch of the patched lane: ``the patch`` if the report shows it, else its file."""
        patch = self.pack.ask_patch or self.pack.patch
        return "the patch" if receipt.fix is None or receipt.fix.name == patch.name else receipt.fix.name

    def diff(self, name: str | None) -> str:
        """Show the patch that upstream is asked to merge, or another patch by its name; a long patch is folded away."""
        path = self.pack.folder / name if name else self.pack.ask_patch or self.pack.patch
        if not path.is_file() or (name and not PATCH_NAME.fullmatch(name)):
            raise MissingError(f"the pack has no {name or 'patch'}")
        _, mark, body = path.read_text(encoding="utf-8").partition("diff --git ")
        diff = INDEX.sub("", mark + body)
        count, fence = len(CHANGED.findall(diff)), markdown.fenced(diff, "diff")
        return fence if count <= MOST_INLINE else markdown.details(f"The patch, {count} lines", fence).strip()

    def threads(self) -> str:
        """Write the threads of upstream on the same lines of code, one in each line."""
        threads = self.pack.definition.threads
        if not threads and self.pack.definition.searched is None:
            raise MissingError("pack.toml has neither [[threads]] nor searched")
        return "\n".join(map(self._thread_line, threads)) or "No thread on the same lines was found."

    def _thread_line(self, thread: Thread) -> str:
        match = THREAD.match(thread.url)
        upstream = THREAD.match(f"{self.pack.definition.upstream.repository}/issues/0")
        if match is None:
            name = thread.url
        elif upstream is not None and match["project"].lower() == upstream["project"].lower():
            name = f"#{match['number']}"
        else:
            name = f"{match['project']}#{match['number']}"
        return f"- [{name}]({thread.url}) ({thread.state}, {thread.date}): {thread.says}"

    def environment(self) -> str:
        """Write the trees that were judged, the first with its hosts: of [ask], the release, the default branch."""
        definition, with_torch = self.pack.definition, bool(self.pack.definition.requires.torch)
        prefixes = (ASK, "", HEAD) if self._shown_name().startswith(ASK) else ("", HEAD)
        trees: dict[str, list[Receipt]] = defaultdict(list)
        for prefix, target in itertools.product(prefixes, self._targets()):
            if receipt := self.receipts.get(f"{prefix}{target}"):
                trees[self._tree_name(receipt.upstream.version)].append(receipt)
        (first_tree, first_receipts), *other_trees = trees.items()
        hosts = dict.fromkeys(_host_text(receipt, with_torch=with_torch) for receipt in first_receipts)
        sentences = [f"{definition.upstream.package} {first_tree} ({'; '.join(hosts)})."]
        lists: dict[str, list[str]] = defaultdict(list)
        for tree, receipts in other_trees:
            statements = {tree_statement(receipt.verdict, definition.kind) for receipt in receipts}
            lists[statements.pop() if len(statements) == 1 else ""].append(tree)
        head = definition.head
        if head is not None and not any(head.commit[:12] in tree for tree in trees):
            lists[unjudged_statement(head)].append(f"default branch at {head.commit[:12]} of {head.date}")
        sentences += [f"{HEADINGS[statement]}: {'; '.join(names)}." for statement, names in lists.items()]
        return " ".join(sentences)

    def _tree_name(self, version: str) -> str:
        definition = self.pack.definition
        upstream, head, ask = definition.upstream, definition.head, definition.ask
        dates = {upstream.commit: upstream.date}
        dates |= {ask.commit: ask.date} if ask else {}
        dates |= {head.commit: head.date} if head else {}
        date = dates.get(version.removeprefix("commit "))
        branch = " (default branch)" if head and head.commit in version else ""
        return markdown.inert(f"{_short_version(version)}{f' of {date}' if date else ''}{branch}")

    # --- below the line

    def verdicts(self) -> str:
        """Write the table, with a row for each target that has a receipt."""
        definition, targets = self.pack.definition, self._targets()
        trees = [("", f"{definition.upstream.package} {definition.upstream.version or definition.upstream.date}")]
        if definition.head is not None and any(name.startswith(HEAD) for name in self.receipts):
            trees.append((HEAD, f"default branch, {definition.head.commit[:12]} of {definition.head.date}"))
        ask = definition.ask
        if ask is not None and any(name.startswith(ASK) for name in self.receipts):
            trees.append((ASK, f"{ask.patch}, on {ask.origin.rpartition('@')[2][:12]} of {ask.date}"))
        rows = [self._row(target, [prefix for prefix, _ in trees]) for target in targets]
        table = markdown.table(["target", "evidence", "GPU or host", *(text for _, text in trees), "mutants"], rows)
        return f"{table}\n{self._notes()}".strip()

    def _targets(self) -> list[str]:
        """List the targets that have a receipt: those of pack.toml, then those that pack.toml does not list."""
        stated_targets = self.pack.definition.targets
        targets = [name for name in stated_targets if name in self.receipts]
        targets += [name for name in self.receipts if name not in stated_targets and ":" not in name]
        if not targets:
            raise MissingError("there is no receipt")
        return targets

    def _row(self, target: str, prefixes: list[str]) -> list[str]:
        receipt = self.receipts[target]
        cells = [self._cell(self.receipts.get(prefix + target), receipt.evidence) for prefix in prefixes]
        mutants = strength.summary(self.pack, target, receipt.evidence)
        return [target, receipt.evidence, receipt.host.gpu or "CPU", *cells, mutants]

    def _cell(self, receipt: Receipt | None, of_row: Evidence) -> str:
        """Write a verdict, with its evidence where it differs from that of the row."""
        if receipt is None:
            return NOT_JUDGED
        note = f" ({receipt.evidence})" if receipt.evidence != of_row else ""
        note += "" if receipt.target in self.pack.definition.targets else f" ({NO_EXPECTATION})"
        return receipt.verdict + note + (" STALE" if staleness.reasons(self.pack, receipt) else "")

    def _notes(self) -> str:
        """Write what the words of the table mean, where the bug is fixed, and what upstream's own tests showed."""
        definition = self.pack.definition
        verdicts = {receipt.verdict for receipt in self.receipts.values()}
        lines = [text.format(definition.kind.what) for verdict, text in LEGEND.items() if verdict in verdicts]
        lines += [text for target in self._targets() if (text := _unjudged_line(self.receipts[target]))]
        lines += [f"Fixed in {definition.upstream.package} {definition.fixed_in}."] if definition.fixed_in else []
        if definition.head and definition.head.fixed_by:
            lines.append(f"Fixed on the default branch by {_short_version(definition.head.fixed_by)}.")
        if suite := suite_receipt.load(self.pack.folder / "receipts"):
            lines += _suite_lines(suite)
            lines += ["The counts are STALE."] if suite_receipt.reasons(self.pack, suite) else []
        return " ".join(lines)

    def searched(self) -> str:
        """Say when upstream's threads were searched, and for which words."""
        search = self.pack.definition.searched
        if search is None:
            raise MissingError("pack.toml has no searched")
        queries = "\n".join(f"- “{query}”" for query in search.queries)
        return f"Searched on {search.date} for:\n\n{queries}"


def _unjudged_line(receipt: Receipt) -> str:
    """Say how many checks of a receipt were not judged, and why; empty where all were."""
    checks = [check for lane in list(receipt.lanes.values())[-1:] for check in lane.checks]
    reasons = Counter(check.reason for check in checks if check.ok is None)
    if not reasons:
        return ""
    texts = "; ".join(markdown.inert(reason) for reason, _ in reasons.most_common(MOST_REASONS))
    return f"On {receipt.target}, {reasons.total()} of {len(checks)} checks are not judged ({texts})."


def _is_judged(lane: LaneRecord) -> bool:
    return lane.script.partition(":")[0] in JUDGED


def _last_lines(printed: str) -> str:
    """Return the last lines of an output; of a sentinel with a reason, the reason alone."""
    lines = [line for line in printed.splitlines() if not LOGGED.match(line)][-MOST_PRINTED:]
    word, mark, reason = lines[-1].partition(": ") if lines else ("", "", "")
    if mark and word in JUDGED:
        lines[-1] = reason
    return "\n".join(lines)


def _short_version(version: str) -> str:
    return COMMIT.sub(lambda match: match[0][:12], version)


def _host_text(receipt: Receipt, *, with_torch: bool) -> str:
    host = receipt.host
    torch_versions = (("torch", host.torch), ("triton", host.triton)) if with_torch else ()
    versions = ", ".join(f"{name} {version}" for name, version in (("Python", host.python), *torch_versions) if version)
    gpu = f"{host.gpu}, driver {host.driver}, CUDA {host.cuda}" if host.gpu else "no GPU"
    return markdown.inert(f"{gpu}: {versions}")


def _suite_lines(suite: SuiteReceipt) -> list[str]:
    """Count upstream's own tests and new tests apart: a new test says nothing about upstream's own suite."""
    new_tests = [row for row in suite.tests if row.change in (Change.NEW, Change.NEW_WRONG)]
    new_before, new_after = Counter[str](row.before for row in new_tests), Counter[str](row.after for row in new_tests)
    own_before, own_after = Counter(suite.before) - new_before, Counter(suite.after) - new_after
    lines = []
    if own_before or own_after:
        command = markdown.code(suite_command(suite.files, suite.arguments, suite.environment), most=2000)
        counts = f"{_count_text(own_before)}; with the patch, {_count_text(own_after)}"
        lines.append(f"Upstream's own tests, {command}: {counts}.")
    if new_tests:
        functions = {row.test.partition("[")[0] for row in new_tests}
        number = f"{_plural(len(functions), 'new test')}, {_plural(len(new_tests), 'case')}"
        lines.append(f"{number}: {_count_text(new_before)}; with the patch, {_count_text(new_after)}.")
    return lines


def suite_command(files: tuple[str, ...], arguments: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Return the command that runs upstream's own tests in a checkout, as pack.toml selects them."""
    variables = (f"{name}={shlex.quote(value)}" for name, value in environment.items())
    return " ".join([*variables, "pytest", shlex.join([*files, *arguments])])


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _count_text(results: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {result}" for result, number in results.items()) or "none"
