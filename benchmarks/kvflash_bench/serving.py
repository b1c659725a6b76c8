"""Conversations that take turns on one pool, and an agent's long one: what a turn costs, and whether answers change."""

from __future__ import annotations

import logging
import queue
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvflash_ggml import system
from kvflash_ggml.batching.llama import LlamaModel, SwappedSequence
from kvflash_ggml.batching.messages import Event, Failed, Finished, Request, Sampling, Usage
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import KVFlashError
from kvflash_ggml.store.swapped import ConversationFolder

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama

logger = logging.getLogger("kvflash_ggml")

GREEDY = Sampling(temperature=0.0)

OVERHEAD = 1024
"""Bytes a chunk of a text that is put aside, beside its page image: statistics, and our books."""


@contextmanager
def served(llm: Llama, *, park_bytes: int, folder: Path | None) -> Iterator[Scheduler]:
    """A scheduler on a model, which it closes."""
    kept = None if folder is None else ConversationFolder(folder)
    scheduler = Scheduler(LlamaModel(llm), limits=Limits(park_bytes=park_bytes), folder=kept)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


def answer(
    scheduler: Scheduler, tokens: Sequence[int], most: int, number: int, *, shared: int = 0, ignore_eos: bool = True
) -> Finished:
    """One greedy answer of `most` tokens, or fewer without `ignore_eos`. KVFlashError if it fails."""
    inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
    request = Request(
        id=str(number), tokens=np.asarray(tokens, np.int32), max_tokens=most, sampling=GREEDY,
        ignore_eos=ignore_eos, shared_until=shared,
    )  # fmt: skip
    scheduler.submit(request, inbox.put)
    while True:
        event = inbox.get()
        if isinstance(event, Failed):
            raise KVFlashError(event.message)
        if isinstance(event, Finished):
            return event


@dataclass(eq=False)
class Conversation:
    """said: what the user says in each turn. answers: what came.

    exact: how many of the first answers must be a lone run's, None for all. A text that was read again is rounded
    otherwise.
    """

    said: list[list[int]]
    answers: list[tuple[int, ...]] = field(default_factory=list)
    exact: int | None = None
    took: list[Usage] = field(default_factory=list)

    @property
    def prompt(self) -> list[int]:
        """Of the next turn: all that was said and answered, and what comes now."""
        text = [token for said, answer in zip(self.said, self.answers, strict=False) for token in (*said, *answer)]
        return text + self.said[len(self.answers)]


def make_conversations(tokens: Sequence[int], *, count: int, length: int, turns: int, more: int) -> list[Conversation]:
    """Texts that begin at different places of a long one, and questions that are taken from all over it."""
    room = max(1, len(tokens) - length)
    made = []
    for i in range(count):
        start = i * room // count
        said = [list(tokens[start : start + length])]
        for turn in range(1, turns):
            at = (start + 7919 * turn) % max(1, len(tokens) - more)
            said.append(list(tokens[at : at + more]))
        made.append(Conversation(said))
    return made


def in_turns(conversations: Sequence[Conversation], *, seed: int) -> list[Conversation]:
    """Each as often as it has turns, at random."""
    order = [one for one in conversations for _ in one.said]
    random.Random(seed).shuffle(order)
    return order


