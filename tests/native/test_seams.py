"""One test per patch, named in its header: each fails if that patch is taken away."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from support.harness import CHUNK, flat_queries, read_block, read_queries, row, same_bits
from support.inside import inside
from support.rounding import FUSES

from kvflash_ggml.errors import EngineError, SnapshotError
from kvflash_ggml.sequence.prefill import extend


def test_pool_size(bare: Any, llama: Any, stock: Any) -> None:
    """0001: the attention cache has the pool's cells, and n_ctx stays the logical context."""
    one = bare(pool=512, n_ctx=4096)
    info = one.session.engine.info
    assert (info.n_slots, one._ctx.n_ctx()) == (512, 4096)
    staging = info.device_bytes - 8 * info.page_bytes  # a GPU has room to receive pages
    assert staging == 0 or info.asynchronous
    assert sum(layer.k_row + layer.v_row for layer in one.session.engine.layers) == info.page_bytes // 64

    # layers with a sliding window are not pooled
    swa = bare("iswa", pool=512, n_ctx=4096).session.engine
    assert swa.info.n_slots == 512
    assert [layer.il for layer in swa.layers] == [2, 5]

    # the request is for one context only
    assert stock(n_ctx=2048)._ctx.n_ctx() == 2048
    assert llama(n_ctx=2048).kvflash is None


