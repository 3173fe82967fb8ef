"""Whether a receipt is one that the runner writes: the one judge judges again from what it says of its lanes.

It cannot show that a run took place.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from harness.core import files, terminal
from harness.core.errors import HarnessError
from harness.core.words import Evidence, LaneName, LaneVerdict, Verdict
from harness.host.host import python_tag
from harness.lane import results, script
from harness.lane.record import LaneRecord
from harness.pack.model import Pack
from harness.receipt.receipt import Receipt
from harness.upstream import dependencies, patch
from harness.upstream.patch import PatchedFile
from harness.verdict import lane_verdict, pack_verdict

#: What a log says where it is not whole.
LEFT_OUT = " bytes are left out here ...]"
#: Verdicts that no two lanes give.
WITHOUT_LANES = {Verdict.UNAVAILABLE, Verdict.PATCH_STALE, Verdict.ERROR}


def _lane_errors(lane: LaneRecord) -> Iterator[str]:
    """Judge a lane again, from its script and its checks."""
    for kind, lines in (("check", lane.checks), ("figure", lane.figures), ("output", lane.outputs)):
        yield from (f"{kind} {name!r} stands there twice" for name in results.doubled(line.name for line in lines))
    yield from lane_verdict.mute(lane.checks)
    if min(lane.seconds, lane.waited, lane.peak_memory, lane.left_behind) < 0:
        yield "a negative time, memory or number of processes"
    if lane.verdict == LaneVerdict.ERROR:
        return
    if lane.script:
        word, _, reason = lane.script.partition(": ")
        said = script.read(lane.script, script.STATUS.get(LaneVerdict(word), -1)) if word in script.STATUS else None
        if said is None or said.reason != reason or said.verdict == LaneVerdict.ERROR:
            yield f"script: {lane.script[:60]!r} is no sentinel"
        else:
            found, wanted = lane_verdict.of_two_files(said, lane.checks), script.STATUS[said.verdict]
            if found != (lane.verdict, lane.reason):
                yield f"script and checks say {found[0]}: {found[1]}"
            if lane.exit_status != wanted:
                yield f"exit_status: {lane.exit_status}, not {wanted}"
    elif lane_verdict.implied(lane.checks) != lane.verdict:
        yield f"verdict: {lane.verdict}; its checks say {lane_verdict.implied(lane.checks)}"
    if lane.verdict != LaneVerdict.UNSUPPORTED and not lane.upstream:
        yield "upstream: nothing says what was judged"


def _verdict_errors(one: Receipt, pack: Pack) -> Iterator[str]:
    """Judge the pack again, from its lanes."""
    pristine, patched = one.lanes.get(LaneName.PRISTINE), one.lanes.get(LaneName.PATCHED)
    stale = one.reason if one.verdict == Verdict.PATCH_STALE else ""
    if pristine is None and patched is None:
        if one.verdict not in WITHOUT_LANES:
            yield f"verdict: {one.verdict} without a lane"
        return
    found = pack_verdict.pair(pristine, patched, stale, one.about)
    if (found.verdict, found.reason, found.claims) != (one.verdict, one.reason, tuple(one.claims)):
        said = f"{found.verdict} {found.reason} {' '.join(found.claims)}".rstrip()
        yield f"verdict, reason or claims: the lanes say {said}"
    if one.verdict != Verdict.ERROR and one.repeats.agreeing != one.repeats.of:
        yield f"repeats: {one.repeats.agreeing} of {one.repeats.of} runs agree, which is no {one.verdict}"
    if (patched is not None) != (one.fix is not None):
        yield "fix: a patched lane has one, and no other receipt has"
    if pristine and patched and pristine.tree == patched.tree:
        yield "lanes: both ran on one tree"
    unknown = [claim for claim in one.claims if claim not in {*pack.definition.claims, "BITWISE_IDENTICAL"}]
    yield from (f"claims: the pack does not know {claim}" for claim in unknown)


def _module_errors(one: Receipt, pack: Pack) -> Iterator[str]:
    """Say where a lane judged something else than the modules under test, or the patched one an unchanged file."""
    hashes: dict[tuple[str, str], str] = {}
    for name, lane in one.lanes.items():
        for line in lane.upstream:
            inside = line.file.startswith("$TREE/") and ".." not in PurePosixPath(line.file).parts
            if line.module.partition(".")[0] not in pack.definition.upstream.modules or not inside:
                yield f"{name} lane: {line.module} ({line.file[:80]}) is no module under test of the tree"
            if hashes.setdefault((name, line.file), line.sha256) != line.sha256:
                yield f"{name} lane: {line.file} has two hashes"
    for file in _patched_files(one, pack) if len(one.lanes) == len(LaneName) else ():
        in_wheel = file.path.removeprefix(f"{pack.definition.upstream.source_root}/")  # a release has no source root
        before, after = (
            hashes.get((name, f"$TREE/{file.path}")) or hashes.get((name, f"$TREE/{in_wheel}")) for name in LaneName
        )
        if after is None or before == after or (before is None and file.before != patch.NO_BLOB):
            yield f"{file.path}: the lanes did not load two versions of it"


def _patched_files(one: Receipt, pack: Pack) -> list[PatchedFile]:
    """List the files that the target has to load and that the patch of a receipt changes."""
    target = pack.definition.targets.get(one.target)
    path = pack.folder / one.fix.name if one.fix else pack.patch
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [file for file in patch.parse(text) if target and file.path in target.loads]


def _host_errors(one: Receipt, pack: Pack) -> Iterator[str]:
    gpus = one.host.gpus
    if (one.evidence == Evidence.EXECUTED) != bool(gpus):
        yield f"host.gpus: {len(gpus)} with {one.evidence} evidence"
    for gpu in gpus:
        name = "sm_" + gpu.compute_capability.replace(".", "")
        if one.target not in (name, f"{name}a"):
            yield f"host.gpus: a GPU of compute capability {gpu.compute_capability[:20]} is no {one.target}"
    devices = {lane.device for lane in one.lanes.values() if lane.device}
    if gpus and devices - {gpu.name for gpu in gpus}:
        yield f"device: a lane names {', '.join(sorted(devices))[:80]}, the host {gpus[0].name}"
    target = pack.definition.targets.get(one.target)
    if target is None or one.evidence not in target.evidence:
        yield f"target: the pack lists no {one.evidence} evidence for {one.target}"
    elif (gpus and len(gpus) != target.gpus) or one.ranks != target.ranks:
        yield f"host.gpus, ranks: pack.toml states {target.gpus} and {target.ranks}"
    try:
        members = dependencies.named(pack.definition, one.dependencies.name, python_tag(one.host.python))
        if members.versions != one.dependencies.packages:
            yield "dependencies: other versions than the pack pins"
    except HarnessError as error:
        yield f"dependencies: {error}"


def _about_pack(one: Receipt, pack: Pack, folder: str) -> Iterator[str]:
    upstream, definition = pack.definition.upstream, pack.definition
    stated = {"kind": (one.kind, definition.kind), "upstream.package": (one.upstream.package, upstream.package)}
    if folder == "receipts":
        stated["upstream.version"] = (one.upstream.version, upstream.pin)
        stated["upstream.origin"] = (one.upstream.origin, "pinned")
    yield from (f"{name}: {found}, not {wanted}" for name, (found, wanted) in stated.items() if found != wanted)
    ask = definition.ask if folder == "ask" else None
    if one.about != (ask.checks if ask else ()):
        yield "about: not the checks of pack.toml's [ask]"
    if one.fix and one.fix.name not in _patches_for(pack, folder):
        yield f"fix: {one.fix.name[:40]} is no patch of the pack for that tree"
    if one.age > dt.datetime.now(dt.UTC) + dt.timedelta(days=1):
        yield f"started: {one.started} is in the future"
    pristine = one.lanes.get(LaneName.PRISTINE)
    if pristine and pristine.tree != one.upstream.sha256:
        yield "lanes: the pristine lane ran on another tree than upstream.sha256"


def _patches_for(pack: Pack, folder: str) -> set[str]:
    """Name the patches that the receipts of a folder may have: another changes fewer of the files under test."""
    upstream = pack.definition.upstream
    if folder == "ask":
        return {pack.ask_patch.name} if pack.ask_patch else set()
    if folder == "head":
        return {pack.patch.name, pack.own_head_patch.name}
    return {pack.patch_for(upstream.commit if upstream.is_commit else "").name}


def _log_errors(one: Receipt, log: bytes) -> Iterator[str]:
    if one.log.file != f"{one.name}.{one.log.sha256[:12]}.log":
        yield f"log: {one.log.file} is named otherwise"
    text = log.decode("utf-8", errors="replace")
    for name, lane in one.lanes.items():
        _, mark, rest = text.partition(f"== {name} lane ==\n")
        lines = rest.split("\n== ")[0].splitlines()
        sentinel = lane.script or str(lane.verdict)
        kept = {*map(terminal.visible, lines), script.CUT}
        foreign = [line for line in lane.printed.splitlines() if line.strip() and line not in kept]
        if foreign and LEFT_OUT not in rest:
            yield f"{name} lane: printed: its log has no line {foreign[0][:60]!r}"
        if lane.printed and lane.printed.splitlines()[-1].partition(":")[0] != lane.script.partition(":")[0]:
            yield f"{name} lane: printed: its last line is no {lane.script[:60]}"
        if not mark or not any(line == sentinel or line.startswith(f"{sentinel} {{") for line in lines):
            yield f"its log does not say {sentinel[:60]} in the {name} lane"


def errors(pack: Pack, path: Path, one: Receipt, *, is_fresh: bool) -> list[str]:
    """Say what of a receipt in a pack's folder does not hold; of one that is STALE, only whose it is and its log."""
    if (one.pack, f"{one.name}.json") != (pack.name, path.name):
        return [f"it speaks of {one.pack} {one.name}"]
    log = path.with_name(one.log.file)
    data = log.read_bytes() if log.exists() else None
    if data is None or files.sha256_bytes(data) != one.log.sha256:
        return [f"its log {one.log.file} is missing or has another hash"]
    if not is_fresh:
        return []
    found = [*_about_pack(one, pack, path.parent.name), *_log_errors(one, data)]
    found += [*_verdict_errors(one, pack), *_module_errors(one, pack), *_host_errors(one, pack)]
    found += [f"{name} lane: {error}" for name, lane in one.lanes.items() for error in _lane_errors(lane)]
    if pack.contract.exists():
        found += [f"{name} lane: it has no script" for name, lane in one.lanes.items() if not lane.script]
    return found
