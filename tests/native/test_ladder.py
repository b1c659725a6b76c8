"""The exactness ladder: how close a pool stays to the stock cache, rung by rung."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import CHUNK, KV_TYPES, agreement, logits_along, read_block, row, same_bits
from support.inside import inside
from support.integrity import check_table

from kvflash_ggml.pool.plan import Moves
from kvflash_ggml.sequence.prefill import extend

KINDS = ("dense", "hybrid", "iswa")
BOTH_TYPES = [KV_TYPES["f16"], KV_TYPES["q8_0"]]
ALL_TYPES = list(KV_TYPES.values())


def stock_like(kind: str, kv: int) -> dict[str, Any]:
    """Settings that a pool implies, for a stock context to compare with."""
    return {"flash_attn": True, "swa_full": False, "type_k": kv, "type_v": kv}


# --- rung 1: without a pool nothing differs from upstream


@pytest.mark.parametrize("kind", KINDS)
def test_off_is_stock(kind: str, llama: Any, stock: Any, tokens: Any) -> None:
    ours, theirs = llama(kind), stock(kind)
    assert ours.kvflash is None
    prompt, rest = tokens[:330], tokens[330:394]
    assert same_bits(logits_along(ours, prompt, rest), logits_along(theirs, prompt, rest))


@pytest.mark.parametrize("kind", KINDS)
def test_off_generates_as_stock(kind: str, llama: Any, stock: Any, tokens: Any) -> None:
    prompt = tokens[:300].tolist()
    outputs = []
    for llm in (llama(kind), stock(kind)):
        greedy = take(llm.generate(prompt, temp=0.0), 64)
        llm.set_seed(11)
        sampled = take(llm.generate(prompt[:250], temp=1.3, top_p=0.98, repeat_penalty=1.1), 64)
        llm.set_seed(12)
        again = take(llm.generate(prompt[:280], temp=1.0, mirostat_mode=2), 32)
        text = llm.create_completion(prompt, max_tokens=16, seed=5)["choices"][0]["text"]
        outputs.append((greedy, sampled, again, text))
    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_off_keeps_all_logits_as_stock(kind: str, llama: Any, stock: Any, tokens: Any) -> None:
    scores = []
    for make in (llama, stock):
        llm = make(kind, logits_all=True)
        llm.eval(tokens[:300].tolist())
        llm.eval(tokens[300:310].tolist())
        scores.append(llm.scores[: llm.n_tokens].copy())
    assert scores[0].shape == (310, 4096)
    assert same_bits(*scores)


def test_off_gives_logprobs_as_stock(llama: Any, stock: Any, tokens: Any) -> None:
    answers = []
    for make in (llama, stock):
        llm = make("dense", logits_all=True)
        answer = llm.create_completion(tokens[:200].tolist(), max_tokens=8, temperature=0.0, logprobs=3)
        answers.append(answer["choices"][0])
    assert answers[0] == answers[1]


def test_off_embeds_as_stock(llama: Any, stock: Any) -> None:
    texts = ["one short text", "another, a little longer than the first", "x"]
    vectors = [make("dense", embedding=True, pooling_type=1).embed(texts) for make in (llama, stock)]
    assert len(vectors[0]) == 3
    assert vectors[0] == vectors[1]


# --- rung 2: a pool that holds the whole context computes the same bits


@pytest.mark.parametrize("kv", ALL_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_whole_context_is_stock(kind: str, kv: int, llama: Any, stock: Any, tokens: Any) -> None:
    prompt, rest = tokens[:600], tokens[600:664]
    ours = llama(kind, kvflash=1024, type_k=kv, type_v=kv)
    theirs = stock(kind, **stock_like(kind, kv))
    assert same_bits(logits_along(ours, prompt, rest), logits_along(theirs, prompt, rest))
    assert ours.kvflash.page_outs == ours.kvflash.page_ins == 0


@pytest.mark.parametrize(("n_batch", "n_ubatch"), [(200, 96), (300, 128), (512, 512), (64, 64), (100, 7)])
@pytest.mark.parametrize("kind", KINDS)
def test_whole_context_splits_as_stock(
    kind: str, n_batch: int, n_ubatch: int, llama: Any, stock: Any, tokens: Any
) -> None:
    split = {"n_batch": n_batch, "n_ubatch": n_ubatch}
    prompt, rest = tokens[:450], tokens[450:454]
    ours = logits_along(llama(kind, kvflash=1024, **split), prompt, rest)
    assert same_bits(ours, logits_along(stock(kind, **split, **stock_like(kind, 1)), prompt, rest))


@pytest.mark.parametrize("kind", KINDS)
def test_whole_context_keeps_all_logits(kind: str, llama: Any, stock: Any, tokens: Any) -> None:
    scores = []
    for llm in (
        llama(kind, kvflash=1024, logits_all=True),
        stock(kind, logits_all=True, **stock_like(kind, 1)),
    ):
        llm.eval(tokens[:400].tolist())
        scores.append(llm.scores[:400].copy())
    assert same_bits(*scores)


@pytest.mark.parametrize("kind", ["dense", "iswa"])
def test_whole_context_after_truncation(kind: str, llama: Any, stock: Any, tokens: Any) -> None:
    """Cut and continue with other text: the freed slots are used again, in the same order."""
    rows = []
    for llm in (llama(kind, kvflash=1024), stock(kind, **stock_like(kind, 1))):
        llm.eval(tokens[:500].tolist())
        llm.n_tokens = 423
        rows.append(logits_along(llm, tokens[1000:1150], tokens[1150:1182]))
        llm.n_tokens -= 1
        rows[-1] = np.concatenate([rows[-1], logits_along(llm, tokens[9:10], tokens[10:14])])
    assert same_bits(*rows)


@pytest.mark.parametrize("kind", KINDS)
def test_whole_context_reuses_a_prefix_as_stock(kind: str, llama: Any, stock: Any, tokens: Any) -> None:
    base = tokens[:420].tolist()
    prompts = [base, base[:390] + tokens[2000:2040].tolist(), base, base[:100]]
    runs = []
    for llm in (llama(kind, kvflash=1024), stock(kind, **stock_like(kind, 1))):
        run = []
        for prompt in prompts:
            run.append((take(llm.generate(prompt, temp=0.0), 20), hash(row(llm).tobytes())))
        runs.append(run)
    if kind == "hybrid":  # we go back to a checkpoint where upstream evaluates the whole prompt: rounding differs
        assert [tokens for tokens, _ in runs[0]] == [tokens for tokens, _ in runs[1]]
    else:
        assert runs[0] == runs[1]


def test_whole_context_samples_as_stock(llama: Any, stock: Any, tokens: Any) -> None:
    runs = []
    for llm in (llama("dense", kvflash=1024), stock("dense", **stock_like("dense", 1))):
        llm.set_seed(3)
        runs.append(take(llm.generate(tokens[:300].tolist(), temp=1.2, top_k=80, repeat_penalty=1.2), 64))
    assert runs[0] == runs[1]


# --- rung 3: bytes survive a journey to the host


@pytest.mark.parametrize("kv", ALL_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_pages_come_back_bit_for_bit(kind: str, kv: int, bare: Any, tokens: Any) -> None:
    """Rotate the contents of all blocks, then put them back: bytes and logits are as before."""
    prompt, rest = tokens[:512], tokens[512:528]
    moved, still = bare(kind, pool=1024, type_kv=kv), bare(kind, pool=1024, type_kv=kv)
    extend(moved.session, prompt)
    extend(still.session, prompt)

    session = moved.session
    blocks = list(range(8))
    before = read_blocks(session, blocks)
    assert before == read_blocks(still.session, blocks)
    assert len(set(before)) == 8
    assert all(any(layer_bytes(session, page, i)) for page in before for i in range(len(session.engine.layers)))

    turned = before[3:] + before[:3]
    write_blocks(session, blocks, turned)
    assert read_blocks(session, blocks) == turned
    write_blocks(session, blocks[::-1], before[::-1])
    assert read_blocks(session, blocks) == before
    assert same_bits(moved.logits_along(rest[:1], rest[1:]), still.logits_along(rest[:1], rest[1:]))


def test_scribbled_pages_change_the_logits(bare: Any, tokens: Any) -> None:
    """Pages are what attention reads: without putting them back, the logits differ."""
    moved, still = bare(pool=1024), bare(pool=1024)
    for one in (moved, still):
        extend(one.session, tokens[:512])
    pages = read_blocks(moved.session, [2, 5])
    write_blocks(moved.session, [5], pages[:1])
    assert not same_bits(moved.logits_along(tokens[512:513]), still.logits_along(tokens[512:513]))


@pytest.mark.parametrize("kind", KINDS)
def test_recall_restores_what_was_evicted(kind: str, bare: Any, tokens: Any) -> None:
    """Chunks that leave and return under the pager, by a pin, hold the bytes they were sealed with."""
    one = bare(kind, pool=512, n_ctx=2048, n_ubatch=64)
    session = one.session
    sealed: dict[int, bytes] = {}
    for start in range(0, 1536, 64):
        extend(session, tokens[start : start + 64])
        check_table(session.table)
        chunk = start // CHUNK
        sealed[chunk] = read_block(session, session.table.chunks[chunk].block)
    assert session.paging.page_ins == 0
    assert 3 not in session.table.resident_chunks
    assert [session.store.bytes_of(c) for c in range(24)] == [sealed[c] for c in range(24)]

    old_block = session.table.chunks[23].block
    session.pin_range(3 * CHUNK, 4 * CHUNK)
    extend(session, tokens[1536:1540])
    assert session.paging.page_ins == 1
    block = session.table.chunks[3].block
    assert block not in (-1, old_block)
    assert read_block(session, block) == sealed[3]
    cells = session.engine.cells(block * CHUNK, CHUNK)
    assert cells.tolist() == list(range(3 * CHUNK, 4 * CHUNK))


@pytest.mark.parametrize("kv", ALL_TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_evicted_and_recalled_is_as_if_never_gone(kind: str, kv: int, bare: Any, tokens: Any) -> None:
    """All sealed chunks leave and come back to the same slots: the same bits follow."""
    prompt, rest = tokens[:600], tokens[600:632]
    moved = bare(kind, pool=768, n_ctx=2048, type_kv=kv)
    still = bare(kind, pool=768, n_ctx=2048, type_kv=kv)
    extend(moved.session, prompt)
    extend(still.session, prompt)
    page_around(moved.session, same_blocks=True)
    assert moved.session.paging.page_ins == 600 // CHUNK
    assert same_bits(moved.logits_along(rest[:1], rest[1:]), still.logits_along(rest[:1], rest[1:]))


@pytest.mark.parametrize("kind", KINDS)
def test_recall_into_other_blocks_only_reorders_sums(kind: str, bare: Any, tokens: Any) -> None:
    prompt, rest = tokens[:600], tokens[600:664]
    moved, still = bare(kind, pool=768, n_ctx=2048), bare(kind, pool=768, n_ctx=2048)
    extend(moved.session, prompt)
    extend(still.session, prompt)
    page_around(moved.session, same_blocks=False)
    ours, theirs = moved.logits_along(rest[:1], rest[1:]), still.logits_along(rest[:1], rest[1:])
    moved_blocks = [chunk.block for chunk in moved.session.table.chunks]
    assert moved_blocks != [chunk.block for chunk in still.session.table.chunks], "the blocks did not move"
    assert agreement(ours, theirs) >= 0.95
    assert np.abs(ours - theirs).max() < 0.6  # Q8_0 weights: see rung 4


# --- rung 4: placement changes nothing but the order of summation


def shuffled(blocks: int) -> list[int]:
    return np.random.default_rng(5).permutation(blocks).tolist()


def test_shuffled_blocks_f32(bare: Any, tokens: Any) -> None:
    prompt, rest = tokens[:40], tokens[40:640]
    plain = {"pool": 1024, "type_kv": 0, "flash": False, "n_ubatch": 256}
    straight = bare("f32", **plain).logits_along(prompt, rest)
    mixed = bare("f32", block_order=shuffled(16), **plain).logits_along(prompt, rest)
    assert not same_bits(straight, mixed), "the blocks were not shuffled"
    assert agreement(straight, mixed) == 1.0
    assert np.abs(straight - mixed).max() < 1e-4


@pytest.mark.parametrize(("kind", "kv", "least"), [("f32", 1, 0.995), ("f32", 8, 0.97), ("iswa", 1, 0.99)])
def test_shuffled_blocks_with_flash_attention(kind: str, kv: int, least: float, bare: Any, tokens: Any) -> None:
    prompt, rest = tokens[:40], tokens[40:640]
    straight = bare(kind, pool=1024, type_kv=kv).logits_along(prompt, rest)
    mixed = bare(kind, pool=1024, type_kv=kv, block_order=shuffled(16)).logits_along(prompt, rest)
    assert not same_bits(straight, mixed)
    assert agreement(straight, mixed) >= least


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_shuffled_blocks_with_quantised_weights(kind: str, bare: Any, stock: Any, tokens: Any) -> None:
    """Quantised weights amplify any other order of summation, so stock's own noise is the floor."""
    prompt, rest = tokens[:40], tokens[40:640]
    straight = bare(kind, pool=1024).logits_along(prompt, rest)
    mixed = bare(kind, pool=1024, block_order=shuffled(16)).logits_along(prompt, rest)
    flash, plain = (logits_along(stock(kind, flash_attn=on), prompt, rest) for on in (True, False))
    assert agreement(straight, mixed) >= min(0.97, agreement(flash, plain))


