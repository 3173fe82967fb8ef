"""Nothing private gets out: known places become names, and what still looks private is refused."""

from __future__ import annotations

import contextlib
import functools
import getpass
import ipaddress
import json
import os
import re
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any
from urllib.parse import SplitResult, quote, unquote, urlsplit

from harness.core import errors
from harness.core.errors import HarnessError

#: Host and user names that tell nothing about anybody.
GENERIC = frozenset(
    "localhost localdomain host root user runner ubuntu debian admin build nobody none test main work "  # noqa: SIM905
    "python torch triton cuda gpu h100 h200 sandbox container docker".split()
)
#: Folders that every system has; naming them $PYTHON would only mislead.
PUBLIC_PREFIXES = {"/", "/usr", "/usr/local"}
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - to be replaced, not used
#: Variables of the shell whose names look like those of passwords and that hold folders.
SHELL_FOLDERS = {"PWD", "OLDPWD"}
SHORTEST_NAME = 3
SHORTEST_SECRET = 8
SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|(?:ACCESS|PRIVATE|ACCOUNT|LICENSE)_?KEY|CREDENTIAL|COOKIE"
    r"|(?:^|_)(?:PAT|AUTH|PWD|PASS|PW)$",
    re.IGNORECASE,
)
#: Variables that name a package index or a proxy: its host belongs to whoever runs this.
SERVICE_NAMES = re.compile(r"INDEX_URL$|FIND_LINKS$|_PROXY$", re.IGNORECASE)
PUBLIC_HOSTS = re.compile(r"(?:.*\.)?(?:pypi\.org|pythonhosted\.org|pytorch\.org|nvidia\.com|localhost|127\.0\.0\.1)")
PATTERNS = {
    "a token": re.compile(
        r"\b(?:gh[pousr]_\w{20,}|github_pat_\w{20,}|glpat-[\w-]{16,}|hf_\w{20,}|xox[abpr]-[\w-]{10,}|(?:AKIA|ASIA|ABIA|ACCA)[0-9A-Z]{16}"
        r"|sk-[\w-]{20,}|(?:sk|rk)_(?:live|test)_\w{16,}|pypi-\w{16,}|nvapi-[\w-]{20,}|npm_\w{20,}|AIza[\w-]{30,}"
        r"|eyJ[\w-]{10,}\.[\w-]{10,}\.[\w-]{10,})|-----BEGIN [A-Z ]*PRIVATE KEY-----"
    ),
    "an authorization header": re.compile(
        r"\b(?:Basic|(?i:bearer))\s+[\w+/=.-]{16,}|(?i:\bbasic)\s+(?=[\w+/=.-]*\d)[\w+/=.-]{16,}"
    ),
    "a password in a URL": re.compile(r"\w:\\*/\\*/[^\s/@]*:[^\s/@]+@|\w:\\*/\\*/[\w.~%-]{16,}@"),
    "a secret in a URL": errors.PARAMETER,
    "a MAC address": re.compile(r"(?<![0-9A-Za-z:-])(?:[0-9a-f]{2}[:-]){5}[0-9a-f]{2}(?![0-9A-Za-z:-])", re.IGNORECASE),
    "a GPU UUID": re.compile(r"\b(?:GPU|MIG)-[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}", re.IGNORECASE),
    "an e-mail address": re.compile(r"\b[\w.+-]+@[\w-]+(?:\.[\w-]+)*\.[a-z]{2,}\b(?!\()", re.IGNORECASE),
    "a home folder": re.compile(r"(?:/home|/Users|[A-Za-z]:\\+Users)[/\\]+[\w.-]+|(?<![\w.$}-])/root/[\w.-]+"),
    "a temporary path": re.compile(r"/var/folders/\w+|(?<![\w.$}-])/(?:var/)?tmp/[\w.-]+|\\AppData\\Local\\Temp"),
    "a host's name": re.compile(
        r"\bip(?:-\d{1,3}){4}\b|\b[\w-]*\d[\w-]*(?:\.[\w-]+)*\.(?:internal|intranet|corp|lan)\b"
    ),
}
#: Neither a longer version number nor what a requirement pins (``==13.0.2.14``).
IPV4 = re.compile(r"(?<![\w.-])(?<![=<>~!]=)\d{1,3}(?:\.\d{1,3}){3}(?!\w|\.\w)")
IPV6 = re.compile(
    r"(?<![\w:.])(?:[0-9a-f]{1,4}:){3,7}(?::?[0-9a-f]{1,4}){1,4}(?![\w:])"
    r"|\b(?:2[0-9a-f]{3}|f[cde][0-9a-f]{2})(?::[0-9a-f]{0,4}){2,7}(?![\w:])",
    re.IGNORECASE,
)


@functools.lru_cache(maxsize=1024)  # the same few places and secrets, for every text of every receipt
def spellings(text: str) -> frozenset[str]:
    """Return the ways in which a path or a secret is written: plainly, in JSON, in a URL, as bytes are shown."""
    escaped = json.dumps(text)[1:-1]
    plain = json.dumps(text, ensure_ascii=False)[1:-1]
    shown = {repr(os.fsencode(text))[2:-1], ascii(text)[1:-1]}
    quoted = {quote(text), quote(text, safe="")}
    return frozenset(
        {text, escaped, plain, escaped.replace("/", "\\/"), plain.replace("/", "\\/"), *shown, *quoted} - {""}
    )


