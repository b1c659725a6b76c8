"""The drafter follows the text, its scores land on the right chunks, and its failures cost nothing but its help."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from support.fake_drafter import FakeDrafter

from kvflash_ggml import policy
from kvflash_ggml.cli.options import pool_options
from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, DecodeError
from kvflash_ggml.policy.base import Resumable, Scorer, ScoreRequest
from kvflash_ggml.policy.drafter import QUERY_ROWS, DrafterScorer, TokenReader, common_prefix
from kvflash_ggml.sequence.scoring import MIXED_SHARE


def look(tokens: Any) -> ScoreRequest:
    return ScoreRequest(
        tokens=np.asarray(tokens, np.int32),
        n_chunks=len(tokens) // CHUNK,
        rows=0,
        queries=np.empty(0, np.float32),
        protected=frozenset(),
    )


def text(n: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).integers(0, 1000, n).astype(np.int32)


def best(tokens: Any) -> Any:
    """What a fake drafter says of each whole chunk."""
    sealed = len(tokens) // CHUNK * CHUNK
    return -tokens[:sealed].reshape(-1, CHUNK).min(axis=1).astype(np.float32)


class Loads:
    """Counts loads. errors: what the next ones raise."""

    def __init__(self, drafter: FakeDrafter, *errors: BaseException) -> None:
        self.drafter = drafter
        self.errors = list(errors)
        self.count = 0

    def __call__(self) -> TokenReader:
        self.count += 1
        if self.errors:
            raise self.errors.pop(0)
        return TokenReader(self.drafter)


def opened(load: Callable[[], Any], n_chunks: int = 64, **settings: Any) -> DrafterScorer:
    scorer = DrafterScorer(load, source="small.gguf", **settings)
    scorer.open(None, n_chunks)  # type: ignore[arg-type]
    return scorer


# --- following the text


def test_chunks_map_one_to_one_and_only_new_tokens_are_pushed() -> None:
    drafter = FakeDrafter()
    scorer = opened(Loads(drafter))
    tokens = text(700)
    for length in (70, 300, 301, 700):
        scores = scorer.score(look(tokens[:length]))
        assert scores is not None
        np.testing.assert_array_equal(scores, best(tokens[:length]))
    assert drafter.pushes == [70, 230, 1, 399]


def test_token_0_takes_the_place_of_a_row_of_media() -> None:
    drafter = FakeDrafter()
    tokens = text(300) + 1
    tokens[100:200] = -5
    scores = opened(Loads(drafter)).score(look(tokens))
    np.testing.assert_array_equal(scores, best(np.maximum(tokens, 0)))  # type: ignore[arg-type]
    assert drafter.text == np.maximum(tokens, 0).tolist()


def test_the_same_text_again_pushes_nothing() -> None:
    drafter = FakeDrafter()
    scorer = opened(Loads(drafter))
    tokens = text(300)
    first = scorer.score(look(tokens))
    second = scorer.score(look(tokens))
    assert drafter.pushes == [300]
    np.testing.assert_array_equal(first, second)  # type: ignore[arg-type]


def test_after_a_cut_the_newest_rows_are_read_again() -> None:
    drafter = FakeDrafter()
    scorer = opened(Loads(drafter))
    tokens = text(300)
    scorer.score(look(tokens))
    scorer.truncate(200 // CHUNK)
    scorer.score(look(tokens[:200]))
    assert drafter.pushes == [300, QUERY_ROWS]
    assert drafter.text == tokens[:200].tolist()


edits = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 150)), min_size=1, max_size=8)


@given(edits=edits, n_ctx=st.sampled_from([256, 1024]), grain=st.sampled_from([1, 50, 1 << 20]))
def test_the_drafter_always_ends_where_the_text_ends(edits: list[tuple[int, int]], n_ctx: int, grain: int) -> None:
    drafter = FakeDrafter(n_ctx, grain=grain)
    reader = TokenReader(drafter)
    tokens = text(64)
    for i, (at, more) in enumerate(edits):
        tokens = np.concatenate([tokens[:at], text(more, seed=i + 1)])
        before = len(drafter.pushes)
        found = reader.read(tokens)
        if found is None:
            assert len(tokens) <= QUERY_ROWS
            assert len(drafter.pushes) == before
            continue
        assert drafter.text == tokens[reader.window.base :].tolist()
        assert reader.window.base % CHUNK == 0
        first, scores = found
        np.testing.assert_array_equal(scores, best(tokens)[first:])
        assert (first > 0) == (reader.window.base > 0)


def test_a_text_longer_than_the_drafter_keeps_old_scores() -> None:
    drafter = FakeDrafter(n_ctx=512)
    scorer = opened(Loads(drafter))
    tokens = text(2048)
    for length in range(64, 2049, 64):
        scores = scorer.score(look(tokens[:length]))
        assert scores is not None
        np.testing.assert_array_equal(scores, best(tokens[:length]))  # each was scored while it was in the window
    assert sum(drafter.pushes) <= 2 * len(tokens)


def test_chunks_never_read_are_neutral() -> None:
    scorer = opened(Loads(FakeDrafter(n_ctx=512)))
    tokens = text(1024)
    scores = scorer.score(look(tokens))
    assert scores is not None
    seen = best(tokens)[13:]  # half a window, without the chunk that came first in it
    np.testing.assert_array_equal(scores[13:], seen)
    np.testing.assert_allclose(scores[:13], seen.mean(), rtol=1e-6)


def test_scores_of_a_text_that_is_gone_are_forgotten() -> None:
    scorer = opened(Loads(FakeDrafter(n_ctx=512)))
    tokens = text(640)
    for length in (320, 640):
        scorer.score(look(tokens[:length]))
    scorer.truncate(0)
    other = text(1024, seed=9)
    scores = scorer.score(look(other))
    assert scores is not None
    assert len(set(scores[:13].tolist())) == 1


def test_a_reset_text_is_scored_as_by_a_new_scorer() -> None:
    """However the drafter's window lay, and though it is loaded already."""
    drafters, found = [FakeDrafter(n_ctx=512) for _ in range(2)], []
    tokens = text(1500)
    for drafter in drafters:
        scorer = opened(Loads(drafter), idle=256)
        if drafter is drafters[0]:
            for length in (700, 1000):
                scorer.score(look(np.concatenate([tokens[:600], text(length - 600, seed=5)])))
            scorer.truncate(0)
            drafter.pushes.clear()
        found.append([scorer.score(look(tokens[:length])) for length in range(100, 1500, 100)])
    assert drafters[0].pushes == drafters[1].pushes
    np.testing.assert_equal(found[0], found[1])


