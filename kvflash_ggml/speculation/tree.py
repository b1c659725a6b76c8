"""Draft trees, and the rows of a step that verifies one."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..arrays import Floats, Int32s
from ..pool.masks import Branches, places
from .draft import ROOT, Draft, chain

SIBLINGS = 8
"""Most tokens that may follow one token: the likeliest."""

Choices = Iterable[tuple[int, float, int]]
"""Possible next tokens: token, log-probability, and the state it leads to."""


def from_positions(tokens: Int32s, logp: Floats, max_tokens: int, source: str) -> Draft:
    """Return the tree of `max_tokens` nodes that wins most tokens if each position is drawn independently.

    tokens, logp: [positions, k], the likeliest tokens of each position and their log-probabilities; NaN or minus
    infinity for none. The nodes are ordered by worth: the first n are the best tree of n.
    """
    rows = [_ranked(*row) for row in zip(tokens.tolist(), logp.tolist(), strict=True)]

    def after(position: int) -> Choices:
        return ((token, chance, position + 1) for token, chance, _ in rows[position]) if position < len(rows) else ()

    return _best_first(0, after, max_tokens, source)


def from_lattice(tokens: Int32s, first: Floats, steps: Floats, max_tokens: int, source: str) -> Draft:
    """Return the same tree where the probability of a token depends on the token before it.

    tokens: [positions, k]. first: [k], log-probabilities of the first position. steps: [positions - 1, k, k],
    log-probabilities of each token of the next position, given each token of this one.
    """
    k = tokens.shape[1] if len(tokens) else 0

    def after(state: int) -> Choices:
        position, before = divmod(state, k) if state != ROOT else (-1, 0)
        if position + 1 >= len(tokens):
            return
        logp = first if position < 0 else steps[position, before]
        for token, chance, at in _ranked(tokens[position + 1].tolist(), logp.tolist()):
            yield token, chance, (position + 1) * k + at

    return _best_first(ROOT, after, max_tokens, source)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """The rows of a step, ordered by depth; row 0 is the root.

    tokens: [n + 1]. depth: [n + 1], distance from the root. parent: [n + 1], the parent row, ROOT for the root. main:
    [n + 1], whether the row is on the main chain, the best child of the best child. node: [n + 1], the node of the
    draft, ROOT for the root.
    """

    tokens: Int32s
    depth: Int32s
    parent: Int32s
    main: npt.NDArray[np.bool_]
    node: Int32s

    def __len__(self) -> int:
        return len(self.tokens)

    def of(self, node: int) -> int:
        """Return the row of a node of the draft, or of the root."""
        return int(np.flatnonzero(self.node == node)[0])

    @property
    def branches(self) -> Branches:
        """How the rows lie."""
        return Branches(self.depth, self.parent, places(self.depth, self.main))


def rows(root: int, draft: Draft) -> Rows:
    """Return the rows of a step that verifies a draft after this root."""
    if draft.is_chain:
        n = len(draft) + 1
        order = np.arange(n, dtype=np.int32)
        tokens = np.concatenate([[root], draft.tokens]).astype(np.int32)
        return Rows(tokens, order, order - 1, np.ones(n, np.bool_), order - 1)
    depths = draft.depths()
    by_depth = np.argsort(depths, kind="stable")
    row_of = np.zeros(len(draft) + 1, np.int32)  # by node, the last entry for ROOT
    row_of[by_depth] = np.arange(1, len(draft) + 1)
    main = np.zeros(len(draft) + 1, np.bool_)
    main[0] = True
    main[row_of[main_chain(draft)]] = True
    return Rows(
        tokens=np.concatenate([[root], draft.tokens[by_depth]]).astype(np.int32),
        depth=np.concatenate([[0], depths[by_depth]]).astype(np.int32),
        parent=np.concatenate([[ROOT], row_of[draft.parent[by_depth]]]).astype(np.int32),
        main=main,
        node=np.concatenate([[ROOT], by_depth]).astype(np.int32),
    )


def main_chain(draft: Draft) -> list[int]:
    """Return the nodes of the best child of the best child: the likeliest if log-probabilities are known, else the
    first.
    """
    best: dict[int, int] = {}
    logp = [0.0] * len(draft) if draft.logp is None else draft.logp.tolist()
    for node, parent in enumerate(draft.parent.tolist()):
        if parent not in best or logp[node] > logp[best[parent]]:
            best[parent] = node
    chain: list[int] = []
    node = ROOT
    while node in best:
        node = best[node]
        chain.append(node)
    return chain


def trunk(draft: Draft) -> Draft:
    """Return the main chain alone."""
    nodes = main_chain(draft)
    logp = None if draft.logp is None else draft.logp[nodes]
    return chain(draft.tokens[nodes], draft.source, logp)


def room(draft: Draft) -> int:
    """Return how many positions from the root's on the draft's rows take."""
    return rows(0, draft).branches.room


def _ranked(tokens: list[int], logp: list[float]) -> list[tuple[int, float, int]]:
    """Return the likeliest tokens, each once, with their log-probability and index."""
    found: dict[int, tuple[int, float, int]] = {}
    for at in sorted(range(len(tokens)), key=lambda at: -logp[at] if logp[at] == logp[at] else np.inf):
        if logp[at] > -np.inf and tokens[at] not in found and len(found) < SIBLINGS:
            found[tokens[at]] = (tokens[at], min(0.0, logp[at]), at)
    return list(found.values())


def _best_first(state: int, after: Callable[[int], Choices], max_tokens: int, source: str) -> Draft:
    """Return the tree of the `max_tokens` likeliest paths: a path is never likelier than its beginning, so they form a
    tree.
    """
    tokens: list[int] = []
    parents: list[int] = []
    logp: list[float] = []
    heap: list[tuple[float, int, int, int, float, int]] = []  # the entry's number decides between equals
    pushed = 0

    def push(parent: int, path: float, state: int) -> None:
        nonlocal pushed
        for token, chance, then in after(state):
            heapq.heappush(heap, (path - chance, pushed, parent, token, chance, then))
            pushed += 1

    push(ROOT, 0.0, state)
    while heap and len(tokens) < max_tokens:
        path, _, parent, token, chance, then = heapq.heappop(heap)
        tokens.append(token)
        parents.append(parent)
        logp.append(chance)
        push(len(tokens) - 1, path, then)
    return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), source, np.array(logp, np.float32))
