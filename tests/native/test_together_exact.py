"""Exact reading beside other texts: a streamed step is of one text, and the others decode between two of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.beside import N_CTX, PROMPT, SHARE, Make, check, decode, logits_of, make
from support.harness import Bare, Logits, same_bits

from kvflash_ggml.errors import DecodeError, EngineError
from kvflash_ggml.sequence import together
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.step import LAST

STEP = 128


def read(run: Bare, text: Any, prompt: Any, between: Callable[[int], object] = lambda at: None) -> list[Logits]:
    """The logits at the end of each step of a prompt. between: called before each but the first, with its number."""
    rows = []
    for at in range(0, len(prompt), STEP):
        if at:
            between(at // STEP)
        part = prompt[at : at + STEP]
        text.begin(len(part))
        text.compute(text.prepare(part, LAST, stream=True))
        rows.append(logits_of(run, text))
        check(run)
    return rows


@pytest.mark.parametrize("seq", [0, 2])
@pytest.mark.parametrize("kind", ["dense", "latent heads", "of qwen3moe"])
def test_a_text_that_is_read_exactly_beside_others_has_the_bits_of_a_context_of_its_own(
    seq: int, kind: str, bare: Make, tokens: Any
) -> None:
    run = make(bare, 3, kind=kind, stages=N_CTX)
    alone = bare(kind, pool=SHARE, n_ctx=N_CTX, query_rows=32, policy="qk", tau=16, stages=N_CTX)
    ids = tokens % run.n_vocab
    text, others = run.sessions[seq], [x for x in run.sessions if x.seq != seq]
    for each in others:
        extend(each, ids[3000 : 3000 + 300 * (1 + each.seq)])
    script = iter(ids[7000:].tolist())

    def between(at: int) -> None:
        for _ in range(at):
            decode(run, others, [next(script), next(script)])

    beside = read(run, text, ids[:PROMPT], between)
    assert all(same_bits(a, b) for a, b in zip(beside, read(alone, alone.session, ids[:PROMPT]), strict=True))
    assert text.streamed_steps == alone.session.streamed_steps > 0
    assert [c.block - seq * SHARE // 64 for c in text.table.chunks if c.block >= 0] == [
        c.block for c in alone.session.table.chunks if c.block >= 0
    ]
    for token in ids[PROMPT : PROMPT + 16]:  # answers see the pool
        decode(run, others, [next(script), next(script)])
        (mine,) = decode(run, [text], [token])
        (its,) = decode(alone, [alone.session], [token])
        assert same_bits(mine, its)


def test_an_answer_that_streams_takes_turns_with_those_that_do_not(bare: Make, tokens: Any) -> None:
    run = make(bare, 2, stages=N_CTX, answers_exactly=True)
    alone = bare(pool=SHARE, n_ctx=N_CTX, query_rows=32, policy="qk", tau=16, stages=N_CTX, answers_exactly=True)
    other, text = run.sessions
    extend(other, tokens[3000:3400])
    read(run, text, tokens[:PROMPT])
    read(alone, alone.session, tokens[:PROMPT])
    for at, token in enumerate(tokens[PROMPT : PROMPT + 8]):
        decode(run, [other], [tokens[8000 + at]])
        (mine,) = decode(run, [text], [token])
        (its,) = decode(alone, [alone.session], [token])
        assert same_bits(mine, its)
        assert text.whole[text.length - 1]
    assert text.streamed_steps == alone.session.streamed_steps


def test_a_streamed_step_that_fails_is_its_own(bare: Make, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It leaves no trace, and the others and the text go on with the bits of a run without that."""
    found = []
    for fails in (False, True):
        run = make(bare, 2, stages=N_CTX)
        other, text = run.sessions
        extend(other, tokens[3000:3400])
        read(run, text, tokens[:1024])
        if fails:
            text.begin(100)
            with monkeypatch.context() as patch:
                patch.setattr(type(run.session.engine), "step", _refuse)
                (error,) = together.compute([(text, text.prepare(tokens[1024:1124], LAST, stream=True))])
            assert isinstance(error, DecodeError)
            check(run)
        rows = decode(run, [other], [7])
        found.append(rows + read(run, text, tokens[1024:1152]))
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))


def _refuse(self: Any, count: int, wait: int, codes: list[int], streamed: Any = None, rows: Any = None) -> None:
    assert streamed is not None
    codes.append(-5)
    raise DecodeError("llama_decode returned 2")


def test_a_streamed_step_is_of_one_sequence(bare: Make, tokens: Any) -> None:
    run = make(bare, 2, stages=N_CTX)
    for text in run.sessions:
        extend(text, tokens[:PROMPT])
    one, other = run.sessions
    steps = [text.prepare(tokens[:1], LAST, stream=True) for text in (one, other)]
    view = steps[0].view
    assert view is not None
    seen = view, steps[0].plan.layout, one.pool.stage_mask, one.length, 1, LAST.wanted
    with one.paging.streamed(*seen) as steps[0].streamed, pytest.raises(EngineError, match="sequences 0 and 1"):
        one.pool.run(steps)
