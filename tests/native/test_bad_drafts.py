"""Drafters that return anything, and steps that fail: the text is plain decoding's, and the session goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.harness import CHUNK, MODELS, check, reach
from support.inside import inside
from support.interrupter import Interrupter
from support.rounding import ON_GPU

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import DecodeError, HostMemoryError
from kvflash_ggml.speculation.base import Features
from kvflash_ggml.speculation.decision import Fixed
from kvflash_ggml.speculation.draft import Draft, chain
from kvflash_ggml.speculation.loop import Speculator

STRICT = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024}
WIDTH = 6
COUNT = 40
GREEDY = {"temp": 0.0}
LARGEST = NEVER = 2**31 - 1


def answer(llm: Any, prompt: list[int], count: int = COUNT) -> list[int]:
    return list(islice(llm.generate(prompt, **GREEDY), count))


def fails(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a drafter's own business")


def sleeps(ids: Any, **_: Any) -> Any:
    time.sleep(0.02)
    return ids[-3:]


CALLED: dict[str, tuple[Callable[..., Any], bool]] = {
    # what it returns, and whether it is asked on
    "nothing": (lambda ids, **_: np.empty(0, np.intc), True),
    "too much": (lambda ids, **_: np.resize(ids, 10**6), True),
    "floats": (lambda ids, **_: ids[-3:].astype(float), True),
    "an end": (lambda ids, **_: np.array([151645, 2, 0, 1]) % 4000, True),
    "late": (sleeps, True),
    "None": (lambda ids, **_: None, False),
    "below 0": (lambda ids, **_: np.array([5, -1]), False),
    "beyond": (lambda ids, **_: np.array([5, 10**6]), False),
    "largest": (lambda ids, **_: np.array([LARGEST], np.intc), False),
    "halves": (lambda ids, **_: np.array([0.5]), False),
    "NaN": (lambda ids, **_: np.array([np.nan]), False),
    "words": (lambda ids, **_: "tokens", False),
    "a list of words": (lambda ids, **_: ["a", "b"], False),
    "rows": (lambda ids, **_: np.zeros((2, 2), np.intc), False),
    "failure": (fails, False),
}


@pytest.mark.parametrize("what", CALLED)
def test_whatever_a_draft_model_returns(what: str, llama: Any, tokens: Any, caplog: Any) -> None:
    prompt = tokens[:150].tolist()
    plain = answer(llama(**STRICT), prompt)
    llm = llama(**STRICT, kvflash_spec=SpecConfig(width=WIDTH, types=("ngram",)))
    llm.draft_model, goes_on = CALLED[what]
    with caplog.at_level(logging.WARNING):
        assert answer(llm, prompt) == plain
    assert [*llm.kvflash.spec.types] == (["draft_model"] if goes_on else []) + ["ngram"]
    assert len([r for r in caplog.records if "draft_model" in r.message]) == (not goes_on)
    check(llm)


class Made:
    """A drafter that returns one thing. `n` is the size of the vocabulary."""

    wants = Features()
    name = "made up"

    def __init__(self, draft: Any) -> None:
        self.draft = draft

    def observe(self, start: int, tokens: Any, rows: Any) -> None: ...

    def propose(self, root: int, most: int) -> Any:
        return self.draft

    def truncate(self, length: int) -> None: ...

    def close(self) -> None: ...


def ids(*values: int) -> Any:
    return np.array(values, np.int32)


def trees(right: list[int]) -> dict[str, Any]:
    """Drafts that are no chains, some with tokens of the answer in them."""
    a, b = right[:2]
    return {
        "siblings": Draft(ids(7, a, 8), ids(-1, -1, -1), "x"),
        "the right one behind": Draft(ids(7, a, 8, b), ids(-1, -1, 0, 1), "x", np.float32([-0.1, -3, -0.1, -3])),
        "circles": Draft(ids(a, b), ids(1, 0), "x"),
        "twins": Draft(ids(a, a), ids(-1, -1), "x"),
        "NaN": chain([a, b], "x", np.float32([np.nan, 0])),
        "doubles": Draft(np.array([1.0, 2.0]), ids(-1, 0), "x"),  # type: ignore[arg-type]
        "words": "tokens",
    }


@pytest.mark.parametrize("what", trees([1, 2]))
def test_whatever_a_drafter_returns(what: str, llama: Any, tokens: Any) -> None:
    prompt = tokens[:150].tolist()
    plain = answer(llama(**STRICT), prompt)
    llm = llama(**STRICT, kvflash_spec=SpecConfig(width=WIDTH))
    common = max(set(plain), key=plain.count)
    drafter = Made(trees([common, plain[plain.index(common) + 1]])[what])
    inside(llm).speculator = inside(llm).session.follower = speculator(llm, drafter)
    assert answer(llm, prompt) == plain
    assert answer(llm, [*prompt, *plain], 3) == answer(llama(**STRICT), [*prompt, *plain], 3)
    check(llm)


def speculator(llm: Any, *drafters: Any) -> Speculator:
    return Speculator(drafters, Fixed(WIDTH), n_vocab=llm.n_vocab(), ends=())


# --- failures of what is beneath


def drafting(llama: Any, prompt: list[int], plain: list[int], kind: str = "dense", **size: Any) -> Any:
    """A model whose drafts are right three times of four."""
    llm = llama(kind, **(STRICT | size), kvflash_spec=SpecConfig(width=WIDTH, types=("ngram",)))
    text = [*prompt, *plain]

    def draft(seen: Any, **_: Any) -> Any:
        after = np.array(text[len(seen) : len(seen) + WIDTH - 1], np.intc)
        return np.where((len(seen) + np.arange(len(after))) % 4 == 3, 7, after)

    llm.draft_model = draft
    return llm


def failing(works: Callable[..., Any], error: BaseException, *, rows: int, times: int = 1) -> Callable[..., Any]:
    """The same, but that it fails so many times where it is given more than `rows`."""
    left = [times]

    def call(count: int, *args: Any, **settings: Any) -> Any:
        if left[0] and count > rows:
            left[0] -= 1
            raise error
        return works(count, *args, **settings)

    return call


@pytest.mark.parametrize("times", [1, 2, 10**9])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_a_step_that_fails_with_drafts_is_done_without(
    kind: str, times: int, llama: Any, tokens: Any, caplog: Any
) -> None:
    prompt = np.tile(tokens[1000:1060], 3).tolist()  # an answer without near ties: steps have other rows
    size = {} if kind == "dense" else {"n_batch": 128, "n_ubatch": 128}
    plain = answer(llama(kind, **(STRICT | size)), prompt)
    llm = drafting(llama, prompt, plain, kind, **size)
    engine = inside(llm).session.engine
    stream = llm.generate(prompt, **GREEDY)
    told = [next(stream)]
    with mock.patch.object(engine, "step", failing(engine.step, DecodeError("no luck"), rows=1, times=times)):
        told += islice(stream, COUNT - 1)
    stream.close()
    assert told == plain
    assert len([r for r in caplog.records if "drafted any more" in r.message]) == (times > 3)
    assert (llm.kvflash.spec.off is None) == (times < 3)
    check(llm)


@pytest.mark.parametrize("computed", [0, 1, 4])
def test_a_step_that_breaks_off_after_rows_were_computed(computed: int, llama: Any, tokens: Any) -> None:
    """Each row is a graph of its own: those before the device breaks off are written, and are no rows of the text.

    The CPU asks whether to break off before each node. Of a GPU's graph it computes one part, and asks once.
    """
    import llama_cpp

    prompt = tokens[:150].tolist()
    plain = answer(llama(**STRICT), prompt)
    llm = drafting(llama, prompt, plain)
    engine, context = inside(llm).session.engine, llm._ctx.ctx
    step, asked, failed = engine.step, [0, NEVER], []

    def counted(_: Any) -> bool:
        asked[0] += 1
        return asked[0] > asked[1]

    def steps(count: int, *args: Any, **settings: Any) -> Any:
        asked[:] = [0, computed * row + row // 2 if count > 1 and not failed else NEVER]
        try:
            return step(count, *args, **settings)
        except DecodeError:
            failed.append(count)
            raise

    stream = llm.generate(prompt, **GREEDY)
    told = [next(stream)]
    row = 0
    abort = llama_cpp.ggml_abort_callback(counted)
    llama_cpp.llama_set_abort_callback(context, abort, None)
    engine.synchronize()
    inside(llm).speculator.controls = Fixed(1)
    told.append(next(stream))  # a plain one, to know how often it asks
    row = asked[0]
    inside(llm).speculator.controls = Fixed(WIDTH)
    with mock.patch.object(engine, "step", steps):
        told += islice(stream, COUNT - 2)
    stream.close()
    llama_cpp.llama_set_abort_callback(context, llama_cpp.ggml_abort_callback(0), None)
    assert row > 10 or (ON_GPU and row > 0)
    assert failed == [WIDTH]
    assert told == plain
    assert llm.kvflash.spec.off is None
    check(llm)


def test_where_a_plain_step_fails_too_the_error_is_the_callers(llama: Any, tokens: Any) -> None:
    prompt = tokens[:150].tolist()
    plain = answer(llama(**STRICT), prompt)
    llm = drafting(llama, prompt, plain)
    stream = llm.generate(prompt, **GREEDY)
    told = list(islice(stream, 9))
    engine = inside(llm).session.engine
    fails_always = mock.patch.object(engine, "step", failing(engine.step, DecodeError("no luck"), rows=0, times=9))
    with fails_always, pytest.raises(DecodeError, match="no luck"):
        told += islice(stream, 9)
    assert plain[: len(told)] == told
    check(llm)
    told += answer(llm, [*prompt, *told], COUNT - len(told))
    assert told == plain


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
@pytest.mark.parametrize(
    ("what", "error"),
    [("page_out", OSError("wire")), ("page_out", KeyboardInterrupt()), ("alloc", HostMemoryError("none"))],
)
def test_pages_that_cannot_be_saved(kind: str, what: str, error: BaseException, llama: Any, tokens: Any) -> None:
    """They are sealed where drafts are settled, or just after; what was told is of the text, and it goes on."""
    prompt = tokens[: 8 * CHUNK - 3].tolist()
    size = {"n_ctx": 2048, "kvflash": 512} | ({} if kind == "dense" else {"n_batch": 128, "n_ubatch": 128})
    plain = answer(llama(kind, **(STRICT | size)), prompt)
    llm = drafting(llama, prompt, plain, kind, **size)
    stream = llm.generate(prompt, **GREEDY)
    told = [next(stream)]
    target = inside(llm).session.engine if what == "page_out" else inside(llm).session.store
    name = what if what == "page_out" else "allocate"
    with mock.patch.object(target, name, side_effect=error), pytest.raises(type(error)):
        told.extend(stream)
    assert len(told) < 8
    assert told == plain[: len(told)]
    check(llm)
    assert llm.input_ids[: llm.n_tokens].tolist() == [*prompt, *plain][: llm.n_tokens]
    told += answer(llm, [*prompt, *told], COUNT - len(told))
    assert told == plain
    check(llm)


@pytest.mark.parametrize("named", [True, False])
def test_a_drafter_whose_context_has_no_room(
    named: bool, models: Any, tokens: Any, tmp_path: Path, monkeypatch: Any, caplog: Any
) -> None:
    """It is refused where it was asked for, and done without, with a warning, where it was only found."""
    import llama_cpp

    from kvflash_ggml import Llama

    class NoRoom:
        def __getattr__(self, name: str) -> Any:
            return (lambda *_: None) if name == "llama_init_from_model" else getattr(llama_cpp, name)

    target, draft = (tmp_path / name for name in ("model.gguf", "model-dflash.gguf"))
    target.symlink_to(models["dense"])
    draft.symlink_to(MODELS / "recall-dflash.gguf")
    monkeypatch.setattr("kvflash_ggml.speculation.context.llama_cpp", NoRoom())
    settings: Any = {"n_ctx": 512, "kvflash": 512, "n_threads": 1, "verbose": False, "kvflash_calibrate": False}
    if named:
        with pytest.raises(HostMemoryError, match="a smaller window"):
            Llama(str(target), **settings, kvflash_spec=SpecConfig(types=("draft-dflash",), draft=draft))
        return
    llm = Llama(str(target), **settings, kvflash_spec="auto")
    assert [r.message for r in caplog.records if "by the text alone" in r.message]
    assert llm.kvflash.spec.types == ("ngram",)
    assert len(answer(llm, tokens[:50].tolist(), 10)) == 10
    llm.close()


# --- Ctrl-C

LOOP = (
    "runtime/task.py", "runtime/pool_drafter.py", "runtime/text.py", "llama/llama.py", "speculation/loop.py",
    "speculation/base.py", "speculation/draft.py", "speculation/ngram.py", "speculation/decision.py",
    "speculation/costs.py", "sequence/sequence.py", "llama/call_lock.py",
)  # fmt: skip


def interrupted(llm: Any, prompt: list[int], line: int) -> list[int] | None:
    """What was told before Ctrl-C at this line of the loop; None if the answer came to its end before."""
    told: list[int] = []

    def work() -> None:
        stream = llm.generate(prompt, **GREEDY)
        told.extend(islice(stream, 12))
        stream.close()

    return told if Interrupter(line, LOOP).run(work, partial(reach, llm)) else None


STRIDES = {"drafts": 61, "ngram": 61, "hybrid": 61, "lossless": 151}
"""Lines between two interrupts; with 1 it is every line, which takes a quarter of an hour a kind."""


@pytest.mark.parametrize("kind", STRIDES)
def test_an_interrupt_at_any_line(kind: str, llama: Any, tokens: Any) -> None:
    """What was told is a beginning of plain decoding's answer, and the next call goes on from there."""
    # where no rounding decides, since steps have other rows after an interrupt
    prompt = tokens[18500:19300].tolist() if kind == "lossless" else np.tile(tokens[:60], 3).tolist()
    plain, llm = _pair(kind, prompt, llama)
    text = [*prompt, *plain]
    line, told = 1, interrupted(llm, prompt, 1)
    while told is not None:
        assert told == plain[: len(told)], f"line {line}"
        assert llm.input_ids[: llm.n_tokens].tolist() == text[: llm.n_tokens], f"line {line}"
        assert answer(llm, text[: len(prompt) + len(told)], 5) == plain[len(told) : len(told) + 5], f"line {line}"
        check(llm)
        assert llm.kvflash.spec.off is None, f"line {line}"
        line += STRIDES[kind]
        told = interrupted(llm, prompt, line)
    assert line > 1000
    assert llm.kvflash.spec.total.accepted > 10


def _pair(kind: str, prompt: list[int], llama: Any) -> tuple[list[int], Any]:
    """Plain decoding's answer, and a model that drafts."""
    if kind == "lossless":
        size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128}
        plain = answer(llama(**size, kvflash=1024), prompt)
        reading = {"kvflash_reading": "exact", "kvflash_answer": "lossless", "kvflash_policy": "qk"}
        return plain, llama(**size, kvflash=512, **reading, kvflash_spec=SpecConfig(width=4))
    size = {"n_ctx": 512, "kvflash": 512} | ({"n_batch": 128, "n_ubatch": 128} if kind == "hybrid" else {})
    plain = answer(llama(kind if kind == "hybrid" else "dense", **(STRICT | size)), prompt)
    if kind == "ngram":
        return plain, llama(**(STRICT | size), kvflash_spec=SpecConfig(width=WIDTH, types=("ngram",)))
    return plain, drafting(llama, prompt, plain, kind if kind == "hybrid" else "dense", **size)
