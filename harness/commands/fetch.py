"""``runner.py fetch``: fill a cache for a machine without network."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import click

from harness.commands import options
from harness.commands.options import Shared
from harness.core import Cache, Exit, HarnessError, terminal
from harness.core.progress import Progress
from harness.host.host import python_tag
from harness.pack import Pack, Upstream, requirements
from harness.upstream import download, tree
from harness.upstream.source import parse_source

HERE = f"{sys.version_info.major}.{sys.version_info.minor}"


def _fetch(pack: Pack, cache: Cache, tag: str) -> None:
    upstream = pack.definition.upstream
    tree.materialize(cache, upstream, parse_source(None, pack.definition))
    for name in pack.definition.dependencies:
        members = requirements.named_set(pack.definition, name, tag).members
        for package, wheel in members.items():  # a lane's host lays them out
            download.wheel(cache, package, wheel.version, wheel.hashes, tag)
    for environment in pack.definition.environments.values():
        for package, sha256 in environment.files.items():
            download.fetch(cache, package, None, sha256)


def _fetch_newest(cache: Cache, upstream: Upstream) -> None:
    release = download.newest_release(cache, upstream.package, wheels_only=upstream.is_wheel)
    download.fetch(cache, upstream.package, release.file, release.sha256)


def _steps(pack: Pack, cache: Cache, tag: str, *, latest: bool) -> Iterator[tuple[str, Callable[[], object]]]:
    """Yield what is to be fetched for a pack, after its name for people."""
    definition, upstream = pack.definition, pack.definition.upstream
    yield pack.name, partial(_fetch, pack, cache, tag)
    for section in (definition.upstream_tests, definition.ask):
        if section is not None and section.origin:
            other = partial(tree.materialize, cache, upstream, parse_source(section.origin, definition))
            yield f"{pack.name}, its tree at {section.origin}", other
    if latest:
        yield f"the newest release of {upstream.package}", partial(_fetch_newest, cache, upstream)
    if latest and not upstream.is_compiled:
        yield f"the head of {upstream.repository}", partial(download.newest_head, cache, upstream.repository)


@click.command("fetch")
@options.packs_argument
@click.option("--python", default=HERE, show_default=True, metavar="X.Y", help="The Python of that machine.")
@click.option("--latest", is_flag=True, help="Also newest releases and default branches, for sweep --latest --head.")
@options.takes("packs", "cache_root", "mirrors")
def command(shared: Shared, names: tuple[str, ...], python: str, latest: bool) -> int:
    """Fill a cache for a machine without network.

    It fetches the pinned trees and all dependency sets of the packs, the trees of [ask] and [upstream_tests], and what
    their environments are built from. An offline sweep judges what was newest on the day of --latest, and says of which
    day it is. Nothing is executed or built.

    \b
    Here:
      runner.py fetch --cache DIR
      python -m pip wheel --no-deps --wheel-dir DIR/wheels .
      python -m pip download --only-binary=:all: --python-version X.Y \\
        --find-links DIR/wheels --dest DIR/wheels reproducer-packs
    There, with torch and triton installed:
      python -m pip install --no-index --find-links DIR/wheels reproducer-packs
      runner.py run --cache DIR --offline
    """
    if re.fullmatch(r"\d+\.\d+", python) is None:
        raise HarnessError(f"--python {python!r}: a version such as 3.12. Next: runner.py fetch --help")
    packs, errors = options.load_packs(shared.packs, names)
    cache, tag = replace(shared, offline=False).cache(), python_tag(python)  # whatever REPRODUCER_PACKS_OFFLINE says
    steps = dict(step for pack in packs for step in _steps(pack, cache, tag, latest=latest))
    failed: dict[str, HarnessError] = {}
    with Progress(sys.stderr) as progress, cache.guard():
        for name, step in steps.items():
            progress.tell(f"fetching {name}")
            try:
                step()
            except HarnessError as error:
                text = str(error) if str(error).startswith(name) else f"{name}: {error}"
                failed[name] = HarnessError(text, status=error.status)
    errors += failed.values()
    options.print_errors(errors)
    filled = sum(pack.name not in failed for pack in packs)
    next_step = ". Next, there: runner.py run --cache DIR --offline" if filled else ""
    terminal.echo(f"filled {cache.root} for {filled} of {len(packs)} pack(s){next_step}")
    return int(max((error.status for error in errors), default=Exit.AS_EXPECTED))
