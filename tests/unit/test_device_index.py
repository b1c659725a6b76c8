"""Index rows on a device: it has those of the text at hand, whatever happened to the text before."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.policy.base import KeyShape, ScoreRequest
from kvflash_ggml.sequence.keys import HostKeys, Room

ROW = 16
SHAPE = KeyShape(n_head=1, n_head_kv=1, head=1, scale=1.0)
HEADS = np.zeros((1, 2), np.int32)


class Device:
    """Memory for index rows, whose score is the number that a row begins with; below zero on the host."""

    layers = ()

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.copied = self.on_host = 0

    def put_index(self, offset: int, addresses: npt.NDArray[np.uint64], size: int) -> None:
        assert size == ROW
        for i, address in enumerate(addresses.tolist()):
            self.memory[offset + i * size :][:size] = self._at(address)
        self.copied += len(addresses)

    def score_device_index(self, units: Any, heads: Any, offset: int, count: int, rows: int, queries: Any) -> Any:
        there = self.memory[offset : offset + count * ROW].reshape(count, ROW)
        return there[:, :4].copy().view(np.float32).T

    def score_index(self, units: Any, heads: Any, addresses: Any, rows: int, queries: Any, threads: int) -> Any:
        self.on_host += len(addresses)
        values = [self._at(address)[:4].view(np.float32)[0] for address in addresses.tolist()]
        return -np.array([values], np.float32)

    @staticmethod
    def _at(address: int) -> npt.NDArray[np.uint8]:
        import ctypes

        return np.frombuffer((ctypes.c_uint8 * ROW).from_address(address), np.uint8)


def row(number: int) -> npt.NDArray[np.uint8]:
    out = np.zeros(ROW, np.uint8)
    out[:4].view(np.float32)[0] = number
    return out


def text(device: Device, room: Room) -> HostKeys:
    keys = HostKeys(device, None, threads=1, room=lambda: room)  # type: ignore[arg-type]
    keys.shapes = [SHAPE]
    return keys


def scored(keys: HostKeys, rows: list[npt.NDArray[np.uint8]]) -> list[float]:
    request = ScoreRequest(
        tokens=np.zeros(1, np.int32), n_chunks=len(rows), rows=1, queries=np.zeros(1, np.float32), protected=frozenset()
    )
    return list(keys.score_index(HEADS, rows, HEADS, request)[0].tolist())


def test_a_row_is_copied_once() -> None:
    device = Device(8 * ROW)
    keys, rows = text(device, Room(0, 8 * ROW)), [row(i) for i in range(1, 6)]
    assert scored(keys, rows[:3]) == [1, 2, 3]
    assert scored(keys, rows) == [1, 2, 3, 4, 5]
    assert scored(keys, rows[:5]) == [1, 2, 3, 4, 5]
    assert (device.copied, device.on_host) == (5, 0)


def test_the_host_scores_what_has_no_room() -> None:
    device = Device(3 * ROW)
    keys, rows = text(device, Room(0, 3 * ROW + 1)), [row(i) for i in range(1, 6)]
    assert keys.on_host(5) == 5, "no row was there yet, so their size is not known"
    assert scored(keys, rows) == [1, 2, 3, -4, -5]
    assert [keys.on_host(n) for n in (2, 3, 5)] == [0, 0, 2]


def test_without_room_the_host_scores_all() -> None:
    keys = HostKeys(Device(0), None, threads=1)  # type: ignore[arg-type]
    keys.shapes = [SHAPE]
    assert scored(keys, [row(1), row(2)]) == [-1, -2]
    assert keys.on_host(2) == 2


@given(st.data())
def test_it_scores_the_rows_of_now(data: st.DataObject) -> None:
    """Two texts that grow, are cut and are replaced by others, with room for six rows each."""
    device = Device(12 * ROW)
    texts = [text(device, Room(seq * 6 * ROW, 6 * ROW)) for seq in range(2)]
    held: list[list[npt.NDArray[np.uint8]]] = [[], []]
    number = 0
    for _ in range(data.draw(st.integers(1, 20))):
        seq = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["grow", "cut", "replace", "some"])):
            case "grow":
                for _ in range(data.draw(st.integers(1, 4))):
                    number += 1
                    held[seq].append(row(number))
            case "cut":
                left = data.draw(st.integers(0, len(held[seq])))
                del held[seq][left:]
                texts[seq].truncate(left)
            case "replace":
                held[seq] = [row(number + i) for i in range(1, data.draw(st.integers(2, 9)))]
                number += 10
            case "some" if len(held[seq]) > 1:
                some = held[seq][data.draw(st.integers(1, len(held[seq]) - 1)) :]
                assert list(map(abs, scored(texts[seq], some))) == [float(r[:4].view(np.float32)[0]) for r in some]
        if held[seq]:
            found = scored(texts[seq], held[seq])
            wanted = [float(r[:4].view(np.float32)[0]) for r in held[seq]]
            assert found == [x if i < 6 else -x for i, x in enumerate(wanted)]


@pytest.mark.parametrize("size", [0, 1, 256, 257])
def test_texts_do_not_share_room(size: int) -> None:
    from support.fake_engine import FakeEngine

    from kvflash_ggml.sequence.pool import Pool

    engine = FakeEngine(2048, 512, n_seq=2)
    taken: list[int] = []
    engine.open_index = lambda whole: taken.append(whole) or whole  # type: ignore[attr-defined]
    pool = Pool(engine, n_ubatch=512)  # type: ignore[arg-type]
    assert pool.index_room(1) == Room(0, 0)
    pool.make_index(size)
    first, second = pool.index_room(0), pool.index_room(1)
    assert first.offset + first.size <= second.offset
    assert second.offset + second.size <= taken[0] == pool.index_bytes
    assert min(first.size, second.size) >= size
    assert second.offset % 16 == 0


def test_the_host_scores_while_several_texts_decode() -> None:
    device = Device(8 * ROW)
    keys, rows = text(device, Room(0, 8 * ROW)), [row(i) for i in range(1, 4)]
    assert scored(keys, rows) == [1, 2, 3]
    keys.alone = False
    assert scored(keys, rows) == [-1, -2, -3]
    keys.alone = True
    assert scored(keys, rows) == [1, 2, 3]
    assert device.copied == 3


@pytest.mark.parametrize("tau", [None, 8])
def test_a_text_says_whether_it_is_alone(tau: int | None) -> None:
    from support.fake_engine import FakeEngine, make_session

    from kvflash_ggml.config import KVFlashConfig
    from kvflash_ggml.policy.qk import QKScorer

    opened: list[Any] = []

    class Watched(QKScorer):
        def open(self, keys: Any, n_chunks: int) -> None:
            opened.append(keys)
            super().open(keys, n_chunks)

    engine, config = FakeEngine(512, 128, query_rows=40), KVFlashConfig(pool=512, tau=tau)
    one = make_session(engine, config, n_ctx=8192, n_batch=128, n_ubatch=128, scorer=Watched())
    assert one.scoring is not None
    for decoding in (1, 2, 1):
        one.pool.decoding = decoding
        one.scoring.truncate(0)
        assert opened[0].alone == (decoding == 1)
    one.close()


GPU = {"name": "CUDA0", "kind": "gpu", "free": 1 << 34, "total": 1 << 34}


@pytest.mark.parametrize(
    ("device", "weights", "want"),
    [
        ({"overlaps": True}, 10**9, 2 * 4096 * 2 * 4 * 18),
        ({"overlaps": True}, 10**11, 0),
        ({"overlaps": False}, 10**9, 0),
        ({"overlaps": True, "kind": "remote"}, 10**9, 0),
    ],
)
def test_a_placement_counts_it(device: dict[str, Any], weights: int, want: int) -> None:
    """Two layers with an index, of two KV heads of 128 values in 4 blocks; another one has none."""
    from kvflash_ggml.config import KVFlashConfig
    from kvflash_ggml.native.sizes import LayerSizes
    from kvflash_ggml.placement.buffers import index_bytes
    from kvflash_ggml.placement.sizes import Device as Place

    layers = [LayerSizes(query=4 * 8 * 128, heads=8, heads_kv=2)] * 2 + [LayerSizes()]
    place = Place(**(GPU | device))
    assert index_bytes(layers, weights, 4096, KVFlashConfig(), place) == want
    assert index_bytes(layers, weights, 4096, KVFlashConfig(parallel=3), place) == 3 * want
    assert index_bytes(layers, weights, 1 << 30, KVFlashConfig(), place) in (0, 256 << 20)
