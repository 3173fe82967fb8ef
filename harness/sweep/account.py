"""What a sweep has to tell besides the ends of lanes: what was not run, and which GPUs left the pool."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Sickness:
    """A GPU that left the pool: why, and after which lane."""

    place: str
    name: str
    reason: str
    task: str


@dataclass
class Account:
    """What came of the tasks besides the ends in the journal.

    Attributes:
        not_run: why a task was not run, by its key.
        failed: why a cell could not be laid out, by its name.
        sick: the GPUs that left the pool.
        ran: how many lanes ended now.
        resumed: how many had ended before.
        interrupted: by the user.

    """

    not_run: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    sick: list[Sickness] = field(default_factory=list)
    ran: int = 0
    resumed: int = 0
    interrupted: bool = False


@dataclass(frozen=True)
class Reporter:
    """Whom the engine tells: a line for each end, and each GPU that leaves the pool."""

    tell: Callable[[str], None]
    sick: Callable[[Sickness], None]
