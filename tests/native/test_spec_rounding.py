"""What drafts may change: on real batches a sum's order, on a pool that evicts when room is made. And nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np
import pytest
from support.drafting import Bush, let_draft, oracle, told
from support.harness import Bare, Logits, same_bits
from support.inside import inside
from support.replay import let_replay

from kvflash_ggml.arrays import Int32s
from kvflash_ggml.config import SpecConfig
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.step import EVERY
from kvflash_ggml.speculation.draft import Draft, chain
from kvflash_ggml.speculation.tree import rows as arranged

GREEDY = {"temp": 0.0}
WIDTH = 8
COUNT = 256


def step_logits(llm: Any, count: int) -> Logits:
    """Of each row of the newest step."""
    rows = [llm._ctx.get_logits_ith(row) for row in range(count)]
    return np.stack([np.ctypeslib.as_array(row, shape=(llm.n_vocab(),)).copy() for row in rows])


def batched(llm: Any, prompt: list[int], text: Sequence[int], *, tree: bool) -> Logits:
    """The logits along a text that is read in steps of several rows. tree: each but the first of a step has a sibling,
    which is thought more of, so that the text lies beside its place."""
    llm.reset()
    llm.eval(prompt)
    session, found = inside(llm).session, [llm.newest_logits()[None]]
    span = WIDTH // 2 if tree else WIDTH
    for at in range(0, len(text) - span, span):
        root, after = text[at], np.array(text[at + 1 : at + span], np.int32)
        draft = siblings(after) if tree else chain(after, "a test")
        rows = arranged(root, draft)
        session.finish(session.prepare_drafts(rows.tokens, rows.branches if tree else None))
        path = [0, *(rows.of(node) for node in range(0, len(draft), 2 if tree else 1))]
        found.append(step_logits(llm, len(rows))[path])
        for row in path:
            session.keep(row)
        session.settle()
    return np.concatenate(found)


def siblings(tokens: Int32s) -> Draft:
    """A chain whose every token has another one beside it that is likelier."""
    n = len(tokens)
    both = np.stack([tokens, (tokens + 7) % 4000], axis=1).ravel()
    parent = np.repeat(np.arange(-1, n - 1) * 2, 2)
    parent[:2] = -1
    logp = np.tile(np.log([0.1, 0.9]), n)
    return Draft(both.astype(np.int32), parent.astype(np.int32), "a test", logp.astype(np.float32))


@pytest.mark.parametrize(("kind", "tree"), [("dense", False), ("hybrid", False), ("iswa", False), ("dense", True)])
def test_real_batches_differ_by_rounding_only(kind: str, tree: bool, llama: Any, tokens: Any) -> None:
    """At the first other token the two that could have been chosen are as near as rounding brings them; both answers go
    on from plain decoding's token then. How far that is, is measured with a text that is given."""
    prompt = np.tile(tokens[:200], 4).tolist()[:700]
    llm = llama(kind, n_ctx=1024, n_batch=128, n_ubatch=128, kvflash=1024, kvflash_spec=SpecConfig(width=WIDTH))
    let_replay(llm, {}, WIDTH)  # nothing: with the same planes, a row a step
    plain, bits = told(llm, prompt, COUNT, **GREEDY)
    assert llm.kvflash.spec.last.steps == 0
    logits = np.stack([np.frombuffer(row, np.float32) for row in bits])
    wide = batched(llm, prompt, plain, tree=tree)
    apart = float(np.abs(wide - logits[: len(wide)]).max())  # 0 where a kernel takes rows one by one
    bound = 0.02 * float(np.abs(logits).max())
    assert apart < bound, "more than rounding"
    if apart > 0:  # a step of another number of rows may still take another kernel
        bound = 4 * apart

    llm.reset()
    let_draft(llm, Bush([*prompt, *plain], 1), WIDTH)
    if not tree:
        llm.draft_model = oracle([*prompt, *plain], 0.7, WIDTH - 1)
    out: list[int] = []
    steps = equal = 0
    while len(out) < COUNT:
        for token in islice(llm.generate([*prompt, *out], **GREEDY), COUNT - len(out)):
            at = len(out)
            out.append(plain[at])
            equal += token == plain[at]
            if token != plain[at]:
                assert abs(logits[at][token] - logits[at][plain[at]]) <= bound
                break
            assert np.abs(llm.newest_logits() - logits[at]).max() <= bound
        steps += llm.kvflash.spec.last.steps
    assert 0 < steps < COUNT / 2
    print(f"{kind}{' tree' * tree}: {100 * equal / COUNT:.1f} % of the tokens are equal, rounding is {apart:.4f}")
    assert equal >= 0.99 * COUNT


Room = tuple[int, Any, bool, list[int]]
"""What a step reserved: room for so many rows, by this ranking, rebuilt or not; and the blocks of the chunks then."""


