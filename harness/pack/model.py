"""A pack: its folder, and what its pack.toml states."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass, field, replace
from pathlib import Path

from harness.core.words import ActionKind, Evidence, Fix, Kind, ThreadState, Verdict
from harness.pack import forms


@dataclass(frozen=True)
class Upstream:
    """The project under test and what the pack is pinned to: a release, or a commit that no release holds."""

    package: forms.Package  # its name on the package index
    repository: forms.Repository  # its URL
    license: forms.Line  # of its source, as SPDX names it
    modules: tuple[forms.Module, ...]  # the import names under test
    commit: forms.Commit = ""  # of the release's tag, or the one that is pinned; empty where it is not known
    version: forms.Release = ""  # of the release; empty where a commit is pinned
    file: forms.Archive = ""  # of the release on the package index, likewise
    sha256: forms.Sha256 = ""  # of that file, likewise
    date: dt.date | None = None  # of the commit, where that is pinned
    source_root: forms.Path = ""  # the folder of the repository that goes on PYTHONPATH; empty for its root

    @property
    def is_commit(self) -> bool:
        """Whether a commit is pinned, and no release."""
        return not self.file

    @property
    def is_wheel(self) -> bool:
        """Whether a wheel is pinned: then other releases are judged by their wheels, too."""
        return self.file.endswith(".whl")

    @property
    def is_compiled(self) -> bool:
        """Whether that wheel is made for one platform: its libraries find those of other wheels beside them."""
        return self.is_wheel and not self.file.endswith("-any.whl")

    @property
    def pin(self) -> str:
        """What is pinned, in the words of a receipt: a version, or ``commit`` and its 40 digits."""
        return f"commit {self.commit}" if self.is_commit else self.version


@dataclass(frozen=True)
class Head:
    """What upstream's default branch gives, at a named commit."""

    commit: forms.Commit
    date: dt.date
    verdict: Verdict
    fixed_by: forms.Commit = ""


@dataclass(frozen=True)
class Searched:
    """When, and for which words, upstream's issues and pull requests were searched."""

    date: dt.date
    queries: tuple[forms.Said, ...]


@dataclass(frozen=True)
class Thread:
    """An issue or a pull request of an upstream on the same lines."""

    url: forms.ThreadUrl  # of it
    state: ThreadState  # as it was on that date
    date: dt.date  # of the copy in which it was read
    says: forms.Said  # what it says about the same lines, in one sentence


@dataclass(frozen=True)
class Action:
    """What is to be done with a pack."""

    kind: ActionKind  # file, filed, fixed or nothing
    text: forms.Sentence  # what to file where, what fixed it, or why nothing is to be done


@dataclass(frozen=True)
class Ask:
    """The patch that upstream is asked to merge, where it is judged on another tree than the release."""

    patch: forms.OtherPatch  # the pack's file that upstream is asked to merge
    origin: forms.Origin  # ``git+URL@COMMIT``: the tree where development happens, on which it applies
    date: dt.date  # of that commit
    checks: tuple[forms.Said, ...]  # names or globs of the defect checks that are wrong there and right with the patch


@dataclass(frozen=True)
class Workaround:
    """What a user of a release with the bug can do without the patch, as far as the probe shows that it works."""

    text: forms.Said
    checks: tuple[forms.Said, ...]  # names or globs of the controls that show it, right on the pinned release


@dataclass(frozen=True)
class UpstreamTests:
    """Upstream's own tests of the files that a patch touches."""

    files: tuple[forms.Path, ...]  # relative to the repository's root
    origin: forms.Origin = ""  # ``git+URL@COMMIT``: the tree that has them; empty for the pinned one
    #: the pack's file that they are run with; empty for ask.patch where there is one, else fix.patch
    patch: forms.Patch = ""
    arguments: tuple[forms.Line, ...] = ()  # for pytest
    dependencies: str = "tests"  # the set that holds pytest and what the tests import
    gpu: bool = False  # whether they need one
    #: variables that they need besides a lane's own
    environment: dict[forms.Variable, forms.Line] = field(default_factory=dict)
    timeout_s: forms.Seconds = 600.0  # of one run of them all


@dataclass(frozen=True)
class Requires:
    """The ranges in which the runner's own interpreter, torch and triton must lie; empty: it is not needed."""

    python: forms.Range
    torch: forms.Range = ""
    triton: forms.Range = ""


