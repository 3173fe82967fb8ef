"""What `audit` prints: one line for each finding, and the same as JSON."""

from __future__ import annotations

import json
from dataclasses import asdict

from harness.audit import findings
from harness.audit.environment import Environment
from harness.audit.findings import Finding
from harness.audit.records import Advisory, State

SCHEMA = 1
#: What the words of `evidence` mean, for whoever has not read the README.
MEANINGS = {
    "executed": "the probe ran on that GPU",
    "interpreted": "the real kernels ran in an interpreter on a CPU",
    "compiled": "the code made for that GPU was inspected, not run",
    "traced": "the real Python code ran on a CPU, kernels aside",
}


def _printable(text: str) -> str:
    """Keep what a file names from steering a terminal."""
    return "".join(one if one.isprintable() else "?" for one in text)


def line(one: Finding) -> str:
    """Write one finding in one line."""
    name = f"{one.package} {one.version}".rstrip()
    if one.state == State.AFFECTED:
        parts = [f"AFFECTED{', in silence' if one.silent else ''} ({one.kind}): {one.what}"]
        parts += [one.since, one.fixed, f"evidence: {', '.join(one.evidence)}"]
    elif one.state == State.UNAFFECTED:
        parts = [f"not affected: {one.what}", f"evidence: {', '.join(one.evidence)}"]
    else:
        parts = [f"not judged ({one.reason}): {one.what}"]
    parts += [one.reason] if one.reason and one.state != State.NOT_JUDGED else []
    parts += [one.link]
    parts += [f"workaround: {one.workaround}"] if one.workaround else []
    parts += [f"named in {one.place}"] if one.place else []
    return f"{name}: {'; '.join(part for part in parts if part)}"


def _summary(environment: Environment, found: list[Finding], known: set[str]) -> str:
    count = {state: sum(one.state == state for one in found) for state in State}
    silent = sum(one.is_silently_affected for one in found)
    packages = {one.package for one in found}
    if not packages:
        return (
            f"{environment.what}: {len(environment.packages)} package(s), none of those that have records "
            f"({', '.join(sorted(known))}): nothing is said of them"
        )
    return (
        f"{environment.what}: {len(environment.packages)} package(s), {len(packages)} with records "
        f"({', '.join(sorted(packages))}): {count[State.AFFECTED]} affected, {silent} of these in silence; "
        f"{count[State.UNAFFECTED]} not affected; {count[State.NOT_JUDGED]} not judged"
    )


def as_text(environment: Environment, found: list[Finding], advisories: list[Advisory]) -> str:
    """Write the findings, what could not be read, the words' meanings, and a summary as the last line."""
    lines = [line(one) for one in found]
    lines += [f"not read: {text}" for text in environment.unread]
    used = {text.split()[0] for one in found for text in one.evidence}
    meanings = [f"{word}: {meaning}" for word, meaning in MEANINGS.items() if word in used]
    lines += [f"({'; '.join(meanings)})"] if meanings else []
    lines.append(_summary(environment, found, {one.package for one in advisories}))
    return "".join(f"{_printable(text)}\n" for text in lines)


def as_json(environment: Environment, found: list[Finding]) -> str:
    """Write the same as one JSON document."""
    document = {
        "schema": SCHEMA,
        "environment": environment.what,
        "packages": len(environment.packages),
        "unread": list(environment.unread),
        "findings": [asdict(one) for one in found],
        "exit_status": int(findings.status(found)),
    }
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"
