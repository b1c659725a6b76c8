"""A small model that writes as the target does: it reads the text by itself, and goes on token by token."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..arrays import Floats, Int32s
from ..config import SPEC_DEFAULT_WINDOW
from ..drafter.model import BOUND
from ..errors import ConversionError
from ..gguf import modelfile
from .base import Features
from .chained import go_on
from .context import DraftContext, DraftModel
from .draft import Draft
from .model_drafter import ModelDrafter
from .target import Target

PADDING = 128
"""So many of the target's last tokens may be unknown to the small model: sizes of one family are padded differently."""


class Small(ModelDrafter):
    """A model of the target's vocabulary beside it.

    Raises ConversionError for a file that cannot be one, or has recurrent state, which could not go back behind drafts
    that were rejected, and what DraftModel and DraftContext raise.
    """

    name = "draft"
    wants = Features()

    def __init__(self, path: Path, target: Target, *, window: int = SPEC_DEFAULT_WINDOW) -> None:
        if (architecture := modelfile.architecture(path)) in BOUND:
            raise ConversionError(
                path.name, "general.architecture", found=architecture, wanted="a model that reads a text by itself",
                remedy="It drafts with what its target computes: ask for a drafter of that kind.",
            )  # fmt: skip
        self._target = target
        with ExitStack() as stack:
            model = DraftModel(path, offload=target.offload, repack=target.repack)
            stack.callback(model.close)
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
            context = DraftContext(model.address, target, window=window)
            stack.callback(context.close)
            super().__init__(path, context, stack.pop_all())

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See Drafter. It starts anew behind a token that it does not know."""
        unknown = np.flatnonzero(tokens >= self._context.n_vocab)
        if unknown.size:
            skipped = int(unknown[-1]) + 1
            start, tokens = start + skipped, tokens[skipped:]
            self._lag.reset(start)
        self._lag.add(start, tokens)

    def propose(self, root: int, most: int) -> Draft | None:
        """See Drafter. DecodeError if what it computes are no numbers."""
        context = self._context
        if root >= context.n_vocab:
            return None
        start, tokens, _ = self._lag.take()
        end = start + len(tokens)
        unread = np.append(tokens, np.int32(root))
        if len(unread) > context.step:
            context.feed(start, tokens, None)
            start, unread = end, unread[-1:]
        draft = go_on(context, self._target, start, unread, most=most, source=self.name)
        context.truncate(end)
        return draft
