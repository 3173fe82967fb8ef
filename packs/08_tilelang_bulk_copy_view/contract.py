"""tilelang gives a pipelined tile a slot for each stage, also where it is written or read through a view.

Since 0.1.9 such a tile has one slot, and the barriers of all stages: tile i + 1 may land on tile i while a gemm reads
it. No error is raised. A view that is both written and read is refused, which is wrong here, too.

The kernels are lowered for sm_90a. The contract follows the producer's waits and the consumer's arrivals through the
CUDA source, with the phases of an mbarrier as PTX defines them. It counts tiles that can be overwritten before the gemm
that reads them has ended, and tiles that a gemm reads from elsewhere. The tolerance is 0. On a GPU, some kernels are
launched with more tiles. Inputs are -1, 0 and 1, so that every number is exact and equal to the one in float64.

Not judged: a kernel whose source has another form; targets other than sm_90a.
"""

import re
import typing

import pytest
import torch

from kit import current_target
from kit.cuda_source import index_value, lower, only_match

EVIDENCE_WITHOUT_GPU = {"sm_90a": "compiled"}
TILES, M, N = 4, 64, 64
LAUNCHES, LAUNCHED_TILES = 50, 64
REFUSAL = "rescale_num"


class Case(typing.NamedTuple):
    """One kernel: the shape of the view, what is written and what is read through it, and how it is pipelined."""

    shape: tuple = (64, 64)
    through: str = "written"  # or read, both, none
    stages: int = 2
    view: str = "view"  # or reshape
    swizzled: bool = True  # annotated as such
    dtype: str = "bfloat16"


WRONG = {
    "written-64x64": Case(),
    "written-64x64-float16": Case(dtype="float16"),
    "written-16x4x64": Case((16, 4, 64)),  # the form of mamba's MIMO kernels, in a pipeline
    "written-16x4x64-reshape": Case((16, 4, 64), view="reshape"),
    "written-16x4x64-three_stages": Case((16, 4, 64), stages=3),
    "written-16x4x64-not_annotated": Case((16, 4, 64), swizzled=False),
    "written-128x32": Case((128, 32)),
    "read-64x64": Case(through="read"),
    "read-64x64-not_annotated": Case(through="read", swizzled=False),
    "both-64x64": Case(through="both"),
}
RIGHT = {
    "no_view": Case(through="none"),
    "no_view-not_annotated": Case(through="none", swizzled=False),
    "no_view-three_stages": Case(through="none", stages=3),
    "written-64x64-one_stage": Case(stages=1),
    "read-64x64-one_stage": Case(through="read", stages=1),
}
CASES = RIGHT | WRONG
LAUNCHED = ("no_view", "written-64x64-one_stage", "written-64x64", "written-16x4x64", "read-64x64")


def each(names):
    """Return a mark that gives a test each of these cases."""
    marked = [pytest.param(x, marks=pytest.mark.defect if x in WRONG else pytest.mark.control) for x in names]
    return pytest.mark.parametrize("name", marked)


def kernel(tilelang, case, tiles=TILES):
    """Return the program: the sum over the tiles of tile @ tile.T."""
    T, shape, dtype = tilelang.language, case.shape, case.dtype
    viewed = getattr(T, case.view)

    @T.prim_func
    def main(A: T.Tensor((tiles, *shape), dtype), C: T.Tensor((M, M), "float32")):
        with T.Kernel(1, threads=128) as _:
            tile = T.alloc_shared((M, N), dtype)
            acc = T.alloc_fragment((M, M), "float32")
            if case.swizzled:
                T.annotate_layout({tile: tilelang.layout.make_swizzled_layout(tile)})
            T.clear(acc)
            for i in T.Pipelined(tiles, num_stages=case.stages):
                view = viewed(tile, list(shape))
                into = view if case.through in ("written", "both") else tile
                source = view if case.through in ("read", "both") else tile
                if len(shape) == 3:
                    T.copy(A[i, :, :, :], into)
                else:
                    T.copy(A[i, :, :], into)
                T.gemm(source, source, acc, transpose_B=True)
            T.copy(acc, C)

    return main


@pytest.fixture(scope="module")
def wrong(figure):
    """Return a list for the faults of kernels; their number becomes a figure when all kernels have been judged."""
    faults = []
    yield faults
    figure("kernels_wrong", len(faults), f"of {len(WRONG)}")


