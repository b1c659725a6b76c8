"""Faults of one answer among several of a real model: the others are those of lone runs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.beside import spoil, spread
from support.inside import inside
from support.on_device import has_our_kernels
from support.rounding import ON_GPU
from support.served import Asked, ask, assert_alike, served

from kvflash_ggml import KVFlashConfig
from kvflash_ggml.batching import pace
from kvflash_ggml.batching.llama import LlamaModel
from kvflash_ggml.batching.messages import Failed, Finished, Piece
from kvflash_ggml.batching.pace import LEAST_ROWS
from kvflash_ggml.batching.scheduler import Limits, Scheduler
from kvflash_ggml.constants import CHUNK
from kvflash_ggml.errors import ConfigError, DecodeError, SnapshotError
from kvflash_ggml.sequence import together

Tokens = npt.NDArray[np.int32]

SLOTS = 4
SHARE = 512
MOST = 48


@pytest.fixture(autouse=True)
def one_token_between_two_steps_of_a_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """No answer ends before the last prompt is read, however slow the machine is."""
    monkeypatch.setattr(pace, "DECODE_SHARE", 0.0)


def settings(reading: str = "pool", parallel: int = SLOTS) -> dict[str, Any]:
    config = KVFlashConfig(
        pool=SHARE * parallel,
        policy="qk",
        tau=16,
        calibrate=False,
        reading=reading,
        parallel=parallel,
        pool_share="strict",  # or an answer that ends early leaves the others more of the pool
    )
    return {"n_ctx": 4096, "kvflash": config}


def wait_for(width: int, widths: list[int]) -> None:
    until = time.monotonic() + 60
    while width not in widths:
        assert time.monotonic() < until
        time.sleep(0.001)


def prompts(tokens: Tokens, count: int = SLOTS) -> list[list[int]]:
    """Texts of more than a share, each of another length."""
    return [tokens[2000 * i : 2000 * i + 700 + 90 * i].tolist() for i in range(count)]


def all_at_once(running: Scheduler, texts: Sequence[Sequence[int]], most: int = MOST, **more: Any) -> list[Asked]:
    return [ask(running, text, most, logprobs=2, ignore_eos=True, **more) for text in texts]


def lone(llm: Any, texts: Sequence[Sequence[int]], most: int = MOST, **more: Any) -> list[Asked]:
    """The answers of one after the other, on a pool of the same size."""
    found = []
    with served(llm) as running:
        for text in texts:
            (asked,) = all_at_once(running, [text], most, **more)
            asked.wait()
            found.append(asked)
    return found


def logprobs(asked: Asked) -> list[tuple[int, float]]:
    """The tokens of an answer that has ended well, and what is told of each."""
    assert isinstance(asked.wait(), Finished), asked.events[-1]
    return [(one.token, one.logprob) for event in asked.events if isinstance(event, Piece) for one in event.logprobs]


def test_others_decode_between_two_steps_of_a_prompt(llama: Callable[..., Any], tokens: Tokens) -> None:
    with served(llama(**settings(parallel=2))) as running:
        first = ask(running, tokens[:100].tolist(), 400, ignore_eos=True)
        while not any(isinstance(event, Piece) for event in first.events):
            first.next()
        second = ask(running, tokens[1000:4000].tolist(), 1)
        order: list[str] = []
        while not isinstance(second.next(), Finished):
            order.append(type(second.events[-1]).__name__)
        done = running.generated
        assert 3 < done < 400
        assert isinstance(first.wait(), Finished)


@pytest.mark.parametrize("deterministic", [False, True])
def test_prompt_steps_follow_a_target(
    deterministic: bool, llama: Callable[..., Any], tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that nothing can reach makes them short, unless they must not depend on others. The answers stay."""
    monkeypatch.setattr(pace, "DEARER", np.inf)
    given = settings("exact", parallel=2)
    given["kvflash"] = replace(given["kvflash"], deterministic=deterministic)
    texts = [tokens[:100].tolist(), tokens[1000:3000].tolist()]
    wanted = lone(llama(**given), texts)
    llm, rows = llama(**given), list[int]()
    session = inside(llm).session
    with served(llm, Limits(itl_target=1e-6)) as running:
        first = all_at_once(running, texts[:1], 400)[0]
        while not any(isinstance(event, Piece) for event in first.events):
            first.next()
        step = session.engine.step
        session.engine.step = lambda count, *rest: (rows.append(count), step(count, *rest))[1]
        (second,) = all_at_once(running, texts[1:])
        assert_alike(second, wanted[1])
        assert isinstance(first.wait(), Finished)
    long = [count for count in rows if count > SLOTS]
    assert (long[1] > long[0] // 2) == deterministic
    assert deterministic or set(long[2:20]) == {LEAST_ROWS}


@pytest.mark.parametrize("spreads", [False, True])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_numbers_that_are_none_end_their_answer_only(
    kind: str, spreads: bool, llama: Callable[..., Any], tokens: Tokens, widths: list[int], caplog: Any
) -> None:
    """spreads: as on a GPU with upstream's attention, such a block spoils all texts of a step. With recurrent state
    each is read again, once: the same where the pool holds all of it.
    """
    spoils = spreads or (ON_GPU and not has_our_kernels())
    again_whole = spreads or (spoils and kind == "hybrid")
    texts = [text[-400:] if again_whole else text for text in prompts(tokens)]
    wanted = lone(llama(kind, **settings()), texts)
    llm = llama(kind, **settings())
    if spreads:
        spread(inside(llm).session.engine)
    with served(llm) as running:
        asked = all_at_once(running, texts)
        wait_for(SLOTS, widths)
        victim = asked[2].request

        def poison() -> None:
            (slot,) = (slot for slot in running.slots if slot.request is victim)
            model = slot.model
            assert isinstance(model, LlamaModel)
            session = model.text.pooled
            spoil(session.engine, session.table.chunks[0].block)

        running.call(poison).result()
        end = asked[2].wait()
        assert isinstance(end, Failed)
        assert end.code == "numerical"
        for i in (0, 1, 3):
            assert_alike(asked[i], wanted[i])
        reread = [record for record in caplog.records if "read again" in record.message]
        assert len(reread) == (0 if kind == "dense" else SLOTS if spoils else 1)
        (again,) = all_at_once(running, [texts[2]])
        assert_alike(again, wanted[2])


@pytest.mark.parametrize(("kind", "late"), [("dense", False), ("dense", True), ("hybrid", False), ("hybrid", True)])
def test_a_step_that_fails_is_done_for_each_alone(
    kind: str, late: bool, llama: Callable[..., Any], tokens: Tokens, monkeypatch: pytest.MonkeyPatch
) -> None:
    """late: it was computed, so recurrent state has to be read again, from the prompt's end."""
    texts = [text[-400:] if late else text for text in prompts(tokens)]
    wanted = lone(llama(kind, **settings()), texts)
    llm = llama(kind, **settings())
    engine, failed = inside(llm).session.engine, []
    step = engine.step

    def failing(n: int, wait: int, codes: list[int], *rest: Any) -> Any:
        if len(set(engine.seq[:n].tolist())) == 1 or len(failed) == 3:
            return step(n, wait, codes, *rest)
        failed.append(n)
        if late:
            step(n, wait, codes, *rest)
            codes[:] = [2]
        raise DecodeError("a failed step of several", 1)

    monkeypatch.setattr(engine, "step", failing)
    with served(llm) as running:
        for mine, its in zip(all_at_once(running, texts), wanted, strict=True):
            assert_alike(mine, its)
    assert len(failed) == 3


def test_host_memory_that_is_full_ends_its_answer_only(llama: Callable[..., Any], tokens: Tokens) -> None:
    """A seventh chunk is sealed in the midst of an answer, in a step of four, and none of the others. These have the
    same bits as without it, and a text that fits is answered.
    """
    given = settings()
    config = replace(given["kvflash"], deterministic_batch=True)
    short, long = [tokens[300 * i : 300 * i + 40].tolist() for i in range(3)], tokens[2000:2434].tolist()
    free = llama(**{**given, "kvflash": config})
    limited = llama(**{**given, "kvflash": replace(config, host_limit=6 * free.kvflash.page_bytes)})
    wanted = lone(free, short, 20)
    with served(limited) as running:
        asked = all_at_once(running, [*short[:2], long, short[2]], 20)
        full = asked.pop(2)
        end = full.wait()
        assert isinstance(end, Failed)
        assert (end.code, "host_limit" in end.message) == ("internal_error", True)
        assert 7 * CHUNK - len(long) >= sum(bool(one.text) for one in full.events if isinstance(one, Piece)) > 3
        for mine, its in zip(asked, wanted, strict=True):
            assert logprobs(mine) == logprobs(its)
        (again,) = all_at_once(running, [long[:300]], 20)
        assert isinstance(again.wait(), Finished)


def test_a_page_of_one_is_lost(llama: Callable[..., Any], tokens: Tokens, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its text is read again, with steps of its own, before or after the others have drawn their tokens."""
    texts = prompts(tokens)
    wanted = lone(llama(**settings()), texts)
    llm, lost = llama(**settings()), list[int]()
    compute = together.compute

    def losing(prepared: Sequence[together.Prepared], **more: bool) -> list[Exception | None]:
        if not lost and len(prepared) == SLOTS:
            lost.append(prepared[1][0].seq)
        if lost and len(prepared) == 1 and prepared[0][0].seq == lost[0] and len(lost) == 1:
            lost.append(-1)
            return [SnapshotError("a page is lost")]
        if len(lost) == 1:
            (i,) = (i for i, (text, _) in enumerate(prepared) if text.seq == lost[0])
            found = compute([*prepared[:i], *prepared[i + 1 :]], **more)
            return [*found[:i], SnapshotError("a page is lost"), *found[i:]]
        return compute(prepared, **more)

    monkeypatch.setattr(together, "compute", losing)
    with served(llm) as running:
        for i, asked in enumerate(all_at_once(running, texts)):
            end = asked.wait()
            assert isinstance(end, Finished), end
            assert len(end.tokens) == MOST
            if i != 1:  # a text that is read again is read in other steps
                assert_alike(asked, wanted[i])
    assert len(lost) == 2


def test_a_step_has_room_for_fewer_rows_than_there_are_slots(llama: Callable[..., Any], tokens: Tokens) -> None:
    texts = [tokens[500 * i : 500 * i + 40].tolist() for i in range(6)]
    given = {**settings(parallel=6), "n_ctx": 1024, "n_batch": 8, "n_ubatch": 6}
    wanted = lone(llama(**given), texts, 8)
    with served(llama(**given)) as running:
        for mine, its in zip(all_at_once(running, texts, 8), wanted, strict=True):
            assert_alike(mine, its)
    with pytest.raises(ConfigError, match=r"n_ubatch = 5 .* 6 sequences"):
        llama(**{**given, "n_ubatch": 5})


def test_a_draft_model_serves_one_sequence(llama: Callable[..., Any]) -> None:
    def nothing(tokens: Tokens, **more: Any) -> Tokens:
        return tokens[:0]

    with pytest.raises(ConfigError, match="draft_model serves one sequence"):
        llama(**settings(parallel=2), draft_model=nothing)