# --- what a pool smaller than the text means


@pytest.mark.parametrize("n_ubatch", [64, 100, 256])
def test_a_small_pool_sees_what_it_says(n_ubatch: int, llama: Any, stock: Any, tokens: Any) -> None:
    """Brute force: stock llama.cpp, evicted positions removed at the same moments."""
    ours = llama("f32", n_ctx=4096, kvflash=768, n_batch=n_ubatch, n_ubatch=n_ubatch)
    theirs = stock("f32", n_ctx=4096, n_batch=n_ubatch, n_ubatch=n_ubatch, flash_attn=True)
    evicted: list[int] = []
    apply = inside(ours).session.paging.apply

    def spy(moves: Any, length: int) -> Any:
        evicted.extend(chunk for chunk, _ in moves.evict)
        assert not moves.recall
        return apply(moves, length)

    inside(ours).session.paging.apply = spy
    pieces = [tokens[i : i + n_ubatch] for i in range(0, 1800, n_ubatch)]
    pieces += [tokens[i : i + 1] for i in range(len(pieces) * n_ubatch, len(pieces) * n_ubatch + 150)]
    rows: tuple[list[Any], list[Any]] = ([], [])
    moments = 0
    for piece in pieces:
        evicted.clear()
        ours.eval(piece.tolist())
        check_table(inside(ours).session.table)
        for chunk in evicted:
            assert theirs._ctx.kv_cache_seq_rm(0, chunk * CHUNK, (chunk + 1) * CHUNK)
        moments += bool(evicted)
        theirs.eval(piece.tolist())
        rows[0].append(row(ours))
        rows[1].append(row(theirs))
    assert moments > 5
    assert ours.kvflash.resident < ours.kvflash.chunks
    a, b = np.stack(rows[0]), np.stack(rows[1])
    assert np.abs(a - b).max() < 0.05  # half-precision keys and values; a wrong mask costs whole units
    ties = a.max(1) - np.take_along_axis(a, b.argmax(1)[:, None], 1)[:, 0]
    assert ties.max() < 0.05
    assert agreement(a, b) >= 0.98

    whole = stock("f32", n_ctx=4096, n_batch=n_ubatch, n_ubatch=n_ubatch, flash_attn=True)
    for piece in pieces:
        whole.eval(piece.tolist())
    assert np.abs(row(whole) - b[-1]).max() > 0.05, "eviction made no difference, so nothing was tested"


