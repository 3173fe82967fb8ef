"""From an outcome to the receipt on disk: scrubbed, refused where private, and written whole."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from harness import files, privacy, receipt
from harness.cache import Cache
from harness.host import Host
from harness.lane import LaneResult
from harness.origin import Kind
from harness.outcome import Outcome, Request
from harness.receipt import CompanionRecord, HostRecord, LaneRecord, LogRecord, Receipt, Repeats, Source
from harness.words import Evidence, Verdict

#: These verdicts say nothing of the bug: such a receipt never replaces one that does.
UNJUDGED = {Verdict.ERROR, Verdict.UNSUPPORTED}
#: A lane's own folders have random names under the cache.
LANE_FOLDER = re.compile(r"\$CACHE/work/lane-[^/\s]+/content/(home|tmp|cwd)")
LANE_NAMES = {"home": "$HOME", "tmp": "$TMP", "cwd": "$CWD"}


def folder_for(outcome: Outcome, request: Request, elsewhere: Path | None, logs: Path) -> Path:
    """Return where a receipt belongs.

    The pack's own folder takes what pack.toml speaks of: the pinned release, and upstream's default branch at the
    named commit. Everything else, and what says nothing of the bug, goes to the folder of the run's logs.
    """
    pack = outcome.pack
    if elsewhere is not None:
        return elsewhere / pack.name
    if outcome.judgement.verdict in UNJUDGED:
        return logs / pack.name
    if outcome.belongs_to_pack(request):
        return pack.receipts
    head = pack.definition.head
    at_head = head and outcome.origin and (outcome.origin.kind, outcome.origin.value) == (Kind.GIT, head.commit)
    return pack.receipts / "head" if at_head and not request.companions else logs / pack.name


def lane_record(result: LaneResult) -> LaneRecord:
    """Return what a receipt keeps of a lane."""
    said = result.transcript
    return LaneRecord(
        verdict=result.verdict,
        reason=result.reason,
        exit_status=result.status,
        seconds=round(result.seconds, 3),
        peak_memory=result.peak_memory,
        left_behind=result.left_behind,
        tree=result.tree.sha256,
        device=said.target.device if said.target else "",
        upstream=said.upstream,
        checks=said.checks,
        figures=said.figures,
        outputs=said.outputs,
        claims=said.claims,
    )


def _host(host: Host, outcome: Outcome) -> HostRecord:
    base = HostRecord(
        python=host.python,
        torch=host.torch or "",
        triton=host.triton or "",
        cuda=host.cuda,
        system=host.system,
        cudnn=host.cudnn,
        nccl=host.nccl,
    )
    gpu = next((gpu for gpu in host.gpus if gpu.target == outcome.target), None)
    if outcome.evidence != Evidence.EXECUTED or gpu is None:
        return base
    capability = ".".join(str(part) for part in gpu.compute_capability)
    return replace(base, driver=host.driver, gpu=gpu.name, compute_capability=capability)


def log_text(outcome: Outcome) -> str:
    """Join the logs of the lanes that ran."""
    parts = [f"== {lane.name} lane ==\n{lane.log.read_text('utf-8', errors='replace')}" for lane in outcome.lanes]
    return "\n".join(parts)


def without_lane_folders(text: str) -> str:
    """Name the folders that were a lane's own: their random names say nothing."""
    return LANE_FOLDER.sub(lambda match: LANE_NAMES[match[1]], text)


def scrubber(outcome: Outcome, cache: Cache, host: Host) -> privacy.Scrubber:
    """Return the scrubber that knows this outcome's folders, and the versions that look like addresses."""
    places = {lane.tree.folder: "$TREE" for lane in outcome.lanes}
    repository = Path(__file__).resolve().parent.parent
    return privacy.of_host(
        {
            repository: "$REPOSITORY",
            outcome.pack.folder: f"$PACKS/{outcome.pack.name}",
            cache.root: "$CACHE",
            **places,
        },
        (*(outcome.companion_set.versions.values() if outcome.companion_set else ()), host.cudnn, host.nccl),
    )


def build(outcome: Outcome, host: Host, command: str, log: str) -> Receipt:
    """Build the receipt of an outcome; `log` is the scrubbed text of its log."""
    pack, source = outcome.pack, outcome.origin
    definition = pack.definition
    at_head = definition.head is not None and source is not None and source.value == definition.head.commit
    patch = pack.head_patch if at_head else pack.patch
    name = f"{outcome.target}.{outcome.evidence}"
    return Receipt(
        schema=receipt.SCHEMA,
        pack=pack.name,
        title=definition.title,
        kind=definition.kind,
        target=outcome.target,
        evidence=outcome.evidence or Evidence.TRACED,
        verdict=outcome.judgement.verdict,
        reason=outcome.judgement.reason,
        claims=outcome.judgement.claims,
        upstream=Source(
            package=definition.upstream.package,
            version=outcome.tree.version if outcome.tree else definition.upstream.version,
            origin=source.kind if source else Kind.PINNED,
            sha256=outcome.tree.sha256 if outcome.tree else "",
        ),
        probe=receipt.hashed(pack.probe),
        patch=receipt.hashed(patch) if outcome.patched else None,
        companions=CompanionRecord(
            name=outcome.companion_set.name if outcome.companion_set else "",
            sha256=outcome.companion_set.sha256 if outcome.companion_set else "",
            packages=outcome.companion_set.versions if outcome.companion_set else {},
        ),
        lanes={lane.name: lane_record(lane) for lane in outcome.lanes},
        host=_host(host, outcome),
        log=LogRecord(f"{name}.log", files.sha256_bytes(log.encode())),
        command=command,
        started=outcome.started.isoformat(timespec="seconds") if outcome.started else "",
        seconds=round(outcome.seconds, 3),
        repeats=Repeats(outcome.agreeing, outcome.repeats),
    )


def write(outcome: Outcome, cache: Cache, host: Host, command: str, folder: Path) -> Path:
    """Write receipt and log into `folder` and return the receipt's path.

    Raises:
        PrivateTextError: a field still looks private; then nothing is written.

    """
    scrub = scrubber(outcome, cache, host)
    log = without_lane_folders(scrub.scrub(log_text(outcome)))
    scrub.require_clean("log", log)
    document = scrub.document(receipt.document_of(build(outcome, host, command, log)))
    text = without_lane_folders(receipt.to_json(document))
    path = folder / f"{outcome.target}.{outcome.evidence}.json"
    files.write_atomic(path.with_suffix(".log"), log)
    files.write_atomic(path, text)
    return path
