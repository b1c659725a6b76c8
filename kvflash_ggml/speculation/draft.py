"""A draft: tokens that may follow the root, the newest token of the text, as a chain or as a tree."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np

from ..arrays import Floats, Int32s
from ..errors import DraftError

ROOT = -1
"""The parent of a token that follows the root itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Draft:
    """Tokens that may follow the root.

    tokens: [n]. parent: [n], the parent node of each, ROOT or smaller than its own number. logp: [n], the drafter's
    log-probability of a token given its parent, or None. source: the drafter's name.
    """

    tokens: Int32s
    parent: Int32s
    source: str
    logp: Floats | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """Whether each token follows the one before it."""
        return bool(np.array_equal(self.parent, np.arange(ROOT, len(self) - 1)))

    def depths(self) -> Int32s:
        """Return the distance of each node from the root, [n]: 1 for nodes that follow the root."""
        depths = np.ones(len(self), np.int32)
        for node, parent in enumerate(self.parent.tolist()):
            if parent != ROOT:
                depths[node] = depths[parent] + 1
        return depths

    def child(self, node: int, token: int) -> int | None:
        """Return the node after `node` (or ROOT) with this token; None if it was not drafted."""
        found = np.flatnonzero((self.parent == node) & (self.tokens == token))
        return int(found[0]) if found.size else None

    def first(self, count: int) -> Draft:
        """Return the draft without its nodes from `count` on."""
        logp = None if self.logp is None else self.logp[:count]
        return Draft(self.tokens[:count], self.parent[:count], self.source, logp)

    def padded(self, count: int, token: int) -> Draft:
        """Return a chain with `token` appended until it has `count` nodes; a tree as it is."""
        more = count - len(self)
        if more <= 0 or not self.is_chain:
            return self
        return chain(np.append(self.tokens, np.full(more, token, np.int32)), self.source)


def chain(tokens: Sequence[int] | Int32s, source: str, logp: Floats | None = None) -> Draft:
    """Return a draft whose tokens follow each other."""
    return Draft(np.asarray(tokens, np.int32), np.arange(ROOT, len(tokens) - 1, dtype=np.int32), source, logp)


def checked(draft: Draft, *, n_vocab: int, max_tokens: int, ends: Collection[int] = ()) -> Draft:
    """Return a draft that can be verified, of at most `max_tokens` tokens, without tokens after an end of generation.

    ends: the tokens that end a text. Log-probabilities that are not finite are dropped. DraftError for ids out of the
    vocabulary, arrays that do not fit each other, parents that come later, or siblings with the same token. Tokens
    after the first `max_tokens` are not checked, except for the arrays' shapes.
    """
    tokens, parent = draft.tokens, draft.parent
    for name, values in (("tokens", tokens), ("parents", parent)):
        if not isinstance(values, np.ndarray) or values.dtype != np.int32 or values.ndim != 1:
            raise DraftError(f"{draft.source}: {name} must be a list of 32-bit integers, not {values!r}")
    if len(tokens) != len(parent):
        raise DraftError(f"{draft.source}: {len(tokens)} tokens and {len(parent)} parents")
    logp = _numbers(draft.logp, len(tokens))
    if len(tokens) > max_tokens:
        tokens, parent = tokens[:max_tokens], parent[:max_tokens]
        logp = None if logp is None else logp[:max_tokens]
    if len(tokens) and not (tokens.min() >= 0 and tokens.max() < n_vocab):
        raise DraftError(f"{draft.source}: a token out of the vocabulary of {n_vocab}")
    if np.any(parent < ROOT) or np.any(parent >= np.arange(len(parent))):
        raise DraftError(f"{draft.source}: a token follows one that comes later, or none")
    if len(set(zip(parent.tolist(), tokens.tolist(), strict=True))) < len(tokens):
        raise DraftError(f"{draft.source}: the same token follows another twice")
    return _before_ends(Draft(tokens, parent, draft.source, logp), ends)


