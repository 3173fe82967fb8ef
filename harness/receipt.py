"""Receipts: the record of a pack's run on one target, in one JSON file and one log."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from harness import files, strict
from harness.errors import HarnessError
from harness.transcript import CheckLine, FigureLine, OutputLine, UpstreamLine
from harness.words import Evidence, Kind, LaneVerdict, Verdict

SCHEMA = 1


@dataclass(frozen=True)
class Source:
    """The upstream that was judged: `sha256` of its archive, or of the manifest of a tree that had none."""

    package: str
    version: str
    origin: str
    sha256: str


@dataclass(frozen=True)
class Hashed:
    """A probe or a patch: its bytes' hash, and the hash of what it means."""

    sha256: str
    meaning: str


@dataclass(frozen=True)
class CompanionRecord:
    """The companion set by name, hash and versions."""

    name: str
    sha256: str
    packages: dict[str, str]


@dataclass(frozen=True)
class LaneRecord:
    """What one lane showed; times in seconds, memory in bytes (of its largest process)."""

    verdict: LaneVerdict
    reason: str
    exit_status: int
    seconds: float
    peak_memory: int
    left_behind: int
    tree: str
    device: str
    upstream: tuple[UpstreamLine, ...] = ()
    checks: tuple[CheckLine, ...] = ()
    figures: tuple[FigureLine, ...] = ()
    outputs: tuple[OutputLine, ...] = ()
    claims: tuple[str, ...] = ()


@dataclass(frozen=True)
class HostRecord:
    """Where it ran; what a host lacks, or what an older runner did not record, is empty."""

    python: str
    torch: str
    triton: str
    cuda: str = ""
    driver: str = ""
    gpu: str = ""
    compute_capability: str = ""
    system: str = ""
    cudnn: str = ""
    nccl: str = ""


@dataclass(frozen=True)
class LogRecord:
    """The log beside the receipt, and its hash."""

    file: str
    sha256: str


@dataclass(frozen=True)
class Repeats:
    """How many runs gave the verdict, of how many."""

    agreeing: int = 1
    of: int = 1


@dataclass(frozen=True)
class Receipt:
    """One pack on one target, as it was seen."""

    schema: int
    pack: str
    title: str
    kind: Kind
    target: str
    evidence: Evidence
    verdict: Verdict
    reason: str
    claims: tuple[str, ...]
    upstream: Source
    probe: Hashed
    patch: Hashed | None
    companions: CompanionRecord
    lanes: dict[str, LaneRecord]
    host: HostRecord
    log: LogRecord
    command: str
    started: str
    seconds: float
    repeats: Repeats = field(default_factory=Repeats)

    @property
    def name(self) -> str:
        """The file name without its suffix."""
        return f"{self.target}.{self.evidence}"

    @property
    def age(self) -> dt.datetime:
        """When the run began."""
        return dt.datetime.fromisoformat(self.started)

    def figure(self, name: str, lane: str) -> FigureLine | None:
        """Return a figure of one lane, or None where it printed none of that name."""
        record = self.lanes.get(lane)
        return next((line for line in record.figures if line.name == name), None) if record else None


def hashed(path: Path) -> Hashed:
    """Hash a probe or a patch, by bytes and by meaning."""
    from harness import freshness  # noqa: PLC0415 - the parser is loaded only where a file changed

    return Hashed(files.sha256_file(path), freshness.meaning(path))


def to_json(document: object) -> str:
    """Write a document the way every receipt is written."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def document_of(receipt: Receipt) -> dict[str, object]:
    """Return a receipt as a JSON document."""
    return asdict(receipt)


def parse(text: str, where: str) -> Receipt:
    """Parse a receipt, or raise HarnessError that names the file and every error in it."""
    try:
        document = json.loads(text)
        found = document.get("schema") if isinstance(document, dict) else None
        if found != SCHEMA:
            raise HarnessError(
                f"{where}: receipt of schema {found}; this runner knows {SCHEMA}. Next: run the pack again"
            )
        return strict.structure(document, Receipt)
    except json.JSONDecodeError as error:
        raise HarnessError(f"{where}: not JSON: {error}. Next: run the pack again") from None
    except strict.StructureError as error:
        raise HarnessError(f"{where}: {error}. Next: run the pack again") from None


def load(path: Path) -> Receipt:
    """Load the receipt at `path`."""
    return parse(path.read_text(encoding="utf-8"), f"{path.parent.parent.name}/{path.parent.name}/{path.name}")


def load_all(folder: Path) -> list[Receipt]:
    """Load every receipt that lies directly in `folder`, which need not exist."""
    return [load(path) for path in sorted(folder.glob("*.json"))]


def strongest(receipts: list[Receipt]) -> dict[str, Receipt]:
    """Map each target to its receipt of the strongest evidence, the newest among equals."""
    best: dict[str, Receipt] = {}
    for receipt in sorted(receipts, key=lambda one: (-one.evidence.rank, one.age)):
        best[receipt.target] = receipt
    return best
