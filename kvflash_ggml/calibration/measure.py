"""How often and how strongly each head attends to the requested fact, and to the other facts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from ..arrays import Floats, Int32s
from ..constants import CHUNK
from ..logs import Progress
from ..policy.heads import log_shares
from .documents import Document, Tokenize, compose, question

DOCUMENTS = 2
TOKENS = 2048
MIN_TOKENS = 1024
QUESTION_ROWS = 32

CLEAR = 0.05
"""Share of a head's attention below which its best chunk counts as noise."""


class DocumentReader(Protocol):
    """A model that reads a document and answers questions about it.

    n_ctx: tokens it can hold. opening: tokens that a text begins with. n_heads: columns of `masses` for one query row.
    """

    n_ctx: int
    opening: Sequence[int]
    n_heads: int

    def read(self, tokens: Int32s) -> None:
        """Forget everything and read a document."""
        ...

    def ask(self, tokens: Int32s) -> Floats:
        """Return the log masses of the whole chunks at the question's newest rows, [n_heads, rows, n]. The question is
        forgotten.
        """
        ...


class HeadStats:
    """Sums over questions, per head [n_heads]. found: largest share on the requested fact; control: mean share on the
    other facts; first: how often the requested fact's chunk is the best one.
    """

    def __init__(self, n_heads: int) -> None:
        self.found: Floats = np.zeros(n_heads, np.float32)
        self.control: Floats = np.zeros(n_heads, np.float32)
        self.first: Floats = np.zeros(n_heads, np.float32)
        self.questions = 0

    def add(self, masses: Floats, asked: Sequence[int], others: Sequence[int]) -> None:
        """Add one question. masses: [n_heads, rows, n]. asked, others: chunks of the requested fact, and of the
        others.
        """
        logs = log_shares(masses.reshape(-1, masses.shape[2])).reshape(masses.shape)
        shares = np.exp(logs)
        share = shares[:, :, asked].max(axis=2)
        self.found += share.max(axis=1)
        self.control += shares[:, :, others].max(axis=1).mean(axis=1)
        hits = np.isin(shares.argmax(axis=2), asked) & (share > CLEAR)
        self.first += hits.any(axis=1)
        self.questions += 1

    def merge(self, other: HeadStats) -> None:
        """Add the questions of others."""
        self.found += other.found
        self.control += other.control
        self.first += other.first
        self.questions += other.questions


@dataclass(frozen=True, slots=True)
class Measured:
    """Means over the questions, per head [n_heads]; see HeadStats. alone: the same of each document by itself."""

    found: Floats
    control: Floats
    first: Floats
    questions: int
    tokens: int
    alone: tuple[Measured, ...] = ()

    @property
    def score(self) -> Floats:
        """How much more a head attends to a fact when it is asked for."""
        return self.found - self.control


def documents(tokenize: Tokenize, n_ctx: int) -> list[Document]:
    """Return the documents of a search, cut to a context of `n_ctx` tokens. ValueError if that is too short."""
    n_tokens = min(TOKENS, n_ctx - 256)
    if n_tokens < MIN_TOKENS:
        raise ValueError(f"a context of {n_ctx} tokens is too short to tell retrieval heads from others")
    return [compose(tokenize, n_tokens=n_tokens, seed=seed) for seed in range(DOCUMENTS)]


def measure(reader: DocumentReader, tokenize: Tokenize, *, progress: Progress) -> Measured:
    """Read the documents and ask about every fact, verbatim and reworded. progress: tokens done, and in all.

    ValueError if the context is too short, or the model's attention is not finite.
    """
    texts = documents(tokenize, reader.n_ctx)
    plan = [(document, list(_asks(document, tokenize, len(reader.opening)))) for document in texts]
    sizes = [len(document.tokens) + sum(len(tokens) for tokens, _, _ in asks) for document, asks in plan]
    total, done = sum(sizes), 0
    whole = HeadStats(reader.n_heads)
    parts = [HeadStats(reader.n_heads) for _ in plan]
    progress(done, total)
    for (document, asks), stats in zip(plan, parts, strict=True):
        reader.read(np.concatenate([np.array(reader.opening, np.int32), document.tokens]))
        done += len(document.tokens)
        progress(done, total)
        for tokens, asked, others in asks:
            masses = reader.ask(tokens)
            if not np.isfinite(masses).all():
                raise ValueError("its attention is not finite")
            n = masses.shape[2]
            asked, others = [c for c in asked if c < n], [c for c in others if c < n]
            if asked and others:
                stats.add(masses, asked, others)
            done += len(tokens)
            progress(done, total)
        whole.merge(stats)
    return _means(whole, total, tuple(map(_means, parts, sizes)))


def _means(stats: HeadStats, tokens: int, alone: tuple[Measured, ...] = ()) -> Measured:
    count = np.float32(max(1, stats.questions))
    return Measured(stats.found / count, stats.control / count, stats.first / count, stats.questions, tokens, alone)


def _asks(document: Document, tokenize: Tokenize, shift: int) -> Iterator[tuple[Int32s, list[int], list[int]]]:
    """Yield (question, chunks of its fact, chunks of the other facts). shift: tokens before the document."""
    chunks = [range((lo + shift) // CHUNK, (hi - 1 + shift) // CHUNK + 1) for _, (lo, hi) in document.facts]
    for i, (fact, _) in enumerate(document.facts):
        asked = list(chunks[i])
        others = sorted({c for j, some in enumerate(chunks) if j != i for c in some} - set(asked))
        for words in (fact.verbatim, fact.reworded):
            yield np.array(tokenize(question(words)), np.int32), asked, others


class Eta:
    """Estimates how long a measurement takes, from the finished steps.

    The first step does not count: it warms up everything that the others use. step: tokens of a step.
    """

    def __init__(self, step: int) -> None:
        self._step = step
        self._began: tuple[float, int] | None = None

    def seconds(self, done: int, total: int) -> float | None:
        """Return how many seconds all of it takes, with `done` of `total` tokens done; None while that is unknown."""
        if self._began is None:
            if done > 0:
                self._began = time.monotonic(), done
            return None
        since, at = self._began
        return (time.monotonic() - since) * total / (done - at) if done - at >= self._step else None
