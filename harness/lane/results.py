"""The results of a lane: its record, and the files that it writes, read strictly.

The files are the contract's results (`kit.plugin`), and the witness's notes.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from harness.core import structure
from harness.core.words import BITWISE_IDENTICAL, Evidence, LaneName, LaneVerdict, Role
from harness.host.host import Gpu, Host

Line = TypeVar("Line")
#: Exit statuses of a pytest that ended by itself: all passed, some failed, no test collected.
PASSED, FAILED, NOTHING = STATUSES = 0, 1, 5
#: How a problem that the contract states begins, and one that it had before its first test (kit/plugin.py).
OF_CONTRACT = "contract: "
NOT_COLLECTED = f"{OF_CONTRACT}collection: "
#: Bytes of a file of results.
MOST_BYTES = 1 << 25
#: Files that the witness of a lane may note.
MOST_LINES = 50_000
#: Characters of a name at most: names stand in tables, placeholders and sentences.
LONGEST_NAME = 200


@dataclass(frozen=True)
class TargetLine:
    """The lane's target, evidence and device."""

    target: str
    evidence: Evidence
    device: str


@dataclass(frozen=True)
class UpstreamLine:
    """One module under test, as the lane loaded it."""

    module: str
    file: str
    sha256: str

    def lies_in(self, root: str) -> bool:
        """Whether it lies where Python finds a module of this name if `root` is on its path."""
        folder, _, name = self.file.rpartition("/")
        path = f"{folder}/{name.partition('.')[0]}".removesuffix("/__init__")
        return path == f"{root}/{self.module.replace('.', '/')}"


@dataclass(frozen=True)
class CheckLine:
    """One check; if it was not judged, `ok` is None and `reason` says why."""

    name: str
    role: Role
    ok: bool | None
    reason: str = ""
    seconds: float = 0.0  # of its setup, call and teardown


def check_names(checks: Iterable[CheckLine], role: Role, *, ok: bool) -> tuple[str, ...]:
    """Name the checks of one role that were right (`ok`), or those that were wrong."""
    return tuple(check.name for check in checks if check.role == role and check.ok is ok)


@dataclass(frozen=True)
class FigureLine:
    """A measured value that is not judged; `spread` is in the same unit, or None."""

    name: str
    value: object
    unit: str = ""
    spread: object = None


