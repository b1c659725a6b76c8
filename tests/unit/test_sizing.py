"""What "auto" and a number come to."""

from __future__ import annotations

import ctypes
import inspect
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK, POOL_STEP
from kvflash_ggml.errors import UnsupportedModelError
from kvflash_ggml.placement import sizing
from kvflash_ggml.placement.sizes import Device

GIB = 1 << 30
KIB = 1 << 10


def lane(free: float, slot: float = 80 * KIB, *, fixed: float = 0, n_ctx: int = 131072, **config: Any) -> sizing.Lane:
    """A device with so much beyond its margin, where a context takes `fixed` bytes beside its slots."""
    least, most = sizing.bounds(KVFlashConfig(**config), n_ctx)
    small, large = (int(fixed + slot * pool) for pool in (least, most))
    return sizing.Lane(name=f"GPU{slot:.0f}", free=int(free), margin=512 << 20, small=small, large=large)


def slots(n_ctx: int, free: float = 0, slot: float = 80 * KIB, **config: Any) -> int:
    protections = {name: value for name, value in config.items() if name != "pool"}
    lanes = [lane(free, slot, n_ctx=n_ctx, **protections)]
    size = sizing.resolve(KVFlashConfig(**config), n_ctx=n_ctx, slot_bytes=int(slot), lanes=lanes)
    assert size.why
    return size.slots


@pytest.mark.parametrize(
    ("free", "slot", "want"),
    [
        (12 * GIB, 80 * KIB, 16384),  # 157286 without the cap
        (8.3 * GIB, 14 * KIB, 16384),
        (0.25 * GIB, 80 * KIB, 3072),  # 3276, down to the step
        (80 * KIB * 1024, 80 * KIB, 1024),  # exact
        (80 * KIB * 1024 - 1, 80 * KIB, 768),
        (0, 80 * KIB, 512),
        (-GIB, 80 * KIB, 512),
        (500 * GIB, 1, 16384),
    ],
)
def test_auto(free: float, slot: float, want: int) -> None:
    assert slots(131072, free, slot) == want


def test_the_device_with_the_least_room_decides_and_is_named() -> None:
    roomy, narrow = lane(8 * GIB, 40 * KIB), lane(GIB, 64 * KIB, fixed=0.75 * GIB)
    size = sizing.resolve(KVFlashConfig(), n_ctx=131072, slot_bytes=104 * KIB, lanes=[roomy, narrow])
    assert size.slots == 4096  # a quarter of a GiB, at 64 KiB
    assert size.tight == narrow
    assert f"1,024 MiB on {narrow.name} beside a margin of 512, at 104.0 KiB a token" in size.why


def test_devices_are_uneven_if_all_could_have_a_third_more() -> None:
    """The host's part is not for a split of the layers on devices to change."""

    def uneven(*rooms: float, host: float | None = None, spare: float = 0) -> bool:
        lanes = [lane(room * GIB, 64 * KIB) for room in rooms]
        lanes += [] if host is None else [replace(lane(host * GIB), name="CPU")]
        return sizing.are_uneven(lanes, int(spare * GIB), *sizing.bounds(KVFlashConfig(), 131072))

    assert uneven(0.25, 0.75)
    assert not uneven(0.4, 0.6)
    assert uneven(0.3, 0.6)
    assert not uneven(0.25)
    assert uneven(0.25, spare=0.5)
    assert not uneven(0.25, host=4)
    assert uneven(0.25, 0.75, host=4)
    assert uneven(0.7, 40)
    assert not uneven(0.8, 40)  # all that is of use


def test_what_could_not_be_made_is_halved_down_to_the_minimum() -> None:
    size = sizing.resolve(KVFlashConfig(), n_ctx=131072, slot_bytes=1, lanes=[lane(12 * GIB)])
    assert sizing.halved(size, 0, minimum=512) == size
    assert [sizing.halved(size, n, minimum=512).slots for n in (1, 2, 9)] == [8192, 4096, 512]
    assert "16384 could not be made" in sizing.halved(size, 1, minimum=512).why


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
    def why(n_ctx: int = 131072, free: float = 12 * GIB, pool: int | str = "auto") -> str:
        lanes = [lane(free)]
        return sizing.resolve(KVFlashConfig(pool=pool), n_ctx=n_ctx, slot_bytes=80 * KIB, lanes=lanes).why

    assert "80.0 KiB a token" in why()
    assert "minimum" in why(free=0)
    assert "no more are faster" in why()
    assert why(n_ctx=8192) == "auto, at 80.0 KiB a token, which is the whole context"
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


