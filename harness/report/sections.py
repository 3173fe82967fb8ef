"""The parts of a report that the runner writes whole: verdicts, command lines, patch, threads, ask, strength.

`runner.py check --bundle` writes them again from the receipts of a bundle, and compares.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from harness.core import markdown
from harness.core.words import NO_EXPECTATION, Evidence, Kind, Verdict
from harness.pack.model import Pack, Thread, Upstream
from harness.receipt import staleness
from harness.receipt.receipt import Receipt
from harness.receipt.strength import NOT_RUN_HERE
from harness.report import checkout_lines, links, patches, strong
from harness.suites import receipt as suite_receipt

THREAD = re.compile(r"https://github\.com/(?P<project>[^/]+/[^/]+)/(?:issues|pull|discussions)/(?P<number>\d+)")
COMMIT = re.compile(r"\b[0-9a-f]{40}\b")
HEAD, ASK = "head:", "ask:"
NOT_JUDGED = "not judged"
#: A cleanup is no bug: what its verdicts say, in words.
CLEANUP_WORDS = {
    Verdict.CONFIRMED: "shown; gone with the patch, and the results are the same",
    Verdict.REPRODUCED: "shown",
    Verdict.VALIDATED: "gone with the patch",
    Verdict.FIXED_UPSTREAM: "no longer there",
}
#: What the words of the table say, for those of them that stand in it.
LEGEND = {
    Verdict.CONFIRMED: "CONFIRMED: the tree is wrong, and right with the patch.",
    Verdict.REPRODUCED: "REPRODUCED: the tree is wrong; no patch was judged.",
    Verdict.FIXED_UPSTREAM: "FIXED_UPSTREAM: the tree is right without the patch.",
}


class NothingStatedError(LookupError):
    """A part was asked for that neither pack.toml nor a receipt has anything for."""


def said(kind: Kind, verdict: Verdict) -> str:
    """Write a verdict; that of a cleanup in words."""
    if kind != Kind.CLEANUP:
        return verdict
    return CLEANUP_WORDS.get(verdict, verdict.lower().replace("_", " "))


@dataclass(frozen=True)
class Sections:
    """The parts of one report.

    Attributes:
        pack: whose report it is.
        name: of the upstream that reads it.
        receipts: the strongest of each target, by target; ``head:`` and ``ask:`` before those of other trees.
        headed: whether the template has a heading of its own for the threads.
        of_run: whether the receipts are those of one run: only the trees and targets that it judged are spoken of.

    """

    pack: Pack
    name: str
    receipts: dict[str, Receipt]
    headed: bool = False
    of_run: bool = False

    def text(self, part: str, rest: str | None) -> str:
        """Write a part.

        Raises:
            NothingStatedError: there is none of that name, or nothing to write in it.

        """
        parts: dict[str, Callable[[], str]] = {
            "verdicts": self.verdicts,
            "reproduce": self.reproduce,
            "patch": self.patch,
            "threads": self.threads,
            "ask": self.ask,
            "strength": self.strength,
            "searched": self.searched,
        }
        if part == "patch" and rest is not None:
            return self.patch_of(rest)
        if part not in parts or rest is not None:
            raise NothingStatedError("no placeholder of that form")
        return parts[part]()

    def verdicts(self) -> str:
        """Write the table: a row for each target that a receipt speaks of."""
        definition = self.pack.definition
        targets = self._targets()
        trees = [("", f"{definition.upstream.package} {definition.upstream.version or definition.upstream.date}")]
        if definition.head is not None and (not self.of_run or any(name.startswith(HEAD) for name in self.receipts)):
            trees.append((HEAD, f"default branch, {definition.head.commit[:12]} of {definition.head.date}"))
        asked = definition.ask
        if asked is not None and any(name.startswith(ASK) for name in self.receipts):
            trees.append((ASK, f"{asked.patch}, on {asked.origin.rpartition('@')[2][:12]} of {asked.date}"))
        rows = [self._row(target, [prefix for prefix, _ in trees]) for target in targets]
        table = markdown.table(["target", "evidence", "GPU or host", *(text for _, text in trees), "strength"], rows)
        return "\n".join([table, *self._below()]).strip()

    def _targets(self) -> list[str]:
        """List the targets that receipts speak of: those of pack.toml, then those that it does not list."""
        listed = self.pack.definition.targets
        others = [name for name in self.receipts if name not in listed and ":" not in name]
        found = [name for name in listed if name in self.receipts] + others
        if not found:
            raise NothingStatedError("there is no receipt")
        return found

    def _row(self, target: str, prefixes: list[str]) -> list[str]:
        one = self.receipts[target]
        found = strong.find(self.pack, target, one.evidence)
        cells = [self._cell(self.receipts.get(prefix + target), one.evidence) for prefix in prefixes]
        parts = (str(found or strong.nothing(self.pack)), strong.first_sight(self.pack, target, one.evidence))
        return [target, one.evidence, one.host.gpu or "CPU", *cells, "; ".join(filter(None, parts))]

    def _cell(self, one: Receipt | None, of_row: Evidence) -> str:
        """Write a verdict, with its evidence where that is not the row's."""
        if one is None:
            return NOT_JUDGED
        other = f" ({one.evidence})" if one.evidence != of_row else ""
        other += "" if one.target in self.pack.definition.targets else f" ({NO_EXPECTATION})"
        return said(one.kind, one.verdict) + other + (" STALE" if staleness.reasons(self.pack, one) else "")

    def _below(self) -> list[str]:
        """Write what the table's words say, and what else was run."""
        definition = self.pack.definition
        seen = {one.verdict for one in self.receipts.values()}
        lines = [text for verdict, text in LEGEND.items() if verdict in seen and definition.kind != Kind.CLEANUP]
        lines += [f"Fixed in {definition.upstream.package} {definition.fixed_in}."] if definition.fixed_in else []
        head = definition.head
        if head is not None and head.fixed_by:
            lines.append(f"Fixed on the default branch by {COMMIT.sub(lambda match: match[0][:12], head.fixed_by)}.")
        suite = suite_receipt.load(self.pack.folder / "receipts")
        if suite is not None:
            stale = " (STALE)" if suite_receipt.reasons(self.pack, suite) else ""
            lines.append(
                f"Upstream's own tests ({', '.join(suite.files)}): {_counted(suite.before)}; with {suite.patch.name}, "
                f"{_counted(suite.after)}{stale}."
            )
        return [" ".join(lines)] if lines else []

    def reproduce(self) -> str:
        """Write the command lines that show the pack's tree without its patch, and with it where there is one.

        A compiled upstream comes with the pins of the probe's header: its checkout could not be imported. Where no
        commit is known, the tree is the release's own file, by its sha256.
        """
        definition = self.pack.definition
        upstream, kind = definition.upstream, definition.kind
        targets = self._targets()
        target = "cpu" if "cpu" in targets else targets[0]
        wrong, right = ("10", "0") if kind == Kind.CLEANUP else ("10: BUG_REPRODUCED", "0: FIX_VALIDATED")
        url, folder = links.repository_url(), f"packs/{self.pack.name}"
        probe = f"uv run {folder}/reproduce.py --target {target}"
        lines = [f"git clone {url} reproducer && cd reproducer" if url else f"# in a clone of {links.project()}"]
        lines += [] if upstream.is_compiled else checkout_lines.laid_out(upstream)
        lines.append(f"{probe}  # exit status {wrong}")
        if definition.has_patch:
            lines.append(f'{checkout_lines.applied(upstream)} "$PWD/{folder}/{self.pack.patch.name}"')
            lines.append(f"{probe}  # exit status {right}")
        return markdown.fenced("\n".join(lines), "sh")

    def patch(self) -> str:
        """Show the patch for the project that reads the report."""
        path = patches.for_project(self.pack, self.name)
        if path is None:
            return patches.none_for(self.name)
        if not path.exists():
            raise NothingStatedError(f"{path.name} is missing")
        own_head = self.pack.own_head_patch
        besides = path == self.pack.patch and own_head.exists()
        return "\n\n".join(patches.shown(self.pack, one) for one in ([path, own_head] if besides else [path]))

    def patch_of(self, name: str) -> str:
        """Show one patch of the pack by the name of its file."""
        path = self.pack.folder / name
        if not patches.NAME.fullmatch(name) or not path.is_file():
            raise NothingStatedError("the pack has no such patch")
        return patches.shown(self.pack, path)

    def threads(self) -> str:
        """Write what upstream has already on the same lines, a line each."""
        found = self.pack.definition.threads
        if not found and self.pack.definition.searched is None:
            raise NothingStatedError("pack.toml has neither [[threads]] nor searched")
        upstream = self.pack.definition.upstream
        lines = [thread_line(upstream, one) for one in found] or ["No thread on the same lines was found."]
        return "\n".join(lines if self.headed else ["**Already there**", *lines])

    def ask(self) -> str:
        """Write what the maintainer is asked to do."""
        asked = self.pack.definition.ask
        if asked is None or not asked.text:
            raise NothingStatedError("pack.toml has no [ask]")
        return asked.text.strip()

    def strength(self) -> str:
        """Say how many wrong fixes the probe refused, target by target."""
        measured = []
        for target in self.pack.definition.targets:
            one = self.receipts.get(target)
            found = strong.find(self.pack, target, one.evidence) if one else None
            if one is not None and found is not None:
                more = f" ({found.elsewhere} {NOT_RUN_HERE})" if found.elsewhere else ""
                stale = ", STALE" if found.stale else ""
                killed = f"killed {found.killed} of {found.of} wrong fixes{more}"
                parts = (f"{killed}, {found.date}{stale}", strong.first_sight(self.pack, target, one.evidence))
                measured.append(f"{target} ({one.evidence}): {', '.join(filter(None, parts))}")
        return f"Strength: {'; '.join(measured) or strong.nothing(self.pack)}."

    def searched(self) -> str:
        """Say when, and for which words, upstream's threads were searched."""
        found = self.pack.definition.searched
        if found is None:
            raise NothingStatedError("pack.toml has no searched")
        return f"Searched on {found.date} for {', '.join(f'“{query}”' for query in found.queries)}."


def thread_line(upstream: Upstream, one: Thread) -> str:
    """Write one thread as a line of a list; of another project, with that project's name."""
    match, own = THREAD.match(one.url), THREAD.match(f"{upstream.repository}/issues/0")
    if match is None:
        name = one.url
    elif own is not None and match["project"].lower() == own["project"].lower():
        name = f"#{match['number']}"
    else:
        name = f"{match['project']}#{match['number']}"
    return f"- [{name}]({one.url}), {one.state}, {one.date}: {one.says}"


def _counted(results: dict[str, int]) -> str:
    return ", ".join(f"{number} {result}" for result, number in results.items()) or "none"
