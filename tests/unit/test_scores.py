"""A policy that somebody else has written: what it returns is checked, what it raises is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session
from support.saving import Digest

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import ConfigError


class Foreign(Digest):
    """Returns, or raises, what it is told to."""

    name = "foreign"

    def __init__(self) -> None:
        self.answer: Callable[[int], Any] = lambda n: np.zeros(n, np.float32)
        self.trouble: Exception | None = None

    def seal(self, chunk: int) -> None:
        if self.trouble is not None:
            raise self.trouble
        super().seal(chunk)

    def score(self, look: Any) -> Any:
        return self.answer(look.n_chunks)


@pytest.fixture(params=[False, True], ids=["sync", "async"])
def session(request: pytest.FixtureRequest) -> Any:
    engine = FakeEngine(512, 128, query_rows=4, asynchronous=request.param)
    config = KVFlashConfig(pool=512, tail=2, tau=4)
    session = make_session(engine, config, n_ctx=2048, n_batch=128, n_ubatch=128, scorer=Foreign())
    yield session
    session.close()


def test_a_policy_that_cannot_be_opened_leaves_nothing_behind() -> None:
    class Closed(Foreign):
        def open(self, keys: Any, n_chunks: int) -> None:
            assert engine.allocated > 0, "room for queries"
            raise RuntimeError("shut")

    engine = FakeEngine(512, 128, query_rows=4, asynchronous=True)
    with pytest.raises(RuntimeError, match="shut"):
        make_session(engine, KVFlashConfig(pool=512), n_ctx=2048, n_batch=128, n_ubatch=128, scorer=Closed())
    assert engine.allocated == 0


def some(count: int) -> np.ndarray[Any, Any]:
    return np.arange(count, dtype=np.int32)


WRONG: list[Callable[[int], Any]] = [
    lambda n: [0.0] * n,
    lambda n: 1.0,
    lambda n: np.float32(1),
    lambda n: np.zeros((n, 2), np.float32),
    lambda n: np.zeros(n - 1, np.float32),
    lambda n: np.zeros(n + 1, np.float32),
    lambda n: np.zeros(0, np.float32),
    lambda n: np.zeros(n, np.complex64),
    lambda n: np.zeros(n, object),
    lambda n: np.where(np.arange(n) == 1, np.nan, 0.0).astype(np.float32),
]


@pytest.mark.parametrize("wrong", WRONG)
def test_what_are_no_scores_is_refused_by_name(wrong: Callable[[int], Any], session: Any) -> None:
    session.scoring.scorer.answer = wrong
    with pytest.raises(ConfigError, match="policy 'foreign' returned"):
        session.extend(some(1000))
    session.scoring.scorer.answer = lambda n: np.zeros(n, np.float32)
    session.reset()
    session.extend(some(1000))
    assert session.length == 1000


@pytest.mark.parametrize("right", [lambda n: None, lambda n: np.full(n, -np.inf), lambda n: np.arange(n, dtype="f8")])
def test_what_are_scores_is_taken(right: Callable[[int], Any], session: Any) -> None:
    session.scoring.scorer.answer = right
    session.extend(some(1000))
    assert session.length == 1000


@pytest.mark.parametrize("error", [KeyError("mine"), ValueError("mine")])
def test_an_error_while_a_chunk_is_sealed_is_told(error: Exception, session: Any) -> None:
    """A chunk without statistics would be scored at random."""
    session.scoring.scorer.trouble = error
    with pytest.raises(type(error), match="mine"):
        session.extend(some(1000))
