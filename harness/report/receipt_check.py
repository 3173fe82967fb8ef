"""Whether a receipt is one that the runner writes: its lanes are judged again from their records.

This cannot show that a run took place.
"""

import ast
import datetime as dt
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

from harness.core import HarnessError, files, terminal
from harness.core.words import BITWISE_IDENTICAL, Evidence, LaneName, LaneVerdict, Verdict
from harness.host.host import Host, python_tag
from harness.lane import LaneRecord, process, results, script
from harness.pack import Pack, patch_text, requirements
from harness.pack.patch_text import PatchedFile
from harness.receipt.receipt import Receipt
from harness.upstream.source import SourceKind
from harness.verdict import lane_verdict, pack_verdict

#: What a log says where some of it is left out.
LEFT_OUT = " bytes are left out here ...]"
#: The option by which a run of another tree than the pinned release names it.
OTHER_TREE = " --upstream"
#: What makes a link, a tag, code, a mention or a cell of a name.
LIVE = re.compile(r"[<>\[\]`@|*]|://")
#: Verdicts of a receipt without lanes.
WITHOUT_LANES = {Verdict.UNAVAILABLE, Verdict.PATCH_STALE, Verdict.ERROR}


def _lane_errors(lane: LaneRecord) -> Iterator[str]:
    for kind, lines in (("check", lane.checks), ("figure", lane.figures), ("output", lane.outputs)):
        yield from (f"{kind} {name!r} stands there twice" for name in results.duplicates(line.name for line in lines))
    yield from lane_verdict.unexplained_checks(lane.checks)
    measured = (lane.seconds, lane.waited, lane.peak_memory, lane.left_behind)
    if min(*measured, *(check.seconds for check in lane.checks)) < 0:
        yield "a negative time, memory or number of processes"
    if lane.verdict == LaneVerdict.ERROR:
        return
    if lane.script:
        sentinel = script.read(lane.script, lane.exit_status)
        judgement = lane_verdict.judge_files(sentinel, lane.checks)
        if sentinel.text != lane.script:
            yield f"script {lane.script[:60]!r}: {sentinel.reason}"
        elif judgement != (lane.verdict, lane.reason):
            yield f"script and checks say {judgement[0]}: {judgement[1]}"
    elif lane_verdict.verdict_of_checks(lane.checks) != lane.verdict:
        yield f"verdict: {lane.verdict}; its checks say {lane_verdict.verdict_of_checks(lane.checks)}"
    if lane.verdict != LaneVerdict.UNSUPPORTED and not lane.upstream:
        yield "upstream: nothing says what was judged"


def _contract_errors(receipt: Receipt, pack: Pack) -> Iterator[str]:
    """Name the lanes without a script, and the checks that are no test function of the contract."""
    if not pack.contract.exists():
        return
    tree = ast.parse(pack.contract.read_bytes())
    functions = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    for lane_name, lane in receipt.lanes.items():
        if not lane.script:
            yield f"{lane_name} lane: it has no script"
        names = {check.name.partition("[")[0].rpartition("::")[2] for check in lane.checks}
        yield from (f"{lane_name} lane: check {name!r} is none of the contract" for name in sorted(names - functions))


def _verdict_errors(receipt: Receipt, pack: Pack) -> Iterator[str]:
    pristine, patched = receipt.lanes.get(LaneName.PRISTINE), receipt.lanes.get(LaneName.PATCHED)
    stale_reason = receipt.reason if receipt.verdict == Verdict.PATCH_STALE else ""
    if pristine is None and patched is None:
        if receipt.verdict not in WITHOUT_LANES:
            yield f"verdict: {receipt.verdict} without a lane"
        return
    judgement = pack_verdict.judge_lanes(pristine, patched, stale_reason, receipt.about)
    if judgement != pack_verdict.Judgement(receipt.verdict, receipt.reason, receipt.claims):
        text = f"{judgement.verdict} {judgement.reason} {' '.join(judgement.claims)}".rstrip()
        yield f"verdict, reason or claims: the lanes say {text}"
    if receipt.verdict != Verdict.ERROR and receipt.repeats.agreeing != receipt.repeats.of:
        yield f"repeats: {receipt.repeats.agreeing} of {receipt.repeats.of} runs agree, which is no {receipt.verdict}"
    if (patched is not None) != (receipt.fix is not None):
        yield "fix: a patched lane has one, and no other receipt has"
    if pristine and patched and pristine.tree == patched.tree:
        yield "lanes: both ran on one tree"
    unknown_claims = [claim for claim in receipt.claims if claim not in {*pack.definition.claims, BITWISE_IDENTICAL}]
    yield from (f"claims: the pack does not know {claim}" for claim in unknown_claims)


