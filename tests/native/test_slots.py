"""Answers that are decoded together by a real model: each is that of a lone run, whatever becomes of the others."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.rounding import ON_GPU, TIE
from support.served import Asked, ask, request

from kvflash_ggml import KVFlashConfig
from kvflash_ggml.batching import schedule
from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Event, Failed, Finished, Piece
from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, DecodeError, HostMemoryError, NotFinite

pytestmark = pytest.mark.usefixtures("known_heads")

Tokens = npt.NDArray[Any]
SLOTS, SHARE, N_CTX, MOST = 4, 512, 4096, 24


@contextmanager
def served(
    llama: Callable[..., Any],
    kind: str = "dense",
    *,
    slots: int = SLOTS,
    share: Any = "strict",
    rows: int = 256,
    **settings: Any,
) -> Iterator[Scheduler]:
    config = KVFlashConfig(pool=slots * SHARE, parallel=slots, pool_share=share, tau=16, **settings)
    scheduler = Scheduler(LlamaModel(llama(kind, n_ctx=N_CTX, n_batch=rows, n_ubatch=rows, kvflash=config)))
    try:
        yield scheduler
    finally:
        if scheduler._thread.ident is None:
            scheduler.start()
        scheduler.close()


@dataclass(frozen=True, slots=True)
class Drawn:
    """An answer, and how much likelier each token was than the next likely one: the difference of their logarithms."""

    tokens: list[int]
    gaps: list[float]


def lone(
    llama: Callable[..., Any], prompts: Sequence[list[int]], kind: str = "dense", *, pool: int = SHARE, **settings: Any
) -> list[Drawn]:
    """What each is answered by a model that has one text, in a pool of one share."""
    llm = llama(kind, n_ctx=N_CTX, n_batch=256, n_ubatch=256, kvflash=KVFlashConfig(pool=pool, tau=16, **settings))
    found = []
    for prompt in prompts:
        drawn = Drawn([], [])
        for token in llm.generate(prompt, temp=0.0):
            second, first = np.partition(llm.newest_logits(), -2)[-2:]
            drawn.tokens.append(token)
            drawn.gaps.append(float(first - second))
            if len(drawn.tokens) == MOST:
                break
        found.append(drawn)
        llm.reset()
    return found


def prompts_of(tokens: Tokens, count: int) -> list[list[int]]:
    """Each outgrows its share of the pool."""
    return [tokens[700 * i : 700 * i + 900 + 50 * i].tolist() for i in range(count)]


def same(mine: Sequence[int], its: Drawn, *, most: int = MOST // 2) -> bool:
    """The other batch shape rounds otherwise: what follows a near tie may be another text."""
    ties = (place for place, gap in enumerate(its.gaps) if gap < TIE.here)
    end = min(most, next(ties, MOST))
    return list(mine[:end]) == list(its.tokens[:end])


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_each_answer_is_that_of_a_lone_run(
    kind: str, llama: Callable[..., Any], tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Twice as many as there are slots, which together outgrow the pool four times over: all of them finish.

    The model with sliding windows has random weights. Attention weights that differ by 3e-4 change the twelfth token of
    an answer, by 1e-3 the seventh, and there are other kernels for one row and for several.
    """
    most = MOST // 4 if kind == "iswa" else MOST // 2
    monkeypatch.setattr(schedule, "LEAST_TURN_S", math.inf)  # or answers of a slow machine take turns
    prompts = prompts_of(tokens, 2 * SLOTS)
    wanted = lone(llama, prompts, kind)
    with served(llama, kind) as scheduler:
        asked = [ask(scheduler, prompt, MOST, ignore_eos=True) for prompt in prompts]
        scheduler.start()
        ends = [one.wait() for one in asked]
        assert all(isinstance(end, Finished) for end in ends)
        assert scheduler.counts.swapped_out == SLOTS
        assert scheduler.counters()["page_ins"] > 0
        assert scheduler.counters()["policy"] == "qk"
        found = [end.tokens for end in ends if isinstance(end, Finished)]
    assert all(same(mine, its, most=most) for mine, its in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_the_next_turn_is_prefilled_from_where_it_was(kind: str, llama: Callable[..., Any], tokens: Tokens) -> None:
    prompts = prompts_of(tokens, SLOTS + 2)
    with served(llama, kind) as scheduler:
        asked = [ask(scheduler, prompt, MOST, ignore_eos=True) for prompt in prompts]
        scheduler.start()
        texts = []
        for one, prompt in zip(asked, prompts, strict=True):
            end = one.wait()
            assert isinstance(end, Finished)
            texts.append([*prompt, *end.tokens, *tokens[5000:5020].tolist()])
        again = [ask(scheduler, text, 4, ignore_eos=True) for text in texts]
        for one in again:
            end = one.wait()
            assert isinstance(end, Finished)
            assert end.usage.prompt - end.usage.cached <= 21
        assert scheduler.counts.lost == 0


def test_a_turn_whose_question_is_evaluated_twice_begins_beside_a_long_prompt(
    llama: Callable[..., Any], tokens: Tokens
) -> None:
    """The text has outgrown its share, so the turn takes two steps, between two of the other prompt."""
    first, other = prompts_of(tokens, 2)
    with served(llama, reading="pool") as scheduler:
        scheduler.start()
        end = ask(scheduler, first, MOST, ignore_eos=True).wait()
        assert isinstance(end, Finished)
        turn = [*first, *end.tokens, *tokens[5000:5100].tolist()]
        asked = [Asked(request(turn, MOST, ignore_eos=True)), Asked(request(other, MOST, ignore_eos=True))]
        scheduler.submit_together([(one.request, one.inbox.put, lambda: False) for one in asked])
        ends = [one.wait() for one in asked]
        assert all(isinstance(end, Finished) for end in ends)
        assert scheduler.counters()["page_ins"] > 0
        found = [end.tokens for end in ends if isinstance(end, Finished)]
    (wanted,) = lone(llama, [other], reading="pool")
    assert same(found[1], wanted)


@pytest.mark.parametrize(
    ("kind", "reading", "share"),
    [
        ("dense", "pool", "strict"),
        ("dense", "exact", "strict"),
        ("hybrid", "pool", "strict"),
        ("hybrid", "exact", "strict"),
        ("iswa", "pool", "strict"),
        ("dense", "pool", "elastic"),
        ("hybrid", "exact", "elastic"),
    ],
)
def test_short_prompts_do_not_wait_for_a_long_one(
    kind: str, reading: str, share: str, llama: Callable[..., Any], tokens: Tokens
) -> None:
    """They are read, and begin to be answered, between its steps; one takes several steps itself. With equal shares
    each answer is that of a lone run.
    """
    prompts = [
        tokens[:2400].tolist(),
        tokens[3000:3100].tolist(),
        tokens[4000:4700].tolist(),
        tokens[5000:5020].tolist(),
    ]
    with served(llama, kind, share=share, reading=reading) as scheduler:
        asked = [Asked(request(prompt, MOST, ignore_eos=True)) for prompt in prompts]
        long = asked[0].request
        beside = set[int]()  # requests that had text while the long prompt was read

        def sink(number: int) -> Callable[[Event], None]:
            def put(event: Event) -> None:
                if isinstance(event, Piece) and long in [one for one, _ in scheduler.reading]:
                    beside.add(number)
                asked[number].inbox.put(event)

            return put

        scheduler.submit_together([(one.request, sink(i), lambda: False) for i, one in enumerate(asked)])
        scheduler.start()
        ends = [one.wait() for one in asked]
        assert all(isinstance(end, Finished) for end in ends)
        assert scheduler.counters()["page_ins"] > 0
        assert beside == {1, 2, 3}
        found = [end.tokens for end in ends if isinstance(end, Finished)]
    if share == "strict":
        wanted = lone(llama, prompts, kind, reading=reading)
        assert all(same(mine, its) for mine, its in zip(found, wanted, strict=True))


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_prompt_that_loses_blocks_has_its_question_evaluated_twice(
    kind: str, llama: Callable[..., Any], tokens: Tokens
) -> None:
    """It would fit the whole pool, which it shares with others from its second step on."""
    prompts = [tokens[:1800].tolist(), tokens[3000:3100].tolist(), tokens[4000:4060].tolist()]
    with served(llama, kind, share="elastic", reading="pool") as scheduler:
        engine, ends = scheduler.model.text.pooled.engine, list[int]()  # type: ignore[attr-defined]
        step = engine.step

        def noted(count: int, *rest: Any) -> None:
            ends.append(int(engine.pos[count - 1]))
            step(count, *rest)

        engine.step = noted
        asked = [
            Asked(request(prompt, most, ignore_eos=True)) for prompt, most in zip(prompts, (1, 600, 600), strict=True)
        ]
        scheduler.submit_together([(one.request, one.inbox.put, lambda: False) for one in asked])
        scheduler.start()
        assert isinstance(asked[0].wait(), Finished)
        assert scheduler.counters()["page_ins"] > 0
        assert ends.count(1799) == 2


@pytest.mark.parametrize("how", ["pool", "exact", "deterministic"])
def test_short_prompts_that_wait_together_share_a_step(how: str, llama: Callable[..., Any], tokens: Tokens) -> None:
    """Each answer is that of a lone run, and what the others say changes no bit of it. Where how many there are may
    change no bit either, each prompt is read alone.
    """
    given: dict[str, Any] = {"reading": "pool" if how == "pool" else "exact", "policy": "qk", "calibrate": False}
    prompts = [tokens[300 * i : 300 * i + 50 + i].tolist() for i in range(2 * SLOTS)]
    steps: list[tuple[int, int]] = []

    def answered(prompts: list[list[int]]) -> list[list[tuple[int, float]]]:
        """The tokens of each answer, and how likely they were."""
        with served(llama, **given, deterministic_batch=how == "deterministic") as scheduler:
            engine = scheduler.model.text.pooled.engine  # type: ignore[attr-defined]
            step = engine.step

            def noted(count: int, *rest: Any) -> None:
                steps.append((len(set(engine.seq[:count].tolist())), count))
                step(count, *rest)

            engine.step = noted
            asked = [ask(scheduler, prompt, MOST, logprobs=1, ignore_eos=True) for prompt in prompts]
            scheduler.start()
            assert all(isinstance(one.wait(), Finished) for one in asked)
            pieces = [[event for event in one.events if isinstance(event, Piece)] for one in asked]
            for slot in scheduler.slots:
                session = slot.model.text.pooled  # type: ignore[attr-defined]
                assert session.scoring.passes == 1, "at the prompt's end; the answer fits the pool"
        return [[(one.token, one.logprob) for piece in mine for one in piece.logprobs] for mine in pieces]

    found, others = answered(prompts[:SLOTS]), answered([prompts[0], *prompts[SLOTS + 1 :]])
    assert next(seqs for seqs, count in steps if count > SLOTS) == (1 if how == "deterministic" else SLOTS)
    assert len(found[0]) == MOST
    assert found[0] == others[0]
    wanted = lone(llama, prompts[:SLOTS], **given)
    assert all(same([token for token, _ in mine], its) for mine, its in zip(found, wanted, strict=True))


def test_what_goes_wrong_in_a_step_of_prompts_is_of_one_answer(
    llama: Callable[..., Any], tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step that is refused, or with logits that are not finite, is done for each prompt alone; a host without room
    for a page costs the answer whose page it is.
    """
    prompts = [tokens[200 * i : 200 * i + 100 + i].tolist() for i in range(3 * SLOTS)]
    wanted = lone(llama, prompts, calibrate=False)
    with served(llama, rows=512, calibrate=False) as scheduler:
        pool, faults = scheduler.model.text.pooled.pool, []  # type: ignore[attr-defined]

        def broken(where: Any, name: str, error: Exception, due: Callable[[Any], bool]) -> None:
            real, times = getattr(where, name), iter([True])

            def call(first: Any, *rest: Any) -> Any:
                if due(first) and next(times, False):
                    faults.append(error)
                    raise error
                return real(first, *rest)

            monkeypatch.setattr(where, name, call)

        scheduler.start()
        for at, (where, name, error, due) in enumerate([  # the slots are empty at first, so no text is swapped out
            (pool.heap, "new", HostMemoryError("the host is full"), lambda count: True),
            (pool.engine, "step", DecodeError("refused"), lambda count: count > 4 * CHUNK),
            (pool.engine, "argmax", NotFinite("no number"), lambda rows: len(rows) == SLOTS),
        ]):  # fmt: skip
            broken(where, name, error, due)
            asked = [Asked(request(p, MOST, ignore_eos=True)) for p in prompts[at * SLOTS :][:SLOTS]]
            scheduler.submit_together([(one.request, one.inbox.put, lambda: False) for one in asked])
            ends = [one.wait() for one in asked]
            assert len(faults) == at + 1
            assert [isinstance(end, Failed) for end in ends].count(True) == (name == "new")
            for end, its in zip(ends, wanted[at * SLOTS :], strict=False):
                assert isinstance(end, Failed) or same(end.tokens, its)


def resident(scheduler: Scheduler) -> list[int]:
    return [slot.model.counters()["resident"] for slot in scheduler.slots]


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_elastic_shares_are_of_those_that_are_answered(kind: str, llama: Callable[..., Any], tokens: Tokens) -> None:
    """A lone answer has what idle conversations do not keep, and gives it back; all go on from all of their texts."""
    prompts = prompts_of(tokens, SLOTS)
    long = tokens[3000 : 3000 + 1500].tolist()
    (wanted,) = lone(llama, [long], kind, pool=SLOTS * SHARE)
    with served(llama, kind, share="elastic") as scheduler:
        scheduler.start()
        end = ask(scheduler, long, MOST, ignore_eos=True).wait()
        assert isinstance(end, Finished)
        assert same(end.tokens, wanted)
        assert resident(scheduler) == [-(-(len(long) + MOST) // CHUNK), 0, 0, 0]
        asked = [ask(scheduler, prompt, MOST, ignore_eos=True) for prompt in prompts[1:]]
        turns = [[*long, *end.tokens]]
        for one, prompt in zip(asked, prompts[1:], strict=True):
            end = one.wait()
            assert isinstance(end, Finished)
            turns.append([*prompt, *end.tokens])
        assert max(resident(scheduler)) <= SLOTS * SHARE // CHUNK
        for text in turns:  # one after the other: each has had to give, and takes
            end = ask(scheduler, [*text, *tokens[5000:5020].tolist()], MOST, ignore_eos=True).wait()
            assert isinstance(end, Finished)
            assert end.usage.prompt - end.usage.cached <= 21
            assert max(resident(scheduler)) > SHARE // CHUNK
            assert sum(resident(scheduler)) <= SLOTS * SHARE // CHUNK
        assert scheduler.counts.lost == scheduler.counts.swapped_out == 0
        assert scheduler.counters()["page_ins"] > 0


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_answers_to_one_prompt_read_it_once(kind: str, llama: Callable[..., Any], tokens: Tokens) -> None:
    """As with `n` of a request: each but the first goes on from a copy, and is the lone run's answer."""
    (prompt,) = prompts_of(tokens, 1)
    (wanted,) = lone(llama, [prompt], kind)
    with served(llama, kind) as scheduler:
        asked = [ask(scheduler, prompt, MOST, ignore_eos=True) for _ in range(SLOTS)]
        scheduler.start()
        ends = [one.wait() for one in asked]
        assert scheduler.counts.forks == SLOTS - 1
        assert scheduler.counters()["page_ins"] > 0
        for number, end in enumerate(ends):
            assert isinstance(end, Finished)
            assert same(end.tokens, wanted)
            # a state can be gone on from where it was kept: at the last question's beginning
            assert number == 0 or end.usage.cached >= len(prompt) - (1 if kind == "dense" else 64)


@pytest.mark.parametrize("length", [100, 300])
def test_answers_to_a_prompt_of_one_step_read_it_once(length: int, llama: Callable[..., Any], tokens: Tokens) -> None:
    """The others wait for that step, which they could share; what is left of each of them shares the next one."""
    prompt = tokens[:length].tolist()
    (wanted,) = lone(llama, [prompt])
    with served(llama, rows=640) as scheduler:
        asked = [ask(scheduler, prompt, MOST, ignore_eos=True) for _ in range(SLOTS)]
        scheduler.start()
        ends = [one.wait() for one in asked]
        assert scheduler.counts.forks == SLOTS - 1
        for number, end in enumerate(ends):
            assert isinstance(end, Finished)
            assert same(end.tokens, wanted)
            assert end.usage.cached == (len(prompt) - 1 if number else 0)


def test_a_deterministic_batch_has_the_bits_of_a_lone_answer(llama: Callable[..., Any], tokens: Tokens) -> None:
    """The same server answers each prompt alone, and then all of them together. CPUs differ in whether others would.
    Short ones are read between two steps of a long one, and so get other slots. A GPU rounds by where in the pool the
    keys lie: there the bits are those of a text in the same slot.
    """
    found, lengths, beside = [], (900, 600, 60, 600, 30, 600), list[int]()
    places, slots = dict[str, int](), list[list[int]]()

    def seen(asked: Asked, event: Event) -> None:
        if isinstance(event, Piece):
            (place,) = (i for i, slot in enumerate(scheduler.slots) if slot.request is asked.request)
            places[asked.request.id] = place
            if len(asked.request.tokens) < CHUNK:
                beside.extend(len(one.tokens) for one, _ in scheduler.reading)

    for together in (False, True):
        with served(llama, "packed", slots=8, deterministic_batch=True, calibrate=False) as scheduler:
            asked = []
            for prompt, length in zip(prompts_of(tokens % 256, 6), lengths, strict=True):
                asked.append(ask(scheduler, prompt[:length], 96, seen=seen, ignore_eos=True, logprobs=1))
                if not together:
                    if len(asked) == 1:
                        scheduler.start()
                    asked[-1].wait()
            if together:
                scheduler.start()
            assert all(isinstance(one.wait(), Finished) for one in asked)
            assert scheduler.counters()["page_ins"] > 0
            found.append([[p.logprobs for p in one.events if isinstance(p, Piece)] for one in asked])
            slots.append([places[one.request.id] for one in asked])
    assert 900 in beside
    stay = [alone == among for alone, among in zip(*slots, strict=True)]
    assert 1 < sum(stay) < len(stay)
    for alone, among, stays in zip(*found, stay, strict=True):
        assert alone == among or (ON_GPU and not stays)


def test_a_deterministic_batch_needs_memory_that_is_pooled(llama: Callable[..., Any]) -> None:
    for kind in ("hybrid", "iswa"):
        with pytest.raises(ConfigError, match=r"deterministic_batch: .*: leave it out"):
            llama(kind, kvflash=KVFlashConfig(pool=2048, parallel=2, deterministic_batch=True))


def test_a_cancelled_answer_changes_no_other(llama: Callable[..., Any], tokens: Tokens) -> None:
    prompts = prompts_of(tokens, SLOTS)
    wanted = lone(llama, prompts)
    with served(llama) as scheduler:

        def leaves(one: Asked, event: Event) -> None:
            if one is asked[1] and isinstance(event, Piece):
                scheduler.cancel(one.request.id)

        asked = [ask(scheduler, prompt, MOST, ignore_eos=True, seen=leaves) for prompt in prompts]
        scheduler.start()
        ends = [one.wait() for one in asked]
        assert isinstance(ends[1], Failed)
        for i in (0, 2, 3):
            end = ends[i]
            assert isinstance(end, Finished)
            assert same(end.tokens, wanted[i])


def test_an_answer_waits_for_its_reader_and_goes_on_elsewhere(llama: Callable[..., Any], tokens: Tokens) -> None:
    """Swapped out in the midst, and taken up in whatever slot is free: bitwise the same tokens are drawn."""
    prompts, enough = prompts_of(tokens, SLOTS + 1), threading.Event()
    wanted = lone(llama, prompts)
    with served(llama) as scheduler:
        slow = ask(scheduler, prompts[0], MOST, ignore_eos=True, full=lambda: not enough.is_set())
        others = [ask(scheduler, prompt, MOST, ignore_eos=True) for prompt in prompts[1:]]
        scheduler.start()
        ends = [one.wait() for one in others]
        assert scheduler.stalls >= 1
        enough.set()
        scheduler.wake()
        ends = [slow.wait(), *ends]
        for end, its in zip(ends, wanted, strict=True):
            assert isinstance(end, Finished)
            assert same(end.tokens, its)


@pytest.mark.usefixtures("looks")
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_text_goes_on_bitwise_identical_in_any_slot(kind: str, llama: Callable[..., Any], tokens: Tokens) -> None:
    """Its chunks lie in other blocks then, in the same order."""
    (prompt,), found, slots = prompts_of(tokens, 1), list[Any](), set[int]()
    for stalls in (0, 6):
        with served(llama, kind, slots=2, policy="qk") as scheduler:
            full = iter([True] * stalls)
            asked = ask(
                scheduler,
                prompt,
                MOST,
                ignore_eos=True,
                logprobs=1,
                full=lambda full=full: next(full, False),  # type: ignore[misc]
            )
            scheduler.start()
            asked.wait()
            assert scheduler.counters()["page_ins"] > 0
            assert bool(stalls) == bool(scheduler.stalls)
            slots.add(scheduler.slots.index(scheduler.slot))
            found.append([event.logprobs for event in asked.events if isinstance(event, Piece)])
    assert len(slots) == 2
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_question_is_answered_bitwise_alike_in_any_slot(kind: str, llama: Callable[..., Any], tokens: Tokens) -> None:
    prompts = prompts_of(tokens, 3)
    with served(llama, kind, slots=2, reading="pool") as scheduler:
        scheduler.start()
        found, slots = list[Any](), list[int]()
        for prompt in (0, 1, 2, 0):  # the third one takes the first one's slot
            asked = ask(scheduler, prompts[prompt], MOST, ignore_eos=True, logprobs=1)
            assert isinstance(asked.wait(), Finished)
            found.append([event.logprobs for event in asked.events if isinstance(event, Piece)])
            slots.append(scheduler.slots.index(scheduler.slot))
        assert scheduler.counters()["page_ins"] > 0
        assert scheduler.counts.resumes == 1
    assert slots == [0, 1, 0, 1]
    assert found[3] == found[0]


def test_exact_answers_beside_others(llama: Callable[..., Any], tokens: Tokens) -> None:
    prompts = prompts_of(tokens, 2)
    with served(llama) as scheduler:
        assert "exact" in scheduler.model.answers
        exact = ask(scheduler, prompts[0], MOST, ignore_eos=True, answer="exact")
        other = ask(scheduler, prompts[1], MOST, ignore_eos=True)
        scheduler.start()
        ends = exact.wait(), other.wait()
        assert all(isinstance(end, Finished) for end in ends)
        assert isinstance(ends[0], Finished)
        assert ends[0].report["answered_exactly"] > 0


@pytest.mark.parametrize("more", [{"answer": "lossless"}, {"policy": "drafter"}], ids=lambda more: next(iter(more)))
def test_what_serves_one_sequence_is_refused(more: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="serves one sequence, and parallel is 2"):
        KVFlashConfig(parallel=2, **more)


@pytest.mark.parametrize(
    ("kind", "pool", "want"), [("dense", 4096, 4), ("dense", 1024, 2), ("hybrid", 4096, 2), ("iswa", 4096, 4)]
)
def test_as_many_sequences_as_there_is_room_for(kind: str, pool: int, want: int, llama: Callable[..., Any]) -> None:
    """The states of a hybrid model take more than a quarter of a small pool."""
    llm = llama(kind, n_ctx=N_CTX, n_batch=256, n_ubatch=256, kvflash=KVFlashConfig(pool=pool, parallel="auto"))
    assert len(LlamaModel(llm).beside) == want - 1
    assert f"for {want} sequences: {pool // want} for each, and more while others are idle" in llm.kvflash.banner()


@pytest.mark.parametrize(
    ("kind", "fields", "why"),
    [
        ("dense", {"pool": 512}, "the pool has no room for another one"),
        ("dense", {"pool": 4096, "deterministic": True}, "deterministic=True serves one"),
        ("dense", {"pool": 4096, "reading": "preview"}, "reading='preview' serves one"),
    ],
)  # fmt: skip
def test_auto_is_one_where_there_can_be_no_more(
    kind: str, fields: dict[str, Any], why: str, llama: Callable[..., Any]
) -> None:
    llm = llama(kind, n_ctx=N_CTX, n_batch=256, n_ubatch=256, kvflash=KVFlashConfig(parallel="auto", **fields))
    assert "one answer at a time: " in llm.kvflash.banner()
    assert why in llm.kvflash.banner()


def test_auto_has_as_many_sequences_as_sliding_windows_have_cells(llama: Callable[..., Any]) -> None:
    """The library is asked before a context is made, so the model is loaded once."""
    llm = llama("iswa", n_ctx=512, n_batch=128, n_ubatch=128, kvflash=KVFlashConfig(pool=4096, parallel="auto"))
    assert f"for 3 sequences: {llm.kvflash.share} for each" in llm.kvflash.banner()
    short = llama("iswa", n_ctx=256, n_batch=128, n_ubatch=128, kvflash=KVFlashConfig(pool=4096, parallel="auto"))
    assert "one answer at a time: " in short.kvflash.banner()
    assert "sliding windows of 2 sequences and a step need" in short.kvflash.banner()


def test_a_text_has_the_pool_while_others_are_idle(llama: Callable[..., Any], tokens: Tokens) -> None:
    """What is on the device is never more than there is room for, with equal and with other shares."""
    with served(llama, share="elastic") as scheduler:
        pool = scheduler.counters()["pool"]
        asked = ask(scheduler, tokens[: 2 * pool // 3].tolist(), 4, ignore_eos=True)
        scheduler.start()
        asked.wait()
        texts = [slot.model.counters() for slot in scheduler.slots]
    assert {text["pool"] for text in texts} == {pool}
    assert all(text["resident"] * CHUNK <= text["share"] <= pool for text in texts)
    assert sum(text["share"] for text in texts) <= pool
    assert max(text["share"] for text in texts) > pool // len(texts)


def test_samplers_draw_for_each_answer(llama: Callable[..., Any], tokens: Tokens) -> None:
    """Seeds, grammars and log probabilities are of a request."""
    from kvflash_ggml.batching.messages import Sampling

    prompt = tokens[:300].tolist()
    with served(llama) as scheduler:
        settings = [
            Sampling(seed=7, temperature=0.9),
            Sampling(seed=7, temperature=0.9),
            Sampling(seed=8, temperature=1.5),
        ]
        asked: list[Asked] = [
            ask(scheduler, prompt, 12, ignore_eos=True, sampling=one, reuse=False, logprobs=2) for one in settings
        ]
        scheduler.start()
        ends = [one.wait() for one in asked]
        tokens_of = [end.tokens for end in ends if isinstance(end, Finished)]
        assert len(tokens_of) == 3
        assert tokens_of[0][:6] == tokens_of[1][:6]
        assert tokens_of[2] != tokens_of[0]
