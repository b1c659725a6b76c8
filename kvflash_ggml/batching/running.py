"""The answers that have a slot, and which of their steps are computed together."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from inspect import GEN_RUNNING, getgeneratorstate

from .answer import Answer
from .messages import Finished
from .model import Pending
from .queue import Job
from .slot import Slot


@dataclass(slots=True, eq=False)
class Running:
    """An answer in a slot. steps: `Answer.make`. pending: its next step; None where it has to be prepared first.

    stepped: when the newest step of its prompt was done, at its token `done`; None before the first one. let: tokens of
    other prompts that were read between its steps. cached: tokens that need not be read of prompts that wait meanwhile.
    """

    job: Job
    answer: Answer
    slot: Slot
    began: float
    steps: Generator[Pending | None, None, Finished]
    stepped: float | None = None
    done: int = 0
    let: int = 0
    cached: dict[Job, int] = field(default_factory=dict)
    pending: Pending | None = None

    @property
    def reads(self) -> bool:
        """Whether its prompt is being read in several steps: here, or further out."""
        return getgeneratorstate(self.steps) == GEN_RUNNING


def groups(ready: Sequence[tuple[Running, Pending]], limit: int) -> Iterator[list[tuple[Running, Pending]]]:
    """Yield the answers whose steps are computed together, of at most `limit` rows in all."""
    group: list[tuple[Running, Pending]] = []
    rows = 0
    for pair in ready:
        rows += pair[1].rows
        if group and rows > limit:
            yield group
            group, rows = [], pair[1].rows
        group.append(pair)
    if group:
        yield group
