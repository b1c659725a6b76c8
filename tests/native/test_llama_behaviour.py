"""`Llama` with a pool behaves as upstream's does, wherever the pool is not the point."""

from __future__ import annotations

import logging
import pickle
import subprocess
import sys
import weakref
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import llama_cpp.llama_cpp as upstream
import numpy as np
import pytest
from support.harness import (
    CHUNK,
    agreement,
    check,
    check_device_bytes,
    logits_along,
    looks,
    pages,
    row,
    same_bits,
)
from support.inside import inside
from support.integrity import check_table

from kvflash_ggml import KVFlashConfig, system
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import ConfigError, ContextFull, DecodeError, KVFlashError, SnapshotError, SnapshotMismatch
from kvflash_ggml.runtime.hints import SlowPrompt
from kvflash_ggml.threads import Worker

GREEDY = {"temp": 0.0}


def take(generator: Any, n: int) -> list[int]:
    out = list(islice(generator, n))
    generator.close()
    return out


# --- threads


@pytest.mark.parametrize(("cores", "expected"), [(1, (1, 1)), (2, (1, 2)), (7, (3, 7))])
def test_threads_are_those_that_the_process_may_use(
    cores: int, expected: tuple[int, int], llama: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(system, "cores", lambda: cores)
    llm = llama(n_threads=None, n_threads_batch=None)
    assert (llm.n_threads, llm.n_threads_batch) == expected
    assert (llm.context_params.n_threads, llm.context_params.n_threads_batch) == expected


def test_a_prompt_that_takes_long_is_told_once(llama: Any, tokens: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm = llama(n_ctx=2048, n_batch=64, n_ubatch=64, kvflash=512)
    now = iter(range(0, 10_000, 2))
    inside(llm).slow = SlowPrompt(lambda: next(now))
    for _ in range(2):
        llm.reset()
        llm.eval(tokens[:640].tolist())
    (record,) = caplog.records
    assert record.getMessage().startswith("kvflash: reading a prompt: 192 of 640 tokens in 6 s")


def test_who_is_told_the_progress_gets_no_line(llama: Any, tokens: Any, caplog: pytest.LogCaptureFixture) -> None:
    llm = llama(n_ctx=2048, n_batch=64, n_ubatch=64, kvflash=512)
    told: list[int] = []
    llm.kvflash_progress = lambda done, _total: told.append(done)
    now = iter(range(0, 10_000, 60))
    inside(llm).slow = SlowPrompt(lambda: next(now))
    llm.eval(tokens[:640].tolist())
    assert told[-1] == 640
    assert not caplog.records


# --- sizes of the context


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize("n_ctx", [32, 100, 300, 0])
def test_any_context_length(kind: str, n_ctx: int, llama: Any, stock: Any, tokens: Any) -> None:
    split = {"n_ctx": n_ctx, "n_batch": 512, "n_ubatch": 512}
    ours = llama(kind, kvflash=512, **split)
    assert ours.n_ctx() == ours.kvflash.n_ctx == len(ours.input_ids) == max(256, ours.n_ctx())
    theirs = stock(kind, flash_attn=True, **(split | {"n_ctx": n_ctx or 4096}))
    prompt = tokens[:20].tolist()
    assert take(ours.generate(prompt, **GREEDY), 10) == take(theirs.generate(prompt, **GREEDY), 10)


@pytest.mark.parametrize("pool", [None, 512])
def test_no_ubatch_is_upstreams_word_for_the_batch(pool: int | None, llama: Any, tokens: Any) -> None:
    prompt = tokens[:700].tolist()
    llm, other = (llama("dense", n_ctx=2048, n_ubatch=n, kvflash=pool) for n in (0, 256))
    for one in (llm, other):
        one.eval(prompt)
    assert same_bits(row(llm), row(other))


def test_a_small_context_can_be_filled(llama: Any, tokens: Any) -> None:
    llm = llama(n_ctx=32, kvflash=KVFlashConfig(pool=64, pins=((0, 200),)))
    llm.eval(tokens[: llm.n_ctx()].tolist())
    assert llm.n_tokens == llm.kvflash.length == 256
    with pytest.raises(ContextFull):
        llm.eval([1])


def test_context_full_says_so_like_upstream(llama: Any, tokens: Any) -> None:
    llm = llama(n_ctx=1024, kvflash=512)
    pattern = r"Requested tokens \(1025\) exceed context window of 1024"
    with pytest.raises(ValueError, match=pattern) as caught:
        llm.eval(tokens[:1025].tolist())
    assert isinstance(caught.value, ContextFull)
    assert llm.n_tokens == 0
    with pytest.raises(ValueError, match=pattern):
        llm.create_completion(tokens[:1025].tolist())
    llm.eval(tokens[:1000].tolist())
    with pytest.raises(ContextFull, match=pattern):
        llm.eval(tokens[:25].tolist())
    assert llm.n_tokens == 1000


def test_max_tokens_end_at_the_context(llama: Any, tokens: Any) -> None:
    llm = llama(n_ctx=1024, kvflash=512)
    answer = llm.create_completion(
        tokens[:1000].tolist(), max_tokens=None, temperature=0.0, logit_bias={llm.token_eos(): -1e9}
    )
    assert answer["usage"]["total_tokens"] == 1024
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("pool", [None, 512])
@pytest.mark.parametrize(
    ("pieces", "most", "text", "count"),
    [
        ([b"\xf7"], 3, "", 8),
        ([b"a", b"\xff", b"b", b"\xff"], 3, "ab", 8),
        ([b"a", b"b", b"\xc3", b""], 3, "ab", 6),  # a special token
        ([b"\xf7"], None, "", 24),
        ([b"\xf7"], 23, "", 24),
        ([*[b"a"] * 22, b"\xc3", b"\xa9"], None, "a" * 22 + "\u00e9", 24),
        ([b"\xf0", b"\x9f", b"\x98", b"\x80"], 1, "\U0001f600", 4),
        ([b"a", b"b", b"\xc3", b"\xa9", b"c"], 3, "ab\u00e9", 4),
    ],
)
def test_bytes_that_are_no_text_end_an_answer_too(
    pieces: list[bytes],
    most: int | None,
    text: str,
    count: int,
    pool: int | None,
    stream: bool,
    llama: Any,
    tokens: Any,
) -> None:
    """Upstream waits for the rest of a character. Where it never came, the answer failed at the context's end.

    pieces: what the model writes; the last for ever.
    """
    from llama_cpp import LogitsProcessorList

    llm = llama(n_ctx=256, kvflash=pool)
    known = {llm.detokenize([token]): token for token in range(llm.n_vocab()) if token != llm.token_eos()}
    prompt = tokens[: 256 - 24].tolist()

    def write(ids: Any, scores: Any) -> Any:
        forced = np.full_like(scores, -np.inf)
        forced[known[pieces[min(len(ids) - len(prompt), len(pieces) - 1)]]] = 0.0
        return forced

    given: dict[str, Any] = {"max_tokens": most, "logits_processor": LogitsProcessorList([write])}
    if stream:
        parts = list(llm.create_completion(prompt, stream=True, **given))
        assert "".join(part["choices"][0]["text"] for part in parts) == text
        assert parts[-1]["choices"][0]["finish_reason"] == "length"
    else:
        made = llm.create_completion(prompt, **given)
        assert made["choices"][0]["text"] == text
        assert made["choices"][0]["finish_reason"] == "length"
        assert made["usage"]["completion_tokens"] == count
    assert llm.create_completion(prompt[:9], max_tokens=1)["choices"]


# --- generation


@pytest.mark.parametrize("pool", [None, 1024, 512])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_draft_model_changes_nothing(kind: str, pool: int | None, llama: Any, tokens: Any) -> None:
    """With a prompt longer than n_batch, and with drafts that are mostly wrong."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = np.tile(tokens[:150], 5).tolist() + tokens[:40].tolist()
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "kvflash": pool}
    plain = take(llama(kind, **size).generate(prompt, **GREEDY), 40)
    drafted = llama(kind, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5), **size)
    scored = llama(kind, logits_all=True, **size)
    tokens_out = take(drafted.generate(prompt, **GREEDY), 40)
    assert tokens_out[: first_tie(scored, prompt, plain)] == plain[: first_tie(scored, prompt, plain)]
    if pool is not None:
        check_table(inside(drafted).session.table)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_wrong_drafts_cost_no_looks(kind: str, llama: Any, tokens: Any) -> None:
    """Each step has drafts, all of them wrong; the text goes on as without."""

    def wrong(ids: Any, **_: Any) -> Any:
        return np.full(4, 3, np.intc)

    size = {"n_ctx": 2048, "n_batch": 128, "n_ubatch": 128, "kvflash": 512, "kvflash_policy": "qk", "kvflash_tau": 64}
    prompt = tokens[:900].tolist()
    plain, drafted = llama(kind, **size), llama(kind, draft_model=wrong, kvflash_spec=SpecConfig(width=5), **size)
    found = []
    for llm in (plain, drafted):
        take(llm.generate(prompt, **GREEDY), 1)
        before = inside(llm).session.scoring.passes
        llm.n_tokens = len(prompt)
        take(llm.generate(prompt, **GREEDY), 200)
        found.append(inside(llm).session.scoring.passes - before)
        assert inside(llm).session.paging.page_ins > 0
        assert len(llm.scores) == llm.n_batch, "logits of all tokens are kept"
    assert abs(found[0] - found[1]) <= 1
    assert found[1] >= looks(inside(drafted).session, 199)
    state = inside(drafted).session.queries
    assert inside(drafted).session.length - state.valid_from >= state.rows - 4


@pytest.mark.parametrize("settings", [{}, {"kvflash_policy": "qk", "kvflash_reading": "exact"}])
def test_more_tokens_are_sent_than_a_step_has(settings: dict[str, Any], llama: Any, tokens: Any) -> None:
    """With logits_all what is sent is compared with what is sampled after each of them, as upstream does it."""
    size = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 64, "logits_all": True, "flash_attn": True}
    prompt = tokens[:100].tolist()
    answer = take(llama(**size).generate(prompt, **GREEDY), 140)
    told = []
    for pool in (None, 1024, 512):
        llm = llama(kvflash=pool, **size, **(settings if pool else {}))
        generator = llm.generate(prompt, **GREEDY)
        got = [next(generator), generator.send(answer[1:101] + tokens[500:560].tolist())]
        told.append([*got, *(next(generator) for _ in range(120))])
        generator.close()
    assert told[1:] == [told[0]] * 2


def test_more_wrong_drafts_than_queries_are_kept(llama: Any, tokens: Any) -> None:
    """A query of the text is left to score by."""

    def wrong(ids: Any, **_: Any) -> Any:
        return np.full(100, 3, np.intc)

    size = {"n_ctx": 2048, "n_batch": 128, "n_ubatch": 128, "kvflash": 512, "kvflash_policy": "qk", "kvflash_tau": 8}
    llm = llama(draft_model=wrong, kvflash_spec=SpecConfig(width=101), **size)
    take(llm.generate(tokens[:900].tolist(), **GREEDY), 40)
    before = inside(llm).session.scoring.passes
    assert take(llm.generate(llm.input_ids[: llm.n_tokens].tolist(), **GREEDY), 40)
    session = inside(llm).session
    assert session.scoring.passes - before >= looks(session, 40) - 1


def test_a_stream_with_drafts_can_be_saved_at_any_token(llama: Any, tokens: Any) -> None:
    """What is saved is the text that has been told, without the drafts beyond it."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    prompt = np.tile(tokens[:150], 5).tolist()
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "kvflash": 512}
    llm = llama(draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5), kvflash_spec=SpecConfig(width=6), **size)
    told: list[int] = []
    ahead = 0
    for token in llm.generate(prompt, **GREEDY):
        ahead += inside(llm).session.ahead > 0
        told.append(token)
        if len(told) in (2, 7, 8):
            state = llm.save_state()
            assert state.input_ids[: state.n_tokens].tolist() == [*prompt, *told[:-1]]
        if len(told) == 30:
            break
    assert ahead, "no draft was ever ahead of the text"
    assert inside(llm).session.tokens.tolist()[: len(prompt)] == prompt


