"""Facts "the noun for a name is a value", their wording, and their place in a sequence."""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from .source import Source
from .templates import NOUNS, W_FILL, W_NEEDLE

Fact = tuple[str, str, str]  # noun, name, value
Event = tuple[float, list[int], list[float]]  # depth, tokens, loss weights


class FactWriter(Source):
    """Invents facts, writes them in a template, and weaves them into filler."""

    def name(self, prev: str | None = None) -> str:
        """A name in one of seven forms; now and then it shares its first word with ``prev``."""
        r, k = self.rng, self.rng.random()
        w = [r.choice(self.words) for _ in range(3)]
        if prev and r.random() < 0.25 and " " in prev:
            w[0] = prev.split(" ")[0]
        if k < 0.42:
            return f"{w[0]} {w[1]}"
        if k < 0.62:
            return f"{w[0]} {w[1]} {w[2]}"
        if k < 0.75:
            return f"{r.randrange(16**4, 16 ** r.randrange(5, 10)):x}"
        if k < 0.83:
            return f"{w[0]}-{w[1]}"
        if k < 0.90:
            return f"{w[0].capitalize()} {w[1].capitalize()}"
        if k < 0.95:
            return f"{w[0]} {r.randrange(1000)}"
        return w[0]

    def value(self) -> str:
        """Mostly seven digits; also other lengths, hex and two words."""
        r, k = self.rng, self.rng.random()
        if k < 0.80:
            return f"{r.randrange(10**7):07d}"
        if k < 0.92:
            n = r.choice([4, 5, 6, 8, 9, 10])
            return str(r.randrange(10 ** (n - 1), 10**n))
        if k < 0.96:
            return f"{r.randrange(16**7, 16**8):x}"
        return f"{r.choice(self.words)} {r.choice(self.words)}"

    def fill(self, template: str, fact: Fact, *, w_rest: float, w_value: float) -> tuple[list[int], list[float]]:
        """template -> (ids, weights); the value gets its own weight, plus the token after it."""
        n, x, v = fact
        head_, tail = template.split("{v}")
        head_ = head_.replace("{n}", n).replace("{x}", x)
        ids: list[int] = []
        w: list[float] = []
        if head_.endswith(" "):
            head_, v = head_[:-1], " " + v
        # every word separately: the cache then holds single words
        for piece in re.findall(r"\s*[^\s]+|\s+", head_):
            t = self.enc(piece)
            ids += t
            w += [w_rest] * len(t)
        t = (
            [i for c in re.findall(r" ?[0-9]| ?[^0-9]+", v) for i in self.enc(c)]
            if v.strip().isdigit()
            else self.enc(v)
        )
        ids = ids + list(t)
        w = w + [w_value] * len(t)
        t = self.enc(tail)
        return ids + t, w + [w_rest] * len(t)

    def line(self, t: list[int], w: list[float]) -> tuple[list[int], list[float]]:
        """End with a newline, the way the tokenizer would write it."""
        if t[-1:] == self.dot:
            return t[:-1] + self.dot_nl, w + w[-1:] * (len(self.dot_nl) - 1)
        return (t, w) if self.ends_nl[t[-1]] else (t + self.enc("\n"), [*w, W_NEEDLE])

    def spaced(self, t: list[int], w: list[float]) -> tuple[list[int], list[float]]:
        """Put a space before the first word."""
        word = re.match("[A-Za-z]+", self.tk.decode(t[:6]))
        old = self.enc(word.group()) if word else []
        if not old or t[: len(old)] != old:
            return t, w
        new = self.enc(" " + word.group())
        return new + t[len(old) :], [w[0]] * len(new) + w[len(old) :]

    def facts(self, n: int) -> list[Fact]:
        """n facts with different names, mostly about the same noun."""
        out: list[Fact] = []
        names: set[str] = set()
        noun = self.rng.choice(NOUNS)
        prev = None
        while len(out) < n:
            x = self.name(prev)
            if x in names:
                continue
            names.add(x)
            prev = x
            if self.rng.random() < 0.3:
                noun = self.rng.choice(NOUNS)
            out.append((noun, x, self.value()))
        return out

    def weave(self, n: int, events: Sequence[Event], *, fill_weight: float = W_FILL) -> tuple[np.ndarray, np.ndarray]:
        """Insert events [(depth in 0..1, ids, weights)] into filler; exactly n tokens.

        Events at depth >= 1 go to the very end, in order.
        """
        used = sum(len(e[1]) for e in events)
        fill = self.filler(max(0, n - used))
        inner = sorted((e for e in events if e[0] < 1), key=lambda e: e[0])
        outer = [e for e in events if e[0] >= 1]
        dot = self.ends_dot[fill]
        dot[:-1] &= self.starts_sp[fill[1:]]
        marks = np.flatnonzero(self.ends_nl[fill] | dot)
        ids, w, at = [], [], 0
        for depth, t, tw in inner:
            want = int(depth * len(fill))
            j = int(np.searchsorted(marks, want))
            cut = int(marks[j]) + 1 if j < len(marks) and marks[j] - want < 400 else want
            cut = max(cut, at)
            ids.append(fill[at:cut])
            w.append(np.full(cut - at, fill_weight, np.float16))
            inline = cut > 0 and dot[cut - 1]
            if not inline and cut > 0 and not self.ends_nl[fill[cut - 1]]:
                t, tw = self.enc("\n") + t, [fill_weight, *tw]
            if inline:
                t, tw = self.spaced(t, tw)
            else:
                t, tw = self.line(t, tw)
            ids.append(np.array(t, np.uint16))
            w.append(np.array(tw, np.float16))
            at = cut
        ids.append(fill[at:])
        w.append(np.full(len(fill) - at, fill_weight, np.float16))
        body, bw = np.concatenate(ids), np.concatenate(w)
        tail_i = np.array([i for e in outer for i in e[1]], np.uint16)
        tail_w = np.array([x for e in outer for x in e[2]], np.float16)
        over = len(body) + len(tail_i) - n
        if over > 0:  # cut filler from the front (rarely an early needle)
            body, bw = body[over:], bw[over:]
        ids, w = np.concatenate([body, tail_i])[-n:], np.concatenate([bw, tail_w])[-n:]
        if len(ids) < n:
            extra = self.text(n - len(ids))
            ids = np.concatenate([extra, ids])
            w = np.concatenate([np.full(len(extra), fill_weight, np.float16), w])
        return ids, w
