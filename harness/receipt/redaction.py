"""Keep private text out of what is written: known places become names, and what still looks private is refused."""

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

from harness.core import HarnessError, errors

#: Host and user names that identify nobody.
GENERIC = frozenset(
    "localhost localdomain host root user runner ubuntu debian admin build nobody none test main work "  # noqa: SIM905
    "python torch triton cuda gpu h100 h200 sandbox container docker".split()
)
#: Folders that every system has: the name $PYTHON would mislead.
PUBLIC_PREFIXES = {"/", "/usr", "/usr/local"}
TEMPORARY = ("/tmp", "/var/tmp")  # noqa: S108 - to be replaced, not used
#: Variables of the shell that hold folders, though their names look like those of passwords.
SHELL_FOLDERS = {"PWD", "OLDPWD"}
SHORTEST_NAME = 3
SHORTEST_SECRET = 8
SECRET_NAMES = re.compile(
    r"TOKEN|SECRET|PASSWORD|PASSWD|PASSPHRASE|API_?KEY|(?:ACCESS|PRIVATE|ACCOUNT|LICENSE)_?KEY|CREDENTIAL|COOKIE"
    r"|(?:^|_)(?:PAT|AUTH|PWD|PASS|PW)$",
    re.IGNORECASE,
)
#: Variables that name a package index or a proxy, whose host may be private.
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
    """Return the spellings of a path or a secret: plain, in JSON, in a URL, as escaped bytes."""
    json_forms = {json.dumps(text)[1:-1], json.dumps(text, ensure_ascii=False)[1:-1]}
    slashes = {form.replace("/", "\\/") for form in json_forms}
    escapes = {repr(os.fsencode(text))[2:-1], ascii(text)[1:-1]}
    url_forms = {quote(text, safe, errors="surrogateescape") for safe in ("/", "")}
    return frozenset({text, *json_forms, *slashes, *escapes, *url_forms} - {""})


class PrivateTextError(HarnessError):
    """A text that was to be written looks private."""


@dataclass(frozen=True)
class Scrubber:
    """Replaces known places by names, and finds what still looks private."""

    places: Mapping[str, str]  # absolute path to name, such as ``/home/ada`` to ``$HOME``
    names: Mapping[str, str]  # private name to its label, such as ``the user's name``
    secrets: Mapping[str, str]  # secret value to the variable that holds it
    public: frozenset[str] = frozenset()  # version numbers: those of four parts look like an address

    def scrub(self, text: str) -> str:
        """Replace each known place in all its spellings, the longest spelling first."""
        names = {spelling: name for place, name in self.places.items() for spelling in spellings(place)}
        for spelling in sorted(names, key=len, reverse=True):
            if spelling in text:
                before = "" if spelling.startswith("\\") else r"(?<![\w.-])"
                name = names[spelling].replace("\\", r"\\")
                text = re.sub(rf"{before}{re.escape(spelling)}(?![\w-]|\.\w)", name, text)
        return text

    def findings(self, text: str) -> Iterator[str]:
        """Label what in a scrubbed text still looks private."""
        yield from (label for label, pattern in PATTERNS.items() if pattern.search(text))
        for match in (*IPV4.finditer(text), *IPV6.finditer(text)):
            if match[0] not in self.public and _is_private_address(match[0]):
                yield "an IP address"
        for name, label in self.names.items():
            if re.search(rf"(?<![\w.-]){re.escape(name)}(?![\w-])", text, re.IGNORECASE):
                yield label
        for value, variable in self.secrets.items():
            if any(spelling in text for spelling in spellings(value)):
                yield f"the value of {variable}"

    def shown(self, text: str) -> str:
        """Scrub a text for people; one that still looks private is withheld."""
        scrubbed = self.scrub(text)
        label = next(self.findings(scrubbed), "")
        return f"(withheld: it holds {label})" if label else scrubbed

    def require_clean(self, field: str, text: str) -> None:
        """Raise PrivateTextError where something private is left; it names `field`, and never the text."""
        for label in self.findings(text):
            raise PrivateTextError(
                f"refused to write: {field} holds {label}. Next: keep it out of what the script prints, then run again"
            )

    def document(self, value: Any, field: str = "receipt", transform: Callable[[str], str] = str) -> Any:  # noqa: ANN401 - any JSON
        """Return a record or a JSON document with each text scrubbed, passed through `transform`, and checked."""
        if isinstance(value, Enum):
            return value  # a word of the harness
        if isinstance(value, str):
            scrubbed = transform(self.scrub(value))
            self.require_clean(field, scrubbed)
            return scrubbed
        if is_dataclass(value) and not isinstance(value, type):
            items = [(member.name, getattr(value, member.name)) for member in fields(value)]
            return replace(value, **{name: self.document(item, f"{field}.{name}", transform) for name, item in items})
        if isinstance(value, dict):
            return {
                self.document(key, field, transform): self.document(item, f"{field}.{key}", transform)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return type(value)(self.document(item, f"{field}[{index}]", transform) for index, item in enumerate(value))
        return value


def _is_private_address(text: str) -> bool:
    try:
        address = ipaddress.ip_address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _service_urls() -> Iterator[tuple[str, SplitResult]]:
    """Yield the URLs of the user's indexes and proxies, after the names of their variables."""
    for name, value in os.environ.items():
        for url in value.split() if SERVICE_NAMES.search(name) else []:
            if "://" in url:
                yield name, urlsplit(url)


def _private_names() -> dict[str, str]:
    host = socket.gethostname()
    names = {host: "the host's name", host.partition(".")[0]: "the host's name"}
    hosts = {url.hostname for _, url in _service_urls() if url.hostname}
    private_hosts = (name for name in hosts if not PUBLIC_HOSTS.fullmatch(name))
    names |= dict.fromkeys(private_hosts, "the name of a private index or proxy")
    with contextlib.suppress(KeyError, OSError):
        names[getpass.getuser()] = "the user's name"
    return {name: label for name, label in names.items() if len(name) >= SHORTEST_NAME and name.lower() not in GENERIC}


def host_scrubber(places: Mapping[Path, str], public: Iterable[str] = ()) -> Scrubber:
    """Build the scrubber for this host: besides `places` it knows HOME, TMPDIR and the interpreter."""
    system_places = dict.fromkeys(map(Path, (*TEMPORARY, tempfile.gettempdir())), "$TMP") | {Path.home(): "$HOME"}
    prefixes = {sys.prefix, sys.base_prefix, sys.exec_prefix} - PUBLIC_PREFIXES
    interpreter = {Path(prefix): "$PYTHON" for prefix in prefixes}
    names: dict[str, str] = {}
    for path, name in {**system_places, **interpreter, **places}.items():
        names |= {str(path): name, str(path.resolve()): name}
    secrets = {
        value: name
        for name, value in os.environ.items()
        if SECRET_NAMES.search(name)
        and len(value) >= SHORTEST_SECRET
        and value not in names
        and not (name in SHELL_FOLDERS and value.startswith("/"))
    }
    for name, url in _service_urls():
        passwords = {url.password, unquote(url.password)} if url.password else set()
        secrets |= {password: f"{name} (its password)" for password in passwords if len(password) >= SHORTEST_SECRET}
    named_places = {place: name for place, name in names.items() if len(place) > 1}
    return Scrubber(named_places, _private_names(), secrets, frozenset(public))
