"""From an outcome to the receipt on disk: private text is refused, and receipt and log are written together."""

import datetime as dt
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.core import Cache, HarnessError, LaneName, LaneVerdict, files
from harness.host.host import Gpu, Host
from harness.lane.results import LogRecord
from harness.pack.model import Pack
from harness.pack.requirements import DependencySet
from harness.receipt import receipt, redaction
from harness.receipt.redaction import Scrubber
from harness.upstream.source import commit_of
from harness.verdict.pack_verdict import Outcome

#: The folders of a lane, with their random names under the cache.
LANE_FOLDER = re.compile(r"\$CACHE/work/lane-[^/\s]+/content/(home|tmp|cwd)")
#: pytest's tracebacks of failed checks, up to its next section.
TRACEBACKS = re.compile(r"^=+ FAILURES =+\n.*?(?=^=+ .* =+$)", re.DOTALL | re.MULTILINE)


def scrubber(
    pack: Pack, cache: Cache, host: Host, dependency_set: DependencySet | None, trees: Mapping[Path, str]
) -> Scrubber:
    """Return the scrubber that knows the folders of a pack, a cache and trees, and the versions that are no address."""
    pack_folders = {folder: f"$PACKS/{pack.name}" for folder in (pack.folder, pack.inputs) if folder is not None}
    places = {files.REPOSITORY: "$REPOSITORY", **pack_folders, **cache.places, **trees}
    versions = dependency_set.versions.values() if dependency_set else ()
    return redaction.host_scrubber(places, (*versions, host.cudnn, host.nccl))


def without_lane_folders(text: str) -> str:
    """Replace the random names of a lane's folders."""
    return LANE_FOLDER.sub(lambda match: f"${match[1].upper()}", text)


def host_record(host: Host, gpus: tuple[Gpu, ...], members: DependencySet | None = None) -> Host:
    """Record a host, and the GPUs that lanes had. Lanes import torch and triton from a dependency set that has them.

    The CUDA libraries of that torch are listed among the packages of the set.
    """
    versions = members.versions if members else {}
    if "torch" in versions:
        host = replace(host, torch=versions["torch"], cuda="", cudnn="", nccl="")
    driver = host.driver if gpus else ""
    return replace(host, triton=versions.get("triton", host.triton), gpus=gpus, driver=driver)


def _fix_record(outcome: Outcome) -> receipt.PatchRecord | None:
    patch, pack = next((end.patch for end in outcome.last if end.patch and end.record), ""), outcome.cell.pack
    return receipt.patch_record(outcome.cell.patch or (pack.inputs or pack.folder) / patch) if patch else None


def build(outcome: Outcome, command: str, log: LogRecord) -> receipt.Receipt:
    """Build the receipt of an outcome whose lanes ran."""
    cell, members = outcome.cell, outcome.dependency_set
    assert members is not None  # noqa: S101 - for the type checker: its lanes ran
    pack = cell.pack
    return receipt.Receipt(
        schema=receipt.SCHEMA,
        pack=pack.name,
        title=pack.definition.title,
        kind=pack.definition.kind,
        target=cell.target,
        evidence=cell.known_evidence,
        verdict=outcome.judgement.verdict,
        reason=outcome.judgement.reason,
        claims=outcome.judgement.claims,
        upstream=receipt.UpstreamRecord(
            package=pack.definition.upstream.package,
            version=outcome.version,
            origin=cell.source.kind,
            sha256=outcome.last[0].tree,
            commit=commit_of(outcome.version),
        ),
        probe=receipt.judged_by(pack),
        fix=_fix_record(outcome),
        dependencies=receipt.DependencyRecord(members.name, members.sha256, members.versions),
        lanes={str(name): record for name, record in outcome.lanes.items()},
        host=host_record(outcome.last[-1].host, outcome.gpus, members),
        log=log,
        command=command,
        started=dt.datetime.fromisoformat(outcome.runs[0][0].started).isoformat(timespec="seconds"),
        seconds=round(outcome.seconds, 3),
        repeats=receipt.Repeats(outcome.agreeing, len(outcome.runs)),
        ranks=outcome.ranks,
        about=cell.about,
    )


def _shorten(log: str, verdict: LaneVerdict) -> str:
    """Leave out the tracebacks of a lane that shows the bug: its receipt says why each check failed."""
    return TRACEBACKS.sub("", log) if verdict == LaneVerdict.BUG_REPRODUCED else log


@contextmanager
def translate_disk_errors() -> Iterator[None]:
    """Raise HarnessError where a log cannot be read or a receipt cannot be written."""
    try:
        yield
    except UnicodeDecodeError:
        raise HarnessError("no receipt written: a log is not UTF-8") from None
    except OSError as error:
        place = f" ({Path(error.filename).name})" if error.filename else ""
        raise HarnessError(f"no receipt written: {error.strerror or error}{place}") from None


@contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Keep other runners from writing into a folder of receipts; the kernel drops the lock when the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write(outcome: Outcome, cache: Cache, command: str, folder: Path, logs: Mapping[LaneName, str]) -> Path:
    """Write receipt and log into `folder` and return the receipt's path; `command` makes the receipt again.

    The log's name holds its hash, and the receipt names the log: a reader finds the old pair or the new pair. Records
    and `logs` come scrubbed. Where another field looks private, PrivateTextError is raised and nothing is written.
    """
    cell = outcome.cell
    text = "\n".join(f"== {name} lane ==\n{_shorten(log, outcome.lanes[name].verdict)}" for name, log in logs.items())
    name = f"{cell.target}.{cell.evidence}"
    digest = files.sha256_bytes(text.encode())
    log = LogRecord(f"{name}.{digest[:12]}.log", digest)
    scrub = scrubber(cell.pack, cache, outcome.last[-1].host, outcome.dependency_set, {})
    unscrubbed = build(outcome, command, log)
    scrubbed = scrub.document(replace(unscrubbed, lanes={}), "receipt", without_lane_folders)
    document = receipt.document_of(replace(scrubbed, lanes=unscrubbed.lanes))
    return _write_pair(folder / f"{name}.json", receipt.to_json(document), folder / log.file, text)


def publish(path: Path, folder: Path) -> Path:
    """Copy a receipt of a run folder, and its log, into another folder; return the new path of the receipt."""
    log = path.with_name(receipt.load(path).log.file)
    with translate_disk_errors():
        return _write_pair(folder / path.name, path.read_text("utf-8"), folder / log.name, log.read_text("utf-8"))


def _write_pair(path: Path, content: str, log: Path, text: str) -> Path:
    """Write a receipt after its log, and remove older logs."""
    folder = path.parent
    with _lock(folder):
        is_new = not log.exists()
        try:
            files.write_atomic(log, text)
            files.write_atomic(path, content)
        except BaseException:
            if is_new:
                log.unlink(missing_ok=True)  # no receipt names it
            raise
        name = path.stem
        logs = {*folder.glob(f"{name}.log"), *folder.glob(f"{name}.????????????.log"), *folder.glob(f".{name}.*")}
        for file in logs - {log}:
            file.unlink()  # an older log, or a temporary file of a killed writer
    return path
