"""Several texts on one pool, whose steps are computed together: what `seats` measures without a server."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import llama_cpp
import numpy as np

from kvflash_ggml.constants import CHUNK, round_up
from kvflash_ggml.llama.opening import open_beside
from kvflash_ggml.sequence import together
from kvflash_ggml.sequence.step import LAST

from .inside import paged
from .opening import opened
from .outcomes import Plan as Trials
from .recall import MAX_NEW, TAIL_ROOM, cases, prompt_tokens, tail_tokens

if TYPE_CHECKING:
    from kvflash_ggml.llama.llama import Llama
    from kvflash_ggml.sequence.sequence import Sequence as Text

WARM = 8
"""Steps before the timed ones: the first ones build the graph."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Decode steps of one row a text. tps: tokens a second of all texts. python_us: of a step, outside of llama_decode;
    the median, since most steps have no look. look_us: of looks a step, beside the decode where the device allows.
    """

    tps: float
    python_us: float
    look_us: float
    page_ins: int


@contextmanager
def texts_on(
    model: str, count: int, share: int, *, n_ctx: int, reading: str, options: dict[str, Any]
) -> Iterator[list[Llama]]:
    """Models that hold one text each, of a pool in which each text has `share` tokens."""
    pool = count * round_up(share, CHUNK)
    fields = {"parallel": count, "reading": reading}
    with opened(model, n_ctx=n_ctx, options=options, pool=pool, policy="qk", fields=fields) as llm:
        yield [llm, *(open_beside(llm, seq) for seq in range(1, count))]


def step(llms: Sequence[Llama], tokens: Sequence[int]) -> list[int]:
    """Add a token to each text, in one step. Returns the likeliest token after each."""
    prepared = []
    for llm, token in zip(llms, tokens, strict=True):
        text = paged(llm)
        text.begin(1)
        prepared.append((text, text.prepare_answer(np.array([token], np.int32), LAST)))
    for error in together.compute(prepared):
        if error is not None:
            raise error
    return [one.likeliest[-1] for _, one in prepared if one.likeliest]


def newest(llm: Llama) -> int:
    """The likeliest token after a text that has been evaluated just now."""
    text = paged(llm)
    row = text.logits.row(text.length - 1)
    assert row is not None
    return int(text.engine.argmax([row])[0])


def pace(model: str, count: int, *, length: int, share: int, decode: int, seed: int, options: dict[str, Any]) -> Pace:
    """Read `count` random texts by the pool, and decode until each has `length` tokens."""
    random = np.random.default_rng(seed)
    n_ctx = 2 * max(length, share)  # chunks leave, and looks are made, as in a long conversation
    with texts_on(model, count, share, n_ctx=n_ctx, reading="pool", options=options) as llms:
        drawn = random.integers(10, min(llms[0].n_vocab() - 10, 4000), (count, length)).astype(np.int32)
        for llm, tokens in zip(llms, drawn, strict=True):
            llm.eval(tokens[: length - decode - WARM].tolist())
        steps = drawn[:, length - decode - WARM :].T.tolist()
        for tokens in steps[:WARM]:
            step(llms, tokens)
        texts, outside = [paged(llm) for llm in llms], []
        engine, page_ins, looks = texts[0].engine, _page_ins(texts), _look_seconds(texts)
        began = time.perf_counter()
        for tokens in steps[WARM:]:
            inside, start = engine.decode_seconds, time.perf_counter()
            step(llms, tokens)
            outside.append(time.perf_counter() - start - (engine.decode_seconds - inside))
        wall = time.perf_counter() - began
        return Pace(
            tps=count * decode / wall,
            python_us=statistics.median(outside) * 1e6,
            look_us=(_look_seconds(texts) - looks) / decode * 1e6,
            page_ins=_page_ins(texts) - page_ins,
        )


def _page_ins(texts: Sequence[Text]) -> int:
    return sum(text.paging.page_ins for text in texts)


def _look_seconds(texts: Sequence[Text]) -> float:
    return sum(text.scoring.seconds for text in texts if text.scoring is not None)


def recalled(
    model: str, count: int, trials: Trials, text: str, *, context: int, share: int, options: dict[str, Any]
) -> list[bool]:
    """Was each question answered right? `count` documents are read exactly, one after the other, and their questions
    are answered in steps of all of them. Tasks of one question a document.
    """
    right: list[bool] = []
    with texts_on(model, count, share, n_ctx=context + TAIL_ROOM, reading="exact", options=options) as llms:
        found = [case for _, _, case in cases(llms[0], trials, text, n_tokens=context)]
        for at in range(0, len(found), count):
            part = found[at : at + count]
            replies: list[list[int]] = []
            for llm, case in zip(llms, part, strict=False):
                llm.reset()
                llm.eval(prompt_tokens(llm, case) + tail_tokens(llm, case, case.asks[0]))
                replies.append([newest(llm)])
            for _ in range(MAX_NEW - 1):
                open_ = [i for i, case in enumerate(part) if not _is_done(llms[i], case.asks[0], replies[i])]
                if not open_:
                    break
                drawn = step([llms[i] for i in open_], [replies[i][-1] for i in open_])
                for i, token in zip(open_, drawn, strict=True):
                    replies[i].append(token)
            right += [
                case.asks[0].is_correct(_text(llm, reply))
                for llm, case, reply in zip(llms, part, replies, strict=False)
            ]
    return right


def _is_done(llm: Llama, ask: Any, reply: Sequence[int]) -> bool:
    ended = llama_cpp.llama_vocab_is_eog(llm._model.vocab, reply[-1])
    return bool(ended) or ask.is_settled(_text(llm, reply))


def _text(llm: Llama, reply: Sequence[int]) -> str:
    return llm.detokenize(list(reply)).decode("utf-8", "replace")
