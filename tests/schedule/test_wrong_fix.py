"""What a wrong fix's lane gets of the right one's JIT results, and that nothing of it stays."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from harness.core import seal
from harness.core.cache import Cache
from harness.core.words import Evidence
from harness.host import host
from harness.lane import lane
from harness.lane.environment import Share
from harness.lane.lane import Lane
from harness.pack.model import Pack
from harness.schedule import lane_runner
from harness.upstream.dependencies import DependencySet
from harness.upstream.tree import Tree
from testing import laid_out


def _tree(key: str) -> Tree:
    return replace(laid_out.nothing("1.0").pristine, key=key)


def _lane(tree: Tree) -> Lane:
    return Lane(
        pack=Pack(Path(), None),  # type: ignore[arg-type] - nobody asks for what it states
        tree=tree,
        dependency_set=DependencySet("default", ()),
        dependencies=laid_out.nothing("1.0").dependencies,
        target="cpu",
        evidence=Evidence.TRACED,
        must_load=(),
        recorded=(),
        timeout=1.0,
    )


def test_results_of_the_right_fix_are_lent_and_nothing_stays(tmp_path: Path) -> None:
    cache, here = Cache(tmp_path), host.detect()
    right, wrong = _tree("right"), _lane(_tree("wrong"))
    (tmp_path / "trees/wrong").mkdir(parents=True)
    (tmp_path / "trees/right").mkdir()
    source = cache.entry("jit", lane.kept_key(_lane(right), here))
    own = cache.entry("jit", lane.kept_key(wrong, here))
    for name in ("triton/k", "tilelang/k", "inductor/k", "cuda/k", "extensions/k", "other/k"):
        (source / name).mkdir(parents=True)
        (source / name / "kernel.bin").write_bytes(b"code")
    kernel, group = source / "triton/k/kernel.bin", source / "triton/k/__grp__kernel.json"
    group.write_text(json.dumps({"child_paths": {"kernel.bin": str(kernel)}}), encoding="utf-8")
    seal.keep(cache, "jit", source.name, source)
    with lane_runner.lent(cache, here, wrong, right):
        assert {path.name for path in own.iterdir()} == {"triton", "tilelang", "inductor", "cuda"}
        assert seal.kept(cache, "jit", own.name, own)
        assert (own / "triton/k/kernel.bin").stat().st_ino != kernel.stat().st_ino, "a link would break a seal"
        assert (own / "cuda/k/kernel.bin").stat().st_ino != (source / "cuda/k/kernel.bin").stat().st_ino
        named = json.loads((own / "triton/k" / group.name).read_text(encoding="utf-8"))["child_paths"]["kernel.bin"]
        assert named == str(own / "triton/k/kernel.bin")
        (own / "cuda/k/kernel.bin").write_bytes(b"other")
    assert not own.exists()
    assert not (tmp_path / "trees/wrong").exists()
    assert (tmp_path / "trees/right").exists()
    assert seal.kept(cache, "jit", source.name, source)
    assert (source / "cuda/k/kernel.bin").read_bytes() == b"code"
    assert str(source) in group.read_text(encoding="utf-8")


def test_without_a_right_tree_nothing_is_lent(tmp_path: Path) -> None:
    cache, here, wrong = Cache(tmp_path), host.detect(), _lane(_tree("wrong"))
    with lane_runner.lent(cache, here, wrong, None):
        assert not cache.entry("jit", lane.kept_key(wrong, here)).exists()


def test_results_that_somebody_touched_are_not_lent(tmp_path: Path) -> None:
    cache, here = Cache(tmp_path), host.detect()
    right, wrong = _tree("right"), _lane(_tree("wrong"))
    source = cache.entry("jit", lane.kept_key(_lane(right), here))
    (source / "triton").mkdir(parents=True)
    seal.keep(cache, "jit", source.name, source)
    (source / "triton/poison").write_bytes(b"code")
    with lane_runner.lent(cache, here, wrong, right):
        assert not cache.entry("jit", lane.kept_key(wrong, here)).exists()


def test_a_wrong_fix_waits_for_no_gpu_to_be_its_own() -> None:
    gate, shared = Path("/gate"), {"share": Share(visible="0"), "locks": (Path("/lock"),)}
    right = replace(_lane(_tree("right")), evidence=Evidence.EXECUTED, **shared)
    wrong = replace(right, is_wrong_fix=True)
    assert lane.share_of(right, gate) == Share(visible="0", gate=gate)
    assert lane.share_of(wrong, gate) == Share(visible="0")
    assert lane.share_of(replace(right, locks=()), gate).gate is None, "nobody else uses its GPU"
    assert lane.share_of(replace(wrong, evidence=Evidence.TRACED), gate) == Share(visible="")