def _numbers(logp: object, count: int) -> Floats | None:
    """Return the log-probabilities; None unless they are `count` finite numbers."""
    if not isinstance(logp, np.ndarray) or logp.dtype.kind != "f" or logp.shape != (count,):
        return None
    return logp if bool(np.isfinite(logp).all()) else None


def _before_ends(draft: Draft, ends: Collection[int]) -> Draft:
    """Return the draft without tokens that would follow a token that ends the text."""
    if not ends or not np.isin(draft.tokens, list(ends)).any():
        return draft
    number: dict[int, int] = {ROOT: ROOT}  # new numbers of the nodes that stay
    keep: list[int] = []
    over: set[int] = set()
    for node, (token, parent) in enumerate(zip(draft.tokens.tolist(), draft.parent.tolist(), strict=True)):
        if parent in over or parent not in number:
            continue
        number[node] = len(keep)
        keep.append(node)
        if token in ends:
            over.add(node)
    parents = np.array([number[int(draft.parent[node])] for node in keep], np.int32)
    logp = None if draft.logp is None else draft.logp[keep]
    return Draft(draft.tokens[keep], parents, draft.source, logp)


# --- counts


@dataclass(slots=True)
class Source:
    """Counts of one drafter: steps that verified its drafts, tokens that were verified, and tokens that were
    accepted.
    """

    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(slots=True)
class DraftStats:
    """Counts of steps, and of the tokens they won.

    steps: steps that verified a draft; each wins one token more than it accepts. plain_steps: other steps that
    generated a token. drafted, accepted: tokens. reached, agreed: per position of a draft, how often it was tested, and
    how often it was accepted. seconds_draft, seconds_verify: time of the drafters, and of the steps that verified.
    bad_drafts: drafts that could not be verified. lucky: tokens won by rows that only pad a draft.
    filled: tokens won by rows that only fill a step for drafts of other texts. replaced: drafted tokens in whose place
    another was drawn, in an answer "auto".
    """

    steps: int = 0
    plain_steps: int = 0
    drafted: int = 0
    accepted: int = 0
    reached: list[int] = field(default_factory=list)
    agreed: list[int] = field(default_factory=list)
    by_source: dict[str, Source] = field(default_factory=dict)
    seconds_draft: float = 0.0
    seconds_verify: float = 0.0
    seconds_plain: float = 0.0
    bad_drafts: int = 0
    lucky: int = 0
    filled: int = 0
    replaced: int = 0

    @property
    def rate(self) -> float | None:
        """Accepted share of the drafted tokens, 0 to 1; None if none was drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def mean_length(self) -> float | None:
        """Mean tokens won by a step that verified, with the one that the target adds; None without such steps."""
        return 1 + (self.accepted + self.lucky) / self.steps if self.steps else None

    @property
    def per_position(self) -> tuple[float, ...]:
        """Share accepted at each position after the newest token, given that the earlier positions were accepted."""
        return tuple(b / a for a, b in zip(self.reached, self.agreed, strict=True))

    def plain(self, seconds: float, drafting: float = 0.0) -> None:
        """Count one token that was generated without a draft in `seconds`, and the drafters' time."""
        self.plain_steps += 1
        self.seconds_plain += seconds
        self.seconds_draft += drafting

    def verified(
        self, draft: Draft, path: Sequence[int], seconds: float, drafting: float = 0.0, *, stopped: bool = False
    ) -> None:
        """Count a verified draft whose nodes of `path` were accepted. stopped: later nodes were not tested."""
        accepted = len(path)
        own = self.by_source.setdefault(draft.source, Source())
        for counts in (self, own):
            counts.steps += 1
            counts.drafted += len(draft)
            counts.accepted += accepted
        self.seconds_verify += seconds
        self.seconds_draft += drafting
        looked_at = min(accepted + (not stopped), int(draft.depths().max()))
        self.reached += [0] * (looked_at - len(self.reached))
        self.agreed += [0] * (looked_at - len(self.agreed))
        for at in range(looked_at):
            self.reached[at] += 1
            self.agreed[at] += at < accepted
