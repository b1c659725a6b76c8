"""A prompt that is asked again is answered as it was the first time, wherever its text has been meanwhile."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from support.harness import check, reach, row
from support.inside import inside
from support.interrupter import Interrupter
from support.served import answer

from kvflash_ggml import PrefixCache
from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Finished
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.store.swapped import ConversationFolder

KINDS = ("dense", "hybrid", "iswa")
POOL = {"n_ctx": 4096, "kvflash": 512, "kvflash_policy": "qk", "kvflash_tau": 8, "kvflash_calibrate": False}
LENGTH = 32
"""Of an answer: more than the queries that are kept."""


@dataclass(frozen=True)
class Answered:
    """tokens, and at each of them the chunks that were resident; row: the last logits, of the last step's bits."""

    tokens: tuple[int, ...]
    resident: tuple[tuple[int, ...], ...]
    row: bytes

    def is_like(self, other: Answered) -> bool:
        """Up to rounding."""
        return (self.tokens, self.resident) == (other.tokens, other.resident)


def ask(llm: Any, prompt: Sequence[int], count: int = LENGTH) -> Answered:
    """Greedily, from a pool that the prompt does not fit."""
    answer = llm.generate(list(prompt), temp=0.0)
    drawn = [(token, tuple(llm.kvflash.resident_chunks)) for token in islice(answer, count)]
    answer.close()
    last = row(llm).tobytes()
    _, *held = drawn[0][1]
    assert held[-1] - held[0] >= len(held), "only what is newest is resident"
    check(llm)
    return Answered(tuple(token for token, _ in drawn), tuple(chunks for _, chunks in drawn), last)


@pytest.fixture
def prompts(tokens: Any) -> list[list[int]]:
    """Longer than the pool, with a beginning in common."""
    ids = tokens.tolist()
    return [ids[:900] + ids[1500:2100], ids[:900] + ids[2500:2900]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_that_was_cut_parked_and_saved(kind: str, llama: Any, prompts: Any, tmp_path: Path) -> None:
    """What follows the prompt there is an answer, of one token or many."""
    prompt, other = prompts
    llm = llama(kind, **POOL)
    first = ask(llm, prompt)

    def same() -> None:
        again = ask(llm, prompt)
        # the cells of a window are not where they were
        assert again.is_like(first) if kind == "iswa" else again == first

    same()
    ask(llm, prompt, 2)
    same()
    llm.save_snapshot(tmp_path / "answered")
    swapped = llm.park()
    ask(llm, other, 3)
    llm.resume(swapped)
    swapped.release()
    same()
    llm.close()
    llm = llama(kind, **POOL)
    llm.load_snapshot(tmp_path / "answered")
    same()
    (found,) = inside(llm).session.scoring.replays.state()
    llm.save_snapshot(tmp_path / "cut", length=found.start)
    llm.load_snapshot(tmp_path / "cut")
    assert llm.n_tokens == found.start
    assert ask(llm, prompt).tokens == first.tokens


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [2, 70, 900])
def test_a_prompt_that_fits_the_pool(kind: str, length: int, llama: Any, tokens: Any) -> None:
    """Its last token would be evaluated alone the second time, which rounds otherwise."""
    llm = llama(kind, **{**POOL, "kvflash": 4096})
    prompt, other = tokens[:length].tolist(), tokens[1000:1300].tolist()
    model = LlamaModel(llm)

    def asked(count: int = LENGTH) -> tuple[tuple[int, ...], bytes]:
        answer = llm.generate(prompt, temp=0.0)
        first = [next(answer)]
        model.checkpoint()  # as a server does behind the first token
        rows = [row(llm).tobytes()]
        for token in islice(answer, count - 1):
            first.append(token)
            rows.append(row(llm).tobytes())
        answer.close()
        return tuple(first), b"".join(rows)

    first = asked()
    assert asked() == first
    assert asked(1)[0] == first[0][:1]
    assert asked() == first
    swapped = model.swap_out()
    llm.reset()
    llm.eval(other)
    model.swap_in(swapped)
    swapped.release()
    assert asked() == first


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_of_which_nothing_has_to_be_read(kind: str, llama: Any, prompts: Any, tmp_path: Path) -> None:
    """As it is at the prompt's end: from a prefix cache in memory and in a folder, and from a file."""
    prompt, other = prompts
    llm = llama(kind, **POOL, kvflash_cache=PrefixCache())
    first = ask(llm, prompt)
    assert ask(llm, prompt) == first
    ask(llm, other, 3)
    assert ask(llm, prompt) == first
    folder = PrefixCache(folder=tmp_path / "cache", memory_bytes=0)
    llm.set_cache(folder)
    llm.reset()
    ask(llm, prompt)
    llm.reset()
    ask(llm, prompt, 1)
    llm.save_snapshot(tmp_path / "asked")
    llm.close()
    for settings in ({"kvflash_cache": folder}, {}):
        llm = llama(kind, **POOL, **settings)
        read = []
        llm.kvflash_progress = lambda done, total, read=read: read.append(total)
        if not settings:
            llm.load_snapshot(tmp_path / "asked")
        assert ask(llm, prompt) == first
        assert not read
        llm.close()


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_an_agents_turn_that_is_asked_again(kind: str, llama: Any, prompts: Any, tokens: Any, tmp_path: Path) -> None:
    """Of conversations that take turns, put aside in memory that holds one of them, and in a folder."""
    limits = Limits(park_bytes=1 << 20)
    scheduler = Scheduler(LlamaModel(llama(kind, **POOL)), limits=limits, folder=ConversationFolder(tmp_path))
    scheduler.start()
    try:
        turns = []
        for prompt in prompts:
            first, _ = served(scheduler, prompt)
            text = [*prompt, *first.tokens, *tokens[3500:3540].tolist()]
            turns += [(prompt, first), (text, served(scheduler, text)[0])]
        moved = 0
        for text, first in [*turns, turns[2], turns[2]]:
            again, end = served(scheduler, text)
            assert again == first
            moved += end.report["page_ins"]
            assert end.usage.prompt - end.usage.cached <= 64
        assert moved
        assert scheduler.swapped.counts.stored > 0
    finally:
        scheduler.close()


