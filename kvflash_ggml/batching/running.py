"""An answer that has a slot, and how far it is."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .answer import Answer
from .queue import Job
from .schedule import Turn, Want
from .slot import Slot

if TYPE_CHECKING:
    from ..runtime.task import Pending

TOKEN, SHARES = Want(), Want(shares=True)


@dataclass(slots=True, eq=False)
class Running:
    """An answer in a slot. began: when it took a slot, less the time between its turns.
    pending: its next step; None where it has to be prepared first.

    done: tokens of its prompt at the newest step of several. let: see `Want`. cached: tokens that need not be read of
    prompts that wait while this one is read.
    """

    job: Job
    answer: Answer
    slot: Slot
    began: float
    done: int = 0
    let: int = 0
    cached: dict[Job, int] = field(default_factory=dict)
    pending: Pending | None = None

    @property
    def reads(self) -> bool:
        """Whether its prompt is being read in steps of its own."""
        return self.answer.reads

    @property
    def want(self) -> Want:
        """What it wants of the next step."""
        if not self.reads:
            return TOKEN if self.answer.generated else SHARES
        done, total = self.answer.read_yet
        priority = self.job.request.priority
        return Want(reads=True, left=total - done, done=done, let=self.let, priority=priority)

    @property
    def turn(self) -> Turn:
        """What it has had of its slot."""
        return Turn(held=self.answer.held, swap_s=self.answer.swap_s, priority=self.job.request.priority)
