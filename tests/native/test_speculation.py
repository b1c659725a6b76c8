"""Drafts change nothing but the number of steps.

With n_ubatch=1 the rows of a step are computed one at a time, so the numerics are those of plain decoding: everything
must be equal then, bit for bit. With real batches a row may differ by rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

import numpy as np
import pytest

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.session.step import EVERY
from kvflash_ggml.spec.base import Features
from kvflash_ggml.spec.control import Fixed
from kvflash_ggml.spec.draft import Draft
from kvflash_ggml.spec.loop import Speculator

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


def oracle(text: list[int], right: float, count: int) -> Callable[..., Any]:
    """Drafts what is known to come, each token right so often."""
    rng = np.random.default_rng(1)

    def draft(ids: Any, **_: Any) -> Any:
        after = np.array(text[len(ids) : len(ids) + count], np.intc)
        wrong = rng.random(len(after)) >= right
        return np.where(wrong, (after + 7) % 4000, after)

    return draft


def told(llm: Any, prompt: list[int], count: int, **sampler: Any) -> tuple[list[int], list[bytes]]:
    """Tokens, and the logits that each was sampled from."""
    tokens, logits = [], []
    for token in islice(llm.generate(prompt, **sampler), count):
        tokens.append(token)
        logits.append(llm.newest_logits().tobytes())
    return tokens, logits


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


@pytest.mark.parametrize(("kind", "right"), [("latent", 0.5), ("hybrid", 1.0)])
def test_everything_is_equal_in_other_memories(kind: str, right: float, llama: Any, tokens: Any) -> None:
    """Recurrent state without planes goes on, but not back: there all drafts are right."""
    prompt = (tokens[:50] % 128 if kind == "latent" else tokens[:50]).tolist()
    plain = told(llama(kind, **STRICT), prompt, 33, temp=0.0)
    llm = llama(kind, **STRICT, kvflash_spec=SpecConfig(width=4, types=("ngram",)))
    assert llm._session.engine.info.rs_planes == 0
    llm.draft_model = oracle([*prompt, *plain[0]], right, 3)
    assert told(llm, prompt, 33, temp=0.0) == plain
    assert llm.kvflash.spec.total.by_source["draft_model"].accepted > 0


@pytest.mark.parametrize(
    ("kind", "type_kv"),
    [(kind, type_kv) for kind in ("dense", "hybrid", "iswa") for type_kv in (0, 1, 8)] + [("latent", 0), ("latent", 1)],
)
def test_one_row_that_is_verified_is_a_plain_step(kind: str, type_kv: int, bare: Any, tokens: Any) -> None:
    """Bit for bit, with F32, F16 and Q8_0 in the cache; a latent row is no whole number of blocks."""
    text = tokens[:80] % 128 if kind == "latent" else tokens[:80]
    plain, other = (bare(kind, pool=256, n_ctx=256, n_ubatch=64, type_kv=type_kv) for _ in range(2))
    for one in (plain, other):
        one.session.extend(text[:60])
    for at in range(60, 80):
        plain.session.extend(text[at : at + 1])
        other.session.verify(text[at : at + 1])
        other.session.keep(0)
        assert np.array_equal(plain.row(), other.row())
        other.session.accept()
    assert plain.session.length == other.session.length == 80
    for one in (plain, other):
        one.session.extend(text[:8])
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


@pytest.mark.parametrize("stop", range(1, 14))
def test_a_stream_that_is_closed_leaves_the_text_that_was_told(stop: int, llama: Any, tokens: Any) -> None:
    """Wherever it is closed, the text goes on as after plain decoding."""
    prompt = tokens[:150].tolist()
    plain = told(llama(**STRICT), prompt, 40, temp=0.0)[0]
    llm = llama(**STRICT, kvflash_spec=SpecConfig(width=6))
    llm.draft_model = oracle([*prompt, *plain], 0.8, 5)
    stream = llm.generate(prompt, temp=0.0)
    assert [*islice(stream, stop)] == plain[:stop]
    assert llm.kvflash.length == llm.n_tokens == len(prompt) + stop - 1
    stream.close()
    assert llm._session.tokens.tolist() == [*prompt, *plain[: stop - 1]]
    llm._session.table.check_integrity()
    going_on = llm.generate([*prompt, *plain[:stop]], temp=0.0)
    assert [*islice(going_on, 16)] == plain[stop : stop + 16]


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
@pytest.mark.parametrize("right", [0.0, 0.6, 1.0])
def test_real_batches_differ_by_rounding_only(kind: str, right: float, llama: Any, tokens: Any) -> None:
    """At the first other token the two that could have been chosen are as near as rounding brings them."""
    prompt = np.tile(tokens[:200], 4).tolist()[:700]
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "kvflash": 1024}
    plain, logits = told(llama(kind, **size), prompt, COUNT, **GREEDY)
    llm = llama(kind, **size, kvflash_spec=SpecConfig(width=8))
    llm.draft_model = oracle([*prompt, *plain], right, 7)
    drafted, theirs = told(llm, prompt, COUNT, **GREEDY)
    assert llm.kvflash.spec.total.steps > 0
    for at, (one, other) in enumerate(zip(plain, drafted, strict=True)):
        mine, its = (np.frombuffer(rows[at], np.float32) for rows in (logits, theirs))
        near = 0.05 * max(1.0, float(np.abs(mine).max()))
        assert np.abs(mine - its).max() <= near
        if one != other:
            assert abs(mine[one] - mine[other]) <= near
            break


def test_a_pool_that_evicts_does_so_a_width_earlier(llama: Any, tokens: Any) -> None:
    """Room for drafts is made ahead of the text. Plain decoding that makes the same room computes the same bits."""
    prompt = tokens[:700].tolist()
    size = {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 1, "kvflash": 512}
    drafting = llama(**size, kvflash_spec=SpecConfig(width=6))
    drafting.draft_model = oracle([*prompt, *tokens[700:900].tolist()], 0.0, 5)
    made: dict[int, int] = {}
    verify = drafting._session.verify

    def noted(rows: Any, *others: Any) -> None:
        made[drafting._session.length] = len(rows)
        verify(rows, *others)

    drafting._session.verify = noted
    out = told(drafting, prompt, 150, temp=0.0)
    assert drafting.kvflash.page_outs > 0
    assert len(made) > 100

    plain = llama(**size)
    session, extend = plain._session, plain._session.extend

    def making_room(rows: Any, **settings: Any) -> None:
        session.settle()
        room = made.get(session.length) if len(rows) == 1 else None
        if room is None:
            extend(rows, **settings)
            return
        start = session.length
        session._generate_step(rows, EVERY, None, ahead=room)
        session.keep(0)
        session.accept()
        settings["after"](start, 1)

    session.extend = making_room
    assert told(plain, prompt, 150, temp=0.0) == out


def let_draft(llm: Any, drafter: Any, width: int) -> None:
    """Have this one drafter, and steps of this many rows."""
    llm._speculator = Speculator([drafter], Fixed(width), n_vocab=llm.n_vocab(), ends=())
    llm._session.follower = llm._speculator


class Bush:
    """Drafts a tree around what is known to come: the right tokens on any branch, and wrong ones beside them."""

    name = "bush"
    wants = Features()

    def __init__(self, text: list[int], seed: int) -> None:
        self._text = text
        self._seed = seed
        self._length = 0
        self.trees = 0

    def observe(self, start: int, tokens: Any, rows: Any) -> None:
        self._length = start + len(tokens)

    def cut(self, length: int) -> None:
        self._length = min(length, self._length)

    def close(self) -> None:
        pass

    def propose(self, root: int, most: int) -> Draft | None:
        after = self._text[self._length + 1 : self._length + 6]
        rng = np.random.default_rng((self._seed, self._length))
        tokens: list[int] = []
        parents: list[int] = []
        node = -1
        for token in after:
            siblings = [token, *rng.choice(np.arange(3000, 4000), 2, replace=False).tolist()]
            order = rng.permutation(3).tolist()
            tokens += [siblings[at] for at in order]
            parents += [node] * 3
            node = len(tokens) - 3 + order.index(0)
            if rng.random() < 0.2:
                tokens[node] = 2999  # wrong from here on
        self.trees += 1
        logp = rng.uniform(-3, 0, len(tokens)).astype(np.float32)
        return Draft(np.array(tokens, np.int32), np.array(parents, np.int32), self.name, logp) if tokens else None


@pytest.mark.parametrize("policy", ["lru", "qk"])
@pytest.mark.parametrize("seed", range(3))
def test_trees_change_nothing_either(seed: int, policy: str, llama: Any, tokens: Any) -> None:
    """With rows computed one by one: a path lies elsewhere while it is verified, which may change a sum's order."""
    prompt = tokens[:180].tolist()
    size = {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024, "kvflash_policy": policy}
    plain = llama(**size)
    out, logits = told(plain, prompt, 80, **GREEDY)
    llm = llama(**size, kvflash_spec=SpecConfig(width=16, types=("ngram",)))
    assert llm._session.branch_room > 16
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
    llm._session.settle()
    session, length = llm._session, llm._session.length
    assert session.tokens.tolist() == [*prompt, *out][:length]
    session.table.check_integrity()
    chunks = session.table.chunks
    for c in range(length // 64):
        held = session.engine.cells(chunks[c].block * 64, 64)
        assert held.tolist() == list(range(c * 64, c * 64 + 64))
    if policy == "qk":
        length = min(length, plain._session.length)
        mine, its = (s.queries.newest_now(length, 8) for s in (plain._session, session))
        assert np.abs(mine - its).max() < 0.01


@pytest.mark.parametrize("kind", ["hybrid", "iswa"])
def test_where_memory_has_no_branches_the_main_chain_is_verified(kind: str, llama: Any, tokens: Any) -> None:
    prompt = tokens[:180].tolist()
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128, "kvflash": 1024}
    out = told(llama(kind, **size), prompt, 40, **GREEDY)[0]
    llm = llama(kind, **size, kvflash_spec=SpecConfig(width=8))
    assert llm._session.branch_room == 0
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
        llm._session.settle()
        text = llm._session.tokens.tolist()
        assert text == [*prompt, *out][: len(text)]
        again = llama("hybrid", **size)
        again.eval(text)
        mine, its = llm._session.engine.get_state(), again._session.engine.get_state()
        assert len(mine) == len(its) > 0
        a, b = (np.frombuffer(bytes(x)[: len(x) // 4 * 4], np.float32) for x in (mine, its))
        finite = np.isfinite(a) & np.isfinite(b)
        assert np.abs(a[finite] - b[finite]).max() < 0.05 * max(1.0, np.abs(a[finite]).max())


def test_queries_of_the_text_outlive_drafts_that_were_wrong(llama: Any, tokens: Any) -> None:
    """After many of them the ring holds for every position what plain decoding has there."""
    prompt = tokens[:600].tolist()
    size = {"n_ctx": 2048, "n_batch": 256, "n_ubatch": 1, "kvflash": 1024, "kvflash_policy": "qk"}
    plain = llama(**size)
    out = told(plain, prompt, 80, temp=0.0)[0]
    llm = llama(**size, kvflash_spec=SpecConfig(width=7))
    llm.draft_model = oracle([*prompt, *out], 0.6, 6)
    assert told(llm, prompt, 80, temp=0.0)[0] == out
    llm._session.settle()
    one, other = plain._session, llm._session
    length = min(one.length, other.length)
    rows = one.queries.rows - 8  # the other has captured a few positions more
    mine, its = (s.queries.newest_now(length, rows) for s in (one, other))
    assert length - other.queries.valid_from >= other.queries.rows
    assert np.array_equal(mine, its)


@pytest.mark.parametrize(("kind", "rows"), [("dense", 32), ("hybrid", 8)])
def test_there_is_room_for_drafts_in_a_context_of_the_trained_length(kind: str, rows: int, llama: Any) -> None:
    """The context's parameters have no batch yet when the room is made."""
    llm = llama(kind, n_ctx=0, n_batch=256, n_ubatch=128, kvflash=512, kvflash_spec="ngram")
    assert llm._room.rows == rows
    assert llm._session.engine.info.rs_planes == (rows - 1 if kind == "hybrid" else 0)
    assert llm._session.room_ahead >= rows
