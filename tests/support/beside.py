"""Several texts on one pool of a real model, and what has to hold of each after every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import NotFinite
from kvflash_ggml.sequence import together
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.step import LAST
from support.harness import Bare, Logits
from support.integrity import check_table
from support.rounding import LOGITS, near

Make = Callable[..., Bare]

SHARE = 512
N_CTX = 4096
PROMPT = 1200


def make(bare: Make, count: int, **settings: Any) -> Bare:
    usual = {"policy": "qk", "tau": 16}
    run = bare(pool=count * SHARE, n_ctx=N_CTX, n_seq_max=count, query_rows=32 * count, **(usual | settings))
    assert run.session.bounded
    return run


def decode(run: Bare, texts: Sequence[Any], tokens: Sequence[int]) -> list[Logits]:
    """The logits of each text after one token more, of one step."""
    steps = []
    for text, token in zip(texts, tokens, strict=True):
        text.begin(1)
        steps.append((text, text.prepare_answer(np.array([token], np.int32), LAST)))
    assert together.compute(steps) == [None] * len(texts)
    check(run)
    return [logits_of(run, text) for text in texts]


def logits_of(run: Bare, text: Any) -> Logits:
    row = text.logits.row(text.length - 1)
    return np.ctypeslib.as_array(run._ctx.get_logits_ith(row), shape=(run.n_vocab,)).copy()


def check(run: Bare) -> None:
    """Cells, tables and mask rows, each from the tokens that a text has."""
    engine = run.session.engine
    held = engine.cells(0, engine.info.n_slots)
    free = np.ones(len(held), bool)
    for text in run.sessions:
        if text.ahead:
            continue  # its rows wait to be settled
        check_table(text.table)
        mine = np.full(len(held), -1)
        for c, chunk in enumerate(text.table.chunks):
            if chunk.block >= 0:
                n = min(CHUNK, text.length - c * CHUNK)
                mine[chunk.block * CHUNK :][:n] = c * CHUNK + np.arange(n)
        part = (np.array(text.table.blocks.order, np.intp)[:, None] * CHUNK + np.arange(CHUNK)).ravel()
        assert held[part].tolist() == mine[part].tolist()
        free[part] = False
        for row, owner in enumerate(text.pool.rows.owners):
            if owner is text.mask and text.view is None and text.logits.row(text.length - 1) == row:
                assert (np.isfinite(text.pool.rows.data[row].astype(np.float32)) == (mine >= 0)).all()
    if not any(text.ahead for text in run.sessions):
        assert (held[free] == -1).all(), "rows of no text stay"


def answers(run: Bare, prompts: Sequence[Any], steps: int, script: Any) -> list[list[Logits]]:
    """Prompts are read one after the other, then all texts go on together; `script` has the tokens, [steps, texts]."""
    for text, prompt in zip(run.sessions, prompts, strict=True):
        extend(text, prompt)
    return [decode(run, run.sessions, script[step]) for step in range(steps)]


def alike(mine: Logits, its: Logits) -> bool:
    return near(its, mine, LOGITS)


def spoil(engine: Any, block: int) -> None:
    """The rows of a block are no numbers."""
    size = engine.info.page_bytes
    image = engine.alloc(size)
    engine.view(image, size)[:] = np.full(size // 2, np.nan, np.float16).tobytes()
    engine.wait(engine.page_in([block], [image]))
    engine.free(image)


def all_finite(engine: Any) -> bool:
    """Are K and V of all slots finite, those of no text too? They are f16."""
    size, blocks = engine.info.page_bytes, engine.info.n_slots // CHUNK
    image = engine.alloc(size * blocks)
    engine.wait(engine.page_out([*range(blocks)], [image + size * block for block in range(blocks)]))
    finite = bool(np.isfinite(np.frombuffer(engine.view(image, size * blocks), np.float16)).all())
    engine.free(image)
    return finite


def spread(engine: Any) -> None:
    """Let steps of several texts be as with upstream's attention on a GPU: a slot that is not finite spoils all."""
    step, argmax, seqs = engine.step, engine.argmax, set[int]()

    def noted(count: int, *rest: Any) -> None:
        seqs.clear()
        seqs.update(engine.seq[:count].tolist())
        step(count, *rest)

    def spoilt(rows: Sequence[int]) -> Any:
        if len(seqs) > 1 and not all_finite(engine):
            raise NotFinite("a slot is not finite")
        return argmax(rows)

    engine.step, engine.argmax = noted, spoilt