@dataclass(frozen=True)
class OutputLine:
    """One tensor by its hash, which is compared between the lanes if it `must_match`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    must_match: bool


@dataclass(frozen=True)
class LaneRecord:
    """The results of one lane."""

    verdict: LaneVerdict  # of its script and its contract
    reason: str  # empty only for a verdict that needs none
    exit_status: int  # of the script; negative for a signal
    seconds: float  # wall time of both files, without the wait for its GPUs
    peak_memory: int  # of its largest process, in bytes
    left_behind: int  # processes that outlived it and were killed
    tree: str  # the sha256 of its tree
    device: str  # as the contract names it
    upstream: tuple[UpstreamLine, ...] = ()  # the modules under test that it loaded
    checks: tuple[CheckLine, ...] = ()  # in their order
    figures: tuple[FigureLine, ...] = ()  # likewise
    outputs: tuple[OutputLine, ...] = ()  # likewise
    claims: tuple[str, ...] = ()  # likewise, each once
    waited: float = 0.0  # seconds of the wait until no other lane used its GPUs
    script: str = ""  # the sentinel of reproduce.py
    printed: str = ""  # its standard output, 4096 bytes at most

    def figure(self, name: str) -> FigureLine | None:
        return next((line for line in self.figures if line.name == name), None)


@dataclass(frozen=True)
class LogRecord:
    """The log beside the receipt, and its hash."""

    file: str
    sha256: str


@dataclass(frozen=True)
class LaneEnd:
    """One lane that ended: enough to judge it and to write the receipt without another run."""

    key: str  # of its task
    task: str  # its name, for people
    lane: LaneName
    started: str  # the time, in UTC
    seconds: float  # for which its cores and GPUs were taken, from its start until its log was written
    place: str  # ``gpu 0``, ``gpus 0,1`` or ``cpu``
    host: Host  # on which it ran
    gpus: tuple[Gpu, ...]  # of the host, that it had
    version: str  # of the tree
    tree: str  # the sha256 of the pristine tree
    patch: str  # the name of the patch's file; empty in the pristine lane
    record: LaneRecord | None  # scrubbed; None if the lane could not begin, since the patch does not apply
    stale: str = ""  # why the patch does not apply
    log: LogRecord | None = None  # the scrubbed log in the run folder, if there is one

    @property
    def verdict(self) -> LaneVerdict | None:
        return self.record.verdict if self.record else None


@dataclass(frozen=True)
class Results:
    """The results of a contract."""

    target: TargetLine | None = None
    checks: tuple[CheckLine, ...] = ()
    figures: tuple[FigureLine, ...] = ()
    outputs: tuple[OutputLine, ...] = ()
    claims: tuple[str, ...] = ()
    running: str = ""  # the test that began and did not end
    problems: tuple[str, ...] = ()  # none only if the file is complete


@dataclass(frozen=True)
class _Begin:
    name: str


@dataclass(frozen=True)
class _Claim:
    word: str


@dataclass(frozen=True)
class _Problem:
    reason: str


@dataclass(frozen=True)
class _End:
    status: int


KINDS: dict[str, type] = {
    "target": TargetLine,
    "begin": _Begin,
    "check": CheckLine,
    "figure": FigureLine,
    "output": OutputLine,
    "claim": _Claim,
    "problem": _Problem,
    "end": _End,
}


def _event(number: int, line: bytes) -> object:
    document = structure.loads(line)
    if not isinstance(document, dict):
        raise TypeError("it is no JSON object")
    kind = document.pop("kind", None)
    if document.pop("number", None) != number:
        raise ValueError("its number is not the next one: a line is lost, or written twice")
    if kind not in KINDS:
        raise ValueError(f"its kind {str(kind)[:40]!r} is not known")
    name = document.get("name", "-")
    if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
        raise ValueError(f"{str(name)[:40]!r} is no name: 1 to {LONGEST_NAME} characters, all printable")
    return structure.structure(document, KINDS[kind])


def _select(events: Iterable[object], kind: type[Line]) -> tuple[Line, ...]:
    return tuple(event for event in events if isinstance(event, kind))


def duplicates(names: Iterable[str]) -> list[str]:
    """Return the names that occur more than once."""
    return sorted(name for name, count in Counter(names).items() if count > 1)


def read(file: Path, status: int, claims: tuple[str, ...]) -> Results:
    """Read the results of a contract that pytest ended with `status`.

    The status is negative for a signal; `claims` are the words that the contract may claim.
    """
    data = file.read_bytes() if file.exists() else b""
    if len(data) > MOST_BYTES:
        return Results(problems=(f"the contract wrote more than {MOST_BYTES} bytes of results",))
    events: list[object] = []
    problems: list[str] = []
    for number, line in enumerate(data.splitlines(), start=1):
        try:
            events.append(_event(number, line))
        except (ValueError, TypeError) as error:
            problems.append(f"line {number} of the contract's results: {' '.join(str(error).split())[:300]}")
            break
    checks, begun_tests = _select(events, CheckLine), [event.name for event in _select(events, _Begin)]
    judged = {check.name for check in checks}
    running = next((name for name in begun_tests if name not in judged), "")
    problems = [f"{OF_CONTRACT}{event.reason}" for event in _select(events, _Problem)] + problems
    words = [event.word for event in _select(events, _Claim)]
    problems += [f"the contract claims {word}, which pack.toml does not list" for word in words if word not in claims]
    own_words = [word for word in words if word == BITWISE_IDENTICAL]
    problems += [f"the contract claims {word}, which is the runner's to state" for word in own_words]
    problems += [f"the contract has two tests named {name}" for name in duplicates(check.name for check in checks)]
    problems += _ending(events, status, running)
    any_wrong = any(check.ok is False for check in checks)
    if not problems and any_wrong != (status == FAILED):
        problems.append(f"pytest's exit status {status} does not fit the checks")
    targets = _select(events, TargetLine)
    if len(targets) > 1:
        problems.append("the contract names its target twice")
    return Results(
        target=targets[0] if targets else None,
        checks=checks,
        figures=_select(events, FigureLine),
        outputs=_select(events, OutputLine),
        claims=tuple(dict.fromkeys(words)),
        running=running,
        problems=tuple(problems),
    )


def _ending(events: list[object], status: int, running: str) -> list[str]:
    """List the problems of a contract's end: it was cut short, or pytest itself failed."""
    ends = _select(events, _End)
    if len(ends) != 1 or events[-1] is not ends[0]:
        place = f" in {running}" if running else ""
        return [f"the contract's results end{place} without an end: exit status {status}"]
    if ends[0].status != status or status not in STATUSES:
        return [f"pytest said {ends[0].status} and ended with exit status {status}"]
    return [f"{running} did not end"] if running else []


def read_loaded(file: Path) -> tuple[tuple[UpstreamLine, ...], str]:
    """Read the witness's notes, each file once in the order of loading, and the reason if they cannot be read."""
    lines = file.read_bytes().splitlines() if file.exists() else []
    if len(lines) > MOST_LINES:
        return (), f"the lane loaded more than {MOST_LINES} modules"
    try:
        return tuple(structure.structure(structure.loads(line), UpstreamLine) for line in dict.fromkeys(lines)), ""
    except (ValueError, TypeError) as error:
        return (), f"what the witness noted cannot be read: {error}"
