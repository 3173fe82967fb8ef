"""What a probe said: its protocol lines, parsed strictly, and whether text and exit status agree."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

from harness.core import strict_json, structure
from harness.core.words import BITWISE_IDENTICAL, PROBE_STATUS, Evidence, LaneVerdict, Role
from harness.lane.output import KeptLine, Lines

Line = TypeVar("Line")
#: Characters of a message: it stands in a table, and may quote a line of a megabyte.
LONGEST_MESSAGE = 300
#: Characters of a name, which stands in tables, placeholders and sentences.
LONGEST_NAME = 200


@dataclass(frozen=True)
class TargetLine:
    """What the lane judged, how, and on what device."""

    target: str
    evidence: Evidence
    device: str


@dataclass(frozen=True)
class UpstreamLine:
    """One module under test, as the probe loaded it."""

    module: str
    file: str
    sha256: str


@dataclass(frozen=True)
class CheckLine:
    """One check: `ok` is None where it was not judged, and then `reason` says why."""

    name: str
    role: Role
    ok: bool | None
    measured: object = None
    tolerance: object = None
    unit: str = ""
    reason: str = ""


@dataclass(frozen=True)
class FigureLine:
    """A measured value that nobody judges; `spread` in the same unit, or None."""

    name: str
    value: object
    unit: str = ""
    spread: object = None


@dataclass(frozen=True)
class OutputLine:
    """One tensor by its hash, compared between the lanes where `must_match` says so."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str
    must_match: bool


@dataclass(frozen=True)
class ReasonLine:
    """What stands behind a verdict word."""

    reason: str = ""


@dataclass(frozen=True)
class Transcript:
    """All that a probe said; `problems` is empty only if every rule of the protocol was kept."""

    verdict: LaneVerdict | None = None
    reason: str = ""
    target: TargetLine | None = None
    upstream: tuple[UpstreamLine, ...] = ()
    checks: tuple[CheckLine, ...] = ()
    figures: tuple[FigureLine, ...] = ()
    outputs: tuple[OutputLine, ...] = ()
    claims: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()
    script: str = ""
    printed: str = ""


