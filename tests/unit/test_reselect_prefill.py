"""A policy is asked while a prompt is read, unless the configuration leaves that to the prompt's end."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.sequence.prefill import extend


class First:
    """Wants the beginning of the text, and remembers how much text there was at each look."""

    name = "first"
    query_rows = 0
    index_bytes = 0

    def __init__(self):
        self.looks = []

    def open(self, keys, n_chunks): ...

    def seal(self, chunk): ...

    def truncate(self, n_chunks): ...

    def score(self, look):
        self.looks.append(len(look.tokens))
        return -np.arange(look.n_chunks, dtype=np.float32)

    def close(self): ...


def read(length, **config):
    engine, scorer = FakeEngine(1024, 128), First()
    made = KVFlashConfig(pool=1024, **config)
    session = make_session(engine, made, n_ctx=4096, n_batch=128, n_ubatch=128, scorer=scorer)
    extend(session, np.arange(length, dtype=np.int32))
    return session, scorer.looks


def test_by_default_it_looks_after_every_step():
    session, looks = read(2048)
    assert looks == sorted({*range(128, 2048, 128), 2048 - CHUNK, 2048})
    assert set(range(8)) <= set(session.table.resident_chunks)
    session.close()


@pytest.mark.parametrize("length", [2048, 640])
def test_or_at_the_end_only(length):
    session, looks = read(length, reselect_prefill=False)
    assert looks == [length]
    assert set(range(8)) <= set(session.table.resident_chunks)
    session.close()
