"""The package index that the user's own pip is configured for; no file of it is executed.

Only this module imports the index client: a machine that runs from a cache filled elsewhere does not need it.
No message holds a URL, since an index may be private.
"""

from __future__ import annotations

import ast
import functools
import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from packaging.version import InvalidVersion, Version

from harness.core import HarnessError, UnavailableError, files

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pypi_simple import DistributionPackage, PyPISimple

DEFAULT_INDEX = "https://pypi.org/simple/"
#: The sections of pip's configuration, the weakest first.
SETTING_SECTIONS = ("global", "install", "download", ":env:")
#: Held while pip is asked, once for all threads. Two of them must not parse literals at once, up to Python 3.12.
LOCK = threading.Lock()
#: Releases that a message names.
NEWEST_SHOWN = 8
#: Raised by the index client if an answer does not have the form of the standard.
MISSHAPEN = (ValueError, TypeError, KeyError, AttributeError, RecursionError, UserWarning)


@contextmanager
def _client(endpoint: str, package: str) -> Iterator[PyPISimple]:
    """Open the client of one index; a request for a package that this index lacks ends the block quietly."""
    try:
        import requests  # noqa: PLC0415 - only a download needs the client
        from pypi_simple import NoSuchProjectError, PyPISimple, UnsupportedRepoVersionError  # noqa: PLC0415 - likewise
        from requests.adapters import HTTPAdapter  # noqa: PLC0415 - likewise
        from urllib3.util.retry import Retry  # noqa: PLC0415 - likewise
    except ImportError:
        raise HarnessError(
            "the index client is not installed. Next: pip install 'reproducer-packs[fetch]', or run from a cache "
            "that another machine filled (runner.py fetch --cache DIR there, --cache DIR --offline here)"
        ) from None
    session, settings = requests.Session(), _settings()
    setting = settings.get("retries", "")
    total = int(setting) if setting.isdecimal() and len(setting) < 4 else 3  # noqa: PLR2004 - a sane one, else pip's own
    retries = Retry(total=total, backoff_factor=0.3, status_forcelist=(502, 503, 504))
    for scheme in ("https://", "http://"):
        session.mount(scheme, HTTPAdapter(max_retries=retries))
    trusted = urlsplit(endpoint).hostname in settings.get("trusted-host", "").split()
    session.verify = False if trusted else settings.get("cert", True)
    session.cert = settings.get("client-cert")
    if "proxy" in settings:
        session.proxies = {"http": settings["proxy"], "https": settings["proxy"]}
    try:
        with PyPISimple(endpoint, session=session) as client:
            yield client
    except NoSuchProjectError:
        pass
    except (requests.RequestException, *MISSHAPEN, UnsupportedRepoVersionError) as error:
        raise UnavailableError(
            f"{package}: the package index cannot be read ({type(error).__name__}). "
            "Next: check the network and pip's settings (pip config list), or use --cache DIR --offline"
        ) from None


@dataclass(frozen=True)
class Offer:
    """One file that an index offers."""

    endpoint: str
    file: DistributionPackage

    @property
    def sha256(self) -> str:
        """The sha256 that the index states; empty if it states none."""
        return self.file.digests.get("sha256", "")

    @property
    def version(self) -> Version | None:
        """The version of its release; None if the file's name is malformed."""
        try:
            return Version(self.file.version or "")
        except InvalidVersion:
            return None


def endpoints() -> list[str]:
    """Return the URLs of the indexes that pip would ask, the main one first."""
    settings = _settings()
    extra = settings.get("extra-index-url", "").split()
    return [url for url in (settings.get("index-url", DEFAULT_INDEX), *extra) if url.startswith("http")]


def offers(package: str) -> list[Offer]:
    """List every file of a package; UnavailableError: no index knows the package."""
    listed = [offer for endpoint in endpoints() for offer in _page(endpoint, package)]
    if not listed:
        raise UnavailableError(f"{package}: no such package on the package index. Next: check upstream.package")
    return listed


@functools.lru_cache(maxsize=8)  # a page is read for the list of files, and at once again for the download of one
def _page(endpoint: str, package: str) -> list[Offer]:
    with _client(endpoint, package) as client:
        return [Offer(endpoint, file) for file in client.get_project_page(package).packages]
    return []


def download(package: str, file: str | None, sha256: str, folder: Path) -> None:
    """Download the file with a sha256 into `folder`; its name `file` counts if the index states no sha256.

    UnavailableError: no index has it, or what came has another sha256.
    """
    listed = offers(package)
    for offer in listed:
        name = offer.file.filename
        if offer.sha256 == sha256 or (not offer.sha256 and name == file):
            break
    else:
        versions = sorted({offer.version for offer in listed if offer.version is not None}, reverse=True)
        raise UnavailableError(
            f"{file or package}: the index has no such file with the sha256 {sha256} that pack.toml pins. "
            f"It has {', '.join(map(str, versions[:NEWEST_SHOWN])) or 'no release'}. "
            "Next: compare both with the release's own page"
        )
    if not files.is_bare_name(name):
        raise UnavailableError(f"the package index names a file {name!r}: no bare file name")
    with _client(offer.endpoint, name) as client:
        client.download_package(offer.file, folder / name, verify=False)
    actual = files.sha256_file(folder / name)
    if actual != sha256:
        raise UnavailableError(
            f"{name}: wrong sha256 after {(folder / name).stat().st_size} bytes: {actual}, not {sha256}; not kept. "
            "Next: run the command again; if it stays so, the file on the index was replaced"
        )


def _settings() -> dict[str, str]:
    with LOCK:  # several dependency sets are laid out at once
        return _configured(tuple(sorted(item for item in os.environ.items() if item[0].startswith("PIP_"))))


@functools.cache
def _configured(_variables: tuple[tuple[str, str], ...]) -> dict[str, str]:
    """Ask pip for its effective configuration, once while its variables stay: each wheel of a set needs it."""
    command = [sys.executable, "-m", "pip", "config", "list"]
    answer = subprocess.run(command, capture_output=True, text=True, check=False).stdout
    sections: dict[str, dict[str, str]] = {}
    for line in answer.splitlines():
        name, separator, value = line.partition("=")
        section, _, key = name.rpartition(".")
        if separator:
            sections.setdefault(section, {})[key.replace("_", "-")] = str(ast.literal_eval(value))
    return {key: value for section in SETTING_SECTIONS for key, value in sections.get(section, {}).items()}
