"""Conversations that have the model to themselves, in processes of their own: beside a server's, or after them."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import ExitStack, closing, contextmanager
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any

import numpy as np

from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Request
from kvflash_ggml.batching.slot import branch_of

from .opening import opened
from .serving import GREEDY, Conversation

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

logger = logging.getLogger("kvflash_ggml")

Answers = list[tuple[int, ...]]

_open = ExitStack()
_mine: Llama  # of this process


def lone_answers(llm: Llama, said: Sequence[Sequence[int]], *, most: int) -> Answers:
    """What a conversation is answered that has the model to itself, in the steps that a server takes."""
    model, text, answers = LlamaModel(llm), list[int](), Answers()
    llm.reset()
    for part in said:
        text += part
        request = Request(id="", tokens=np.asarray(text, np.int32), max_tokens=most, sampling=GREEDY)
        drawn: list[int] = []
        task = model.begin(request, branch=branch_of(model, request), progress=lambda done, total: None)
        with closing(task.steps()) as stream:
            for token in stream:
                if not isinstance(token, int):
                    continue  # a step, which is computed alone when this goes on
                if not drawn:
                    model.checkpoint()
                drawn.append(token)
                if len(drawn) == most:
                    break
        model.checkpoint()
        answers.append(tuple(drawn))
        text += drawn
    return answers


@contextmanager
def lone_runs(
    model: str, keywords: dict[str, Any], conversations: Sequence[Conversation], *, most: int, processes: int
) -> Iterator[list[Future[Answers]]]:
    """One of each conversation, in this order; those that have not begun at the end never do. keywords: of `opened`."""
    # spawned, not forked: a device does not survive a fork
    executor = ProcessPoolExecutor(
        processes, mp_context=get_context("spawn"), initializer=_begin, initargs=(model, keywords)
    )
    try:
        yield [executor.submit(_answers, one.said, most) for one in conversations]
    finally:
        executor.shutdown(cancel_futures=True)


def compare(
    conversations: Sequence[Conversation], runs: Sequence[Future[Answers]], *, until: float,
    tell: Callable[[dict[str, float]], None],
) -> dict[str, int]:  # fmt: skip
    """Which answers are those of the lone runs, as far as there are both at a time of `time.monotonic`.

    compared, equal, lone_failed: conversations. answers_compared, answers_equal: theirs, up to `Conversation.exact`.
    tell: called now and then.
    """
    waiting: set[Future[Answers]] = set(runs)
    while waiting and time.monotonic() < until:
        tell({"lone_runs": len(runs) - len(waiting), "of": len(runs)})
        waiting = wait(waiting, timeout=min(1.0, until - time.monotonic())).not_done
    found = Counter[str]()
    for one, run in zip(conversations, runs, strict=True):
        if not run.done() or not one.answers:
            continue
        if (error := run.exception()) is not None:
            logger.warning("a lone run failed: %s: %s", type(error).__name__, error)
            found["lone_failed"] += 1
            continue
        same = [mine == lone for mine, lone in zip(one.answers[: one.exact], run.result(), strict=False)]
        found.update(compared=1, equal=all(same), answers_compared=len(same), answers_equal=sum(same))
    return {name: found[name] for name in ("compared", "equal", "answers_compared", "answers_equal", "lone_failed")}


def _begin(model: str, keywords: dict[str, Any]) -> None:
    global _mine
    _mine = _open.enter_context(opened(model, **keywords))


def _answers(said: Sequence[Sequence[int]], most: int) -> Answers:
    return lone_answers(_mine, said, most=most)
