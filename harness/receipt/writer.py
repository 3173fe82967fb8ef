"""From an outcome to the receipt on disk: refused where private, written whole, together with its log."""

from __future__ import annotations

import datetime as dt
import fcntl
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from harness.core import files
from harness.core.cache import Cache
from harness.core.errors import HarnessError
from harness.core.words import LaneName
from harness.host.gpus import Gpu
from harness.host.host import Host
from harness.lane.record import LogRecord
from harness.pack.model import Pack
from harness.receipt import receipt, redaction
from harness.receipt.redaction import Scrubber
from harness.upstream.dependencies import DependencySet
from harness.upstream.source import commit_of
from harness.verdict.outcome import Outcome

#: A lane's own folders have random names under the cache.
LANE_FOLDER = re.compile(r"\$CACHE/work/lane-[^/\s]+/content/(home|tmp|cwd)")
LANE_NAMES = {"home": "$HOME", "tmp": "$TMP", "cwd": "$CWD"}


def scrubber(
    pack: Pack, cache: Cache, host: Host, dependency_set: DependencySet | None, trees: Mapping[Path, str]
) -> Scrubber:
    """Return the scrubber that knows the folders of a pack, a cache and trees, and which versions are no address."""
    own = {folder: f"$PACKS/{pack.name}" for folder in (pack.folder, pack.inputs) if folder is not None}
    places = {files.REPOSITORY: "$REPOSITORY", **own, **cache.places, **trees}
    versions = dependency_set.versions.values() if dependency_set else ()
    return redaction.of_host(places, (*versions, host.cudnn, host.nccl))


def without_lane_folders(text: str) -> str:
    """Name the folders that were a lane's own: their random names say nothing."""
    return LANE_FOLDER.sub(lambda match: LANE_NAMES[match[1]], text)


def host_record(host: Host, gpus: tuple[Gpu, ...]) -> receipt.HostRecord:
    """Record a host, and of its GPUs those that lanes had."""
    records = (receipt.GpuRecord(gpu.name, ".".join(map(str, gpu.compute_capability))) for gpu in gpus)
    found = asdict(host) | {"torch": host.torch or "", "triton": host.triton or "", "gpus": tuple(records)}
    return receipt.HostRecord(**found | {"driver": host.driver if gpus else ""})


def _as_lanes_saw_it(host: Host, members: DependencySet) -> Host:
    """Return a host with the torch and triton of a dependency set that holds them: lanes import these first.

    Which CUDA libraries such a torch brings stands among the packages of the set.
    """
    versions = members.versions
    if "torch" in versions:
        host = replace(host, torch=versions["torch"], cuda="", cudnn="", nccl="")
    return replace(host, triton=versions.get("triton", host.triton))


def _fix(outcome: Outcome) -> receipt.FixRecord | None:
    patch, pack = next((end.patch for end in outcome.last if end.patch and end.record), ""), outcome.cell.pack
    if not patch:
        return None
    of = receipt.hashed(outcome.cell.patch or (pack.inputs or pack.folder) / patch)
    return receipt.FixRecord(receipt.FixKind.PATCH, patch, of.sha256, of.meaning)


def started(outcome: Outcome) -> str:
    """Return when the first lane of an outcome began, to the second."""
    return dt.datetime.fromisoformat(outcome.runs[0][0].started).isoformat(timespec="seconds")


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
        fix=_fix(outcome),
        dependencies=receipt.DependencyRecord(
            name=members.name,
            sha256=members.sha256,
            packages=members.versions,
        ),
        lanes={str(name): record for name, record in outcome.lanes.items()},
        host=host_record(_as_lanes_saw_it(outcome.last[-1].host, members), outcome.gpus),
        log=log,
        command=command,
        started=started(outcome),
        seconds=round(outcome.seconds, 3),
        repeats=receipt.Repeats(outcome.agreeing, len(outcome.runs)),
        ranks=cell.stated.ranks,
        about=cell.about,
    )


@contextmanager
def told() -> Iterator[None]:
    """Raise HarnessError where the disk does not give a log or does not take a receipt."""
    try:
        yield
    except (OSError, UnicodeDecodeError) as error:
        name = Path(error.filename).name if isinstance(error, OSError) and error.filename else ""
        why = (error.strerror or str(error)) if isinstance(error, OSError) else "a log is not UTF-8"
        raise HarnessError(f"no receipt written: {why}{f' ({name})' if name else ''}") from None


@contextmanager
def _only_writer(folder: Path) -> Iterator[None]:
    """Let no other runner write into a folder of receipts; the kernel ends this when the process dies."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def write(outcome: Outcome, cache: Cache, command: str, folder: Path, logs: Mapping[LaneName, str]) -> Path:
    """Write receipt and log into `folder` and return the receipt's path; `command` makes it again.

    The log's name holds its hash, and the receipt names the log: whoever reads finds the old pair or the new one. The
    lanes' records and `logs` are scrubbed already. PrivateTextError is raised where another field looks private; then
    nothing is written.
    """
    cell, text = outcome.cell, "\n".join(f"== {name} lane ==\n{log}" for name, log in logs.items())
    name = f"{cell.target}.{cell.evidence}"
    digest = files.sha256_bytes(text.encode())
    log = LogRecord(f"{name}.{digest[:12]}.log", digest)
    scrub = scrubber(cell.pack, cache, outcome.last[-1].host, outcome.dependency_set, {})
    built = build(outcome, command, log)
    clean = scrub.document(replace(built, lanes={}), "receipt", without_lane_folders)
    document = receipt.document_of(replace(clean, lanes=built.lanes))
    return _put(folder / f"{name}.json", receipt.to_json(document), folder / log.file, text)


def publish(path: Path, folder: Path) -> Path:
    """Put a receipt that lies in a run folder, and its log, into another folder; return the receipt's path there."""
    log = path.with_name(receipt.load(path).log.file)
    with told():
        return _put(folder / path.name, path.read_text("utf-8"), folder / log.name, log.read_text("utf-8"))


def _put(path: Path, content: str, log: Path, text: str) -> Path:
    """Write a receipt after its log, and remove older logs."""
    folder = path.parent
    with _only_writer(folder):
        fresh = not log.exists()
        try:
            files.write_atomic(log, text)
            files.write_atomic(path, content)
        except BaseException:
            if fresh:
                log.unlink(missing_ok=True)  # no receipt names it
            raise
        name = path.stem
        left = {*folder.glob(f"{name}.log"), *folder.glob(f"{name}.????????????.log"), *folder.glob(f".{name}.*")}
        for other in left - {log}:
            other.unlink()  # older ones, and what a killed writer left of its own
    return path
