"""A pool gets another size: the text and its memory stay, and nothing is read again."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import check, row, same_bits
from support.inside import inside, let_make_contexts

from kvflash_ggml import SpecConfig
from kvflash_ggml.errors import ConfigError, DoesNotFit, KVFlashError

PROMPT, STEPS = 900, 12
SETTINGS = {"n_ctx": 2048, "kvflash_policy": "qk", "kvflash_tau": 8}


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def go_on(llm: Any, tokens: Any) -> Any:
    rows = []
    for token in tokens[PROMPT : PROMPT + STEPS]:
        llm.eval([int(token)])
        rows.append(row(llm))
    return np.stack(rows)


@pytest.mark.parametrize("kind", ["small", "hybrid"])
@pytest.mark.parametrize("size", [1024, 512, 2048])
def test_the_answer_is_that_of_a_pool_of_this_size(
    llama: Callable[..., Any], tokens: Any, tmp_path: Path, kind: str, size: int
) -> None:
    llm = llama(kind, kvflash=768, **SETTINGS)
    llm.eval(tokens[:PROMPT].tolist())
    llm.save_snapshot(tmp_path / "text.kvs")
    outs, address = llm.kvflash.page_outs, inside(llm).session.paging.heap
    assert llm.resize_pool(size) == size
    assert llm.kvflash.pool == size
    assert llm.n_tokens == PROMPT
    assert inside(llm).session.paging.heap is address
    assert inside(llm).session.engine.decode_seconds == 0, "something was read again"
    assert outs >= PROMPT // 64 - 1
    found = go_on(llm, tokens)
    check(llm)

    other = llama(kind, kvflash=size, **SETTINGS)
    other.load_snapshot(tmp_path / "text.kvs")
    assert same_bits(found, go_on(other, tokens))


def test_back_and_forth(llama: Callable[..., Any], tokens: Any) -> None:
    llm = llama("small", kvflash=512, kvflash_cache=None, **SETTINGS)
    llm.eval(tokens[:PROMPT].tolist())
    for size in (1024, 512, 2048, 512):
        assert llm.resize_pool(size) == size
    assert llm.resize_pool(512) == 512
    llm.eval(tokens[PROMPT : PROMPT + 300].tolist())
    check(llm)
    assert llm.kvflash.page_outs > 0


def test_a_failure_leaves_the_session_as_it_was(
    llama: Callable[..., Any], tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_cpp import llama_cpp

    from kvflash_ggml.host.slabs import Slabs
    from kvflash_ggml.sequence import restore

    def begun() -> Any:
        llm = llama("small", kvflash=768, **SETTINGS)
        llm.eval(tokens[:PROMPT].tolist())
        return llm

    wanted = go_on(begun(), tokens)
    llm = begun()
    with monkeypatch.context() as patch:
        patch.setattr(llama_cpp, "llama_init_from_model", lambda *args: None)
        with pytest.raises(DoesNotFit, match="second pool"):
            llm.resize_pool(1024)
    with monkeypatch.context() as patch:
        patch.setattr(restore, "load", lambda session, saved, then: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            llm.resize_pool(1024)
    with monkeypatch.context() as patch:
        engines: list[Any] = []

        def refused(llm: Any, config: Any, pool: Any, scorer: Any) -> Any:
            engines.append(pool.engine)
            raise MemoryError

        patch.setattr("kvflash_ggml.llama.opening.open_sequence", refused)
        with pytest.raises(MemoryError):
            llm.resize_pool(1024)
        assert [engine.closed for engine in engines] == [True]
    with monkeypatch.context() as patch:
        move = Slabs.move

        def interrupted(slabs: Any, memory: Any, hand_over: Any) -> None:
            patch.undo()
            move(slabs, memory, hand_over)
            raise KeyboardInterrupt

        patch.setattr(Slabs, "move", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.resize_pool(1024)
    with pytest.raises(ConfigError, match="positive number"):
        llm.resize_pool(0)
    assert llm.kvflash.pool == 768
    assert same_bits(go_on(llm, tokens), wanted)
    check(llm)


@pytest.mark.parametrize("fits", [True, False])
def test_without_room_for_both_the_smallest_pool_comes_between(
    llama: Callable[..., Any], tokens: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fits: bool
) -> None:
    """And if there is no room for the new one then either, the old one comes back."""
    llm = llama("hybrid", kvflash=1024, **SETTINGS)
    llm.eval(tokens[:PROMPT].tolist())
    llm.save_snapshot(tmp_path / "text.kvs")
    made = []

    def tight(make: Any, size: Any, session: Any) -> Any:
        made.append(size.slots)
        if size.slots + session.pool.n_slots > 1536 or (size.slots == 768 and not fits):
            raise DoesNotFit("CUDA0", needed=2, free=1, needs={})
        return make(size)

    let_make_contexts(monkeypatch, llm, tight)
    if fits:
        assert llm.resize_pool(768) == 768
        assert made == [768, 512, 768]
    else:
        with pytest.raises(DoesNotFit):
            llm.resize_pool(768)
        assert made == [768, 512, 768, 1024]
    size = llm.kvflash.pool
    assert size == (768 if fits else 1024)
    assert llm.n_tokens == inside(llm).session.length == PROMPT
    found = go_on(llm, tokens)
    check(llm)
    other = llama("hybrid", kvflash=size, **SETTINGS)
    other.load_snapshot(tmp_path / "text.kvs")
    assert same_bits(found, go_on(other, tokens))


def test_an_interrupt_between_two_sizes_loses_nothing(
    llama: Callable[..., Any], tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from llama_cpp import _internals as internals

    llm = llama("small", kvflash=1024, kvflash_spec=SpecConfig(types=("ngram",)), **SETTINGS)
    list(islice(llm.generate(tokens[:PROMPT].tolist(), temp=0), 8))
    close, first = internals.LlamaContext.close, llm._ctx
    length, total = llm.n_tokens, llm.kvflash.spec.total
    assert total.steps + total.plain_steps > 0

    def tight(make: Any, size: Any, session: Any) -> Any:
        if size.slots + session.pool.n_slots > 1536:
            raise DoesNotFit("CUDA0", needed=2, free=1, needs={})
        return make(size)

    def interrupted(self: Any) -> None:
        close(self)
        if self is first:
            raise KeyboardInterrupt

    let_make_contexts(monkeypatch, llm, tight)
    with monkeypatch.context() as patch:
        patch.setattr(internals.LlamaContext, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.resize_pool(768)
    assert llm.kvflash.pool == 1024
    assert llm.n_tokens == inside(llm).session.length == length
    assert llm.resize_pool(768) == 768
    assert llm.kvflash.spec.total == total, "which goes on"
    go_on(llm, tokens)
    check(llm)


def test_only_page_images_are_handed_on(llama: Callable[..., Any], tokens: Any) -> None:
    llm = llama("small", kvflash=512, **SETTINGS)
    llm.eval(tokens[:PROMPT].tolist())
    old, size = inside(llm).session.engine, 1 << 28
    old.view(old.alloc(size), size)[::4096] = bytes(size // 4096)
    before = resident_bytes()
    llm.resize_pool(1024)
    assert resident_bytes() < before - size // 2, "what is no page image was not freed with its engine"
    llm.eval(tokens[PROMPT : PROMPT + 64].tolist())
    check(llm)


def test_what_has_no_pool_of_its_own(llama: Callable[..., Any]) -> None:
    with pytest.raises(KVFlashError, match="no pool"):
        llama("small").resize_pool(512)
