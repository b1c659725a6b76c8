"""The end of an exactly read prompt is scored where its keys are: exact masses, and what becomes of them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from support.harness import KV_TYPES, row, same_bits
from support.inside import inside
from support.rounding import MASS, MASS_OF_F16, MASS_OF_Q8, ON_GPU

from kvflash_ggml.policy.base import Masses, ScoreRequest
from kvflash_ggml.policy.heads import queries_of
from kvflash_ggml.policy.qk import QKScorer

POOL = 512
SIZE = {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 256, "kvflash": POOL, "kvflash_reading": "exact"}
F16, Q8 = KV_TYPES["f16"], KV_TYPES["q8_0"]
LATENT = pytest.param("latent", F16, marks=pytest.mark.slow)  # compiles the generator of such models first
CASES = [("dense", Q8), ("hybrid", F16), ("iswa", Q8), LATENT]


class Spy(QKScorer):
    """Keeps what it was asked, and counts how often its index is read. indexed: chunks in it at the last look."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(exact_work=0, **settings)
        self.asked: list[ScoreRequest] = []
        self.looks = 0
        self.indexed = 0

    def score(self, request: ScoreRequest) -> Any:
        self.asked.append(request)
        self.indexed = sum(row is not None for row in self._rows)
        return super().score(request)

    def _whole(self, chunks: Any) -> Any:
        self.looks += 1
        return super()._whole(chunks)


