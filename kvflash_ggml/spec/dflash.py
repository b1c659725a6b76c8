"""DFlash: a drafter that fills in a block of masked tokens at once, from what layers of the target are given."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from ..arrays import Floats, Int32s
from ..config import SPEC_DEFAULT_WINDOW
from ..gguf import reader, verify
from ..gguf import target as target_facts
from . import blocks
from .base import Features
from .context import DraftContext, DraftModel
from .draft import Draft
from .model_drafter import ModelDrafter
from .target import Target

logger = logging.getLogger("kvflash_ggml")


class DFlash(ModelDrafter):
    """A drafter of the architecture dflash beside its target.

    Rows of the text wait on the host until a draft is wanted; the newest `window` of them are read then. branches:
    tokens that may follow another, where the target can verify trees; 1 for chains. Raises ConversionError for a file
    that is not a drafter of this target, and what DraftModel and DraftContext raise.
    """

    def __init__(self, path: Path, target: Target, *, window: int = SPEC_DEFAULT_WINDOW, branches: int = 1) -> None:
        file, model = reader.read(path), reader.read(target.path)
        verify.check(file, model, rope_differs=True)
        it, aim = verify.describe(file), target_facts.describe(model)
        if not math.isclose(it.theta, aim.theta, rel_tol=1e-6):
            logger.warning("%s was made with a RoPE theta of %g, its target with %g", path.name, it.theta, aim.theta)
        self._reader = blocks.reader(file, it.block)
        self._block = np.full(it.block, it.mask, np.int32)
        self._branches = branches
        self.name = self._reader.name
        with ExitStack() as stack:
            weights = DraftModel(path, offload=target.offload, repack=target.repack)
            stack.callback(weights.close)
            shares = not {"token_embd.weight", "output.weight"} <= file.tensors.keys()
            context = DraftContext(
                weights.address, target, window=window, shares=shares, states=self._reader.states,
                causal=bool(it.causal),
            )  # fmt: skip
            stack.callback(context.close)
            self.wants = Features(it.target_layers, newest=context.window)
            super().__init__(path, context, stack.pop_all())

    @property
    def size(self) -> int:
        """Tokens of a draft, at most."""
        return self._reader.size

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """See Drafter. Without rows of these tokens it starts anew behind them."""
        if rows is None:
            self._lag.reset(start + len(tokens))
        else:
            self._lag.add(start, tokens, rows)

    def propose(self, root: int, most: int) -> Draft | None:
        """See Drafter. DecodeError or DraftError if what it computes are no numbers."""
        self._read()
        context, end = self._context, self._lag.end
        if context.end != end or context.first == end:
            return None  # nothing is known of the text
        # masks behind the tokens that are wanted take time, and make these no better
        block = self._block[: self._reader.first + min(most, self.size)]
        block[0] = root
        context.run(end, block, outputs=len(block) if self._reader.outputs else 0)
        draft = self._reader.read(context, most, self._branches)
        context.truncate(end)
        return draft