# --- rung 7: determinism


@pytest.mark.parametrize(("kind", "policy"), [("dense", "qk"), ("hybrid", "qk"), ("dense", "lru")])
def test_two_processes_give_the_same_bytes(
    kind: str, policy: str, models: dict[str, Path], tokens: Any, tmp_path: Path
) -> None:
    np.save(tmp_path / "tokens.npy", tokens[:1500])
    command = [sys.executable, "-c", WALK, str(models[kind]), str(tmp_path / "tokens.npy"), policy]
    runs = [subprocess.run(command, check=True, capture_output=True, text=True).stdout for _ in range(2)]
    assert len(runs[0].split()) == 3 + 90
    assert runs[0] == runs[1]


WALK = """
import hashlib, os, sys
import numpy as np
from kvflash_ggml import Llama
tokens = np.load(sys.argv[2]).tolist()
settings = {"kvflash": 512, "kvflash_policy": sys.argv[3], "kvflash_tau": 32}
settings["n_gpu_layers"] = int(os.environ.get("KVFLASH_TEST_GPU_LAYERS", "0"))
llm = Llama(sys.argv[1], n_ctx=4096, n_batch=256, seed=4, verbose=False, n_threads_batch=1, **settings)
out = []
for token in llm.generate(tokens, temp=1.1, top_p=0.99):
    out.append(token)
    if len(out) == 90:
        break
row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),))
print(hashlib.sha256(row.tobytes()).hexdigest(), llm.kvflash.page_ins, llm.kvflash.page_outs, *out)
"""


