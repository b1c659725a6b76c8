"""What a plan can say, in full: siblings of a tree, rows for queries; and what is refused, by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from support.harness import Bare, evaluate, flat_queries, query_layers, read_queries, same_bits

from kvflash_bench.inside import plain_copy
from kvflash_ggml.errors import (
    DecodeError,
    EngineError,
    HostMemoryError,
    KVFlashError,
    SnapshotError,
    UnsupportedError,
    UnsupportedModelError,
)
from kvflash_ggml.sequence.prefill import extend

Make = Callable[..., Bare]
TEXT = 100
PAST = range(TEXT)


@pytest.fixture
def one(bare: Make, tokens: Any) -> Bare:
    """A text of 100 tokens, each in the slot of its position, and eight rows for queries."""
    run = bare(pool=512, n_ctx=512, n_ubatch=96, query_rows=8)
    extend(run.session, tokens[:TEXT])
    return run


# --- siblings


# a root, its children a and b, a child of each: [root, a, b, a', b'], breadth first
TREE_POS = [TEXT, TEXT + 1, TEXT + 1, TEXT + 2, TEXT + 2]
TREE_SLOTS = [100, 101, 103, 102, 104]
TREE_SEEN = [[*PAST], [*PAST, 100], [*PAST, 100], [*PAST, 100, 101], [*PAST, 100, 103]]
PATHS = {"first": [0, 1, 3], "second": [0, 2, 4]}


@pytest.mark.parametrize("path", PATHS.values(), ids=PATHS.keys())
def test_siblings(path: list[int], bare: Make, tokens: Any) -> None:
    """llama.cpp takes tokens of one position in slots of their own; a path neither sees nor feels the other."""
    tree = tokens[[100, 201, 301, 202, 302]].tolist()
    whole, half, straight = (bare(pool=512, n_ctx=512, n_ubatch=96) for _ in range(3))
    for run in (whole, half, straight):
        extend(run.session, tokens[:TEXT])
    logits = evaluate(whole, tree, TREE_POS, TREE_SLOTS, TREE_SEEN)
    assert whole.session.engine.cells(100, 5).tolist() == [100, 101, 102, 101, 102]

    others = [token if i in path else 7 for i, token in enumerate(tree)]
    assert same_bits(evaluate(half, others, TREE_POS, TREE_SLOTS, TREE_SEEN)[path], logits[path])

    # as a text: only rounding, in a step as wide, since a GPU has other kernels for steps of other widths
    end, chain = TEXT + len(path), range(TEXT, TEXT + len(tree))
    alone = evaluate(straight, [*(tree[i] for i in path), 7, 7], chain, chain, [[*range(p)] for p in chain])
    np.testing.assert_allclose(logits[path], alone[: len(path)], atol=0.05)
    assert (logits[path].argmax(1) == alone[: len(path)].argmax(1)).all()

    # the other path leaves its cells, and the text goes on after this one
    kept = [TREE_SLOTS[i] for i in path]
    for slot in set(TREE_SLOTS) - set(kept):
        whole.session.engine.clear_cells(slot, 1)
    straight.session.engine.clear_cells(end, len(tree) - len(path))
    after = evaluate(whole, [9], [end], [110], [[*PAST, *kept]])
    np.testing.assert_allclose(after, evaluate(straight, [9], [end], [110], [[*range(end)]]), atol=0.05)


@pytest.mark.parametrize("kind", ["hybrid", "iswa"])
def test_siblings_are_refused_where_memory_has_no_branches(kind: str, bare: Make, tokens: Any) -> None:
    run = bare(kind, pool=512, n_ctx=512, n_ubatch=96)
    extend(run.session, tokens[:TEXT])
    with pytest.raises(UnsupportedError, match=r"token 2 has the position of another, 101: .* has no branches"):
        evaluate(run, [5] * 5, TREE_POS, TREE_SLOTS, TREE_SEEN)
    extend(run.session, tokens[TEXT : TEXT + 1])


# --- rows for queries


def test_a_token_without_a_row_leaves_no_query(one: Bare) -> None:
    before = read_queries(one.session.engine)
    evaluate(one, [5, 6, 7], [100, 101, 102], [100, 101, 102], [[*PAST]] * 3)
    assert all(map(same_bits, read_queries(one.session.engine), before))


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa", "uneven"])
def test_queries_of_any_tokens_go_to_any_rows(kind: str, bare: Make, tokens: Any) -> None:
    """Also of a few in the midst of many, which the graph gathers first."""
    few, all_of_them = (bare(kind, pool=512, n_ctx=512, n_ubatch=96, query_rows=rows) for rows in (8, 40))
    n, kept = 40, {3: 6, 17: 0, 38: 7}
    for run in (few, all_of_them):
        extend(run.session, tokens[:TEXT] % run.n_vocab)
    before = read_queries(few.session.engine)
    plan = (tokens[:n] % few.n_vocab, range(100, 100 + n), range(100, 100 + n), [[*PAST]] * n)
    evaluate(few, *plan, [kept.get(i, -1) for i in range(n)])
    evaluate(all_of_them, *plan, list(range(n)))
    want = read_queries(all_of_them.session.engine)
    for old, new, layer in zip(before, read_queries(few.session.engine), want, strict=True):
        for token, row in kept.items():
            assert same_bits(new[row], layer[token])
        rest = sorted(set(range(8)) - set(kept.values()))
        assert same_bits(new[rest], old[rest])
    some = np.full_like(flat_queries(few.session.engine), np.nan)
    few.session.engine.wait(few.session.engine.read_queries(some, np.array([0, 6, 7], np.int32)))
    for part, all_rows in zip(query_layers(few.session.engine, some), read_queries(few.session.engine), strict=True):
        assert same_bits(part[[0, 6, 7]], all_rows[[0, 6, 7]])
        assert np.isnan(part[1:6]).all()


def test_the_query_of_an_accepted_draft_is_kept(bare: Make, tokens: Any) -> None:
    """Drafts take rows of their own: the newest queries stay until it is known which drafts count."""
    window, width = 8, 4
    drafts = bare(pool=512, n_ctx=512, n_ubatch=96, query_rows=window + width)
    extend(drafts.session, tokens[:TEXT])
    before = read_queries(drafts.session.engine)
    owner = {p % (window + width): p for p in range(TEXT - window - width, TEXT)}
    spare = [row for row, p in owner.items() if p < TEXT - window]
    past = [[*range(100 + i)] for i in range(width)]
    evaluate(drafts, tokens[TEXT : TEXT + width], range(100, 104), range(100, 104), past, spare)
    after = read_queries(drafts.session.engine)
    newest = [row for row, p in owner.items() if p >= TEXT - window]
    assert all(same_bits(new[newest], old[newest]) for new, old in zip(after, before, strict=True))
    assert all((new[row] != old[row]).any() for new, old in zip(after, before, strict=True) for row in spare)


# --- refusals


def plan(one: Bare, n: int = 3, **changed: Any) -> None:
    """A plan of n tokens after the text, with some of its values changed."""
    engine = one.session.engine
    engine.token[:n], engine.seq[:n], engine.query_row[:n], engine.output[:n] = 5, 0, -1, 0
    engine.pos[:n] = engine.slot[:n] = np.arange(TEXT, TEXT + n)
    for name, values in changed.items():
        if isinstance(values, dict):
            for i, x in values.items():
                getattr(engine, name)[i] = x
        else:
            setattr(engine._plan, name, values)


PLANS = {
    "sequence": ({"seq": {1: 1}}, "ARGUMENT", "sequence 1: the context is made for 1, from 0 on"),
    "negative sequence": ({"seq": {0: -1}}, "ARGUMENT", "sequence -1: the context is made for 1"),
    "slot": ({"slot": {2: 512}}, "ARGUMENT", "token 2 is put in slot 512 of 512"),
    "negative slot": ({"slot": {2: -1}}, "ARGUMENT", "token 2 is put in slot -1 of 512"),
    "slot that is taken": ({"slot": {1: 7}}, "ARGUMENT", "token 1 is put in slot 7, which is taken"),
    "slot named twice": ({"slot": {1: 100}}, "ARGUMENT", "token 1 is put in slot 100, as one before it"),
    "position": ({"pos": {1: 99}}, "ARGUMENT", "token 1 has position 99, after 100"),
    "negative position": ({"pos": {0: -1}}, "ARGUMENT", "token 0 has position -1, after -1"),
    "gap": ({"pos": {2: 110}}, "DECODE", "llama_decode returned -1 for 3 tokens"),
    "query row": ({"query_row": {0: 8}}, "ARGUMENT", "the query of token 0 is put in row 8 of 8"),
    "negative query row": ({"query_row": {0: -2}}, "ARGUMENT", "the query of token 0 is put in row -2 of 8"),
    "query row named twice": ({"query_row": {0: 3, 2: 3}}, "ARGUMENT", "the query of token 2 is put in row 3, as one"),
    "mask": ({"mask_stride": 511}, "ARGUMENT", "mask rows of 511 values for 512 slots"),
    "streamed pages": ({"n_streamed": 2}, "ARGUMENT", "2 streamed pages in a plan, and no stages were made"),
}
ERRORS: dict[str, type[KVFlashError]] = {
    "ARGUMENT": EngineError, "UNSUPPORTED": UnsupportedError, "DECODE": DecodeError,
}  # fmt: skip


@pytest.mark.parametrize(("changed", "status", "why"), PLANS.values(), ids=PLANS.keys())
def test_an_impossible_plan_is_refused(changed: Any, status: str, why: str, one: Bare, tokens: Any, bare: Make) -> None:
    from kvflash_ggml.native._kvf import ffi, lib

    engine = one.session.engine
    queries, cells = read_queries(engine), engine.cells(0, 512)
    plan(one, **changed)
    engine._plan.n_tokens = 3
    assert lib.kvf_step(engine._engine, engine._plan) == getattr(lib, f"KVF_STATUS_{status}")
    assert ffi.string(lib.kvf_last_error()).decode().startswith(why)
    codes: list[int] = []
    with pytest.raises(ERRORS[status], match=re.escape(why)) as refused:
        engine.step(3, 0, codes)
    assert type(refused.value) is ERRORS[status]
    assert codes not in ([], [0])
    assert engine.cells(0, 512).tolist() == cells.tolist()
    assert all(map(same_bits, read_queries(engine), queries))

    # nothing has changed: the text goes on as one that never asked
    plan(one, n_streamed=0, mask_stride=512)
    other = bare(pool=512, n_ctx=512, n_ubatch=96, query_rows=8)
    extend(other.session, tokens[:TEXT])
    assert same_bits(*(run.logits_along(tokens[TEXT : TEXT + 9], tokens[200:203]) for run in (one, other)))


@pytest.mark.parametrize(
    ("count", "why"),
    [(0, "0 tokens in a plan, it takes 1 to 96"), (-1, "-1 tokens in a plan"), (97, "a step of 97 tokens")],
)
def test_plans_of_no_or_too_many_tokens_are_refused(count: int, why: str, one: Bare) -> None:
    with pytest.raises(EngineError, match=why):
        one.session.engine.step(count, 0, [])


def test_rows_that_see_each_other_fit_a_ubatch(bare: Make) -> None:
    """llama.cpp would end the process."""
    engine = bare(pool=512, n_ctx=512, n_ubatch=32, n_batch=96).session.engine
    engine.pos[:40] = engine.slot[:40] = np.arange(40)
    engine._plan.mutual = 1
    with pytest.raises(EngineError, match="40 rows that see each other in a step, it takes up to n_ubatch, 32"):
        engine.step(40, 0, [])
    assert (engine.cells(0, 512) == -1).all()


@pytest.mark.parametrize("seq", [1, -1, 2**31 - 1])
def test_other_sequences_are_refused_by_every_call(seq: int, one: Bare, tokens: Any) -> None:
    from kvflash_ggml.native._kvf import ffi, lib

    engine = one.session.engine
    before = engine.cells(0, 512)
    for call in (
        lambda: engine.truncate(5, seq=seq),
        lambda: engine.clear(seq=seq),
        lambda: engine.get_state(seq=seq),
        lambda: engine.set_state(b"", TEXT, seq=seq),
        lambda: engine.set_cells(0, 0, tokens[:3], seq=seq),
    ):
        with pytest.raises(EngineError, match=rf"sequence {seq}: the context is made for 1, from 0 on"):
            call()
    assert lib.kvf_swa_first(engine._engine, seq, ffi.new("int32_t *")) == lib.KVF_STATUS_ARGUMENT
    assert lib.kvf_state_get(engine._engine, seq, ffi.new("uint8_t[8]"), 0, ffi.NULL) == lib.KVF_STATUS_ARGUMENT
    assert engine.cells(0, 512).tolist() == before.tolist()


def test_recurrent_state_of_several_sequences_advances_by_equally_many_tokens(bare: Make) -> None:
    engine = bare("hybrid", pool=1024, n_ctx=1024, n_ubatch=64, n_batch=256, n_seq_max=2).session.engine
    engine.seq[:3], engine.pos[:3], engine.slot[:3] = (0, 1, 1), (0, 0, 1), (0, 512, 513)
    with pytest.raises(UnsupportedError, match="a step has 1 tokens of sequence 0 and 2 of another"):
        engine.step(3, 0, [])
    engine.seq[:100], engine.pos[:100] = [0] * 50 + [1] * 50, [*range(50)] * 2
    engine.slot[:100] = [*range(50), *range(512, 562)]
    with pytest.raises(UnsupportedError, match=r"100 tokens of several sequences: .* up to n_ubatch, 64"):
        engine.step(100, 0, [])
    assert (engine.cells(0, 1024) == -1).all()


def test_sliding_windows_of_several_sequences_need_room(bare: Make) -> None:
    """llama.cpp gives them no more cells than the context has."""
    bare("iswa", pool=1536, n_ctx=512, n_ubatch=128, n_seq_max=3)
    with pytest.raises(
        UnsupportedModelError, match="windows of 4 sequences and a step need 640 cells, and there are 512"
    ):
        bare("iswa", pool=1536, n_ctx=512, n_ubatch=128, n_seq_max=4)


def test_several_sequences_need_flash_attention(bare: Make) -> None:
    with pytest.raises(UnsupportedModelError, match="without flash attention a pool serves one"):
        bare(pool=512, n_ctx=512, n_seq_max=2, flash=False)


def test_a_step_of_several_sequences_has_no_branches(bare: Make) -> None:
    engine = bare(pool=1024, n_ctx=1024, n_seq_max=2).session.engine
    engine.seq[:3], engine.pos[:3], engine.slot[:3] = (0, 1, 1), (0, 0, 0), (0, 512, 513)
    with pytest.raises(UnsupportedError, match="token 2 has the position of another, 0: a step of several sequences"):
        engine.step(3, 0, [])
    engine.seq[:3], engine.pos[:3] = (0, 1, 0), (0, 0, 0)
    with pytest.raises(UnsupportedError, match="token 2 has the position of another"):
        engine.step(3, 0, [])
    engine.seq[:3], engine.pos[:3] = (0, 1, 0), (5, 0, 6)
    with pytest.raises(EngineError, match="token 0 has position 5, but the memory of the context is empty"):
        engine.step(3, 0, [])
    assert (engine.cells(0, 1024) == -1).all()


def test_a_context_without_a_pool_is_refused(bare: Make) -> None:
    with pytest.raises(UnsupportedModelError, match="made without a pool"):
        bare(pool=0, n_ctx=512)


def test_every_other_refusal_is_typed_and_says_why(one: Bare, bare: Make, tokens: Any) -> None:
    engine = one.session.engine
    image = engine.alloc(engine.info.page_bytes)
    floats = np.zeros(5, np.float32)
    calls = [
        (lambda: engine.clear_cells(500, 13), EngineError, "13 slots from 500 on, there are 512"),
        (lambda: engine.clear_cells(-1, 1), EngineError, "1 slots from -1 on"),
        (lambda: engine.cells(2**31 - 1, 2), EngineError, "2 slots from 2147483647 on"),
        (lambda: engine.set_cells(0, -1, tokens[:3], seq=0), EngineError, "positions from -1 on"),
        (lambda: engine.page_out([8], [image]), EngineError, "block 8 of 8"),
        (lambda: engine.page_in([-1], [image]), EngineError, "block -1 of 8"),
        (lambda: engine.page_in([0], [0]), EngineError, "block 0 has no page image"),
        (lambda: engine.page_in([], []), EngineError, "0 blocks to move"),
        (lambda: engine.page_out([0, 1], [image]), EngineError, "2 blocks and 1 page images"),
        (lambda: engine.set_state(b"12", TEXT, seq=0), SnapshotError, "a state of 2 bytes does not fit .* left over"),
        (lambda: engine.set_state(b"", -1, seq=0), EngineError, "a state of 0 bytes for -1 tokens"),
        (lambda: engine.set_logits(floats), EngineError, rf"logits of 5 tokens, the vocabulary has {one.n_vocab}"),
        (lambda: engine.read_queries(floats), EngineError, r"5 values \(float32\) for queries, all layers have"),
        (lambda: engine.read_queries(flat_queries(engine), np.array([-1], "i4")), EngineError, "row -1 of queries"),
        (lambda: engine.write_queries(floats), EngineError, r"5 values \(float32\) for queries"),
        (lambda: engine.use_mask(floats), EngineError, r"the mask is float32 \(5,\), the engine reads float16"),
        (lambda: plain_copy(engine, 1 << 60, to_device=True), HostMemoryError, "no device memory for a copy of"),
    ]  # fmt: skip
    for call, error, why in calls:
        with pytest.raises(error, match=why) as refused:
            call()
        assert type(refused.value) is error
    assert engine.alloc(1 << 60) == 0

    without = bare(pool=512, n_ctx=512, n_ubatch=96, flash=False).session.engine
    with pytest.raises(EngineError, match="no queries are kept: the pool was made with 0 rows"):
        without.read_queries(np.empty(0, np.float32))
    with pytest.raises(UnsupportedError, match="V is stored transposed"):
        without.page_out([0], [image])


def test_devices(one: Bare) -> None:
    """Each device is described, and every layer is on one of them."""
    info = one.session.engine.info
    on = [layer.device for layer in one.session.engine.layers]
    assert [device.layers for device in info.devices] == [on.count(i) for i in range(len(info.devices))]
    assert sum(device.layers for device in info.devices) == info.n_layers
    for device in info.devices:
        assert 0 < device.free_bytes <= device.total_bytes
        assert device.name in info.device
        assert device.mode in (("stream", "remote", "sync") if device.asynchronous else ("sync", "host"))
        assert device.first_layer == on.index(info.devices.index(device))
        assert device.query_bytes >= 0
    assert sum(device.share_bytes for device in info.devices) == info.page_bytes
    assert info.asynchronous == any(device.asynchronous for device in info.devices)
    assert info.pinned == any(device.pinned for device in info.devices)
