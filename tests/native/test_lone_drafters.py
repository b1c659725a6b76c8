"""Drafting models beside several answers: they draft for one that is decoded alone, and rest while there are more."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.served import Asked, ask, assert_alike, served

from kvflash_ggml import KVFlashConfig
from kvflash_ggml.batching.messages import Finished, Piece
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import ConfigError

Tokens = npt.NDArray[np.int32]
PROMPT, MOST, SHARE = 200, 140, 512
DRAFTERS = {
    "eagle3": ("dense", "eagle3", "draft-eagle3"),
    "mtp": ("headed", None, "draft-mtp"),
    "draft": ("dense", "small", "draft-simple"),
}


def settings(spec: SpecConfig | None, parallel: int = 2, **more: Any) -> dict[str, Any]:
    config = KVFlashConfig(
        pool=SHARE * parallel, tau=16, calibrate=False, parallel=parallel, spec=spec, pool_share="strict", **more
    )
    return {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 256, "kvflash": config}


@pytest.mark.parametrize("name", DRAFTERS)
def test_it_drafts_for_who_is_alone(
    name: str, llama: Callable[..., Any], model: Callable[[str], Path], tokens: Tokens
) -> None:
    """Another answer begins and ends in the midst of one. Then each conversation goes on, in its own slot."""
    kind, file, type = DRAFTERS[name]
    texts = [[*tokens[900 * i :][:PROMPT], *tokens[900 * i + 100 :][:40]] for i in range(2)]
    plain = []
    with served(llama(kind, **settings(None, 1))) as running:
        for text, most in ((0, MOST), (1, 16), (1, 32), (0, 24)):
            plain.append(ask(running, texts[text], most, logprobs=2, ignore_eos=True))
            end = plain[-1].wait()
            assert isinstance(end, Finished)
            texts[text] = [*texts[text], *end.tokens, *tokens[5000:5040]]
    draft = None if file is None else model(file)
    llm = llama(kind, **settings(SpecConfig(types=(type, "ngram"), draft=draft, width=4)))
    spec = llm.kvflash.spec
    told: list[tuple[str, int, str | None]] = []  # when, tokens accepted of the drafting model, and who rests

    def note(when: str) -> None:
        own = spec.total.by_source.get(name)
        told.append((when, 0 if own is None else own.accepted, spec.off))

    with served(llm) as running:
        first, second, third, fourth = (Asked(replace(one.request, id=f"again {one.request.id}")) for one in plain)

        heard: list[Any] = []

        def of_second(event: Any) -> None:  # on the engine's thread: nothing goes on meanwhile
            second.inbox.put(event)
            heard.append(event)
            third = len(heard) == 4 and isinstance(event, Piece)  # the last draft before is counted by then
            if third or isinstance(event, Finished):
                note("together" if third else "ended")

        def of_first(event: Any) -> None:
            first.inbox.put(event)
            if isinstance(event, Piece) and not told and running.generated >= 32:
                running.submit(second.request, of_second)
                note("began")

        running.submit(first.request, of_first)
        assert_alike(first, plain[0])
        note("alone again")
        assert_alike(second, plain[1])
        for one, its, when in ((third, plain[2], "the other slot"), (fourth, plain[3], "back")):
            running.submit(one.request, one.inbox.put)
            assert_alike(one, its)
            note(when)
        assert running.counts.resumes == running.counts.swapped_out == 0
    names, accepted, off = zip(*told, strict=True)
    assert names == ("began", "together", "ended", "alone again", "the other slot", "back")
    assert accepted[0] > 0
    assert accepted[1] <= accepted[0] + 3, "what was drafted before the second one began"
    assert accepted[2] == accepted[1], "nothing while both are decoded"
    assert accepted[1] < accepted[3] < accepted[4] < accepted[5]
    assert off[1] == off[2] == f"{name}: 2 texts are decoded together"
    assert off[0] is None
    assert spec.types == (name, "ngram")
    assert f"({name} while one text is decoded alone)" in llm.kvflash.banner()


def test_what_others_would_change_is_refused(llama: Callable[..., Any], model: Callable[[str], Path]) -> None:
    fixed = {"deterministic": True}
    with pytest.raises(ConfigError, match=r"deterministic: what draft-eagle3 drafts .* parallel is 2"):
        llama(**settings(SpecConfig(types=("draft-eagle3",), draft=model("eagle3"), width=4), **fixed))
    with pytest.raises(ConfigError, match=r"deterministic: what ngram drafts .* parallel is 2"):
        llama("hybrid", **settings(SpecConfig(types=("ngram",), width=4), **fixed))
    assert llama(**settings(SpecConfig(types=("ngram",), width=4), **fixed)).kvflash.spec.off is None


def test_it_goes_on_where_it_left_a_text(
    llama: Callable[..., Any], model: Callable[[str], Path], tokens: Tokens
) -> None:
    """Two conversations take turns: with a slot each they are drafted for as in one slot, which keeps states."""
    found = []
    for parallel in (1, 2):
        llm = llama(**settings(SpecConfig(types=("draft-eagle3",), draft=model("eagle3"), width=4), parallel))
        spec, texts, counts = llm.kvflash.spec, [tokens[900 * i :][:PROMPT].tolist() for i in range(2)], []
        with served(llm) as running:
            for turn in range(4):
                end = ask(running, texts[turn % 2], 12, ignore_eos=True).wait()
                assert isinstance(end, Finished)
                texts[turn % 2] += [*end.tokens, *tokens[5000:5010].tolist()]
                counts.append((spec.total.drafted, spec.total.accepted, spec.total.plain_steps))
            assert (running.counts.resumes > 0) == (parallel == 1)
        found.append(counts)
    assert found[0] == found[1]
    assert found[1][3][0] > found[1][1][0], "the second turns are drafted for"