# --- helpers


def take(generator: Any, n: int) -> list[int]:
    """The first n tokens; the generator is closed after them."""
    out = [token for token, _ in zip(generator, range(n))]  # noqa: B905
    generator.close()
    return out


def read_blocks(session: Any, blocks: list[int]) -> list[bytes]:
    return [read_block(session, block) for block in blocks]


def write_blocks(session: Any, blocks: list[int], pages: list[bytes]) -> None:
    engine = session.engine
    images = [engine.alloc(len(page)) for page in pages]
    for image, page in zip(images, pages, strict=True):
        engine.view(image, len(page))[:] = page
    engine.wait(engine.page_in(blocks, images))
    engine.synchronize()
    for image in images:
        engine.free(image)


def layer_bytes(session: Any, page: bytes, layer: int) -> bytes:
    shape = session.engine.layers[layer]
    return page[shape.k_offset : shape.v_offset + CHUNK * shape.v_row]


def page_around(session: Any, *, same_blocks: bool) -> None:
    """Evict every sealed chunk, wipe the blocks, recall all: to the same blocks, or turned by one."""
    pager, engine = session.table, session.engine
    sealed = list(range(session.length // CHUNK))
    blocks = [pager.chunks[c].block for c in sealed]
    assert all(c in pager.images for c in sealed)
    session.paging.apply(Moves(evict=list(zip(sealed, blocks, strict=True))), session.length)
    write_blocks(session, blocks, [bytes(engine.info.page_bytes)] * len(blocks))
    targets = blocks if same_blocks else blocks[1:] + blocks[:1]
    for c, block in zip(sealed, targets, strict=True):
        pager.chunks[c] = replace(pager.chunks[c], block=block)
    session.paging.apply(Moves(recall=list(zip(sealed, targets, strict=True))), session.length)
    check_table(pager)
