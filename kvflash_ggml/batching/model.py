"""What a scheduler asks of a model: one text at hand, and others that can take its place."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from ..arrays import Floats, Int32s
from ..logs import Progress
from ..policy.qk import Reason
from ..store.swapped import SwappedText
from ..trace.events import Change
from .messages import Logprob, Request

if TYPE_CHECKING:
    from ..runtime.task import Pending, Task

MAX_RECALLED = 256
"""Chunks of one answer whose coming is told; the newest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Residency:
    """number: grows with each change. recalled: chunks that came back for the answer at hand, and why if it is known.

    scores: of the newest look, log shares of attention.
    """

    number: int = 0
    length: int = 0
    resident: tuple[int, ...] = ()
    recalled: dict[int, Reason | None] = field(default_factory=dict)
    scores: Floats | None = None
    evicted_mass: float | None = None
    generating: bool = False


class ResidencyObserver:
    """A `trace.Observer`. reasons: why chunks are at the top of a look's scores."""

    def __init__(self, reasons: Callable[[Floats], Sequence[Reason]]) -> None:
        self._reasons = reasons
        self._known: dict[int, Reason] = {}
        self.now = Residency()

    def begin(self) -> None:
        """Begin another answer: what came back for the last one is no news."""
        self._known = {}
        self._set(recalled={})

    def changed(self, change: Change) -> None:
        """Tell the change with what was known before. See `Observer`."""
        if not change.length:  # the text may be another from here on
            self._known, self.now = {}, Residency(number=self.now.number)
        came = dict(self.now.recalled)
        if change.scores is not None:
            self._known.update({reason.chunk: reason for reason in self._reasons(change.scores)})
        for chunk in change.recalled:
            came.pop(chunk, None)
            came[chunk] = self._known.get(chunk)
        while len(came) > MAX_RECALLED:
            del came[next(iter(came))]
        self._set(
            length=change.length,
            resident=tuple(change.resident),
            recalled=came,
            scores=self.now.scores if change.scores is None else change.scores,
            evicted_mass=self.now.evicted_mass if change.evicted_mass is None else change.evicted_mass,
            generating=change.generating,
        )

    def _set(self, **changes: Any) -> None:
        self.now = replace(self.now, number=self.now.number + 1, **changes)


@dataclass(frozen=True, slots=True)
class Paused:
    """An answer that is put aside. drawn: its tokens, the last of which has not been read. sampler: the model's."""

    drawn: tuple[int, ...]
    sampler: Any


