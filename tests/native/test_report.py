"""The residency map and the share of missed attention, of real runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from support.harness import CHUNK, TEXT

from kvflash_bench.tasks import needle_task
from kvflash_ggml.policy import heads
from kvflash_ggml.policy.qk import QKScorer


def prompt(llm: Any, n_tokens: int) -> list[int]:
    def tokenize(text: str) -> list[int]:
        return list(llm.tokenize(text.encode(), add_bos=False))

    text = TEXT.read_text(encoding="utf-8")
    task = needle_task(text, tokenize, n_tokens=n_tokens, depth=0.4, seed=1)
    return list(llm.tokenize(task.chatml.encode(), add_bos=False, special=True))


def generate(llm: Any, tokens: list[int], count: int) -> None:
    stream = llm.generate(tokens, temp=0.0)
    for _ in range(count):
        next(stream)
    stream.close()


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_page_ins_of_the_trace_are_those_of_the_counters(llama: Callable[..., Any], kind: str, tmp_path: Path) -> None:
    llm = llama(kind, n_ctx=8192, kvflash=1024, kvflash_policy="qk", kvflash_tau=16)
    trace = llm.kvflash.record()
    generate(llm, prompt(llm, 4000), 100)
    assert trace.page_ins == llm.kvflash.page_ins > 0
    assert trace.moments[-1].resident == llm.kvflash.resident_chunks
    assert max(len(moment.resident) for moment in trace.moments) <= 1024 // CHUNK
    assert [moment.generating for moment in trace.moments][-1]
    assert any(moment.scores is not None for moment in trace.moments)

    # every chunk that came back had been away, and came back to stay for that moment
    for before, after in zip(trace.moments, trace.moments[1:], strict=False):
        assert not set(after.recalled) & set(before.resident)
        assert set(after.recalled) <= set(after.resident)

    path = tmp_path / "out.html"
    trace.write_html(path, title="a model")
    text = path.read_text()
    assert llm.kvflash.banner() in text
    data = json.loads(text.split('id="data">')[1].split("</script>")[0])
    assert sum(len(moment["in"]) for moment in data["moments"]) == llm.kvflash.page_ins
    assert data["chunks"] == llm.kvflash.chunks


def test_a_recording_changes_nothing_that_is_computed(llama: Callable[..., Any]) -> None:
    answers = []
    for record in (False, True):
        llm = llama(n_ctx=8192, kvflash=1024, kvflash_policy="qk", kvflash_tau=16)
        trace = llm.kvflash.record() if record else None
        generate(llm, prompt(llm, 3000), 60)
        answers.append((llm.input_ids[: llm.n_tokens].tolist(), llm.kvflash.page_ins))
        assert trace is None or trace.moments
    assert answers[0] == answers[1]


def test_a_recording_begins_with_what_is_resident(llama: Callable[..., Any], tokens: npt.NDArray[np.int32]) -> None:
    llm = llama(n_ctx=4096, kvflash=1024)
    llm.eval(tokens[:2000].tolist())
    trace = llm.kvflash.record()
    assert trace.moments[0].resident == llm.kvflash.resident_chunks
    assert trace.moments[0].length == 2000
    assert trace.page_ins == 0


def test_a_smaller_pool_misses_more(llama: Callable[..., Any]) -> None:
    missed = []
    for pool in (1024, 2048, 3072):
        llm = llama(n_ctx=8192, kvflash=pool, kvflash_policy="qk")
        generate(llm, prompt(llm, 4000), 12)
        missed.append(llm.kvflash.evicted_mass)
    assert 0 < missed[2] < missed[1] < missed[0] < 1


def test_the_estimate_is_near_the_truth(llama: Callable[..., Any]) -> None:
    errors = []

    class Spy(QKScorer):
        def score(self, look: Any) -> Any:
            scores = super().score(look)
            if scores is not None and look.n_chunks > 40:
                shares = self.shares_of(scores)
                every = self._keys.score_keys(range(look.n_chunks), look)
                truth = heads.over_chunks(every).shares
                best = np.argsort(-scores, kind="stable")[:16]
                assert shares is not None
                assert shares.sum() == pytest.approx(1, abs=1e-3)
                errors.append(abs(float(truth[best].sum() - shares[best].sum())))
            return scores

    llm = llama(n_ctx=8192, kvflash=1024, kvflash_policy=Spy())
    generate(llm, prompt(llm, 6000), 20)
    assert len(errors) > 5
    assert max(errors) < 0.1
    assert np.mean(errors) < 0.04


def test_a_policy_that_cannot_tell_gives_none(llama: Callable[..., Any], tokens: npt.NDArray[np.int32]) -> None:
    llm = llama(n_ctx=4096, kvflash=1024)
    llm.eval(tokens[:2000].tolist())
    assert llm.kvflash.evicted_mass is None
