"""Embeddings of media by the numbers that stand for them."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session
from support.saving import Digest

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.errors import KVFlashError, NotFinite, PoolExhausted, SnapshotError
from kvflash_ggml.media.rows import MOST, MediaRows, Medium, advances_of, numbers_of
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.restore import load, state

NONE = np.empty(0, np.int32)


def rows(count: int, start: float = 0.0) -> np.ndarray:
    return np.arange(start, start + 2 * count, dtype=np.float32).reshape(count, 2)


def add(media: MediaRows, key: bytes, made: np.ndarray, *, mutual: bool = False) -> np.ndarray:
    """The numbers of a medium whose embeddings are kept."""
    medium = Medium(key, numbers_of(key, len(made), mutual=mutual))
    media.expect(medium, lambda: made)
    media.rows(NONE, medium.numbers[:1])
    return medium.numbers


def test_numbers_are_negative_and_those_of_the_key() -> None:
    numbers = numbers_of(b"a", 500)
    assert numbers.dtype == np.int32
    assert (numbers < 0).all()
    assert np.array_equal(numbers, numbers_of(b"a", 500))
    assert not (numbers == numbers_of(b"b", 500)).any()
    assert not (numbers[:400] == numbers_of(b"a", 400)).any()  # of another size it is another medium


def test_numbers_tell_how_positions_go_on() -> None:
    advances = np.array([0, 0, 1, 0, 12, MOST, 2], np.int32)
    numbers = numbers_of(b"a", 7, advances)
    assert (numbers < 0).all()
    assert np.array_equal(advances_of(numbers), advances)
    assert np.array_equal(advances_of(numbers_of(b"a", 500)), np.ones(500))
    assert np.array_equal(advances_of(np.array([0, 5, 2**31 - 1], np.int32)), np.ones(3))
    same = numbers_of(b"a", 500) ^ numbers_of(b"a", 500, np.zeros(500, np.int32))
    assert len(set(same.tolist())) == 1, "all other bits are those of the medium"


def test_any_part_of_a_medium_is_found() -> None:
    media = MediaRows()
    a, b = add(media, b"a", rows(9)), add(media, b"b", rows(5, 100))
    assert np.array_equal(media.rows(NONE, a).rows, rows(9))
    assert np.array_equal(media.rows(a[2:3], a[3:7]).rows, rows(9)[3:7])
    assert np.array_equal(media.rows(a[-1:], b[:1]).rows, rows(5, 100)[:1])
    with pytest.raises(KVFlashError, match="send the chat with it again"):
        media.rows(NONE, numbers_of(b"c", 2))


def test_a_number_of_two_media_is_told_apart_by_the_one_before_it() -> None:
    media = MediaRows()
    a, b = add(media, b"a", rows(3)), add(media, b"b", rows(3, 100))
    b[1] = a[1]  # the array that is kept
    media._places[int(a[1])].append((b"b", 1))
    assert np.array_equal(media.rows(a[:1], a[1:2]).rows, rows(3)[1:2])
    assert np.array_equal(media.rows(b[:1], b[1:2]).rows, rows(3, 100)[1:2])


def test_the_oldest_leave_but_none_of_the_newest_request() -> None:
    media = MediaRows(limit=2 * rows(4).nbytes)
    a, b = add(media, b"a", rows(4)), add(media, b"b", rows(4))
    media.begin()
    media.expect(Medium(b"a", a), None)
    add(media, b"c", rows(4))
    assert media.kept(b"b") is None
    assert int(b[0]) not in media
    assert int(a[0]) in media
    add(media, b"d", rows(4))
    assert media.kept(b"a") is not None, "of the same request, though there is no room"


def test_a_medium_is_encoded_when_it_is_read() -> None:
    """Once, and only while its request lasts."""
    media, made = MediaRows(), []
    medium = Medium(b"a", numbers_of(b"a", 3))

    def encode() -> np.ndarray:
        made.append(1)
        return rows(3)

    media.expect(medium, encode)
    assert (int(medium.numbers[0]) in media, media.kept(b"a"), made) == (True, None, [])
    media.begin()
    assert int(medium.numbers[0]) not in media, "another request does not know it"
    media.expect(medium, encode)
    for _ in range(2):
        assert np.array_equal(media.rows(medium.numbers[:1], medium.numbers[1:]).rows, rows(3)[1:])
        media.begin()
    assert (media.kept(b"a") is not None, made) == (True, [1])
    gone = Medium(b"b", numbers_of(b"b", 2))
    media.expect(gone, lambda: None)
    with pytest.raises(KVFlashError, match="send the chat with it again"):
        media.rows(NONE, gone.numbers)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_embeddings_that_are_not_finite_are_not_kept(value: float) -> None:
    media, made = MediaRows(), rows(3)
    made[2, 1] = value
    medium = Medium(b"a", numbers_of(b"a", 3))
    media.expect(medium, lambda: made)
    with pytest.raises(NotFinite, match="the encoder made 3 rows"):
        media.rows(NONE, medium.numbers[:1])
    assert media.kept(b"a") is None


def test_any_text_that_has_a_medium_can_encode_it() -> None:
    """The one that came first may have ended."""
    media, medium, left = MediaRows(), Medium(b"a", numbers_of(b"a", 3)), []
    media.expect(medium, None)
    media.expect(medium, lambda: left.append(1))
    media.expect(medium, lambda: rows(3))
    media.expect(medium, lambda: left.append(2))
    assert np.array_equal(media.rows(NONE, medium.numbers).rows, rows(3))
    assert left == [1]


def test_where_media_end() -> None:
    media = MediaRows()
    a, b, text = add(media, b"a", rows(3)), add(media, b"b", rows(2)), np.array([7, 8], np.int32)
    unknown = numbers_of(b"c", 4)
    assert list(media.stretches(np.concatenate([text, a, b, text]))) == [2, 5, 7, 9]
    assert list(media.stretches(np.concatenate([a[1:], text]))) == [2, 4]
    assert list(media.stretches(np.concatenate([text, unknown]))) == [2, 6]


@pytest.mark.parametrize("scored", [False, True])
def test_a_step_has_tokens_or_media(scored: bool) -> None:
    """Also of a text that is cut within an image, and whose prompt ends a few tokens behind one."""
    engine, scorer = FakeEngine(448, 100, query_rows=4), Digest() if scored else None
    session = make_session(engine, KVFlashConfig(tail=2), n_ctx=4096, n_batch=100, n_ubatch=100, scorer=scorer)
    image = add(session.pool.media, b"a", rows(300))
    words = np.arange(1, 71, dtype=np.int32)
    for part in (words, np.concatenate([words, image, image, words[:9]]), image):
        extend(session, part)  # FakeEngine refuses what is mixed
    text = session.tokens.copy()
    session.truncate(180)
    extend(session, text[180:])
    assert np.array_equal(session.tokens, text)
    assert session.length == len(text) == 70 + 79 + 900
    session.close()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_image_that_asks_for_chunks_is_not_computed_again_beside_a_token(asynchronous: bool) -> None:
    engine = FakeEngine(448, 100, query_rows=4, asynchronous=asynchronous)
    config = KVFlashConfig(tail=2, tau=4)
    session = make_session(engine, config, n_ctx=4096, n_batch=100, n_ubatch=100, scorer=Digest())
    image = add(session.pool.media, b"a", rows(10))
    for part in (np.arange(1000, dtype=np.int32), image):
        extend(session, part)
    for token in range(3):
        extend(session, np.array([token], np.int32))  # FakeEngine refuses what is mixed
    assert np.array_equal(session.tokens[1000:], [*image, 0, 1, 2])
    session.close()


@pytest.mark.parametrize("stage", [0, 2048])
def test_rows_that_see_each_other_are_of_one_step(stage: int) -> None:
    """Whatever would cut it: room for a reselection, a checkpoint, and text before it that ends within a chunk."""
    engine, scorer = FakeEngine(448, 200, query_rows=4), Digest()
    size = {"n_ctx": 4096, "n_batch": 200, "n_ubatch": 190, "scorer": scorer, "stage": stage}
    session = make_session(engine, KVFlashConfig(tail=2), **size)
    image = add(session.pool.media, b"a", rows(180), mutual=True)
    assert np.array_equal(advances_of(image), np.ones(180))
    words = np.arange(1, 701, dtype=np.int32)
    for before in (words[:60], words, words[:190]):
        at = session.length + len(before) + 90
        extend(session, np.concatenate([before, image, words[:70]]), checkpoint=at)
        extend(session, words[:1])  # FakeEngine looks at the masks
    assert engine.steps.count(180) == 3
    assert (session.streamed_steps > 0) == (stage > 0)
    session.close()


def test_rows_that_see_each_other_are_refused_where_a_pool_is_too_small() -> None:
    session = make_session(FakeEngine(448, 400), KVFlashConfig(tail=2), n_ctx=4096, n_batch=400, n_ubatch=400)
    extend(session, np.arange(1, 500, dtype=np.int32))
    image = add(session.pool.media, b"a", rows(390), mutual=True)
    with pytest.raises(PoolExhausted, match="use a larger pool"):
        extend(session, image)
    assert session.length == 499
    session.close()


def test_a_text_that_ends_beyond_its_rows_is_refused() -> None:
    """A file may be anybody's: positions that no image has would go beyond those of the context."""
    session = make_session(FakeEngine(448, 100), KVFlashConfig(tail=2), n_ctx=4096, n_batch=100, n_ubatch=100)
    extend(session, np.arange(1, 300, dtype=np.int32))
    text, saved = session.tokens.copy(), state(session)
    saved.tokens[3:5] = numbers_of(b"a", 2, np.array([0, 3], np.int32))
    with pytest.raises(SnapshotError, match="a text of 299 rows ends at position 300"):
        load(session, saved)
    assert np.array_equal(session.tokens, text)
    saved.release()
    session.close()
