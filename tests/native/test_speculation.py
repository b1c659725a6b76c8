"""Drafts change nothing but the number of steps.

With n_ubatch=1 the rows of a step are computed one at a time, so the numerics are those of plain decoding: everything
must be equal then, bit for bit. What real batches may change is in `test_spec_rounding.py`.
"""

from __future__ import annotations

from itertools import islice
from typing import Any

import numpy as np
import pytest
from support.drafting import Bush, let_draft, oracle, told
from support.harness import KV_TYPES, check
from support.inside import inside
from support.integrity import check_table

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.sequence.prefill import extend

STRICT = {"n_ctx": 1024, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024}
COUNT = 60
GREEDY = {"temp": 0.0}

SAMPLERS: dict[str, dict[str, Any]] = {
    "greedy": {"temp": 0.0},
    "sampled": {"temp": 0.9, "top_k": 50, "top_p": 0.95},
    "min_p": {"temp": 1.2, "min_p": 0.02, "typical_p": 0.9},
    "penalties": {"temp": 0.7, "repeat_penalty": 1.3, "frequency_penalty": 0.2, "presence_penalty": 0.1},
    "mirostat": {"temp": 0.8, "mirostat_mode": 1},
    "mirostat v2": {"temp": 0.8, "mirostat_mode": 2},
}


