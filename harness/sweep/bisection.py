"""Who did it: cells of what moves whose verdict changed are bisected, behind everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from harness.receipt.receipt import Receipt
from harness.schedule.session import Session
from harness.schedule.workers import failure_of
from harness.sweep.baseline import OF_VERDICT, Baseline, expected
from harness.sweep.results import CellRow
from harness.sweep.selection import HEAD, LATEST
from harness.upstream import source
from harness.verdict import pack_verdict
from harness.verdict.cell import Cell
from harness.versions import bisection
from harness.versions.judging import Judging


@dataclass(frozen=True)
class Bisection:
    """Bisects what flipped."""

    session: Session  # of the sweep, with the time that there is for it: what ended before is not run again
    compared: Baseline  # what the sweep is compared with
    tell: Callable[[str], None]  # told of each step
    clean: Callable[[str], str]  # takes what is private out of a text

    def row(self, cell: Cell, row: CellRow) -> CellRow:
        """Return the row of a cell, with what came of its bisection where its verdict changed.

        KeyboardInterrupt is raised where the user interrupted.
        """
        moves = cell.column in (LATEST, HEAD) and row.lanes and not row.known
        flipped = any(change.kind in OF_VERDICT for change in row.changes)
        return replace(row, bisected=self._bisected(cell, row.verdict)) if moves and flipped else row

    def _bisected(self, cell: Cell, now: str) -> str:
        """Say which release or commit changed the verdict; what goes wrong with one cell leaves the others."""
        then = self.compared.of(cell)
        before = expected(cell, then)
        unjudged = next((one for one in (before, now) if one not in pack_verdict.PRISTINE), None)
        if unjudged is not None:
            return f"not bisected: {unjudged} is neither right nor wrong"
        if pack_verdict.PRISTINE[before] == pack_verdict.PRISTINE[now]:
            return "not bisected: the bug is there as before; what changed is what the patch does"
        self.tell(f"bisecting {cell.name}: {now}, was {before}")
        try:
            return "; ".join(self.clean(text) for text in self._found(cell, then))
        except Exception as error:  # noqa: BLE001 - the sweep is written whatever happens here
            return self.clean(f"not bisected: {failure_of(error, cell).reason}")

    def _found(self, cell: Cell, then: Receipt | None) -> list[str]:
        quiet = replace(self.session, watch=None, repeat=1)
        judging = Judging(quiet, cell.pack, cell.target, cell.known_evidence)
        definition = cell.pack.definition
        if cell.column == HEAD:
            named = definition.head.commit if definition.head else definition.upstream.commit
            old = source.commit_of(then.upstream.version) if then else named
            old = old or definition.upstream.commit
            return [bisection.commit_between(judging, old, cell.source.value, self.tell)]
        old = then.upstream.version if then else definition.upstream.version
        if not old or source.commit_of(old):
            return ["not bisected: a commit is pinned, and no release of it was judged before"]
        return bisection.release_between(judging, old, cell.version, self.tell)
