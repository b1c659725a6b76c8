"""Nested drafts: somebody drafts for the pool, and what the pool has taken of it all of the text verifies."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import islice
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.harness import MODELS, reach
from support.inside import inside
from support.integrity import check_table
from support.interrupter import Interrupter
from support.replay import let_replay, noted
from support.rounding import ON_GPU, without_fusion

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import DecodeError

SIZE = {"n_ctx": 1280, "n_batch": 128, "n_ubatch": 128}
LOSSLESS = {"kvflash": 512, "kvflash_reading": "exact", "kvflash_answer": "lossless", "kvflash_policy": "qk"}
WIDTH, COUNT = 9, 40
FILES = {"draft-eagle3": MODELS / "recall-eagle3-q8_0.gguf", "draft-dflash": MODELS / "recall-dflash.gguf"}

Told = tuple[list[int], list[bytes]]


def told(llm: Any, prompt: list[int], count: int = COUNT, **sampler: Any) -> Told:
    """Tokens, and the logits that each was drawn from."""
    tokens, logits = [], []
    for token in islice(llm.generate(prompt, **sampler), count):
        tokens.append(token)
        logits.append(llm.newest_logits().tobytes())
    return tokens, logits


@pytest.fixture
def prompt(tokens: Any) -> list[int]:
    """Longer than the pool, and so that the text itself has something to draft."""
    return [*tokens[:700].tolist(), *tokens[:400].tolist()]


@pytest.fixture
def nested(llama: Any) -> Callable[..., Any]:
    def make(kind: str, source: str, **more: Any) -> Any:
        spec = SpecConfig(width=WIDTH, types=(source,), draft=FILES.get(source))
        return llama(kind, **SIZE, **LOSSLESS, kvflash_spec=spec, **more)

    return make


@pytest.fixture
def full(llama: Any) -> Callable[..., Told]:
    """What the full cache says that takes the same steps."""

    def tell(kind: str, drafts: Any, prompt: list[int], **sampler: Any) -> Told:
        llm = llama(kind, **SIZE, kvflash=1280, kvflash_spec=SpecConfig(width=WIDTH, types=("ngram",)))
        let_replay(llm, drafts, WIDTH)
        return told(llm, prompt, **sampler)

    return tell


def both(llm: Any) -> tuple[Any, Any]:
    """What came of drafts: of the pool, and on it."""
    return llm.kvflash.spec.last, llm.kvflash.spec.on_pool.last


@without_fusion
@pytest.mark.parametrize(
    ("kind", "source", "temp"),
    [
        ("dense", "ngram", 0.0),
        ("dense", "draft-eagle3", 0.7),
        ("dense", "draft-dflash", 0.0),
        ("hybrid", "ngram", 0.7),
        ("headed", "draft-mtp", 0.0),
        ("iswa", "ngram", 0.0),
    ],
)
def test_every_bit_is_that_of_a_full_cache_with_the_same_steps(
    kind: str, source: str, temp: float, nested: Any, full: Any, prompt: list[int]
) -> None:
    llm = nested(kind, source)
    drafts = noted(llm)
    answer = told(llm, prompt, temp=temp)
    verified, on_pool = both(llm)
    name = source.removeprefix("draft-")
    assert [*verified.by_source] == ["pool"]
    assert [*on_pool.by_source] == [name]
    assert on_pool.drafted > 0
    assert verified.accepted > 0
    assert llm.kvflash.streamed_steps > 0
    assert llm.kvflash.last.generated_whole == llm.kvflash.last.generated > 0
    if kind != "iswa":  # of random weights
        assert on_pool.accepted > 0
        assert on_pool.steps + on_pool.plain_steps < verified.drafted, "a step of the pool has won several tokens"
    assert full(kind, drafts, prompt, temp=temp) == answer
    check_table(inside(llm).session.table)


@pytest.mark.parametrize(("kind", "source"), [("dense", "ngram"), ("headed", "draft-mtp")])
def test_the_pool_proposes_what_it_would_propose_alone(kind: str, source: str, nested: Any, prompt: list[int]) -> None:
    """So what is not to stay of its steps has left nothing behind. Where no rounding decides: see the first ones."""
    if ON_GPU:
        pytest.skip("rows of other widths are computed by other kernels")
    drafts = {}
    for alone in (True, False):
        llm = nested(kind, source)
        if alone:
            (pool,) = (one for one in inside(llm).speculator.drafters if one.name == "pool")
            pool._nested = None
        drafts[alone] = noted(llm)
        told(llm, prompt, 20, temp=0.0)
    rejected = llm.kvflash.spec.on_pool.last
    assert rejected.drafted > rejected.accepted
    both_proposed = sorted(drafts[True].keys() & drafts[False].keys())
    assert len(both_proposed) > 1
    for at in both_proposed:
        assert drafts[True][at].tokens.tolist() == drafts[False][at].tokens.tolist()


class Failing:
    """Works so often, and then fails so often."""

    def __init__(self, does: Callable[..., Any], after: int, times: int, error: Exception | None) -> None:
        self.does, self.after, self.left, self.error = does, after, times, error

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.after -= 1
        if self.after >= 0 or self.left <= 0:
            return self.does(*args, **kwargs)
        self.left -= 1
        if self.error is None:
            return False  # "it cannot be done"
        raise self.error


@without_fusion
@pytest.mark.parametrize(
    ("kind", "what", "times", "goes_on"),
    [
        ("dense", "source", 1, False),
        ("dense", "observe", 1, False),
        ("dense", "step", 3, False),
        ("headed", "step", 1, True),
        ("headed", "retain", 1, True),
    ],
)
def test_what_fails_costs_drafts_and_nothing_else(
    kind: str, what: str, times: int, goes_on: bool, nested: Any, full: Any, prompt: list[int]
) -> None:
    llm = nested(kind, "draft-mtp" if kind == "headed" else "draft-eagle3")
    drafter, engine = inside(llm).drafting.drafters[0], inside(llm).session.engine
    drafts = noted(llm)
    error = None if what == "retain" else DecodeError("no luck")
    owner, name = {
        "source": (drafter, "propose"), "observe": (drafter, "observe"), "step": (engine, "step"),
        "retain": (engine, "truncate"),
    }[what]  # fmt: skip
    fails = Failing(getattr(owner, name), 0, times, error)

    def while_drafting(*args: Any, **kwargs: Any) -> Any:
        """Only where somebody drafts for the pool, or has."""
        several = args[0] > 1 and args[3] is None and drafts if what == "step" else inside(llm).session.ahead > 1
        return fails(*args, **kwargs) if several or what == "source" else fails.does(*args, **kwargs)

    with mock.patch.object(owner, name, while_drafting):
        answer = told(llm, prompt, temp=0.0)
    assert fails.left == 0
    verified, on_pool = both(llm)
    assert on_pool.accepted > 0 or not goes_on
    assert verified.by_source["pool"].accepted > 0, "the pool goes on by itself"
    assert full(kind, drafts, prompt, temp=0.0) == answer
    assert (llm.kvflash.spec.on_pool.off is None) == goes_on
    assert told(llm, prompt, 4, temp=0.0)[0] == answer[0][:4]
    check_table(inside(llm).session.table)


def test_an_interrupt_leaves_nothing_of_a_sketch(nested: Any, prompt: list[int]) -> None:
    llm = nested("headed", "draft-mtp")
    first = told(llm, prompt, 2, temp=0.0)[0]
    begins = [*prompt, first[0]]
    files = (
        "runtime/pool_drafter.py",
        "sequence/self_draft.py",
        "speculation/loop.py",
        "sequence/sequence.py",
        "sequence/step.py",
        "sequence/pool.py",
        "llama/call_lock.py",
    )

    def answer() -> None:
        stream = llm.generate(begins, temp=0.0)
        try:
            [*islice(stream, 3)]
        finally:
            stream.close()

    answer()
    k, points = 0, 0
    while k < 2000:
        k += 61
        interrupter = Interrupter(k, files)
        inside(llm).session.truncate(len(begins))
        if not interrupter.run(answer, partial(reach, llm)):
            break
        points += "propose" in interrupter.stack
        inside(llm).session.settle()
        length = inside(llm).session.length
        assert inside(llm).session.ahead == 0
        assert inside(llm).session.tokens.tolist() == [*begins, *first[1:]][:length] or length > len(begins) + 1
        assert all(one.observed <= length for one in inside(llm).speculator.active)
        check_table(inside(llm).session.table)
    assert points > 3
    assert told(llm, prompt, 2, temp=0.0)[0] == first


def test_what_is_put_aside_in_the_middle_goes_on(nested: Any, prompt: list[int]) -> None:
    """An answer that is closed has its tokens and no others, and a state of it the drafter's true knowledge."""
    llm = nested("dense", "draft-eagle3")
    stream = llm.generate(prompt, temp=0.0)
    begun = [*islice(stream, 7)]
    stream.close()
    assert inside(llm).session.tokens.tolist() == [*prompt, *begun[:-1]]
    state = llm.save_state()
    text = [*prompt, *begun]
    going_on = told(llm, text, 20, temp=0.0)
    counted = both(llm)
    llm.reset()
    llm.load_state(state)
    assert told(llm, text, 20, temp=0.0) == going_on
    for one, other in zip(counted, both(llm), strict=True):
        assert (one.drafted, one.accepted) == (other.drafted, other.accepted)


def test_where_the_text_fits_the_pool_it_verifies_drafts_itself(nested: Any, tokens: Any) -> None:
    prompt = [*tokens[:150].tolist(), *tokens[:100].tolist()]
    llm = nested("dense", "ngram")
    told(llm, prompt, temp=0.0)
    verified, on_pool = both(llm)
    assert [*verified.by_source] == ["ngram"]
    assert on_pool.steps + on_pool.plain_steps == 0


def test_each_level_decides_by_what_it_measures(nested: Any, llama: Any, prompt: list[int]) -> None:
    """Without a fixed width: the answer goes on whatever is chosen, and both levels are told."""
    llm = llama("dense", **SIZE, **LOSSLESS, kvflash_spec=SpecConfig(types=("ngram",)))
    answer = told(llm, prompt, 24, temp=0.0)[0]
    want = told(llama("dense", **SIZE, kvflash=1280), prompt, 24, temp=0.0)[0]
    same = next((i for i, (a, b) in enumerate(zip(answer, want, strict=True)) if a != b), 24)
    assert same >= 20
    assert llm.kvflash.spec.speedup is not None
    assert np.isfinite(llm.kvflash.spec.on_pool.excess)