def test_a_reader_that_cannot_begin_anew_is_given_up(caplog: Any) -> None:
    drafter = FakeDrafter()
    load = Loads(drafter)
    scorer = opened(load)
    scorer.score(look(text(200)))
    drafter.fail_truncate = OSError("gone")
    scorer.truncate(0)
    assert drafter.closed == 1
    assert "gone" in caplog.text
    load.drafter = FakeDrafter()
    scorer.truncate(0)
    np.testing.assert_array_equal(scorer.score(look(text(300))), best(text(300)))  # type: ignore[arg-type]


def test_too_short_a_text_has_no_scores() -> None:
    drafter = FakeDrafter()
    assert TokenReader(drafter).read(text(QUERY_ROWS)) is None
    assert opened(Loads(drafter)).score(look(text(CHUNK - 1))) is None


def test_common_prefix() -> None:
    a = np.array([1, 2, 3], np.int32)
    assert common_prefix(a, a[:2]) == 2
    assert common_prefix(a, np.array([1, 5, 3], np.int32)) == 1
    assert common_prefix(a[:0], a) == 0


# --- loading and failing


def test_nothing_is_loaded_while_nothing_can_leave() -> None:
    load = Loads(FakeDrafter())
    scorer = opened(load, idle=256)
    assert scorer.score(look(text(256))) is None
    assert load.count == 0
    assert scorer.score(look(text(257))) is not None
    assert scorer.score(look(text(128))) is not None  # what was loaded goes on
    assert load.count == 1


