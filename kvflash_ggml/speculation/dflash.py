"""DFlash: a drafter that fills a block of masked tokens at once, from inputs of the target's layers."""

from __future__ import annotations

import logging
import math
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ..arrays import Floats, Int32s
from ..config import SPEC_DEFAULT_WINDOW
from ..errors import DraftError
from ..gguf import reader, verify
from ..gguf import target as target_facts
from ..gguf.reader import GGUF
from ..native import contexts
from . import tree
from .base import Features, Target
from .context import DraftContext, DraftModel
from .draft import Draft, chain
from .model_drafter import ModelDrafter


@dataclass(frozen=True, slots=True)
class Positions:
    """DFlash: each masked token by itself."""

    size: int
    first = 1
    name = "dflash"
    states = contexts.NO_STATES
    outputs = True

    def read(self, context: DraftContext, max_tokens: int, branches: int) -> Draft:
        rows = range(self.first, self.first + min(max_tokens, self.size))
        ids, logp = context.top(rows, max(1, branches))
        if branches < 2:
            return chain(ids[:, 0], self.name, logp[:, 0])
        return tree.from_positions(ids, logp, max_tokens, self.name)


@dataclass(frozen=True, slots=True)
class Markov:
    """DSpark: each token given the likeliest token before it, and an estimate of its acceptance.

    first: with 0 the root's own row drafts too. confident: whether the model has a head for that estimate.
    """

    size: int
    first: int
    confident: bool
    name = "dspark"
    outputs = True

    @property
    def states(self) -> int:
        return contexts.STATES if self.confident else contexts.NO_STATES

    def read(self, context: DraftContext, max_tokens: int, branches: int) -> Draft:
        """There is one branch: the graph continues from the likeliest tokens."""
        rows = range(self.first, self.first + min(max_tokens, self.size))
        ids, logp = context.top(rows, 1)
        sure = logp[:, 0]
        if self.confident:
            share = context.states(rows.stop)[self.first :, 0]  # all values of a state are the same
            sure = np.log(np.clip(share, np.finfo(np.float32).tiny, 1))
        return chain(ids[:, 0], self.name, sure)


@dataclass(frozen=True, slots=True)
class Lattice:
    """DFlash2: the `k` likeliest tokens of each position, and their probabilities after each token of the position
    before.
    """

    size: int
    k: int
    first = 1
    name = "dflash2"
    states = contexts.ALL_STATES
    outputs = False

    def read(self, context: DraftContext, max_tokens: int, branches: int) -> Draft:
        """DraftError if the lattice holds values that are not finite."""
        tokens, logp = self.unpacked(context.states(self.first + min(max_tokens, self.size))[self.first :])
        if branches > 1:
            return tree.from_lattice(tokens, logp[0, 0], logp[1:], max_tokens, self.name)
        found, sure, at = list[int](), list[float](), 0
        for ids, steps in zip(tokens, logp, strict=True):
            after = steps[at]
            at = int(after.argmax())
            found.append(int(ids[at]))
            sure.append(float(after[at]))
        return chain(found, self.name, np.array(sure, np.float32))

    def unpacked(self, states: Floats) -> tuple[Int32s, Floats]:
        """Return tokens [n, k], and their log-probabilities after each token of the position before, [n, k, k].

        A state has k ids and k * k scores, then zeros. After the root all k rows are the same.
        """
        k = self.k
        used = states[:, : k + k * k].astype(np.float64)
        if not np.isfinite(used).all():
            raise DraftError("a drafter's lattice holds values that are not finite")
        scores = used[:, k:].reshape(-1, k, k)
        scores -= scores.max(axis=2, keepdims=True)
        logp = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
        return used[:, :k].astype(np.int32), logp.astype(np.float32)


Reader = Positions | Markov | Lattice
"""name: of the kind. size: tokens of a block that are drafted. first: the row of the first drafted token. states: the
states that it needs of the context. outputs: whether it needs logits.

read: returns the draft in the block that was run last, of at most `max_tokens` tokens; with several branches a tree.
"""


def block_reader(file: GGUF, block: int) -> Reader:
    """Return the reader of a drafter's file, whose blocks have `block` tokens."""
    if "selector_hidden.weight" in file.tensors:
        return Lattice(block - 1, int(file.own("selector_top_k")))
    if "markov_w1.weight" not in file.tensors:
        return Positions(block - 1)
    first = 0 if file.own("sample_from_anchor", True) is True else 1
    return Markov(block - first, first, "conf_proj.weight" in file.tensors)


logger = logging.getLogger("kvflash_ggml")


class DFlash(ModelDrafter):
    """A drafter of the architecture dflash beside its target.

    Rows of the text wait on the host until a draft is wanted; then the newest `window` of them are read. branches:
    tokens that may follow one token, where the target can verify trees; 1 for chains. ConversionError for a file that
    is not a drafter of this target; also the errors of DraftModel and DraftContext.
    """

    def __init__(self, path: Path, target: Target, *, window: int = SPEC_DEFAULT_WINDOW, branches: int = 1) -> None:
        file, model = reader.read(path), reader.read(target.path)
        verify.check(file, model, rope_differs=True)
        it, aim = verify.describe(file), target_facts.describe(model)
        if not math.isclose(it.theta, aim.theta, rel_tol=1e-6):
            logger.warning("%s was made with a RoPE theta of %g, its target with %g", path.name, it.theta, aim.theta)
        self._reader = block_reader(file, it.block)
        self._block = np.full(it.block, it.mask, np.int32)
        self._branches = branches
        self.name = self._reader.name
        with ExitStack() as stack:
            weights = stack.enter_context(closing(DraftModel(path, offload=target.offload, repack=target.repack)))
            shares = not {"token_embd.weight", "output.weight"} <= file.tensors.keys()
            context = DraftContext(
                weights.address, target, window=window, shares=shares, states=self._reader.states,
                causal=bool(it.causal),
            )  # fmt: skip
            stack.enter_context(closing(context))
            self.wants = Features(it.target_layers, newest=context.window)
            super().__init__(path, context, stack.pop_all())

    @property
    def size(self) -> int:
        """Most tokens of a draft."""
        return self._reader.size

    def observe(self, start: int, tokens: Int32s, rows: Floats | None) -> None:
        """Without rows of these tokens it starts anew behind them."""
        if rows is None:
            self._pending.reset(start + len(tokens))
        else:
            self._pending.add(start, tokens, rows)

    def propose(self, root: int, max_tokens: int) -> Draft | None:
        """DecodeError or DraftError if the drafter computes values that are not finite."""
        self._read()
        context, end = self._context, self._pending.end
        if context.end != end or context.first == end:
            return None  # nothing is known of the text
        # masks behind the wanted tokens take time and do not improve the tokens
        block = self._block[: self._reader.first + min(max_tokens, self.size)]
        block[0] = root
        context.run(end, block, outputs=len(block) if self._reader.outputs else 0)
        draft = self._reader.read(context, max_tokens, self._branches)
        context.truncate(end)
        return draft
