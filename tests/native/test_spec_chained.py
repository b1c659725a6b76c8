"""MTP heads and EAGLE3 beside their targets: which pairs they read, and what they draft from them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import MODELS
from support.rounding import DRAFT_TIE

from kvflash_ggml.arrays import Floats, Int32s
from kvflash_ggml.sequence.prefill import LEFT_OVER, QUESTION_TOKENS, extend
from kvflash_ggml.speculation.draft import Draft

FILES = {"mtp": MODELS / "mtp-recall-qwen35-q8_0.gguf", "eagle3": MODELS / "recall-eagle3-q8_0.gguf", "headed": None}
TARGETS = {"mtp": "hybrid", "eagle3": "dense", "headed": "headed"}
MAX_DRAFT = 4

pytestmark = pytest.mark.parametrize("kind", list(FILES))
"""headed: the head is in the target's own file, and computed in a second context on the same weights."""


@dataclass(frozen=True)
class Told:
    """A text with what its target goes on with, and the rows that a drafter is given."""

    tokens: Int32s
    prompt: int
    rows: Floats


@pytest.fixture
def beside(bare: Any, model: Any) -> Iterator[Callable[..., tuple[Any, Any]]]:
    """Makes a target of the kind's, and a function that makes drafters of it."""
    from kvflash_ggml.speculation.base import Target
    from kvflash_ggml.speculation.chained import Eagle3, Mtp

    with ExitStack() as stack:

        def make(kind: str) -> tuple[Any, Any]:
            one = bare(TARGETS[kind], pool=1024, n_ctx=1024)
            target = Target(
                path=model(TARGETS[kind]),
                model=ctypes.cast(one._ctx.model.model, ctypes.c_void_p).value or 0,
                context=ctypes.cast(one._ctx.ctx, ctypes.c_void_p).value or 0,
                n_embd=256, n_vocab=4096, n_ctx=1024,
            )  # fmt: skip

            def drafter(path: Path | None = FILES[kind], **settings: Any) -> Any:
                made = (Eagle3 if kind == "eagle3" else Mtp)(path, target, **settings)
                stack.callback(made.close)
                return made

            return one, drafter

        yield make


def told(one: Any, wants: Any, prompt: Int32s, count: int) -> Told:
    engine, rows, ids = one.session.engine, [], prompt.tolist()
    width = engine.open_features(wants.layers, nextn=wants.nextn)

    def after(start: int, n: int) -> None:
        rows.append(np.empty((n, width), np.float32))
        engine.read_features(0, rows[-1])

    extend(one.session, prompt, after=after)
    for _ in range(count):
        ids.append(int(one.row().argmax()))
        extend(one.session, np.array(ids[-1:], np.int32), after=after)
    return Told(np.array(ids, np.int32), len(prompt), np.concatenate(rows))


def accepted(drafter: Any, text: Told) -> list[int]:
    """How many of each chain are the target's own tokens."""
    tokens, found = text.tokens, []
    read, root = 0, text.prompt
    while root + MAX_DRAFT < len(tokens):
        drafter.observe(read, tokens[read:root], text.rows[read:root])
        guess = drafter.propose(int(tokens[root]), MAX_DRAFT).tokens
        found.append(int(np.logical_and.accumulate(guess == tokens[root + 1 : root + 1 + MAX_DRAFT]).sum()))
        read, root = root, root + found[-1] + 1
    return found


def draft(drafter: Any, text: Told, root: int, *, first: int = 0) -> Draft:
    drafter.observe(first, text.tokens[first:root], text.rows[first:root])
    proposed: Draft = drafter.propose(int(text.tokens[root]), MAX_DRAFT)
    return proposed


def proposal(drafter: Any, text: Told, root: int, *, first: int = 0) -> list[int]:
    return draft(drafter, text, root, first=first).tokens.tolist()


def assert_same(found: Draft, wanted: Draft) -> None:
    """The same tokens; on a GPU up to a near tie, since rows that come in other steps round otherwise."""
    assert found.logp is not None
    assert wanted.logp is not None
    for mine, its, *logp in zip(found.tokens, wanted.tokens, found.logp, wanted.logp, strict=True):
        if mine != its:
            assert abs(logp[0] - logp[1]) < DRAFT_TIE.here, (found.tokens, wanted.tokens)
            return


