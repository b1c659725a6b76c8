"""Ctrl-C at every line of a streamed step: the session goes on, and is right."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
from support.fake_session import check, close, make, reach, small_slabs, some
from support.interrupter import Interrupter

from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.sequence import Sequence

FILES = (
    "sequence/sequence.py",
    "sequence/step.py",
    "sequence/pool.py",
    "sequence/checkpoints.py",
    "sequence/paging.py",
    "sequence/prefill.py",
    "sequence/relevance.py",
    "pool/page_table.py",
    "pool/masks.py",
)

N = 508  # four tokens more end a chunk, and all of them are more than the pool holds
PROMPT = some(N)
MORE = some(40, 2)


def session(recurrent: bool) -> Sequence:
    one = make(448, n_ctx=1024, n_batch=64, stage=1024, recurrent=recurrent)
    extend(one, PROMPT)
    return one


def go_on(one: Sequence, text: list[int], k: int) -> None:
    """Whoever has asked asks again for what is missing."""
    one.settle()
    left = one.length
    assert left <= len(text), f"line {k}"
    check(one, text[:left])
    extend(one, np.array([*text[left:], *MORE], np.int32))
    check(one, [*text, *MORE.tolist()])


@pytest.mark.slow
@pytest.mark.parametrize("recurrent", [False, True])
def test_every_line_of_a_streamed_step(recurrent: bool) -> None:
    k, interrupted = 0, True
    with small_slabs(8):
        while interrupted:
            k += 1
            one = session(recurrent)
            interrupted = Interrupter(k, FILES).run(partial(extend, one, MORE), partial(reach, one))
            one.settle()
            assert one.length in (N, N + 40), f"line {k}"
            assert one.whole[: one.length].all()
            go_on(one, [*PROMPT.tolist(), *MORE.tolist()], k)
            assert one.whole[: one.length].all()
            close(one)
    assert k > 60
