"""Saving and restoring where it is easily forgotten: interrupted, pinned, within a prompt, with all logits kept."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import MODELS, check, go_on, same_bits
from support.inside import inside

from kvflash_ggml import PrefixCache
from kvflash_ggml.errors import ConfigError, KVFlashError, SnapshotError
from kvflash_ggml.host.heap import PageHeap
from kvflash_ggml.snapshot import codec

pytestmark = pytest.mark.usefixtures("known_heads")

POOL = {"n_ctx": 4096, "kvflash": 512, "kvflash_tau": 8}


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
@pytest.mark.parametrize("where", ["paging.clear", "table.reset", "checkpoints.truncate", "table.load"])
def test_an_interrupted_restore_leaves_a_session_that_works(
    kind: str, where: str, llama: Any, tokens: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    llm = llama(kind, **POOL)
    llm.eval(tokens[:900].tolist())
    llm.save_snapshot(tmp_path / "x")
    want = go_on(llm, 8)
    room, name = where.split(".")
    part = getattr(inside(llm).session, room)
    original = getattr(part, name)

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        monkeypatch.setattr(part, name, original)
        raise KeyboardInterrupt

    monkeypatch.setattr(part, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.load_snapshot(tmp_path / "x")
    assert inside(llm).session.length == 0
    check(llm)
    llm.load_snapshot(tmp_path / "x")
    assert go_on(llm, 8) == want


def test_logits_of_a_restored_text_are_not_made_up(llama: Any, tokens: Any, tmp_path: Path) -> None:
    """With all logits kept, a prefix is read, not restored; a file brings the last row only."""
    prompts = [tokens[:600].tolist(), tokens[2000:2600].tolist()]
    llm = llama("dense", **POOL, logits_all=True, kvflash_cache=PrefixCache())
    for prompt in prompts:
        list(zip(range(3), llm.generate(prompt, temp=0), strict=False))
    list(zip(range(3), llm.generate(prompts[0], temp=0), strict=False))
    fresh = llama("dense", **POOL, logits_all=True)
    list(zip(range(3), fresh.generate(prompts[0], temp=0), strict=False))
    assert same_bits(llm.scores[:600], fresh.scores[:600])
    fresh.save_snapshot(tmp_path / "x")
    llm.load_snapshot(tmp_path / "x")
    assert np.isnan(llm.scores[: llm.n_tokens - 1]).all()


def test_pins_of_the_moment_are_not_kept_for_others(llama: Any, tokens: Any) -> None:
    llm = llama("dense", **POOL, kvflash_cache=PrefixCache())
    first, second = tokens[:900].tolist(), tokens[2000:2900].tolist()
    llm.kvflash.pin(256, 320)
    next(llm.generate(first, temp=0))
    llm.kvflash.unpin()
    next(llm.generate(second, temp=0))
    next(llm.generate(first, temp=0))
    assert not inside(llm).session.table.pins


def test_saving_within_a_prompt(llama: Any, tokens: Any, tmp_path: Path) -> None:
    """Between two steps of a batch there are no logits to save."""
    llm = llama("dense", **POOL | {"n_batch": 512, "n_ubatch": 128})
    saved = []

    def progress(done: int, total: int) -> None:
        llm.save_snapshot(tmp_path / f"{done}")
        saved.append(done)

    llm.kvflash_progress = progress
    llm.eval(tokens[:700].tolist())
    llm.kvflash_progress = None
    assert saved[:3] == [128, 256, 384]
    other = llama("dense", **POOL | {"n_batch": 512, "n_ubatch": 128})
    assert other.load_snapshot(tmp_path / "256") == 256
    other.eval(tokens[256:700].tolist())
    check(other)


def test_a_save_that_is_refused_holds_nothing(
    llama: Any, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ConfigError("not installed")

    monkeypatch.setattr(codec, "require", missing)
    llm = llama("dense", **POOL)
    llm.eval(tokens[:900].tolist())
    heap: PageHeap = inside(llm).session.paging.heap
    before = heap.host_bytes
    for path, error in ((tmp_path / "x", ConfigError), (tmp_path, ConfigError)):
        with pytest.raises(error):
            llm.save_snapshot(path, compress=True)
    with pytest.raises(SnapshotError, match="regular file"):
        llm.save_snapshot(tmp_path)
    with pytest.raises(SnapshotError):
        llm.save_snapshot(tmp_path / "a\0b")
    assert heap.host_bytes == before
    llm.reset()
    assert heap.host_bytes == 0


def test_a_closed_model_says_so(llama: Any, tokens: Any, tmp_path: Path) -> None:
    llm = llama("dense", **POOL, kvflash_cache=PrefixCache())
    stream = llm.generate(tokens[:600].tolist(), temp=0)
    next(stream)
    next(stream)
    llm.close()
    stream.close()
    for call in (
        lambda: llm.save_snapshot(tmp_path / "x"),
        lambda: llm.load_snapshot(tmp_path / "x"),
        llm.save_state,
        lambda: llm.set_cache(PrefixCache()),
    ):
        with pytest.raises(KVFlashError, match="closed"):
            call()


def test_paths_are_those_of_the_beginning(
    llama: Any, tokens: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "a")
    llm = llama("dense", **POOL, kvflash_cache=PrefixCache(folder=Path("cache")))
    monkeypatch.chdir(tmp_path / "b")
    next(llm.generate(tokens[:600].tolist(), temp=0))
    inside(llm).prefixes.flush()
    assert list((tmp_path / "a" / "cache").glob("*/*.segment"))
    assert not list((tmp_path / "b").iterdir())


def test_files_from_the_future_do_not_push_out_those_of_today(llama: Any, tokens: Any, tmp_path: Path) -> None:
    llm = llama("dense", **POOL, kvflash_cache=PrefixCache(folder=tmp_path))
    next(llm.generate(tokens[:900].tolist(), temp=0))
    llm.close()
    size = 0
    for path in tmp_path.glob("*/*"):
        size += path.stat().st_size
        os.utime(path, (time.time() + 86400,) * 2)
    llm = llama("dense", **POOL, kvflash_cache=PrefixCache(folder=tmp_path, disk_bytes=size, memory_bytes=0))
    prompt = tokens[2000:2900].tolist()
    next(llm.generate(prompt, temp=0))
    inside(llm).prefixes.flush()
    assert inside(llm).prefixes._disk.find(np.array(prompt, np.int32)).length >= 832


def test_a_model_whose_file_has_been_replaced_is_not_saved_as_another(
    llama: Any, model: Any, tokens: Any, tmp_path: Path
) -> None:
    from kvflash_ggml import Llama

    path = tmp_path / "model.gguf"
    shutil.copy(model("small"), path)
    llm = Llama(str(path), n_threads=1, verbose=False, **POOL)
    llm.eval(tokens[:700].tolist())
    shutil.copy(model("small"), tmp_path / "other")
    (tmp_path / "other").replace(path)
    with pytest.raises(SnapshotError, match="replaced"):
        llm.save_snapshot(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    go_on(llm, 2)
    llm.close()


def test_a_kept_text_has_no_pages_of_the_drafter(llama: Any, tokens: Any) -> None:
    """They would stay in host memory for nothing: a restored text does not use them."""
    small = MODELS / "scorer-qwen3-q8_0.gguf"
    settings = POOL | {"n_ubatch": 128, "kvflash_policy": "drafter", "kvflash_scorer": small}
    llm = llama("dense", **settings, kvflash_cache=PrefixCache())
    next(llm.generate(tokens[:2000].tolist(), temp=0))
    assert len(inside(llm).prefixes._memory)
    heap = inside(inside(llm).drafter_reader._drafter).own_session.paging.heap
    assert heap._pages
    assert all(page.holders == 1 for page in heap._pages)
