"""Rung 8: a text that is read through stages computes the bits of the full cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import KV_TYPES, same_bits

KINDS = ("dense", "hybrid", "iswa", "latent", "uneven")
POOL = 768


@pytest.mark.parametrize("kv", list(KV_TYPES.values()))
@pytest.mark.parametrize("kind", KINDS)
def test_streamed_equals_stock(kind: str, kv: int, bare: Callable[..., Any], tokens: Any) -> None:
    """A ragged text of five pools, then a few tokens, each attending to all of it."""
    size = {"n_ctx": 4096, "n_ubatch": 256, "type_kv": kv}
    prompt, rest = tokens[:3797], tokens[3797:3801].tolist()
    streamed = bare(kind, pool=POOL, stages=4096, answers_exactly=True, **size)
    rows = streamed.logits_along(prompt, rest)
    session = streamed.session
    assert session.outgrown
    assert session.streamed_steps > len(rest)
    assert session.engine.streamed_bytes > session.engine.info.page_bytes * 59
    assert session.whole[: session.length].all()
    assert same_bits(rows, bare(kind, pool=4096, **size).logits_along(prompt, rest))