def play(
    scheduler: Scheduler, order: Sequence[Conversation], *, most: int, until: float = float("inf"),
    tell: Callable[[dict[str, float]], None] = lambda now: None,
) -> dict[str, Any]:  # fmt: skip
    """A turn of each in this order, until a time of `time.monotonic`. What warm turns took, and what is held.

    tell: called after each. A conversation whose answer fails has no further turn.
    """
    memory, failed, requests = list[int](), list[Conversation](), 0
    full = most_parked = 0  # full: once conversations are stored
    for one in order:
        if time.monotonic() >= until:
            break
        if one in failed:
            continue
        requests += 1
        try:
            end = answer(scheduler, one.prompt, most, requests)
        except KVFlashError as err:
            logger.warning("a conversation of %d tokens is not answered: %s", len(one.prompt), err)
            failed.append(one)
            continue
        one.answers.append(end.tokens)
        one.took.append(end.usage)
        memory.append(system.resident_bytes())
        most_parked = max(most_parked, scheduler.swapped.size)
        if not full and scheduler.swapped.counts.stored:
            full = memory[-1]
        tell({"requests": requests, "of": len(order), "stored": scheduler.swapped.counts.stored,
              "parked_mib": scheduler.swapped.size / 2**20, "rss_mib": memory[-1] / 2**20})  # fmt: skip
    begun = [one for one in dict.fromkeys(order) if one.answers]
    warm = [took for one in begun for took in one.took[1:]]
    first = [took.queue_s + took.restore_s + took.prompt_s for took in warm]
    slot, swapped = scheduler.slot.counts, scheduler.swapped.counts
    return {
        "begun": len(begun),
        "requests": requests,
        "failed": len(failed),
        "parks": slot.swapped_out,
        "resumes": slot.resumes,
        "lost": slot.lost,
        "dropped": swapped.dropped,
        "stored": swapped.stored,
        "read_cold": sum(one.took[0].prompt - one.took[0].cached for one in begun),
        "read_warm": max((took.prompt - took.cached for took in warm), default=0),
        "restore_ms_p50": _percentile([took.restore_s for took in warm], 50) * 1e3,
        "restore_ms_p99": _percentile([took.restore_s for took in warm], 99) * 1e3,
        "first_ms_p50": _percentile(first, 50) * 1e3,
        "first_ms_p99": _percentile(first, 99) * 1e3,
        "cold_s": sum(one.took[0].prompt_s for one in begun) / max(1, len(begun)),
        "parked_mib": scheduler.swapped.size / 2**20,
        "parked_mib_most": most_parked / 2**20,
        "expected_mib": expected_bytes(scheduler) / 2**20,
        "heap_mib": scheduler.model.counters()["host_bytes"] / 2**20,
        "spilled_mib": scheduler.model.counters()["spilled_bytes"] / 2**20,
        "device_mib": scheduler.model.counters()["device_bytes"] / 2**20,
        "rss_mib_first": memory[0] / 2**20 if memory else 0.0,
        "rss_mib_full": full / 2**20,
        "rss_mib_half": memory[len(memory) // 2] / 2**20 if memory else 0.0,
        "rss_mib_most": max(memory, default=0) / 2**20,
        "rss_mib_end": memory[-1] / 2**20 if memory else 0.0,
    }


def expected_bytes(scheduler: Scheduler) -> int:
    """What the conversations in memory should take: their tokens, those of shared chunks once, at what one takes in the
    pool; OVERHEAD for each chunk; of each what its end needs: state, newest queries, logits. Of others their tokens.
    """
    shared, states, total = dict[int, int](), dict[int, int](), 0
    for one in scheduler.swapped:
        if not isinstance(one.swapped, SwappedSequence):
            total += one.tokens.nbytes
            continue
        saved, before = one.swapped.saved, 0
        whole, rest = divmod(saved.length, CHUNK)
        for i in range(whole):
            before = hash((before, saved.tokens[i * CHUNK : (i + 1) * CHUNK].tobytes()))
            shared[before] = saved.heap.page_bytes + OVERHEAD
        total += rest * saved.heap.page_bytes // CHUNK + saved.own_size
        states.update((id(blob), blob.size) for blob in saved.blobs)
    return total + sum(shared.values()) + sum(states.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One turn of an agent. side: a short request with the same system prompt, between two turns."""

    turn: int
    side: bool
    prompt: int
    read: int
    first_ms: float
    restore_ms: float


def run_agent(
    scheduler: Scheduler, tokens: Sequence[int], *, system: int, turns: int, result: int, most: int, side_every: int
) -> tuple[list[Turn], list[list[int]]]:
    """A transcript: the system prompt, and then a tool's result and a call in each turn. Its turns, and its prompts."""
    text, done, prompts, at = list(tokens[:system]), [], [], system
    for turn in range(turns):
        if side_every and turn and turn % side_every == 0:
            side = [*tokens[:system], *tokens[-40 - turn : -turn]]
            done.append(_turn(answer(scheduler, side, most, -turn, shared=system), turn, side=True))
        text += tokens[at : at + result]
        at += result
        prompts.append(list(text))
        end = answer(scheduler, text, most, turn + 1, shared=system)
        text += end.tokens
        done.append(_turn(end, turn, side=False))
    return done, prompts


def _turn(end: Finished, turn: int, *, side: bool) -> Turn:
    took = end.usage
    return Turn(
        turn=turn, side=side, prompt=took.prompt, read=took.prompt - took.cached, restore_ms=took.restore_s * 1e3,
        first_ms=(took.queue_s + took.restore_s + took.prompt_s) * 1e3,
    )  # fmt: skip


def reread_ms(llm: Llama, prompt: Sequence[int]) -> float:
    """Until the first token, where all of a prompt is read."""
    llm.reset()
    began = time.perf_counter()
    with closing(llm.generate(list(prompt), temp=0.0)) as stream:
        next(stream)
    return (time.perf_counter() - began) * 1e3


def _percentile(values: Sequence[float], share: float) -> float:
    return float(np.percentile(values, share)) if values else 0.0
