"""The parts of a report that the runner writes for upstream: script and output, diff, environment, threads."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from harness.core import markdown
from harness.core.words import Evidence, LaneName, LaneVerdict
from harness.pack.model import Pack
from harness.receipt import staleness
from harness.receipt.receipt import FixKind, Receipt
from harness.report import patches
from harness.report.sections import ASK, HEAD, NothingStatedError, thread_line

#: Lines that a diff changes and that are still shown unfolded.
MOST_CHANGED = 25
#: What stands in a draft for the output of a script that no receipt holds.
NOT_YET = "(output is not recorded yet)"
JUDGED = (LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED)


@dataclass(frozen=True)
class Blocks:
    """The parts of one report.

    Attributes:
        pack: whose report it is.
        receipts: the strongest of each target, by target; ``head:`` and ``ask:`` before those of other trees.
        is_draft: whether an output that no receipt holds is said to be missing, and is no error.

    """

    pack: Pack
    receipts: dict[str, Receipt]
    is_draft: bool = False

    @property
    def parts(self) -> dict[str, Callable[[], str]]:
        """Map each part to what writes it."""
        return {
            "title": lambda: self.pack.definition.title,
            "script": self.script,
            "diff": self.diff,
            "environment": self.environment,
            "threads": self.threads,
        }

    def script(self) -> str:
        """Write reproduce.py, and what it printed on both trees.

        Raises:
            NothingStatedError: no receipt of today's script holds its output.

        """
        one = self._of_output()
        code = markdown.fenced(self.pack.probe.read_text(encoding="utf-8"), "python")
        if one is None and not self.is_draft:
            again = f"runner.py run {self.pack.name} --record"
            raise NothingStatedError(f"no receipt holds what today's script printed; record again. Next: {again}")
        return f"{code}\n\n{NOT_YET if one is None else markdown.fenced(self._output(one), 'text')}"

    def _of_output(self) -> Receipt | None:
        """Return the receipt whose output is shown: that of the patch which upstream is asked to merge comes first.

        Of one tree it is the CPU's where the script judged there, else that of the strongest evidence.
        """
        for is_asked in (True, False):
            found = [one for name, one in self.receipts.items() if name.startswith(ASK) == is_asked]
            found = [one for one in found if is_asked or one not in self._others(HEAD)]
            printed = [one for one in found if self._printed(one)]
            judged = [one for one in printed if one.lanes[LaneName.PRISTINE].script in JUDGED]
            if printed:
                return min(judged or printed, key=lambda one: (one.target != "cpu" and bool(judged), one.evidence.rank))
        return None

    def _others(self, prefix: str) -> list[Receipt]:
        return [one for name, one in self.receipts.items() if name.startswith(prefix)]

    def _printed(self, one: Receipt) -> bool:
        pristine = one.lanes.get(LaneName.PRISTINE)
        return pristine is not None and bool(pristine.printed) and not staleness.reasons(self.pack, one)

    def _output(self, one: Receipt) -> str:
        runs = []
        for name, lane in one.lanes.items():
            if lane.printed:
                tree = self._tree(one) + (self._fix(one) if name == LaneName.PATCHED else "")
                runs.append(f"$ python reproduce.py   # {tree}\n{lane.printed.strip()}")
        return "\n\n".join(runs)

    def _fix(self, one: Receipt) -> str:
        """Name what the patched tree has: the patch of this report, or another by its name."""
        if one.fix is None or one.fix.kind != FixKind.PATCH:
            return f" and {one.fix.name}" if one.fix else ""
        shown = patches.of_pack(self.pack)
        return " with the patch" if shown is not None and shown.name == one.fix.name else f" with {one.fix.name}"

    def _tree(self, one: Receipt) -> str:
        """Name the judged tree: a release by its version, else the commit and its date."""
        package, commit = one.upstream.package, one.upstream.commit
        return f"{package} at {self._commit(commit)}" if commit else f"{package} {one.upstream.version}"

    def _commit(self, commit: str) -> str:
        definition = self.pack.definition
        dates = {definition.upstream.commit: definition.upstream.date}
        dates |= {definition.head.commit: definition.head.date} if definition.head else {}
        dates |= {definition.ask.origin.rpartition("@")[2]: definition.ask.date} if definition.ask else {}
        date = dates.get(commit)
        return commit[:12] + (f" of {date}" if date else "")

    def diff(self, name: str | None = None) -> str:
        """Show the patch that upstream is asked to merge, or another of the pack; a long one is folded."""
        path = patches.of_pack(self.pack) if name is None else self.pack.folder / name
        if path is None or not path.is_file() or not patches.NAME.fullmatch(path.name) or "/" in (name or ""):
            raise NothingStatedError(f"the pack has no {name or 'patch'}")
        text = path.read_text(encoding="utf-8")
        fence, files = markdown.fenced(patches.diff_of(text), "diff"), patches.changes(text)
        if sum(one.added + one.removed for one in files) <= MOST_CHANGED:
            return fence
        return markdown.details(", ".join(f"{one.path} (+{one.added} -{one.removed})" for one in files), fence).strip()

    def environment(self) -> str:
        """Write in one line what was judged, and where."""
        order = dict.fromkeys((*self.pack.definition.targets, *self.receipts))
        own = [self.receipts[name] for name in order if name in self.receipts and ":" not in name]
        others = [*self._others(HEAD), *self._others(ASK)]
        if not own:
            raise NothingStatedError("there is no receipt")
        trees = dict.fromkeys(self._tree(one) for one in own)
        heads = dict.fromkeys(f"default branch at {self._commit(one.upstream.commit)}" for one in others)
        hosts: dict[str, dict[str, None]] = {}
        for one in (*own, *others):
            versions = f"torch {one.host.torch}" + (f", triton {one.host.triton}" if one.host.triton else "")
            hosts.setdefault(versions, {})[_device(one)] = None
        machines = (f"{versions} ({', '.join(devices)})" for versions, devices in hosts.items())
        return "; ".join([*trees, *heads, *machines]) + "."

    def threads(self) -> str:
        """Write what upstream has already on the same lines, a line each."""
        definition = self.pack.definition
        if not definition.threads and definition.searched is None:
            raise NothingStatedError("pack.toml has neither [[threads]] nor searched")
        lines = [thread_line(definition.upstream, one) for one in definition.threads]
        return "\n".join(lines) or "No thread on the same lines was found."


def _device(one: Receipt) -> str:
    if one.host.gpu:
        return one.host.gpu
    return f"compiled for {one.target}" if one.evidence == Evidence.COMPILED else "CPU"
