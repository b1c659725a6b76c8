"""Rung 8: a text that is read through stages computes the bits of the full cache."""

from __future__ import annotations

import json
import pickle
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support import resume
from support.harness import KV_TYPES, assert_same, evaluate, pages, put_pages, row, same_bits
from support.inside import inside

from kvflash_ggml import logs
from kvflash_ggml.errors import EngineError
from kvflash_ggml.sequence.prefill import extend
from kvflash_ggml.sequence.reading import AttentionSpan

POOL = 512
N_CTX = 2048
F16, Q8 = KV_TYPES["f16"], KV_TYPES["q8_0"]
CASES = [("dense", kv) for kv in KV_TYPES.values()]
CASES += [(kind, kv) for kind in ("hybrid", "iswa") for kv in (F16, Q8)]
CASES += [("latent heads", F16), ("uneven", F16)]


@pytest.mark.parametrize(("kind", "kv"), CASES)
def test_streamed_equals_stock(kind: str, kv: int, bare: Callable[..., Any], tokens: Any) -> None:
    """A ragged text of more than three pools, then a few tokens, each attending to all of it."""
    size = {"n_ctx": N_CTX, "n_ubatch": 128, "type_kv": kv}
    prompt, rest = tokens[:1797] % 128, (tokens[1797:1801] % 128).tolist()
    streamed = bare(kind, pool=POOL, stages=N_CTX, answers_exactly=True, **size)
    rows = streamed.logits_along(prompt, rest)
    session = streamed.session
    assert session.length > session.pool.n_slots
    assert session.streamed_steps > len(rest)
    assert session.engine.streamed_bytes > session.engine.info.page_bytes * 27
    assert session.whole[: session.length].all()
    full = bare(kind, pool=N_CTX, **size).logits_along(prompt, rest)
    assert_same(rows, full)


