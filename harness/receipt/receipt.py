"""Receipts: the record of a pack's run on one target, in one JSON file and one log."""

from __future__ import annotations

import datetime as dt
import json
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

from harness.core import files, strict_json, structure, words
from harness.core.errors import HarnessError
from harness.core.structure import Form, Structured
from harness.core.words import Evidence, Kind, Verdict
from harness.lane.record import FigureLine, LaneRecord, LogRecord
from harness.pack import forms, judges
from harness.pack.model import Pack

SCHEMA = 2
#: What older receipts of this schema hold besides; it is null in each.
GONE = ("acknowledged", "strength")
#: Characters of a message: it may quote what a receipt holds.
LONGEST_MESSAGE = 1000
#: The receipt of upstream's own tests, beside a pack's other receipts.
SUITE = "upstream_tests.json"
#: How the name of a record of wrong fixes begins, which lies beside the receipt of its target.
STRENGTH = "strength."
#: Likewise of a record of wrong fixes that the probe had not met before.
FIRST_SIGHT = "first_sight."


@dataclass(frozen=True)
class UpstreamRecord:
    """The upstream that was judged."""

    package: str  # its name on the package index
    version: str
    origin: str  # of the tree: pinned, release, latest, path, git or installed
    sha256: str  # of its archive, or of the manifest of a tree that had none
    commit: str = ""  # that the tree holds unchanged; empty for a release


@dataclass(frozen=True)
class Hashed:
    """Script and contract, or a patch: the hash of the bytes, and the hash of what they mean."""

    sha256: str
    meaning: str


class FixKind(StrEnum):
    """What made the second tree of the first."""

    PATCH = "patch"


@dataclass(frozen=True)
class FixRecord:
    """What the patched lane had that the pristine one had not."""

    kind: FixKind
    name: str  # the patch's file in the pack
    sha256: str  # of the patch's bytes
    meaning: str  # of the patch, from its first ``diff --git`` on


@dataclass(frozen=True)
class DependencyRecord:
    """The dependency set by name, hash and versions."""

    name: str
    sha256: str
    packages: dict[str, str]


@dataclass(frozen=True)
class GpuRecord:
    """One GPU that a lane had."""

    name: str
    compute_capability: str


@dataclass(frozen=True)
class HostRecord:
    """Where it ran; what a host lacks, or what an older runner did not record, is empty."""

    python: str
    torch: str
    triton: str
    cuda: str = ""
    driver: str = ""
    gpus: tuple[GpuRecord, ...] = ()
    system: str = ""
    cudnn: str = ""
    nccl: str = ""
    variables: tuple[str, ...] = ()

    @property
    def gpu(self) -> str:
        """The GPUs' name, with their number where there are several; empty where none was used."""
        if not self.gpus:
            return ""
        return f"{len(self.gpus)} x {self.gpus[0].name}" if len(self.gpus) > 1 else self.gpus[0].name

    @property
    def compute_capability(self) -> str:
        """Of the GPUs, such as ``9.0``; empty where none was used."""
        return self.gpus[0].compute_capability if self.gpus else ""


@dataclass(frozen=True)
class Repeats:
    """How many runs gave the verdict, of how many."""

    agreeing: int = 1
    of: int = 1


@dataclass(frozen=True)
class Receipt:
    """One pack on one target, as it was seen.

    `ranks` is what pack.toml states: how many the largest group has that the probe starts and speaks for (1 where it
    starts none, and in receipts of runners that did not record it); `fix` is None where no patched lane ran;
    `about` names the defect checks that the verdict is about where these are not all of them.
    """

    schema: Annotated[int, Form(f"{SCHEMA}, which this runner knows", SCHEMA.__eq__)]
    pack: str
    title: str
    kind: Kind
    target: forms.TargetName
    evidence: Evidence
    verdict: Verdict
    reason: str
    claims: tuple[str, ...]
    upstream: UpstreamRecord
    probe: Hashed
    fix: FixRecord | None
    dependencies: DependencyRecord
    lanes: dict[Annotated[str, Form("a lane", words.LaneName)], LaneRecord]
    host: HostRecord
    log: LogRecord
    command: str
    started: Annotated[str, Form("a date and time with its zone", moment)]
    seconds: Annotated[float, Form("0 or more", (0.0).__le__)]
    repeats: Repeats = field(default_factory=Repeats)
    ranks: int = 1
    about: tuple[str, ...] = ()

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
        return record.figure(name) if record else None


def judged_by(pack: Pack) -> Hashed:
    """Hash what judges a pack, by bytes and by meaning."""
    return Hashed(judges.sha256(pack), judges.meaning_of(pack))


