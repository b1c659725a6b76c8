"""Rung 8: a text that is read through stages computes the bits of the full cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.harness import KV_TYPES, same_bits

POOL = 512
N_CTX = 2048
F16, Q8 = KV_TYPES["f16"], KV_TYPES["q8_0"]
CASES = [("dense", kv) for kv in KV_TYPES.values()]
CASES += [(kind, kv) for kind in ("hybrid", "iswa") for kv in (F16, Q8)]
CASES += [("latent", F16), ("uneven", F16)]


@pytest.mark.parametrize(("kind", "kv"), CASES)
def test_streamed_equals_stock(kind: str, kv: int, bare: Callable[..., Any], tokens: Any) -> None:
    """A ragged text of more than three pools, then a few tokens, each attending to all of it."""
    size = {"n_ctx": N_CTX, "n_ubatch": 128, "type_kv": kv}
    prompt, rest = tokens[:1797] % 128, (tokens[1797:1801] % 128).tolist()
    streamed = bare(kind, pool=POOL, stages=N_CTX, answers_exactly=True, **size)
    rows = streamed.logits_along(prompt, rest)
    session = streamed.session
    assert session.outgrown
    assert session.streamed_steps > len(rest)
    assert session.engine.streamed_bytes > session.engine.info.page_bytes * 27
    assert session.whole[: session.length].all()
    assert same_bits(rows, bare(kind, pool=N_CTX, **size).logits_along(prompt, rest))


def test_the_host_runs_ahead(bare: Callable[..., Any], tokens: Any) -> None:
    """Pages that a streamed step reads are not free before it has: they know the transfer."""
    session = bare(pool=POOL, stages=N_CTX, n_ctx=N_CTX, n_ubatch=128).session
    session.extend(tokens[:1000])
    ticket = session.engine.streamed_ticket
    assert ticket > 0
    assert {session.store.ticket(c) for c in range((1000 - 104) // 64)} == {ticket}