def test_the_host_runs_ahead(bare: Callable[..., Any], tokens: Any) -> None:
    """Pages that a streamed step reads are not free before it has: they know the transfer."""
    session = bare(pool=POOL, stages=N_CTX, n_ctx=N_CTX, n_ubatch=128).session
    extend(session, tokens[:1000])
    ticket = session.engine.streamed_ticket
    assert ticket > 0
    assert {session.store.ticket(c) for c in range((1000 - 104) // 64)} == {ticket}


STOCK = {"flash_attn": True, "swa_full": False}


@pytest.mark.parametrize("kind", ["dense", "hybrid", "iswa"])
def test_turns_and_cuts_equal_stock(kind: str, llama: Any, stock: Any, tokens: Any) -> None:
    """Several turns of a conversation, and another end after a cut, with the default policy and the default reading."""
    size = {"n_ctx": N_CTX, "n_batch": 128, "n_ubatch": 128}
    settings = {"kvflash_policy": "qk", "kvflash_reading": "auto", "kvflash_answer": "exact"}
    ours, theirs = llama(kind, kvflash=POOL, **settings, **size), stock(kind, **STOCK, **size)
    llms = ours, theirs

    def go_on(text: Any) -> None:
        for llm in llms:
            llm.eval(text.tolist())
        assert_same(*(row(llm) for llm in llms))

    assert ours.kvflash.reading == "exact"
    for start, end in ((0, 700), (700, 701), (701, 1100), (1100, 1105)):
        go_on(tokens[start:end])
    if kind == "dense":  # stock hybrids and windows cannot be cut
        for llm in llms:
            llm.n_tokens = 650
            llm._ctx.kv_cache_seq_rm(-1, 650, -1)
        go_on(tokens[2000:2400])
    assert ours.kvflash.streamed_steps > 5
    assert ours.kvflash.last.read_whole == ours.kvflash.last.read > 0


@pytest.mark.parametrize("logits_all", [False, True])
@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_small_n_batch_streams_a_text_as_often_as_the_default(
    kind: str, logits_all: bool, llama: Any, tokens: Any, caplog: Any
) -> None:
    """LangChain gives n_batch=8, and nobody an n_ubatch. Bytes, logits and pages are those of the default."""
    logs.warn_once.cache_clear()
    size = {
        "n_ctx": N_CTX,
        "n_ubatch": 512,
        "kvflash_policy": "qk",
        "kvflash_reading": "auto",
        "logits_all": logits_all,
    }
    small, usual = (llama(kind, kvflash=POOL, n_batch=n, **size) for n in (8, 512))
    assert (small.n_batch, small.context_params.n_ubatch) == (8, 512)
    [line] = [line for line in caplog.messages if "n_batch" in line]
    assert line.startswith("n_batch=8: ")
    for llm in (small, usual):
        llm.eval(tokens[:1500].tolist())
        llm.eval(tokens[1500:1501].tolist())
    assert small.kvflash.streamed_bytes == usual.kvflash.streamed_bytes
    assert 1 < small.kvflash.streamed_steps == usual.kvflash.streamed_steps < 10
    assert same_bits(row(small), row(usual))
    assert pages(inside(small).session) == pages(inside(usual).session)


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_text_that_lies_out_of_order_in_the_pool_equals_stock(
    kind: str, bare: Callable[..., Any], tokens: Any
) -> None:
    """All of it is resident, as after a cut of a longer one."""
    size = {"n_ctx": N_CTX, "n_ubatch": 128}
    order = [0, *range(POOL // 64 - 1, 0, -1)]
    ours = bare(kind, pool=POOL, stages=N_CTX, answers_exactly=True, block_order=order, **size)
    full = bare(kind, pool=N_CTX, **size)
    for start, end in ((0, 64), (64, 192), (192, 300), (300, 301), (301, 302)):
        for one in (ours, full):
            extend(one.session, tokens[start:end])
        assert_same(ours.row(), full.row())
    assert ours.session.whole[:302].all()
    assert ours.session.streamed_steps == 4


def test_a_text_of_a_smaller_pool_equals_stock_in_a_whole_one(
    llama: Any, stock: Any, tokens: Any, tmp_path: Path
) -> None:
    size = {"n_ctx": 1024, "n_batch": 128, "n_ubatch": 128}
    small, whole = llama(kvflash=POOL, kvflash_reading="exact", **size), llama(kvflash=1024, **size)
    theirs = stock(**STOCK, **size)
    for llm in (small, theirs):
        llm.eval(tokens[:900].tolist())
    small.save_snapshot(tmp_path / "text.kvs")
    whole.load_snapshot(tmp_path / "text.kvs")
    for llm in (whole, theirs):
        llm.eval(tokens[900:1000].tolist())
    assert_same(row(whole), row(theirs))


def test_a_small_n_batch_counts_where_nothing_is_streamed(llama: Any, stock: Any, tokens: Any) -> None:
    """A pool that holds the whole context takes stock's steps; so does one that has no stages, and a copy of it."""
    size = {"n_ctx": 1024, "n_batch": 8, "n_ubatch": 512}
    text = tokens[:300].tolist()
    ours, theirs = llama(kvflash=1024, kvflash_reading="auto", **size), stock(**STOCK, **size)
    steps: list[tuple[int, int]] = []
    ours.kvflash_progress = lambda done, total: steps.append((done, total))
    for llm in (ours, theirs):
        llm.eval(text)
    assert same_bits(row(ours), row(theirs))
    assert steps[0] == (8, 300)
    copy = pickle.loads(pickle.dumps(ours))
    copy.eval(text)
    assert copy.n_batch == 8
    assert same_bits(row(copy), row(theirs))
    copy.close()


def test_a_text_longer_than_the_stages(llama: Any, tokens: Any) -> None:
    """It is read with the best chunks in view, and how much that was is told."""
    settings = {"kvflash_policy": "qk", "kvflash_reading": "exact", "kvflash_stage": 1024}
    llm = llama("dense", kvflash=POOL, n_ctx=N_CTX, n_batch=128, n_ubatch=128, **settings)
    assert llm.kvflash.stage == 1024
    llm.eval(tokens[:1900].tolist())
    last = llm.kvflash.last
    assert last.read == 1900
    assert 0 < last.read_whole < 1900
    assert 0.5 < last.view < 1
    assert "1024 tokens in view" in llm.kvflash.banner()


def test_a_part_of_a_text_is_seen_as_a_pool_sees_it(
    bare: Callable[..., Any], tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through stages, and in a pool that has the same chunks, up to the order of sums: rung 4.

    Weights of F32, and a row a step, as kernels for other weights and for more rows round far more than that.
    """
    size = {"n_ctx": N_CTX, "n_ubatch": 128}
    ours, pool = bare("f32", pool=POOL, stages=1024, answers_exactly=True, **size), bare("f32", pool=N_CTX, **size)
    views, real = [], AttentionSpan.of

    def noted(self: AttentionSpan, *args: Any, **kwargs: Any) -> Any:
        views.append(real(self, *args, **kwargs))
        return views[-1]

    for one in (ours, pool):
        extend(one.session, tokens[:1500])
    put_pages(pool.session.engine, pages(ours.session))
    monkeypatch.setattr(AttentionSpan, "of", noted)
    extend(ours.session, tokens[1500:1501])
    view, whole = views[-1]
    assert not whole
    assert len(view.chunks) == (1024 - 1 - 1500 % 64) // 64 < 1500 // 64
    seen = [slot for chunk in view.chunks for slot in range(chunk * 64, chunk * 64 + 64)]

    def alone(visible: Any) -> Any:
        (logits,) = evaluate(pool, tokens[1500:1501], [1500], [1500], [visible])
        pool.session.engine.clear_cells(1500, 1)
        return logits

    recent = range(1472, 1500)
    part, less, everything = alone([*seen, *recent]), alone([*seen[64:], *recent]), alone(range(1500))
    assert np.abs(ours.row() - part).max() < 0.01
    assert np.abs(less - part).max() > 0.05
    assert np.abs(everything - part).max() > 0.05


def test_an_answer_is_of_the_pool(llama: Any, tokens: Any) -> None:
    llm = llama("dense", kvflash=POOL, n_ctx=N_CTX, kvflash_policy="qk", kvflash_reading="exact")
    llm.eval(tokens[:1280].tolist())
    steps = llm.kvflash.streamed_steps
    for token in tokens[3000:3010].tolist():
        llm.eval([token])
    last = llm.kvflash.last
    assert (last.generated, last.generated_whole) == (10, 0)
    assert llm.kvflash.streamed_steps == steps


def test_a_page_that_is_lost_is_read_again(llama: Any, stock: Any, tokens: Any, tmp_path: Any) -> None:
    """The file of a restored session is damaged before a streamed step reads all of it."""
    size = {"n_ctx": N_CTX, "n_batch": 128, "n_ubatch": 128}
    llm = llama("dense", kvflash=POOL, kvflash_reading="exact", **size)
    llm.eval(tokens[:1280].tolist())
    file = tmp_path / "text.kvs"
    llm.save_snapshot(file)
    llm.reset()
    llm.load_snapshot(file)
    data = bytearray(file.read_bytes())
    middle = len(data) // 2
    data[middle : middle + 4096] = bytes(4096)
    with file.open("r+b") as damaged:  # in place: it is open
        damaged.write(data)
    llm.eval(tokens[1280:1400].tolist())
    theirs = stock("dense", **STOCK, **size)
    theirs.eval(tokens[:1400].tolist())
    assert same_bits(row(llm), row(theirs))


def test_a_text_that_another_process_goes_on_with(
    llama: Any, stock: Any, model: Any, tokens: Any, tmp_path: Any
) -> None:
    """Restored from a file, read on and answered exactly: the bits of a full cache that was never away."""
    size = {"n_ctx": N_CTX, "n_batch": 128, "n_ubatch": 128, "n_threads": 1, "n_threads_batch": 1}
    exact = {"kvflash": POOL, "kvflash_policy": "qk", "kvflash_reading": "exact", "kvflash_answer": "exact"}
    file, plan, then = tmp_path / "text.kvs", tmp_path / "plan.json", tokens[1100:1250].tolist()
    llm = llama("dense", **exact, **size)
    llm.eval(tokens[:1100].tolist())
    llm.save_snapshot(file)
    points = {"end": {"path": str(file), "then": then}}
    settings = exact | size | {"kvflash_calibrate": False}
    plan.write_text(json.dumps({"model": str(model("dense")), "settings": settings, "points": points}))
    run = subprocess.run([*resume.COMMAND, plan], cwd=resume.TESTS, capture_output=True, text=True)
    assert run.returncode == 0, run.stderr[-2000:]
    found = json.loads(run.stdout)["end"]
    theirs = stock("dense", **STOCK, **size)
    theirs.eval(tokens[:1100].tolist())
    theirs.eval(then)
    assert found["length"] == 1100
    assert {name: found[name] for name in ("tokens", "digests")} == resume.go_on(theirs)


def test_memory_for_stages_that_is_refused(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The default goes on with the pool and says so; who asked for exact reading is told."""
    from kvflash_ggml.errors import HostMemoryError
    from kvflash_ggml.native.engine import PagedEngine

    def refuse(self: PagedEngine, slots: int, tokens: int) -> int:
        raise HostMemoryError(f"no memory for stages of {slots} slots")

    monkeypatch.setattr(PagedEngine, "make_stages", refuse)
    llm = llama("dense", kvflash=POOL, n_ctx=N_CTX, kvflash_reading="auto")
    assert llm.kvflash.reading == "pool"
    assert "no memory for stages of 2048 slots" in llm.kvflash.banner()
    with pytest.raises(HostMemoryError, match="no memory for stages"):
        llama("dense", kvflash=POOL, n_ctx=N_CTX, kvflash_reading="exact")


def test_memory_that_is_refused_within_a_prompt(llama: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A typed error; the steps before it count, and who asks again gets the bits of an undisturbed reading."""
    from types import SimpleNamespace

    from kvflash_ggml.errors import HostMemoryError
    from kvflash_ggml.native import engine

    size = {"n_ctx": N_CTX, "n_batch": 128, "n_ubatch": 128, "kvflash_policy": "qk", "kvflash_reading": "exact"}
    ours, theirs = (llama("hybrid", kvflash=POOL, **size) for _ in range(2))
    real, streamed = engine.lib, 0

    def refuse(one: Any, plan: Any) -> int:
        nonlocal streamed
        streamed += plan.n_streamed > 0
        return int(real.KVF_STATUS_MEMORY if streamed == 3 else real.kvf_step(one, plan))

    names = {name: getattr(real, name) for name in dir(real)}
    with monkeypatch.context() as patch:
        patch.setattr(engine, "lib", SimpleNamespace(**(names | {"kvf_step": refuse})))
        with pytest.raises(HostMemoryError):
            ours.eval(tokens[:1200].tolist())
    assert 0 < ours.n_tokens < 1200
    assert ours.n_tokens % 128 == 0
    ours.eval(tokens[ours.n_tokens : 1200].tolist())
    theirs.eval(tokens[:1200].tolist())
    assert same_bits(row(ours), row(theirs))
    assert pages(inside(ours).session) == pages(inside(theirs).session)


def test_what_an_answer_has_lost_outlives_a_text_that_is_read_again(
    llama: Any, tokens: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kvflash_ggml.errors import SnapshotError

    llm = llama("dense", kvflash=POOL, n_ctx=N_CTX, n_batch=128, n_ubatch=128, kvflash_reading="exact")
    llm.eval(tokens[:700].tolist())
    llm.eval([5])

    def lose(*args: Any, **kwargs: Any) -> None:
        monkeypatch.undo()
        raise SnapshotError("a page was damaged")

    monkeypatch.setattr(type(inside(llm).session), "prepare_answer", lose)
    llm.eval([6])
    last = llm.kvflash.last
    assert (last.read, last.generated, last.generated_whole) == (700, 2, 1)
    assert llm.n_tokens == 702


PLANS = {
    "too long": ({"n_streamed": 32}, "a streamed step over 2051 tokens, stages hold 2048"),
    "no image": ({"streamed": [0]}, "streamed chunk 0 has no page image"),
    "rows": ({"open_rows": 64}, "64 rows of block 0 in a streamed step"),
    "block": ({"open_rows": 3, "open_block": 8}, "3 rows of block 8 in a streamed step"),
    "mask": ({"mask_first": 63}, "a mask from row 63 on: 0, or 64"),
    "narrow mask": ({"mask_stride": 100}, "mask rows of 100 values for 192 rows of a stage"),
}


@pytest.mark.parametrize(("changed", "why"), PLANS.values(), ids=PLANS.keys())
def test_an_impossible_plan_is_refused(changed: Any, why: str, bare: Callable[..., Any], tokens: Any) -> None:
    from kvflash_ggml.native._kvf import ffi, lib

    session = bare(pool=POOL, stages=N_CTX, n_ctx=N_CTX, n_ubatch=128).session
    engine, plan = session.engine, session.engine._plan
    extend(session, tokens[:64])
    count = changed.get("n_streamed", 1)
    images = ffi.new("uint64_t[]", changed.get("streamed", [session.store.page(0).address] * count))
    fields = {"n_streamed": count, "streamed": images, "open_rows": 0, "open_block": 0, "mask_first": 64 * count}
    fields |= {"n_tokens": 3, "mask_stride": 512} | changed | {"streamed": images}
    engine.pos[:3], engine.slot[:3], engine.token[:3] = (64, 65, 66), (64, 65, 66), 5
    for name, value in fields.items():
        setattr(plan, name, value)
    assert lib.kvf_step(engine._engine, plan) == lib.KVF_STATUS_ARGUMENT
    assert ffi.string(lib.kvf_last_error()).decode().startswith(why)
    plan.n_streamed, plan.mask, plan.mask_stride = 0, engine._mask, engine.info.n_slots
    extend(session, tokens[64:100])
    assert session.length == 100


def test_a_streamed_step_without_images_is_refused(bare: Callable[..., Any], tokens: Any) -> None:
    """C++ would take it for a step that reads the pool, under the mask of a stage."""
    from kvflash_ggml.native.streamed import Streamed

    session = bare(pool=POOL, stages=N_CTX, n_ctx=N_CTX, n_ubatch=128).session
    codes: list[int] = []
    with pytest.raises(EngineError, match="over 0 page images, at least 1 is needed"):
        session.engine.step(3, 0, codes, Streamed([], 0, 0, np.zeros((3, 256), np.float16), 0))
    assert codes == []
    extend(session, tokens[:100])
    assert session.length == 100


def test_a_prompt_of_which_one_token_is_new_sees_everything(llama: Any, tokens: Any) -> None:
    """Its text is known but for the last token, which is of the prompt all the same."""
    llm = llama("dense", kvflash=POOL, n_ctx=N_CTX, kvflash_policy="qk", kvflash_reading="exact")
    prompt = tokens[:1300].tolist()
    first = next(llm.generate(prompt, temp=0.0))
    whole = row(llm)
    llm.eval(tokens[1400:1500].tolist())
    steps = llm.kvflash.streamed_steps
    assert next(llm.generate(prompt, temp=0.0)) == first
    assert llm.kvflash.streamed_steps > steps
    np.testing.assert_allclose(row(llm), whole, atol=0.3)  # alone, it is computed by other kernels
    assert llm.kvflash.last.read == llm.kvflash.last.read_whole > 0
