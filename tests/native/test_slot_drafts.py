"""Drafts of several answers that are decoded together: each answer is that of a lone run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.inside import inside
from support.served import Asked, ask, assert_alike, served

from kvflash_ggml import KVFlashConfig
from kvflash_ggml.batching import pace
from kvflash_ggml.batching.messages import Event, Failed, Finished, Piece, Sampling
from kvflash_ggml.batching.scheduler import Scheduler
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import ConfigError, DecodeError

Tokens = npt.NDArray[np.int32]
SLOTS, SHARE, MOST, WIDTH = 4, 512, 64, 4
NGRAM = SpecConfig(types=("ngram",), width=WIDTH)


@pytest.fixture(autouse=True)
def one_step_between_two_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer ends before the last prompt is read, however slow the machine is."""
    monkeypatch.setattr(pace, "DECODE_SHARE", 0.0)


def settings(spec: SpecConfig | None = NGRAM, parallel: int = SLOTS, share: Any = "strict") -> dict[str, Any]:
    config = KVFlashConfig(
        pool=SHARE * parallel, tau=16, calibrate=False, parallel=parallel, spec=spec,
        pool_share=share,  # elastic gives an answer more of the pool alone than among others
    )  # fmt: skip
    return {"n_ctx": 4096, "n_batch": 256, "n_ubatch": 256, "kvflash": config}


def texts_of(tokens: Tokens, count: int = SLOTS) -> list[list[int]]:
    """Each outgrows its share of the pool, and ends with words that it has had before."""
    return [[*tokens[900 * i :][: 700 + 50 * i], *tokens[900 * i + 300 :][:40]] for i in range(count)]


def all_at_once(running: Scheduler, texts: list[list[int]], **more: Any) -> list[Asked]:
    return [ask(running, text, MOST, logprobs=2, ignore_eos=True, **more) for text in texts]


def lone(
    llama: Callable[..., Any],
    texts: list[list[int]],
    kind: str = "dense",
    *,
    spec: SpecConfig | None = NGRAM,
    **more: Any,
) -> list[Asked]:
    """One after the other."""
    found = []
    with served(llama(kind, **settings(spec))) as running:
        for text in texts:
            found += all_at_once(running, [text], **more)
            found[-1].wait()
    return found


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[tuple[int, int]]]:
    """Sequences and rows of each step of a model."""

    def watch(llm: Any) -> list[tuple[int, int]]:
        found: list[tuple[int, int]] = []
        engine = inside(llm).session.engine
        step = engine.step

        def noted(count: int, *rest: Any) -> None:
            found.append((len(set(engine.seq[:count].tolist())), count))
            step(count, *rest)

        monkeypatch.setattr(engine, "step", noted)
        return found

    return watch


