"""Several texts on one pool, whose steps are computed together: what `seats` measures without a server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from kvflash_ggml.constants import CHUNK, round_up
from kvflash_ggml.llama.serving import texts_of
from kvflash_ggml.runtime.samplers import chain
from kvflash_ggml.sampling import Samplers
from kvflash_ggml.sequence import together
from kvflash_ggml.sequence.step import LAST

from . import serving
from .asks import Ask, Case
from .inside import decode_seconds
from .opening import opened
from .outcomes import Plan as Trials
from .recall import MAX_NEW, TAIL_ROOM, cases, prompt_tokens, tail_tokens

if TYPE_CHECKING:
    from kvflash_ggml.runtime.saving import Saver
    from kvflash_ggml.runtime.text import Text as Opened
    from kvflash_ggml.sequence.sequence import Sequence as Text

WARM = 8
"""Steps before the timed ones: the first ones build the graph."""

TAU = 16
"""Tokens between two looks of `recalled`: a fixed number, so that no answer depends on the clock."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Decode steps of one row a text. tps: tokens a second of all texts. python_us: of a step, outside of llama_decode;
    the median, since most steps have no look. look_us: of looks a step, beside the decode where the device allows.
    """

    tps: float
    python_us: float
    look_us: float
    page_ins: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Long texts on a pool that are decoded together. paces: by the number of texts. read_s: reading one. swap_s: the
    median of making a text of memory the one at hand. device_bytes: of the pool, which has room for the most texts.
    """

    paces: dict[int, Pace]
    read_s: float
    swap_s: float
    device_bytes: int


