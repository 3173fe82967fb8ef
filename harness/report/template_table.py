"""The table of docs/upstream-fields.md, compared by a test.

``python -m harness.report.template_table`` prints it.
"""

from __future__ import annotations

from harness.report.template import HUMAN, RECEIPT, REPORT, Section
from harness.report.upstream_templates import EVERY

#: What the table says of each fact; `facts.py` has a function for each.
SOURCES = {
    "system": "receipt: `host.system`",
    "python": "receipt: `host.python`",
    "torch": "receipt: `host.torch`",
    "triton": "receipt: `host.triton`",
    "cuda": "receipt: `host.cuda` (what torch was built for)",
    "cudnn": "receipt: `host.cudnn` (the package that torch's build installs)",
    "nccl": "receipt: `host.nccl` (the package that torch's build installs)",
    "hip": "receipt: `host.torch` names a ROCm build, or not available",
    "xpu": "receipt: `host.torch` names an XPU build, or not available",
    "gpu": "receipt: `host.gpu`, `host.compute_capability`",
    "driver": "receipt: `host.driver`",
    "judged": "receipt: `upstream.version`, `upstream.sha256`",
    "version": "receipt: `upstream.version`, or the dependency set's version of it",
    "dependency": "receipt: `dependencies.packages`",
    "dependencies": "receipt: `dependencies.packages`",
    "install": "receipt: versions and hashes, as the commands that gave them; pack.toml: the file",
    "location": "**yours**: bare metal, container or cloud is not recorded",
    "previous_commit": "`data/history.<target>.json`, which `runner.py versions --save` writes: the last right one",
    "new_commit": "the same file: the first wrong one",
    "previous_result": "the same file: verdict and leading figure",
    "new_result": "the same file: verdict and leading figure",
}


def markdown() -> str:
    """Write the table of fields and sources."""
    lines = [
        "# Where each field of an upstream's template comes from",
        "",
        "`runner.py report PACK --to issue` fills them; what is *yours* stays open, and is listed at the end of its",
        "output. This file is written by `python -m harness.report.template_table > docs/upstream-fields.md`.",
    ]
    for one in EVERY:
        lines += ["", f"## {one.name}", "", f"Templates: {one.templates}.", ""]
        lines += ["| part | required | field | from |", "| --- | --- | --- | --- |"]
        for prefix, sections in (("", one.sections), ("regression: ", one.regression)):
            for section in sections:
                lines += [
                    f"| {prefix}{section.label} | {'yes' if section.required else 'no'} | {row} |"
                    for row in _rows(section)
                ]
        lines += [f"| pull request | yes | {duty} | **yours** |" for duty in one.duties]
    return "\n".join(lines) + "\n"


def _rows(section: Section) -> list[str]:
    if section.source == RECEIPT:
        return [f"{label} | {SOURCES[name.partition(':')[0]]}" for label, name in section.facts]
    if section.source == HUMAN:
        return [f"{tick} | **yours**" for tick in section.ticks]
    return [f"the text | section of that name in {REPORT}"]


if __name__ == "__main__":
    print(markdown(), end="")  # noqa: T201 - printing is what it is called for
