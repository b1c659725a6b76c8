"""Training sequences: plain text, recall tasks, tables, copies and short dialogues."""

from __future__ import annotations

import re

import numpy as np

from .config import IM_END, IM_START, MAX_POS, TOKENS
from .facts import Event, FactWriter
from .source import Corpus, open_tokenizer, open_words
from .templates import (
    ASKS,
    CHAT_ASKS,
    CHAT_SMALL,
    NEEDLES,
    SENTENCES,
    W_ANSWER,
    W_ASK,
    W_COPY,
    W_FILL,
    W_NEEDLE,
    W_TEXT,
    W_VALUE,
)

Sequence = tuple[np.ndarray, np.ndarray]  # tokens [n] and their loss weights [n] float16
Batch = tuple[int, np.ndarray, np.ndarray, np.ndarray]  # length, tokens, weights, positions


class Synth(FactWriter):
    """Builds one training sequence at a time from the corpus and the recall templates."""

    @classmethod
    def open(cls, data_dir: str, corpus_dir: str, *, seed: int, split: str = "train") -> Synth:
        """The generator for the tokenizer and words of ``data_dir`` and a corpus on disk."""
        return cls(
            open_tokenizer(data_dir),
            Corpus.open(corpus_dir, split),
            words=open_words(data_dir, split),
            seed=seed,
        )

    def needles(self, n: int) -> Sequence:
        """Facts spread over filler, asked for part-way and at the end, plainly or in ChatML."""
        r = self.rng
        top = max(2, int(8 * (n / 1024) ** 0.6))
        facts = self.facts(r.randrange(1, top + 1) if r.random() < 0.85 else 1)
        style = r.random()
        events: list[Event] = []
        for f in facts:
            t = r.choice(NEEDLES)
            depth = r.random() ** 1.2 * 0.97
            events.append((depth, *self.fill(t, f, w_rest=W_NEEDLE, w_value=W_VALUE)))
            if style > 0.25 and r.random() < 0.5:  # an early question somewhere after the needle
                q = r.choice(ASKS)
                events.append(
                    (
                        depth + (0.999 - depth) * r.random(),
                        *self.fill(q, f, w_rest=W_ASK, w_value=W_ANSWER),
                    )
                )
        asked = r.sample(facts, max(1, min(len(facts), r.randrange(1, 1 + max(1, top)))))
        if style <= 0.25:  # ChatML
            sys_ = "system\nYou are a helpful assistant." if r.random() < 0.4 else None
            for j, f in enumerate(asked):
                q, a = r.choice(CHAT_ASKS)
                qi, _ = self.fill(q + "{v}", (f[0], f[1], ""), w_rest=W_ASK, w_value=W_ASK)
                nl = self.enc("\n")
                lead = nl if j == 0 else [IM_START, *self.enc("user\n")]
                ids = lead + qi + [IM_END] + nl + [IM_START] + self.enc("assistant\n")
                w = [W_ASK] * len(ids)
                ai, aw = self.fill(a, f, w_rest=1.0, w_value=W_ANSWER)
                events.append((1, ids + ai + [IM_END] + nl, w + aw + [2.0, 1.0]))
            pre = (
                ([IM_START, *self.enc(sys_), IM_END, *self.enc("\n")] if sys_ else []) + [IM_START] + self.enc("user\n")
            )
            ids, w = self.weave(n - len(pre), events)
            return (
                np.concatenate([np.array(pre, np.uint16), ids]),
                np.concatenate([np.full(len(pre), 0.2, np.float16), w]),
            )
        events.append((1, self.enc("\n"), [W_ASK]))
        for f in asked:
            events.append((1, *self.line(*self.fill(r.choice(ASKS), f, w_rest=W_ASK, w_value=W_ANSWER))))
        return self.weave(n, events)

    def tables(self, n: int) -> Sequence:
        """Key-value lists, dictionaries and variable assignments, recalled later."""
        r = self.rng
        top = max(4, int(12 * (n / 1024) ** 0.6))
        facts = self.facts(r.randrange(3, top))
        ident = [(a, re.sub(r"[^a-z0-9]+", "_", b.lower()), c) for a, b, c in facts]
        ident = [(a, "v" + b if b[0].isdigit() else b, c) for a, b, c in ident]
        give, ask = r.choice(
            [
                ("{x} = {v}\n", "assert {x} == {v}\n"),
                ("{x} = {v}\n", "{x} = {v}\n"),
                ('    "{x}": "{v}",\n', 'data["{x}"] == "{v}"\n'),
                ("{x}: {v}\n", "{x}: {v}\n"),
                ("- {x} -> {v}\n", "{x} -> {v}\n"),
                ("| {x} | {v} |\n", "| {x} | {v} |\n"),
                ("{x},{v}\n", "{x},{v}\n"),
            ]
        )
        events: list[Event] = []
        if r.random() < 0.5:  # one block
            ids, w = [], []
            for f in ident:
                a, b = self.fill(give, f, w_rest=W_NEEDLE, w_value=W_VALUE)
                ids, w = ids + a, w + b
            events.append((r.random() * 0.9, ids, w))
        else:
            for f in ident:
                events.append((r.random() * 0.9, *self.fill(give, f, w_rest=W_NEEDLE, w_value=W_VALUE)))
        events.append((1, self.enc("\n"), [W_FILL]))
        for f in r.sample(ident, r.randrange(2, len(ident) + 1)):
            ids, w = self.fill(ask, f, w_rest=W_ASK, w_value=W_ANSWER)
            events.append((1, ids, w))
        return self.weave(n, events)

    def copies(self, n: int) -> Sequence:
        """A block of text repeated verbatim later on."""
        r = self.rng
        k = int(min(n // 3, 24 * 2 ** (r.random() * 5) * max(1, n / 8192)))
        block = list(self.text(k, prose=0.3))
        lead = r.choice(["Repeat the following text:\n", "```\n", "# copy 1\n", "Text:\n", "\n"])
        again = r.choice(["\nRepeat:\n", "```\n\n```\n", "# copy 2\n", "Text again:\n", "\n"])
        a, b = self.enc(lead), self.enc(again)
        one = (r.random() * 0.9, a + block, [W_NEEDLE] * len(a) + [W_FILL] * k)
        warm = min(k, 6)  # the first tokens select which text
        two = (1, b + block, [W_NEEDLE] * len(b) + [0.5] * warm + [W_COPY] * (k - warm))
        return self.weave(n, [one, two])

    def random_repeat(self, n: int) -> Sequence:
        """Random tokens twice over: only the second time can be predicted."""
        k = self.rng.randrange(16, max(17, min(n // 2, 400)))
        reps = []
        w = []
        while sum(map(len, reps)) < n:
            seq_ = self.np_rng.integers(0, 4092, k).astype(np.uint16)
            for j in range(2):
                reps.append(seq_)
                w.append(np.full(k, 0.0 if j == 0 else 0.9, np.float16))
                if j:
                    w[-1][0] = 0.0
        return np.concatenate(reps)[:n], np.concatenate(w)[:n]

    def chat(self, n: int) -> Sequence:
        """Several short ChatML exchanges: greetings, repetition, small facts."""
        r = self.rng
        ids: list[int] = []
        while len(ids) < n:
            k = r.random()
            if k < 0.2:
                q, a = r.choice(CHAT_SMALL)
            elif k < 0.6:
                s = r.choice(SENTENCES)
                s = s.format(*[r.choice(self.words) for _ in range(s.count("{}"))])
                q, a = (
                    r.choice(["Repeat this: ", "Say: ", "Repeat the following sentence. "]) + s,
                    s,
                )
            else:
                f = self.facts(1)[0]
                q = f"The {f[0]} for {f[1]} is {f[2]}. What is the {f[0]} for {f[1]}?"
                a = f"The {f[0]} for {f[1]} is {f[2]}."
            ids += [IM_START, *self.enc(f"user\n{q}"), IM_END, *self.enc("\n")]
            ids += [IM_START, *self.enc(f"assistant\n{a}"), IM_END, *self.enc("\n")]
        return np.array(ids[:n], np.uint16), np.full(n, 0.8, np.float16)

    def sequence(self, n: int) -> Sequence:
        """n tokens of the training mix; long sequences hold less plain text."""
        k, long_ = self.rng.random(), n > 12000
        text = 0.30 if long_ else 0.42 if n > 1500 else 0.36
        if k < text:
            return self.documents(n), np.full(n, W_TEXT, np.float16)
        k = (k - text) / (1 - text)
        if k < 0.66:
            return self.needles(n)
        if k < 0.80:
            return self.tables(n)
        if k < 0.92:
            return self.copies(n)
        if k < 0.97 or n > 20000:
            return self.random_repeat(n)
        return self.chat(n)

    def positions(self, n: int, prob: float = 0.5) -> np.ndarray:
        """0..n-1, or (PoSE) 2-8 contiguous segments with random gaps up to MAX_POS."""
        pos = np.arange(n, dtype=np.int32)
        room = MAX_POS - n
        if room > 0 and self.rng.random() < prob:
            segs = self.rng.randrange(2, 9)
            cuts = np.sort(self.np_rng.integers(0, n, segs))
            gaps = self.np_rng.dirichlet(np.ones(segs)) * self.rng.randrange(room)
            for c, g in zip(cuts, gaps, strict=True):
                pos[c:] += int(g)
        return pos

    def batch(self, seq: int, tokens: int = TOKENS) -> Batch:
        """``tokens // seq`` rows of ``seq + 1`` tokens, weights and positions of the targets."""
        rows = tokens // seq
        tok = np.empty((rows, seq + 1), np.int32)
        wgt = np.empty((rows, seq), np.float16)
        pos = np.empty((rows, seq), np.int32)
        for i in range(rows):
            ids, w = self.sequence(seq + 1)
            tok[i], wgt[i], pos[i] = ids, w[1:], self.positions(seq)
        wgt[wgt > 5] *= min(4.0, (seq / 1024) ** 0.35)  # answers are rarer in long sequences
        return seq, tok, wgt, pos

    def haystacks(self, seq: int, *, depth: float, rows: int) -> Sequence:
        """Haystacks [rows, seq + 1] with a seven-digit needle at ``depth``, asked for at the end.

        The second array [rows, seq] marks the targets that are digits of the answer.
        """
        toks, spans = [], []
        for _ in range(rows):
            fact = (
                "access code",
                f"{self.rng.choice(self.words)} {self.rng.choice(self.words)}",
                f"{self.rng.randrange(10**7):07d}",
            )
            needle = self.fill("The {n} for {x} is {v}.", fact, w_rest=0, w_value=0)
            ask = self.fill("\nWhat is the {n} for {x}? The {n} for {x} is {v}", fact, w_rest=0, w_value=1)
            ids, w = self.weave(seq + 1, [(depth, *needle), (1, *ask)], fill_weight=0)
            toks.append(ids)
            spans.append(w[1:] > 0.5)
        return np.stack(toks).astype(np.int64), np.stack(spans)
