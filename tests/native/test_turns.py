"""Answers without an end in more number than slots, by a real model: all go on, and each is that of a lone run."""

from __future__ import annotations

from collections.abc import Callable
from itertools import takewhile
from typing import Any

import numpy.typing as npt
import pytest
from support.rounding import LOGPROB, ON_GPU
from support.served import GREEDY, Asked, ask

from kvflash_ggml import KVFlashConfig
from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Event, Finished, Piece, Sampling
from kvflash_ggml.batching.schedule import LEAST_TURN_S
from kvflash_ggml.batching.scheduler import Scheduler

ENDLESS, CHAT, TICK = 150, 4, 0.1
Told = list[tuple[int, Any]]


def play(llm: Any, prompts: list[list[int]], chat: list[int], **asked: Any) -> tuple[list[Told], list[int], int]:
    """Ask all of these for long answers, and a chat once 100 tokens were drawn. Each token takes `TICK` seconds.

    Returns tokens and log probabilities of all, how many tokens were drawn by all answers before the first one of each,
    and how often one was swapped out.
    """
    begun, chats = dict[str, int](), list[Asked]()
    scheduler: Any = None
    scheduler = Scheduler(LlamaModel(llm), clock=lambda: 1.0 if scheduler is None else 1 + TICK * scheduler.generated)

    def seen(one: Asked, event: Event) -> None:
        if isinstance(event, Piece):
            begun.setdefault(one.request.id, scheduler.generated)
        if scheduler.generated >= 100 and not chats and chat:
            chats.append(ask(scheduler, chat, CHAT, seen=seen, logprobs=0, ignore_eos=True))

    try:
        all_asked = [ask(scheduler, text, ENDLESS, seen=seen, logprobs=0, ignore_eos=True, **asked) for text in prompts]
        scheduler.start()
        found = []
        for one in [*all_asked, *(chats if not chat else ())]:
            end = one.wait()
            assert isinstance(end, Finished), end
        for one in [*all_asked, *chats]:
            assert isinstance(one.wait(), Finished)
            rows = [told for event in one.events if isinstance(event, Piece) for told in event.logprobs]
            found.append([(told.token, told.logprob) for told in rows])
        return found, [begun[one.request.id] for one in [*all_asked, *chats]], scheduler.stalls
    finally:
        scheduler.close()


ONE = {"pool": 512, "tau": 16, "deterministic": True}
TWO = {"pool": 1024, "tau": 16, "parallel": 2, "pool_share": "strict", "deterministic_batch": True}


@pytest.mark.usefixtures("known_heads")
@pytest.mark.parametrize(
    ("kind", "settings", "asked"),
    [
        pytest.param("dense", TWO, {}, id="two"),
        pytest.param("dense", TWO, {"reuse": False}, id="two-private"),
        pytest.param("dense", TWO, {"sampling": Sampling(temperature=1.2, seed=5, repeat_penalty=1.1)}, id="two-drawn"),
        pytest.param("dense", ONE, {}, id="one"),
        pytest.param("hybrid", ONE, {}, id="one-hybrid"),
        pytest.param("iswa", ONE, {"reuse": False}, id="one-sliding-private"),
    ],
)
def test_a_chat_beside_more_endless_answers_than_slots(
    kind: str, settings: dict[str, Any], asked: dict[str, Any], llama: Callable[..., Any], tokens: npt.NDArray[Any]
) -> None:
    """It begins after two turns at most. Where bits are promised, they are those of a lone run."""
    made = lambda: llama(kind, n_ctx=2048, n_batch=256, n_ubatch=256, kvflash=KVFlashConfig(**settings))  # noqa: E731
    slots = settings.get("parallel", 1)
    prompts = [tokens[700 * i : 700 * i + 300 + 90 * i].tolist() for i in range(slots + 1)]
    chat = tokens[9000:9040].tolist()
    found, begun, swaps = play(made(), prompts, chat, **asked)
    assert swaps > 3
    turn = slots * LEAST_TURN_S / TICK
    assert begun[-1] - 100 <= 2 * turn + 4 * slots
    assert all(len(rows) == ENDLESS for rows in found[:-1])
    alone = [play(made(), [prompt], [], **asked)[0][0] for prompt in prompts]
    if ON_GPU and slots > 1:  # a slot rounds
        same = []
        for mine, its in zip(found[:-1], alone, strict=True):
            pairs = list(takewhile(lambda pair: pair[0][0] == pair[1][0], zip(mine, its, strict=True)))
            assert all(abs(one - other) < LOGPROB.here for (_, one), (_, other) in pairs)
            same.append(len(pairs))
        assert (max if "sampling" in asked else min)(same) >= 8, "a draw may take another token, but not each"
    else:
        assert found[:-1] == alone
    assert GREEDY.temperature == 0