@pytest.fixture
def drafting(llama: Any, tokens: Any) -> Any:
    """A stream that has told three tokens, with drafts ahead: (llm, stream, the text so far)."""
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    def make(kind: str = "dense", **settings: Any) -> tuple[Any, Any, list[int]]:
        size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "kvflash": 512} | settings
        size["kvflash_spec"] = SpecConfig(width=6)  # whatever steps take
        llm = llama(kind, draft_model=LlamaPromptLookupDecoding(num_pred_tokens=5), **size)
        text = np.tile(tokens[:150], 5).tolist()
        stream = llm.generate(text, **GREEDY)
        known = len(text)
        while True:
            text.append(next(stream))
            if len(text) - known > 2 and inside(llm).session.ahead:
                return llm, stream, text[:-1]  # the last is told, and not of the text yet

    return make


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_another_request_goes_on_without_the_drafts(kind: str, drafting: Any, tokens: Any) -> None:
    llm, stream, text = drafting(kind)
    more = tokens[500:503].tolist()
    next(llm.generate(more, reset=False, **GREEDY))
    assert llm.input_ids[: llm.n_tokens].tolist() == [*text, *more]
    assert inside(llm).session.tokens.tolist()[: llm.n_tokens] == [*text, *more]
    stream.close()
    assert llm.input_ids[: llm.n_tokens].tolist() == [*text, *more]


