"""Copying a tree out of the runner's own environment: ``--upstream installed``."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path
from urllib.parse import unquote, urlsplit

from harness.core.errors import UnavailableError
from harness.upstream import checkout


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
    source = json.loads(distribution.read_text("direct_url.json") or "{}")
    if source.get("dir_info", {}).get("editable"):
        folder = Path(unquote(urlsplit(source["url"]).path))
        return f"{distribution.version}, editable {checkout.copy_path(folder, destination)}"
    for file in distribution.files or []:
        path, target = Path(str(distribution.locate_file(file))), destination / file
        if ".." not in file.parts and file.suffix != ".pyc" and path.is_file():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
    return f"{distribution.version}, installed"