@dataclass(frozen=True)
class Dependency:
    """One package of a dependency set: its version, the sha256 of its files, and where it is needed (empty: always)."""

    version: str
    hashes: tuple[str, ...]
    marker: str = ""


@dataclass(frozen=True)
class Target:
    """What the pinned release must give on one target."""

    evidence: tuple[Evidence, ...]  # the kinds that it admits
    #: On the pack; unless pack.toml states it, CONFIRMED, and of a pack without a patch REPRODUCED.
    verdict: Verdict
    #: The files of the upstream repository that the probe has to load in the patched lane; unless pack.toml states
    #: them, those of fix.patch.
    loads: tuple[forms.Path, ...]
    claims: tuple[forms.Claim, ...] = ()  # that both lanes must support; by default those of the pack
    claims_executed: tuple[forms.Claim, ...] = ()  # likewise, where they execute on the GPU
    dependencies: str = "default"  # the dependency set that its lanes import
    timeout_s: forms.Seconds = 600.0  # of one lane
    #: Its figures in ms, MiB and the like are compared from run to run; the probe times with `alone`.
    measures: bool = False
    #: Its lanes have their GPU (on target cpu: the host's cores) for themselves from beginning to end.
    exclusive: bool = False
    gpus: forms.Count = 1  # how many GPUs an executed lane needs, all at once
    #: How many ranks the largest group has that the probe starts and speaks for; 1: it starts none.
    ranks: forms.Count = 1
    #: In how many its probe may compile kernels, or run cases, at once, as its lanes are told; 1: in turn.
    processes: forms.Count = 1
    gpu_memory_gib: forms.GiB = 8.0  # what an executed lane takes of each at most, in GiB
    #: What a script of the pack builds in the cache; lanes run with its interpreter where it is there.
    environment: str = ""

    def claims_of(self, evidence: Evidence | None) -> tuple[str, ...]:
        """Return the claims that both lanes must support: some need the GPU itself."""
        return self.claims + (self.claims_executed if evidence == Evidence.EXECUTED else ())


CPU = "cpu"
#: A target that no pack lists: nothing is expected of it.
UNLISTED = Target(evidence=(), verdict=Verdict.CONFIRMED, loads=())


@dataclass(frozen=True)
class BuiltEnvironment:
    """What a script of the pack builds in the cache for lanes that no wheel serves."""

    script: forms.FileName  # in the pack's folder
    files: dict[forms.Package, forms.Sha256]  # of the package index that it builds from: sha256 by package


@dataclass(frozen=True)
class Sample:
    """The wrong fixes that `runner.py mutate` makes of fix.patch: how many, drawn by which seed."""

    seed: int = 1
    generated: forms.Number = 30


@dataclass(frozen=True)
class OrdinaryScript:
    """How a reproduce.py is run that is its author's own, and prints no sentinel."""

    #: the name of the exception that is the bug, or ``timeout``; empty: any failure of the script
    fails: forms.Line = ""
    timeout_s: float = 0.0  # of each run, in seconds, after which the script has failed; 0: none but the lane's
    repeat: forms.Count = 1  # how often it is run; it has failed where one run did
    #: variables that it needs besides a lane's own
    environment: dict[forms.Variable, forms.Line] = field(default_factory=dict)
    beside: tuple[forms.Path, ...] = ()  # files that it imports or reads, by their paths in the pack's folder
    #: The package under test, without a version, and what else is resolved for another release of it; empty: every
    #: release is judged with the pack's own dependencies.
    requires: tuple[forms.Line, ...] = ()


@dataclass(frozen=True)
class OtherReleases:
    """What `runner.py versions` judges releases by, the pinned one among them."""

    #: Names or globs of the checks, defects and controls; empty: all of them. An older release may be wrong in another
    #: option too, which is another bug, and a control of that option then says nothing of this one.
    checks: tuple[forms.Said, ...] = ()