def test_it_accepts_far_more_than_by_chance(beside: Any, tokens: Any, kind: str) -> None:
    one, make = beside(kind)
    drafter = make()
    text = told(one, drafter.wants, tokens[2000:2600], 96)
    found = accepted(drafter, text)
    assert np.mean(found) > 0.5
    shuffled = Told(text.tokens, text.prompt, text.rows[::-1].copy())  # rows of other tokens
    assert np.mean(accepted(make(), shuffled)) < np.mean(found) / 2


def test_rows_may_come_in_any_pieces(beside: Any, tokens: Any, kind: str) -> None:
    one, make = beside(kind)
    drafter = make()
    text = told(one, drafter.wants, tokens[2000:2400], 24)
    end = len(text.tokens) - 1
    wanted = [proposal(make(), text, root) for root in range(text.prompt, end, 5)]
    found = []
    for at in range(end):
        if at >= text.prompt and (at - text.prompt) % 5 == 0:
            found.append(drafter.propose(int(text.tokens[at]), MAX_DRAFT).tokens.tolist())
        rows = text.rows[at : at + 1].copy()
        drafter.observe(at, text.tokens[at : at + 1], rows)
        rows[:] = np.nan  # the buffer is the caller's
    assert np.mean([a[:2] == b[:2] for a, b in zip(found, wanted, strict=True)]) >= 0.8  # other steps round otherwise


def test_a_cut_is_a_text_that_ends_there(beside: Any, tokens: Any, kind: str) -> None:
    """As where the end of a prompt is cut off and read again, with what it asks for."""
    one, make = beside(kind)
    text = told(one, make().wants, tokens[2000:2400], 8)
    for length in (text.prompt - QUESTION_TOKENS - LEFT_OVER, text.prompt - 20):
        drafter, wanted = make(), draft(make(), text, length)
        proposal(drafter, text, text.prompt)
        drafter.truncate(length)
        assert_same(drafter.propose(int(text.tokens[length]), MAX_DRAFT), wanted)
    # the same, told in the drafter's next rows
    proposal(drafter, text, text.prompt, first=length)
    assert_same(draft(drafter, text, length, first=length - 3), wanted)

    drafter.truncate(length - 100)  # what was known there is not kept
    assert drafter.propose(int(text.tokens[length - 100]), MAX_DRAFT) is None
    assert len(proposal(drafter, text, length, first=length - 100)) == MAX_DRAFT
    drafter.truncate(0)
    assert drafter.propose(5, MAX_DRAFT) is None
    assert_same(draft(drafter, text, length), wanted)


def test_without_rows_it_starts_anew(beside: Any, tokens: Any, kind: str) -> None:
    one, make = beside(kind)
    drafter = make()
    text = told(one, drafter.wants, tokens[2000:2400], 8)
    drafter.observe(0, text.tokens[:100], None)
    assert drafter.propose(int(text.tokens[100]), MAX_DRAFT) is None
    found = proposal(drafter, text, 300, first=150)  # behind a gap
    assert found == proposal(make(), text, 300, first=150)
    assert len(proposal(drafter, text, text.prompt, first=300)) == MAX_DRAFT


def test_one_token_after_another(beside: Any, tokens: Any, kind: str) -> None:
    """From the first token on; a chain is as long as asked, and is cut at an end."""
    one, make = beside(kind)
    drafter = make()
    text = told(one, drafter.wants, tokens[2000:2100], 4)
    assert drafter.propose(int(text.tokens[0]), MAX_DRAFT) is None
    drafter.observe(0, text.tokens[:1], text.rows[:1])
    draft = drafter.propose(int(text.tokens[1]), 6)
    assert len(draft) == 6
    assert draft.is_chain
    assert (draft.logp < 0).all()
    assert drafter.propose(int(text.tokens[1]), 1).tokens.tolist() == draft.tokens[:1].tolist()


def test_values_that_are_no_numbers(beside: Any, tokens: Any, kind: str) -> None:
    from kvflash_ggml.errors import DecodeError

    one, make = beside(kind)
    drafter = make()
    text = told(one, drafter.wants, tokens[2000:2100], 4)
    broken = Told(text.tokens, text.prompt, np.full_like(text.rows, np.nan))
    with pytest.raises(DecodeError, match="not finite"):
        proposal(drafter, broken, 50)
    drafter.truncate(0)
    assert proposal(drafter, text, 50) == proposal(make(), text, 50)
