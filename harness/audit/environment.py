"""What an environment holds, or a file asks for: packages and their exact versions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

from harness.core.errors import HarnessError

#: Bytes of a file: a lock of ten thousand packages has fewer.
LARGEST = 64 << 20


@dataclass(frozen=True)
class Named:
    """One package that an environment has.

    Attributes:
        name: normalized, as `liger-kernel`.
        version: exactly; empty where none is named.
        reason: why that version says nothing of a release: not pinned, a checkout, ...; empty where it does.
        marker: an environment marker, under which alone it counts; mostly empty.
        place: the file and line, or the file alone.

    """

    name: str
    version: str = ""
    reason: str = ""
    marker: str = ""
    place: str = ""


@dataclass(frozen=True)
class Environment:
    """What was read: in words what it is, its packages, and what of it could not be understood."""

    what: str
    packages: tuple[Named, ...]
    unread: tuple[str, ...] = ()


def named(name: str, version: str, *, reason: str = "", marker: str = "", place: str = "") -> Named:
    """Build one package; a text that is no version, as PEP 440 has them, becomes the reason."""
    try:
        Version(version or "0")
    except InvalidVersion:
        return Named(str(canonicalize_name(name)), "", reason or f"{version[:40]!r} is no version", marker, place)
    return Named(str(canonicalize_name(name)), version, reason, marker, place)


def read_text(path: Path, option: str) -> str:
    """Read a file that the user named.

    Raises:
        HarnessError: it is missing, too large, or no text.

    """
    try:
        if path.stat().st_size > LARGEST:
            raise HarnessError(
                f"{option} {path}: more than {LARGEST >> 20} MiB. Next: name a requirements or lock file"
            )
        return path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise HarnessError(f"{option} {path}: it cannot be read ({error.strerror}). Next: name a file") from None
    except UnicodeDecodeError:
        raise HarnessError(f"{option} {path}: not UTF-8 text. Next: name a requirements or lock file") from None
