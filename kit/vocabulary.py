"""What contracts of vocabulary-parallel cross entropies share: tests that run on ranks, and what is watched there."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

JOBS: dict[tuple[str, str], Callable[..., Any]] = {}


def on_ranks(job: Callable[..., None]) -> Callable[..., None]:
    """Make a test of a function that asserts on every rank.

    Its first argument is what the setup of the fixture `world`, a kit.ranks.RankGroup, returned there; the others are
    parameters of the test, or `case`. Where that object has a method `perform`, this calls the function.
    """

    def test(world: Any, **given: object) -> None:  # noqa: ANN401 - a RankGroup
        world.run(perform, job.__module__, job.__name__, given)

    JOBS[job.__module__, job.__name__] = job
    test.__name__, test.__qualname__, test.__module__, test.__doc__ = (
        job.__name__,
        job.__name__,
        job.__module__,
        job.__doc__,
    )
    own = list(inspect.signature(job).parameters.values())[1:]
    world = inspect.Parameter("world", inspect.Parameter.KEYWORD_ONLY)
    test.__signature__ = inspect.Signature([*own, world])  # type: ignore[attr-defined]
    return test


def perform(context: Any, module: str, name: str, given: dict[str, Any]) -> object:  # noqa: ANN401
    """Run one job of `on_ranks` on this rank."""
    job = JOBS[module, name]
    return context.perform(job, **given) if hasattr(context, "perform") else job(context, **given)


def tensors_in(given: object) -> list[torch.Tensor]:
    """Return the tensors anywhere in what an operator is given or returns."""
    return [each for each in tree_leaves(given) if isinstance(each, torch.Tensor)]


@contextlib.contextmanager
def watching(note: Callable[[Any, tuple[Any, ...], object], None]) -> Iterator[None]:
    """Call note(operator, arguments, result) after each operator, those of backward among them."""

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operator: Any, _types: object, args: Any = (), kwargs: Any = None) -> Any:  # noqa: ANN401
            found = operator(*args, **(kwargs or {}))
            note(operator, args, found)
            return found

    with Mode():
        yield


class Storages:
    """The memory that operators made, which may be freed since."""

    def __init__(self) -> None:
        self.made: dict[int, tuple[StorageWeakRef, int, torch.Size]] = {}

    def note(self, _operator: object, _arguments: object, found: object) -> None:
        """Take down the result of an operator; see `watching`."""
        for each in tensors_in(found):
            storage = each.untyped_storage()
            reference = StorageWeakRef(storage)
            self.made[reference.cdata] = (reference, storage.nbytes(), each.shape)

    def living(self, *expected: torch.Tensor) -> list[tuple[int, list[int]]]:
        """Return bytes and shape of each that lives on and is none of these tensors'."""
        own = {StorageWeakRef(each.untyped_storage()).cdata for each in expected}
        alive = [each for key, each in self.made.items() if key not in own and not each[0].expired()]
        return [(size, list(shape)) for _, size, shape in alive]