def test_slot_plan(bare: Any, tokens: Any) -> None:
    """0002: tokens go to the planned cells, in whatever order, over several steps."""
    order = [5, 2, 7, 0, 6, 1, 3, 4]
    one = bare(pool=512, n_ctx=512, n_ubatch=96, block_order=order)
    engine = one.session.engine
    extend(one.session, tokens[:333])
    expected = np.full(512, -1)
    for pos in range(333):
        expected[order[pos // CHUNK] * CHUNK + pos % CHUNK] = pos
    assert engine.cells(0, 512).tolist() == expected.tolist()

    engine.clear_cells(0, 512)
    assert (engine.cells(0, 512) == -1).all()
    engine.set_cells(128, 64, tokens[64:100], seq=0)
    assert engine.cells(128, 36).tolist() == list(range(64, 100))


def test_no_plan_no_slot(bare: Any, tokens: Any) -> None:
    """0002: decoding behind the session's back gets the answer for a full cache."""
    from llama_cpp import _internals as internals

    one = bare(pool=512, n_ctx=512)
    extend(one.session, tokens[:70])
    batch = internals.LlamaBatch(n_tokens=1, embd=0, n_seq_max=1, verbose=False)
    batch.set_batch([1], 70, True)
    with pytest.raises(RuntimeError, match="llama_decode returned 1"):
        one._ctx.decode(batch)
    batch.close()
    assert one.session.engine.cells(0, 128).max() == 69
    extend(one.session, tokens[70:75])
    assert one.session.length == 75


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_mask_plan(kind: str, bare: Any, tokens: Any) -> None:
    """0003: a token sees the slots that its mask row opens, and no others."""
    seen, hidden, shown = (bare(kind, pool=512, n_ctx=512) for _ in range(3))
    for one in (seen, hidden, shown):
        extend(one.session, tokens[:256])
    fill = hidden.session.mask.fill

    def hide(start: int, slots: Any, first: int) -> Any:
        rows = fill(start, slots, first)
        rows[:, 64:128] = -np.inf
        return rows

    hidden.session.mask.fill = hide
    first, second, third = (one.logits_along(tokens[256:257]) for one in (seen, hidden, shown))
    assert same_bits(first, third)
    assert np.abs(first - second).max() > 1e-3

    # bytes that no row opens do not matter: other contents of the hidden block give the same logits
    other = bare(kind, pool=512, n_ctx=512)
    extend(other.session, tokens[:256])
    other.session.mask.fill, other_fill = None, other.session.mask.fill

    def hide_other(start: int, slots: Any, first: int) -> Any:
        rows = other_fill(start, slots, first)
        rows[:, 64:128] = -np.inf
        return rows

    other.session.mask.fill = hide_other
    engine = other.session.engine
    image = engine.alloc(engine.info.page_bytes)
    engine.view(image, engine.info.page_bytes)[:] = read_block(other.session, 0)
    engine.wait(engine.page_in([1], [image]))
    assert same_bits(second, other.logits_along(tokens[256:257]))


@pytest.mark.parametrize("kind", ["dense", "iswa"])
def test_mask_plan_without_flash_attention(kind: str, bare: Any, tokens: Any) -> None:
    """0003: mask rows are F32 then."""
    seen, hidden = (bare(kind, pool=512, n_ctx=512, flash=False, n_ubatch=96) for _ in range(2))
    assert seen.session.engine.info.mask_f32
    for one in (seen, hidden):
        extend(one.session, tokens[:256])
    fill = hidden.session.mask.fill

    def hide(start: int, slots: Any, first: int) -> Any:
        rows = fill(start, slots, first)
        rows[:, :200] = -np.inf
        return rows

    hidden.session.mask.fill = hide
    assert np.abs(seen.logits_along(tokens[256:257]) - hidden.logits_along(tokens[256:257])).max() > 1e-3


@pytest.mark.parametrize(("kind", "kv"), [("dense", 1), ("hybrid", 1), ("iswa", 1), ("dense", 8)])
def test_query_capture(kind: str, kv: int, bare: Any, tokens: Any) -> None:
    """0004: the newest query rows of every pooled layer are kept, and nothing else changes."""
    rows, n = 32, 320
    one = bare(kind, pool=512, n_ctx=512, n_ubatch=96, query_rows=rows, type_kv=kv)
    plain = bare(kind, pool=512, n_ctx=512, n_ubatch=96, type_kv=kv)
    extend(one.session, tokens[:n])
    extend(plain.session, tokens[:n])
    engine = one.session.engine
    assert engine.info.query_rows == rows
    if FUSES and kind == "iswa":  # the norm of a query that is kept is not computed with what follows: only rounding
        assert np.corrcoef(one.row(), plain.row())[0, 1] > 0.999
    else:
        assert same_bits(one.row(), plain.row()), "capture changes nothing else"

    for layer, queries in zip(engine.layers, read_queries(engine), strict=True):
        assert queries.shape == (rows, layer.n_head, layer.head_k)
        assert np.isfinite(queries).all()
        assert np.abs(queries).reshape(rows, -1).max(1).min() > 0, "every row was written"

    # row p % rows belongs to position p: one token more replaces one row
    before = read_queries(engine)
    extend(one.session, tokens[n : n + 1])
    for old, new in zip(before, read_queries(engine), strict=True):
        changed = (old != new).any(axis=(1, 2))
        assert np.flatnonzero(changed).tolist() == [n % rows]


def test_a_step_of_one_token_has_a_graph_of_its_own(bare: Any, tokens: Any) -> None:
    """0015: a longer step between two of them changes none of its nodes."""
    nodes: list[int] = []
    run = bare(pool=512, n_ctx=512, n_ubatch=96, nodes=nodes)
    seen, at = [], 0
    for count in (64, 1, 64, 1, 1):
        nodes.clear()
        extend(run.session, tokens[at : at + count], prompt=True)
        seen.append([*nodes])
        at += count
    prompt, one, other, again, third = seen
    assert one == again == third != []
    assert not {*one} & {*prompt, *other}


def test_query_basis(bare: Any, tokens: Any) -> None:
    """0004: queries share the basis of the keys: rotated (Q8_0) or not (F16), scores agree."""
    n, rows = 320, 16
    scores = []
    for kv in (1, 8):
        one = bare(pool=512, n_ctx=512, query_rows=rows, type_kv=kv)
        extend(one.session, tokens[:n])
        engine = one.session.engine
        layer = engine.layers[0]
        keys = np.concatenate([decode_keys(one.session, block, layer, kv) for block in range(n // CHUNK)])
        queries = read_queries(engine)[0]
        group = layer.n_head // layer.n_head_kv
        keys = keys.reshape(n, layer.n_head_kv, layer.head_k).repeat(group, axis=1)
        scores.append(np.einsum("qhd,khd->hqk", queries, keys))
    assert np.corrcoef(scores[0].ravel(), scores[1].ravel())[0, 1] > 0.999


def decode_keys(session: Any, block: int, layer: Any, kv: int) -> Any:
    import gguf

    page = np.frombuffer(read_block(session, block), np.uint8)
    raw = page[layer.k_offset : layer.k_offset + CHUNK * layer.k_row].reshape(CHUNK, layer.k_row)
    return gguf.quants.dequantize(raw.view(np.float16) if kv == 1 else raw, gguf.GGMLQuantizationType(kv))


def test_query_capture_is_off_by_default(bare: Any) -> None:
    assert bare(pool=512, n_ctx=512).session.engine.info.query_rows == 0


# --- what a session needs beside the pool


def test_last_logits_are_put_back(llama: Any, tokens: Any) -> None:
    """0005: they are read, and sampled from, as if their token had just been evaluated."""
    llm = llama(kvflash=1024)
    llm.eval(tokens[:300].tolist())
    last = row(llm)
    fresh, other = llama(kvflash=1024), llama(kvflash=1024)
    other.eval(tokens[500:900].tolist())
    assert not same_bits(row(other), last)
    for one in (fresh, other):
        inside(one).session.engine.set_logits(last)
        assert same_bits(row(one), last)
    assert other.sample(temp=0.0) == int(last.argmax())
    with pytest.raises(EngineError, match=rf"logits of {len(last) - 1} tokens, the vocabulary has {len(last)}"):
        inside(other).session.engine.set_logits(last[:-1])
    other.eval(tokens[900:901].tolist())
    assert not same_bits(row(other), last)


@pytest.mark.parametrize("length", [5, 130, 700])
@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_states_go_back_exactly(kind: str, length: int, bare: Any, tokens: Any) -> None:
    """Windows that have wrapped, recurrent states and queries, over those of another text."""
    one, other = (bare(kind, pool=1024, n_ctx=1024, n_ubatch=96, query_rows=16) for _ in range(2))
    extend(one.session, tokens[:length])
    engine, target = one.session.engine, other.session.engine
    state = engine.get_state(seq=0)
    assert (state == b"") == (kind == "dense")
    target.set_state(state, length, seq=0)
    assert target.get_state(seq=0) == state
    target.write_queries(flat_queries(engine))
    assert all(map(same_bits, read_queries(target), read_queries(engine)))


@pytest.mark.parametrize("kind", ["hybrid", "iswa"])
def test_a_restored_state_replaces_that_of_another_text(kind: str, bare: Any, tokens: Any) -> None:
    one, other = bare(kind, pool=1024, n_ubatch=96), bare(kind, pool=1024, n_ubatch=96)
    extend(one.session, tokens[:700])
    extend(other.session, tokens[2000:2555])
    engine = other.session.engine
    before, state = engine.get_state(seq=0), one.session.engine.get_state(seq=0)
    assert before != state
    engine.set_state(state, 700, seq=0)
    assert engine.get_state(seq=0) == state
    engine.set_state(before, 555, seq=0)
    assert engine.get_state(seq=0) == before
    straight = bare(kind, pool=1024, n_ubatch=96)
    extend(straight.session, tokens[2000:2555])
    ours, theirs = (x.logits_along(tokens[2555:2560], tokens[2560:2570]) for x in (other, straight))
    assert same_bits(ours, theirs)


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_hostile_states_are_refused_and_the_engine_lives(kind: str, bare: Any, tokens: Any) -> None:
    one = bare(kind, pool=1024, n_ubatch=96)
    extend(one.session, tokens[:500])
    engine = one.session.engine
    state = engine.get_state(seq=0)
    rng = random.Random(3)
    taken = 0
    for harmed in (harm(state, rng) for _ in range(400)):
        try:
            engine.set_state(harmed, 500, seq=0)
        except SnapshotError:
            continue
        taken += 1
        again = engine.get_state(seq=0)
        assert len(again) == len(harmed), "accepted, and not taken over as it was"
    assert taken < 200, "bytes of values may be anything; most of the harm is elsewhere"
    for length in (0, 499, 501, 2**31 - 1):
        if state:
            with pytest.raises(SnapshotError):
                engine.set_state(state, length, seq=0)
    engine.set_state(state, 500, seq=0)
    assert engine.get_state(seq=0) == state
    straight = bare(kind, pool=1024, n_ubatch=96)
    extend(straight.session, tokens[:500])
    assert same_bits(
        one.logits_along(tokens[500:510], tokens[510:520]), straight.logits_along(tokens[500:510], tokens[510:520])
    )


def harm(state: bytes, rng: random.Random) -> bytes:
    """A cut, a longer one, or other numbers: near the beginning, where the counts are, or anywhere."""
    data = bytearray(state)
    kind = rng.randrange(6)
    if kind == 0 or not data:
        return bytes(data[: rng.randrange(len(data) + 1)]) + b"\0" * (not data)
    if kind == 1:
        return bytes(data) + rng.randbytes(rng.randrange(1, 99))
    if kind == 2:
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        return bytes(data)
    extreme = rng.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32 - 2, rng.randrange(2**32), 499, 500])
    at = 4 * rng.randrange(min(len(data) // 4, rng.choice([4, 24, 200])))
    data[at : at + 4] = extreme.to_bytes(4, "little")
    return bytes(data)