def test_a_text_that_is_cut_stays_cut_whatever_is_drafted(drafting: Any, tokens: Any) -> None:
    llm, _, text = drafting()
    llm.n_tokens = 100
    llm.eval([7])
    assert inside(llm).session.tokens.tolist() == [*text[:100], 7]
    assert llm.n_tokens == 101


def test_a_load_that_fails_drops_the_drafts_only(drafting: Any) -> None:
    other = drafting()[0].save_state()
    llm, stream, text = drafting()
    damaged = mock.patch("kvflash_ggml.sequence.restore._read", side_effect=SnapshotError("damaged"))
    with damaged, pytest.raises(SnapshotError):
        llm.load_state(other)
    stream.close()
    assert llm.input_ids[: llm.n_tokens].tolist() == text


def test_drafts_stay_ahead_while_tokens_are_pinned(drafting: Any) -> None:
    llm, stream, text = drafting()
    ahead = inside(llm).session.ahead
    llm.kvflash.pin(0, 64)
    assert inside(llm).session.ahead == ahead > 0
    stream.close()
    assert llm.input_ids[: llm.n_tokens].tolist() == text


def test_logits_of_the_text_are_at_hand_where_drafts_were_dropped(drafting: Any, llama: Any) -> None:
    llm, stream, text = drafting()
    stream.close()
    assert llm.n_tokens == len(text)
    assert inside(llm).session.logits.row(len(text) - 1) is not None
    assert inside(llm).session.logits.row(len(text)) is None
    plain = llama(n_ctx=1024, n_batch=128, n_ubatch=128, kvflash=512)
    assert llm.sample(temp=0.0) == next(plain.generate(text, **GREEDY))
    with pytest.raises(KVFlashError, match="no logits are kept"):
        llm.sample(idx=len(text))


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_an_interrupt_while_drafts_are_dropped_leaves_none_of_them(kind: str, drafting: Any) -> None:
    llm, stream, text = drafting(kind)
    settle = inside(llm).session.settle

    def interrupted() -> None:
        settle()
        raise KeyboardInterrupt

    with mock.patch.object(inside(llm).session, "settle", interrupted), pytest.raises(KeyboardInterrupt):
        stream.close()
    assert llm.input_ids[: llm.n_tokens].tolist() == text
    llm.eval([7])
    assert inside(llm).session.tokens.tolist() == [*text, 7]


def test_a_page_that_is_lost_while_catching_up_is_read_again(llama: Any, tokens: Any, caplog: Any) -> None:
    """`n_tokens` was set behind the session, which finds a page damaged when it follows."""
    from kvflash_ggml.errors import SnapshotError
    from kvflash_ggml.sequence import prefill

    llm, fresh = llama(kvflash=512), llama(kvflash=512)
    fresh.eval(tokens[:901].tolist())
    llm.eval(tokens[:700].tolist())
    llm.input_ids[700:900], llm.n_tokens = tokens[700:900], 900
    pieces, calls = prefill.pieces, []

    def lost(session: Any, data: Any, **keywords: Any) -> Any:
        calls.append(len(data))
        if len(calls) == 1:
            raise SnapshotError("a page is damaged")
        return pieces(session, data, **keywords)

    with mock.patch.object(prefill, "pieces", lost), caplog.at_level("WARNING", "kvflash_ggml"):
        llm.eval(tokens[900:901].tolist())
    assert calls == [200, 901]
    assert "the whole text is read again" in caplog.text
    assert inside(llm).session.tokens.tolist() == tokens[:901].tolist()
    assert same_bits(row(llm), row(fresh))


def first_tie(llm: Any, prompt: list[int], answer: list[int]) -> int:
    """How many greedy tokens are beyond doubt: batches of other sizes round differently."""
    llm.reset()
    llm.eval(prompt)
    for i, token in enumerate(answer):
        top = np.sort(row(llm))[-2:]
        if top[1] - top[0] < 0.3:
            return i
        llm.eval([token])
    return len(answer)


def test_prefix_is_not_evaluated_twice(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512)
    prompt = tokens[:300].tolist()
    take(llm.generate(prompt, **GREEDY), 5)
    done: list[int] = []
    llm.kvflash_progress = lambda at, of: done.append(of)
    take(llm.generate([*prompt, *tokens[700:710].tolist()], **GREEDY), 1)
    assert done == [10]


def test_generate_accepts_what_is_sent(llama: Any, stock: Any, tokens: Any) -> None:
    runs = []
    for llm in (llama(kvflash=1024, logits_all=True), stock(flash_attn=True, logits_all=True)):
        generator = llm.generate(tokens[:50].tolist(), **GREEDY)
        first = next(generator)
        rest = [generator.send(tokens[100:104].tolist()), next(generator)]
        runs.append((first, rest, llm.input_ids[: llm.n_tokens].tolist()))
        generator.close()
    assert runs[0] == runs[1]


@pytest.mark.parametrize("pool", [None, 512])
def test_what_is_sent_needs_no_kept_logits(pool: int | None, llama: Any, tokens: Any) -> None:
    llm, other = llama(kvflash=pool), llama(kvflash=pool)
    generator = llm.generate(tokens[:50].tolist(), **GREEDY)
    first = next(generator)
    sent = generator.send(tokens[100:104].tolist())
    assert sent == next(other.generate([*tokens[:50].tolist(), first, *tokens[100:104].tolist()], **GREEDY))
    assert llm.n_tokens == 55


