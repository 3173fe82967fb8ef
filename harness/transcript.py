"""What a probe said: its protocol lines, parsed strictly, and whether text and exit status agree."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import TypeVar

from harness import strict
from harness.capture import Lines
from harness.words import BITWISE_IDENTICAL, PROBE_STATUS, Evidence, LaneVerdict, Role

Line = TypeVar("Line")


@dataclass(frozen=True)
class TargetLine:
    """What the lane judged, how, and on what device."""

    target: str
    evidence: Evidence
    device: str


@dataclass(frozen=True)
class UpstreamLine:
    """One accused module, as the probe loaded it."""

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


@dataclass
class _Reader:
    """Collects while it reads; `Transcript` is what it gives away."""

    said: dict[str, list[object]] = field(default_factory=dict)
    claims: list[str] = field(default_factory=list)
    verdicts: list[tuple[LaneVerdict, str]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def read(self, line: str) -> None:
        word, _, text = line.partition(" ")
        kinds: dict[str, type] = {
            "TARGET": TargetLine,
            "UPSTREAM": UpstreamLine,
            "CHECK": CheckLine,
            "FIGURE": FigureLine,
            "OUTPUT": OutputLine,
        }
        try:
            document = _object(text)
            if word in kinds:
                self.said.setdefault(word, []).append(strict.structure(document, kinds[word]))
            elif word in PROBE_STATUS:
                self.verdicts.append((LaneVerdict(word), strict.structure(document, ReasonLine).reason))
            elif word == BITWISE_IDENTICAL:
                self.problems.append(f"{word} is the runner's to state, not the probe's")
            else:
                self.claims.append(word)
        except (ValueError, TypeError) as error:
            self.problems.append(f"malformed line {line[:80]!r}: {error}")

    def lines(self, word: str, kind: type[Line]) -> tuple[Line, ...]:
        return tuple(line for line in self.said.get(word, []) if isinstance(line, kind))


def _object(text: str) -> dict[str, object]:
    document = json.loads(text, parse_constant=_refuse_constant)
    if not isinstance(document, dict):
        raise TypeError("not a JSON object")
    return document


def _refuse_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON")


def implied(checks: tuple[CheckLine, ...]) -> LaneVerdict:
    """Return the verdict that the checks themselves imply."""
    wrong = {check.role for check in checks if check.ok is False}
    if Role.CONTROL in wrong:
        return LaneVerdict.CONTROL_FAILED
    if Role.DEFECT in wrong:
        return LaneVerdict.BUG_REPRODUCED
    judged = any(check.role == Role.DEFECT and check.ok for check in checks)
    return LaneVerdict.FIX_VALIDATED if judged else LaneVerdict.UNSUPPORTED


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
    elif reader.said.get("TARGET") and not lines.kept[0].startswith("TARGET"):
        problems.append("TARGET must stand first")
    return problems


def _check_problems(checks: tuple[CheckLine, ...], verdict: LaneVerdict | None) -> list[str]:
    names = [check.name for check in checks]
    problems = [f"two checks named {name!r}" for name in sorted({name for name in names if names.count(name) > 1})]
    problems += [f"check {check.name!r} is not judged and gives no reason" for check in checks if _mute(check)]
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