@dataclass
class _Reader:
    """Collects while it reads; `Transcript` is what it gives away."""

    said: dict[str, list[object]] = field(default_factory=dict)
    claims: list[str] = field(default_factory=list)
    verdicts: list[tuple[LaneVerdict, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    names: set[tuple[str, str]] = field(default_factory=set)

    def read(self, line: KeptLine) -> None:
        kinds: dict[str, type] = {
            "TARGET": TargetLine,
            "UPSTREAM": UpstreamLine,
            "CHECK": CheckLine,
            "FIGURE": FigureLine,
            "OUTPUT": OutputLine,
        }
        word = line.word
        try:
            document = _object(line)
            if word in kinds:
                said: object = structure.structure(document, kinds[word])
                self._name(word, document.get("name"))
                self.said.setdefault(word, []).append(said)
            elif word in PROBE_STATUS:
                self.verdicts.append((LaneVerdict(word), structure.structure(document, ReasonLine).reason))
            elif word == BITWISE_IDENTICAL:
                self.problems.append(f"line {line.number} ({word}): it is the runner's to state, not the probe's")
            else:
                self.claims.append(word)
        except (ValueError, TypeError) as error:
            text = " ".join(str(error).split())
            text = text if len(text) <= LONGEST_MESSAGE else text[:LONGEST_MESSAGE] + "..."
            self.problems.append(f"line {line.number} ({word}): {text}")

    def _name(self, word: str, name: object) -> None:
        """Refuse a name that stands there already, or that no table can show."""
        if name is None:
            return
        if not isinstance(name, str) or not name.isprintable() or not 0 < len(name) <= LONGEST_NAME:
            raise ValueError(f"{str(name)[:40]!r} is no name: 1 to {LONGEST_NAME} characters, all printable")
        if (word, name) in self.names:
            raise ValueError(f"a second {word} line named {name!r}")
        self.names.add((word, name))

    def lines(self, word: str, kind: type[Line]) -> tuple[Line, ...]:
        return tuple(line for line in self.said.get(word, []) if isinstance(line, kind))


def _object(line: KeptLine) -> dict[str, object]:
    """Parse what stands behind a line's word."""
    if line.problem:
        raise ValueError(line.problem)
    text = line.data[len(line.word) :]
    if not text.startswith(b" "):
        raise ValueError("a space and a JSON object have to follow the word")
    document = strict_json.loads(text)
    if not isinstance(document, dict):
        raise TypeError("what follows the word is no JSON object")
    return document


def implied(checks: tuple[CheckLine, ...]) -> LaneVerdict:
    """Return the verdict that the checks themselves imply."""
    wrong = {check.role for check in checks if check.ok is False}
    if Role.CONTROL in wrong:
        return LaneVerdict.CONTROL_FAILED
    if Role.DEFECT in wrong:
        return LaneVerdict.BUG_REPRODUCED
    judged = any(check.role == Role.DEFECT and check.ok for check in checks)
    return LaneVerdict.FIX_VALIDATED if judged else LaneVerdict.UNSUPPORTED


def has_failed_check(lines: Lines) -> bool:
    """Say whether a check is already known to be wrong, so that the probe cannot end with FIX_VALIDATED any more."""
    reader = _Reader()
    for line in lines.kept:
        if line.word == "CHECK":
            reader.read(line)
    return implied(reader.lines("CHECK", CheckLine)) in (LaneVerdict.CONTROL_FAILED, LaneVerdict.BUG_REPRODUCED)


def _order_problems(lines: Lines, reader: _Reader) -> list[str]:
    problems = []
    if not reader.verdicts:
        problems.append("no verdict line")
    if len(reader.verdicts) > 1:
        problems.append(f"{len(reader.verdicts)} verdict lines: {', '.join(word for word, _ in reader.verdicts)}")
    elif lines.after_verdict:
        problems.append(f"output after the verdict: {lines.after_verdict[:80]!r}")
    if lines.too_many:
        problems.append("too many protocol lines")
    unsupported = bool(reader.verdicts) and reader.verdicts[-1][0] == LaneVerdict.UNSUPPORTED
    if not unsupported and len(reader.said.get("TARGET", [])) != 1:
        problems.append("TARGET must stand once")
    elif reader.said.get("TARGET") and lines.kept[0].word != "TARGET":
        problems.append("TARGET must stand first")
    return problems


def _check_problems(checks: tuple[CheckLine, ...], verdict: LaneVerdict | None) -> list[str]:
    problems = [f"check {check.name!r} is not judged and gives no reason" for check in checks if _mute(check)]
    if verdict not in (None, LaneVerdict.UNSUPPORTED) and implied(checks) != verdict:
        problems.append(f"its checks imply {implied(checks)}, its verdict line says {verdict}")
    return problems


def _mute(check: CheckLine) -> bool:
    return check.ok is None and not check.reason


def read(lines: Lines, status: int) -> Transcript:
    """Parse the protocol lines of one probe that ended with the exit status `status` (negative: a signal)."""
    reader = _Reader()
    for line in lines.kept:
        reader.read(line)
    checks = reader.lines("CHECK", CheckLine)
    verdict, reason = reader.verdicts[-1] if reader.verdicts else (None, "")
    problems = reader.problems + _order_problems(lines, reader) + _check_problems(checks, verdict)
    if verdict is not None and status != PROBE_STATUS[verdict]:
        problems.append(f"the verdict line says {verdict}, the exit status is {status}, not {PROBE_STATUS[verdict]}")
    targets = reader.lines("TARGET", TargetLine)
    return Transcript(
        verdict=verdict,
        reason=reason,
        target=targets[0] if targets else None,
        upstream=reader.lines("UPSTREAM", UpstreamLine),
        checks=checks,
        figures=reader.lines("FIGURE", FigureLine),
        outputs=reader.lines("OUTPUT", OutputLine),
        claims=tuple(dict.fromkeys(reader.claims)),
        problems=tuple(problems),
    )