@pytest.mark.parametrize("again", [0, 4])
def test_queries_of_a_text_that_was_cut_are_not_asked(again: int, llama: Any, tokens: Any) -> None:
    llm, fresh = (llama(n_ctx=4096, kvflash=512, kvflash_policy="qk", kvflash_tau=64) for _ in range(2))
    prompt = tokens[:1500].tolist()
    take(llm.generate([*prompt, *tokens[2000:2040].tolist()], **GREEDY), 40)
    asked = []
    for each in (llm, fresh):
        scorer = inside(each).session.scoring.scorer
        with mock.patch.object(scorer, "score", wraps=scorer.score) as score:
            take(each.generate([*prompt, *tokens[3000 : 3000 + again].tolist()], **GREEDY), 1)
        requests = [call.args[0] for call in score.call_args_list]
        asked.append(next(look for look in reversed(requests) if look.rows > 1))
    layer = inside(llm).session.engine.layers[0]
    first = [look.queries[: look.rows * layer.n_head * layer.head_k] for look in asked]
    assert asked[0].rows == asked[1].rows == 32
    assert np.allclose(first[0], first[1], atol=1e-3)  # the first layer sees the tokens alone


def test_without_checkpoints_a_prompt_is_not_read_again(llama: Any, tokens: Any) -> None:
    llm = llama("hybrid", n_ctx=4096, kvflash=KVFlashConfig(pool=512, checkpoints=0))
    llm.eval(tokens[:1500].tolist())
    assert llm.n_tokens == llm.kvflash.length == 1500
    assert len(take(llm.generate(tokens[:1500].tolist(), **GREEDY), 40)) == 40
    check(llm)


def test_processor_and_bias_both_act(llama: Any, tokens: Any) -> None:
    from llama_cpp import LogitsProcessorList

    llm = llama(kvflash=512)
    seen: list[int] = []

    def forbid(ids: Any, scores: Any) -> Any:
        seen.append(len(ids))
        scores = scores.copy()
        scores[1234] = -np.inf
        return scores

    answer = llm.create_completion(
        tokens[:40].tolist(),
        max_tokens=4,
        temperature=0.0,
        logits_processor=LogitsProcessorList([forbid]),
        logit_bias={1234: 1e4, 321: 1e3},
    )
    assert seen == [40, 41, 42, 43]
    assert answer["choices"][0]["text"].encode() == llm.detokenize([321] * 4)


def test_streaming_stop_strings_and_echo(llama: Any, stock: Any, tokens: Any) -> None:
    answers = []
    for llm in (llama(kvflash=1024), stock(flash_attn=True)):
        prompt = llm.detokenize(tokens[:200].tolist()).decode("utf-8", "ignore")
        settings = {"max_tokens": 48, "temperature": 0.0, "seed": 1}
        whole = llm.create_completion(prompt, **settings)["choices"][0]
        assert len(whole["text"]) > 20
        stop = whole["text"][12:15]
        stopped = llm.create_completion(prompt, stop=[stop], **settings)["choices"][0]
        assert stopped["finish_reason"] == "stop"
        assert stop not in stopped["text"]
        pieces = llm.create_completion(prompt, stream=True, stop=[stop], **settings)
        streamed = "".join(piece["choices"][0]["text"] for piece in pieces)
        assert streamed == stopped["text"]
        echoed = llm.create_completion(prompt, echo=True, **settings)["choices"][0]["text"]
        assert echoed == prompt + whole["text"]
        answers.append((whole["text"], stopped["text"]))
    assert answers[0] == answers[1]


def test_chat(llama: Any, stock: Any) -> None:
    messages = [{"role": "user", "content": "The code for harbor is 5830174. What is the code for harbor?"}]
    texts = []
    for llm in (llama(kvflash=1024), stock(flash_attn=True)):
        answer = llm.create_chat_completion(messages, temperature=0.0, max_tokens=24)
        texts.append(answer["choices"][0]["message"]["content"])
        pieces = llm.create_chat_completion(messages, temperature=0.0, max_tokens=24, stream=True)
        deltas = [piece["choices"][0]["delta"].get("content", "") for piece in pieces]
        assert "".join(deltas) == texts[-1]
    assert texts[0] == texts[1]
    assert texts[0]


def test_grammar(llama: Any, tokens: Any) -> None:
    from llama_cpp import LlamaGrammar

    grammar = LlamaGrammar.from_string('root ::= "yes" | "no"', verbose=False)
    llm = llama(kvflash=512)
    for seed in range(3):
        answer = llm.create_completion(tokens[:30].tolist(), grammar=grammar, max_tokens=8, temperature=2.0, seed=seed)
        assert answer["choices"][0]["text"] in ("yes", "no")


def test_stopping_criteria_see_the_logits(llama: Any, tokens: Any) -> None:
    from llama_cpp import StoppingCriteriaList

    llm = llama(kvflash=512)
    seen: list[tuple[int, int]] = []

    def stop(ids: Any, logits: Any) -> bool:
        seen.append((len(ids), int(np.argmax(logits))))
        return len(seen) == 4

    criteria = StoppingCriteriaList([stop])
    out = list(llm.generate(tokens[:100].tolist(), stopping_criteria=criteria, **GREEDY))
    assert [n for n, _ in seen] == [100, 101, 102, 103]
    assert [token for _, token in seen][:3] == out


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_built_once(stream: bool, llama: Any, tokens: Any, monkeypatch: Any) -> None:
    """Every token is turned into text a few times, not once per token that follows it."""
    llm = llama(kvflash=512)
    inner = llm.tokenizer_._tokenizer
    work: list[int] = []
    detokenize = inner.detokenize

    def count(ids: list[int], **kwargs: Any) -> bytes:
        work.append(len(ids))
        return detokenize(ids, **kwargs)

    monkeypatch.setattr(inner, "detokenize", count)
    bias = {llm.token_eos(): -1e9}
    for start in (0, 50):
        work.clear()
        answer = llm.create_completion(
            tokens[start : start + 50].tolist(),
            max_tokens=200,
            temperature=0.0,
            stream=stream,
            logit_bias=bias,
        )
        if stream:
            list(answer)
        assert sum(work) < 5 * 200


def test_incremental_text_is_upstreams(llama: Any, stock: Any) -> None:
    ours, theirs = llama(vocab_only=True), stock(vocab_only=True)
    ids = theirs.tokenize("naïve — 日本語 🙂 text\n\n  with  spaces".encode())
    for special in (False, True):
        for end in range(1, len(ids) + 1):
            expected = theirs.detokenize(ids[:end], special=special)
            assert ours.detokenize(ids[:end], special=special) == expected
            assert ours.detokenize(ids[end - 1 : end], special=special) == theirs.detokenize(
                ids[end - 1 : end], special=special
            )


