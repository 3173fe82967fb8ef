"""The facts that an upstream's template asks for, taken from a receipt."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass

from packaging.utils import canonicalize_name

from harness.core.words import LaneVerdict
from harness.pack import model
from harness.pack.model import Pack
from harness.receipt.receipt import Receipt
from harness.report import upstream_templates
from harness.report.template import Section, Upstream
from harness.versions import timeline
from harness.versions.timeline import Entry

NOT_RECORDED = "not recorded by the runner that made this receipt"
NO_GPU = "none used"
#: Packages besides the one judged that a short report still names, each with its version.
MOST_NAMED = 4


@dataclass(frozen=True)
class Change:
    """Where the bug came in, as `runner.py versions --save` found it: a right row and the wrong one after it."""

    previous: Entry
    new: Entry


def history_of(pack: Pack, target: str) -> list[Entry]:
    """Return what `runner.py versions --save` kept for a target; nothing where it kept nothing."""
    path = pack.folder / "data" / f"history.{target}.json"
    if not path.exists():
        return []
    document = json.loads(path.read_text(encoding="utf-8"))
    return [Entry(**row | {"verdict": LaneVerdict(row["verdict"])}) for row in document["rows"]]


def change(pack: Pack, target: str) -> Change | None:
    """Return the regression that the pack's data/ records for a target; None where nothing before it was right."""
    rows = history_of(pack, target)
    found = [one for one in timeline.periods(rows) if one.before is not None]
    return Change(rows[found[-1].before or 0], rows[found[-1].first]) if found else None


def sections_of(upstream: Upstream, pack: Pack, target: str) -> tuple[Section, ...]:
    """Return the parts of the form to fill: that for regressions where there is one and this is one."""
    return upstream.regression if upstream.regression and change(pack, target) else upstream.sections


@dataclass(frozen=True)
class Facts:
    """Fills facts by name for one receipt of one pack; `whole`: with every package, however many there are."""

    pack: Pack
    receipt: Receipt
    whole: bool = False

    def value(self, fact: str) -> str:
        """Return the text of one fact; where the receipt lacks it, say so."""
        name, _, argument = fact.partition(":")
        if name in ("dependency", "version"):
            return self._package(argument)
        simple: dict[str, Callable[[], str]] = {
            "gpu": self._gpu,
            "judged": self._judged,
            "dependencies": self._dependencies,
            "install": self._install,
            "cuda": lambda: self._of_cuda(self.receipt.host.cuda),
            "cudnn": lambda: self._of_cuda(self.receipt.host.cudnn),
            "nccl": lambda: self._of_cuda(self.receipt.host.nccl),
            "hip": lambda: "Not available" if "rocm" not in self.receipt.host.torch else self.receipt.host.torch,
            "xpu": lambda: "XPU Not Available" if "xpu" not in self.receipt.host.torch else self.receipt.host.torch,
            "driver": lambda: self.receipt.host.driver or self._without_gpu(),
            "location": lambda: "_____ (yours to state: bare metal, container or cloud)",
        }
        if name in simple:
            return simple[name]()
        if name.startswith(("previous_", "new_")):
            return self._regression(name)
        return str(getattr(self.receipt.host, name)) or NOT_RECORDED

    def _without_gpu(self) -> str:
        return (
            NOT_RECORDED if self.receipt.host.gpu else f"{NO_GPU} ({self.receipt.evidence} for {self.receipt.target})"
        )

    def _of_cuda(self, version: str) -> str:
        if version:
            return version
        return (
            NOT_RECORDED if self.receipt.host.cuda else f"none: PyTorch {self.receipt.host.torch} is not built for CUDA"
        )

    def _gpu(self) -> str:
        host = self.receipt.host
        return f"{host.gpu} (compute capability {host.compute_capability})" if host.gpu else self._without_gpu()

    def _judged(self) -> str:
        upstream = self.receipt.upstream
        return f"{upstream.package} {upstream.version} (sha256 {upstream.sha256[:12]})"

    def _dependencies(self) -> str:
        found = self.receipt.dependencies.packages
        cut = len(found) > MOST_NAMED and not self.whole
        named = [f"{name} {version}" for name, version in found.items() if not cut or upstream_templates.has(name)]
        rest = ["the rest as in pack.toml" if named else "as in pack.toml"] if cut else []
        return ", ".join([*named, *rest]) or "none"

    def _package(self, package: str) -> str:
        upstream = self.receipt.upstream
        if canonicalize_name(upstream.package) == package:
            return upstream.version
        return self.receipt.dependencies.packages.get(package, "not part of the run")

    def _install(self) -> str:
        host, upstream = self.receipt.host, self.pack.definition.upstream
        pins = {"torch": host.torch.partition("+")[0], "triton": host.triton, **self.receipt.dependencies.packages}
        wanted = " ".join(f"{name}=={version}" for name, version in pins.items() if version)
        if self.receipt.upstream.origin != "pinned":
            return f"`python -m pip install {wanted}`; {upstream.package} is a copy of {self.receipt.upstream.version}"
        return (
            f"`python -m pip install {wanted}`; {upstream.package} {self.receipt.upstream.version} itself is not "
            f"installed: {_laid_out(upstream)}, its "
            f"{upstream.source_root or 'top'} folder on PYTHONPATH"
        )

    def _regression(self, name: str) -> str:
        found = change(self.pack, self.receipt.target)
        if found is None:
            return "none known: no earlier release was judged right"
        row = found.previous if name.startswith("previous_") else found.new
        return row.label if name.endswith("_commit") else f"{row.verdict} {row.figure}".strip()

    def listed(self, section: Section) -> str:
        """Write one part as a Markdown list."""
        return "\n".join(f"- {label}: {self.value(fact)}" for label, fact in section.facts)


def _laid_out(upstream: model.Upstream) -> str:
    """Say where the tree that a pack pins comes from."""
    if upstream.is_commit:
        return f"{upstream.repository} checked out at it"
    return f"{upstream.file} (sha256 {upstream.sha256}) unpacked"


def _asked(upstream: Upstream, pack: Pack, one: Receipt) -> dict[str, str]:
    return {label: fact for section in sections_of(upstream, pack, one.target) for label, fact in section.facts}


def short(upstream: Upstream, pack: Pack, one: Receipt) -> str:
    """Write what an upstream asks of a machine, as one paragraph: what ``{{versions:...}}`` stands for."""
    facts = Facts(pack, one)
    return "; ".join(f"{label}: {facts.value(fact)}" for label, fact in _asked(upstream, pack, one).items()) + "."


def every(upstream: Upstream, pack: Pack, one: Receipt) -> str:
    """Write the same as one Markdown list, with every package of the run."""
    facts = Facts(pack, one, whole=True)
    return "\n".join(f"- {label}: {facts.value(fact)}" for label, fact in _asked(upstream, pack, one).items())
