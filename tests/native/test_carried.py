"""An answer that is put aside anywhere, and by any way, goes on as one that is left alone: tokens and resident sets."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from support.harness import check, row
from support.inside import inside
from support.rounding import ON_GPU

from kvflash_ggml import PrefixCache

POOL = {
    "n_ctx": 2048, "kvflash": 512, "kvflash_policy": "qk", "kvflash_tau": 8, "kvflash_calibrate": False,
    "kvflash_cache": PrefixCache(least=64),
}  # fmt: skip
Step = tuple[int, tuple[int, ...], bytes]
"""A token, the chunks that are resident once it is read, and the logits then."""


def go_on(llm: Any, count: int) -> list[Step]:
    """So many tokens more, each the likeliest."""
    steps = []
    for _ in range(count):
        token = int(row(llm).argmax())
        llm.eval([token])
        steps.append((token, tuple(llm.kvflash.resident_chunks), row(llm).tobytes()))
    check(llm)
    return steps


def disturb(llm: Any, other: list[int]) -> None:
    """Another text has the pool."""
    llm.reset()
    llm.eval(other)
    go_on(llm, 5)


def parked(llm: Any, other: list[int], folder: Path) -> None:
    aside = llm.park()
    disturb(llm, other)
    llm.resume(aside)
    aside.release()


def in_a_state(llm: Any, other: list[int], folder: Path) -> None:
    state = llm.save_state()
    disturb(llm, other)
    llm.load_state(state)


def in_a_file(llm: Any, other: list[int], folder: Path) -> None:
    aside = llm.park()
    llm.write_parked(aside, folder / "text")
    aside.release()
    disturb(llm, other)
    llm.load_snapshot(folder / "text")


def in_the_cache(llm: Any, other: list[int], folder: Path) -> None:
    """Found there by a request for the very same text."""
    text = llm.input_ids[: llm.n_tokens].tolist()
    inside(llm).keep_prefix()
    disturb(llm, other)
    answer = llm.generate(text, temp=0.0)
    next(answer)
    answer.close()
    assert llm.n_tokens == len(text)


WAYS: list[Callable[[Any, list[int], Path], None]] = [parked, in_a_state, in_a_file, in_the_cache]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dense", {}), ("hybrid", {}), ("iswa", {}),
        ("hybrid", {"kvflash_reading": "exact"}),
        ("dense", {"kvflash_reading": "exact", "kvflash_answer": "exact"}),
    ],
)  # fmt: skip
def test_an_answer_that_is_put_aside(
    kind: str, settings: dict[str, Any], llama: Any, tokens: Any, tmp_path: Path
) -> None:
    prompt, other = tokens[:1100].tolist(), tokens[5000:5700].tolist()
    llm = llama(kind, **POOL, **settings)
    llm.eval(prompt)
    recalled = llm.kvflash.page_ins
    want = go_on(llm, 70)
    assert llm.kvflash.page_ins > (0 if ON_GPU else recalled)  # its rounding decides what the answer asks for
    chance = random.Random(kind)
    ways = chance.sample(WAYS, len(WAYS))
    llm.reset()
    llm.eval(prompt)
    steps: list[Step] = []
    for way in ways:
        steps += go_on(llm, chance.randrange(3, 17))
        way(llm, other, tmp_path)
    steps += go_on(llm, len(want) - len(steps))
    for at, (step, expected) in enumerate(zip(steps, want, strict=True)):
        assert step[:2] == expected[:2], f"after {at} tokens, by {[way.__name__ for way in ways]}"
    assert steps == want