# --- refusals


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"kvflash": 512, "flash_attn": False}, "flash_attn"),
        ({"kvflash": 0}, "pool"),
        ({"kvflash": True}, "pool"),
        ({"kvflash": "large"}, "pool"),
        ({"kvflash_tau": 5}, "needs kvflash"),
        ({"kvflash": KVFlashConfig(pool=512), "kvflash_tau": 5}, "not both"),
        ({"kvflash": 512, "kvflash_pins": [(0, 512)]}, "pin"),
        ({"kvflash": 512, "kvflash_pins": [(5, 5)]}, "pin"),
    ],
)
def test_bad_settings_are_refused(settings: dict[str, Any], match: str, llama: Any) -> None:
    with pytest.raises(ConfigError, match=match):
        llama(**settings)
    assert llama().kvflash is None, "a refusal leaves no pool for the next context"


def test_embedding_has_no_pool(llama: Any, stock: Any, caplog: Any) -> None:
    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        llm = llama(embedding=True, kvflash=512)
    assert llm.kvflash is None
    assert "embedding" in caplog.text
    assert llm.embed("some text") == stock(embedding=True).embed("some text")


def test_vocab_only(llama: Any) -> None:
    llm = llama(vocab_only=True, kvflash=512)
    assert llm.kvflash is None
    assert llm.detokenize(llm.tokenize(b"hello there")) == b"hello there"


def test_what_a_pool_cannot_do_is_refused(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512)
    llm.eval(tokens[:100].tolist())
    for call in (
        lambda: llm._ctx.decode(llm._batch),
        lambda: llm._ctx.kv_cache_seq_cp(0, 1, 0, -1),
        lambda: llm._ctx.kv_cache_seq_shift(0, 0, -1, 3),
    ):
        with pytest.raises(KVFlashError, match="kvflash=None"):
            call()
    assert not llm._ctx.kv_cache_seq_rm(-1, 10, 20)
    assert llm._ctx.kv_cache_seq_rm(-1, 90, -1)
    assert llm.kvflash.length == 90


def test_a_program_that_decodes_by_itself_is_told_why_it_cannot(llama: Any, tokens: Any) -> None:
    import llama_cpp

    llm, plain = llama(kvflash=512), llama()
    llm.eval(tokens[:100].tolist())
    before = row(llm).copy()
    ids = (llama_cpp.llama_token * 1)(5)
    batch = llama_cpp.llama_batch_get_one(ids, 1)
    with pytest.raises(KVFlashError, match=r"llama_decode was called on a paged context.* kvflash=None"):
        llama_cpp.llama_decode(llm.ctx, batch)
    assert llama_cpp.llama_decode(plain.ctx, batch) == 0
    assert same_bits(row(llm), before)
    llm.eval(tokens[100:120].tolist())


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_memory_that_a_program_has_cleared_is_told(kind: str, llama: Any, tokens: Any) -> None:
    """llama.cpp would go on from nothing, at any position."""
    import llama_cpp

    llm, undisturbed = llama(kind, kvflash=512), llama(kind, kvflash=512)
    llm.eval(tokens[:100].tolist())
    llama_cpp.llama_memory_clear(llama_cpp.llama_get_memory(llm.ctx), True)
    with pytest.raises(KVFlashError, match=r"position 100, but the memory .* is empty.* reset\(\)"):
        llm.eval([9])
    llm.reset()
    for each in (llm, undisturbed):
        each.eval(tokens[:120].tolist())
    assert same_bits(row(llm), row(undisturbed))


# --- lifetime


def test_close_twice(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512)
    llm.eval(tokens[:700].tolist())
    llm.close()
    llm.close()
    del llm


def test_pickle_keeps_settings_and_tokenizer(llama: Any, models: Any, tokens: Any) -> None:
    config = KVFlashConfig(pool=512, tail=3, pins=((64, 128),), host_limit=1 << 24)
    llm = llama(kvflash=config, logits_all=True, n_batch=128)
    again = pickle.loads(pickle.dumps(llm))
    assert inside(again).config == config
    assert again.kvflash.pool == 512
    assert again._logits_all
    assert again.n_batch == 128
    assert again.tokenizer_.detokenize([35, 569]) == llm.tokenizer_.detokenize([35, 569])
    prompt = tokens[:700].tolist()
    assert take(again.generate(prompt, **GREEDY), 8) == take(llm.generate(prompt, **GREEDY), 8)
    again.close()

    from llama_cpp.llama_tokenizer import LlamaTokenizer

    own = OwnTokenizer()
    llm = llama(kvflash=512, tokenizer=own)
    assert llm.tokenizer_ is own
    again = pickle.loads(pickle.dumps(llm))
    assert isinstance(again.tokenizer_, OwnTokenizer)
    assert not isinstance(again.tokenizer_, LlamaTokenizer)
    again.close()


class OwnTokenizer:
    """Something that is no LlamaTokenizer, as the Hugging Face wrapper is."""

    def tokenize(self, text: bytes, add_bos: bool = True, special: bool = True) -> list[int]:
        return list(text)

    def detokenize(self, tokens: list[int], **kwargs: Any) -> bytes:
        return bytes(tokens)


# --- states


@pytest.mark.parametrize("pool", [512, 1024])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_state_continues_bit_for_bit(kind: str, pool: int, llama: Any, tokens: Any) -> None:
    llm = llama(kind, kvflash=pool)
    llm.eval(tokens[:750].tolist())
    state = llm.save_state()
    expected = logits_along(llm, tokens[750:751], tokens[751:900])
    other = llama(kind, kvflash=pool, seed=99)
    other.eval(tokens[5000:5300].tolist())
    for target in (llm, other):
        target.load_state(state)
        check_table(inside(target).session.table)
        assert target.n_tokens == 750
        assert same_bits(logits_along(target, tokens[750:751], tokens[751:900]), expected)


def test_state_after_a_cut_continues_bit_for_bit(llama: Any, tokens: Any) -> None:
    """Blocks were freed and chunks recalled before the save: the state knows their order."""
    llm = llama(kvflash=512, n_ctx=4096)
    llm.eval(tokens[:1500].tolist())
    llm.n_tokens = 700
    llm.eval(tokens[3000:3010].tolist())
    assert llm.kvflash.page_ins > 0
    state = llm.save_state()
    expected = logits_along(llm, tokens[3010:3011], tokens[3011:3400])
    other = llama(kvflash=512, n_ctx=4096)
    other.load_state(state)
    assert same_bits(logits_along(other, tokens[3010:3011], tokens[3011:3400]), expected)
    assert other.kvflash.resident_chunks == llm.kvflash.resident_chunks


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_state_without_a_pool(kind: str, llama: Any, tokens: Any) -> None:
    llm = llama(kind)
    llm.eval(tokens[:300].tolist())
    state = llm.save_state()
    expected = logits_along(llm, tokens[300:301], tokens[301:320])
    other = llama(kind)
    other.load_state(state)
    assert same_bits(logits_along(other, tokens[300:301], tokens[301:320]), expected)