@pytest.mark.parametrize(
    ("slots", "rows", "want"),
    [
        (16384, 512, 4),
        (16384, 3, 3),
        (2688, 512, 4),  # three others have 1 + 4 + 2 chunks each: half of it
        (2432, 512, 3),
        (1024, 512, 2),
        (896, 512, 2),
        (512, 512, 1),
    ],
)
def test_sequences_of_auto(slots: int, rows: int, want: int) -> None:
    assert sizing.sequences(KVFlashConfig(parallel="auto"), slots, rows=rows) == want


def test_auto_needs_no_more_room_than_one_sequence() -> None:
    config = KVFlashConfig(parallel="auto")
    assert config.sequences == 1
    assert config.minimum_pool == KVFlashConfig().minimum_pool


@pytest.mark.parametrize(
    "more",
    [
        {"answer": "lossless"},
        {"answer": "auto"},
        {"policy": "drafter"},
        {"reading": "preview"},
        {"deterministic": True},
    ],
)
def test_auto_is_one_beside_what_serves_one(more: dict[str, Any]) -> None:
    count, why = sizing.sequences_for(KVFlashConfig(parallel="auto", **more), None, None, 16384)
    assert count == 1
    assert why.endswith("serves one")
    assert next(iter(more)) in why


@pytest.mark.parametrize(
    ("state", "free", "refused", "want", "why"),
    [
        (0, 8 * GIB, 99, 4, ""),
        (64 << 20, 8 * GIB, 99, 4, ""),  # a quarter of 1 GiB
        (80 << 20, 8 * GIB, 99, 3, ""),
        (400 << 20, 8 * GIB, 99, 2, ""),  # more than a quarter: one that never ends shall not stop all
        (400 << 20, 2 * GIB, 99, 1, "GPU has no memory for another one"),
        (0, 8 * GIB, 3, 2, ""),
        (0, 8 * GIB, 2, 1, "the model keeps one"),
    ],
)
def test_sequences_have_states_and_memory(
    state: int, free: int, refused: int, want: int, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """refused: so many sequences, and more, cannot be in a context of the model."""

    def measured(_model: int, params: Any, *, cells: int, query_rows: int) -> Any:
        if params.n_seq_max >= refused:
            raise UnsupportedModelError("the model keeps one")
        kv = cells * 64 * KIB + state * params.n_seq_max
        return SimpleNamespace(devices=[SimpleNamespace(kv=kv, compute=0, queries=0)])

    class Params(ctypes.Structure):
        _fields_ = [
            ("n_seq_max", ctypes.c_uint32), ("kv_unified", ctypes.c_bool), ("n_ubatch", ctypes.c_uint32),
            ("n_ctx", ctypes.c_uint32),
        ]  # fmt: skip

    devices = (Device(name="GPU", kind="gpu", free=free, total=8 * GIB),)
    measure = SimpleNamespace(measure=measured)
    monkeypatch.setitem(sys.modules, "kvflash_ggml.native.measure", measure)
    monkeypatch.setattr("kvflash_ggml.native.measure", measure, raising=False)
    monkeypatch.setattr(sizing, "address", lambda _model: 0)
    monkeypatch.setattr(sizing, "slot_size", lambda *_: 64 * KIB)
    monkeypatch.setattr(sizing.memory, "of_model", lambda _address: devices)
    model: Any = SimpleNamespace(model=None)
    found = sizing.sequences_for(KVFlashConfig(parallel="auto"), model, Params(1, False, 512, 16384), 16384)  # type: ignore[arg-type]
    assert found == (want, why)
