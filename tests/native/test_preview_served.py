"""Previews of a scheduler on a real model: nothing of them stays, and what is read behind is as if never previewed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.harness import check, row
from support.inside import inside
from support.served import answer, ask

from kvflash_ggml import KVFlashConfig, PrefixCache
from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Access, Finished
from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.llama import preview

LEAST = 256
LENGTH = 1500


@pytest.fixture(autouse=True)
def small_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "LEAST", LEAST)


@pytest.fixture
def prompt(tokens: Any) -> list[int]:
    return tokens.tolist()[:LENGTH]


@contextmanager
def served(
    llama: Callable[..., Any], kind: str = "dense", *, parallel: int = 1, cache: Path | None = None
) -> Iterator[Scheduler]:
    config = KVFlashConfig(pool=parallel * 512, parallel=parallel, policy="qk", tau=8, calibrate=False)
    more = {} if cache is None else {"kvflash_cache": PrefixCache(folder=cache, least=64)}
    llm = llama(kind, n_ctx=4096, n_batch=256, n_ubatch=256, n_threads=1, n_threads_batch=1, kvflash=config, **more)
    scheduler = Scheduler(LlamaModel(llm))
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


def read_behind(scheduler: Scheduler, id: str, length: int = LENGTH) -> None:
    """Wait until a conversation has so many tokens."""
    for _ in range(6000):
        told = scheduler.conversations.describe(Access())
        if (id, length) in [(one["id"], one["tokens"]) for one in told] and not scheduler.reading:
            return
        time.sleep(0.01)
    raise AssertionError(told)


def previewed(scheduler: Scheduler, prompt: list[int]) -> str:
    """Ask for a preview; the identifier of its conversation."""
    asked = ask(scheduler, prompt, 4, reading="preview", ignore_eos=True)
    end = asked.wait()
    assert isinstance(end, Finished), end
    assert end.usage.preview is not None
    assert (end.usage.preview.prompt, end.usage.generated) == (len(prompt), 4)
    assert 0 < end.usage.preview.read <= LEAST
    return asked.events[0].conversation


def state(scheduler: Scheduler, path: Path) -> tuple[bytes, bytes, tuple[int, ...]]:
    """Logits of the text at hand, its snapshot, and what is resident."""
    llm = scheduler.model.llm

    def told() -> tuple[bytes, bytes, tuple[int, ...]]:
        check(llm)
        logits = row(llm).tobytes()
        llm.save_snapshot(path)
        return logits, path.read_bytes(), tuple(llm.kvflash.resident_chunks)

    return scheduler.call(told).result(60)


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.stat().st_size}


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_what_is_read_behind_is_bitwise_never_previewed(
    llama: Callable[..., Any], prompt: list[int], kind: str, tmp_path: Path
) -> None:
    found = []
    for name in ("plain", "preview"):
        with served(llama, kind, cache=tmp_path / name) as scheduler:
            if name == "plain":
                # the clock of a pool counts steps of every text: another one of as many tokens, which is forgotten
                answer(scheduler, prompt[700 : 700 + LEAST], 4, reuse=False, ignore_eos=True)
                answer(scheduler, prompt, 0)
            else:
                read_behind(scheduler, previewed(scheduler, prompt))
            found.append(state(scheduler, tmp_path / "file"))
            assert scheduler.counters()["page_outs"] > 0
            turn = [*prompt, *prompt[100:140]]
            end = answer(scheduler, turn, 4, reading="preview", ignore_eos=True)
            assert (end.usage.preview, end.usage.cached) == (None, LENGTH)
            found[-1] += (end.tokens, state(scheduler, tmp_path / "file"))
            scheduler.call(inside(scheduler.model.llm).prefixes.flush).result(60)
        found[-1] += (files(tmp_path / name),)
    plain, other = found
    assert plain == other


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_who_comes_between_changes_no_bit(
    llama: Callable[..., Any], prompt: list[int], kind: str, tmp_path: Path
) -> None:
    with served(llama, kind) as scheduler:
        answer(scheduler, prompt, 0)
        plain = state(scheduler, tmp_path / "file")
    with served(llama, kind) as scheduler:
        id = previewed(scheduler, prompt)
        while not scheduler.reading:
            time.sleep(0.001)
        for begin in (200, 300):  # each has the slot, and another text
            answer(scheduler, prompt[begin : begin + 300], 2)
        assert scheduler.counts.swapped_out > 0
        while scheduler.call(lambda: len(scheduler.behind)).result(60):  # each interrupts it at its next step
            pass
        read_behind(scheduler, id)
        assert scheduler.counts.resumes > 0
        mine = state(scheduler, tmp_path / "file")
        assert mine[0] == plain[0]
        assert mine[2] == plain[2]
        assert answer(scheduler, [*prompt, 5, 6], 2).usage.cached == LENGTH


def test_previews_beside_other_answers(llama: Callable[..., Any], prompt: list[int]) -> None:
    with served(llama, parallel=2) as scheduler:
        other = ask(scheduler, prompt[300:600], 40, ignore_eos=True)
        id = previewed(scheduler, prompt)
        assert isinstance(other.wait(), Finished)
        read_behind(scheduler, id)
        assert answer(scheduler, [*prompt, 5, 6], 2, reading="preview").usage.cached == LENGTH


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_what_a_prefix_cache_has_needs_no_preview(
    llama: Callable[..., Any], prompt: list[int], kind: str, tmp_path: Path
) -> None:
    with served(llama, kind, cache=tmp_path) as scheduler:
        answer(scheduler, prompt, 0)
    with served(llama, kind, cache=tmp_path) as scheduler:
        asked = [*prompt, *prompt[100:140]]
        previewed(scheduler, [prompt[5], *asked])
        assert answer(scheduler, asked, 2, reading="preview", salt="mine").usage.preview is not None
        assert answer(scheduler, asked, 2, reading="preview").usage.preview is None
