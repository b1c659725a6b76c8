"""What goes wrong around a step is reported, and what was before it stays whole."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import CHUNK, check, logits_along, same_bits
from support.harness import pages as all_pages
from support.inside import inside
from support.integrity import check_table

from kvflash_ggml.errors import ConfigError, DecodeError, HostMemoryError, PoolExhausted

N_CTX = 4096


def make(llama: Any, kind: str = "dense", **settings: Any) -> Any:
    return llama(kind, **({"n_ctx": N_CTX, "kvflash": 512} | settings))


def once(owner: Any, name: str, error: BaseException, *, call: int = 1) -> None:
    """The call-th next call of owner.name raises; later ones do what they did."""
    original, left = getattr(owner, name), [call]

    def fail(*args: Any, **kwargs: Any) -> Any:
        left[0] -= 1
        if left[0] == 0:
            setattr(owner, name, original)
            raise error
        return original(*args, **kwargs)

    setattr(owner, name, fail)


def pages(llm: Any) -> list[bytes]:
    """All page images, the last cut to the rows that are in use."""
    return all_pages(inside(llm).session)[: llm.kvflash.length // CHUNK]


# --- host memory


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
@pytest.mark.parametrize("limit", [1, 3, 10])
def test_spill_changes_no_bit(kind: str, limit: int, llama: Any, tokens: Any, tmp_path: Path) -> None:
    """A ceiling of few pages, and a folder: pages go through the file, there and back."""
    free = make(llama, kind)
    page = free.kvflash.page_bytes
    tight = make(llama, kind, kvflash_host_limit=limit * page, kvflash_spill=tmp_path)
    rows = []
    for llm in (free, tight):
        llm.eval(tokens[:1500].tolist())
        llm.n_tokens = 0 if kind != "dense" else 700
        if kind != "dense":
            inside(llm).session.truncate(0)
            llm.eval(tokens[:1500].tolist())
            llm.kvflash.pin(5 * CHUNK, 5 * CHUNK + 1)
        rows.append(logits_along(llm, tokens[1500:1501], tokens[1501:1540]))
        check(llm)
    assert same_bits(*rows)
    assert tight.kvflash.page_ins == free.kvflash.page_ins > 0
    assert tight.kvflash.spilled_bytes > 0
    assert tight.kvflash.host_bytes <= limit * page
    assert pages(tight) == pages(free)
    assert list(tmp_path.iterdir()) == [], "the spill file has no name"


def test_ceiling_without_a_folder(llama: Any, tokens: Any) -> None:
    page = make(llama).kvflash.page_bytes
    llm = make(llama, kvflash_host_limit=12 * page)
    with pytest.raises(HostMemoryError, match="spill folder"):
        llm.eval(tokens[:2000].tolist())
    assert 0 < llm.n_tokens < 2000
    with pytest.raises(HostMemoryError):
        llm.eval(tokens[llm.n_tokens : llm.n_tokens + 500].tolist())
    llm.reset()
    fresh = make(llama, kvflash_host_limit=12 * page)
    ours = logits_along(llm, tokens[:600], tokens[600:640])
    check(llm)
    assert same_bits(ours, logits_along(fresh, tokens[:600], tokens[600:640]))


def test_refused_host_memory(llama: Any, tokens: Any, monkeypatch: Any) -> None:
    llm = make(llama)
    with monkeypatch.context() as patch:
        patch.setattr(inside(llm).session.engine, "alloc", lambda size: 0)
        with pytest.raises(HostMemoryError, match="could not get"):
            llm.eval(tokens[:1000].tolist())
    llm.eval(tokens[llm.n_tokens : 1000].tolist())
    check(llm)
    fresh = make(llama)
    fresh.eval(tokens[:1000].tolist())
    assert llm.kvflash.resident_chunks == fresh.kvflash.resident_chunks
    llm.close()


def test_no_spill_folder(llama: Any, tokens: Any, tmp_path: Path) -> None:
    page = make(llama).kvflash.page_bytes
    settings = {"kvflash_host_limit": 2 * page, "kvflash_spill": tmp_path / "absent"}
    with pytest.raises(ConfigError, match="absent is no folder"):
        make(llama, **settings)
    (tmp_path / "absent").mkdir()
    llm = make(llama, **settings)
    (tmp_path / "absent").rmdir()
    with pytest.raises(HostMemoryError, match="absent"):
        llm.eval(tokens[:1000].tolist())
    (tmp_path / "absent").mkdir()
    llm.eval(tokens[llm.n_tokens : 1000].tolist())
    check(llm)


def test_a_ceiling_below_one_page(llama: Any, tokens: Any, tmp_path: Path) -> None:
    """Even a page on its way to the file needs a place in memory."""
    llm = make(llama, kvflash_host_limit=1000, kvflash_spill=tmp_path)
    with pytest.raises(HostMemoryError, match="raise host_limit"):
        llm.eval(tokens[:1000].tolist())


def test_a_spill_file_that_cannot_be_read(llama: Any, tokens: Any, tmp_path: Path) -> None:
    """The recall fails, the step is undone, and the chunk is still wanted once it can be read."""
    page = make(llama).kvflash.page_bytes
    llm = make(llama, kvflash_host_limit=page, kvflash_spill=tmp_path)
    llm.eval(tokens[:1500].tolist())
    before = pages(llm)
    spill = inside(llm).session.store.heap._spill
    spill._file = BrokenFile(spill._file)
    llm.kvflash.pin(5 * CHUNK, 5 * CHUNK + 1)
    with pytest.raises(HostMemoryError, match="could not read a chunk back"):
        llm.eval(tokens[1500:1501].tolist())
    assert llm.n_tokens == 1500
    check(llm)
    spill._file = spill._file.file
    llm.eval(tokens[1500:1501].tolist())
    check(llm)
    assert 5 in llm.kvflash.resident_chunks
    assert pages(llm) == before


def test_a_recall_that_fails_half_way(llama: Any, tokens: Any, tmp_path: Path) -> None:
    """Two chunks come back one by one, since memory holds one page; the second cannot be read."""
    page = make(llama).kvflash.page_bytes
    llm = make(llama, kvflash=768, kvflash_host_limit=page, kvflash_spill=tmp_path)
    llm.eval(tokens[:1500].tolist())
    assert not {5, 6} & set(llm.kvflash.resident_chunks)
    spill = inside(llm).session.store.heap._spill
    spill._file = BrokenFile(spill._file, good=1)
    llm.kvflash.pin(5 * CHUNK, 7 * CHUNK)
    with pytest.raises(HostMemoryError, match="could not read a chunk back"):
        llm.eval(tokens[1500:1501].tolist())
    check(llm)
    spill._file = spill._file.file
    llm.eval(tokens[1500:1501].tolist())
    check(llm)
    assert {5, 6} <= set(llm.kvflash.resident_chunks)


class BrokenFile:
    """Reads `good` times, and then no more."""

    def __init__(self, file: Any, *, good: int = 0) -> None:
        self.file = file
        self.good = good

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)

    def readinto(self, data: Any) -> int:
        if self.good > 0:
            self.good -= 1
            return int(self.file.readinto(data))
        raise OSError("bad sector")


# --- steps


def failures() -> dict[str, Callable[[Any, int], None]]:
    no_luck = DecodeError("no luck")
    return {
        "step": lambda session, n: once(session.engine, "step", no_luck, call=n),
        "page_out": lambda session, n: once(session.engine, "page_out", OSError("wire"), call=n),
        "fill": lambda session, n: once(session.mask, "fill", KeyboardInterrupt(), call=n),
        "allocate": lambda session, n: once(session.store, "allocate", HostMemoryError("none"), call=n),
    }


@pytest.mark.parametrize("call", [1, 4, 9])
@pytest.mark.parametrize("what", ["step", "page_out", "fill", "allocate"])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_any_failure_in_a_prompt(kind: str, what: str, call: int, llama: Any, tokens: Any) -> None:
    """After it the rest of the prompt can be read, and every page holds what it would have held."""
    split = {"n_batch": 64, "n_ubatch": 64}
    llm, fresh = make(llama, kind, **split), make(llama, kind, **split)
    failures()[what](inside(llm).session, call)
    with pytest.raises((DecodeError, OSError, KeyboardInterrupt, HostMemoryError)):
        llm.eval(tokens[:800].tolist())
    done = llm.n_tokens
    assert done < 800
    assert done % 64 == 0
    check_table(inside(llm).session.table)
    llm.eval(tokens[done:800].tolist())
    check(llm)
    fresh.eval(tokens[:800].tolist())
    assert pages(llm) == pages(fresh)
    ours, theirs = (logits_along(one, tokens[800:801], tokens[801:810]) for one in (llm, fresh))
    assert same_bits(ours, theirs)


def test_a_failed_recall_is_tried_again(llama: Any, tokens: Any) -> None:
    llm = make(llama)
    llm.eval(tokens[:1500].tolist())
    once(inside(llm).session.engine, "page_in", OSError("wire"))
    llm.kvflash.pin(5 * CHUNK, 5 * CHUNK + 1)
    with pytest.raises(OSError, match="wire"):
        llm.eval(tokens[1500:1501].tolist())
    assert llm.n_tokens == 1500
    check(llm)
    llm.eval(tokens[1500:1501].tolist())
    check(llm)
    assert 5 in llm.kvflash.resident_chunks


def test_an_interrupted_generation_goes_on(llama: Any, tokens: Any) -> None:
    """The generator is left in the middle, by an exception in the caller and by one in the engine."""
    llm, fresh = make(llama), make(llama)
    prompt = tokens[:600].tolist()
    expected = [t for t, _ in zip(fresh.generate(prompt, temp=0.0), range(30), strict=False)]
    generator = llm.generate(prompt, temp=0.0)
    got = [next(generator) for _ in range(10)]
    once(inside(llm).session.engine, "step", KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        next(generator)
    check(llm)
    again = llm.generate([*prompt, *got], temp=0.0)
    got += [next(again) for _ in range(20)]
    assert got == expected


def test_a_progress_callback_may_stop_the_prompt(llama: Any, tokens: Any) -> None:
    llm, fresh = make(llama), make(llama)

    def stop(done: int, total: int) -> None:
        if done > 600:
            raise KeyboardInterrupt

    llm.kvflash_progress = stop
    with pytest.raises(KeyboardInterrupt):
        llm.eval(tokens[:1200].tolist())
    llm.kvflash_progress = None
    done = llm.n_tokens
    assert 600 < done < 1200
    check(llm)
    for one in (llm, fresh):
        if one is fresh:
            one.eval(tokens[:done].tolist())
        one.eval(tokens[done:1200].tolist())
    assert pages(llm)[: done // CHUNK] == pages(fresh)[: done // CHUNK]


def test_a_pool_without_victims(llama: Any, tokens: Any) -> None:
    """Chunks without an image cannot leave: the error says so, and the text stays."""
    llm = make(llama)
    llm.eval(tokens[:512].tolist())
    paging = inside(llm).session.paging
    paging.store.clear()
    paging.save = lambda: None
    with pytest.raises(PoolExhausted, match="larger pool"):
        llm.eval(tokens[512:513].tolist())
    assert llm.n_tokens == inside(llm).session.length == 512
    check(llm)
    paging._save([2])
    llm.eval(tokens[512:513].tolist())
    assert 2 not in llm.kvflash.resident_chunks
    check(llm)


def test_nothing_is_evaluated_after_close(llama: Any, tokens: Any) -> None:
    llm = make(llama)
    llm.eval(tokens[:100].tolist())
    llm.close()
    with pytest.raises(Exception, match="closed"):
        llm.eval(tokens[100:101].tolist())