@pytest.mark.parametrize("right", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("width", [2, 3, 8, 17])
def test_everything_is_equal_where_rows_are_computed_one_by_one(
    width: int, right: float, llama: Any, tokens: Any
) -> None:
    prompt = tokens[:150].tolist()
    plain = told(llama(**STRICT), prompt, COUNT, temp=0.0)
    llm = llama(**STRICT, kvflash_spec=SpecConfig(width=width, types=("ngram",)))
    llm.draft_model = oracle([*prompt, *plain[0]], right, width - 1)
    assert told(llm, prompt, COUNT, temp=0.0) == plain
    counted = llm.kvflash.spec.total
    assert counted.steps > 0
    if right == 1.0:
        assert counted.by_source["draft_model"].accepted >= (COUNT - 1) * (width - 1) // width - width
    if right == 0.0:
        assert counted.by_source["draft_model"].accepted == 0


@pytest.mark.parametrize(("kind", "right"), [("latent heads", 0.5), ("hybrid", 1.0)])
def test_everything_is_equal_in_other_memories(kind: str, right: float, llama: Any, tokens: Any) -> None:
    """Recurrent state without planes goes on, but not back: there all drafts are right."""
    prompt = tokens[:50].tolist()
    plain = told(llama(kind, **STRICT), prompt, 33, temp=0.0)
    llm = llama(kind, **STRICT, kvflash_spec=SpecConfig(width=4, types=("ngram",)))
    assert inside(llm).session.engine.info.rs_planes == 0
    llm.draft_model = oracle([*prompt, *plain[0]], right, 3)
    assert told(llm, prompt, 33, temp=0.0) == plain
    assert llm.kvflash.spec.total.by_source["draft_model"].accepted > 0


@pytest.mark.parametrize(
    ("kind", "type_kv"),
    [("dense", type_kv) for type_kv in (0, *KV_TYPES.values())]
    + [(kind, type_kv) for kind in ("hybrid", "iswa") for type_kv in (0, 1, 8)]
    + [("latent", 0), ("latent", 1)],
)
def test_one_row_that_is_verified_is_a_plain_step(kind: str, type_kv: int, bare: Any, tokens: Any) -> None:
    """Bit for bit, with F32 and whatever else may be in the cache; a latent row is no whole number of blocks."""
    text = tokens[:80] % 128 if kind == "latent" else tokens[:80]
    plain, other = (bare(kind, pool=256, n_ctx=256, n_ubatch=64, type_kv=type_kv) for _ in range(2))
    for one in (plain, other):
        extend(one.session, text[:60])
    for at in range(60, 80):
        extend(plain.session, text[at : at + 1])
        other.session.finish(other.session.prepare_drafts(text[at : at + 1], None))
        other.session.keep(0)
        assert np.array_equal(plain.row(), other.row())
        other.session.settle()
    assert plain.session.length == other.session.length == 80
    for one in (plain, other):
        extend(one.session, text[:8])
    assert np.array_equal(plain.row(), other.row())


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_every_sampler_draws_as_without_drafts(sampler: str, llama: Any, tokens: Any) -> None:
    prompt, settings = tokens[300:420].tolist(), SAMPLERS[sampler]
    plain = told(llama(**STRICT), prompt, COUNT, **settings)
    llm = llama(**STRICT, kvflash_spec=SpecConfig(width=6))
    llm.draft_model = oracle([*prompt, *plain[0]], 0.7, 5)
    assert told(llm, prompt, COUNT, **settings) == plain
    assert llm.kvflash.spec.total.accepted > 0


def test_processors_and_criteria_see_the_text_only(llama: Any, tokens: Any) -> None:
    """Each is called once a token, with what was told so far."""
    import llama_cpp

    prompt = tokens[300:420].tolist()

    def run(llm: Any) -> tuple[Any, list[list[int]], list[list[int]]]:
        seen: list[list[int]] = []
        asked: list[list[int]] = []

        def processor(ids: Any, scores: Any) -> Any:
            seen.append(ids.tolist())
            scores[int(ids[-1])] -= 1
            return scores

        def stop(ids: Any, logits: Any) -> bool:
            asked.append(ids.tolist())
            return len(ids) >= len(prompt) + 40

        processors = llama_cpp.LogitsProcessorList([processor])
        out = [*llm.generate(prompt, temp=0.0, logits_processor=processors, stopping_criteria=stop)]
        return out, seen, asked

    plain = run(llama(**STRICT))
    llm = llama(**STRICT, kvflash_spec=SpecConfig(width=5))
    llm.draft_model = oracle([*prompt, *plain[0]], 0.8, 4)
    assert run(llm) == plain
    assert llm.kvflash.spec.total.accepted > 0


@pytest.mark.parametrize(("kind", "stop"), [*(("dense", n) for n in range(1, 14)), ("hybrid", 3), ("hybrid", 8)])
def test_a_stream_that_is_closed_leaves_the_text_that_was_told(kind: str, stop: int, llama: Any, tokens: Any) -> None:
    """Wherever it is closed, the text goes on as after plain decoding."""
    prompt = tokens[:150].tolist()
    plain = told(llama(kind, **STRICT), prompt, 40, temp=0.0)[0]
    llm = llama(kind, **STRICT, kvflash_spec=SpecConfig(width=6))
    llm.draft_model = oracle([*prompt, *plain], 0.8, 5)
    stream = llm.generate(prompt, temp=0.0)
    assert [*islice(stream, stop)] == plain[:stop]
    assert llm.kvflash.length == llm.n_tokens == len(prompt) + stop - 1
    stream.close()
    assert inside(llm).session.tokens.tolist() == [*prompt, *plain[: stop - 1]]
    check(llm)
    going_on = llm.generate([*prompt, *plain[:stop]], temp=0.0)
    assert [*islice(going_on, 16)] == plain[stop : stop + 16]


@pytest.mark.parametrize("policy", ["lru", "qk"])
@pytest.mark.parametrize("seed", range(3))
def test_trees_change_nothing_either(seed: int, policy: str, llama: Any, tokens: Any) -> None:
    """With rows computed one by one: a path lies elsewhere while it is verified, which may change a sum's order.

    Weights of F32, since quantised ones are multiplied by rounded rows, which makes much of a last bit.
    """
    prompt = tokens[:180].tolist()
    size = {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024, "kvflash_policy": policy}
    plain = llama("f32", **size)
    out, logits = told(plain, prompt, 80, **GREEDY)
    llm = llama("f32", **size, kvflash_spec=SpecConfig(width=16, types=("ngram",)))
    assert inside(llm).session.branch_room > 16
    bush = Bush([*prompt, *out], seed)
    let_draft(llm, bush, 16)
    got, theirs = told(llm, prompt, 80, **GREEDY)
    counted = llm.kvflash.spec.last
    assert bush.trees > 5
    assert counted.accepted > 20
    for at, (one, other) in enumerate(zip(out, got, strict=True)):
        mine, its = (np.frombuffer(rows[at], np.float32) for rows in (logits, theirs))
        assert np.abs(mine - its).max() < 0.01
        assert one == other
    inside(llm).session.settle()
    session, length = inside(llm).session, inside(llm).session.length
    assert session.tokens.tolist() == [*prompt, *out][:length]
    check_table(session.table)
    chunks = session.table.chunks
    for c in range(length // 64):
        held = session.engine.cells(chunks[c].block * 64, 64)
        assert held.tolist() == list(range(c * 64, c * 64 + 64))
    if policy == "qk":
        length = min(length, inside(plain).session.length)
        mine, its = (s.queries.newest_now(length, 8) for s in (inside(plain).session, session))
        assert np.abs(mine - its).max() < 0.01


@pytest.mark.parametrize("kind", ["hybrid", "iswa"])
def test_where_memory_has_no_branches_the_main_chain_is_verified(kind: str, llama: Any, tokens: Any) -> None:
    prompt = tokens[:180].tolist()
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "kvflash": 1024}
    out = told(llama(kind, **size), prompt, 40, **GREEDY)[0]
    llm = llama(kind, **size, kvflash_spec=SpecConfig(width=8))
    assert inside(llm).session.branch_room == 0
    let_draft(llm, Bush([*prompt, *out], 1), 8)
    assert told(llm, prompt, 40, **GREEDY)[0][:20] == out[:20]
    assert llm.kvflash.spec.last.steps > 0


def test_a_hybrid_has_the_state_of_its_text(llama: Any, tokens: Any) -> None:
    """Right drafts need no way back; wrong ones are forgotten, and what was right is read again."""
    prompt = tokens[:300].tolist()
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "kvflash": 1024}
    plain = told(llama("hybrid", **size), prompt, 40, **GREEDY)[0]
    for right in (0.0, 0.7):
        llm = llama("hybrid", **size, kvflash_spec=SpecConfig(width=4))
        llm.draft_model = oracle([*prompt, *plain], right, 3)
        out = [*islice(llm.generate(prompt, **GREEDY), 30)]
        inside(llm).session.settle()
        text = inside(llm).session.tokens.tolist()
        assert text == [*prompt, *out][: len(text)]
        again = llama("hybrid", **size)
        again.eval(text)
        mine, its = inside(llm).session.engine.get_state(seq=0), inside(again).session.engine.get_state(seq=0)
        assert len(mine) == len(its) > 0
        a, b = (np.frombuffer(bytes(x)[: len(x) // 4 * 4], np.float32) for x in (mine, its))
        finite = np.isfinite(a) & np.isfinite(b)
        assert np.abs(a[finite] - b[finite]).max() < 0.05 * max(1.0, np.abs(a[finite]).max())


@pytest.mark.parametrize(("kind", "rows"), [("dense", 32), ("hybrid", 8)])
def test_there_is_room_for_drafts_in_a_context_of_the_trained_length(kind: str, rows: int, llama: Any) -> None:
    """The context's parameters have no batch yet when the room is made."""
    llm = llama(kind, n_ctx=0, n_batch=256, n_ubatch=128, kvflash=512, kvflash_spec="ngram")
    assert inside(llm).room.rows == rows
    assert inside(llm).session.engine.info.rs_planes == (rows - 1 if kind == "hybrid" else 0)
    assert inside(llm).session.room_ahead >= rows