@each(CASES)
def test_each_stage_has_its_slot(name, wrong):
    import tilelang

    source, error, _ = lower(kernel(tilelang, CASES[name]), current_target().name)
    if error and REFUSAL not in error:
        pytest.skip(f"refused for another reason: {error}")
    if found := error or fault(source):
        wrong.append(found)
        pytest.fail(found)


@each(LAUNCHED)
def test_every_launch_is_exact(name, figure):
    if not current_target().executed:
        pytest.skip("on a GPU only")
    import tilelang

    case, generator = CASES[name], torch.Generator().manual_seed(8)
    target = tilelang.tvm.target.Target({"kind": "cuda", "arch": current_target().name})
    launch = tilelang.compile(kernel(tilelang, case, LAUNCHED_TILES), [1], target=target)
    tiles = torch.randint(-1, 2, (LAUNCHED_TILES, M, N), generator=generator).double()
    right = torch.einsum("tik,tjk->ij", tiles, tiles).float().cuda()
    given = tiles.reshape(LAUNCHED_TILES, *case.shape).to(getattr(torch, case.dtype)).cuda()
    launches = sum(not torch.equal(launch(given), right) for _ in range(LAUNCHES))
    figure(f"wrong_launches_{name.replace('-', '_')}", launches, f"of {LAUNCHES} launches")
    assert launches == 0, f"{launches} of {LAUNCHES} launches are wrong"


class Tile(typing.NamedTuple):
    """Where one tile is written and read, in elements, and how many gemms have surely ended when it is written."""

    written: int
    read: int
    ended: int


def fault(source):
    """Say what is wrong with a source; nothing where each gemm reads its own tile."""
    tiles = followed(source)
    if not tiles:
        return "it hangs: the producer waits for a gemm that waits for the producer"
    overwritten = {
        reader
        for number, tile in enumerate(tiles)
        for reader in range(tile.ended, number)
        if abs(tiles[reader].written - tile.written) < M * N
    }
    elsewhere = sum(tile.written != tile.read for tile in tiles)
    slots = len({tile.written for tile in tiles})
    found = f"of {TILES} tiles {len(overwritten)} can be overwritten, {elsewhere} are read elsewhere; {slots} slots"
    return found if overwritten or elsewhere else ""


def followed(source):
    """Return the tiles of a source; none if it hangs."""
    load = only_match(r"tl::tma_load\(\w+, \w+\[.+?\], \(&\(\w+\[(.+)\]\)\),", source)
    waits = list(re.finditer(r"mbarrier\[(.+)\]\.wait\((.+)\);", source[: load.start()]))
    gemm = only_match(r"initialize_wgmma_descriptor<[\d, ]+>\(desc_a, \(&\(\w+\[(.+)\]\)\)\);", source)
    offset = re.search(r"increase_descriptor_offset<int>\(desc_a, (.+)\);", source)
    released = only_match(r"mbarrier\[(.+)\]\.arrive\(\);", source, gemm.end())
    if not waits:
        raise NotImplementedError("the producer waits for nothing")
    loads = over_tiles(source, load.start(), load[1], waits[-1][1], waits[-1][2])
    gemms = over_tiles(source, gemm.start(), gemm[1], offset[1] if offset else "0", released[1])
    ended, tiles = 0, []
    for number, ((written, barrier, parity), (element, more, _)) in enumerate(zip(loads, gemms, strict=True)):
        # PTX: a wait for a parity ends when the phase of that parity has; before the first, that of parity 1 has
        while sum(arrived == barrier for *_, arrived in gemms[:ended]) % 2 == parity:
            ended += 1
            if ended > number:  # that gemm has no tile yet
                return []
        tiles.append(Tile(written, element + more // 2, ended))  # the descriptor is moved by bytes, of 16-bit elements
    return tiles


def over_tiles(source, at, *texts):
    """Evaluate indices for each tile, in the loop over the tiles that encloses a place in the source."""
    loops = re.findall(r"for \(int (\w+) = 0; \1 < (\d+); \+\+\1\) \{", source[:at])
    variable = next((name for name, count in reversed(loops) if int(count) == TILES), None)
    if variable is None:
        raise NotImplementedError("no loop over the tiles")
    return [[index_value(text, **{variable: tile}) for text in texts] for tile in range(TILES)]
