"""Conversations that take turns on one pool answer as if each had it alone."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy.typing as npt
import pytest
from support.inside import inside
from support.served import answer, ask

from kvflash_bench.serving import expected_bytes
from kvflash_ggml.batching.llama import LlamaModel, SwappedSequence
from kvflash_ggml.batching.messages import Access, Failed, Finished, Piece, Sampling
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.runtime import task
from kvflash_ggml.sequence import copies
from kvflash_ggml.store.swapped import ConversationFolder

Turns = list[list[int]]
POOL = {"n_ctx": 8192, "kvflash": 1024, "kvflash_policy": "qk", "kvflash_tau": 16, "kvflash_calibrate": False}


@pytest.fixture(autouse=True)
def states_count_as_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that computes beside the host they are copied behind the compute then."""
    monkeypatch.setattr(copies, "LEAST", 1)


@contextmanager
def served(llm: Any, **settings: Any) -> Iterator[Scheduler]:
    scheduler = Scheduler(LlamaModel(llm), **settings)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


def conversations(tokens: npt.NDArray[Any], count: int, length: int, turns: int) -> list[Turns]:
    """What each has to say in each turn. Every one begins in its own way."""
    said = []
    for i in range(count):
        start = i * (len(tokens) - length) // count
        text = tokens[start : start + length].tolist()
        said.append([text, *[tokens[start + 97 * t : start + 97 * t + 40].tolist() for t in range(1, turns)]])
    return said


Answered = tuple[tuple[int, ...], bytes]
"""Tokens, and the logits that are at hand after them."""


def lone_answers(llm: Any, said: Turns, most: int) -> list[Answered]:
    """Of one conversation that has the model alone."""
    model, text, answers = LlamaModel(llm), list[int](), list[Answered]()
    llm.reset()
    for part in said:
        text = [*text, *part]
        drawn: list[int] = []
        for token in llm.generate(text, temp=0.0, top_k=40, top_p=0.95, min_p=0.05, repeat_penalty=1.0):
            if not drawn:
                model.checkpoint()
            if model.ends(token):
                break
            drawn.append(token)
            if len(drawn) == most:
                break
        model.checkpoint()
        answers.append((tuple(drawn), llm.newest_logits().tobytes()))
        text = [*text, *drawn]
    return answers