def test_state_carries_the_last_logits_only(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512, n_ctx=16384)
    llm.eval(tokens[:700].tolist())
    last = row(llm)
    state = llm.save_state()
    assert state.scores.size == 0
    assert len(state.input_ids) == 700
    assert state.llama_state_size == len(state.llama_state)
    assert len(state.llama_state) < 11 * llm.kvflash.page_bytes + (700 + llm.n_vocab()) * 4 + 8192
    llm.reset()
    llm.load_state(state)
    assert same_bits(row(llm), last)


def test_state_carries_logits_where_all_are_kept(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512, logits_all=True)
    llm.eval(tokens[:700].tolist())
    state = llm.save_state()
    assert state.scores.shape == (700, llm.n_vocab())
    other = llama(kvflash=512, logits_all=True)
    other.load_state(state)
    assert same_bits(other.scores[:700], llm.scores[:700])


def test_state_of_other_settings_is_refused(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512)
    llm.eval(tokens[:100].tolist())
    state = llm.save_state()
    for field, settings in (("type_k", {"type_k": 8, "type_v": 8}), ("rope", {"rope_freq_base": 5e5})):
        other = llama(kvflash=512, **settings)
        other.eval(tokens[:70].tolist())
        before = row(other)
        with pytest.raises(SnapshotMismatch, match=field):
            other.load_state(state)
        assert (other.n_tokens, other.kvflash.length) == (70, 70)
        assert same_bits(before, row(other))
    with pytest.raises(SnapshotMismatch, match="model"):
        llama("small", kvflash=512).load_state(state)
    plain = llama()
    plain.eval(tokens[:50].tolist())
    with pytest.raises(SnapshotError):
        llm.load_state(plain.save_state())


