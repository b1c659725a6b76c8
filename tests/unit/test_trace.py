"""The recorder of a page table, what a session tells it, and the share of attention that misses the pool."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.fake_engine import FakeEngine, make_session
from support.fake_session import accept

from kvflash_ggml.config import KVFlashConfig
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, DecodeError
from kvflash_ggml.files import check_writable, write_atomically
from kvflash_ggml.policy import heads
from kvflash_ggml.policy.heads import over_chunks
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.sequence import Sequence
from kvflash_ggml.trace import recorder as trace_module
from kvflash_ggml.trace.events import Change, Events, evicted_share
from kvflash_ggml.trace.recorder import Trace, thinned


def fill(trace: Trace, count: int, *, chunks: int = 4, scored: bool = True) -> None:
    for i in range(count):
        trace.changed(
            Change(
                length=(i + 1) * CHUNK,
                resident=tuple(range(i % chunks + 1)),
                recalled=(i,),
                scores=np.full(chunks, i, np.float32) if scored and i % 3 == 0 else None,
                evicted_mass=0.5 if i % 3 == 0 else None,
                generating=i >= count // 2,
            )
        )


# --- the trace


def test_a_moment_is_what_was_told() -> None:
    trace = Trace()
    scores = np.array([1.0, 2.0], np.float32)
    trace.changed(Change(
        length=130, resident=(0, 2, 9), recalled=(2, 9), scores=scores, evicted_mass=0.25, generating=True
    ))  # fmt: skip
    scores[:] = 0  # the caller may go on to use its array
    (moment,) = trace.moments
    assert moment.length == 130
    assert moment.resident == (0, 2, 9)
    assert moment.recalled == (2, 9)
    assert moment.scores is not None
    assert moment.scores.tolist() == [1.0, 2.0]
    assert moment.evicted_mass == 0.25
    assert moment.generating
    assert trace.page_ins == 2


def test_an_empty_page_table_is_a_moment_too() -> None:
    trace = Trace()
    trace.changed(Change(length=0, resident=(), recalled=(), scores=None, evicted_mass=None, generating=False))
    assert trace.moments[0].resident == ()


def test_a_cut_that_moves_nothing_is_no_moment() -> None:
    trace = Trace()
    for length in (300, 299, 280):
        trace.changed(Change(
            length=length, resident=(0, 2, 4), recalled=(), scores=None, evicted_mass=None, generating=True
        ))  # fmt: skip
    assert len(trace.moments) == 1


def test_a_long_trace_thins_out_evenly_and_loses_no_page_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_MOMENTS", 50)
    trace = Trace()
    fill(trace, 1111)
    assert 25 <= len(trace.moments) <= 50
    assert trace.page_ins == 1111
    assert sorted(c for moment in trace.moments for c in moment.recalled) == list(range(1111))
    assert sum(moment.changes for moment in trace.moments) == 1111
    assert trace.moments[-1].length == 1111 * CHUNK
    assert trace.moments[-1].resident == tuple(range(1110 % 4 + 1))
    assert {moment.changes for moment in trace.moments[:-1]} == {32}
    assert all(moment.scores is not None for moment in trace.moments[:-1])


def test_many_bytes_thin_it_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_module, "MAX_BYTES", 20_000)
    trace = Trace()
    fill(trace, 600, chunks=100)
    assert sum(moment.nbytes for moment in trace.moments) <= 20_000
    assert trace.page_ins == 600


def test_of_two_moments_the_later_page_table_and_the_later_look_stay() -> None:
    trace = Trace()
    fill(trace, 5)
    first, second, odd = thinned(trace.moments)
    assert first.resident == (0, 1)
    assert first.scores is not None
    assert first.scores[0] == 0  # of the first of the two: the second was not looked at
    assert first.evicted_mass == 0.5
    assert second.scores is not None
    assert second.scores[0] == 3
    assert odd == trace.moments[4]


# --- what a session tells


def session(pool: int = 1024, **config: Any) -> Sequence:
    return make_session(
        FakeEngine(pool, 256), KVFlashConfig(pool=pool, policy="lru", **config), n_ctx=8192, n_batch=256, n_ubatch=256
    )  # fmt: skip


def test_a_session_tells_every_change_and_the_truth() -> None:
    one = session()
    trace = one.events.observer = Trace()
    extend(one, np.arange(3000, dtype=np.int32))
    for _ in range(200):
        extend(one, np.array([7], np.int32))
    one.pin_range(64, 256)
    extend(one, np.array([7], np.int32))
    assert trace.page_ins == one.paging.page_ins == 3
    assert trace.moments[-1].resident == one.table.resident_chunks
    assert [moment.generating for moment in trace.moments] == [False] * 12 + [True] * 4
    assert trace.moments[11].length == 3000

    one.finish(one.prepare_drafts(np.arange(8, dtype=np.int32), None))
    accept(one, 8)
    one.finish(one.prepare_drafts(np.arange(60, dtype=np.int32), None))
    accept(one, 60)
    assert trace.moments[-1].generating

    one.truncate(500)
    assert trace.moments[-1].length == one.length
    assert trace.moments[-1].resident == one.table.resident_chunks
    one.reset()
    assert trace.moments[-1].length == 0
    assert trace.moments[-1].resident == ()
    one.close()


def test_a_failed_step_is_told_as_it_ended() -> None:
    one = session()
    trace = one.events.observer = Trace()
    extend(one, np.arange(200, dtype=np.int32))
    one.engine.faults.step = 0
    with pytest.raises(DecodeError):
        extend(one, np.arange(200, dtype=np.int32))
    assert trace.moments[-1].length == 200
    assert trace.moments[-1].resident == one.table.resident_chunks == (0, 1, 2, 3)
    one.close()


def test_without_an_observer_nothing_is_told() -> None:
    one = session()
    one.events.changed = None  # type: ignore[assignment, method-assign]  # must not be called
    extend(one, np.arange(3000, dtype=np.int32))
    one.close()


# --- the share of attention


def watch(*shares: list[float]) -> tuple[Events, list[Any]]:
    looks = [(np.zeros(len(each), np.float32), np.array(each, np.float32)) for each in shares]
    scorer = SimpleNamespace(shares_of=lambda scores: next((s for k, s in looks if k is scores), None))
    return Events(scorer), [scores for scores, _ in looks]


def test_evicted_share_is_what_is_not_resident() -> None:
    shares = np.array([0.5, 0.2, 0.2, 0.1], np.float32)
    assert evicted_share(shares, (0, 3)) == pytest.approx(0.4)
    assert evicted_share(shares, (0, 1, 2, 3, 4, 5)) == pytest.approx(0.0, abs=1e-6)
    assert evicted_share(shares, ()) == 1.0
    assert evicted_share(np.full(3, 0.4, np.float32), (0, 1, 2)) == 0.0  # rounding never leaves 0..1


def test_the_mean_begins_at_the_last_look_of_the_prompt() -> None:
    one, (a, b, c) = watch([1.0, 0.0], [0.5, 0.5], [0.25, 0.75])
    assert one.evicted_mass is None
    one.score(a)
    assert one.scores is not None
    one.changed(64, (1,), generating=False)
    assert one.scores is None
    assert one.evicted_mass == pytest.approx(1.0)
    one.score(b)
    one.truncated(64, (1,))  # a replay cuts before it follows the look
    one.changed(128, (1,), generating=False)
    assert one.evicted_mass == pytest.approx(0.5)
    one.score(c)
    one.changed(129, (1,), generating=True)
    assert one.evicted_mass == pytest.approx((0.5 + 0.25) / 2)
    one.changed(193, (1,), generating=True)  # a change without a look
    assert one.evicted_mass == pytest.approx((0.5 + 0.25) / 2)
    one.reset()
    assert one.evicted_mass is None


def test_a_policy_that_cannot_tell_is_not_asked() -> None:
    one = Events(SimpleNamespace())
    one.score(np.zeros(2, np.float32))
    one.changed(64, (0,), generating=False)
    assert one.evicted_mass is None
    assert Events(None).evicted_mass is None


def test_shares_are_those_of_the_masses() -> None:
    masses = np.log(np.array([[0.7, 0.2, 0.1]], np.float32)) + 5
    before = masses.copy()
    assert over_chunks(masses).shares == pytest.approx([0.7, 0.2, 0.1], rel=1e-5)
    np.testing.assert_array_equal(masses, before)


def test_a_column_counts_by_its_largest_share() -> None:
    focused, even = [0.9, 0.05, 0.05], [1 / 3, 1 / 3, 1 / 3]
    masses = np.log(np.array([focused, even], np.float32))
    shares = over_chunks(masses).shares
    weights = np.array([0.9, 1 / 3]) / (0.9 + 1 / 3)
    assert shares == pytest.approx(weights @ np.array([focused, even]), rel=1e-5)
    assert shares.sum() == pytest.approx(1.0)


def test_of_many_columns_a_sample_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    masses = rng.normal(0, 1, (4096, 8)).astype(np.float32)
    sampled = over_chunks(masses).shares
    monkeypatch.setattr(heads, "MAX_COLUMNS", 1 << 20)
    assert sampled == pytest.approx(over_chunks(masses).shares, abs=0.02)
    assert sampled == pytest.approx(over_chunks(masses[::5]).shares, rel=1e-5)  # across the blocks of a pass


# --- files


def test_a_file_is_replaced_as_a_whole(tmp_path: Path) -> None:
    path = tmp_path / "out.html"
    write_atomically(path, "first")
    write_atomically(path, "second")
    assert path.read_text() == "second"
    assert [each.name for each in tmp_path.iterdir()] == ["out.html"]
    mask = os.umask(0)
    os.umask(mask)
    assert stat.S_IMODE(path.stat().st_mode) == 0o666 & ~mask


def test_a_failed_write_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "out.html"
    path.write_text("before")
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError("full")))
    with pytest.raises(OSError, match="full"):
        write_atomically(path, "after")
    assert path.read_text() == "before"
    assert [each.name for each in tmp_path.iterdir()] == ["out.html"]


def test_what_cannot_be_written_is_told_before(tmp_path: Path) -> None:
    check_writable(tmp_path / "new.html")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ConfigError, match="No such file or directory"):
        check_writable(tmp_path / "missing" / "out.html")
    with pytest.raises(ConfigError, match="is a folder"):
        check_writable(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="Not a directory"):
        check_writable(tmp_path / "file" / "out.html")