def served(scheduler: Scheduler, text: list[int]) -> tuple[Answered, Finished]:
    """Only what is resident in the end is known of it."""
    end, llm = answer(scheduler, text, LENGTH, ignore_eos=True), scheduler.model.llm
    resident, last = scheduler.call(lambda: (llm.kvflash.resident_chunks, llm.newest_logits().tobytes())).result()
    return Answered(end.tokens, (tuple(resident),), last), end


def test_what_it_does_not_outlive(llama: Any, prompts: Any, tmp_path: Path) -> None:
    """A cut before the prompt's last step, and another policy."""
    prompt, _ = prompts
    llm = llama(**POOL)
    ask(llm, prompt, 4)
    session = inside(llm).session
    (found,) = session.scoring.replays.state()
    assert found.start == len(prompt) - 64
    session.truncate(found.start)
    assert session.scoring.replays.state()
    llm.n_tokens = session.length
    ask(llm, prompt, 4)
    llm.save_snapshot(tmp_path / "asked")
    session.truncate(found.start - 1)
    assert not session.scoring.replays.state()
    llm.close()
    for policy in ("quest", "lru"):
        llm = llama(**{**POOL, "kvflash_policy": policy})
        llm.load_snapshot(tmp_path / "asked")
        assert inside(llm).session.relevance.ranking is None
        assert inside(llm).session.scoring is None or not inside(llm).session.scoring.replays.state()
        check(llm)
        llm.close()


def test_interrupted_anywhere(llama: Any, tokens: Any) -> None:
    """Whatever line Ctrl-C comes at, the prompt is asked once more and answered the same."""
    text = tokens.tolist()[:830]
    llm = llama("small", n_ctx=1024, kvflash=512, kvflash_policy="qk", kvflash_tau=8, kvflash_calibrate=False)
    first = ask(llm, text, 12)
    ask(llm, text)
    state = llm.save_state()
    files = tuple(f"sequence/{name}.py" for name in ("sequence", "step", "pool", "prefill", "relevance", "checkpoints"))
    k, hits = random.Random(4).randrange(1, 4), 0
    while True:
        interrupter = Interrupter(k, (*files, "pool/page_table.py"))
        if not interrupter.run(partial(ask, llm, text, 1), partial(reach, llm)):
            break
        hits += 1
        inside(llm).session.settle()
        check(llm)
        assert ask(llm, text, 12) == first, f"line {k}, in {interrupter.stack}"
        llm.load_state(state)
        k += 13
    assert hits > 10


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("pool", [512, 4096])
def test_what_was_read_is_of_the_newest_prompt(kind: str, pool: int, llama: Any, prompts: list[list[int]]) -> None:
    """Where the pool holds the context, or part of it, and no token of the prompt or some are read again."""
    llm, last = llama(kind, **{**POOL, "kvflash": pool}), []
    for _ in range(2):
        list(islice(llm.generate(prompts[0], temp=0.0), 4))
        last.append(llm.kvflash.last)
    assert last[0].read == len(prompts[0])
    again = last[1].read
    nothing = (kind, pool) == ("dense", 4096)  # the other one kept no state at the end of its prompt
    assert again == 0 if nothing else 0 < again < len(prompts[0])
    assert [one.generated for one in last] == [3, 3]
