"""Which lanes a cell takes, and what their keys depend on."""

from __future__ import annotations

import itertools
from dataclasses import replace

from harness.core.words import Evidence
from harness.host.host import Gpu, Host
from harness.lane.cell import Cell
from harness.pack.model import Target
from harness.schedule import task
from harness.upstream.source import Source, SourceKind
from testing.laid_out import HOST


def test_a_key_changes_with_everything_that_could_change_what_a_lane_shows(toy: Cell) -> None:
    def keys(one: Cell, where: Host = HOST) -> tuple[str, ...]:
        return tuple(one_task.key for one_task in task.tasks(one, where, 1))

    definition = toy.pack.definition
    wanted = definition.targets["cpu"]
    other = replace(toy.pack, definition=replace(definition, targets={"cpu": replace(wanted, loads=())}))
    base = keys(toy)
    assert keys(toy) == base
    variants = [
        keys(replace(toy, source=Source(SourceKind.RELEASE, "1.0"))),
        keys(replace(toy, pack=other)),
        keys(toy, replace(HOST, torch="2.14.0")),
        keys(toy, replace(HOST, triton="3.7.0")),
        keys(toy, replace(HOST, python="3.12.0")),
        keys(toy, replace(HOST, cuda="13.1")),
    ]
    toy.pack.script.write_text(toy.pack.script.read_text() + "# changed\n")
    variants.append(keys(toy))
    every = list(itertools.chain(base, *variants))
    assert len(set(every)) == len(every)
    before = keys(toy)
    toy.pack.patch.write_text("another patch")
    after = keys(toy)
    assert (after[0], after[1] != before[1]) == (before[0], True), "a patch changes its own lane alone"
    gpu = replace(toy, target="cpu", evidence=Evidence.EXECUTED)
    drivers = {keys(gpu, replace(HOST, driver=driver)) for driver in ("1", "2")}
    assert len(drivers) == 2


def test_a_lane_takes_the_gpus_that_pack_toml_states_or_as_many_as_there_are(toy: Cell) -> None:
    target = Target((Evidence.EXECUTED,), (), gpus=2, ranks=2)
    pack = replace(toy.pack, definition=replace(toy.pack.definition, targets={"sm_90a": target}))
    cell = replace(toy, pack=pack, target="sm_90a", evidence=Evidence.EXECUTED)
    planned = [task.tasks(cell, replace(HOST, gpus=(Gpu("Toy", "9.0"),) * count), 1)[0] for count in range(4)]
    assert [one.gpus for one in planned] == [2, 1, 2, 2], "a host without GPUs plans for a Slurm node"
    assert planned[1].key != planned[2].key, "these judge other checks"
    assert planned[2].key == planned[3].key
    assert task.tasks(replace(cell, evidence=Evidence.COMPILED), HOST, 1)[0].gpus == 0