def _module_errors(receipt: Receipt, pack: Pack) -> Iterator[str]:
    """Say where a lane judged other modules than those under test, or the patched lane an unchanged file."""
    hashes: dict[tuple[str, str], str] = {}
    roots = ("$TREE", f"$TREE/{pack.definition.upstream.source_root}")  # a wheel has no source root
    for name, lane in receipt.lanes.items():
        for line in lane.upstream:
            is_tested = line.module.partition(".")[0] in pack.definition.upstream.modules
            if not is_tested or not any(map(line.lies_in, roots)):
                yield f"{name} lane: {line.module} ({line.file[:80]}) is no module under test of the tree"
            if hashes.setdefault((name, line.file), line.sha256) != line.sha256:
                yield f"{name} lane: {line.file} has two hashes"
    for file in _patched_files(receipt, pack) if len(receipt.lanes) == len(LaneName) else ():
        in_wheel = file.path.removeprefix(f"{pack.definition.upstream.source_root}/")  # a wheel has no source root
        before, after = (
            hashes.get((name, f"$TREE/{file.path}")) or hashes.get((name, f"$TREE/{in_wheel}")) for name in LaneName
        )
        if after is None or before == after or (before is None and file.before != patch_text.NO_BLOB):
            yield f"{file.path}: the lanes did not load two versions of it"


def _patched_files(receipt: Receipt, pack: Pack) -> list[PatchedFile]:
    """List the files that the patch of a receipt changes and the target has to load."""
    target = pack.definition.targets.get(receipt.target)
    path = pack.folder / receipt.fix.name if receipt.fix else pack.patch
    text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
    return [file for file in patch_text.parse(text) if target and file.path in target.loads]


def _host_errors(receipt: Receipt, pack: Pack) -> Iterator[str]:
    gpus = receipt.host.gpus
    if (receipt.evidence == Evidence.EXECUTED) != bool(gpus):
        yield f"host.gpus: {len(gpus)} with {receipt.evidence} evidence"
    for gpu in gpus:
        name = "sm_" + gpu.compute_capability.replace(".", "")
        if receipt.target not in (name, f"{name}a"):
            yield f"host.gpus: a GPU of compute capability {gpu.compute_capability[:20]} is no {receipt.target}"
    names = {gpu.name for gpu in gpus} or {"cpu"}
    devices = {lane.device for lane in receipt.lanes.values() if lane.device}
    if devices - names:
        yield f"device: a lane names {', '.join(sorted(devices))[:80]}, the host {', '.join(sorted(names))[:80]}"
    target = pack.definition.targets.get(receipt.target)
    if target is None or receipt.evidence not in target.evidence:
        yield f"target: the pack lists no {receipt.evidence} evidence for {receipt.target}"
    elif len(gpus) > target.gpus or receipt.ranks != target.ranks_on(len(gpus)):
        yield f"host.gpus, ranks: pack.toml states {target.gpus} and {target.ranks}"
    try:
        members = requirements.named_set(pack.definition, receipt.dependencies.name, python_tag(receipt.host.python))
        if members.versions != receipt.dependencies.packages:
            yield "dependencies: other versions than the pack pins"
    except HarnessError as error:
        yield f"dependencies: {error}"


def _name_errors(host: Host) -> Iterator[str]:
    """Say which names and versions of a host Markdown would interpret: no host has such."""
    texts = vars(host) | {f"gpus.{number}.name": gpu.name for number, gpu in enumerate(host.gpus)}
    for name, text in texts.items():
        if isinstance(text, str) and (not text.isprintable() or LIVE.search(text)):
            yield f"host.{name}: {text[:60]!r} is more than a name on one line"


