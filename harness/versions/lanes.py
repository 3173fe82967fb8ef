"""Judging candidates: one pristine lane each, several at once, each on cores of its own."""

from __future__ import annotations

import functools
import os
import queue
import re
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

from harness import download, host
from harness.errors import HarnessError, UnavailableError
from harness.execute import Runner
from harness.origin import Kind
from harness.outcome import Outcome, Request
from harness.pack import Pack
from harness.summary import figure_text
from harness.versions import bisection, candidate
from harness.versions.candidate import Candidate
from harness.versions.history import Row
from harness.words import PROBE_STATUS, Evidence, Exit, LaneName, LaneVerdict, Verdict

#: The word that one lane gives for each verdict that a pristine lane alone can have.
WORDS = {
    Verdict.REPRODUCED: LaneVerdict.BUG_REPRODUCED,
    Verdict.FIXED_UPSTREAM: LaneVerdict.FIX_VALIDATED,
    Verdict.CONTROL_FAILED: LaneVerdict.CONTROL_FAILED,
    Verdict.UNSUPPORTED: LaneVerdict.UNSUPPORTED,
}
#: How Python's traceback names the exception that ended a program.
EXCEPTION = re.compile(r"(?m)^(?:[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit|Warning)\b.*)$")


def _take(shares: queue.SimpleQueue[list[int]]) -> None:
    """Bind this thread, and so every lane that it starts, to its share: torch then uses as many threads as that."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, shares.get())


@dataclass(frozen=True)
class Judging:
    """One pack, one target, any number of candidates."""

    runner: Runner
    pack: Pack
    target: str
    evidence: Evidence
    request: Request

    def judge(self, one: Candidate) -> Row:
        """Run the probe on one candidate; a surprise inside the probe is UNSUPPORTED here, never the bug."""
        if one.reason:
            return Row(one.label, one.date, LaneVerdict.UNSUPPORTED, reason=one.reason)
        runner = replace(self.runner, logs=self.runner.logs / re.sub(r"[^\w.-]+", "_", one.label))
        request = replace(self.request, upstream=one.upstream, companions=one.companions, lanes=(LaneName.PRISTINE,))
        try:
            outcome = runner.outcome(self.pack, self.target, self.evidence, request)
        except UnavailableError as error:
            return Row(one.label, one.date, LaneVerdict.ERROR, reason=str(error))
        return self._row(one, outcome)

    def _row(self, one: Candidate, outcome: Outcome) -> Row:
        name = self.pack.definition.leading_figure
        result = outcome.pristine
        figures = result.transcript.figures if result else ()
        figure = next((line for line in figures if line.name == name), None)
        verdict = WORDS.get(outcome.judgement.verdict, LaneVerdict.ERROR)
        reason = outcome.judgement.reason
        surprise = result is not None and result.status == PROBE_STATUS[LaneVerdict.UNSUPPORTED]
        if verdict == LaneVerdict.ERROR and surprise and result and result.transcript.verdict is None:
            said = EXCEPTION.findall(result.log.read_text(encoding="utf-8", errors="replace"))
            verdict, reason = LaneVerdict.UNSUPPORTED, said[-1].strip() if said else reason
        return Row(
            label=one.label,
            date=one.date or self._date(outcome),
            verdict=verdict,
            figure=figure_text(figure, None),
            reason="" if verdict in (LaneVerdict.BUG_REPRODUCED, LaneVerdict.FIX_VALIDATED) else reason,
            seconds=round(result.seconds, 3) if result else 0.0,
        )

    def _date(self, outcome: Outcome) -> str:
        """Return the date of the newest file in the release's archive, where the index stated none."""
        if outcome.tree is None or outcome.origin is None or outcome.origin.kind not in (Kind.PINNED, Kind.RELEASE):
            return ""
        package = self.pack.definition.upstream.package
        try:
            return candidate.date_in(download.fetch(self.runner.cache, package, None, outcome.tree.sha256))
        except (HarnessError, OSError, ValueError):
            return ""

    def every(self, candidates: Iterable[Candidate], jobs: int, seen: Callable[[int, Row], None]) -> None:
        """Judge candidates, `jobs` at once, and tell of each as it ends, by its index."""

        def work(index: int, one: Candidate) -> None:
            seen(index, self.judge(one))

        at_once([functools.partial(work, index, one) for index, one in enumerate(candidates)], jobs)

    def bisected(self, candidates: list[Candidate], jobs: int, seen: Callable[[int, Row], None]) -> None:
        """Judge only what decides where the bug of the pinned release (or of the newest) begins and ends.

        Raises:
            HarnessError: that release does not have the bug, so there is nothing to search from.

        """
        rows: dict[int, Row] = {}

        def judge(index: int) -> Row:
            if index not in rows:
                rows[index] = self.judge(candidates[index])
                seen(index, rows[index])
            return rows[index]

        last = len(candidates) - 1
        anchor = next((index for index, one in enumerate(candidates) if one.is_pinned), last)
        row = judge(anchor)
        if row.verdict != LaneVerdict.BUG_REPRODUCED:
            raise HarnessError(
                f"--bisect starts from {row.label}, which gives {row.verdict}. Next: the same without --bisect",
                status=Exit.DEVIATES,
            )
        at_once([functools.partial(bisection.search, judge, end, anchor) for end in (0, last)], min(jobs, 2))


def at_once(tasks: list[Callable[[], None]], jobs: int) -> None:
    """Run tasks in `jobs` threads, each bound to its share of the cores.

    An interruption returns at once and leaves lanes behind that end with this process: their supervisors watch it.
    """
    here = host.cores()
    shares: queue.SimpleQueue[list[int]] = queue.SimpleQueue()
    for number in range(jobs):
        shares.put(here[number % len(here) :: jobs])
    pool = ThreadPoolExecutor(jobs, initializer=_take, initargs=(shares,))
    try:
        for future in [pool.submit(task) for task in tasks]:
            future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