SAMPLERS = {
    "usual": Samplers(temperature=0.7),
    "penalties": Samplers(temperature=0.7, presence_penalty=1.5),
    "likeliest": Samplers(temperature=0),
}
"""Settings that `draws` measures; all others are the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """Medians of the processor's microseconds to draw a token. whole_us: from a list of all tokens of the vocabulary.
    same: of `draws` in each way.
    """

    sampling: str
    vocabulary: int
    draw_us: float
    whole_us: float
    draws: int
    same: int


@contextmanager
def texts_on(model: str, count: int, share: int, *, n_ctx: int, options: dict[str, Any]) -> Iterator[list[Opened]]:
    """The texts of a pool in which each text has `share` tokens."""
    with savers_on(model, count, share, n_ctx=n_ctx, options=options) as (savers, _):
        yield [one.text for one in savers]


@contextmanager
def savers_on(
    model: str, count: int, share: int, *, n_ctx: int, options: dict[str, Any]
) -> Iterator[tuple[list[Saver], int]]:
    """The same with what saves each text, and the bytes of the pool on the devices."""
    pool = count * round_up(share, CHUNK)
    with opened(model, n_ctx=n_ctx, options=options, pool=pool, policy="qk", fields={"parallel": count}) as llm:
        assert llm.kvflash is not None
        yield [one for one, _ in texts_of(llm)], llm.kvflash.device_bytes


def step(texts: Sequence[Opened], tokens: Sequence[int]) -> list[int]:
    """Add a token to each text, in one step. Returns the likeliest token after each."""
    prepared = []
    for one, token in zip(texts, tokens, strict=True):
        text = one.pooled
        text.begin(1)
        prepared.append((text, text.prepare_answer(np.array([token], np.int32), LAST)))
    for error in together.compute(prepared):
        if error is not None:
            raise error
    return [one.likeliest[-1] for _, one in prepared if one.likeliest]


def pace(model: str, count: int, *, length: int, share: int, decode: int, seed: int, options: dict[str, Any]) -> Pace:
    """Read `count` random texts by the pool, and decode until each has `length` tokens."""
    random = np.random.default_rng(seed)
    n_ctx = 2 * max(length, share)  # chunks leave, and looks are made, as in a long conversation
    with texts_on(model, count, share, n_ctx=n_ctx, options=options) as found:
        drawn = random.integers(10, min(found[0].model.n_vocab - 10, 4000), (count, length)).astype(np.int32)
        for one, tokens in zip(found, drawn, strict=True):
            one.evaluate(tokens[: length - decode - WARM].tolist())
        return _timed(found, drawn[:, length - decode - WARM :].T.tolist())


def kept(
    model: str, counts: Sequence[int], *, length: int, share: int, decode: int, seed: int, options: dict[str, Any]
) -> Kept:
    """Read a random text by the pool, let every text of the pool go on from it, and decode with each of `counts` of
    them. They are of one content and of different pages: a pool does not share them.
    """
    random = np.random.default_rng(seed)
    most, grown = max(counts), (decode + WARM) * len(counts)
    n_ctx = round_up(length + grown + 1, CHUNK)
    with savers_on(model, most, min(share, n_ctx), n_ctx=n_ctx, options=options) as (savers, device_bytes):
        found = [one.text for one in savers]
        n_vocab = min(found[0].model.n_vocab - 10, 4000)
        began = time.perf_counter()
        found[0].evaluate(random.integers(10, n_vocab, length).tolist())
        parked, read_s = savers[0].park(), time.perf_counter() - began
        swaps = []
        for saver in savers:
            began = time.perf_counter()
            saver.resume(parked)
            swaps.append(time.perf_counter() - began)
        parked.release()
        paces = {
            count: _timed(found[:count], random.integers(10, n_vocab, (decode + WARM, count)).tolist())
            for count in sorted(counts)
        }
        return Kept(paces=paces, read_s=read_s, swap_s=statistics.median(swaps), device_bytes=device_bytes)


def _timed(found: Sequence[Opened], steps: Sequence[Sequence[int]]) -> Pace:
    """Compute steps, each with a token of each text, and time all but the first ones."""
    for tokens in steps[:WARM]:
        step(found, tokens)
    texts, outside = [one.pooled for one in found], []
    engine, page_ins, looks = texts[0].engine, _page_ins(texts), _look_seconds(texts)
    began = time.perf_counter()
    for tokens in steps[WARM:]:
        inside, start = decode_seconds(engine), time.perf_counter()
        step(found, tokens)
        outside.append(time.perf_counter() - start - (decode_seconds(engine) - inside))
    wall, decode = time.perf_counter() - began, len(steps) - WARM
    return Pace(
        tps=len(found) * decode / wall,
        python_us=statistics.median(outside) * 1e6,
        look_us=(_look_seconds(texts) - looks) / decode * 1e6,
        page_ins=_page_ins(texts) - page_ins,
    )


def draws(model: str, rows: int, *, seed: int, options: dict[str, Any]) -> list[Drawn]:
    """Draw a token from each of so many rows of logits, in two ways in turns."""
    random, found = np.random.default_rng(seed), []
    with texts_on(model, 1, CHUNK * 8, n_ctx=CHUNK * 8 + len(SAMPLERS) * rows, options=options) as (text,):
        text.evaluate(random.integers(10, 200, CHUNK).tolist())
        text.seed = seed
        context, vocabulary = text.model.context, text.model.n_vocab
        for name, asked in SAMPLERS.items():
            ways = [chain(text, asked, text.ids), _of_all(chain(text, asked, text.ids), vocabulary)]
            tokens, spent = list[list[int]](), list[list[int]]()
            for at, token in enumerate(random.integers(10, 200, rows).tolist()):
                text.evaluate([token])
                row, drawn, times = text.logits_at(text.n_tokens - 1), [0, 0], [0, 0]
                for way in (0, 1) if at % 2 else (1, 0):  # the first one finds the row in no cache
                    began = time.thread_time_ns()
                    drawn[way] = ways[way].sample(context, row)
                    times[way] = time.thread_time_ns() - began
                tokens.append(drawn)
                spent.append(times)
            draw_us, whole_us = (statistics.median(each) / 1e3 for each in zip(*spent, strict=True))
            found.append(
                Drawn(
                    sampling=name, vocabulary=vocabulary, draw_us=draw_us, whole_us=whole_us, draws=rows,
                    same=sum(few == all_of_them for few, all_of_them in tokens),
                )
            )  # fmt: skip
    return found


def _of_all(made: Any, vocabulary: int) -> Any:
    """Return a chain that has to see all tokens: it begins with a bias, which is zero."""
    count = llama_cpp.llama_sampler_chain_n(made.sampler)
    behind = [llama_cpp.llama_sampler_chain_remove(made.sampler, 0) for _ in range(count)]
    made.add_logit_bias(vocabulary, {0: 0.0})
    for one in behind:
        llama_cpp.llama_sampler_chain_add(made.sampler, one)
    return made


def _page_ins(texts: Sequence[Text]) -> int:
    return sum(text.paging.page_ins for text in texts)


def _look_seconds(texts: Sequence[Text]) -> float:
    return sum(text.scoring.seconds for text in texts if text.scoring is not None)


def recalled(
    model: str, count: int, trials: Trials, text: str, *, lengths: Sequence[int], share: int, rule: str, most: int,
    options: dict[str, Any],
) -> list[list[bool]]:  # fmt: skip
    """Which questions are answered right, by documents: `count` conversations at a time, whose questions are asked at
    once. Each has `share` tokens of the pool, or what the rule of `pool_share` gives it.

    lengths: tokens of the documents, in turns. most: questions of a document, at most. KVFlashError if one has no
    answer.
    """
    fields = {"parallel": count, "reading": "exact", "tau": TAU, "pool_share": rule}
    pool, n_ctx, right = count * round_up(share, CHUNK), max(lengths) + TAIL_ROOM, list[list[bool]]()
    with opened(model, n_ctx=n_ctx, options=options, pool=pool, policy="qk", fields=fields) as llm:
        by_length = {length: [case for *_, case in cases(llm, trials, text, n_tokens=length)] for length in lengths}
        documents = [by_length[lengths[i % len(lengths)]][i] for i in range(len(by_length[lengths[0]]))]
        with serving.served(llm, park_bytes=1 << 30, folder=None) as scheduler, ThreadPoolExecutor(count) as clients:

            def asked(case: Case, ask: Ask) -> bool:
                document = prompt_tokens(llm, case)
                prompt = document + tail_tokens(llm, case, ask)
                end = serving.answer(
                    scheduler, prompt, MAX_NEW, id(ask), shared=len(document), ignore_eos=False
                )  # fmt: skip
                return ask.is_correct(llm.detokenize(list(end.tokens)).decode("utf-8", "replace"))

            for at in range(0, len(documents), count):
                part = documents[at : at + count]
                rounds = zip(*(case.asks[:most] for case in part), strict=True)
                answers = [list(clients.map(asked, part, asks)) for asks in rounds]
                right += [list(row) for row in zip(*answers, strict=True)]
    return right