def hashed(path: Path) -> Hashed:
    """Hash a patch, by bytes and by meaning."""
    return Hashed(files.sha256_file(path), judges.meaning(path))


def to_json(document: object) -> str:
    """Write a document the way every receipt is written."""
    return json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def document_of(receipt: Receipt) -> dict[str, object]:
    """Return a receipt as a JSON document; without ``about`` where it is about every check."""
    document = asdict(receipt)
    return document if receipt.about else {key: value for key, value in document.items() if key != "about"}


def parse(text: str | bytes, where: str, *, lanes: bool = True) -> Receipt:
    """Parse a receipt, or raise HarnessError that names the file and every error in it.

    Without `lanes` these are left out, unread: they are nine tenths of it, and many verbs need none of them.
    """
    try:
        document = strict_json.loads(text)
        if isinstance(document, dict):
            _prepare(document, lanes=lanes)
        receipt = structure.structure(document, Receipt)
    except (strict_json.StrictJsonError, structure.StructureError) as error:
        raise HarnessError(f"{where}: {str(error)[:LONGEST_MESSAGE]}. Next: run the pack again") from None
    beside = {"log.file": receipt.log.file} | ({"fix.name": receipt.fix.name} if receipt.fix else {})
    errors = [
        f"{path}: {name[:40]!r} is no file beside it" for path, name in beside.items() if not files.is_bare_name(name)
    ]
    if not 1 <= receipt.repeats.agreeing <= receipt.repeats.of:
        errors.append("repeats: agreeing lies between 1 and of")
    if errors:
        raise HarnessError(f"{where}: {'; '.join(errors)}. Next: run the pack again")
    return receipt


def _prepare(document: dict[str, Any], *, lanes: bool) -> None:
    """Leave out of a receipt what is gone from its schema, and with `lanes` false its lanes, which are named right."""
    for gone in [one for one in GONE if document.get(one, "") is None]:
        del document[gone]
    names = document.get("lanes")
    if not lanes and isinstance(names, dict):
        strange = [f"lanes: {name[:40]!r} is no lane" for name in names if name not in list(words.LaneName)]
        if strange:
            raise structure.StructureError(strange)
        document["lanes"] = {}


def moment(text: object) -> dt.datetime | None:
    """Read a date and time with its zone, as `datetime.isoformat` writes it; None where a text is none."""
    try:
        found = dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return found if found.tzinfo is not None else None


def _text(path: Path, again: str) -> tuple[bytes, str]:
    """Read a file of a pack, and name it for people; `again` makes it anew where it cannot be read."""
    where = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
    try:
        return path.read_bytes(), where
    except OSError as error:
        raise HarnessError(f"{where}: it cannot be read ({error.strerror}). Next: {again}") from None


def load(path: Path, *, lanes: bool = True) -> Receipt:
    """Load the receipt at `path`, without `lanes` where nobody needs them."""
    return parse(*_text(path, "run the pack again"), lanes=lanes)


def load_as(path: Path, kind: type[Structured], again: str) -> Structured:
    """Load another JSON file of a pack; HarnessError names it, every error in it, and what makes it anew."""
    text, where = _text(path, again)
    try:
        return structure.structure(strict_json.loads(text), kind)
    except (strict_json.StrictJsonError, structure.StructureError) as error:
        raise HarnessError(f"{where}: {str(error)[:LONGEST_MESSAGE]}. Next: {again}") from None


def paths(folder: Path) -> list[Path]:
    """List the receipts that lie directly in `folder`."""
    return sorted(filter(is_receipt, folder.glob("*.json")))


def is_receipt(path: Path) -> bool:
    """Whether a JSON file in a folder of receipts is one: upstream's own tests and strengths have other shapes."""
    return path.name != SUITE and not path.name.startswith((STRENGTH, FIRST_SIGHT))


def load_all(folder: Path, *, lanes: bool = True) -> list[Receipt]:
    """Load every receipt that lies directly in `folder`, which need not exist."""
    return [load(path, lanes=lanes) for path in paths(folder)]


def public_versions(found: list[Receipt]) -> set[str]:
    """Return the versions that stand in receipts by design and may look like an address, as cuDNN's has four parts."""
    return {text for one in found for text in (one.host.cudnn, one.host.nccl, *one.dependencies.packages.values())}


def strongest(receipts: list[Receipt]) -> dict[str, Receipt]:
    """Map each target to its receipt of the strongest evidence, the newest among equals."""
    best: dict[str, Receipt] = {}
    for receipt in sorted(receipts, key=lambda one: (-one.evidence.rank, one.age)):
        best[receipt.target] = receipt
    return best