@dataclass(frozen=True)
class Definition:
    """A parsed pack.toml, and the dependency sets that lie beside it."""

    title: forms.Said
    kind: Kind
    leading_figure: forms.Line
    upstream: Upstream
    requires: Requires
    targets: dict[forms.TargetName, Target]
    fix: Fix = Fix.PATCH  # without a patch there is no patched lane, and REPRODUCED is all that can be shown
    head: Head | None = None
    fixed_in: forms.Release = ""
    known: forms.Line = ""  # the thread in which its deviation is known: a sweep names it and does not fail for it
    action: Action | None = None
    workaround: Workaround | None = None
    advisory: bool = True  # without it nobody who has the release is warned: what the pack shows is no defect
    searched: Searched | None = None
    threads: tuple[Thread, ...] = ()
    ask: Ask | None = None
    upstream_tests: UpstreamTests | None = None
    dependencies: dict[str, dict[str, Dependency]] = field(default_factory=dict)
    environments: dict[forms.SetName, BuiltEnvironment] = field(default_factory=dict)
    strength: Sample = field(default_factory=Sample)
    versions: OtherReleases = field(default_factory=OtherReleases)
    script: OrdinaryScript | None = None  # how a reproduce.py is run that prints no sentinel; None: it prints its own

    @property
    def has_patch(self) -> bool:
        """Whether a lane runs on a patched tree besides the pristine one."""
        return self.fix == Fix.PATCH

    def stated(self, name: str) -> Target:
        """Return what is stated of a target; of one that is not listed, how to run it, and nothing that it must give.

        A GPU that is not listed is run as the pack's own GPU targets are: with their dependency set, time and memory.
        """
        if name in self.targets:
            return self.targets[name]
        gpus = [target for listed, target in self.targets.items() if listed != CPU]
        like = next((one for one in gpus if Evidence.EXECUTED in one.evidence), next(iter(gpus), UNLISTED))
        admitted = dict.fromkeys(kind for target in gpus for kind in target.evidence)
        evidence = tuple(admitted) or (Evidence.EXECUTED,)
        return replace(like, evidence=evidence if name != CPU else (), loads=(), claims=(), claims_executed=())

    @property
    def claims(self) -> tuple[str, ...]:
        """Every claim that a lane of this pack may print, on whatever target."""
        every = (claim for target in self.targets.values() for claim in target.claims_of(Evidence.EXECUTED))
        return tuple(dict.fromkeys(every))

    def is_head(self, commit: str) -> bool:
        """Whether a tree of that commit (empty: of none) is upstream's default branch as pack.toml names it."""
        return self.head is not None and commit == self.head.commit


@dataclass(frozen=True)
class Pack:
    """One pack on disk."""

    folder: Path
    definition: Definition
    receipts_elsewhere: Path | None = None  # the folder of other receipts than its own, such as a run's
    inputs: Path | None = None  # that of the copies of probe and patches which a run took; None: the pack itself

    @property
    def name(self) -> str:
        """The folder's name, such as ``09_liger_flce_none``."""
        return self.folder.name

    @property
    def probe(self) -> Path:
        return (self.inputs or self.folder) / "reproduce.py"

    @property
    def contract(self) -> Path:
        """The thorough checks, a pytest file; a pack may have none yet."""
        return (self.inputs or self.folder) / "contract.py"

    @property
    def patch(self) -> Path:
        return (self.inputs or self.folder) / "fix.patch"

    @property
    def own_head_patch(self) -> Path:
        """The patch for upstream's default branch alone, where fix.patch does not apply there."""
        return (self.inputs or self.folder) / "fix.head.patch"

    def patch_for(self, commit: str) -> Path:
        """Return the patch for a tree of that commit; empty: of a release, or of no commit that is known."""
        own = self.own_head_patch
        return own if self.definition.is_head(commit) and own.exists() else self.patch

    @property
    def ask_patch(self) -> Path | None:
        """The patch that upstream is asked to merge, where that is another than fix.patch."""
        return self.folder / self.definition.ask.patch if self.definition.ask else None

    @property
    def upstream_test_patch(self) -> Path:
        """The test of this bug for upstream's own suite, which not every pack has."""
        return self.folder / "upstream_test.patch"

    def suite_patch(self, suite: UpstreamTests) -> Path:
        """Return the patch that upstream's own tests are run with."""
        return self.folder / suite.patch if suite.patch else self.ask_patch or self.patch

    @property
    def report(self) -> Path:
        return self.folder / "README.md"

    @property
    def report_template(self) -> Path:
        """The words of the report, with placeholders for what was measured."""
        return self.folder / "report.in.md"

    @property
    def receipts(self) -> Path:
        """The folder of its receipts: the committed ones, unless others were requested."""
        return self.receipts_elsewhere or self.folder / "receipts"