def reserving(session: Any, forced: dict[int, Room] | None = None) -> dict[int, Room]:
    """Notes what each step reserves, by its start; forced: as it was noted, whatever is asked for."""
    made: dict[int, Room] = {}
    reserve = session.table.reserve

    def reserved(start: int, count: int, ranking: Any = None, rebuild: bool = False, places: Any = None) -> Any:
        if forced is not None and start in forced:
            count, ranking, rebuild, _ = forced[start]
        plan = reserve(start, count, ranking, rebuild, places)
        made.setdefault(start, (count, ranking, rebuild, [chunk.block for chunk in plan.layout.chunks]))
        return plan

    session.table.reserve = reserved
    return made


def within(made: dict[int, Room], begin: int) -> dict[int, Room]:
    """The same for a row a step: what a step of several rows has reserved holds for each of them."""
    rooms = dict[int, Room]()
    for start, (count, ranking, rebuild, blocks) in sorted(made.items()):
        if start >= begin:
            rooms |= {at: (start + count - at, ranking, False, blocks) for at in range(start, start + count)}
            rooms[start] = count, ranking, rebuild, blocks
    return rooms


def make_room(session: Any, rooms: dict[int, Room]) -> None:
    """A plain step has as much room ahead of the text as one that verified there."""
    prepare, finish, told = session.prepare_answer, session.finish, {}

    def preparing(rows: Any, output: Any, after: Any = None, **drafts: Any) -> Any:
        if drafts or session.length not in rooms:
            return prepare(rows, output, after, **drafts)
        told[session.length] = after
        return prepare(rows, EVERY, ahead=rooms[session.length][0])

    def finishing(step: Any) -> None:
        finish(step)
        if step.start in told:
            session.keep(0)
            session.settle()
            told.pop(step.start)(step.start, 1)

    session.prepare_answer, session.finish = preparing, finishing


@pytest.mark.parametrize(("kind", "policy"), [("dense", "lru"), ("dense", "qk"), ("hybrid", "qk"), ("iswa", "qk")])
def test_a_pool_that_evicts_differs_by_what_is_resident_only(kind: str, policy: str, llama: Any, tokens: Any) -> None:
    """Room for drafts is made ahead of the text, and scores are looked at where steps end. Plain decoding that has the
    same chunks in the same blocks at each token computes the same bits. Recurrent state without planes goes on, but not
    back: there all drafts are right."""
    prompt, count = tokens[1000:1540].tolist(), 80
    size = {"n_ctx": 768, "n_batch": 128, "n_ubatch": 1, "kvflash": 384, "kvflash_policy": policy, "kvflash_tau": 16}
    plain = llama(kind, **size)
    known, _ = told(plain, prompt, count, **GREEDY)
    for _ in range(6):  # drafts change what is resident, and so the text: draft what came out, on some CPUs once more
        drafting = llama(kind, **size, kvflash_spec=SpecConfig(width=6, types=("ngram",)))
        drafting.draft_model = oracle([*prompt, *known], 1.0 if kind == "hybrid" else 0.7, 5)
        made = reserving(inside(drafting).session)
        out = told(drafting, prompt, count, **GREEDY)
        spec = drafting.kvflash.spec.last
        if spec.accepted > 20:
            break
        known = out[0]
    assert spec.accepted > 20
    rooms = within(made, len(prompt))
    assert any(rebuild for _, _, rebuild, _ in rooms.values()) == (policy == "qk")
    assert len({tuple(blocks) for *_, blocks in rooms.values()}) > 1

    plain.reset()
    seen = reserving(inside(plain).session, rooms)
    make_room(inside(plain).session, rooms)
    assert told(plain, prompt, count, **GREEDY) == out
    assert [blocks for at, (*_, blocks) in sorted(seen.items()) if at >= len(prompt)] == [
        rooms[at][3] for at in sorted(seen) if at >= len(prompt)
    ]


def test_queries_of_the_text_outlive_what_is_rejected_and_cut(bare: Any, tokens: Any) -> None:
    """After 500 steps that verify, settle, and cut, the ring holds for every position what plain decoding has there."""
    text, rng = tokens[:900], np.random.default_rng(4)
    run, plain = (bare(pool=1024, n_ctx=1024, n_ubatch=1, n_batch=256, query_rows=32) for _ in range(2))
    wanted: dict[int, Any] = {}

    def note(one: Bare) -> None:
        wanted[one.session.length] = one.session.queries.newest_now(one.session.length, 1)

    for one in (run, plain):
        extend(one.session, text[:300])
    for at in range(300, len(text)):
        extend(plain.session, text[at : at + 1])
        note(plain)
    cuts = compared = 0
    for step in range(500):
        session, length = run.session, run.session.length
        count = int(rng.integers(1, 8))
        right = int(rng.integers(0, count + 1))
        rows = np.where(np.arange(count) < right, text[length : length + count], rng.integers(0, 4000, count))
        session.finish(session.prepare_drafts(rows.astype(np.int32), None))
        for row in range(right):
            session.keep(row)
        session.settle()
        assert session.length == length + right
        if rng.random() < 0.1 or session.length > 880:
            cuts += 1
            session.truncate(int(rng.integers(301, max(302, session.length))))
        if step % 20 == 19:
            known = range(max(301, session.queries.valid_from + 1), session.length + 1)
            for end in known[-session.queries.rows :]:
                assert same_bits(session.queries.newest_now(end, 1), wanted[end])
                compared += 1
    assert cuts > 20
    assert compared > 200
