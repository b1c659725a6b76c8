"""Ctrl-C at every line of a verification and of what is accepted of it: the text has the tokens kept until then."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session
from support.fake_session import accept, reach
from support.integrity import check_table
from support.interrupter import Interrupter

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.sequence import Sequence

FILES = (
    "sequence/sequence.py",
    "sequence/step.py",
    "sequence/pool.py",
    "sequence/copies.py",
    "sequence/checkpoints.py",
    "pool/page_table.py",
)

PROMPT = np.arange(10, 10 + 508, dtype=np.int32)
DRAFT = np.arange(1000, 1012, dtype=np.int32)
MORE = np.arange(2000, 2005, dtype=np.int32)


def session(recurrent: bool) -> Sequence:
    """Just before the end of a chunk, on a pool that is full."""
    engine = FakeEngine(448, 128, recurrent=recurrent, query_rows=16)
    one = make_session(engine, KVFlashConfig(pool=448, tail=2), n_ctx=2048, n_batch=128, n_ubatch=128)
    extend(one, PROMPT)
    return one


@pytest.mark.slow
@pytest.mark.parametrize(("accepted", "recurrent"), [(0, True), (6, False), (6, True)])
def test_every_line(accepted: int, recurrent: bool) -> None:
    k, interrupted = 0, True
    while interrupted:
        k += 1
        one = session(recurrent)

        def work(one: Sequence = one) -> None:
            one.finish(one.prepare_drafts(DRAFT, None))
            accept(one, accepted)

        interrupted = Interrupter(k, FILES).run(work, partial(reach, one))
        one.settle()
        assert one.ahead == 0
        assert len(PROMPT) <= one.length <= len(PROMPT) + accepted, f"line {k}"
        text = [*PROMPT, *DRAFT][: one.length]
        for token in MORE:
            extend(one, np.array([token], np.int32))
        check(one, [*text, *MORE], k)
        one.close()
    assert k > 100


def check(one: Sequence, text: list[Any], k: int) -> None:
    engine: Any = one.engine
    assert one.tokens.tolist() == text, f"line {k}"
    assert engine.tokens[: len(text)] == text, f"line {k}: the device has read something else"
    check_table(one.table)
