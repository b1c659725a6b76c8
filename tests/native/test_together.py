"""Several texts on one pool of a real model: what the others say and do changes no bit of mine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from support.beside import PROMPT, SHARE, Make, alike, answers, check, decode, logits_of, make
from support.harness import same_bits

from kvflash_ggml.sequence import together
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.step import LAST


def test_a_pool_is_larger_than_one_context(bare: Make, tokens: Any) -> None:
    run = bare(pool=4 * SHARE, n_ctx=2 * SHARE, n_seq_max=4, query_rows=128, policy="qk", tau=16)
    assert [text.pool.share for text in run.sessions] == [SHARE] * 4
    for text in run.sessions:
        extend(text, tokens[: 2 * SHARE - 8])
    decode(run, run.sessions, tokens[:4])


def test_alone_or_among_others_is_a_matter_of_rounding(bare: Make, tokens: Any) -> None:
    alone, among = make(bare, 4), make(bare, 4)
    prompts = [tokens[1000 * i : 1000 * i + PROMPT - 100 * i] for i in range(4)]
    script = np.stack([tokens[5000 + 100 * i :][:40] for i in range(4)], 1)
    beside = answers(among, prompts, 40, script)
    text = alone.sessions[2]
    extend(text, prompts[2])
    for step in range(40):
        (row,) = decode(alone, [text], script[step, 2:3])
        assert alike(row, beside[step][2])
    assert [c.block for c in text.table.chunks] == [c.block for c in among.sessions[2].table.chunks]
    assert text.paging.page_ins > 0


@pytest.mark.parametrize("settings", [{}, {"kind": "latent heads"}], ids=str)
def test_a_step_attends_to_the_slots_of_its_own_sequences(settings: Any, bare: Make, tokens: Any) -> None:
    """So a text that decodes alone has the bits of a pool of its own, whatever the others hold."""
    run = make(bare, 4, **settings)
    lone = [make(bare, 1, **settings) for _ in run.sessions]
    ids = tokens % run.n_vocab
    for i, text in enumerate(run.sessions):
        for one in (text, lone[i].session):
            extend(one, ids[1000 * i :][: 800 - 200 * i])
    found = []
    for at, token in enumerate(ids[5000:5012]):
        for i in (at % 4, 3):
            (mine,), (its,) = decode(run, run.sessions[i : i + 1], [token]), decode(lone[i], lone[i].sessions, [token])
            found.append(same_bits(mine, its))
    assert all(found)


def test_with_a_fixed_number_of_rows_alone_or_among_others_are_the_same_bits(bare: Make, tokens: Any) -> None:
    """Among others or alone, beside texts that wait, have drafts, or are not there. It matters on some CPUs only."""
    settings = {"kind": "packed", "fixed_rows": True}
    alone, among = make(bare, 8, **settings), make(bare, 8, **settings)
    mine, its = alone.sessions[2], among.sessions[2]
    ids = tokens % alone.n_vocab
    for text in (mine, its):
        extend(text, ids[:700])
    for i, text in enumerate(among.sessions[3:7]):
        extend(text, ids[1000 * i :][: 300 + i])
    found = []
    for at, token in enumerate(ids[700:760]):
        beside = among.sessions[3 : 3 + at % 5]
        script = ids[5000 + 10 * at :][: len(beside)].tolist()
        (row,) = decode(alone, [mine], [token])
        rows = decode(among, [its, *beside], [token, *script])
        found.append(same_bits(row, rows[0]))
    assert all(found)


def test_a_prompt_beside_texts_that_decode(bare: Make, tokens: Any) -> None:
    """Rows of a prompt and of answers are of one step, and each text has the logits of its own."""
    run, alone = make(bare, 2), make(bare, 2)
    for one in (run, alone):
        extend(one.sessions[0], tokens[:PROMPT])
    text, reader = run.sessions
    steps = []
    for at in range(0, 4):
        text.begin(1)
        reader.begin(40)
        mine = text.prepare_answer(tokens[PROMPT + at : PROMPT + at + 1], LAST)
        its = reader.prepare(tokens[3000 + 40 * at : 3040 + 40 * at], LAST)
        assert together.compute([(reader, its), (text, mine)]) == [None, None]
        check(run)
        (row,) = decode(alone, alone.sessions[:1], tokens[PROMPT + at : PROMPT + at + 1])
        steps.append(alike(row, logits_of(run, text)))
    assert all(steps)
    fresh = alone.sessions[1]
    extend(fresh, tokens[3000:3160])
    assert alike(logits_of(alone, fresh), logits_of(run, reader))


@pytest.mark.parametrize("kind", ["of qwen3moe", "latent heads"])
def test_other_models_of_pooled_attention(kind: str, bare: Make, tokens: Any) -> None:
    """Experts, and heads that share one latent key."""
    found = []
    for beside in (0, 3000):
        run = make(bare, 2, kind=kind)
        ids = tokens % run.n_vocab
        script = np.stack([ids[beside + 5000 :][:8], ids[6000:6008]], 1)
        rows = answers(run, [ids[beside : beside + 700], ids[1500:2200]], 8, script)
        found.append([row[1] for row in rows])
    assert all(same_bits(a, b) for a, b in zip(*found, strict=True))