def expected(llm: Any, request: ScoreRequest, masses: Masses) -> Any:
    """The same in numpy, from the page images."""
    keys, shapes = inside(llm).session.scoring.scorer._keys, inside(llm).session.scoring.scorer._keys.shapes
    read = [keys.read(chunk) for chunk in masses.chunks.tolist()]
    columns, at = [], 0
    queries = queries_of(masses.heads, request, shapes)
    for layer, head in masses.heads.tolist():
        shape = shapes[layer]
        for query in queries[at : at + request.rows * shape.head].reshape(request.rows, -1):
            scores = np.array([shape.scale * (k[layer][:, head // shape.group] @ query) for k in read], np.float64)
            most = scores.max(axis=1)
            columns.append(most + np.log(np.exp(scores - most[:, None]).sum(axis=1)))
        at += request.rows * shape.head
    return np.array(columns)


def masses_bytes(engine: Any, device: int) -> int:
    """The bytes that masses take of a device by now, by its index in `info.devices`. The next masses reuse them."""
    from kvflash_ggml.native._kvf import lib

    return int(lib.kvf_masses_bytes(engine._engine, device))


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize(("kind", "kv"), CASES)
def test_masses_are_those_of_the_real_keys(kind: str, kv: int, llama: Callable[..., Any], tokens: Any) -> None:
    """The index is not looked at, and what the last step adds to it is not waited for."""
    spy = Spy()
    llm = llama(kind, kvflash_policy=spy, type_k=kv, type_v=kv, flash_attn=True, **SIZE)
    llm.eval((tokens[:1601] % llm.n_vocab()).tolist())
    (request,) = spy.asked
    masses = request.masses
    assert masses is not None
    assert masses.chunks.tolist() == list(range(1601 // 64))
    assert request.rows == masses.rows == 32
    exact = inside(llm).session.scoring.scorer._keys.score_keys(range(25), request, masses.heads)
    np.testing.assert_allclose(masses.values, exact, atol=MASS.here)
    in_numpy = MASS_OF_Q8 if kv == Q8 else MASS_OF_F16
    np.testing.assert_allclose(masses.values, expected(llm, request, masses), atol=in_numpy.here)
    assert spy.looks == 0
    assert spy.indexed < 1601 // 64 == sum(chunk is not None for chunk in spy._rows)
    assert inside(llm).session.scoring.masses.count == 1
    assert (llm.kvflash.last.ranked, llm.kvflash.last.ranked_why) == ("exact", "")


@pytest.mark.usefixtures("looks")
def test_masses_of_a_text_that_grows(llama: Callable[..., Any], tokens: Any) -> None:
    """Their room is used again, and another one is made where it is too small. Refused memory is no error."""
    spy = Spy()
    llm = llama("dense", kvflash_policy=spy, **SIZE)
    engine = inside(llm).session.engine
    alloc, rooms, asked, refused, made = engine.alloc, [], list[int](), [], []

    def refuse(size: int) -> int:
        asked.append(size)
        if end != 1700:
            return alloc(size)
        chunks, columns = 1700 // 64, len(spy.asked[-1].masses.values)  # type: ignore[union-attr]
        if size != 4 * (columns * chunks + columns * chunks // 4):  # pages of the text have memory
            return alloc(size)
        refused.append(size)
        return 0

    for end in (900, 980, 1300, 1700, 1900):
        asked.clear()
        engine.alloc = refuse
        try:
            llm.eval(tokens[llm.n_tokens : end].tolist())
        finally:
            engine.alloc = alloc
        request = spy.asked[-1]
        assert request.masses is not None
        assert request.n_chunks == request.masses.values.shape[1] == end // 64
        exact = inside(llm).session.scoring.scorer._keys.score_keys(range(end // 64), request, request.masses.heads)
        np.testing.assert_allclose(request.masses.values, exact, atol=MASS.here)
        rooms.append(request.masses.values.ctypes.data)
        made.append(4 * (request.masses.values.size + request.masses.values.size // 4) in asked)
    assert len(refused) == 1
    assert rooms[0] == rooms[1]
    assert made == [True, False, True, True, True]  # no address tells: what was freed can be given again
    assert len(spy.asked) == 5


def test_what_is_resident_is_what_real_keys_choose(llama: Callable[..., Any], tokens: Any) -> None:
    """Some heads alone, in one of the layers two of them that read different keys."""
    heads = np.array([[0, 0], [2, 1], [2, 3]], np.int32)
    resident = {}
    for count in (1, 0):
        scorer = QKScorer(heads=heads, exact_work=1e18)  # without masses it reads every real key on the host
        if count == 0:
            scorer.masses_wanted = lambda n_chunks, rows: (heads[:0], 0)
        llm = llama("dense", kvflash_policy=scorer, **SIZE)
        llm.eval(tokens[:1601].tolist())
        llm.eval([5])
        resident[count] = llm.kvflash.resident_chunks
        assert inside(llm).session.scoring.masses.count == count
    assert resident[1] == resident[0]


def test_chunks_out_of_view_keep_the_score_of_the_index(llama: Callable[..., Any], tokens: Any) -> None:
    spy = Spy(heads=np.array([[0, 0], [2, 1]], np.int32))
    llm = llama("dense", kvflash_policy=spy, kvflash_stage=1024, **SIZE)
    llm.eval(tokens[:1701].tolist())
    masses = spy.asked[-1].masses
    assert masses is not None
    assert 0 < len(masses.chunks) < 1701 // 64
    assert llm.kvflash.last.ranked == "exact"
    exact = spy._keys.score_keys(range(26), spy.asked[-1], masses.heads)
    np.testing.assert_allclose(masses.values, exact[:, masses.chunks], atol=MASS_OF_Q8.here)
    assert spy.looks > 0


@contextmanager
def no_room_for_masses() -> Iterator[list[int]]:
    """The CPU refuses the memory that they are made in, 4 MiB and a little; yields the sizes that were refused."""
    library = ctypes.CDLL(None)
    library.ggml_backend_cpu_buffer_type.restype = ctypes.c_void_p
    slot = ctypes.c_void_p.from_address(library.ggml_backend_cpu_buffer_type() + ctypes.sizeof(ctypes.c_void_p))
    kind = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)
    real, refused = slot.value, list[int]()
    assert real is not None

    def refuse(buffer_type: int, size: int) -> int | None:
        if not 2**22 < size < 2**22 + 2**16:
            return kind(real)(buffer_type, size)  # type: ignore[no-any-return]
        refused.append(size)
        return None

    ours = kind(refuse)
    slot.value = ctypes.cast(ours, ctypes.c_void_p).value
    try:
        yield refused
    finally:
        slot.value = real


def test_without_memory_for_it_the_index_is_asked_and_the_reason_told(llama: Callable[..., Any], tokens: Any) -> None:
    if ON_GPU:
        pytest.skip("it is the CPU's memory that is refused")
    spy = Spy(heads=np.array([[0, 0], [2, 1]], np.int32))
    llm = llama("dense", kvflash_policy=spy, **SIZE)
    with no_room_for_masses() as refused:
        llm.eval(tokens[:1601].tolist())
    assert len(refused) == 1
    assert (llm.kvflash.last.ranked, llm.kvflash.last.ranked_why) == ("index", "no memory on CPU for it")
    assert spy.asked[-1].masses is None
    assert spy.looks > 0
    llm.eval(tokens[1601:1700].tolist())
    assert llm.kvflash.last.ranked == "exact"


@pytest.mark.usefixtures("looks")
def test_heads_that_change_before_the_prompt_is_scored_are_told(
    llama: Callable[..., Any], tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step has been computed for other heads than its queries are scored with."""
    spy = Spy()
    llm = llama("dense", kvflash_policy=spy, **SIZE)
    scoring = inside(llm).session.scoring
    read = scoring.masses.read

    def change(*args: Any) -> Any:
        scoring.use(np.array([[0, 0], [2, 1]], np.int32))
        return read(*args)

    monkeypatch.setattr(scoring.masses, "read", change)
    llm.eval(tokens[:1601].tolist())
    assert spy.asked[-1].masses is None
    last = llm.kvflash.last
    assert (last.ranked, last.ranked_why) == ("index", "other heads have begun to count since the prompt was read")


def test_computing_masses_changes_nothing(llama: Callable[..., Any], tokens: Any) -> None:
    rows = []
    for policy in ("qk", "lru"):
        llm = llama("dense", kvflash_policy=policy, **SIZE)
        llm.eval(tokens[:1601].tolist())
        rows.append(row(llm))
    assert same_bits(*rows)


@pytest.mark.parametrize("heads", [None, [[0, 0], [2, 1], [2, 3]]])
def test_what_masses_take_has_room_set_aside(
    heads: Any, llama: Callable[..., Any], model: Callable[[str], Any], tokens: Any
) -> None:
    """Of every head, which is planned for, and of a few: room is set aside as if every one might still be asked."""
    from kvflash_ggml.llama.fitting import without_loading

    scorer = QKScorer(heads=None if heads is None else np.array(heads, np.int32))
    asked = SIZE | {"kvflash_policy": scorer, "kvflash_stage": SIZE["n_ctx"]}
    placement, _ = without_loading(str(model("dense")), asked | {"fit": True, "kvflash_policy": "qk"})
    planned = sum(need.masses for need in placement.needs)
    llm = llama("dense", **asked)
    engine = inside(llm).session.engine
    assert masses_bytes(engine, 0) == 0
    llm.eval(tokens[:2048].tolist())
    taken = sum(masses_bytes(engine, device) for device in range(len(engine.info.devices)))
    assert llm.kvflash.last.ranked == "exact"
    assert taken == planned if heads is None else 0 < taken < planned