class PrivateTextError(HarnessError):
    """Something private would have been written."""


@dataclass(frozen=True)
class Scrubber:
    """Replaces known places by names; knows what must not be left."""

    places: Mapping[str, str]  # absolute path to name, such as ``/home/ada`` to ``$HOME``
    names: Mapping[str, str]  # host and user names, and what each is
    secrets: Mapping[str, str]  # values of variables whose names say that they are secret, and the variable
    public: frozenset[str] = frozenset()  # version numbers: one of four parts looks like an address

    def scrub(self, text: str) -> str:
        """Replace every known place, however it is written, the longest path first."""
        written = {way: name for place, name in self.places.items() for way in spellings(place)}
        for way in sorted(written, key=len, reverse=True):
            if way in text:
                before = "" if way.startswith("\\") else r"(?<![\w.-])"
                name = written[way].replace("\\", r"\\")
                text = re.sub(rf"{before}{re.escape(way)}(?![\w-]|\.\w)", name, text)
        return text

    def findings(self, text: str) -> Iterator[str]:
        """Say what in a scrubbed text still looks private."""
        yield from (what for what, pattern in PATTERNS.items() if pattern.search(text))
        for match in (*IPV4.finditer(text), *IPV6.finditer(text)):
            if match[0] not in self.public and _is_private_address(match[0]):
                yield "an IP address"
        for name, what in self.names.items():
            if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text, re.IGNORECASE):
                yield what
        for value, variable in self.secrets.items():
            if any(way in text for way in spellings(value)):
                yield f"the value of {variable}"

    def require_clean(self, field: str, text: str) -> None:
        """Raise PrivateTextError that names `field` (and never the text) where something private is left."""
        for what in self.findings(text):
            raise PrivateTextError(
                f"refused to write: {field} holds {what}. Next: keep it out of what the probe prints, then run again"
            )

    def document(self, value: Any, field: str = "receipt", also: Callable[[str], str] = str) -> Any:  # noqa: ANN401 - any JSON
        """Return a record or a JSON document with every text scrubbed, passed through `also`, and found clean."""
        if isinstance(value, Enum):
            return value  # one of our own words
        if isinstance(value, str):
            clean = also(self.scrub(value))
            self.require_clean(field, clean)
            return clean
        if is_dataclass(value) and not isinstance(value, type):
            items = [(one.name, getattr(value, one.name)) for one in fields(value)]
            return replace(value, **{name: self.document(item, f"{field}.{name}", also) for name, item in items})
        if isinstance(value, dict):
            return {
                self.document(key, field, also): self.document(item, f"{field}.{key}", also)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(self.document(item, f"{field}[{index}]", also) for index, item in enumerate(value))
        return value


def _is_private_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _services() -> Iterator[tuple[str, SplitResult]]:
    """Yield the URLs of the user's indexes and proxies, behind the variables that name them."""
    for name, value in os.environ.items():
        for url in value.split() if SERVICE_NAMES.search(name) else []:
            if "://" in url:
                yield name, urlsplit(url)


def _names() -> dict[str, str]:
    host = socket.gethostname()
    found = {host: "the host's name", host.partition(".")[0]: "the host's name"}
    services = {url.hostname for _, url in _services() if url.hostname}
    private = (one for one in services if not PUBLIC_HOSTS.fullmatch(one))
    found |= dict.fromkeys(private, "the name of a private index or proxy")
    with contextlib.suppress(KeyError, OSError):
        found[getpass.getuser()] = "the user's name"
    return {name: what for name, what in found.items() if len(name) >= SHORTEST_NAME and name.lower() not in GENERIC}


def of_host(places: Mapping[Path, str], public: Iterable[str] = ()) -> Scrubber:
    """Build the scrubber for this host; it knows HOME, TMPDIR and the interpreter besides a run's own `places`."""
    general = dict.fromkeys(map(Path, (*TEMPORARY, tempfile.gettempdir())), "$TMP") | {Path.home(): "$HOME"}
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix} - PUBLIC_PREFIXES
    interpreter = {Path(prefix): "$PYTHON" for prefix in prefixes}
    named: dict[str, str] = {}
    for path, name in {**general, **interpreter, **places}.items():
        named |= {str(path): name, str(path.resolve()): name}
    secrets = {
        value: name
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name)
        and len(value) >= SHORTEST_SECRET
        and value not in named
        and not (name in SHELL_FOLDERS and value.startswith("/"))
    }
    for name, url in _services():
        ways = {url.password, unquote(url.password)} if url.password else set()
        secrets |= {way: f"{name} (its password)" for way in ways if len(way) >= SHORTEST_SECRET}
    kept = {place: name for place, name in named.items() if len(place) > 1}
    return Scrubber(kept, _names(), secrets, frozenset(public))
