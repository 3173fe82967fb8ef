"""The parts of a report that the runner writes whole: script, diff, threads, environment, verdicts."""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass

from harness.core import markdown
from harness.core.words import NO_EXPECTATION, Evidence, Kind, LaneName, LaneVerdict, Verdict
from harness.lane import ordinary
from harness.pack.model import Pack, Thread
from harness.receipt import staleness, strength
from harness.receipt.receipt import Receipt
from harness.suites import receipt as suite_receipt
from harness.suites.comparison import Change
from harness.suites.receipt import SuiteReceipt

THREAD = re.compile(r"https://github\.com/(?P<project>[^/]+/[^/]+)/(?:issues|pull|discussions)/(?P<number>\d+)")
COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
PATCH_NAME = re.compile(r"[A-Za-z0-9][\w.-]*\.patch")
INDEX = re.compile(r"(?m)^index [0-9a-f]{40}\.\.[0-9a-f]{40}.*\n")
FILE = re.compile(r"(?m)^diff --git a/(?P<path>\S+) b/\S+$")
CHANGED = re.compile(r"(?m)^(?:\+(?!\+\+ )|-(?!-- ))")
#: Lines of a diff, added and removed, that stand in a report unfolded.
MOST_INLINE = 25
#: The parts that have no argument, each by the name of its method.
WHOLE = ("script", "ending", "threads", "environment", "verdicts", "searched", "since")
HEAD, ASK = "head:", "ask:"
NOT_JUDGED, NOT_YET = "not judged", "(output is not recorded yet)"
#: How a script ended that prints no sentinel.
NO_ERROR = "(it ends without an error)"
JUDGED = (LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED)
#: Lines of a script's output that a report shows, and what a library logs between them, which it leaves out.
MOST_PRINTED = 30
LOGGED = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d +\[TileLang:")
#: What the words of the table say, for those of them that stand in it.
LEGEND = {
    Verdict.CONFIRMED: "CONFIRMED: the tree has {}, and with the patch it does not.",
    Verdict.REPRODUCED: "REPRODUCED: the tree has {}; no patch was judged.",
    Verdict.FIXED_UPSTREAM: "FIXED_UPSTREAM: the tree does not have {}.",
}
#: What the verdicts on a tree without the patch say.
WRONG = (Verdict.CONFIRMED, Verdict.REPRODUCED)
#: How a list of trees of which that was said begins.
HEADINGS = {
    "has the bug": "Same bug",
    "has the code": "Same code",
    "is right": "Right",
    "": "Judged",
    NOT_JUDGED: "Not judged",
}


def said_of_tree(verdict: Verdict, kind: Kind) -> str:
    """Say what a tree was seen to be without the patch; empty where that was not seen."""
    return f"has {kind.what}" if verdict in WRONG else "is right" if verdict == Verdict.FIXED_UPSTREAM else ""


class MissingError(LookupError):
    """A placeholder names something that no receipt, data file or pack.toml holds."""


@dataclass(frozen=True)
class Parts:
    """The parts of one report."""

    pack: Pack  # whose report it is
    receipts: dict[str, Receipt]  # the strongest by target; ``head:`` and ``ask:`` before those of other trees
    is_draft: bool = False  # whether it says of an output that no receipt holds that it is missing, instead of failing

    def text(self, part: str, rest: str | None) -> str:
        """Write a part; MissingError is raised where there is none of that name, or nothing to write in it."""
        if part == "diff":
            return self.diff(rest)
        if part not in WHOLE or rest is not None:
            raise MissingError("no placeholder of that form")
        return str(getattr(self, part)())

    # --- for upstream

    def script(self) -> str:
        """Write reproduce.py, and what it printed on the release and with the patch."""
        if not self.pack.probe.exists():
            raise MissingError("reproduce.py is missing")
        text = self.pack.probe.read_text(encoding="utf-8")
        source = markdown.fenced(text, "python")
        one = self._shown()
        if one is None and not self.is_draft:
            again = f"runner.py run {self.pack.name} --record"
            raise MissingError(f"no receipt holds what today's script printed; record again. Next: {again}")
        if one is None:
            return f"{source}\n\n{NOT_YET}"
        tree, device = f"{one.upstream.package} {_short(one.upstream.version)}", one.host.gpu or "no GPU"
        trees = {LaneName.PRISTINE: tree, LaneName.PATCHED: f"{tree} with {self._fix(one)}"}
        script = self.pack.definition.script
        typed = "python reproduce.py" if script is None else ordinary.typed(text, script.environment)
        shown = [
            f"$ {typed}  # {trees[name]}, {device}\n{_tail(one.lanes[name].printed, is_own=script is None)}"
            for name in LaneName
            if name in one.lanes and one.lanes[name].printed
        ]
        judged = any(lane.script.partition(":")[0] in JUDGED for lane in one.lanes.values())
        return f"{source}\n\n{markdown.fenced(chr(10).join(shown if judged else shown[:1]), 'text')}"

    def ending(self) -> str:
        """Say how the script of an author failed on the release."""
        one = self._shown()
        verdict, _, reason = (one.lanes[LaneName.PRISTINE].script if one else "").partition(": ")
        if one is None or verdict != LaneVerdict.BUG_REPRODUCED:
            raise MissingError("the script does not fail in what is reported")
        runs, mark, ending = reason.partition(" runs: ")
        often, ending = (f"{runs} runs of the script below end", ending) if mark else ("the script below ends", reason)
        name = f"{one.upstream.package} {_short(one.upstream.version)}"
        return f"With {name} {often} in `{ending.replace('`', chr(39))}`."

    def _shown(self) -> Receipt | None:
        """Return the receipt whose output is shown, of the patch that upstream is asked to merge where there is one.

        It is a GPU's where the script judged there, else the CPU's, else one where the script could not judge. What an
        older script printed is shown nowhere.
        """
        asked, pinned = [
            [one for name in self._targets() if (one := self.receipts.get(f"{place}{name}")) and self._printed(one)]
            for place in (ASK, "")
        ]
        found = [*asked, *pinned]
        judged = [one for one in found if one.lanes[LaneName.PRISTINE].script.partition(":")[0] in JUDGED]
        return min(judged or found, key=lambda one: (one not in asked, not one.host.gpu), default=None)

    def _printed(self, one: Receipt) -> bool:
        pristine = one.lanes.get(LaneName.PRISTINE)
        return pristine is not None and bool(pristine.printed) and not staleness.reasons(self.pack, one)

    def _fix(self, one: Receipt) -> str:
        """Name the patch of the patched lane: the one that is shown, or another by its file."""
        asked = self.pack.ask_patch or self.pack.patch
        return "the patch" if one.fix is None or one.fix.name == asked.name else one.fix.name

    def diff(self, name: str | None) -> str:
        """Show the patch that upstream is asked to merge, or another by its name; folded away where it is long."""
        path = self.pack.folder / name if name else self.pack.ask_patch or self.pack.patch
        if name is None and not (self.pack.definition.has_patch and path.exists()):
            raise MissingError("the pack has no patch")
        if name is not None and not (PATCH_NAME.fullmatch(name) and path.is_file()):
            raise MissingError("the pack has no such patch")
        text = path.read_text(encoding="utf-8")
        start = FILE.search(text)
        diff = INDEX.sub("", text[start.start() :] if start else text)
        changed, fence = len(CHANGED.findall(diff)), markdown.fenced(diff, "diff")
        return fence if changed <= MOST_INLINE else markdown.details(f"The patch, {changed} lines", fence).strip()

    def since(self) -> str:
        """Say where the bug came and went, as ``versions --record`` kept it for the first target that it judged."""
        kept = sorted((self.pack.folder / "data").glob("history.*.json"))
        if not kept:
            raise MissingError(f"no release was compared. Next: runner.py versions {self.pack.name} --record")
        line = str(json.loads(kept[0].read_text(encoding="utf-8"))["line"])
        return f"{line[:1].upper()}{line[1:]}."

    def threads(self) -> str:
        """Write what upstream has already on the same lines, a line each."""
        found = self.pack.definition.threads
        if not found and self.pack.definition.searched is None:
            raise MissingError("pack.toml has neither [[threads]] nor searched")
        return "\n".join([self._thread(one) for one in found] or ["No thread on the same lines was found."])

    def _thread(self, one: Thread) -> str:
        match = THREAD.match(one.url)
        own = THREAD.match(f"{self.pack.definition.upstream.repository}/issues/0")
        if match is None:
            name = one.url
        elif own is not None and match["project"].lower() == own["project"].lower():
            name = f"#{match['number']}"
        else:
            name = f"{match['project']}#{match['number']}"
        return f"- [{name}]({one.url}) ({one.state}, {one.date}): {one.says}"

    def environment(self) -> str:
        """Write which trees were judged, and on which hosts the first: asked about, the release, the default branch."""
        definition, targets, shown = self.pack.definition, self._targets(), self._shown()
        asked = [ASK] if shown and shown in [self.receipts.get(f"{ASK}{name}") for name in targets] else []
        trees: dict[str, list[Receipt]] = defaultdict(list)
        for prefix, target in itertools.product((*asked, "", HEAD), targets):
            if one := self.receipts.get(f"{prefix}{target}"):
                trees[self._tree(one.upstream.version)].append(one)
        others: dict[str, list[str]] = defaultdict(list)
        first = ""
        for tree, receipts in trees.items():
            said = {said_of_tree(one.verdict, definition.kind) for one in receipts}
            if first:
                others[said.pop() if len(said) == 1 else ""].append(tree)
                continue
            hosts = dict.fromkeys(_host(one, with_torch=bool(definition.requires.torch)) for one in receipts)
            first = f"{definition.upstream.package} {tree} ({'; '.join(hosts)})."
        head = definition.head
        if head is not None and not any(head.commit[:12] in tree for tree in trees):
            others[NOT_JUDGED].append(f"default branch at {head.commit[:12]} of {head.date}")
        return " ".join([first, *(f"{HEADINGS[said]}: {'; '.join(names)}." for said, names in others.items())])

    def _tree(self, version: str) -> str:
        """Name a tree: a release, or a commit by its first digits and its date."""
        definition = self.pack.definition
        upstream, head, asked = definition.upstream, definition.head, definition.ask
        dates = {upstream.commit: upstream.date}
        dates |= {asked.origin.rpartition("@")[2]: asked.date} if asked else {}
        dates |= {head.commit: head.date} if head else {}
        date = dates.get(version.removeprefix("commit "))
        branch = " (default branch)" if head and head.commit in version else ""
        return f"{_short(version)}{f' of {date}' if date else ''}{branch}"

    # --- below the line

    def verdicts(self) -> str:
        """Write the table: a row for each target that a receipt speaks of."""
        definition = self.pack.definition
        targets = self._targets()
        trees = [("", f"{definition.upstream.package} {definition.upstream.version or definition.upstream.date}")]
        if definition.head is not None and any(name.startswith(HEAD) for name in self.receipts):
            trees.append((HEAD, f"default branch, {definition.head.commit[:12]} of {definition.head.date}"))
        asked = definition.ask
        if asked is not None and any(name.startswith(ASK) for name in self.receipts):
            trees.append((ASK, f"{asked.patch}, on {asked.origin.rpartition('@')[2][:12]} of {asked.date}"))
        rows = [self._row(target, [prefix for prefix, _ in trees]) for target in targets]
        table = markdown.table(["target", "evidence", "GPU or host", *(text for _, text in trees), "mutants"], rows)
        return "\n".join([table, *self._below()]).strip()

    def _targets(self) -> list[str]:
        """List the targets that receipts speak of: those of pack.toml, then those that it does not list."""
        listed = self.pack.definition.targets
        others = [name for name in self.receipts if name not in listed and ":" not in name]
        found = [name for name in listed if name in self.receipts] + others
        if not found:
            raise MissingError("there is no receipt")
        return found

    def _row(self, target: str, prefixes: list[str]) -> list[str]:
        one = self.receipts[target]
        cells = [self._cell(self.receipts.get(prefix + target), one.evidence) for prefix in prefixes]
        return [target, one.evidence, one.host.gpu or "CPU", *cells, strength.summary(self.pack, target, one.evidence)]

    def _cell(self, one: Receipt | None, of_row: Evidence) -> str:
        """Write a verdict, with its evidence where that is not the row's."""
        if one is None:
            return NOT_JUDGED
        other = f" ({one.evidence})" if one.evidence != of_row else ""
        other += "" if one.target in self.pack.definition.targets else f" ({NO_EXPECTATION})"
        return one.verdict + other + (" STALE" if staleness.reasons(self.pack, one) else "")

    def _below(self) -> list[str]:
        """Write what the table's words say, and what else was run."""
        definition = self.pack.definition
        seen = {one.verdict for one in self.receipts.values()}
        lines = [text.format(definition.kind.what) for verdict, text in LEGEND.items() if verdict in seen]
        lines += [f"Fixed in {definition.upstream.package} {definition.fixed_in}."] if definition.fixed_in else []
        head = definition.head
        if head is not None and head.fixed_by:
            lines.append(f"Fixed on the default branch by {_short(head.fixed_by)}.")
        suite = suite_receipt.load(self.pack.folder / "receipts")
        if suite is not None:
            lines += _suite(suite)
            lines += ["The counts are STALE."] if suite_receipt.reasons(self.pack, suite) else []
        return [" ".join(lines)] if lines else []

    def searched(self) -> str:
        """Say when, and for which words, upstream's threads were searched."""
        found = self.pack.definition.searched
        if found is None:
            raise MissingError("pack.toml has no searched")
        queries = "\n".join(f"- “{query}”" for query in found.queries)
        return f"Searched on {found.date} for:\n\n{queries}"


def _tail(printed: str, *, is_own: bool) -> str:
    """Return the last lines of an output; `is_own` says whether the script itself prints the sentinel."""
    lines = [line for line in printed.splitlines() if not LOGGED.match(line)][-MOST_PRINTED:]
    word, mark, reason = lines[-1].partition(": ") if lines else ("", "", "")
    if mark and word in JUDGED:
        lines[-1] = reason
    elif word == LaneVerdict.FIX_VALIDATED and not is_own:
        lines[-1] = NO_ERROR
    return "\n".join(lines)


def _short(version: str) -> str:
    return COMMIT.sub(lambda match: match[0][:12], version)


def _host(one: Receipt, *, with_torch: bool) -> str:
    host = one.host
    of_torch = (("torch", host.torch), ("triton", host.triton)) if with_torch else ()
    versions = ", ".join(f"{name} {version}" for name, version in (("Python", host.python), *of_torch) if version)
    where = f"{host.gpu}, driver {host.driver}, CUDA {host.cuda}" if host.gpu else "no GPU"
    return f"{where}: {versions}"


def _suite(suite: SuiteReceipt) -> list[str]:
    """Count the tests that exist upstream and the new ones apart: a new test says nothing of upstream's own suite."""
    added = [row for row in suite.tests if row.change in (Change.NEW, Change.NEW_WRONG)]
    functions = {row.test.partition("[")[0] for row in added}
    before, after = (Counter(results) for results in (suite.before, suite.after))
    own = [before - Counter(row.before for row in added), after - Counter(row.after for row in added)]
    lines = []
    if own[0] or own[1]:
        command = suite_command(suite.files, suite.arguments, suite.environment)
        said = f"{_counted(own[0])}; with the patch, {_counted(own[1])}"
        lines = [f"Upstream's own tests, {markdown.code(command, most=2000)}: {said}."]
    if added:
        changed = [_counted(Counter(row.before for row in added)), _counted(Counter(row.after for row in added))]
        number = f"{_several(len(functions), 'new test')}, {_several(len(added), 'case')}"
        lines.append(f"{number}: {changed[0]}; with the patch, {changed[1]}.")
    return lines


def suite_command(files: tuple[str, ...], arguments: tuple[str, ...], environment: Mapping[str, str]) -> str:
    """Return the line that runs upstream's own tests in a checkout, as pack.toml selects them."""
    variables = (f"{name}={shlex.quote(value)}" for name, value in environment.items())
    return " ".join([*variables, "pytest", shlex.join([*files, *arguments])])


def _several(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' if number != 1 else ''}"


def _counted(results: Mapping[str, int]) -> str:
    return ", ".join(f"{number} {result}" for result, number in results.items()) or "none"
