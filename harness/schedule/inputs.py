"""What a command takes from its packs, copied before the first lane: what runs is what receipts state the hashes of.

A probe or a patch that is edited meanwhile, by hand or by a checkout, is another run's.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from harness.core.cache import Cache
from harness.pack.model import Pack


@contextmanager
def taken(cache: Cache, packs: Iterable[Pack]) -> Iterator[list[Pack]]:
    """Copy probe and patches of each pack into a folder of this command's; yield the packs that read them there."""
    with cache.scratch("inputs-") as folder:
        with cache.guard():
            found = [_taken(pack, folder / pack.name) for pack in packs]
        yield found


def _taken(pack: Pack, folder: Path) -> Pack:
    folder.mkdir()
    ordinary = pack.definition.script
    copied = {path.name: path for path in (pack.probe, pack.contract, *pack.folder.glob("*.patch"))}
    copied |= {name: pack.probe.parent / name for name in (ordinary.beside if ordinary else ())}
    for name, path in copied.items():
        if path.is_file():  # what is missing is told where it is needed
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, folder / name)
    return replace(pack, inputs=folder)