class ServedText(Protocol):
    """One text of a model, and others that can take its place. A model can have several texts at hand: `beside`.

    All calls are made on one thread. One task of a text is under way at a time.

    These never change: n_ctx, most tokens of a text. step_rows, prompt_rows: rows of the steps that `compute` takes
    together, at most, of answers and of prompts. readings, answers: what tokens of a prompt, and generated tokens, can
    be made to see. stateful: a text can be gone on from only where its state was kept.
    """

    n_ctx: int
    step_rows: int
    prompt_rows: int
    readings: tuple[str, ...]
    answers: tuple[str, ...]
    stateful: bool

    def limit_prompt_steps(self, rows: int | None) -> None:
        """Let the next steps of a prompt have so many tokens at most; None for as many as fit.

        A text that must not depend on other texts keeps the size of its steps.
        """
        ...

    @property
    def beside(self) -> Sequence[ServedText]:
        """Further texts of the same model, each to be used like this one. They are closed with it. Always the same."""
        ...

    def compute(self, steps: Sequence[Pending]) -> None:
        """Compute steps of different texts together. What goes wrong with one is raised when its answer goes on."""
        ...

    def deal(self, answered: Sequence[tuple[ServedText, int]]) -> None:
        """Share the memory out to those that are answered; each can come to so many tokens. No step may be pending.

        Where shares are elastic the memory of all texts is dealt anew. Drafters that serve one text at a time draft for
        the one that is answered alone, and for nobody while there are several.
        """
        ...

    @property
    def fingerprint(self) -> str:
        """What must be equal for a text to go on in another process, as 32 hexadecimal digits."""
        ...

    @property
    def made(self) -> str:
        """Devices and build. Where they are equal too, a text goes on bitwise, else up to rounding."""
        ...

    @property
    def tokens(self) -> Int32s:
        """The text at hand."""
        ...

    def known(self, tokens: Sequence[int]) -> Int32s:
        """Return tokens as an array. ConfigError for one that the model does not have, TypeError for no number."""
        ...

    def usable(self, tokens: Int32s) -> int:
        """Return how much of a prompt need not be read if it goes on from the text at hand."""
        ...

    def preview(self, request: Request, cached: int) -> Int32s | None:
        """Return the part of a prompt that a preview reads; None unless it is less than half of what must be read.

        cached: tokens that need not be read, unless a prefix cache has more.
        """
        ...

    def begin(
        self,
        request: Request,
        *,
        branch: int | None,
        progress: Progress,
        paused: Paused | None = None,
    ) -> Task:
        """Return a request on the text at hand: its prompt is read, and tokens are drawn until the caller has enough.

        Each step is yielded before it is computed. It is computed when the caller goes on, unless `compute` has done
        it. None: other requests can begin, and share the next step.

        branch: where in the prompt to keep the state, because other texts leave it there. progress: called as (done,
        total) after each step of the prompt. paused: an answer that is gone on with; its tokens are not yielded again.
        """
        ...

    def ended(self) -> None:
        """Forget the newest task, whose steps are closed."""
        ...

    def pause(self, drawn: Sequence[int]) -> Paused:
        """Return what a task has yielded so far, to go on with later. Before its steps are closed."""
        ...

    def piece(self, token: int) -> bytes:
        """Return the bytes of a token in an answer."""
        ...

    def ends(self, token: int) -> bool:
        """Tell whether an answer ends with this token."""
        ...

    def logprob(self, token: int, top: int) -> Logprob:
        """Return the log probability of a token that was just drawn."""
        ...

    def prompt_logprobs(self) -> tuple[Logprob, ...]:
        """Return those of the prompt, once the first token of a request with `prompt_logprobs` was drawn.

        ConfigError where tokens of the prompt did not see all before them, and the request named no `reading`.
        """
        ...

    def checkpoint(self) -> None:
        """Keep the state of the text at hand as it is now, to go back to."""
        ...

    def swap_out(self) -> SwappedText:
        """Return the text at hand as a value. It stays at hand."""
        ...

    def swap_in(self, swapped: SwappedText) -> None:
        """Put a parked text in place of the one at hand. It is not released."""
        ...

    def reset(self) -> None:
        """Forget the text at hand."""
        ...

    def unpin(self) -> None:
        """Keep nothing on the device but what the configuration says."""
        ...

    def pin(self, lo: int, hi: int) -> None:
        """Keep tokens [lo, hi) of the text at hand on the device."""
        ...

    def write(self, swapped: SwappedText, path: Path, *, sync: bool) -> None:
        """Write a parked text to a file. sync: wait until it is on the disk. SnapshotError."""
        ...

    def read(self, path: Path) -> SwappedText:
        """Open what `write` has written. SnapshotError."""
        ...

    def when_full(self, give_way: Callable[[], bool]) -> None:
        """Call this, from any thread, where no memory is left for parked texts: it lets one go, or is False."""
        ...

    def explain(self, wanted: bool) -> None:
        """Tell in `residency` why chunks came, while somebody looks on. From any thread."""
        ...

    def residency(self) -> Residency:
        """Tell what of the text at hand is on the device. From any thread."""
        ...

    def counters(self) -> Mapping[str, Any]:
        """Return the pool as it is: plain numbers, for reports and metrics. From any thread."""
        ...

    def close(self) -> None: ...
