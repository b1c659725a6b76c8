"""Index rows on a device: it has those of the text at hand, whatever happened to the text before."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvflash_ggml.errors import HostMemoryError
from kvflash_ggml.policy.base import KeyShape, ScoreRequest
from kvflash_ggml.sequence.device_index import INDEX_ROWS, INDEX_SCORES, Room
from kvflash_ggml.sequence.keys import HostKeys

ROW = 16
SHAPE = KeyShape(n_head=2, n_head_kv=1, head=1, scale=1.0)
HEADS = np.zeros((1, 2), np.int32)


class Device:
    """Memory for index rows, whose score is the number that a row begins with, and a hundred for each row of queries;
    below zero on the host.
    """

    layers = ()

    def __init__(self, size: int) -> None:
        self.memory = np.zeros(size, np.uint8)
        self.copied = self.on_host = self.begun = 0

    def put_index(self, offset: int, addresses: npt.NDArray[np.uint64], size: int) -> None:
        assert size == ROW
        for i, address in enumerate(addresses.tolist()):
            self.memory[offset + i * size :][:size] = self._at(address)
        self.copied += len(addresses)

    def score_device_index(self, units: Any, heads: Any, offset: int, count: int, rows: Any, out: Any) -> None:
        there = self.memory[offset : offset + count * ROW].reshape(count, ROW)
        out[:] = np.tile(100 * rows, len(heads))[:, None] + there[:, :4].copy().view(np.float32).T
        self.begun += 1

    def score_index(self, units: Any, heads: Any, addresses: Any, rows: int, queries: Any, threads: int) -> Any:
        self.on_host += len(addresses)
        values = [self._at(address)[:4].view(np.float32)[0] for address in addresses.tolist()]
        return -np.repeat(np.array([values], np.float32), len(heads) * rows, axis=0)

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
    keys.shapes, keys.device.row_bytes = [SHAPE], ROW
    return keys


def scored(keys: HostKeys, rows: list[npt.NDArray[np.uint8]], n_rows: int = 1, heads: Any = HEADS) -> list[float]:
    """Score a text of so many rows twice, as two tokens would. Return the second scores of the newest query."""
    for _ in range(2):
        found = score(keys, rows, begin(keys, len(rows), n_rows), n_rows, heads)
        assert np.abs(found[-1]).tolist() == [float(row[:4].view(np.float32)[0]) for row in rows]
    assert found.shape == (len(heads) * n_rows, len(rows))
    return list(found[-1].tolist())


def begin(keys: HostKeys, n_chunks: int, n_rows: int = 1) -> Any:
    return keys.device.begin(np.arange(n_rows, dtype=np.int32), n_chunks, lambda n: np.empty(n, np.float32))


def score(keys: HostKeys, rows: list[npt.NDArray[np.uint8]], ahead: Any, n_rows: int = 1, heads: Any = HEADS) -> Any:
    request = ScoreRequest(
        tokens=np.zeros(1, np.int32), n_chunks=len(rows), rows=n_rows, queries=np.zeros(2 * n_rows, np.float32),
        protected=frozenset(),
    )  # fmt: skip
    keys.ahead = ahead
    found = keys.score_index(HEADS, rows, heads, request)
    keys.device.known = keys.device.there
    return found


def some(keys: HostKeys, rows: list[npt.NDArray[np.uint8]], n_chunks: int) -> Any:
    """Score some chunks of a text."""
    request = ScoreRequest(
        tokens=np.zeros(1, np.int32), n_chunks=n_chunks, rows=1, queries=np.zeros(2, np.float32), protected=frozenset()
    )
    return keys.score_index(HEADS, rows, HEADS, request)[0].tolist()


def test_a_row_is_copied_once() -> None:
    device = Device(8 * ROW)
    keys, rows = text(device, Room(0, 8 * ROW)), [row(i) for i in range(1, 6)]
    assert scored(keys, rows[:3]) == [1, 2, 3]
    assert (device.copied, device.on_host, device.begun) == (3, 3, 1), "the first score knows of no row there"
    assert scored(keys, rows) == [1, 2, 3, 4, 5]
    assert (device.copied, device.on_host) == (5, 5), "nor does the first of two more chunks"
    some(keys, rows[2:], 5)
    assert scored(keys, rows) == [1, 2, 3, 4, 5]
    assert (device.copied, device.on_host) == (5, 5 + 3), "some of a text are the host's"


def test_the_host_scores_what_has_no_room() -> None:
    device = Device(3 * ROW)
    keys, rows = text(device, Room(0, 3 * ROW + 1)), [row(i) for i in range(1, 6)]
    assert scored(keys, rows) == [1, 2, 3, -4, -5]
    assert [keys.device.on_host(n) for n in (2, 3, 5)] == [0, 0, 2]


def test_without_room_the_host_scores_all() -> None:
    keys = HostKeys(Device(0), None, threads=1)  # type: ignore[arg-type]
    keys.shapes = [SHAPE]
    assert scored(keys, [row(1), row(2)]) == [-1, -2]
    assert keys.device.on_host(2) == 2


def test_other_queries_are_the_hosts() -> None:
    """What a policy asks for need not be what was computed ahead for it."""
    device = Device(8 * ROW)
    keys, rows = text(device, Room(0, 8 * ROW)), [row(i) for i in range(1, 4)]
    assert scored(keys, rows) == [1, 2, 3]

    assert score(keys, rows, begin(keys, 3, 4), 2).tolist() == [[201, 202, 203], [301, 302, 303]], "of four the newest"
    assert score(keys, rows, begin(keys, 3, 1), 2).tolist() == [[-1, -2, -3]] * 2, "more queries"
    both = np.array([[0, 0], [0, 1]], np.int32)
    assert score(keys, rows, begin(keys, 3, 1), 1, both).tolist() == [[-1, -2, -3]] * 2, "other heads"
    assert score(keys, rows, begin(keys, 3, 1), 1, both).tolist() == [[1, 2, 3]] * 2, "the heads of the score before"
    assert [begin(keys, 3, n) is None for n in (0, 1, INDEX_ROWS, INDEX_ROWS + 1)] == [True, False, False, True]


def test_no_more_scores_than_a_device_has_room_for() -> None:
    device = Device(8 * ROW)
    keys, rows = text(device, Room(0, 8 * ROW)), [row(i) for i in range(1, 4)]
    assert scored(keys, rows) == [1, 2, 3]
    assert keys.device.known is not None
    for heads, chunks in ((INDEX_SCORES // 2, 2), (INDEX_SCORES, 1)):
        keys.device.known = keys.device.known._replace(heads=np.zeros((heads, 2), np.int32))
        assert begin(keys, 3).values.shape == (heads, chunks)
    keys.device.known = keys.device.known._replace(heads=np.zeros((INDEX_SCORES + 1, 2), np.int32))
    assert begin(keys, 3) is None


def test_without_page_locked_room_nothing_is_computed_ahead() -> None:
    device = Device(8 * ROW)
    keys, rows = text(device, Room(0, 8 * ROW)), [row(i) for i in range(1, 4)]
    assert scored(keys, rows) == [1, 2, 3]

    def none(count: int) -> Any:
        raise HostMemoryError(f"no room for {count}")

    assert keys.device.begin(np.zeros(1, np.int32), 3, none) is None
    assert scored(keys, rows) == [1, 2, 3]


@given(st.data())
def test_it_scores_the_rows_of_now(data: st.DataObject) -> None:
    """Two texts that grow, are cut and are replaced by others, with room for six rows each."""
    device = Device(12 * ROW)
    texts = [text(device, Room(seq * 6 * ROW, 6 * ROW)) for seq in range(2)]
    held: list[list[npt.NDArray[np.uint8]]] = [[], []]
    number = 0
    for _ in range(data.draw(st.integers(1, 20))):
        seq = data.draw(st.integers(0, 1))
        match data.draw(st.sampled_from(["grow", "cut", "replace", "some", "nothing"])):
            case "grow":
                for _ in range(data.draw(st.integers(1, 4))):
                    number += 1
                    held[seq].append(row(number))
            case "cut":
                left = data.draw(st.integers(0, len(held[seq])))
                del held[seq][left:]
                texts[seq].device.cut(left)
                texts[seq].truncate(left)
            case "nothing":  # a score that asks for no row, such as one by exact masses
                texts[seq].device.known = texts[seq].device.there
            case "replace":
                held[seq] = [row(number + i) for i in range(1, data.draw(st.integers(2, 9)))]
                number += 10
            case "some" if len(held[seq]) > 1:
                few = held[seq][data.draw(st.integers(1, len(held[seq]) - 1)) :]
                found = some(texts[seq], few, len(held[seq]))
                assert found == [-float(r[:4].view(np.float32)[0]) for r in few]
        if held[seq] and data.draw(st.booleans()):
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


@pytest.mark.parametrize(("name", "want"), [("CUDA0", 2 * 4096 * 2 * 4 * 18), ("Vulkan0", 0), ("CPU", 0)])
def test_a_placement_counts_it(name: str, want: int) -> None:
    """Two layers with an index, of two KV heads of 128 values in 4 blocks; another one has none."""
    from kvflash_ggml.config import KVFlashConfig
    from kvflash_ggml.native.sizes import LayerSizes
    from kvflash_ggml.placement.buffers import index_bytes

    layers = [LayerSizes(query=4 * 8 * 128, heads=8, heads_kv=2)] * 2 + [LayerSizes()]
    assert index_bytes(layers, 10**9, 4096, KVFlashConfig(), name) == want
    assert index_bytes(layers, 10**9, 1 << 30, KVFlashConfig(), name) == min(want, 1) * (256 << 20)
    assert index_bytes(layers, 10**11, 4096, KVFlashConfig(), name) == 0
    assert index_bytes(layers, 10**11, 4096, KVFlashConfig(index=1000), name) == min(want, 1) * 1000


@pytest.mark.parametrize(
    ("name", "free", "said", "want"),
    [
        ("CUDA0", 10**9, "", 2),
        ("CUDA0", 512 + 1, "", 1),
        ("CUDA0", 512 + 3, "", 2),
        ("CUDA0", 512, "CUDA0 has no memory", 0),
        ("Vulkan0", 512, "", 0),
    ],
)
def test_it_leaves_a_gpu_its_margin(name: str, free: int, said: str, want: int, monkeypatch: Any, caplog: Any) -> None:
    """Of an index of 2 MiB at most. Sizes are MiB."""
    from types import SimpleNamespace

    from support.fake_engine import FakeEngine, make_session

    from kvflash_ggml.config import KVFlashConfig
    from kvflash_ggml.llama import reading
    from kvflash_ggml.placement import memory
    from kvflash_ggml.placement.sizes import Device as Place
    from kvflash_ggml.policy.qk import QKScorer

    mib, opened = 1 << 20, []
    engine = FakeEngine(512, 128, query_rows=40)
    engine.open_index = lambda size: opened.append(size) or size  # type: ignore[attr-defined]
    engine.index_size = lambda units: 64  # type: ignore[attr-defined]
    engine.info = replace(engine.info, devices=(SimpleNamespace(name=name, overlaps=True),))  # type: ignore[arg-type]
    config = KVFlashConfig(pool=512)
    scorer = QKScorer()
    one = make_session(engine, config, n_ctx=8192, n_batch=128, n_ubatch=128, scorer=scorer)
    monkeypatch.setattr(QKScorer, "index_bytes", 2 * mib)
    place = Place(name=name, kind="gpu", free=free * mib, total=16 << 30)
    monkeypatch.setattr(memory, "of_model", lambda model: (place, memory.host()))
    monkeypatch.setattr(reading, "address", lambda model: 0)
    with caplog.at_level("WARNING"):
        reading.open_index(SimpleNamespace(weights=SimpleNamespace(model=None)), config, one)  # type: ignore[arg-type]
    assert sum(opened) == want * mib == one.pool.index_bytes
    assert said in caplog.text
    assert bool(caplog.text) == bool(said)
    one.close()


def test_only_a_policy_with_an_index_has_one() -> None:
    from types import SimpleNamespace

    from support.fake_engine import FakeEngine, make_session

    from kvflash_ggml.config import KVFlashConfig
    from kvflash_ggml.llama import reading
    from kvflash_ggml.policy.base import Indexed

    class Other:
        name, query_rows, index_bytes = "other", 1, 10**9

        def nothing(self, *what: Any) -> None:
            pass

        open = seal = truncate = score = nothing

        def close(self) -> None:
            pass

    engine, config = FakeEngine(512, 128, query_rows=40), KVFlashConfig(pool=512, index=10**6)
    one = make_session(engine, config, n_ctx=8192, n_batch=128, n_ubatch=128, scorer=Other())
    assert not isinstance(one.scoring.scorer, Indexed)  # type: ignore[union-attr]
    reading.open_index(SimpleNamespace(), config, one)  # type: ignore[arg-type]
    assert one.pool.index_bytes == 0
    one.close()


def test_the_default_has_an_index_before_it_is_open() -> None:
    """A placement asks for that."""
    from kvflash_ggml import policy
    from kvflash_ggml.policy.base import Indexed

    assert isinstance(policy.resolve("qk"), Indexed)


def test_other_heads_and_back() -> None:
    device = Device(8 * ROW)
    keys, rows = text(device, Room(0, 8 * ROW)), [row(i) for i in range(1, 4)]
    assert scored(keys, rows) == [1, 2, 3]
    known, others = keys.device.known, [row(9) for _ in rows]
    for used in (others, rows):
        keys.truncate(0)
        keys.device.renew()
        if used is others:
            score(keys, others, None, heads=np.array([[0, 1]], np.int32))
    keys.device.known = known  # no score since then is used yet
    assert score(keys, rows, begin(keys, 3)).tolist() == [[-1, -2, -3]]
