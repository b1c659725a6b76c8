"""Drafters that go token by token: MTP heads, EAGLE3, and small models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from ..arrays import Floats, Int32s
from ..config import SPEC_DEFAULT_WINDOW
from ..drafter.model import BOUND
from ..errors import ConversionError
from ..gguf import heads, reader, verify
from ..native import contexts
from ..sequence.prefill import LEFT_OVER, QUESTION_TOKENS
from ..state.session import SavedDraft
from .base import Features, Target
from .context import DraftContext, DraftModel, state_width
from .draft import Draft, chain
from .find import wants
from .model_drafter import ModelDrafter

RECENT = QUESTION_TOKENS + LEFT_OVER + 1
"""Rows that are kept for a text that is cut, as happens where the end of a prompt is read again: the token after a cut
needs the row of the last token that stays.
"""

_OUTPUTS = 32  # most tokens that the drafting step also reads: it computes their logits too


def go_on(
    context: DraftContext, target: Target, at: int, tokens: Int32s, states: Floats | None = None, *,
    max_tokens: int, source: str,
) -> Draft:  # fmt: skip
    """Return the tokens that follow these tokens, the first at `at`: the likeliest each time, up to `max_tokens` or an
    end of generation.

    states: the input of each token, for a graph that takes states and returns the next one; None for a model that reads
    a text by itself. The draft ends before a token that the target does not have.
    """
    found, logps = list[int](), list[float]()
    while len(found) < max_tokens:
        context.run(at, tokens, states, outputs=1 if states is None else len(tokens))
        ids, logp = context.top([len(tokens) - 1], 1)
        if ids[0, 0] >= target.n_vocab:
            break
        found.append(int(ids[0, 0]))
        logps.append(float(logp[0, 0]))
        if found[-1] in target.ends:
            break
        if states is not None and len(found) < max_tokens:
            states = context.states(len(tokens))[-1:]
        at, tokens = context.end, ids[0]
    return chain(found, source, np.array(logps, np.float32))


class Chained(ModelDrafter):
    """Reads pairs: a token, and the target's rows for the token before it. Then each token it drafts with its own.

    path, own, place: see ModelDrafter. width: values of a row. state: makes the draft context's input of observed rows,
    [n, width] to [n, state].
    """

    def __init__(
        self, name: str, wants: Features, target: Target, path: Path, context: DraftContext, own: ExitStack, *,
        width: int, place: int, state: Callable[[Floats], Floats] = lambda rows: rows,
    ) -> None:  # fmt: skip
        super().__init__(path, context, own, place=place)
        self.name = name
        self.wants = replace(wants, newest=context.window + 1)  # a pair has the rows of the token before it
        self._target = target
        self._state = state
        self._recent = np.empty((0, width), np.float32)  # rows of the newest tokens

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """Without rows of these tokens it starts anew behind them."""
        self.truncate(start)
        if start != self._pending.end or rows is None:  # a gap
            self._recent = self._recent[:0]
        if rows is None:
            self._pending.reset(start + len(tokens))
        elif len(tokens):
            before = self._recent[-1:] if len(self._recent) else np.zeros_like(rows[:1])
            self._pending.add(start, tokens, np.concatenate([before, rows[:-1]]))
            self._recent = np.concatenate([self._recent, rows])[-RECENT:]

    def propose(self, root: int, max_tokens: int) -> Draft | None:
        """DecodeError if the drafter computes values that are not finite."""
        if not len(self._recent):
            return None  # the target's row before the root is unknown
        at, tokens, rows = self._unread()
        states = self._state(np.concatenate([rows, self._recent[-1:]]))
        tokens = np.append(tokens, np.int32(root))
        end = self._pending.end + self._place
        if len(tokens) > _OUTPUTS:
            self._context.feed(at, tokens[:-1], states[:-1])
            at, tokens, states = end, tokens[-1:], states[-1:]
        draft = go_on(self._context, self._target, at, tokens, states, max_tokens=max_tokens, source=self.name)
        self._context.truncate(end)
        return draft

    def truncate(self, length: int) -> None:
        """The newest rows of the tokens that stay are kept."""
        cut = max(0, self._pending.end - length)
        super().truncate(length)
        self._recent = self._recent[: max(0, len(self._recent) - cut)]

    def state(self) -> SavedDraft | None:
        at, tokens, rows = self._unread()
        if len(tokens):
            self._context.feed(at, tokens, self._state(rows))
        return self._saved(self._recent)

    def load(self, saved: SavedDraft) -> None:
        self._recent = self._restore(saved, self._recent.shape[1])[-RECENT:]

    def _unread(self) -> tuple[int, Int32s, Floats]:
        """Take the pairs that the draft context has not read, and the position of the first. None are pending then."""
        start, tokens, rows = self._pending.take()
        kept = slice(max(0, -(start + self._place)), None)  # no pair stands before the text
        at = start + kept.start + self._place
        self._context.truncate(at)
        return at, tokens[kept], self._recent[:0] if rows is None else rows[kept]


class Mtp(Chained):
    """The head of a model that predicts the token after the next one, chained on itself.

    path: another file of the same model that has the head, None for the target's own, which must have been loaded with
    load_mtp. ConversionError for a file without one head of this target's; also the errors of DraftModel and
    DraftContext.
    """

    def __init__(self, path: Path | None, target: Target, *, window: int = SPEC_DEFAULT_WINDOW) -> None:
        file = reader.read(path or target.path)
        with ExitStack() as stack:
            address: Any = target.model
            if path is None:
                heads.check(file)
                if not contexts.has_head(target.model):
                    raise ConversionError(
                        file.name, "the head for further tokens", found="not loaded", wanted="a model loaded with it",
                        remedy="Load the model with load_mtp.",
                    )  # fmt: skip
            else:
                verify.check_heads(file, reader.read(target.path))
                weights = DraftModel(path, offload=target.offload, repack=target.repack, mtp=True)
                address = stack.enter_context(closing(weights)).address
            context = DraftContext(address, target, window=window, mtp=True, states=contexts.STATES)
            stack.enter_context(closing(context))
            width = state_width(address)
            super().__init__(
                "mtp", Features(nextn=True), target, path or target.path, context, stack.pop_all(), width=width, place=0
            )


class Eagle3(Chained):
    """A drafter of the architecture eagle3 beside its target.

    ConversionError for a file that is not a drafter of this target; also the errors of DraftModel and DraftContext.
    """

    def __init__(self, path: Path, target: Target, *, window: int = SPEC_DEFAULT_WINDOW) -> None:
        file, model = reader.read(path), reader.read(target.path)
        verify.check(file, model)
        with ExitStack() as stack:
            weights = stack.enter_context(closing(DraftModel(path, offload=target.offload, repack=target.repack)))
            shares = not {"token_embd.weight", "output.weight"} <= file.tensors.keys()
            context = DraftContext(weights.address, target, window=window, shares=shares, states=contexts.STATES)
            stack.enter_context(closing(context))
            super().__init__(
                "eagle3", wants(file, model), target, path, context, stack.pop_all(),
                width=len(verify.target_layers(file)) * target.n_embd, place=-1, state=context.encode,
            )  # fmt: skip


PADDING = 128
"""Most of the target's last tokens that the small model may not know: sizes of one family are padded differently."""