def test_a_failed_load_is_reported_once_and_tried_again_after_a_reset(caplog: Any) -> None:
    load = Loads(FakeDrafter(), ValueError("Failed to load"), ValueError("Failed to load"))
    scorer = opened(load)
    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        for _ in range(5):
            assert scorer.score(look(text(200))) is None
        assert load.count == 1
        scorer.truncate(2)
        assert scorer.score(look(text(200))) is None
        assert load.count == 1
        scorer.truncate(0)
        assert scorer.score(look(text(200))) is None
        assert load.count == 2
    assert len(caplog.records) == 1
    assert "small.gguf" in caplog.text
    assert "Failed to load" in caplog.text
    scorer.truncate(0)
    assert scorer.score(look(text(200))) is not None


@pytest.mark.parametrize("error", [DecodeError("llama_decode returned 2"), MemoryError("no"), OSError("gone")])
def test_a_failure_while_reading_frees_the_drafter(error: BaseException, caplog: Any) -> None:
    drafter = FakeDrafter()
    load = Loads(drafter)
    scorer = opened(load)
    assert scorer.score(look(text(200))) is not None
    drafter.fail = error
    assert scorer.score(look(text(300))) is None
    assert drafter.closed == 1
    assert scorer.score(look(text(400))) is None
    assert load.count == 1
    assert str(error) in caplog.text
    load.drafter = FakeDrafter()
    scorer.truncate(0)
    np.testing.assert_array_equal(scorer.score(look(text(300))), best(text(300)))  # type: ignore[arg-type]


def test_a_bug_is_not_taken_for_a_failure() -> None:
    drafter = FakeDrafter()
    drafter.fail = AssertionError("wrong")
    with pytest.raises(AssertionError, match="wrong"):
        opened(Loads(drafter)).score(look(text(200)))


def test_close_frees_once_and_without_a_load() -> None:
    drafter = FakeDrafter()
    scorer = opened(Loads(drafter))
    scorer.close()
    assert drafter.closed == 0
    scorer.score(look(text(200)))
    scorer.close()
    scorer.close()
    assert drafter.closed == 1


# --- settings


def test_it_is_a_policy_with_a_share_of_its_own() -> None:
    scorer = opened(Loads(FakeDrafter()))
    assert isinstance(scorer, Scorer)
    assert scorer.overhead == 0.15 > MIXED_SHARE
    assert "drafter" in policy.names()


def test_the_name_alone_is_refused_where_no_model_is_known() -> None:
    with pytest.raises(ConfigError, match="needs a model"):
        policy.resolve("drafter")


def test_a_drafter_for_another_policy_is_refused() -> None:
    assert KVFlashConfig(policy="drafter", scorer=Path("a.gguf")).scorer == Path("a.gguf")
    with pytest.raises(ConfigError, match=r"a\.gguf.*'qk'"):
        KVFlashConfig(scorer=Path("a.gguf"))


def test_the_command_line_names_a_drafter() -> None:
    @click.command()
    @pool_options
    def show(pool: Any) -> None:
        config = pool.config()
        click.echo(f"{config.policy} {config.scorer}")

    line = ["--kvflash", "512", "--kvflash-policy", "drafter"]
    assert CliRunner().invoke(show, line).output == "drafter None\n"
    assert CliRunner().invoke(show, [*line, "--kvflash-scorer", "a.gguf"]).output == "drafter a.gguf\n"
    assert CliRunner().invoke(show, line, env={"KVFLASH_SCORER": "b.gguf"}).output == "drafter b.gguf\n"


def test_its_scores_are_saved_with_the_text() -> None:
    def scorer() -> DrafterScorer:
        made = DrafterScorer(lambda: None, source="small", idle=0)  # type: ignore[arg-type,return-value]
        made.open(None, 6)  # type: ignore[arg-type]
        return made

    one, two = scorer(), scorer()
    assert isinstance(one, Resumable)
    one._scores[:4] = [1.5, -2, np.nan, 7]
    rows = one.dump(4)
    assert {len(row) for row in rows} == {one.layout.row_bytes}
    two.load(rows)
    np.testing.assert_array_equal(two._scores[:4], one._scores[:4])
    assert np.isnan(two._scores[4:]).all()