def test_damaged_states_are_refused(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512)
    llm.eval(tokens[:300].tolist())
    state = llm.save_state()
    whole = state.llama_state
    flipped = bytearray(whole)
    flipped[-1000] ^= 1
    for data in (b"", whole[:10], whole[:-1], whole[: len(whole) // 2], bytes(flipped)):
        state.llama_state = data
        with pytest.raises(SnapshotError):
            llm.load_state(state)
    assert llm.n_tokens == llm.kvflash.length == 300
    state.llama_state = whole
    llm.load_state(state)


@pytest.mark.parametrize(("kind", "pool"), [("f32", 512), ("hybrid", 1024)])
def test_ram_cache(kind: str, pool: int, llama: Any, tokens: Any) -> None:
    """The hybrid goes back to a checkpoint: with all of the text in the pool it says the same from there."""
    from llama_cpp import LlamaRAMCache

    llm = llama(kind, kvflash=pool)
    llm.set_cache(LlamaRAMCache(capacity_bytes=1 << 26))
    first, second = tokens[:700].tolist(), tokens[4000:4600].tolist()
    settings = {"max_tokens": 8, "temperature": 0.0}
    answer = llm.create_completion(first, **settings)["choices"][0]["text"]
    llm.create_completion(second, **settings)
    done: list[int] = []
    llm.kvflash_progress = lambda at, of: done.append(of)
    again = llm.create_completion(first, **settings)["choices"][0]["text"]
    assert again == answer
    assert sum(done) < (400 if kind == "hybrid" else 10)


# --- the end


def test_a_model_that_is_dropped_is_closed_at_once(models: dict[str, Path], tokens: Any) -> None:
    from kvflash_ggml import Llama

    llm = Llama(str(models["small"]), n_ctx=1024, kvflash=512, n_threads=1, verbose=False)
    llm.eval(tokens[:600].tolist())
    llm.load_state(llm.save_state())
    session, gone = inside(llm).session, weakref.ref(llm)
    del llm
    assert gone() is None, "it is in a cycle"
    assert session.engine.closed


def test_a_question_is_no_longer_than_a_step(models: dict[str, Path]) -> None:
    """A scheduler has steps shorter than a prompt's question. Recurrent state goes back to a checkpoint before it."""
    from kvflash_ggml import Llama

    settings: dict[str, Any] = {"n_ctx": 4096, "n_batch": 256, "n_ubatch": 256, "n_threads": 1, "verbose": False}
    llm, drawn = Llama(str(models["hybrid"]), kvflash=512, kvflash_reading="pool", **settings), np.random.default_rng(0)
    inside(llm).session.n_ubatch = 64
    list(islice(llm.generate(drawn.integers(5, 200, 1200).tolist(), temp=0), 9))
    turn = drawn.integers(5, 200, 75).tolist()
    assert len(list(islice(llm.generate(turn, temp=0, reset=False), 3))) == 3


@pytest.mark.parametrize("interrupted", [False, True])
def test_a_model_that_has_answered_is_closed_at_once(
    models: dict[str, Path], monkeypatch: pytest.MonkeyPatch, *, interrupted: bool
) -> None:
    """Nothing of a request outlives it, which would keep a class of one's own, or an interrupt's traceback."""
    from kvflash_ggml import Llama

    class Own(Llama):
        def sample(self, *args: Any, **settings: Any) -> int:
            return super().sample(*args, **settings)

    def interrupt(steps: Any) -> None:
        raise KeyboardInterrupt

    llm = Own(str(models["small"]), n_ctx=1024, kvflash=512, n_threads=1, verbose=False)
    stream, gone = llm.generate(list(range(5, 700))), weakref.ref(llm)
    with monkeypatch.context() as patch:
        if interrupted:
            patch.setattr(inside(llm).session.pool, "run", interrupt)
        with pytest.raises(KeyboardInterrupt) if interrupted else nullcontext():
            next(stream)
    stream.close()
    del llm, stream
    assert gone() is None, "it is in a cycle"


def test_a_model_in_a_cycle_is_closed_before_its_context(models: dict[str, Path]) -> None:
    """A garbage collector finalises in any order: a session that outlived its context would crash the process."""
    code = f"""if True:
        import gc
        from kvflash_ggml import Llama
        for turn in range(8):
            llm = Llama({str(models["small"])!r}, n_ctx=1024, kvflash=512, n_threads=1, verbose=False)
            llm.eval(list(range(5, 700)))
            llm.kvflash_progress = (lambda llm: lambda done, total: llm)(llm)
            llm._ctx.llm = llm._model.llm = llm
            if turn % 2:
                llm._ctx.close()
            del llm
            gc.collect()
        """
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("first", ["llm", "_ctx", "_model"])
def test_a_model_that_is_collected_on_the_thread_that_scores(
    first: str, models: dict[str, Path], tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The thread computes with the pool, and the pool with the model."""
    from kvflash_ggml import Llama

    freed: list[tuple[str, bool]] = []

    def watch(name: str) -> None:
        free = getattr(upstream, name)
        monkeypatch.setattr(upstream, name, lambda what: (freed.append((name, session.engine.closed)), free(what)))

    watch("llama_free")
    watch("llama_model_free")
    llm = Llama(str(models["small"]), n_ctx=1024, kvflash=512, n_threads=1, verbose=False)
    session, model, context = inside(llm).session, llm._model, llm._ctx
    assert session is not None
    assert session.scoring is not None
    session.scoring._worker = worker = Worker("kvflash-score")  # as where a device computes beside the host
    llm.eval(tokens[:700].tolist())
    made = {"llm": llm, "_ctx": context, "_model": model}
    del llm

    def collect() -> bool:
        made.pop(first).close()  # as its __del__ does, in any order
        while made:
            made.popitem()[1].close()
        session.scoring.scorer.seal(3)
        return session.engine.closed or bool(freed)

    assert not worker.submit(collect).result(30)
    for thread in tuple(worker._executor._threads):
        thread.join(30)
    assert freed == [("llama_free", True), ("llama_model_free", True)]


# --- cutting the text


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_an_impossible_length_is_refused_and_changes_nothing(kind: str, llama: Any, tokens: Any) -> None:
    llm, fresh = llama(kind, n_ctx=2048, kvflash=512), llama(kind, n_ctx=2048, kvflash=512)
    for one in (llm, fresh):
        one.eval(tokens[:700].tolist())
    for wrong in (-5, 2049):
        llm.n_tokens = wrong
        for work in (lambda: llm.eval([1]), llm.save_state, lambda: inside(llm).session.truncate(-5)):
            with pytest.raises((ConfigError, ContextFull)):
                work()
        llm.n_tokens = 700
        check(llm)
    ours, theirs = (logits_along(one, tokens[700:701], tokens[701:705]) for one in (llm, fresh))
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("pool", [None, 512])
def test_logits_that_are_not_there_are_not_sampled(pool: int | None, llama: Any, tokens: Any) -> None:
    """Two generators of one model in turns, and a position that was not evaluated last: upstream aborts."""
    llm = llama("dense", n_ctx=2048, kvflash=pool)
    with pytest.raises(KVFlashError, match="nothing has been read"):
        llm.sample()
    one, two = (llm.generate(tokens[:100].tolist(), temp=0.0) for _ in range(2))
    with pytest.raises(KVFlashError, match="another call has used this model"):
        [next(each) for _ in range(3) for each in (one, two, two)]
    with pytest.raises(KVFlashError, match="position 5"):
        llm.sample(idx=5)
    assert next(llm.generate(tokens[:100].tolist(), temp=0.0)) is not None


def test_cut_back_to_text_on_the_host(llama: Any, tokens: Any) -> None:
    """The tail before the cut is host-only: it is brought back before the next token is evaluated."""
    llm = llama("f32", n_ctx=4096, kvflash=KVFlashConfig(pool=512, tail=4))
    llm.eval(tokens[:2000].tolist())
    assert not {7, 8, 9} & set(llm.kvflash.resident_chunks)
    llm.n_tokens = 9 * CHUNK + 30
    page_ins = llm.kvflash.page_ins
    cut = logits_along(llm, tokens[606:607], tokens[607:640])
    check_table(inside(llm).session.table)
    assert llm.kvflash.page_ins > page_ins
    assert {0, 5, 6, 7, 8, 9} <= set(llm.kvflash.resident_chunks)

    fresh = llama("f32", n_ctx=4096, kvflash=KVFlashConfig(pool=512, tail=4))
    straight = logits_along(fresh, tokens[:607], tokens[607:640])
    assert agreement(cut, straight) >= 0.95  # a few more chunks may be resident than in a fresh run
    assert same_pages(llm, fresh, chunks=3)


def same_pages(a: Any, b: Any, *, chunks: int) -> bool:
    return pages(inside(a).session)[:chunks] == pages(inside(b).session)[:chunks]


@pytest.mark.parametrize("length", [64, 65, 127, 128, 500, 512, 513, 1999])
def test_cut_anywhere(length: int, llama: Any, tokens: Any) -> None:
    llm = llama("small", n_ctx=4096, kvflash=512)
    llm.eval(tokens[:2000].tolist())
    llm.n_tokens = length
    llm.eval(tokens[length : length + 3].tolist())
    assert llm.n_tokens == llm.kvflash.length == length + 3
    check(llm)


@pytest.mark.parametrize("kind", ["hybrid", "iswa"])
def test_cut_of_state_that_cannot_go_back(kind: str, llama: Any, tokens: Any) -> None:
    """Recurrent state and windows: what cannot be undone is evaluated again, from a checkpoint if there is one."""
    llm, fresh = (llama(kind, n_ctx=2048, kvflash=2048) for _ in range(2))
    llm.eval(tokens[:700].tolist())
    llm.eval(tokens[700:900].tolist())
    llm.n_tokens = 800
    after = logits_along(llm, tokens[5000:5001], tokens[5001:5020])
    assert llm.n_tokens == 820
    straight = logits_along(fresh, [*tokens[:800], tokens[5000]], tokens[5001:5020])
    assert agreement(after, straight) >= 0.95
    assert np.abs(after - straight).max() < 0.8
    assert inside(llm).session.checkpoints


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_reset_forgets_everything(kind: str, llama: Any, tokens: Any) -> None:
    llm, fresh = (llama(kind, n_ctx=2048, kvflash=512) for _ in range(2))
    llm.eval(tokens[3000:4200].tolist())
    llm.reset()
    assert (llm.kvflash.length, llm.kvflash.resident, llm.kvflash.host_bytes) == (0, 0, 0)
    assert same_bits(
        logits_along(llm, tokens[:900], tokens[900:920]), logits_along(fresh, tokens[:900], tokens[900:920])
    )


# --- counters, pins


def test_counters(llama: Any, tokens: Any) -> None:
    llm = llama(n_ctx=4096, kvflash=512)
    view = llm.kvflash
    assert (view.pool, view.n_ctx, view.length, view.chunks, view.resident) == (512, 4096, 0, 0, 0)
    check_device_bytes(llm, 512)
    llm.eval(tokens[:1300].tolist())
    assert (view.length, view.chunks) == (1300, 21)
    assert view.resident == len(view.resident_chunks) == 8
    assert view.resident_chunks[0] == 0
    assert set(range(16, 21)) <= set(view.resident_chunks)
    assert (view.page_outs, view.page_ins) == (20, 0)
    assert view.bytes_out == view.host_bytes == 20 * view.page_bytes
    assert (view.type_k, view.type_v, view.spilled_bytes) == ("f16", "f16", 0)
    epoch = view.epoch
    llm.eval(tokens[1300:1344].tolist())
    assert view.epoch == epoch
    llm.eval(tokens[1344:1345].tolist())
    assert view.epoch > epoch
    assert "pool 512 of 4096" in view.banner()


def test_pins_outlast_a_long_prompt(llama: Any, tokens: Any) -> None:
    llm = llama(n_ctx=8192, kvflash=768, kvflash_pins=[(130, 190), (600, 620)])
    pinned = {2, 9}
    steps: list[int] = []

    def check(done: int, total: int) -> None:
        steps.append(done)
        resident = set(llm.kvflash.resident_chunks)
        assert {c for c in pinned if c * CHUNK < done} <= resident
        assert 0 in resident

    llm.kvflash_progress = check
    llm.eval(tokens[:5000].tolist())
    assert steps[-1] == 5000
    assert pinned <= set(llm.kvflash.resident_chunks)

    assert 20 not in llm.kvflash.resident_chunks
    llm.kvflash.pin(20 * CHUNK, 20 * CHUNK + 1)
    llm.eval(tokens[5000:5001].tolist())
    assert {2, 9, 20} <= set(llm.kvflash.resident_chunks)
    assert llm.kvflash.page_ins == 1
    with pytest.raises(ConfigError, match="larger pool"):
        llm.kvflash.pin(0, 5000)


def test_progress_is_reported(llama: Any, tokens: Any) -> None:
    seen: list[tuple[int, int]] = []
    llm = llama(n_ctx=2048, kvflash=512, kvflash_progress=lambda at, of: seen.append((at, of)))
    llm.eval(tokens[:600].tolist())
    llm.eval(tokens[600:601].tolist())
    assert seen[-1] == (600, 600)
    assert [at for at, _ in seen] == sorted({at for at, _ in seen})


# --- decode errors


def test_progress_may_not_change_the_text(llama: Any, tokens: Any) -> None:
    llm = llama("dense", n_ctx=2048, kvflash=512)

    def forget(done: int, total: int) -> None:
        if done == 512:
            llm.reset()

    llm.kvflash_progress = forget
    with pytest.raises(KVFlashError, match="progress callback"):
        llm.eval(tokens[:900].tolist())
    llm.kvflash_progress = None
    assert llm.n_tokens == 0
    check(llm)
    llm.eval(tokens[:900].tolist())
    assert llm.n_tokens == 900
    check(llm)


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_a_failed_step_leaves_the_model_usable(kind: str, llama: Any, tokens: Any) -> None:
    llm, fresh = (llama(kind, n_ctx=2048, kvflash=512) for _ in range(2))
    fail_at(llm, 3)
    with pytest.raises(DecodeError):
        llm.eval(tokens[:900].tolist())
    done = llm.n_tokens
    assert 0 < done < 900
    assert inside(llm).session.length == done
    check_table(inside(llm).session.table)
    llm.eval(tokens[done:700].tolist())
    fail_at(llm, 1)
    with pytest.raises(DecodeError):
        llm.eval(tokens[700:701].tolist())
    fresh.eval(tokens[:done].tolist())
    fresh.eval(tokens[done:700].tolist())
    ours = logits_along(llm, tokens[700:701], tokens[701:730])
    assert same_bits(ours, logits_along(fresh, tokens[700:701], tokens[701:730]))


def fail_at(llm: Any, call: int) -> None:
    """Let the engine fail once, at its next, second, ... step."""
    engine = inside(llm).session.engine
    step, left = engine.step, [call]

    def failing(*args: Any, **kwargs: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            del engine.step
            raise DecodeError("no luck")
        step(*args, **kwargs)

    engine.step = failing


def test_after_a_failure_the_prompt_is_evaluated_again(llama: Any, tokens: Any) -> None:
    """The step before the failure kept no logits, so they must not be sampled."""
    split = {"n_ctx": 2048, "n_batch": 512, "n_ubatch": 128, "kvflash": 512}
    llm, fresh = llama(**split), llama(**split)
    fail_at(llm, 3)
    with pytest.raises(DecodeError):
        llm.eval(tokens[:400].tolist())
    assert llm.n_tokens == 256
    prompt = tokens[:256].tolist()
    assert take(llm.generate(prompt, **GREEDY), 4) == take(fresh.generate(prompt, **GREEDY), 4)


def test_the_pool_says_what_it_is(llama: Any) -> None:
    llm, everything = llama("iswa", kvflash=512), llama("iswa", kvflash=512, swa_full=True)
    window = inside(llm).session.engine.info.n_swa
    assert llm.kvflash.banner().endswith(f", sliding-window layers keep the last {window} tokens (swa_full=False)")
    assert everything.kvflash.banner().endswith(", sliding-window layers keep all 1024 tokens (swa_full=True)")
    assert repr(llm.kvflash) == f"<{llm.kvflash.banner()}>"
    assert "sliding" not in llama(kvflash=512).kvflash.banner()


def test_a_closed_model_says_that_it_is(llama: Any, tokens: Any) -> None:
    llm = llama(kvflash=512)
    llm.close()
    with pytest.raises(KVFlashError, match="this model is closed"):
        next(llm.generate(tokens[:10].tolist(), **GREEDY))


@pytest.mark.parametrize("stop", [5, [5], [b"a"], {"a": 1}])
@pytest.mark.parametrize("pool", [None, 512])
def test_a_stop_that_is_no_text_is_told(pool: int | None, stop: Any, llama: Any) -> None:
    llm = llama(kvflash=pool)
    asks = (
        lambda: llm.create_completion("abc", stop=stop),
        lambda: llm.create_chat_completion([{"role": "user", "content": "abc"}], stop=stop),
    )
    for ask in asks:
        with pytest.raises(ConfigError, match="a text, or a list of texts"):
            ask()
