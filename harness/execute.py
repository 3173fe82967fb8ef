"""Running one pack on one target: the two lanes, and what they say together."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from harness import companions, judge, lane, made, origin, patch, tree
from harness.cache import Cache
from harness.companions import CompanionSet
from harness.definition import Target
from harness.errors import UnavailableError, UnsupportedHereError
from harness.host import Host
from harness.judge import Judgement
from harness.lane import Lane, LaneResult
from harness.origin import Origin
from harness.outcome import Outcome, Request
from harness.pack import Pack
from harness.tree import Tree
from harness.words import Evidence, LaneName, LaneVerdict, Verdict


@dataclass(frozen=True)
class Runner:
    """Where lanes run.

    Attributes:
        cache: of trees, companion sets and JIT results.
        host: what it is.
        logs: the folder of the logs.
        tell: takes what is being done.
        device: the GPU that an executed lane sees, as CUDA_VISIBLE_DEVICES names it; empty: whatever the host shows.
        cancel: a file descriptor; once it can be read, a running lane is abandoned.

    """

    cache: Cache
    host: Host
    logs: Path
    tell: Callable[[str], None]
    device: str = ""
    cancel: int | None = None

    def outcome(self, pack: Pack, target: str, evidence: Evidence, request: Request) -> Outcome:
        """Judge a pack on a target; what cannot be had from outside gives the verdict ERROR with its reason."""
        started, clock = dt.datetime.now(dt.UTC), time.monotonic()
        source = origin.parse(request.upstream, pack.definition)
        try:
            prepared = self.prepare(pack, target, evidence, source, request)
            runs = [self._run_once(prepared, request, number) for number in range(1, request.repeat + 1)]
        except (UnavailableError, UnsupportedHereError) as error:
            verdict = Verdict.ERROR if isinstance(error, UnavailableError) else Verdict.UNSUPPORTED
            return Outcome(pack, target, evidence, Judgement(verdict, str(error)), source, started=started)
        judgement, agreeing = judge.repeated([run[0] for run in runs])
        _, pristine, patched = runs[-1]
        return Outcome(
            pack=pack,
            target=target,
            evidence=evidence,
            judgement=judgement,
            origin=source,
            companion_set=prepared.companion_set,
            tree=prepared.pristine,
            pristine=pristine,
            patched=patched,
            started=started,
            seconds=time.monotonic() - clock,
            agreeing=agreeing,
            repeats=len(runs),
        )

    def prepare(self, pack: Pack, target: str, evidence: Evidence, source: Origin, request: Request) -> Prepared:
        """Lay out what every run of a pack on one target shares.

        Raises:
            UnavailableError: something cannot be had from outside.
            UnsupportedHereError: a companion has no wheel for this Python.

        """
        definition = pack.definition
        wanted = definition.targets[target]
        tag = self.host.python_tag
        companion_set = companions.chosen(self.cache, definition, request.companions, wanted.companions, tag)
        self.tell(f"{pack.name}: fetching {definition.upstream.package} and its companions")
        return Prepared(
            pack=pack,
            target=target,
            evidence=evidence,
            wanted=wanted,
            pristine=tree.materialize(self.cache, definition.upstream, source),
            exact=source.is_pinned,
            head=definition.head is not None and source.value == definition.head.commit,
            companion_set=companion_set,
            companions=companions.materialize(self.cache, companion_set),
            timeout=request.timeout or wanted.timeout_s,
        )

    def _run_once(
        self, prepared: Prepared, request: Request, number: int
    ) -> tuple[Judgement, LaneResult | None, LaneResult | None]:
        pristine = patched = None
        stale = ""
        if LaneName.PRISTINE in request.lanes:
            pristine = self.lane(prepared, LaneName.PRISTINE, prepared.pristine, (), number)
        if LaneName.PATCHED in request.lanes and (pristine is None or pristine.verdict == LaneVerdict.BUG_REPRODUCED):
            try:
                tree_patched, must_load = self.patched_tree(prepared)
                patched = self.lane(prepared, LaneName.PATCHED, tree_patched, must_load, number)
            except patch.StalePatchError as error:
                stale = str(error)
        return judge.pair(pristine, patched, stale), pristine, patched

    def patched_tree(self, prepared: Prepared) -> tuple[Tree, tuple[str, ...]]:
        """Return the patched tree, and which of its changed files the probe has to load.

        Raises:
            StalePatchError: the patch does not apply cleanly.

        """
        upstream = prepared.pack.definition.upstream
        file = prepared.pack.head_patch if prepared.head else prepared.pack.patch
        if not file.exists():
            raise patch.StalePatchError(f"{file.name} is missing")
        result = patch.apply(self.cache, prepared.pristine, upstream, file, exact=prepared.exact)
        changed = set(patch.changed_files(prepared.pristine, result))
        claimed = (result.path_here(path, upstream.source_root) for path in prepared.wanted.loads)
        return result, tuple(path for path in claimed if path in changed)

    def lane(
        self, prepared: Prepared, name: LaneName, source: Tree, must_load: tuple[str, ...], number: int
    ) -> LaneResult:
        """Run one lane on the tree `source`; `number` is its repetition, from 1."""
        pack = prepared.pack
        self.tell(f"{pack.name} {prepared.target}: {name} lane" + (f", run {number}" if number > 1 else ""))
        return lane.run(
            self.cache,
            self.host,
            Lane(
                name=name,
                probe=pack.probe,
                tree=source,
                companion_set=prepared.companion_set,
                companions=prepared.companions,
                target=prepared.target,
                evidence=prepared.evidence,
                modules=pack.definition.upstream.modules,
                must_load=must_load,
                claims=pack.definition.claims,
                timeout=prepared.timeout,
                device=self.device,
                cancel=self.cancel,
                environment=made.environment(self.cache, self.host, prepared.wanted.environment),
            ),
            self.logs / f"{pack.name}.{prepared.target}.{name}{f'.{number}' if number > 1 else ''}.log",
        )


@dataclass(frozen=True)
class Prepared:
    """What all runs of one pack on one target share."""

    pack: Pack
    target: str
    evidence: Evidence
    wanted: Target
    pristine: Tree
    exact: bool
    head: bool
    companion_set: CompanionSet
    companions: Path
    timeout: float
