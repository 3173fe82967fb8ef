"""Rendering REPORT.md: its placeholders are filled from receipts and raw data, never typed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from harness import receipt, staleness
from harness.errors import HarnessError
from harness.pack import Pack
from harness.receipt import Receipt
from harness.summary import number
from harness.words import Evidence, Kind, LaneName

PLACEHOLDER = re.compile(r"\{\{(?P<form>[a-z]+):(?P<rest>[^{}]+)\}\}")
LEFT_OVER = re.compile(r"\{\{|\}\}|\b(?:TODO|FIXME|TBD)\b")
#: The sections that an upstream's own template asks for.
SECTIONS = {
    "liger-kernel": ("Describe the bug", "Reproduce", "Versions"),
    "megatron-core": ("Describe the bug", "Steps/Code to reproduce bug", "Expected behavior", "Additional context"),
}


class MissingError(LookupError):
    """A placeholder names something that no receipt or data file holds."""


def environment(one: Receipt) -> str:
    """Write where a receipt was made, as a Markdown list."""
    host, upstream = one.host, one.upstream
    facts = [
        ("GPU", f"{host.gpu} (compute capability {host.compute_capability})" if host.gpu else ""),
        ("Driver", host.driver),
        ("Python", host.python),
        ("PyTorch", host.torch + (f" (CUDA {host.cuda})" if host.cuda else "")),
        ("Triton", host.triton),
        (upstream.package, f"{upstream.version} (sha256 {upstream.sha256[:12]})"),
        *one.companions.packages.items(),
    ]
    return "\n".join(f"- {name}: {value}" for name, value in facts if value)


def _receipts_by_target(pack: Pack, receipts: list[Receipt]) -> dict[str, Receipt]:
    best = receipt.strongest(receipts)
    for path in sorted((pack.receipts / "head").glob("*.json")):
        one = receipt.load(path)
        best[f"head:{one.target}"] = one
    return best


class Renderer:
    """Fills the placeholders of one pack's report."""

    def __init__(self, pack: Pack, receipts: list[Receipt]) -> None:
        """Take the pack's receipts, and what its receipts/head and data/ hold."""
        self._pack = pack
        self._receipts = _receipts_by_target(pack, receipts)

    def fill(self, text: str) -> str:
        """Fill every placeholder, or raise MissingError that names the first one that cannot be."""
        return PLACEHOLDER.sub(lambda match: self.value(match["form"], match["rest"]), text)

    def value(self, form: str, rest: str) -> str:
        """Return what one placeholder stands for."""
        if form in ("data", "table"):
            return self._data(form, rest)
        prefix, place = ("head:", rest.removeprefix("head:")) if rest.startswith("head:") else ("", rest)
        target, _, name = place.partition(":")
        found = self._receipts.get(prefix + target)
        if found is None:
            raise MissingError(f"{{{{{form}:{rest}}}}}: no receipt for {prefix}{target}")
        if form == "verdict":
            return self._verdict(found)
        if form == "versions":
            return environment(found)
        if form in ("figure", "check"):
            return self._measured(form, found, name)
        raise MissingError(f"{{{{{form}:{rest}}}}}: no placeholder of that form")

    def _verdict(self, found: Receipt) -> str:
        repeats = f", {found.repeats.agreeing} of {found.repeats.of} runs" if found.repeats.of > 1 else ""
        device = found.host.gpu or ("CPU" if found.evidence != Evidence.COMPILED else f"compiled for {found.target}")
        stale = "; STALE: " + ", ".join(staleness.reasons(self._pack, found))
        text = f"{found.verdict} ({found.kind}; {found.evidence}, {device}{repeats})"
        return text + (f"{stale}" if staleness.reasons(self._pack, found) else "")

    @staticmethod
    def _measured(form: str, found: Receipt, name: str) -> str:
        name, _, lane = name.partition(":")
        record = found.lanes.get(lane or LaneName.PRISTINE)
        lines = (record.figures if form == "figure" else record.checks) if record else ()
        line = next((line for line in lines if line.name == name), None)
        if line is None:
            raise MissingError(f"{{{{{form}:{found.target}:{name}}}}}: no such {form} in the {lane or 'pristine'} lane")
        value = getattr(line, "value", None) if form == "figure" else getattr(line, "measured", None)
        unit = f" {line.unit}" if line.unit not in ("", "1") else ""
        return f"{number(value)}{unit}"

    def _data(self, form: str, rest: str) -> str:
        name, _, keys = rest.partition(":")
        path = self._pack.folder / "data" / name
        if not path.is_file() or path.parent.resolve() != (self._pack.folder / "data").resolve():
            raise MissingError(f"{{{{{form}:{rest}}}}}: no file data/{name}")
        text = path.read_text(encoding="utf-8")
        if form == "table":
            return text.strip()
        value = json.loads(text)
        for key in keys.split("."):
            try:
                value = value[int(key)] if isinstance(value, list) else value[key]
            except (KeyError, IndexError, ValueError, TypeError):
                raise MissingError(f"{{{{{form}:{rest}}}}}: no {key} in data/{name}") from None
        return number(value)


def errors(pack: Pack, receipts: list[Receipt]) -> list[str]:
    """Say what keeps a report from being whole."""
    text = pack.report.read_text(encoding="utf-8")
    found = list(_unfilled(pack, receipts, text))
    left = PLACEHOLDER.sub("", text)
    found += [f"{match[0]!r} is left in it" for match in LEFT_OVER.finditer(left)]
    headings = [line.lstrip("# ") for line in text.splitlines() if line.startswith("#")]
    for section in SECTIONS.get(pack.definition.upstream.package, ()):
        if not any(section.lower() in heading.lower() for heading in headings):
            found.append(f"its upstream's template asks for a section {section!r}")
    first = next((line for line in text.splitlines() if line.strip() and not line.startswith("#")), "")
    if pack.definition.kind == Kind.ROBUSTNESS and not first.startswith("Not a bug:"):
        found.append("the report of a robustness pack opens with 'Not a bug:'")
    return found


def _unfilled(pack: Pack, receipts: list[Receipt], text: str) -> Iterator[str]:
    try:
        renderer = Renderer(pack, receipts)
    except HarnessError as error:
        yield str(error)
        return
    for match in PLACEHOLDER.finditer(text):
        try:
            renderer.value(match["form"], match["rest"])
        except MissingError as error:
            yield str(error)
