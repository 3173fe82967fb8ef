"""Copying a tree out of the runner's own environment: ``--upstream installed``."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness.core.errors import UnavailableError
from harness.upstream import checkout


def _editable_folder(distribution: Distribution) -> Path | None:
    text = distribution.read_text("direct_url.json")
    source = json.loads(text) if text else {}
    if not source.get("dir_info", {}).get("editable"):
        return None
    return Path(unquote(urlsplit(source["url"]).path))


def copy(package: str, destination: Path) -> str:
    """Copy the files that an installed distribution recorded; an editable one is copied from its checkout.

    Returns its version.
    """
    try:
        distribution = importlib.metadata.distribution(package)
    except importlib.metadata.PackageNotFoundError:
        raise UnavailableError(
            f"--upstream installed: {package} is not installed. Next: pip install {package}"
        ) from None
    checkout_folder = _editable_folder(distribution)
    if checkout_folder is not None:
        return f"{distribution.version}, editable {checkout.copy_path(checkout_folder, destination)}"
    for file in distribution.files or []:
        source = Path(str(distribution.locate_file(file)))
        if ".." not in file.parts and file.suffix != ".pyc" and source.is_file():
            target = destination / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
    return f"{distribution.version}, installed"
