"""Raw token material: corpus passages, whole documents, and filler of several kinds."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from .config import EOT, VOCAB
from .templates import PLAIN, SENTENCES


class Encoding(Protocol):
    """The ids of one encoded text."""

    ids: list[int]


class Tokenizer(Protocol):
    """The two calls the generators make of a ``tokenizers.Tokenizer``."""

    def encode(self, sequence: str, *, add_special_tokens: bool) -> Encoding: ...

    def decode(self, ids: Sequence[int]) -> str: ...


@dataclass(frozen=True, slots=True)
class Corpus:
    """One split: tokens [n] uint16, document starts [docs + 1], is-prose flags [docs]."""

    tok: np.ndarray
    start: np.ndarray
    is_doc: np.ndarray

    @classmethod
    def open(cls, folder: str, split: str) -> Corpus:
        """Map the arrays that ``build_corpus`` wrote."""
        return cls(
            np.load(f"{folder}/{split}_tok.npy", mmap_mode="r"),
            np.load(f"{folder}/{split}_start.npy"),
            np.load(f"{folder}/{split}_doc.npy"),
        )


def open_tokenizer(data_dir: str) -> Tokenizer:
    """The trained tokenizer of ``data_dir``."""
    from tokenizers import Tokenizer as Trained

    tokenizer: Tokenizer = Trained.from_file(str(Path(data_dir, "tokenizer.json")))
    return tokenizer


def open_words(data_dir: str, split: str) -> list[str]:
    """The words that names are made of; validation uses words never seen in training."""
    words = json.loads(Path(data_dir, "words.json").read_text(encoding="utf-8"))
    return list(words["train" if split == "train" else "held_out"])


class Source:
    """Draws stretches of tokens; every draw comes from the seed."""

    def __init__(self, tokenizer: Tokenizer, corpus: Corpus, *, words: Sequence[str], seed: int) -> None:
        self.tk = tokenizer
        self.words = words
        self.tok, self.start = corpus.tok, corpus.start
        self.prose = np.flatnonzero(corpus.is_doc)
        self.rng = random.Random(seed)
        self.np_rng = np.random.default_rng(seed)
        self.cache: dict[str, list[int]] = {}
        pieces = [self.tk.decode([i]) if i < EOT else "" for i in range(VOCAB)]
        self.ends_nl = np.array([s.endswith("\n") for s in pieces])
        self.ends_dot = np.array([s.endswith(".") for s in pieces])
        self.starts_sp = np.array([s.startswith(" ") for s in pieces])
        self.dot, self.dot_nl = self.enc("."), self.enc(".\n")
        self.pool = self._sentence_pool()

    def enc(self, s: str) -> list[int]:
        """The tokens of ``s``; callers must not change the list."""
        t = self.cache.get(s)
        if t is None:
            t = self.tk.encode(s, add_special_tokens=False).ids
            if len(self.cache) < 200_000:
                self.cache[s] = t
        return t

    def _sentence_pool(self) -> np.ndarray:
        out: list[int] = []
        while len(out) < 30_000:
            t = self.rng.choice(SENTENCES)
            s = t.format(*[self.rng.choice(self.words) for _ in range(t.count("{}"))])
            out += self.enc(" " + s + ("\n" if self.rng.random() < 0.15 else ""))
        return np.array(out, np.uint16)

    def text(self, n: int, prose: float = 0.35) -> np.ndarray:
        """n corpus tokens from one random place, starting at a line start where possible."""
        r = self.rng
        if len(self.prose) and r.random() < prose:
            i = int(self.start[self.prose[r.randrange(len(self.prose))]])
        else:
            i = r.randrange(max(1, len(self.tok) - n - 600))
        i = min(i, max(0, len(self.tok) - n - 600))
        nl = np.flatnonzero(self.ends_nl[self.tok[i : i + 500]])
        i += int(nl[r.randrange(len(nl))]) + 1 if len(nl) else 0
        return np.asarray(self.tok[i : i + n])

    def documents(self, n: int) -> np.ndarray:
        """n tokens of packed documents separated by <|endoftext|>."""
        out, left = [], n
        while left > 0:
            r = self.rng
            d = (
                int(self.prose[r.randrange(len(self.prose))])
                if len(self.prose) and r.random() < 0.3
                else r.randrange(len(self.start) - 1)
            )
            a, b = int(self.start[d]), int(self.start[d + 1])
            if b - a > left and r.random() < 0.5:
                a = r.randrange(a, b - left)
            part = np.asarray(self.tok[a : min(b, a + left)])
            out += [part, np.array([EOT], np.uint16)]
            left -= len(part) + 1
        return np.concatenate(out)[:n]

    def filler(self, n: int) -> np.ndarray:
        """n tokens of one kind: corpus text, made-up sentences, repetition, log lines or prose."""
        r, parts, have = self.rng, [], 0
        kind = r.random()
        while have < n:
            if kind < 0.62:
                part = self.text(min(n - have, r.choice([300, 1000, 3000, 8000, 20000])))
            elif kind < 0.74:
                a = r.randrange(len(self.pool) - 2000)
                part = self.pool[a : a + r.randrange(500, 2000)]
            elif kind < 0.86:  # a few sentences repeated over and over
                base = (
                    r.sample(PLAIN, r.randrange(2, 6))
                    if r.random() < 0.6
                    else [r.choice(SENTENCES).replace("{}", r.choice(self.words)) for _ in range(r.randrange(2, 8))]
                )
                one = np.array([i for s in base for i in self.enc(" " + s)], np.uint16)
                part = np.tile(one, 1 + min(n - have, 20000) // len(one))
            elif kind < 0.93:  # log lines full of numbers
                rows = []
                for _ in range(40):
                    rows += self.enc(
                        f"[{r.randrange(10**6)}] {r.choice(self.words)} {r.choice(self.words)}"
                        f" = {r.randrange(10 ** r.randrange(1, 9))}\n"
                    )
                part = np.array(rows, np.uint16)
            else:
                part = self.text(min(n - have, 400), prose=0.9)
            parts.append(part)
            have += len(part)
        return np.concatenate(parts)[:n]
