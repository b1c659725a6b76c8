"""Names of prefixes, and the prefixes that are kept in memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import Future, wait
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
from support.prefix_texts import N_VOCAB, PAGE, ROW_BYTES, make_heap, session, text

from kvflash_ggml.errors import HostMemoryError, SnapshotError
from kvflash_ggml.host import slabs
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.host.image import PageImage
from kvflash_ggml.state.blob import Bytes
from kvflash_ggml.store import segments as chain
from kvflash_ggml.store.prefixes import MemoryTier


@pytest.fixture(autouse=True)
def small_slabs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slabs, "SLAB_BYTES", 8 * PAGE)


# --- names


def test_a_name_depends_on_all_tokens_before_it() -> None:
    root = chain.root_name({"model": "a"})
    one, other = text((1, 64), (2, 64), (3, 64)), text((1, 64), (9, 64), (3, 64))
    a, b = chain.chunk_names(root, one), chain.chunk_names(root, other)
    assert len(a) == 4
    assert a[:2] == b[:2]
    assert not set(a[2:]) & set(b[2:])


def test_names_of_other_facts_share_nothing() -> None:
    tokens = text((1, 200))
    a, b = (chain.chunk_names(chain.root_name({"model": model}), tokens) for model in "ab")
    assert not set(a) & set(b)
    assert chain.root_name({"x": 1, "y": 2}) == chain.root_name({"y": 2, "x": 1})


def test_a_chunk_that_is_not_full_has_no_name_yet() -> None:
    root = chain.root_name({})
    assert len(chain.chunk_names(root, text((1, 63)))) == 1
    assert len(chain.chunk_names(root, text((1, 64)))) == 2
    assert chain.chunk_names(root, text((1, 64), (2, 30))) == chain.chunk_names(root, text((1, 64)))


def test_names_do_not_depend_on_how_tokens_are_stored() -> None:
    tokens = text((1, 128))
    assert chain.chunk_names("00" * 16, tokens) == chain.chunk_names("00" * 16, tokens.astype(np.int64))


# --- the tier


class Bench:
    """A heap, a tier on it, and the pages of the text at hand."""

    def __init__(self, capacity: int = 1 << 30, limit: int | None = None) -> None:
        self.heap: PageHeap = make_heap(limit)
        self.in_use: list[PageImage] = []
        self.tier = MemoryTier(self.heap, capacity, lambda: self.in_use)

    @property
    def free(self) -> int:
        return len(self.heap._slabs._free)

    @property
    def pages(self) -> int:
        return self.heap.host_bytes // PAGE


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench()
    yield bench
    bench.tier.clear()
    assert bench.pages == 0, "a page was not given back"
    assert bench.tier.size == 0
    bench.heap.close()


def test_shared_pages_and_states_are_counted_once(bench: Bench) -> None:
    a = session(bench.heap, text((1, 256)), stateful=True, checkpoints=[128])
    b = session(bench.heap, text((1, 256), (2, 128)), stateful=True, after=a)
    b.checkpoints = dict(a.checkpoints)
    bench.tier.put(a)
    bench.tier.put(b)
    assert bench.tier.size == 6 * (PAGE + ROW_BYTES) + 3 * 100 + a.own_size + b.own_size
    assert bench.pages == 6


def test_pages_in_use_are_not_counted(bench: Bench) -> None:
    a = session(bench.heap, text((1, 256)))
    bench.in_use = [*a.pages[:3], *bench.heap.new(1)]
    bench.tier.put(a)
    assert bench.tier.size == PAGE + 4 * ROW_BYTES + a.own_size
    bench.heap.release(bench.in_use.pop())


def test_own_bytes_are_counted(bench: Bench) -> None:
    a = session(bench.heap, text((1, 256)))
    assert a.own_size == 256 * 4 + 6 * 4 + N_VOCAB * 4  # tokens, queries, logits
    assert a.size == a.own_size + 4 * (PAGE + ROW_BYTES)
    a.release()


def test_the_text_used_longest_ago_goes_first() -> None:
    first = session(make_heap(), text((1, 256)))
    bench = Bench(capacity=3 * first.size + 100)
    texts = [session(bench.heap, text((seed, 256))) for seed in range(5)]
    for saved in texts[:3]:
        bench.tier.put(saved)
    bench.tier.take(texts[0]).release()
    bench.tier.put(texts[3])
    known = [bench.tier.known(saved.tokens) for saved in texts]
    assert known == [256, 0, 256, 256, 0]
    bench.tier.put(texts[4])
    known = [bench.tier.known(saved.tokens) for saved in texts]
    assert known == [256, 0, 0, 256, 256]
    assert bench.pages == 12


def test_a_page_goes_exactly_with_its_last_holder(bench: Bench) -> None:
    a = session(bench.heap, text((1, 256)))
    b = session(bench.heap, text((1, 256), (2, 64)), after=a)
    in_use = bench.heap.retain(a.pages[3])
    bench.tier.put(a)
    bench.tier.put(b)
    shared = b.share()
    assert bench.tier.evict()
    assert bench.pages == 5
    assert bench.tier.evict()
    assert bench.pages == 5, "a taken session lost its pages"
    shared.release()
    assert bench.pages == 1
    shared.release()
    assert bench.pages == 1, "a second release let go of a page of somebody else"
    bench.heap.release(in_use)
    assert bench.pages == 0
    assert not bench.tier.evict()


def test_without_capacity_nothing_is_kept() -> None:
    bench = Bench(capacity=0)
    bench.tier.put(session(bench.heap, text((1, 256))))
    assert len(bench.tier) == 0
    assert bench.pages == 0


def test_the_longest_text_is_found(bench: Bench) -> None:
    short, long = text((1, 256)), text((1, 256), (2, 100))
    for tokens in (short, long, text((3, 500))):
        bench.tier.put(session(bench.heap, tokens))
    saved, length = bench.tier.find(text((1, 256), (2, 50), (4, 10)), stateful=False)
    assert (saved and saved.length, length) == (356, 306)
    assert bench.tier.find(text((7, 100)), stateful=False) == (None, 0)
    assert bench.tier.find(text(), stateful=False) == (None, 0)


def test_of_texts_that_share_as_much_the_one_that_ends_there_is_found(bench: Bench) -> None:
    prompt, answered = text((1, 300)), text((1, 300), (2, 40))
    bench.tier.put(session(bench.heap, answered))
    bench.tier.put(session(bench.heap, prompt))
    bench.tier.put(session(bench.heap, text((1, 300), (3, 40))))
    saved, length = bench.tier.find(prompt, stateful=False)
    assert (saved and saved.length, length) == (300, 300)


def test_a_state_can_only_be_continued_at_its_end_and_at_checkpoints(bench: Bench) -> None:
    a = session(bench.heap, text((1, 300)), stateful=True, checkpoints=[128, 200])
    bench.tier.put(a)
    assert bench.tier.find(text((1, 300), (2, 9)), stateful=True) == (a, 300)
    assert bench.tier.find(text((1, 300))[:299], stateful=True) == (a, 200)
    assert bench.tier.find(text((1, 300))[:199], stateful=True) == (a, 128)
    assert bench.tier.find(text((1, 300))[:100], stateful=True) == (None, 0)
    assert bench.tier.find(text((1, 300))[:299], stateful=False) == (a, 299)


def test_a_state_without_logits_cannot_end_a_prompt(bench: Bench) -> None:
    """Its last token would have to be evaluated again, from a place that is not known."""
    a = session(bench.heap, text((1, 300)), stateful=True, checkpoints=[128, 200], logits=False)
    bench.tier.put(a)
    assert bench.tier.find(text((1, 300)), stateful=True) == (a, 200)
    assert bench.tier.find(text((1, 300))[:200], stateful=True) == (a, 128)
    assert bench.tier.find(text((1, 300), (2, 1)), stateful=True) == (a, 300)


def test_holders_of_a_lost_page_are_dropped(bench: Bench) -> None:
    a = session(bench.heap, text((1, 256)))
    b = session(bench.heap, text((1, 256), (2, 64)), after=a)
    c = session(bench.heap, text((3, 256)))
    for saved in (a, b, c):
        bench.tier.put(saved)
    bench.tier.drop_holders({b.pages[0]})
    assert [bench.tier.known(saved.tokens) for saved in (a, b, c)] == [0, 0, 256]


# --- a ceiling on host memory


def test_a_full_heap_takes_back_what_is_only_kept() -> None:
    bench = Bench(limit=8 * PAGE)
    bench.heap.add_reclaimer(bench.tier.evict)
    a = session(bench.heap, text((1, 256)))
    b = session(bench.heap, text((2, 192)))
    bench.tier.put(a)
    bench.tier.put(b)
    pages = bench.heap.new(1)
    assert len(bench.tier) == 2
    pages += bench.heap.new(1)
    assert [bench.tier.known(saved.tokens) for saved in (a, b)] == [0, 192]
    pages += bench.heap.new(3)
    assert len(bench.tier) == 1
    with pytest.raises(HostMemoryError):
        bench.heap.new(4)
    assert len(bench.tier) == 0
    assert bench.pages == 5


def test_memory_that_is_refused_is_taken_back_too() -> None:
    bench = Bench()
    bench.heap.add_reclaimer(bench.tier.evict)
    bench.tier.put(session(bench.heap, text((1, 256))))
    ahead = bench.heap._slabs._next
    if ahead is not None:
        wait([ahead])
    bench.heap._memory.refuse_alloc = True  # type: ignore[attr-defined]
    bench.heap.new(bench.free)
    if ahead is not None:  # it was made ahead of need
        bench.heap.new(1)
        bench.heap.new(bench.free)
    assert len(bench.tier) == 1
    bench.heap.new(4)
    assert len(bench.tier) == 0
    with pytest.raises(HostMemoryError):
        bench.heap.new(1)


def test_a_session_that_was_taken_outlives_a_full_heap() -> None:
    bench = Bench(limit=4 * PAGE)
    bench.heap.add_reclaimer(bench.tier.evict)
    a = session(bench.heap, text((1, 256)))
    bench.tier.put(a)
    saved = bench.tier.take(a)
    with pytest.raises(HostMemoryError):
        bench.heap.new(1)
    assert len(bench.tier) == 0
    with pytest.raises(SnapshotError, match="evicted because memory was full"):
        bench.tier.take(a)
    for page in saved.pages:
        with bench.heap.lease([page]):
            pass
    saved.release()
    assert bench.pages == 0


def test_another_thread_can_find_the_heap_full_at_any_time() -> None:
    """The policy's thread recalls pages while texts are looked up, taken and kept."""
    bench = Bench(limit=24 * PAGE)
    bench.heap.add_reclaimer(bench.tier.evict)
    stop, failed = threading.Event(), []

    def fill() -> None:
        try:
            while not stop.is_set():
                for page in bench.heap.new(8):
                    bench.heap.release(page)
        except BaseException as err:
            failed.append(err)

    thread = threading.Thread(target=fill)
    thread.start()
    try:
        for turn in range(300):
            tokens = text((turn % 7, 128 + 64 * (turn % 3)))
            bench.tier.put(session(bench.heap, tokens))
            saved, _ = bench.tier.find(tokens, stateful=False)
            with suppress(SnapshotError):
                if saved is not None:
                    taken = bench.tier.take(saved)
                    assert [page.holders > 0 for page in taken.pages]
                    taken.release()
            assert bench.tier.size >= 0
    finally:
        stop.set()
        thread.join()
    assert not failed
    bench.tier.clear()
    assert bench.pages == 0


def test_blobs_of_equal_bytes_are_still_two(bench: Bench) -> None:
    a = session(bench.heap, text((1, 64)))
    a.checkpoints = {10: Bytes(bytes(50)), 20: Bytes(bytes(bytearray(50)))}
    bench.tier.put(a)
    assert bench.tier.size == PAGE + ROW_BYTES + 100 + a.own_size


def test_statistics_that_come_late_are_not_counted(bench: Bench) -> None:
    """What is let go of is what was counted, though a text has more by then."""
    a = session(bench.heap, text((1, 256)))
    assert a.policy is not None
    rows, late = a.policy.statistics.result(), Future[Any]()
    a.policy.statistics = late
    bench.tier.put(a)
    before = bench.tier.size
    late.set_result(rows)
    b = session(bench.heap, text((1, 256), (2, 64)), after=a)
    bench.tier.put(b)
    both = bench.tier.size
    assert both == before + PAGE + 5 * ROW_BYTES + b.own_size
    bench.tier.drop(a)
    assert bench.tier.size == b.size, "the rows that both have are still held"
