"""The metadata of an unpacked release, from its own PKG-INFO or METADATA; nothing is executed."""

import contextlib
import re
from dataclasses import dataclass
from pathlib import Path

from packaging.markers import UndefinedEnvironmentName
from packaging.metadata import RawMetadata, parse_email
from packaging.requirements import InvalidRequirement, Requirement

from harness.core.errors import UnavailableError

FORGES = re.compile(r"https?://(?:www\.)?(?P<place>(?:github|gitlab)\.com/[\w.-]+/[\w.-]+?)(?:\.git)?(?:[/#?].*)?")
#: Labels of a project's links, the likeliest to be its repository first.
LABELS = ("source", "repository", "code", "github", "homepage", "home")
#: Licences that upstreams of GPU libraries state in words or as a classifier.
LICENSES = {"apache": "Apache-2.0", "mit": "MIT", "bsd 2": "BSD-2-Clause", "bsd 3": "BSD-3-Clause"}


@dataclass(frozen=True)
class Metadata:
    """The statements of a release about itself; a text is empty if the release does not state it."""

    license: str  # the SPDX name, or the release's own expression
    repository: str  # its URL on GitHub or GitLab
    requires_python: str  # a version range
    requires: tuple[Requirement, ...]  # its dependencies, with extras and markers


def read(folder: Path) -> Metadata:
    """Read the metadata of an unpacked sdist or wheel; UnavailableError: there is none."""
    path = next(filter(Path.is_file, (folder / "PKG-INFO", *folder.glob("*.dist-info/METADATA"))), None)
    if path is None:
        raise UnavailableError(
            f"{folder.name}: neither PKG-INFO nor METADATA in the release. Next: write pack.toml by hand"
        )
    raw, _ = parse_email(path.read_bytes())
    requires = []
    for line in raw.get("requires_dist", []):
        with contextlib.suppress(InvalidRequirement, UndefinedEnvironmentName):  # an obsolete form
            requires.append(Requirement(line))
    return Metadata(_license(raw), _repository(raw), raw.get("requires_python", ""), tuple(requires))


def _license(raw: RawMetadata) -> str:
    expression = raw.get("license_expression", "").strip()
    if expression:
        return expression
    classifiers = [line for line in raw.get("classifiers", []) if line.startswith("License ::")]
    for text in (raw.get("license", ""), *(line.rpartition("::")[2] for line in classifiers)):
        for word, name in LICENSES.items():
            if re.search(rf"\b{word}", text.lower().replace("-", " ")):
                return name
    return ""


def _repository(raw: RawMetadata) -> str:
    links = raw.get("project_urls", {})
    ranked = sorted(links, key=lambda label: next((n for n, word in enumerate(LABELS) if word in label.lower()), 99))
    for url in (*(links[label] for label in ranked), raw.get("home_page", "")):
        match = FORGES.fullmatch(url.strip())
        if match:
            return f"https://{match['place']}"
    return ""
