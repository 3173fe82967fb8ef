"""The command lines of a report that lay out the tree that a pack pins, and patch it."""

from __future__ import annotations

from harness.pack.model import Upstream


def laid_out(upstream: Upstream) -> list[str]:
    """Write the command lines that lay a tree out as `checkout`: a clone, or the release's file without a commit."""
    file = upstream.file
    root = "" if upstream.is_wheel and not upstream.commit else upstream.source_root
    path = f'export PYTHONPATH="{f"$PWD/checkout/{root}".rstrip("/")}"'
    if upstream.commit:
        mark = f"  # unchecked: nobody compared it with {upstream.version}" if upstream.commit_unchecked else ""
        clone = f"git clone {upstream.repository} checkout"
        return [f"{clone} && git -C checkout checkout --quiet {upstream.commit[:12]}{mark}", path]
    name = f"{upstream.package} {upstream.version}"
    fetch = f"curl -sSLO {upstream.url}" if upstream.url else f"# with {file} of {name} from the package index here:"
    unpack = f"python -m zipfile -e {file} checkout"
    if file.endswith(".tar.gz"):
        unpack = f"mkdir checkout && tar xzf {file} -C checkout --strip-components=1"
    elif file.endswith(".zip"):
        unpack = f"python -m zipfile -e {file} . && mv {file.removesuffix('.zip')} checkout"
    return [fetch, f"echo '{upstream.sha256}  {file}' | sha256sum -c && {unpack}", path]


def applied(upstream: Upstream) -> str:
    """Write the command that patches `checkout`: what no clone is, git must not take for a part of this repository."""
    if upstream.commit:
        return "git -C checkout apply"
    folders = upstream.source_root.split("/") if upstream.is_wheel and upstream.source_root else []
    strip = f" -p{1 + len(folders)}" if folders else ""
    return f'GIT_CEILING_DIRECTORIES="$PWD" git -C checkout apply{strip}'
