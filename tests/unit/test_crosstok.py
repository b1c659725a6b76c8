"""Scores go from the tokens of one tokenizer to the chunks of another by the bytes they share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_drafter import FakeDrafter

from kvflash_ggml.constants import CHUNK
from kvflash_ggml.policy.base import KeyShape, ScoreRequest
from kvflash_ggml.policy.crosstok import (
    TextReader,
    chunk_scores,
    complete_characters,
    same_length_utf8,
    spelled_ends,
    token_scores,
)
from kvflash_ggml.policy.heads import split

TEXT = "one Straße, 東京 🚀 and\nnaïve  words; "
SPECIAL = 1 << 20  # a target token that decodes to nothing


class Bytes:
    """A target tokenizer: token 256*n + b stands for the n bytes of TEXT*3 after offset b."""

    DATA = (TEXT * 3).encode()

    def decode(self, token: int) -> bytes:
        assert token >= 0
        if token == SPECIAL:
            return b""
        size, at = divmod(token, 256)
        return self.DATA[at : at + size]


class Pieces:
    """A drafter tokenizer of 1 to 3 bytes a token, which splits characters too and starts anew before each space."""

    def encode(self, text: bytes) -> list[int]:
        text.decode()  # only valid UTF-8 is asked for
        tokens, at = [], 0
        while at < len(text):
            size = 1 + text[at] % 3
            for more in range(1, size):
                if text[at + more : at + more + 1].isspace():
                    size = more
                    break
            tokens.append(int.from_bytes(b"\1" + text[at : at + size], "big"))
            at += size
        return tokens

    def spell(self, token: int) -> bytes:
        return token.to_bytes(4, "big").lstrip(b"\0")[1:]


def reader(drafter: FakeDrafter, opening: Sequence[int] = ()) -> TextReader:
    pieces = Pieces()
    return TextReader(drafter, decode=Bytes().decode, encode=pieces.encode, spell=pieces.spell, opening=opening)


def hashed(tokens: Any) -> Any:
    """A score for any drafter token, all different."""
    return (tokens.astype(np.int64) * 2654435761 % 1000003).astype(np.float32)


def brute_force(target: Sequence[int], drafted: Sequence[int], scores: Any) -> list[float]:
    """One forward pointer over the drafter's tokens, as the definition says."""
    decode, spell = Bytes().decode, Pieces().spell
    ends = np.cumsum([len(decode(token)) for token in target]).tolist()
    sealed, pointer, start, out = len(scores), 0, 0, []
    for chunk in range(len(target) // CHUNK):
        end, inside = ends[(chunk + 1) * CHUNK - 1], []
        while pointer < sealed and start + len(spell(drafted[pointer])) / 2 < end:
            inside.append(float(scores[pointer]))
            start += len(spell(drafted[pointer]))
            pointer += 1
        out.append(max(inside, default=float("nan")))
    return out


target_token = st.one_of(
    st.just(SPECIAL), st.builds(lambda size, at: 256 * size + at, st.integers(1, 4), st.integers(0, 120))
)
targets = st.builds(
    lambda tokens, repeat: tokens * repeat, st.lists(target_token, min_size=1, max_size=120), st.integers(1, 3)
)


@given(target=targets)
def test_scores_are_those_of_the_definition(target: list[int]) -> None:
    drafter = FakeDrafter(score=hashed)
    bridge = reader(drafter)
    found = bridge.read(np.array(target, np.int32))
    if found is None:
        assert len(bridge.drafted) < 9
        return
    first, scores = found
    assert first == 0
    np.testing.assert_array_equal(scores, brute_force(target, bridge.drafted, drafter.score_tokens()))


@given(edits=st.lists(st.tuples(st.integers(0, 300), targets), min_size=1, max_size=5))
def test_a_growing_and_cut_text_keeps_its_bytes(edits: list[tuple[int, list[int]]]) -> None:
    drafter = FakeDrafter(score=hashed)
    bridge = reader(drafter)
    decode, spell = Bytes().decode, Pieces().spell
    target: list[int] = []
    for at, more in edits:
        target = target[:at] + more
        found = bridge.read(np.array(target, np.int32))
        data = b"".join(decode(token) for token in target)
        assert bytes(bridge.text) == data
        whole = same_length_utf8(data[: complete_characters(data)])
        spelled = b"".join(spell(token) for token in bridge.drafted)
        assert len(spelled) == len(whole)
        assert np.cumsum([len(spell(t)) for t in bridge.drafted]).tolist() == bridge.drafted_ends
        differs = [i for i in range(len(whole)) if spelled[i] != whole[i]]
        assert all(ord("?") in (spelled[i], whole[i]) for i in differs)  # where a cut has split a character
        if found is not None:
            assert drafter.text == bridge.drafted
            np.testing.assert_array_equal(found[1], brute_force(target, bridge.drafted, drafter.score_tokens()))


def test_rows_of_media_are_no_text() -> None:
    """llama.cpp ends the process that asks it for their text."""
    drafter = FakeDrafter(score=hashed)
    bridge = reader(drafter)
    text = np.tile(np.arange(0, 60, 3, np.int32) + 256 * 3, 10)
    with_image = np.concatenate([text, np.full(200, -7, np.int32), text])
    found = bridge.read(with_image)
    assert bytes(bridge.text) == b"".join(Bytes().decode(token) for token in [*text.tolist(), *text.tolist()])
    assert found is not None
    assert np.isnan(found[1]).tolist() == [
        CHUNK * chunk in range(200, 337) for chunk in range(len(with_image) // CHUNK)
    ]


def test_only_what_is_new_goes_through_the_drafter() -> None:
    drafter = FakeDrafter(score=hashed)
    bridge = reader(drafter)
    target = np.tile(np.arange(0, 60, 3) + 256 * 3, 100).astype(np.int32)
    bridge.read(target[:1500])
    before = sum(drafter.pushes)
    bridge.read(target[:1520])
    assert 0 < sum(drafter.pushes) - before < 100


@pytest.mark.parametrize("keep", [0, 3, 200, 900])
def test_a_long_text_can_be_cut_anywhere(keep: int) -> None:
    drafter = FakeDrafter(score=hashed)
    bridge = reader(drafter)
    target = np.array([256 * 3 + at for at in range(0, 120, 3)] * 25, np.int32)
    bridge.read(target)
    other = np.concatenate([target[:keep], target[1:101]])
    bridge.read(other)
    data = same_length_utf8(b"".join(Bytes().decode(token) for token in other.tolist()))
    spelled = b"".join(Pieces().spell(token) for token in bridge.drafted)
    assert len(spelled) == bridge.drafted_ends[-1] == complete_characters(data)
    assert drafter.text == bridge.drafted


def test_characters_split_over_tokens_wait_until_they_are_whole() -> None:
    drafter = FakeDrafter(score=hashed)
    bridge = reader(drafter)
    rocket = Bytes.DATA.index("🚀".encode())
    target = [256 * 1 + at for at in range(rocket + 4)]
    for back in (3, 2, 1, 0):
        bridge.read(np.array(target[: len(target) - back], np.int32))
        assert bridge.drafted_ends[-1] == (rocket if back else rocket + 4)


def test_special_tokens_are_nothing_and_their_chunk_has_no_score() -> None:
    bridge = reader(FakeDrafter(score=hashed))
    words = [256 * 4 + at for at in range(64)]
    target = words + [SPECIAL] * CHUNK + words + words
    found = bridge.read(np.array(target, np.int32))
    assert found is not None
    assert np.isfinite(found[1][[0, 2]]).all()
    assert np.isnan(found[1][1])


def test_the_opening_stands_for_no_byte() -> None:
    drafter = FakeDrafter(score=lambda tokens: np.where(tokens == 7, 1e6, hashed(tokens)))
    words = np.array([256 * 4 + at for at in range(64)] * 3, np.int32)
    bridge = reader(drafter, opening=[7])
    found = bridge.read(words)
    assert found is not None
    assert drafter.text[0] == 7
    assert drafter.text[1:] == bridge.drafted[1:]
    assert np.nanmax(found[1]) < 1e6


def test_a_text_longer_than_the_drafter() -> None:
    drafter = FakeDrafter(n_ctx=512, score=hashed)
    bridge = reader(drafter, opening=[7])
    rng = np.random.default_rng(0)
    target = (256 * rng.integers(1, 5, 2000) + rng.integers(0, 120, 2000)).astype(np.int32)
    found = bridge.read(target)
    assert found is not None
    base = bridge.window.base
    assert base > 0
    assert drafter.text == bridge.drafted[base:]
    scores = np.full(len(bridge.drafted), -np.inf)
    sealed = drafter.score_tokens()
    scores[base + CHUNK : base + len(sealed)] = sealed[CHUNK:]
    expected = np.array(brute_force(target.tolist(), bridge.drafted[1:], scores[1:]))
    np.testing.assert_array_equal(found[1], np.where(np.isneginf(expected), np.nan, expected))


# --- parts


def test_a_token_belongs_where_its_middle_is() -> None:
    ends = np.array([10, 20])
    scores = chunk_scores(ends, np.array([0, 8, 9, 19]), np.array([8, 11, 11, 30]), np.array([1, 2, 3, 4], np.float32))
    np.testing.assert_array_equal(scores, [2, 3])


@pytest.mark.parametrize("text", ["", "a", "é", "東", "🚀", "a🚀"])
def test_unfinished_characters_are_left_out(text: str) -> None:
    data = text.encode()
    assert complete_characters(data) == len(data)
    for cut in range(len(data)):
        whole = data[:cut].decode("utf-8", "ignore").encode()
        assert complete_characters(data[:cut]) == len(whole)


@given(data=st.binary(max_size=40))
def test_any_bytes_become_text_of_the_same_length(data: bytes) -> None:
    text = same_length_utf8(data)
    assert len(text) == len(data)
    text.decode()


@given(text=st.text(max_size=30))
def test_text_stays_as_it_is(text: str) -> None:
    assert same_length_utf8(text.encode()) == text.encode()


def test_a_space_that_the_encoder_put_in_front_is_not_counted() -> None:
    assert spelled_ends(b"ab cd", [b" ab", b" cd"]).tolist() == [2, 5]
    assert spelled_ends(b" ab cd", [b" ab", b" cd"]).tolist() == [3, 6]
    assert spelled_ends(b" ab", [b" ", b" ab"]).tolist() == [0, 3]
    assert spelled_ends(b"", []).tolist() == []


class FakeKeys:
    """Keys of two layers with different heads."""

    shapes = (KeyShape(n_head=4, n_head_kv=2, head=8, scale=0.3), KeyShape(n_head=3, n_head_kv=1, head=4, scale=0.5))

    def __init__(self, n_chunks: int) -> None:
        rng = np.random.default_rng(1)
        sizes = [(n_chunks, CHUNK, s.n_head_kv, s.head) for s in self.shapes]
        self.keys = [rng.normal(0, 2, size).astype(np.float32) for size in sizes]

    def read(self, chunk: int) -> Any:
        return [keys[chunk] for keys in self.keys]

    def dots(self, request: ScoreRequest) -> Any:
        """[columns, chunks, CHUNK], one column after the other."""
        out = []
        for s, keys, queries in zip(self.shapes, self.keys, split(request, self.shapes), strict=True):
            for h in range(s.n_head):
                for query in queries[:, h]:
                    out.append(s.scale * keys[: request.n_chunks, :, h // s.group] @ query)
        return np.array(out)

    def score_keys(self, chunks: Sequence[int], request: ScoreRequest) -> Any:
        return np.log(np.exp(self.dots(request)).sum(axis=2))[:, list(chunks)]


def test_token_scores_are_shares_of_attention() -> None:
    keys = FakeKeys(5)
    rows = 3
    queries = np.random.default_rng(2).normal(0, 1, rows * sum(s.n_head * s.head for s in keys.shapes))
    request = ScoreRequest(
        tokens=np.zeros(5 * CHUNK, np.int32),
        n_chunks=5,
        rows=rows,
        queries=queries.astype(np.float32),
        protected=frozenset(),
    )
    dots = keys.dots(request).reshape(-1, 5 * CHUNK)
    expected = np.log(np.exp(dots) / np.exp(dots).sum(axis=1, keepdims=True)).max(axis=0)
    np.testing.assert_allclose(token_scores(keys, request), expected, rtol=1e-4)  # type: ignore[arg-type]
