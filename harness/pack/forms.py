"""The types of pack.toml's fields; each states the form of a text, or the range of a number."""

import re
from typing import Annotated

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from harness.core.structure import Form
from harness.core.words import LaneVerdict, is_target

PACKAGE = r"[A-Za-z0-9](?:[A-Za-z0-9._-]*[A-Za-z0-9])?"
#: Not a folder above, an option, or a test in a file.
RELATIVE = r"(?![/-])(?!(?:.*/)?\.\.(?:/|$))(?!.*::)[^\x00-\x1f\x7f\\]+"
COMMIT = r"[0-9a-f]{40}"
#: No word of the verdicts.
CLAIM = rf"(?!(?:{'|'.join(LaneVerdict)})$)[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)*"
VARIABLE = re.compile(
    # Not a variable that a lane sets itself, or that decides which code runs.
    r"(?!(?:PATH|HOME|TMPDIR|(?:PYTHON|PYTEST|LD_|CUDA_VISIBLE|XDG_|REPRODUCER_).*)$)[A-Z][A-Z0-9_]*"
)


def _text(description: str, pattern: str) -> Form:
    return Form(description, re.compile(pattern).fullmatch)


def _number(least: float, most: float) -> Form:
    return Form(f"between {least} and {most}", lambda value: least <= value <= most)


#: Of a list or a table.
SOME = Form("a list or table with at least one entry", len)
Line = Annotated[str, _text("a text on one line", r"[^\x00-\x1f\x7f]*")]
Text = Annotated[str, _text("a text on one line, and no empty one", r"(?=.*\S)[^\x00-\x1f\x7f]+")]
Sentence = Annotated[str, _text("one sentence on one line, with its full stop", r"(?=.*\w)[^\x00-\x1f\x7f]+\.")]
Path = Annotated[str, _text("a relative path", RELATIVE)]
FileName = Annotated[str, _text("the name of a file", r"[\w+-][\w.+-]*")]
Archive = Annotated[str, _text("the name of a .tar.gz, .zip or .whl", r"[\w+-][\w.+-]*\.(?:tar\.gz|zip|whl)")]
OtherPatch = Annotated[str, _text("a patch beside fix.patch, such as ask.patch", r"(?!fix\.patch$)\w[\w.-]*\.patch")]
Package = Annotated[str, _text("the name of a package", PACKAGE)]
Module = Annotated[str, Form("an import name", str.isidentifier)]
Release = Annotated[str, Form("a version", Version)]
Range = Annotated[str, Form("a version range such as '>=2.6,<3'", lambda text: (SpecifierSet(text), True))]
Commit = Annotated[str, _text("40 lower-case hexadecimal digits", COMMIT)]
Sha256 = Annotated[str, _text("64 lower-case hexadecimal digits", r"[0-9a-f]{64}")]
Repository = Annotated[str, _text("an http(s) URL", r"https?://[^\s\x00-\x1f\x7f]+")]
Origin = Annotated[
    str, _text("git+https://HOST/OWNER/REPO@COMMIT with 40 digits", rf"git\+https://[\w.-]+(?:/[\w.-]+)+@{COMMIT}")
]
ThreadUrl = Annotated[
    str,
    _text(
        "https://github.com/OWNER/REPO/pull/N (issues, discussions)",
        r"https://github\.com/[\w.-]+/[\w.-]+/(?:issues|pull|discussions)/\d+(?:#[\w-]+)?",
    ),
]
Variable = Annotated[str, Form("a variable that a pack may set", VARIABLE.fullmatch)]
Claim = Annotated[str, _text("a claim such as MEMORY_SAVE_VERIFIED", CLAIM)]
TargetName = Annotated[str, Form("a target such as cpu, sm_80, sm_90a (with the suffix from sm_90 on)", is_target)]
SetName = Annotated[str, _text("a name of lower-case letters, digits and -", r"[a-z0-9]+(?:-[a-z0-9]+)*")]
Modules = Annotated[tuple[Module, ...], SOME]
Paths = Annotated[tuple[Path, ...], SOME]
Texts = Annotated[tuple[Text, ...], SOME]
Number = Annotated[int, _number(0, 1 << 20)]
Count = Annotated[int, _number(1, 1024)]
#: More than a month for a lane is a mistake.
Seconds = Annotated[float, _number(0.001, 31 * 24 * 3600.0)]
GiB = Annotated[float, _number(0, 1 << 20)]
