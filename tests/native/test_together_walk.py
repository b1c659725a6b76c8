"""Up to six texts on one pool of a real model do anything at random. Each stays what its tokens say."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from support.beside import SHARE, Make, all_finite, check, decode, logits_of, make, spoil, spread
from support.harness import Bare
from support.rounding import ON_GPU

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import DecodeError, NotFinite
from kvflash_ggml.sequence import restore, together
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.step import LAST

LONGEST = 900


class Walk:
    """Actions, each followed by a look at every slot, table and mask row.

    known: the tokens of each text. spreads: values that are not finite spoil all texts of a step.
    """

    def __init__(self, run: Bare, words: Sequence[int], seed: int, *, spreads: bool) -> None:
        self.run = run
        self.spreads = spreads
        self.words = words
        self.dice = random.Random(seed)
        self.known: list[list[int]] = [[] for _ in run.sessions]
        self.done: dict[str, int] = {}
        self.evicted = self.shrunk = False

    def go(self, rounds: int) -> None:
        """Every action so many times, in any order."""
        for text, known, count in zip(self.run.sessions, self.known, (700, 64, 300, 850, 500, 1), strict=False):
            known += self.some(count)
            extend(text, np.array(known, np.int32))
        actions: list[Callable[[], bool]] = [
            self.read, self.read, self.decode, self.decode, self.draft, self.draft, self.cut, self.fork, self.swap,
            self.fail, self.poison, self.deal, self.deal,
        ]  # fmt: skip
        actions *= rounds
        self.dice.shuffle(actions)
        for action in actions:
            self.done[action.__name__] = self.done.get(action.__name__, 0) + action()
            for text, known in zip(self.run.sessions, self.known, strict=True):
                assert text.tokens.tolist() == known
            check(self.run)
            self.evicted |= any(chunk.block < 0 for text in self.run.sessions for chunk in text.table.chunks)

    def some(self, count: int) -> list[int]:
        at = self.dice.randrange(len(self.words) - count)
        return list(self.words[at : at + count])

    def text(self) -> int:
        return self.dice.randrange(len(self.known))

    def running(self) -> list[int]:
        """Texts with tokens, and room for more, in any order."""
        able = [i for i, known in enumerate(self.known) if 0 < len(known) < LONGEST]
        return self.dice.sample(able, self.dice.randint(0, len(able)))

    # --- actions: True if they have done something

    def read(self) -> bool:
        i = self.text()
        if len(self.known[i]) > LONGEST - 200:
            return False
        more = self.some(self.dice.choice([1, 2, 30, 64, 65, 200]))
        extend(self.run.sessions[i], np.array(more, np.int32))
        self.known[i] += more
        return True

    def decode(self) -> bool:
        running = self.running()
        for _ in range(3 if running else 0):
            tokens = self.some(len(running))
            decode(self.run, [self.run.sessions[i] for i in running], tokens)
            for i, token in zip(running, tokens, strict=True):
                self.known[i].append(token)
        return bool(running)

    def draft(self) -> bool:
        """Each keeps another number of draft rows, and some are settled by whatever comes next."""
        running, count = self.running(), self.dice.randint(1, 4)
        steps = []
        for i in running:
            text = self.run.sessions[i]
            steps.append((text, text.prepare_drafts(np.array(self.some(count), np.int32), None)))
        assert not running or together.compute(steps) == [None] * len(running)
        for i, (text, step) in zip(running, steps, strict=True):
            for row in range(self.dice.randint(1, count)):
                text.keep(row)
                self.known[i].append(int(step.tokens[row]))
        return bool(running)

    def cut(self) -> bool:
        i = self.text()
        left = self.run.sessions[i].truncate(self.dice.randint(0, len(self.known[i])))
        del self.known[i][left:]
        return True

    def fork(self) -> bool:
        """Another text goes on from a copy of this one."""
        i, j = self.text(), self.text()
        saved = restore.state(self.run.sessions[i])
        try:
            restore.load(self.run.sessions[j], saved)
        finally:
            saved.release()
        self.known[j] = list(self.known[i])
        return True

    def swap(self) -> bool:
        """A text leaves its place to another one, and comes back."""
        i = self.text()
        text = self.run.sessions[i]
        saved = restore.state(text)
        try:
            text.reset()
            extend(text, np.array(self.some(150), np.int32))
            check(self.run)
            restore.load(text, saved)
        finally:
            saved.release()
        return True

    def fail(self) -> bool:
        """The engine refuses a step: it has never been."""
        running, engine = self.running(), self.run.session.engine
        steps = self.prepared(running)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(engine, "step", refuse)
            errors = together.compute(steps) if steps else []
        assert all(isinstance(error, DecodeError) for error in errors)
        return bool(running)

    def poison(self) -> bool:
        """A text of which numbers are none fails alone, and begins again. On a GPU the others may have to, too."""
        running = self.running()
        if not running:
            return False
        victim = self.run.sessions[running[0]]
        steps = self.prepared(running)
        spoil(victim.engine, victim.table.chunks[0].block)
        errors = together.compute(steps)
        assert isinstance(errors[0], NotFinite)
        victim.reset()
        self.known[running[0]] = []
        assert all_finite(victim.engine)
        for i, (text, step), error in zip(running[1:], steps[1:], errors[1:], strict=True):
            its = [*self.known[i][: step.start], *step.tokens.tolist()]  # it may begin with a token of the text
            if error is not None:
                assert self.spreads
                assert isinstance(error, NotFinite)
                extend(text, np.array(its[text.length :], np.int32))
            self.known[i] = its
        return True

    def deal(self) -> bool:
        """Some texts have requests and share what the others can let go of. Then all have equal shares again."""
        running, pool = self.running(), self.run.session.pool
        some, everyone = {i: self.dice.choice([100, LONGEST, 4 * SHARE]) for i in running}, range(len(self.known))
        for wanted in (some, dict.fromkeys(everyone, SHARE)):
            before = [set(text.table.held) for text in self.run.sessions]
            pool.deal(wanted)
            self.shrunk |= any(text.table.held < held for text, held in zip(self.run.sessions, before, strict=True))
            tokens = self.some(len(running))
            if running:
                decode(self.run, [self.run.sessions[i] for i in running], tokens)  # it looks at the new mask rows
            for i, token in zip(running, tokens, strict=True):
                self.known[i].append(token)
        assert {len(share.order) for share in pool.shares} == {SHARE // CHUNK}
        return bool(running)

    def prepared(self, running: Sequence[int]) -> list[Any]:
        steps = []
        for i in running:
            text = self.run.sessions[i]
            text.begin(1)
            steps.append((text, text.prepare_answer(np.array(self.some(1), np.int32), LAST)))
        return steps


def refuse(count: int, wait: int, codes: list[int], streamed: Any = None, rows: Any = None) -> None:
    codes.append(-5)
    raise DecodeError("llama_decode returned 2")


@pytest.mark.parametrize("seed", [1, pytest.param(3, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["dense", "iswa", "hybrid", "latent heads", "of qwen3moe"])
def test_random_use(kind: str, seed: int, bare: Make, tokens: Any) -> None:
    run = make(bare, 6 if seed == 1 else 3, kind=kind, planes=2 * (kind == "hybrid" and seed == 1))
    spreads = ON_GPU or seed != 1
    if spreads:
        spread(run.session.engine)
    walk = Walk(run, (tokens % run.n_vocab).tolist(), seed, spreads=spreads)
    walk.go(6)
    assert min(walk.done.values()) > 0
    assert walk.evicted
    assert walk.shrunk
    compared = 0
    for text in run.sessions:
        extend(text, np.array([7, 8], np.int32))
        if text.length < SHARE and text.whole[: text.length].all():
            alone = make(bare, 1, kind=kind)
            extend(alone.session, text.tokens)
            mine, its = logits_of(run, text), logits_of(alone, alone.session)
            assert np.abs(mine - its).max() <= 0.06 * np.abs(its).max()  # read in other steps: rounding
            compared += 1
    assert compared
