"""What `reading`, `stage`, and `answer` come to: the settings, the stages, and what is said of a request."""

from __future__ import annotations

from typing import Any

import pytest
from support.fake_engine import FakeDevice, FakeEngine, FakeLayer

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import ConfigError, DeviceLimit, HostMemoryError, UnsupportedError
from kvflash_ggml.llama.reading import SHARE, StageRoom, open_reading, rooms, stage_slots
from kvflash_ggml.placement.buffers import MASK
from kvflash_ggml.sequence.pool import Pool
from kvflash_ggml.sequence.reading import ReadStats

GIB = 1 << 30


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"reading": "all"}, "'all'"),
        ({"reading": None}, "None"),
        ({"answer": "all"}, "'all'"),
        ({"reading": "pool", "answer": "auto"}, "answer='auto'"),
        ({"stage": 0}, "0"),
        ({"stage": 1.5}, "1.5"),
        ({"stage": True}, "True"),
        ({"reading": "pool", "answer": "exact"}, "answer='exact'"),
    ],
)
def test_refused(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        KVFlashConfig(**fields)


def test_accepted() -> None:
    config = KVFlashConfig(reading="exact", stage=1, answer="exact")
    assert (config.reading, config.stage, config.answer) == ("exact", 1, "exact")
    KVFlashConfig(reading="pool", stage=512)


# --- how large


def one(free: int, slot_bytes: int, name: str = "CUDA0", bound: int | None = None) -> StageRoom:
    return StageRoom(name=name, free=free, slot_bytes=slot_bytes, row=100, bound=bound)


def test_stages_are_as_large_as_asked_for_but_for_the_context() -> None:
    for asked, want in ((1, 256), (512, 512), (513, 768), (10**9, 4096)):
        slots, why = stage_slots(asked, n_ctx=4000, rooms=[one(0, 1)])
        assert slots == want
        assert str(asked) in why


def test_stages_take_a_share_of_what_is_free() -> None:
    assert stage_slots(None, n_ctx=4000, rooms=[one(GIB, 1)]) == (4096, "the whole context")
    exact = 4096 * 1000 * SHARE
    assert stage_slots(None, n_ctx=4096, rooms=[one(exact, 1000)])[0] == 4096
    slots, why = stage_slots(None, n_ctx=4096, rooms=[one(exact - 1, 1000)])
    assert slots == 4096 - 256
    assert "MiB" in why
    for free in (0, -GIB):
        assert stage_slots(None, n_ctx=4096, rooms=[one(free, 1000)])[0] == 0


def test_the_device_with_the_least_room_decides() -> None:
    """By what a token takes there, not by its memory alone."""
    both = [one(GIB, 1000), one(2 * GIB, 4000, "CUDA1")]
    for order in (both, both[::-1]):
        slots, why = stage_slots(None, n_ctx=10**6, rooms=order)
        assert slots == both[1].slots < both[0].slots
        assert "on CUDA1" in why


def test_a_layer_buffer_is_no_larger_than_what_a_device_computes_on() -> None:
    bounded = one(GIB, 1, "Vulkan0", bound=100 * 1000)
    assert stage_slots(None, n_ctx=4096, rooms=[one(GIB, 1), bounded]) == (768, "the largest tensor of Vulkan0")
    assert stage_slots(None, n_ctx=512, rooms=[bounded]) == (512, "the whole context")
    assert stage_slots(768, n_ctx=4096, rooms=[bounded])[0] == 768
    with pytest.raises(
        DeviceLimit, match=r"1,024 tokens takes .* Vulkan0 .* at most 768 tokens \(kvflash_stage"
    ) as found:
        stage_slots(769, n_ctx=4096, rooms=[bounded])
    assert (found.value.device, found.value.needed, found.value.limit) == ("Vulkan0", 102_400, 100_000)
    (room,) = rooms([FakeLayer(k_row=100, v_row=50)], [FakeDevice(largest_bytes=51_200)], 1, {"CPU": GIB})
    assert room.most == 512


def test_what_a_token_takes() -> None:
    """Layers of one shape on one device share stages; there are two where the next layer is copied meanwhile."""
    plain, beside = FakeDevice(), FakeDevice(name="CUDA0", mode="stream")
    free = {"CPU": 5, "CUDA0": 7}

    def taken(layers: Any, devices: Any, n_ubatch: int) -> list[int]:
        found = rooms(layers, devices, n_ubatch, free)
        assert [room.free for room in found] == [free[device.name] for device in devices]
        return [room.slot_bytes for room in found]

    layers: Any = [FakeLayer(k_row=100, v_row=50)] * 8
    assert taken(layers, [plain], 512) == [150 + MASK * 512]
    assert taken(layers, [beside], 512) == [300 + MASK * 512]
    layers += [FakeLayer(k_row=10, v_row=0), FakeLayer(k_row=100, v_row=50, device=1)]
    assert taken(layers, [plain, beside], 1) == [150 + 10 + MASK, 300 + MASK]


# --- what is made


def reading(engine: FakeEngine, *, free: int = GIB, n_ctx: int = 4096, **config: Any) -> Any:
    pool = Pool(engine, n_ubatch=64)  # type: ignore[arg-type]
    try:
        return open_reading(KVFlashConfig(**config), pool, n_ctx=n_ctx, free={"CPU": free}), pool
    finally:
        pool.close()


def test_all_of_the_text_is_seen_where_there_is_memory() -> None:
    engine = FakeEngine(512, 64)
    got, pool = reading(engine)
    assert (got.exact, got.answers_exactly, got.why) == (True, False, "the whole context")
    assert engine.stages.slots == pool.stage_slots == 4096
    assert pool.stage_bytes > 0
    assert reading(FakeEngine(512, 64), answer="exact")[0].answers_exactly


@pytest.mark.parametrize(
    ("config", "why"),
    [({"n_ctx": 512}, "whole context"), ({"reading": "pool"}, "asked for"), ({"free": 0}, "pool of 512")],
)
def test_the_pool_is_what_is_seen(config: dict[str, Any], why: str) -> None:
    engine = FakeEngine(512, 64)
    got, pool = reading(engine, **config)
    assert not got.exact
    assert why in got.why
    assert engine.stages.slots == pool.stage_slots == 0


REQUIRED: tuple[dict[str, Any], ...] = ({"reading": "exact"}, {"answer": "exact"})


@pytest.mark.parametrize("config", REQUIRED)
def test_what_was_asked_for_and_does_not_fit_is_an_error(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="stages of 0 tokens"):
        reading(FakeEngine(512, 64), free=0, **config)
    with pytest.raises(ConfigError, match="stages of 512 tokens"):
        reading(FakeEngine(512, 64), stage=400, **config)


@pytest.mark.parametrize("error", [UnsupportedError("layer 3 attends"), HostMemoryError("no memory for stages")])
def test_stages_that_are_refused(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(512, 64)
    engine.stages.refuse = error
    got, pool = reading(engine)
    assert not got.exact
    assert pool.stage_slots == 0
    assert got.why == str(error)
    assert str(error) in caplog.text
    for config in REQUIRED:
        engine = FakeEngine(512, 64)
        engine.stages.refuse = error
        with pytest.raises(type(error), match=str(error)):
            reading(engine, **config)


# --- what is counted


def test_what_was_lost() -> None:
    loss = ReadStats()
    assert loss.view is None
    loss.add_read(100, 1)
    assert (loss.read, loss.read_whole, loss.view) == (100, 100, 1)
    loss.add_read(300, 0.5)
    assert (loss.read, loss.read_whole, loss.view) == (400, 100, 0.625)
