"""A preview answers from a part of a prompt, and leaves nothing: the text after it is one that was never previewed."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.harness import check, row

from kvflash_ggml import PrefixCache
from kvflash_ggml.errors import ConfigError, KVFlashError
from kvflash_ggml.llama import preview

SETTINGS = {
    "n_ctx": 4096, "kvflash": 512, "kvflash_policy": "qk", "kvflash_tau": 8, "kvflash_calibrate": False,
    "n_threads": 1, "n_threads_batch": 1,
}  # fmt: skip
GREEDY: dict[str, Any] = {"temp": 0.0}
LEAST = 256


@pytest.fixture(autouse=True)
def small_previews(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview, "LEAST", LEAST)


@pytest.fixture
def prompt(tokens: Any) -> list[int]:
    return tokens.tolist()[:1500]


def answer(llm: Any, prompt: list[int], count: int = 4) -> list[int]:
    stream = llm.generate(prompt, **GREEDY)
    drawn = list(islice(stream, count))
    stream.close()
    return drawn


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_what_follows_a_preview_is_bitwise_what_it_would_have_been(
    llama: Any, prompt: list[int], kind: str, tmp_path: Path
) -> None:
    plain = llama(kind, **SETTINGS, kvflash_reading="auto")
    llm = llama(kind, **SETTINGS, kvflash_reading="preview")
    for one in (llm, plain):
        answer(one, prompt[:500])  # another turn's text, which the preview puts aside
    answer(llm, prompt)
    assert llm.kvflash.last.previewed == len(prompt)
    assert llm.kvflash.last.read <= LEAST
    assert llm.input_ids[:500].tolist() == prompt[:500]
    assert 500 <= llm.n_tokens < 510
    assert llm.finish_preview() == len(prompt)
    assert llm.finish_preview() == 0
    with_none = plain.generate(prompt, **GREEDY)
    next(with_none)
    with_none.close()
    assert row(llm).tobytes() == row(plain).tobytes()
    assert llm.kvflash.resident_chunks == plain.kvflash.resident_chunks
    for one, name in ((llm, "previewed"), (plain, "plain")):
        one.save_snapshot(tmp_path / name)
    assert (tmp_path / "previewed").read_bytes() == (tmp_path / "plain").read_bytes()
    assert answer(llm, [*prompt, 5, 6, 7]) == answer(plain, [*prompt, 5, 6, 7])
    assert llm.kvflash.last.previewed == 0
    assert row(llm).tobytes() == row(plain).tobytes()
    assert llm.kvflash.page_ins > 0
    check(llm)


def test_nothing_of_a_preview_is_kept(llama: Any, prompt: list[int], tmp_path: Path) -> None:
    cache = PrefixCache(folder=tmp_path / "cache", least=64)
    llm = llama("small", **SETTINGS, kvflash_reading="preview", kvflash_cache=cache)
    stream = llm.generate(prompt, **GREEDY)
    next(stream)
    for save in (llm.park, llm.save_state, lambda: llm.save_snapshot(tmp_path / "file")):
        with pytest.raises(KVFlashError, match="never kept"):
            save()
    stream.close()
    assert llm.n_tokens == 0
    llm.close()
    assert not [path for path in tmp_path.rglob("*") if path.is_file() and path.stat().st_size > 4096]


@pytest.mark.parametrize("at", [1, 100, 900])
def test_an_interrupt_leaves_the_text_before(llama: Any, prompt: list[int], at: int) -> None:
    llm = llama("small", **SETTINGS, kvflash_reading="preview")
    answer(llm, prompt[:400])

    def stop(done: int, total: int) -> None:
        if done >= at:
            raise KeyboardInterrupt

    llm.kvflash_progress = stop
    if at < LEAST:
        with pytest.raises(KeyboardInterrupt):
            answer(llm, prompt)
    else:
        answer(llm, prompt)
        with pytest.raises(KeyboardInterrupt):
            llm.finish_preview()
    llm.kvflash_progress = None
    assert llm.n_tokens >= 400
    assert llm.input_ids[:400].tolist() == prompt[:400]
    check(llm)
    assert len(answer(llm, prompt)) == 4
    llm.finish_preview()
    assert llm.n_tokens >= len(prompt)
    assert llm.input_ids[: len(prompt)].tolist() == prompt
    check(llm)


def test_a_call_between_takes_the_text_back(llama: Any, prompt: list[int]) -> None:
    llm = llama("small", **SETTINGS, kvflash_reading="preview")
    stream = llm.generate(prompt, **GREEDY)
    next(stream)
    llm.eval(prompt[:100])
    assert llm.input_ids[: llm.n_tokens].tolist() == prompt[:100]
    with pytest.raises(KVFlashError, match="another call"):
        next(stream)
    check(llm)


def test_what_needs_the_whole_prompt_is_refused(llama: Any, prompt: list[int]) -> None:
    from llama_cpp import LlamaGrammar, LlamaRAMCache

    from kvflash_ggml.batching.llama import LlamaModel

    llm = llama("small", **SETTINGS, kvflash_reading="preview")
    with pytest.raises(ConfigError, match="grammars"):
        next(llm.generate(prompt, grammar=LlamaGrammar.from_string('root ::= "a"', verbose=False)))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    with pytest.raises(ConfigError, match="tools"):
        llm.create_chat_completion([{"role": "user", "content": "hi"}], tools=[tool])
    with pytest.raises(ConfigError, match="server"):
        LlamaModel(llm)
    llm.set_cache(LlamaRAMCache())
    with pytest.raises(ConfigError, match="upstream"):
        next(llm.generate(prompt))
    with pytest.raises(ConfigError, match="logits_all"):
        llama("small", **SETTINGS, kvflash_reading="preview", logits_all=True)


@pytest.mark.parametrize(("stops", "reason"), [(False, "length"), (True, "stop")])
def test_stopping_criteria_see_the_text_of_a_preview(llama: Any, prompt: list[int], stops: bool, reason: str) -> None:
    llm = llama("dense", **SETTINGS, kvflash_reading="preview")  # with no text before the preview
    made = llm.create_completion(
        prompt, max_tokens=3, temperature=0.0, stopping_criteria=lambda ids, logits: stops and len(ids) > 0
    )
    assert llm.kvflash.last.previewed == len(prompt)
    assert made["choices"][0]["finish_reason"] == reason
    assert made["usage"]["completion_tokens"] == (0 if stops else 3)


def test_the_banner_says_that_answers_are_previews(llama: Any) -> None:
    for reading in ("preview", "auto"):
        banner = llama(kvflash=512, kvflash_reading=reading, n_ctx=4096).kvflash.banner()
        assert ("answering long prompts from a part of them, then reading exact" in banner) == (reading == "preview")


def test_a_server_refuses_a_model_that_makes_previews_by_itself(llama: Any) -> None:
    from kvflash_ggml.batching.llama import LlamaModel

    with pytest.raises(ConfigError, match="makes previews by request"):
        LlamaModel(llama("dense", **SETTINGS, kvflash_reading="preview"))