@pytest.mark.parametrize("kind", ["dense", "iswa"])
@pytest.mark.parametrize("sampling", [{"temperature": 0.0}, {"temperature": 0.7, "seed": 6}], ids=["greedy", "sampled"])
def test_each_answer_is_that_of_a_lone_run(
    kind: str, sampling: dict[str, Any], llama: Callable[..., Any], tokens: Tokens, rows: Any
) -> None:
    texts, chosen = texts_of(tokens), Sampling(**sampling)
    wanted = lone(llama, texts, kind, sampling=chosen)
    llm = llama(kind, **settings())
    steps = rows(llm)
    with served(llm) as running:
        for mine, its in zip(all_at_once(running, texts, sampling=chosen), wanted, strict=True):
            assert_alike(mine, its)
        assert running.counters()["page_ins"] > 0
        assert running.counters()["accepted_total"] == llm.kvflash.spec.total.accepted > 0
        assert running.counters()["drafted_total"] == sum(slot.model.counters()["drafted"] for slot in running.slots)
    assert max(count for seqs, count in steps if seqs == SLOTS) > SLOTS, "drafts of several in one step"


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("width", [WIDTH, None], ids=["fixed", "by costs"])
def test_without_evictions_drafts_change_no_answer(
    width: int | None, kind: str, llama: Callable[..., Any], tokens: Tokens, rows: Any
) -> None:
    """With logits of all positions, each is kept at its own text's place. With recurrent state every text of a step has
    equally many rows, also who has no draft.
    """
    texts = [text[-300:] for text in texts_of(tokens)]
    wanted = lone(llama, texts, kind, spec=None)
    llm = llama(kind, **settings(SpecConfig(types=("ngram",), width=width), share="elastic"), logits_all=True)
    steps = rows(llm)
    with served(llm) as running:
        models = [running.model, *running.model.beside]
        for mine, its in zip(all_at_once(running, texts), wanted, strict=True):
            assert_alike(mine, its)
        assert llm.kvflash.spec.total.accepted > 0 or width is None
        for one in models:
            own = one.text  # type: ignore[attr-defined]
            drawn = own.input_ids[300 : own.n_tokens]
            assert len(drawn) > MOST - WIDTH
            assert (own.scores[299 : own.n_tokens - 1].argmax(axis=1) == drawn).all()
        several = [count for seqs, count in steps if seqs == SLOTS]
        assert kind == "dense" or not any(count % SLOTS for count in several)
        assert width is None or max(several) > SLOTS
        filled = sum(seqs for seqs, count in steps if count == seqs * WIDTH) - llm.kvflash.spec.total.steps
        assert width is None or (filled > 0) == (kind == "hybrid"), "texts without a draft in a step of drafts"


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_step_of_drafts_that_fails_is_done_for_each_alone(
    kind: str, llama: Callable[..., Any], tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those whose rows only filled it. There all of a text stays in its share, since such rows need places."""
    texts = texts_of(tokens) if kind == "dense" else [text[-300:] for text in texts_of(tokens)]
    wanted = lone(llama, texts, kind)
    llm = llama(kind, **settings())
    engine, failed = inside(llm).session.engine, []
    step = engine.step

    def failing(count: int, *rest: Any) -> Any:
        if len(set(engine.seq[:count].tolist())) == SLOTS < count and len(failed) < 2:
            failed.append(count)
            raise DecodeError("a failed step of several", 1)
        return step(count, *rest)

    monkeypatch.setattr(engine, "step", failing)
    with served(llm) as running:
        for mine, its in zip(all_at_once(running, texts), wanted, strict=True):
            assert_alike(mine, its)
    assert len(failed) == 2


def test_hybrid_texts_draft_while_the_prompt_of_another_is_read_exactly(
    llama: Callable[..., Any], tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The texts that draft have equally many rows in each step between two streamed ones."""
    texts = [*(text[-300:] for text in texts_of(tokens, 2)), tokens[4000:5500].tolist()]
    given = settings(parallel=3)
    given["kvflash"] = replace(given["kvflash"], reading="exact")
    wanted = []
    with served(llama("hybrid", **given)) as running:
        for text in texts:
            wanted += all_at_once(running, [text])
            wanted[-1].wait()
    llm, steps = llama("hybrid", **given), list[str]()
    engine = inside(llm).session.engine
    step = engine.step

    def noted(count: int, wait: int, codes: list[int], streamed: Any = None, *rest: Any) -> None:
        kind = "streamed" if streamed is not None else "drafts" if count == 2 * WIDTH else "other"
        steps.append(kind if kind != "drafts" or len(set(engine.seq[:count].tolist())) == 2 else "other")
        step(count, wait, codes, streamed, *rest)

    monkeypatch.setattr(engine, "step", noted)
    with served(llm) as running:
        for mine, its in zip(all_at_once(running, texts), wanted, strict=True):
            assert_alike(mine, its)
        assert llm.kvflash.spec.total.accepted > 0
    first, last = steps.index("streamed"), len(steps) - 1 - steps[::-1].index("streamed")
    assert "drafts" in steps[first:last], "no draft was verified between two streamed steps"


def test_an_answer_leaves_in_the_midst_of_a_draft_and_goes_on(llama: Callable[..., Any], tokens: Tokens) -> None:
    """Its reader has enough after each of its first tokens; the others draft on."""
    texts = texts_of(tokens)
    wanted = lone(llama, texts)
    llm, times = llama(**settings()), iter([True] * 12)
    with served(llm) as running:
        slow = ask(running, texts[0], MOST, logprobs=2, ignore_eos=True, full=lambda: next(times, False))
        others = all_at_once(running, texts[1:])
        for mine, its in zip([slow, *others], wanted, strict=True):
            assert_alike(mine, its, least=4)
        assert running.stalls > 0
        assert llm.kvflash.spec.total.accepted > 0


def test_drafts_are_refused_where_others_must_change_no_bit() -> None:
    with pytest.raises(ConfigError, match="deterministic_batch: drafts change how many rows"):
        KVFlashConfig(parallel=2, deterministic_batch=True, spec=NGRAM)


@pytest.mark.parametrize("kind", ["dense", "iswa"])
def test_answers_to_one_prompt_and_a_cancelled_one(kind: str, llama: Callable[..., Any], tokens: Tokens) -> None:
    """Copies of a text whose drafts are under way, and one that ends in the midst of its own.

    All of a text stays in its share: a copy begins with what was resident when it was made. A prompt that is known
    is read from its last token on, which rounds otherwise: the lone run does so too.
    """
    texts = [[*text[260:620], *text[300:340]] for text in texts_of(tokens, 2)]
    wanted = lone(llama, [text for text in texts for _ in range(2)], kind, spec=None)
    llm = llama(kind, **settings())
    with served(llm) as running:
        copies: list[Asked] = []

        def copied(one: Asked, event: Event) -> None:
            if isinstance(event, Piece) and not copies:
                copies.extend(all_at_once(running, [texts[0], texts[0]]))

        def leaves(one: Asked, event: Event) -> None:
            if isinstance(event, Piece) and copies:
                running.cancel(one.request.id)

        first = all_at_once(running, texts[:1], seen=copied) + all_at_once(running, texts[1:], seen=leaves)
        assert_alike(first[0], wanted[0], least=MOST // 2)
        for one in copies:
            assert_alike(one, wanted[1], least=MOST // 2)
        assert running.counts.forks == 2
        assert isinstance(first[1].wait(), Failed)
        (again,) = all_at_once(running, [texts[1]])
        assert_alike(again, wanted[3])
        assert llm.kvflash.spec.total.accepted > 0


def test_an_answer_without_drafts_reports_none(llama: Callable[..., Any], tokens: Tokens) -> None:
    """Another one in its slot had some."""
    (_, text), drafted = texts_of(tokens, 2), []
    with served(llama("dense", **settings(parallel=2))) as running:
        for drafts in (True, False, True):
            end = all_at_once(running, [text], drafts=drafts)[0].wait()
            assert isinstance(end, Finished)
            drafted.append(end.report["drafted"])
            assert (end.report["accepted"] > 0) is drafts
        assert running.counters()["drafted_total"] == sum(drafted) > 0
    assert drafted[1] == 0
