"""A pack: its folder, and the content of its pack.toml."""

import datetime as dt
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated

from harness.core.words import ActionKind, Evidence, Fix, Kind, ThreadState, Verdict
from harness.pack import forms


@dataclass(frozen=True)
class Upstream:
    """The project under test, pinned to a release, or to a commit that no release holds."""

    package: forms.Package  # its name on the package index
    repository: forms.Repository  # its URL
    license: forms.Line  # of its source, as SPDX names it
    modules: forms.Modules  # the import names under test
    commit: forms.Commit = ""  # the pinned commit, or that of the release's tag; empty if unknown
    version: forms.Release = ""  # of the release; empty if a commit is pinned
    file: forms.Archive = ""  # of the release on the package index, likewise
    sha256: forms.Sha256 = ""  # of that file, likewise
    date: dt.date | None = None  # of the pinned commit
    source_root: forms.Path = ""  # the folder of the repository that goes on PYTHONPATH; empty for its root

    @property
    def is_commit(self) -> bool:
        return not self.file

    @property
    def is_wheel(self) -> bool:
        """Whether a wheel is pinned; other releases are then judged by their wheels, too."""
        return self.file.endswith(".whl")

    @property
    def is_compiled(self) -> bool:
        """Whether the wheel is for one platform; its libraries then find those of other wheels beside them."""
        return self.is_wheel and not self.file.endswith("-any.whl")

    @property
    def pin(self) -> str:
        """The pin as a receipt has it: a version, or ``commit`` and its 40 digits."""
        return f"commit {self.commit}" if self.is_commit else self.version


@dataclass(frozen=True)
class Head:
    """The verdict on upstream's default branch at a named commit; UNSUPPORTED: it has no such code."""

    commit: forms.Commit
    date: dt.date
    verdict: Verdict
    fixed_by: forms.Commit = ""


@dataclass(frozen=True)
class Searched:
    """The search in upstream's issues and pull requests: its date and its words."""

    date: dt.date
    queries: forms.Texts


@dataclass(frozen=True)
class Thread:
    """An issue or a pull request of an upstream on the same lines of code."""

    url: forms.ThreadUrl
    state: ThreadState  # on that date
    date: dt.date  # of its merge, or else of the copy that was read
    says: forms.Text  # about these lines, in one sentence


@dataclass(frozen=True)
class Action:
    """The next step with a pack."""

    kind: ActionKind
    text: forms.Sentence  # what to file where, what fixed the bug, or why nothing is left to do


@dataclass(frozen=True)
class Ask:
    """The patch that upstream is asked to merge, if it is made for another tree than the release."""

    patch: forms.OtherPatch  # its file in the pack
    origin: forms.Origin  # ``git+URL@COMMIT``: the tree of development, on which it applies
    date: dt.date  # of that commit
    checks: forms.Texts  # names or globs of the defect checks that are wrong there and right with the patch

    @property
    def commit(self) -> str:
        return self.origin.rpartition("@")[2]


@dataclass(frozen=True)
class Workaround:
    """A way round the bug without the patch, which controls show to work."""

    text: forms.Text
    checks: forms.Texts  # names or globs of the controls that show it, right on the pinned release


@dataclass(frozen=True)
class UpstreamTests:
    """Upstream's own tests of the files that a patch touches."""

    files: forms.Paths  # relative to the repository's root
    origin: forms.Origin = ""  # ``git+URL@COMMIT``: the tree that has them; empty for the pinned tree
    arguments: tuple[forms.Line, ...] = ()  # for pytest
    gpu: bool = False  # whether they need one
    #: variables that they need besides a lane's own
    environment: dict[forms.Variable, forms.Line] = field(default_factory=dict)
    timeout_s: forms.Seconds = 600.0  # of one run of all tests


@dataclass(frozen=True)
class Requires:
    """The ranges of the runner's own Python, torch and triton; empty: not needed."""

    python: forms.Range
    torch: forms.Range = ""
    triton: forms.Range = ""


@dataclass(frozen=True)
class Dependency:
    """One package of a dependency set."""

    version: str
    hashes: tuple[str, ...]  # sha256 of its files
    marker: str = ""  # where it is needed; empty: everywhere


@dataclass(frozen=True)
class Target:
    """One target: how its lanes run."""

    evidence: tuple[Evidence, ...]  # the admitted kinds
    #: The files of the upstream repository that the patched lane has to load; by default those of fix.patch.
    loads: tuple[forms.Path, ...]
    claims: tuple[forms.Claim, ...] = ()  # that both lanes must support; by default those of the pack
    claims_executed: tuple[forms.Claim, ...] = ()  # likewise, of lanes that execute on the GPU
    dependencies: str = "default"  # the dependency set that its lanes import
    timeout_s: forms.Seconds = 600.0  # of one lane
    #: Its figures in ms, MiB and the like are compared from run to run; the contract times with `alone`.
    measures: bool = False
    gpus: forms.Count = 1  # that an executed lane takes, or as many as the host has: what needs more is not judged
    #: Ranks of the largest group that the contract starts; 1: it starts none.
    ranks: forms.Count = 1
    #: Processes in which the contract may compile kernels, or run cases, at once.
    processes: forms.Count = 1
    gpu_memory_gib: forms.GiB = 8.0  # the most that an executed lane takes of each GPU
    #: The environment that a script of the pack builds in the cache; lanes run with its interpreter if it exists.
    environment: str = ""

    def claims_of(self, evidence: Evidence | None) -> tuple[str, ...]:
        """Return the claims that both lanes must support; some need the GPU itself."""
        return self.claims + (self.claims_executed if evidence == Evidence.EXECUTED else ())

    def ranks_on(self, gpus: int) -> int:
        """Return the ranks of the largest group on so many GPUs: one a GPU, if these are fewer than stated; 0: none."""
        return min(self.ranks, gpus) if 0 < gpus < self.gpus else self.ranks


