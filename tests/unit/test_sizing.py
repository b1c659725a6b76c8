"""What "auto" and a number come to."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK, POOL_STEP
from kvflash_ggml.llama import sizing

GIB = 1 << 30
KIB = 1 << 10


def slots(n_ctx: int, free: float = 0, slot: float = 80 * KIB, **config: Any) -> int:
    size = sizing.resolve(KVFlashConfig(**config), n_ctx=n_ctx, free_bytes=int(free), slot_bytes=int(slot))
    assert size.why
    return size.slots


@pytest.mark.parametrize(
    ("free", "slot", "want"),
    [
        (12 * GIB, 80 * KIB, 16384),  # 68812 without the cap
        (8.3 * GIB, 14 * KIB, 16384),
        (2 * GIB, 80 * KIB, 3328),  # half of 0.5 GiB: 3276, up to the step
        (1.5 * GIB + 2 * 80 * KIB * 1024, 80 * KIB, 1024),  # exact
        (1.5 * GIB + 2 * 80 * KIB * 1025, 80 * KIB, 1280),
        (1.5 * GIB, 80 * KIB, 512),  # nothing free: the floor
        (0, 80 * KIB, 512),
        (-1, 80 * KIB, 512),
        (500 * GIB, 1, 16384),
    ],
)
def test_auto(free: float, slot: float, want: int) -> None:
    assert slots(131072, free, slot) == want


def test_the_cap_is_well_below_a_long_context() -> None:
    assert slots(131072, 12 * GIB) < 131072 // 2


@pytest.mark.parametrize(
    ("pool", "want"),
    [
        (1, 512),
        (256, 512),
        (512, 512),
        (513, 768),
        (4096, 4096),
        (100_000, 100_096),
        (10**9, 131072),
    ],
)
def test_a_number(pool: int, want: int) -> None:
    assert slots(131072, pool=pool) == want


@pytest.mark.parametrize("n_ctx", [1, 255, 256, 257, 300, 511, 512])
@pytest.mark.parametrize("pool", ["auto", 64, 100_000])
def test_never_above_a_small_context_and_never_zero(n_ctx: int, pool: int | str) -> None:
    assert slots(n_ctx, 12 * GIB, pool=pool) in (256, 512)
    assert slots(n_ctx, 0, pool=pool) == -(-n_ctx // POOL_STEP) * POOL_STEP


@pytest.mark.parametrize(("sinks", "tail", "want"), [(0, 1, 256), (1, 4, 512), (2, 4, 512), (3, 4, 768)])
def test_the_floor_follows_the_protections(sinks: int, tail: int, want: int) -> None:
    assert slots(131072, 0, sinks=sinks, tail=tail) == want
    assert KVFlashConfig(sinks=sinks, tail=tail).minimum_pool == want


def test_why_names_what_decided() -> None:
    def why(**keywords: Any) -> str:
        config = KVFlashConfig(pool=keywords.pop("pool", "auto"))
        defaults = {"n_ctx": 131072, "free_bytes": 12 * GIB, "slot_bytes": 80 * KIB}
        return sizing.resolve(config, **(defaults | keywords)).why

    assert "80.0 KiB a token" in why()
    assert "minimum" in why(free_bytes=0)
    assert "whole context" in why(n_ctx=512)
    assert why(pool=4096) == "4096 asked for"


@given(
    st.integers(1, 1 << 20),
    st.integers(-GIB, 200 * GIB),
    st.integers(1, 1 << 22),
    st.one_of(st.just("auto"), st.integers(1, 1 << 21)),
    st.integers(0, 5),
    st.integers(1, 9),
)
def test_always(n_ctx: int, free: int, slot: int, pool: int | str, sinks: int, tail: int) -> None:
    size = slots(n_ctx, free, slot, pool=pool, sinks=sinks, tail=tail)
    ceiling = -(-n_ctx // POOL_STEP) * POOL_STEP
    assert 0 < size <= ceiling
    assert size % POOL_STEP == 0
    assert size == ceiling or size >= (sinks + tail + 2) * CHUNK
    if pool == "auto":
        assert size <= max(sizing.SPEED_CAP, KVFlashConfig(sinks=sinks, tail=tail).minimum_pool)
    elif pool >= n_ctx:
        assert size == ceiling


def test_every_input_is_named() -> None:
    """So that two places that size a pool cannot mix up their numbers."""
    kinds = {p.kind for name, p in inspect.signature(sizing.resolve).parameters.items() if name != "config"}
    assert kinds == {inspect.Parameter.KEYWORD_ONLY}
