"""How a block that DFlash, DFlash2 or DSpark has filled in becomes a draft."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import DraftError
from ..gguf.reader import GGUF
from ..native import stock
from . import tree
from .context import DraftContext
from .draft import Draft, chain


@dataclass(frozen=True, slots=True)
class Positions:
    """DFlash: each masked token by itself."""

    size: int
    first = 1
    name = "dflash"
    states = stock.NO_STATES
    outputs = True

    def read(self, context: DraftContext, most: int, branches: int) -> Draft:
        """See Reader."""
        rows = range(self.first, self.first + min(most, self.size))
        ids, logp = context.top(rows, max(1, branches))
        return (
            chain(ids[:, 0], self.name, logp[:, 0]) if branches < 2 else tree.from_positions(ids, logp, most, self.name)
        )


@dataclass(frozen=True, slots=True)
class Markov:
    """DSpark: each token given the likeliest one before it, and how sure it is that it will be accepted.

    first: with 0 the root's own row drafts too. confident: has it a head for that?
    """

    size: int
    first: int
    confident: bool
    name = "dspark"
    outputs = True

    @property
    def states(self) -> int:
        """See Reader."""
        return stock.STATES if self.confident else stock.NO_STATES

    def read(self, context: DraftContext, most: int, branches: int) -> Draft:
        """See Reader. There is one branch: the graph goes on from the likeliest tokens."""
        rows = range(self.first, self.first + min(most, self.size))
        ids, logp = context.top(rows, 1)
        sure = logp[:, 0]
        if self.confident:
            share = context.states(rows.stop)[self.first :, 0]  # all values of a state are the same
            sure = np.log(np.clip(share, np.finfo(np.float32).tiny, 1))
        return chain(ids[:, 0], self.name, sure)


@dataclass(frozen=True, slots=True)
class Lattice:
    """DFlash2: of each position the `k` likeliest tokens, and how likely each is after each of the position before."""

    size: int
    k: int
    first = 1
    name = "dflash2"
    states = stock.ALL_STATES
    outputs = False

    def read(self, context: DraftContext, most: int, branches: int) -> Draft:
        """See Reader. DraftError if it holds what are no numbers."""
        tokens, logp = self.unpacked(context.states(self.first + min(most, self.size))[self.first :])
        if branches > 1:
            return tree.from_lattice(tokens, logp[0, 0], logp[1:], most, self.name)
        found, sure, at = list[int](), list[float](), 0
        for ids, steps in zip(tokens, logp, strict=True):
            after = steps[at]
            at = int(after.argmax())
            found.append(int(ids[at]))
            sure.append(float(after[at]))
        return chain(found, self.name, np.array(sure, np.float32))

    def unpacked(self, states: Floats) -> tuple[Int32s, Floats]:
        """Tokens [n, k], and their log-probabilities after each of the position before, [n, k, k].

        A state has k ids and k * k scores, then zeros. After the root all k rows are the same.
        """
        k = self.k
        used = states[:, : k + k * k].astype(np.float64)
        if not np.isfinite(used).all():
            raise DraftError("a drafter's lattice holds what are no numbers")
        scores = used[:, k:].reshape(-1, k, k)
        scores -= scores.max(axis=2, keepdims=True)
        logp = scores - np.log(np.exp(scores).sum(axis=2, keepdims=True))
        return used[:, :k].astype(np.int32), logp.astype(np.float32)


Reader = Positions | Markov | Lattice
"""name: of the kind. size: tokens of a block that are drafts. first: the row of the first one. states: which it needs
of the context. outputs: needs it logits?

read: the draft in the block that was run last, of at most `most` tokens; with several branches a tree.
"""


def reader(file: GGUF, block: int) -> Reader:
    """For a drafter's file, whose blocks have so many tokens."""
    if "selector_hidden.weight" in file.tensors:
        return Lattice(block - 1, int(file.own("selector_top_k")))
    if "markov_w1.weight" not in file.tensors:
        return Positions(block - 1)
    first = 0 if file.own("sample_from_anchor", True) is True else 1
    return Markov(block - first, first, "conf_proj.weight" in file.tensors)