CPU = "cpu"
#: The dependency set of pytest and of the imports of upstream's own tests.
TESTS = "tests"
#: A target that no pack lists; nothing is expected of it.
UNLISTED = Target(evidence=(), loads=())


@dataclass(frozen=True)
class BuiltEnvironment:
    """An environment that a script of the pack builds in the cache, because there are no wheels for it."""

    script: forms.FileName  # in the pack's folder
    files: dict[forms.Package, forms.Sha256]  # sha256 of the files of the package index that it builds, by package


@dataclass(frozen=True)
class Sample:
    """The sample of wrong fixes that `runner.py mutate` generates from fix.patch."""

    seed: int = 1
    generated: forms.Number = 30  # how many


@dataclass(frozen=True)
class OtherReleases:
    """How `runner.py versions` judges releases, the pinned one included."""

    #: Names or globs of the checks, defects and controls; empty: all. An older release may have another bug in another
    #: option, whose controls then say nothing of this bug.
    checks: tuple[forms.Text, ...] = ()


@dataclass(frozen=True)
class Definition:
    """A parsed pack.toml, and the dependency sets that lie beside it."""

    title: forms.Text
    kind: Kind
    leading_figure: forms.Line
    upstream: Upstream
    requires: Requires
    targets: Annotated[dict[forms.TargetName, Target], forms.SOME]
    fix: Fix = Fix.PATCH  # without a patch there is no patched lane, and the best verdict is REPRODUCED
    head: Head | None = None
    fixed_in: forms.Release = ""
    known: forms.Line = ""  # the thread of a known deviation, for which a sweep does not fail
    action: Action | None = None
    workaround: Workaround | None = None
    advisory: bool = True  # whether users of the release are warned; not of a pack that shows no defect
    searched: Searched | None = None
    threads: tuple[Thread, ...] = ()
    ask: Ask | None = None
    upstream_tests: UpstreamTests | None = None
    dependencies: dict[str, dict[str, Dependency]] = field(default_factory=dict)
    environments: dict[forms.SetName, BuiltEnvironment] = field(default_factory=dict)
    strength: Sample = field(default_factory=Sample)
    versions: OtherReleases = field(default_factory=OtherReleases)

    @property
    def has_patch(self) -> bool:
        return self.fix == Fix.PATCH

    @property
    def expected(self) -> Verdict:
        """The verdict that the pinned release must have on each listed target."""
        return Verdict.CONFIRMED if self.has_patch else Verdict.REPRODUCED

    def stated(self, name: str) -> Target:
        """Return what pack.toml states of a target; nothing is expected of a target that it does not list.

        An unlisted GPU runs with the dependency set, the time and the memory of the pack's own GPU targets.
        """
        if name in self.targets:
            return self.targets[name]
        gpus = [target for listed, target in self.targets.items() if listed != CPU]
        similar = next((target for target in gpus if Evidence.EXECUTED in target.evidence), next(iter(gpus), UNLISTED))
        admitted = dict.fromkeys(kind for target in gpus for kind in target.evidence)
        evidence = tuple(admitted) or (Evidence.EXECUTED,)
        return replace(similar, evidence=evidence if name != CPU else (), loads=(), claims=(), claims_executed=())

    @property
    def claims(self) -> tuple[str, ...]:
        """Every claim that a lane of this pack may make, on any target."""
        names = (claim for target in self.targets.values() for claim in target.claims_of(Evidence.EXECUTED))
        return tuple(dict.fromkeys(names))

    def is_head(self, commit: str) -> bool:
        """Whether a commit (empty: none) is that of upstream's default branch in pack.toml."""
        return self.head is not None and commit == self.head.commit


@dataclass(frozen=True)
class Pack:
    """One pack on disk."""

    folder: Path
    definition: Definition
    receipts_elsewhere: Path | None = None  # the folder of other receipts than its own, such as a run's
    inputs: Path | None = None  # the folder of a run's copies of script, contract and patches; None: the pack's own

    @property
    def name(self) -> str:
        """The folder's name, such as ``09_liger_flce_none``."""
        return self.folder.name

    @property
    def script(self) -> Path:
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
        """The patch for upstream's default branch alone, if fix.patch does not apply there."""
        return (self.inputs or self.folder) / "fix.head.patch"

    def patch_for(self, commit: str) -> Path:
        """Return the patch for the tree of a commit; empty: of a release, or of an unknown commit."""
        head_patch = self.own_head_patch
        return head_patch if self.definition.is_head(commit) and head_patch.exists() else self.patch

    @property
    def ask_patch(self) -> Path | None:
        """The patch that upstream is asked to merge, if it is another than fix.patch."""
        return self.folder / self.definition.ask.patch if self.definition.ask else None

    @property
    def upstream_test_patch(self) -> Path:
        """The test of this bug for upstream's own suite; not every pack has one."""
        return self.folder / "upstream_test.patch"

    @property
    def suite_patch(self) -> Path:
        """The patch with which upstream's own tests are run: the one that upstream is asked to merge."""
        return self.ask_patch or self.patch

    @property
    def report(self) -> Path:
        return self.folder / "README.md"

    @property
    def report_template(self) -> Path:
        """The text of the report, with placeholders for figures."""
        return self.folder / "report.in.md"

    @property
    def receipts(self) -> Path:
        """The folder of its receipts: the committed ones, unless others were requested."""
        return self.receipts_elsewhere or self.folder / "receipts"
