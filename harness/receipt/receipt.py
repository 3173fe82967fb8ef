"""Receipts: the record of a pack's run on one target, in one JSON file and one log."""

import datetime as dt
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated

from harness.core import Evidence, HarnessError, Kind, Verdict, files, structure, words
from harness.core.structure import Form, Structured
from harness.host.host import Host
from harness.lane.results import FigureLine, LaneRecord, LogRecord
from harness.pack import Pack, forms, judges

SCHEMA = 3
AGAIN = "run the pack again"
MOST_REPEATS = 1000
#: An object whose members are texts, numbers and truth values, as `json.dumps` writes it with an indent.
FLAT_OBJECT = re.compile(r"\{\n(?P<members>(?: *\"[^\n]*[^\n\[{]\n)+) *\}")
#: Characters of an error message, which may quote a receipt.
LONGEST_MESSAGE = 1000
#: The receipt of upstream's own tests, beside a pack's other receipts.
SUITE = "upstream_tests.json"
#: How the file name of a record of wrong fixes begins; the file lies beside the receipt of its target.
STRENGTH = "strength."
#: The same for a record of wrong fixes whose author had not read the checks.
FIRST_SIGHT = "first_sight."


@dataclass(frozen=True)
class UpstreamRecord:
    """The upstream that was judged."""

    package: str  # its name on the package index
    version: str
    origin: str  # of the tree: pinned, release, latest, path, git or installed
    sha256: str  # of the archive, or of the manifest of a tree without an archive
    commit: str = ""  # the commit that the tree holds unchanged; empty for a release


@dataclass(frozen=True)
class Hashed:
    """Script and contract, or a patch: the hash of the bytes, and the hash of what they mean."""

    sha256: str
    meaning: str


@dataclass(frozen=True)
class PatchRecord:
    """A patch of the pack, and its hashes as in `Hashed`."""

    name: Annotated[str, Form("a file beside it", files.is_bare_name)]
    sha256: str
    meaning: str  # from its first ``diff --git`` on
    kind: Annotated[str, Form("patch", "patch".__eq__)] = "patch"  # how the second tree was made from the first


@dataclass(frozen=True)
class DependencyRecord:
    """The dependency set by name, hash and versions."""

    name: str
    sha256: str
    packages: dict[str, str]


@dataclass(frozen=True)
class Repeats:
    """How many runs gave the verdict, out of how many. ValueError: more than there were, none, or over 1000."""

    agreeing: int = 1
    of: int = 1

    def __post_init__(self) -> None:
        if not 1 <= self.agreeing <= self.of <= MOST_REPEATS:
            raise ValueError(f"agreeing lies between 1 and of, and of is {MOST_REPEATS} at most")


def _lies_beside(log: LogRecord) -> bool:
    return files.is_bare_name(log.file)


def parse_time(text: object) -> dt.datetime | None:
    """Read a date and time with its zone, as `datetime.isoformat` writes it; None for any other text."""
    try:
        time = dt.datetime.fromisoformat(str(text))
    except ValueError:
        return None
    return time if time.tzinfo is not None else None


@dataclass(frozen=True)
class Receipt:
    """One pack on one target, as it was judged.

    `ranks` is the size of the largest group that the contract starts, as of `Target.ranks_on`; 1 without one. `fix` is
    None where no patched lane ran. `about` names the defect checks of the verdict; it is empty for all of them.
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
    fix: PatchRecord | None
    dependencies: DependencyRecord
    lanes: dict[Annotated[str, Form("a lane", words.LaneName)], LaneRecord]
    host: Host
    log: Annotated[LogRecord, Form("a file beside it", _lies_beside)]
    command: str
    started: Annotated[str, Form("a date and time with its zone", parse_time)]
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
        """Return a figure of one lane, or None where the lane printed none of that name."""
        record = self.lanes.get(lane)
        return record.figure(name) if record else None


def judged_by(pack: Pack) -> Hashed:
    """Hash the script and the contract of a pack, by bytes and by meaning."""
    return Hashed(judges.sha256(pack), judges.meaning_of(pack))


def hashed(path: Path) -> Hashed:
    """Hash a patch, by bytes and by meaning."""
    return Hashed(files.sha256_file(path), judges.meaning(path))


def patch_record(path: Path) -> PatchRecord:
    """Record a patch of a pack."""
    return PatchRecord(path.name, files.sha256_file(path), judges.meaning(path))


def to_json(document: object) -> str:
    """Write a document in the format of receipts: an object of texts, numbers and truth values stands on one line."""
    text = json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False)
    return FLAT_OBJECT.sub(lambda match: "{" + re.sub(r"\n *", " ", match["members"].strip()) + "}", text) + "\n"


def document_of(receipt: Receipt) -> dict[str, object]:
    """Return a receipt as a JSON document, without ``about`` where the verdict is about every check."""
    document = asdict(receipt)
    return document if receipt.about else {key: value for key, value in document.items() if key != "about"}


def parse(text: str | bytes, label: str, *, lanes: bool = True) -> Receipt:
    """Parse a receipt, or raise HarnessError that names the file and every error in it.

    With `lanes` false the lanes are left out unread: they are nine tenths of a receipt, and many verbs need none.
    """
    return _parse(text, label, Receipt, AGAIN, lanes=lanes)


def _parse(text: str | bytes, label: str, kind: type[Structured], next_step: str, *, lanes: bool = True) -> Structured:
    try:
        document = structure.loads(text)
        if not lanes and isinstance(document, dict) and isinstance(document.get("lanes"), dict):
            known_names = [*words.LaneName]  # a lane of another name stays, and is refused
            document["lanes"] = {name: lane for name, lane in document["lanes"].items() if name not in known_names}
        return structure.structure(document, kind)
    except (structure.StrictJsonError, structure.StructureError) as error:
        raise HarnessError(f"{label}: {str(error)[:LONGEST_MESSAGE]}. Next: {next_step}") from None


def load(path: Path, *, lanes: bool = True) -> Receipt:
    """Load the receipt at `path`; with `lanes` false its lanes stay unread."""
    return load_as(path, Receipt, AGAIN, lanes=lanes)


def load_as(path: Path, kind: type[Structured], next_step: str, *, lanes: bool = True) -> Structured:
    """Load a JSON file of a pack; HarnessError names the file, every error in it, and the step that makes it anew."""
    label = f"{path.parent.parent.name}/{path.parent.name}/{path.name}"
    try:
        text = path.read_bytes()
    except OSError as error:
        raise HarnessError(f"{label}: it cannot be read ({error.strerror}). Next: {next_step}") from None
    return _parse(text, label, kind, next_step, lanes=lanes)


def paths(folder: Path) -> list[Path]:
    """List the receipts that lie directly in `folder`."""
    return sorted(filter(is_receipt, folder.glob("*.json")))


def is_receipt(path: Path) -> bool:
    """Whether a JSON file in a folder of receipts is a receipt; upstream's tests and strengths have other formats."""
    return path.name != SUITE and not path.name.startswith((STRENGTH, FIRST_SIGHT))


def load_all(folder: Path, *, lanes: bool = True) -> list[Receipt]:
    """Load the receipts that lie directly in `folder`, which need not exist."""
    return [load(path, lanes=lanes) for path in paths(folder)]


def strongest(receipts: list[Receipt]) -> dict[str, Receipt]:
    """Map each target to its receipt of the strongest evidence, the newest among equals."""
    weakest_first = sorted(receipts, key=lambda receipt: (-receipt.evidence.rank, receipt.age))
    return {receipt.target: receipt for receipt in weakest_first}