def play(scheduler: Scheduler, said: Sequence[Turns], most: int) -> tuple[list[list[Answered]], list[Finished]]:
    """All of them, a random one at a time. What each was answered, and the ends of all but first turns."""
    order = [i for i, turns in enumerate(said) for _ in turns]
    random.Random(5).shuffle(order)
    texts: list[list[int]] = [[] for _ in said]
    answers: list[list[Answered]] = [[] for _ in said]
    later = []
    model = scheduler.model
    assert isinstance(model, LlamaModel)
    for i in order:
        texts[i] += said[i][len(answers[i])]
        end = answer(scheduler, texts[i], most)
        if answers[i]:
            later.append(end)
        logits = scheduler.call(lambda: model.llm.newest_logits().tobytes()).result()
        answers[i].append((end.tokens, logits))
        texts[i] += end.tokens
    return answers, later


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_each_answer_is_that_of_a_lone_run(
    kind: str, llama: Callable[..., Any], tokens: npt.NDArray[Any], tmp_path: Path
) -> None:
    said = conversations(tokens, count=4, length=1200, turns=3)
    alone = llama(kind, **POOL)
    wanted = [lone_answers(alone, turns, 12) for turns in said]
    # memory for one or two of them: the others go through the folder
    limits = Limits(park_bytes=1 << 20)
    with served(llama(kind, **POOL), limits=limits, folder=ConversationFolder(tmp_path)) as scheduler:
        answers, later = play(scheduler, said, 12)
        assert scheduler.slot.counts.swapped_out > 4
        assert scheduler.swapped.counts.stored > 0
        assert scheduler.swapped.counts.dropped == scheduler.slot.counts.lost == 0
    assert answers == wanted
    # what is new, and the drawn token that was not read yet
    assert all(end.usage.prompt - end.usage.cached <= 41 for end in later)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_what_conversations_take(kind: str, llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    """Their tokens, those of shared chunks once, and what each has of its own; the newest chunk takes a whole page."""
    apart = conversations(tokens, count=4, length=900, turns=1)
    begun = apart[0][0]
    alike = [[[*begun, *tokens[at : at + 100].tolist()]] for at in (2000, 3000)]
    with served(llama(kind, **POOL)) as scheduler:
        play(scheduler, [*apart, *alike], 4)
        scheduler.call(scheduler.slot.swap_out).result()
        held = [one.swapped.saved for one in scheduler.swapped if isinstance(one.swapped, SwappedSequence)]
        page = held[0].heap.page_bytes
        expected, chunks = expected_bytes(scheduler), len({id(image) for saved in held for image in saved.pages})
        rows = {id(row): row.nbytes for saved in held for row in saved.rows}  # here of all heads
        assert len(held) >= 5
        assert chunks < sum(len(saved.pages) for saved in held), "beginnings are shared"
        assert scheduler.model.counters()["host_bytes"] == chunks * page, "nothing else is held"
        size = scheduler.swapped.size - sum(rows.values())
        assert 0.95 * expected < size < 1.05 * expected + len(held) * page


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_side_request_costs_the_long_text_nothing(
    kind: str, llama: Callable[..., Any], tokens: npt.NDArray[Any]
) -> None:
    """An agent's short questions, with the same system prompt, between the turns of its long text."""
    system, long = tokens[:400].tolist(), tokens[400:1500].tolist()
    with served(llama(kind, **POOL)) as scheduler:
        text = [*system, *long]
        text += answer(scheduler, text).tokens
        for turn in range(3):
            answer(scheduler, [*system, *tokens[2000 + 50 * turn : 2040 + 50 * turn].tolist()])
            text += tokens[3000 + 40 * turn : 3040 + 40 * turn].tolist()
            end = answer(scheduler, text)
            text += end.tokens
            assert end.usage.prompt - end.usage.cached <= 41


def test_a_hybrid_keeps_where_side_requests_leave_the_text(llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    system = tokens[:600].tolist()
    with served(llama("hybrid", **POOL)) as scheduler:
        answer(scheduler, [*system, *tokens[700:1100].tolist()])
        answer(scheduler, [*system, *tokens[1200:1240].tolist()])  # where they part is known from here on
        end = answer(scheduler, [*system, *tokens[1300:1340].tolist()])
        assert end.usage.cached == 600


def test_a_hybrid_keeps_where_the_system_prompt_ends(llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    system = tokens[:600].tolist()
    with served(llama("hybrid", **POOL)) as scheduler:
        answer(scheduler, [*system, *tokens[700:1100].tolist()], shared_until=600)
        assert answer(scheduler, [*system, *tokens[1200:1240].tolist()]).usage.cached == 600


def test_a_hybrid_keeps_where_its_prompts_end(llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    """A template may make something else of an answer, or another is asked for."""
    prompt = tokens[:900].tolist()
    with served(llama("hybrid", **POOL)) as scheduler:
        answer(scheduler, prompt, 20)
        end = answer(scheduler, [*prompt, *tokens[2000:2040].tolist()], 20)
        assert end.usage.cached == 900
        assert answer(scheduler, prompt).usage.cached >= 900 - 64


def test_a_cancelled_prompt_is_not_read_twice(llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    llm = llama("dense", **POOL)
    with served(llm) as scheduler:
        text = tokens[:3000].tolist()
        asked = ask(scheduler, text)
        while scheduler.model.tokens.size < 512:
            time.sleep(0.001)
        scheduler.cancel(asked.request.id)
        end = asked.wait()
        assert isinstance(end, Failed)
        assert end.code == "cancelled"
        read = scheduler.call(lambda: len(scheduler.model.tokens)).result()
        assert 512 <= read < 3000
        assert answer(scheduler, text).usage.cached >= read - 1


def test_a_server_goes_on_where_the_last_one_ended(
    llama: Callable[..., Any], tokens: npt.NDArray[Any], tmp_path: Path
) -> None:
    said = conversations(tokens, count=2, length=1100, turns=2)
    wanted = [lone_answers(llama("hybrid", **POOL), turns, 8)[1][0] for turns in said]
    texts = [list(turns[0]) for turns in said]
    with served(llama("hybrid", **POOL), folder=ConversationFolder(tmp_path)) as scheduler:
        for text in texts:
            text += answer(scheduler, text).tokens
    with served(llama("hybrid", **POOL), folder=ConversationFolder(tmp_path)) as scheduler:
        for text, turns, tokens_wanted in zip(texts, said, wanted, strict=True):
            end = answer(scheduler, [*text, *turns[1]])
            assert end.tokens == tokens_wanted
            assert end.usage.prompt - end.usage.cached <= 41


def test_parked_texts_give_way_where_memory_is_limited(
    llama: Callable[..., Any], tokens: npt.NDArray[Any], tmp_path: Path
) -> None:
    """Room for two and a half texts: the others go to the folder, whenever memory is wanted."""
    llm = llama("dense", **POOL, kvflash_host_limit=1, kvflash_spill=tmp_path)
    page = llm.kvflash.page_bytes
    llm.close()
    limited = llama("dense", **POOL, kvflash_host_limit=page * 45)
    said = conversations(tokens, count=5, length=1000, turns=2)
    wanted = [[tokens for tokens, _ in lone_answers(llama("dense", **POOL), turns, 8)] for turns in said]
    with served(limited, folder=ConversationFolder(tmp_path)) as scheduler:
        answers, _ = play(scheduler, said, 8)
        assert scheduler.swapped.counts.stored > 0
        assert scheduler.slot.counts.lost == scheduler.swapped.counts.dropped == 0
    assert [[tokens for tokens, _ in turns] for turns in answers] == wanted


def test_pins_of_a_request_hold(llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    llm = llama("dense", **POOL)
    with served(llm) as scheduler:
        text = tokens[:3000].tolist()
        text += answer(scheduler, text, pins=((640, 768),)).tokens
        assert {10, 11} <= set(scheduler.call(lambda: llm.kvflash.resident_chunks).result())
        answer(scheduler, tokens[3000:6000].tolist())
        assert not {10, 11} <= set(scheduler.call(lambda: llm.kvflash.resident_chunks).result())
        answer(scheduler, [*text, *tokens[6000:7000].tolist()])
        assert {10, 11} <= set(scheduler.call(lambda: llm.kvflash.resident_chunks).result())
        answer(scheduler, [*text[:2900], *tokens[8000:9500].tolist()])  # leaves it: pins are of the other
        assert not {10, 11} <= set(scheduler.call(lambda: llm.kvflash.resident_chunks).result())
        end = ask(scheduler, text, pins=((0, 2000),)).wait()
        assert isinstance(end, Failed)
        assert end.code == "invalid_value"
        assert answer(scheduler, text).tokens


def test_a_salted_text_is_not_in_the_folder(
    llama: Callable[..., Any], tokens: npt.NDArray[Any], tmp_path: Path
) -> None:
    text = tokens[:1000].tolist()
    for salt, cached in (("ab", 0), ("", 0), ("", 999)):
        llm = llama("dense", **POOL, kvflash_cache=tmp_path)
        with served(llm) as scheduler:
            end = answer(scheduler, text, salt=salt)
            assert end.usage.cached >= cached - 64
            assert cached or end.usage.cached == 0


@pytest.mark.parametrize("stored", [False, True])
def test_what_was_read_otherwise_is_not_in_the_folder(
    stored: bool, llama: Callable[..., Any], tokens: npt.NDArray[Any], tmp_path: Path
) -> None:
    """Nor what goes on from it, in the usual way, where it was put aside meanwhile, in memory or in a file."""
    settings = {"limits": Limits(park_bytes=1), "folder": ConversationFolder(tmp_path / "parked")} if stored else {}
    first, longer, other = (tokens[at:end].tolist() for at, end in ((0, 1000), (0, 1200), (2000, 2600)))
    for cached in (0, 999):
        llm = llama("dense", **POOL, kvflash_reading="exact", kvflash_cache=tmp_path / "cache")
        with served(llm, **(settings if not cached else {})) as scheduler:
            if not cached:
                answer(scheduler, first, reading="pool")
                answer(scheduler, other, reading="exact")
                assert answer(scheduler, longer).usage.cached >= 936
            else:
                assert answer(scheduler, other).usage.cached >= 536
                assert answer(scheduler, longer).usage.cached == 0


@pytest.mark.parametrize("opened", ["lossless", "auto"])
def test_a_request_says_how_strictly_the_whole_text_checks_it(
    opened: str, llama: Callable[..., Any], tokens: npt.NDArray[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task, "STANDS", 2.0)  # so each draft token is replaced that is not the likeliest
    spec = SpecConfig(width=5, types=("ngram",))
    llm = llama("dense", **POOL, kvflash_reading="exact", kvflash_answer=opened, kvflash_spec=spec)
    with served(llm) as scheduler:
        assert scheduler.model.answers == ("pool", "lossless", "auto")
        found = {
            asked: answer(scheduler, tokens[:2000].tolist(), 24, answer=asked) for asked in scheduler.model.answers
        }
        usual = answer(scheduler, tokens[:2000].tolist(), 24)
    assert found["auto"].report["replaced"] > 0
    assert found["lossless"].report["replaced"] == found["pool"].report["replaced"] == 0
    assert found["pool"].report["answered_exactly"] == 0 < found["auto"].report["answered_exactly"]
    assert (usual.report["replaced"] > 0) is (opened == "auto")


def test_a_request_says_what_is_seen(llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    llm = llama("dense", **POOL, kvflash_reading="exact", kvflash_spec="ngram")
    prompt = tokens[:2000].tolist()

    def reported(**asked: Any) -> tuple[int, int, int]:
        end = answer(scheduler, prompt, 8, reuse=False, **asked)
        return end.report["read_exactly"], end.report["answered_exactly"], llm.kvflash.spec.last.steps

    with served(llm) as scheduler:
        assert scheduler.model.answers == ("pool", "exact")
        usual = reported(drafts=False)
        whole = reported(reading="exact", answer="exact", drafts=False)
        pool = reported(reading="pool", drafts=False)
        again = reported(drafts=False)
    assert usual == again
    assert usual[0] == whole[0] == len(prompt) > pool[0]
    assert whole[1] > 0 == usual[1]
    assert usual[2] == 0


def test_what_is_all_resident_is_seen_whole(llama: Callable[..., Any], tokens: npt.NDArray[Any]) -> None:
    llm = llama("dense", **POOL | {"n_ctx": 1024})
    with served(llm) as scheduler:
        assert scheduler.model.readings == ("pool", "exact", "preview")
        assert scheduler.model.answers == ("pool", "exact")
        plain = answer(scheduler, tokens[:300].tolist(), 8, reuse=False)
        asked = answer(scheduler, tokens[:300].tolist(), 8, reuse=False, reading="exact", answer="exact")
    assert asked.tokens == plain.tokens
    assert asked.report["read_exactly"] == 300


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_an_answer_that_was_put_aside_goes_on_bit_for_bit(
    kind: str, llama: Callable[..., Any], tokens: npt.NDArray[Any]
) -> None:
    """Its reader has enough after every ninth token; others are read and answered meanwhile."""
    prompt, sampling = tokens[:900].tolist(), Sampling(temperature=1.5, seed=7, repeat_penalty=1.1)
    with served(llama(kind, **{**POOL, "kvflash": 512, "kvflash_reading": "exact"})) as scheduler:

        def made(full: Callable[[], bool]) -> list[tuple[int, float]]:
            asked = ask(scheduler, prompt, 40, sampling=sampling, ignore_eos=True, logprobs=0, full=full)
            for i in range(2):
                answer(scheduler, tokens[2000 + 600 * i : 2300 + 600 * i].tolist())
            assert isinstance(asked.wait(), Finished)
            pieces = (event for event in asked.events if isinstance(event, Piece))
            return [(told.token, told.logprob) for piece in pieces for told in piece.logprobs]

        alone = made(lambda: False)
        assert scheduler.stalls == 0
        for known in scheduler.call(lambda: scheduler.conversations.describe(Access())).result():
            scheduler.call(lambda known=known: scheduler.conversations.erase(known["id"], Access())).result()
        count = itertools.count(1)
        assert made(lambda: next(count) % 9 == 0) == alone
        assert scheduler.stalls >= 4


def spoil(swapped: Any) -> None:
    """Nothing of its pages is a number any more."""
    heap = swapped.saved.heap
    with heap.lease(swapped.saved.pages):
        for page in swapped.saved.pages:
            heap.view(page)[:] = b"\x7f" * heap.page_bytes


@pytest.mark.parametrize(
    ("kind", "policy", "temperature"),
    [("dense", "qk", 0.0), ("dense", "qk", 0.8), ("dense", "lru", 0.8), ("hybrid", "qk", 0.0)],
)
def test_a_spoiled_text_harms_nobody(
    kind: str, policy: str, temperature: float, llama: Callable[..., Any], tokens: npt.NDArray[Any]
) -> None:
    """Its request fails, by name; others go on bit for bit, and it is read again, in a pool without a trace of it."""
    settings = {**POOL, "kvflash_policy": policy}
    spoiled, other, new = (
        [tokens[at : at + 1300].tolist(), tokens[at + 5000 :][:40].tolist()] for at in (0, 3000, 6000)
    )
    alone = llama(kind, **settings)
    wanted = [lone_answers(alone, said, 12) for said in (spoiled, other, new)]
    with served(llama(kind, **settings)) as scheduler:
        answers, _ = play(scheduler, [spoiled[:1], other[:1]], 12)
        answer(scheduler, new[1] * 8)
        (mine,) = (one for one in scheduler.swapped if one.tokens[:1300].tolist() == spoiled[0])
        scheduler.call(lambda: spoil(mine.swapped)).result()
        asked = ask(scheduler, [*mine.tokens, *spoiled[1]], 12, sampling=Sampling(temperature=temperature))
        end = asked.wait()
        assert isinstance(end, Failed)
        assert (end.code, asked.text) == ("numerical", "")
        model = scheduler.model
        assert isinstance(model, LlamaModel)
        text = [*other[0], *answers[1][0][0], *other[1]]
        last = answer(scheduler, text, 12)
        logits = scheduler.call(lambda: model.llm.newest_logits().tobytes()).result()
        assert [answers[1][0], (last.tokens, logits)] == wanted[1]
        again, _ = play(scheduler, [spoiled, new], 12)
        assert again == [wanted[0], wanted[2]]
        assert scheduler.outcomes.totals.finished["numerical"] == scheduler.slot.counts.lost == 1


def test_a_policy_that_raises(
    llama: Callable[..., Any], tokens: npt.NDArray[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request fails, and every later one is answered as if nothing had been."""
    said = conversations(tokens, count=2, length=1300, turns=2)
    alone = llama("dense", **POOL)
    wanted = [lone_answers(alone, turns, 8) for turns in said]
    llm = llama("dense", **POOL)
    scorer = inside(llm).session.scoring.scorer
    with served(llm) as scheduler:
        for error in RuntimeError("no"), ValueError("what"), MemoryError("none"):
            with monkeypatch.context() as patch:
                patch.setattr(scorer, "score", Mock(side_effect=error))
                end = ask(scheduler, said[0][0], 8).wait()
                assert isinstance(end, Failed)
                assert end.code == "internal_error"
        assert play(scheduler, said, 8)[0] == wanted