class Small(ModelDrafter):
    """A small model of the target's vocabulary beside it.

    ConversionError for a file that cannot draft, or has recurrent state, which cannot roll back behind rejected drafts;
    also the errors of DraftModel and DraftContext.
    """

    name = "draft"
    wants = Features()

    def __init__(self, path: Path, target: Target, *, window: int = SPEC_DEFAULT_WINDOW) -> None:
        if (architecture := reader.architecture(path)) in BOUND:
            raise ConversionError(
                path.name, "general.architecture", found=architecture, wanted="a model that reads a text by itself",
                remedy="It drafts with what its target computes: ask for a drafter of that kind.",
            )  # fmt: skip
        self._target = target
        with ExitStack() as stack:
            model = stack.enter_context(closing(DraftModel(path, offload=target.offload, repack=target.repack)))
            if model.recurrent:
                raise ConversionError(
                    path.name, "its memory", found=f"recurrent state, as every {architecture} has it",
                    wanted="attention only, as drafts are taken back", remedy="Draft with another model.",
                )  # fmt: skip
            if not model.shares_vocabulary(target, apart=PADDING):
                raise ConversionError(
                    path.name, "the vocabulary", found="another one", wanted=f"the tokens of {target.path.name}",
                    remedy="Draft with a model of the same family.",
                )  # fmt: skip
            context = stack.enter_context(closing(DraftContext(model.address, target, window=window)))
            super().__init__(path, context, stack.pop_all())

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """It starts anew behind a token that it does not know, and behind media."""
        unknown = np.flatnonzero((tokens < 0) | (tokens >= self._context.n_vocab))
        if unknown.size:
            skipped = int(unknown[-1]) + 1
            start, tokens = start + skipped, tokens[skipped:]
            self._pending.reset(start)
        self._pending.add(start, tokens)

    def propose(self, root: int, max_tokens: int) -> Draft | None:
        """DecodeError if the drafter computes values that are not finite."""
        context = self._context
        if root >= context.n_vocab:
            return None
        start, tokens, _ = self._pending.take()
        end = start + len(tokens)
        unread = np.append(tokens, np.int32(root))
        if len(unread) > context.step:
            context.feed(start, tokens, None)
            start, unread = end, unread[-1:]
        draft = go_on(context, self._target, start, unread, max_tokens=max_tokens, source=self.name)
        context.truncate(end)
        return draft