def _pack_errors(receipt: Receipt, pack: Pack, folder: str) -> Iterator[str]:
    upstream, definition = pack.definition.upstream, pack.definition
    is_pinned = folder == "receipts"
    commit = {"head": definition.head and definition.head.commit, "ask": definition.ask and definition.ask.commit}
    expected = commit.get(folder) or (upstream.commit if upstream.is_commit else "")
    pairs = {
        "kind": (receipt.kind, definition.kind),
        "upstream.package": (receipt.upstream.package, upstream.package),
        "upstream.version": (receipt.upstream.version, upstream.pin if is_pinned else f"commit {expected}"),
        "upstream.origin": (receipt.upstream.origin, SourceKind.PINNED if is_pinned else SourceKind.GIT),
        "upstream.commit": (receipt.upstream.commit, expected),
    }
    yield from (f"{name}: {value}, not {expected}" for name, (value, expected) in pairs.items() if value != expected)
    ask = definition.ask if folder == "ask" else None
    if receipt.about != (ask.checks if ask else ()):
        yield "about: not the checks of pack.toml's [ask]"
    if receipt.fix and receipt.fix.name not in _patch_names(pack, folder):
        yield f"fix: {receipt.fix.name[:40]} is no patch of the pack for that tree"
    if is_pinned and receipt.verdict == Verdict.PATCH_STALE:
        yield f"verdict: {receipt.verdict} on the release that the patch is made for"
    command = receipt.command.replace(f"{OTHER_TREE} {upstream.package}=={upstream.version}", "", is_pinned)
    if not _is_run(command) or is_pinned == (OTHER_TREE in command):
        yield f"command: {receipt.command[:60]!r} does not make this receipt"
    if receipt.age > dt.datetime.now(dt.UTC) + dt.timedelta(days=1):
        yield f"started: {receipt.started} is in the future"
    pristine = receipt.lanes.get(LaneName.PRISTINE)
    if pristine and pristine.tree != receipt.upstream.sha256:
        yield "lanes: the unpatched lane ran on another tree than upstream.sha256"


def _is_run(command: str) -> bool:
    """Whether a command starts the runner, and nothing besides it."""
    words = shlex.shlex(command, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    try:
        program, verb, *others = words
    except ValueError:  # an open quote, or fewer words
        return False
    is_one = command.isprintable() and "`" not in command and "$(" not in command
    is_one = is_one and not any(set(word) <= set(words.punctuation_chars) for word in others)
    return is_one and program in {"runner.py", "reproducer-packs"} and verb in {"run", "sweep"}


def _patch_names(pack: Pack, folder: str) -> set[str]:
    """Name the patches that the receipts of a folder may have: any other may change fewer files under test."""
    upstream = pack.definition.upstream
    if folder == "ask":
        return {pack.ask_patch.name} if pack.ask_patch else set()
    if folder == "head":
        return {pack.patch.name, pack.own_head_patch.name}
    return {pack.patch_for(upstream.commit if upstream.is_commit else "").name}


def _log_errors(receipt: Receipt, log: bytes) -> Iterator[str]:
    if receipt.log.file != f"{receipt.name}.{receipt.log.sha256[:12]}.log":
        yield f"log: {receipt.log.file} is named otherwise"
    text = log.decode("utf-8", errors="replace")
    for name, lane in receipt.lanes.items():
        # Code under test may print such a line, too: the first one begins a lane, and the last one ends the other lane.
        _, mark, remainder = text.partition(f"== {name} lane ==\n")
        if name == LaneName.PRISTINE:
            remainder = remainder.rpartition(f"\n== {LaneName.PATCHED} lane ==\n")[0] or remainder
        lines = remainder.splitlines()
        sentinel = lane.script or str(lane.verdict)
        logged = iter([terminal.visible(line) for line in lines])  # lines of standard error stand between the others
        printed = [line for line in lane.printed.splitlines() if line.strip() and line != script.CUT]
        foreign_line = next((line for line in printed if line not in logged), None)
        is_cut = LEFT_OUT in remainder and len(remainder.encode()) > process.HEAD
        if foreign_line is not None and not is_cut:
            yield f"{name} lane: printed: its log has no line {foreign_line[:60]!r} there"
        if lane.printed and lane.printed.splitlines()[-1].partition(":")[0] != lane.script.partition(":")[0]:
            yield f"{name} lane: printed: its last line is no {lane.script[:60]}"
        if not mark or not any(line == sentinel or line.startswith(f"{sentinel} {{") for line in lines):
            yield f"its log does not say {sentinel[:60]} in the {name} lane"


def errors(pack: Pack, path: Path, receipt: Receipt, *, is_fresh: bool) -> list[str]:
    """Say what is wrong with a receipt in a pack's folder; a STALE receipt answers for its name and its log alone."""
    if (receipt.pack, f"{receipt.name}.json") != (pack.name, path.name):
        return [f"it speaks of {receipt.pack} {receipt.name}"]
    log = path.with_name(receipt.log.file)
    data = log.read_bytes() if log.exists() else None
    if data is None or files.sha256_bytes(data) != receipt.log.sha256:
        return [f"its log {receipt.log.file} is missing or has another hash"]
    if not is_fresh:
        return []
    problems = [*_pack_errors(receipt, pack, path.parent.name), *_log_errors(receipt, data)]
    problems += [*_verdict_errors(receipt, pack), *_module_errors(receipt, pack), *_host_errors(receipt, pack)]
    problems += _name_errors(receipt.host)
    problems += [f"{name} lane: {error}" for name, lane in receipt.lanes.items() for error in _lane_errors(lane)]
    return [*problems, *_contract_errors(receipt, pack)]
