"""`Engine` on a real model: several prompts of a program in one step."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy.typing as npt
import pytest

from kvflash_ggml import Engine, KVFlashConfig, Sampling
from kvflash_ggml.batching.messages import Finished, Piece
from kvflash_ggml.errors import KVFlashError


def settings(parallel: int) -> dict[str, Any]:
    config = KVFlashConfig(pool=512 * parallel, policy="qk", tau=16, calibrate=False, parallel=parallel)
    return {"n_ctx": 4096, "kvflash": config}


def test_many_prompts_of_a_program(llama: Callable[..., Any], tokens: npt.NDArray[Any], widths: list[int]) -> None:
    llm = llama(**settings(4))
    texts = [tokens[700 * i : 700 * i + 100 + 60 * i].tolist() for i in range(9)]
    told: list[int] = []
    with Engine(llm) as engine:
        found = engine.generate_many(
            texts, Sampling(temperature=0), max_tokens=8, progress=lambda number, _: told.append(number)
        )
        (one,) = engine.generate_many(["The capital of"], Sampling(temperature=0), max_tokens=8)
        assert one.text.encode() == llm.detokenize(list(one.tokens))
    assert sorted(told) == list(range(9))
    assert max(widths) > 1
    with Engine(llama(**settings(4))) as engine:
        for text, mine in zip(texts, found, strict=True):
            (alone,) = engine.generate_many([text], Sampling(temperature=0), max_tokens=8)
            assert mine.tokens[:4] == alone.tokens[:4]  # later the other batch shape may decide a near tie


def test_what_is_wrong_with_a_prompt_of_a_program(llama: Callable[..., Any]) -> None:
    with Engine(llama(**settings(2))) as engine:
        good, long, strange = engine.generate_many(["One", [5] * 4096, [1 << 40]], max_tokens=2)
        (grammar,) = engine.generate_many(["One"], Sampling(grammar="root ::= nothing"), max_tokens=2)
    assert good.error is None
    assert "context window of 4096" in str(long.error)
    assert "token 1099511627776" in str(strange.error)
    assert grammar.error is not None
    assert grammar.reason == "error"


def test_streams_of_a_program(llama: Callable[..., Any], widths: list[int]) -> None:
    async def collect(engine: Engine, prompt: str) -> tuple[str, Finished]:
        events = [event async for event in engine.generate(prompt, Sampling(temperature=0), max_tokens=40)]
        *pieces, end = events
        assert isinstance(end, Finished)
        return "".join(piece.text for piece in pieces if isinstance(piece, Piece)), end

    async def both(engine: Engine) -> list[tuple[str, Finished]]:
        return await asyncio.gather(*(collect(engine, prompt) for prompt in ("One, two, three", "The capital of")))

    llm = llama(**settings(2))
    with Engine(llm) as engine:
        for text, end in asyncio.run(both(engine)):
            assert text.encode() == llm.detokenize(list(end.tokens))
    assert 2 in widths


def test_it_takes_a_pool(llama: Callable[..., Any]) -> None:
    with pytest.raises(KVFlashError, match="kvflash="):
        Engine(llama())
