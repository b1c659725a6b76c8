"""The prefix cache on real models: what is known is not read again, and goes on bit for bit."""

from __future__ import annotations

import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import TEXT, check, row, same_bits
from support.inside import inside

from kvflash_bench.tasks import needle_task
from kvflash_ggml import KVFlashError, PrefixCache
from kvflash_ggml.pool.plan import ABSENT
from kvflash_ggml.snapshot.container import Container, FileSource
from kvflash_ggml.snapshot.format import LEDGER

KINDS = ("dense", "hybrid", "iswa")
POOL = {"n_ctx": 4096, "kvflash": 512, "kvflash_policy": "qk", "kvflash_tau": 8, "kvflash_reading": "pool"}
CHUNK = 64


@dataclass(frozen=True)
class Asked:
    """tokens: generated, greedily. read: how many of the prompt were evaluated."""

    tokens: list[int]
    read: int


def ask(llm: Any, prompt: Sequence[int], n: int = 10) -> Asked:
    totals = [0]
    llm.kvflash_progress = lambda done, total: totals.append(total)
    generator = llm.generate(list(map(int, prompt)), temp=0.0)
    out = [next(generator) for _ in range(n)]
    generator.close()
    check(llm)
    known = llm.n_tokens - (n - 1)
    assert known == len(prompt)
    return Asked(out, totals[-1])


@pytest.fixture
def texts(tokens: Any) -> dict[str, list[int]]:
    """A system prompt, and what three conversations go on with."""
    ids = tokens.tolist()
    return {"system": ids[:900], "a": ids[1500:2100], "b": ids[2500:2900], "c": ids[3000:3350], "more": ids[3500:3540]}


@pytest.fixture
def make(llama: Any, tmp_path: Path) -> Callable[..., Any]:
    """A Llama with a prefix cache: in memory, or in a folder of this test."""

    def make_llama(kind: str = "dense", *, where: str = "disk", least: int = 256, **kwargs: Any) -> Any:
        folder = tmp_path / "cache" if where == "disk" else None
        # without memory, so that it is the folder that is tested
        cache = PrefixCache(folder=folder, memory_bytes=0 if where == "disk" else 1 << 30, least=least)
        return llama(kind, **{**POOL, "kvflash_cache": cache, **kwargs})

    return make_llama


def settle(llm: Any) -> None:
    """What is being written is in the folder."""
    inside(llm).prefixes.flush()


def cache_files(tmp_path: Path, kind: str) -> list[Path]:
    return sorted((tmp_path / "cache").glob(f"*/*.{kind}"))


# --- conversations


@pytest.mark.parametrize("where", ["memory", "disk"])
@pytest.mark.parametrize("kind", KINDS)
def test_conversations_that_share_a_system_prompt(kind: str, where: str, make: Any, texts: Any) -> None:
    llm = make(kind, where=where)
    first = ask(llm, texts["system"] + texts["a"])
    assert first.read == 1500
    settle(llm)
    second = ask(llm, texts["system"] + texts["b"])
    settle(llm)
    third = ask(llm, texts["system"] + texts["c"])
    settle(llm)
    if kind == "dense":
        assert (second.read, third.read) == (400, 350)  # the text at hand can be cut anywhere
    else:
        # a checkpoint is taken where the second text is seen to leave the first; a folder knows whole chunks
        assert (second.read, third.read) == (1300, 1250 - (900 if where == "memory" else 896))

    # back in the first conversation, here or in another process
    turn = texts["system"] + texts["a"] + first.tokens + texts["more"]
    if where == "disk":
        llm.close()
        llm = make(kind)
    assert ask(llm, turn).read == len(turn) - (1500 + 9)

    # the end of a prompt comes with its logits
    for name, before in (("b", second), ("c", third), ("b", second)):
        again = ask(llm, texts["system"] + texts[name])
        assert again.read == 0
        # the second text has read the system prompt by itself, and the folder has it as the first one did: that may
        # differ in rounding, which the random weights of this model show
        assert again.tokens == before.tokens or (kind == "iswa" and where == "disk")


@pytest.mark.parametrize("kind", KINDS)
def test_a_fresh_process_goes_on_bit_for_bit(kind: str, make: Any, model: Any, texts: Any, tmp_path: Path) -> None:
    llm = make(kind)
    prompt = texts["system"] + texts["a"]
    first = ask(llm, prompt)
    settle(llm)
    turn = prompt + first.tokens + texts["more"]
    shutil.copytree(tmp_path / "cache", tmp_path / "copy")  # or each would find what the other has just read
    done = subprocess.run(
        [sys.executable, "-c", ELSEWHERE, str(model(kind)), str(tmp_path / "copy"), json.dumps(turn)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    theirs = json.loads(done.stdout)
    ours = ask(llm, turn)
    assert theirs["read"] == ours.read == len(turn) - 1509
    assert theirs["tokens"] == ours.tokens
    assert theirs["row"] == row(llm).tobytes().hex(), "the last logits differ"


ELSEWHERE = f"""
import json, os, sys
from kvflash_ggml import Llama, PrefixCache
import numpy as np
model, folder, turn = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
layers = int(os.environ.get("KVFLASH_TEST_GPU_LAYERS", "0"))
llm = Llama(model, n_threads=1, n_threads_batch=1, n_batch=256, n_ubatch=256, seed=7, verbose=False,
            n_gpu_layers=layers, kvflash_cache=PrefixCache(folder=folder), **{POOL!r})
totals = [0]
llm.kvflash_progress = lambda done, total: totals.append(total)
generator = llm.generate(turn, temp=0.0)
out = [next(generator) for _ in range(10)]
row = np.ctypeslib.as_array(llm._ctx.get_logits_ith(-1), shape=(llm.n_vocab(),)).tobytes().hex()
generator.close()
llm.close()
print(json.dumps(dict(tokens=out, read=totals[-1], row=row)))
"""


@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_tail_continues_like_the_session_that_stored_it(kind: str, make: Any, texts: Any) -> None:
    llm = make(kind, where="memory")
    first = ask(llm, texts["system"] + texts["a"])
    turn = texts["system"] + texts["a"] + first.tokens + texts["more"]
    straight = ask(llm, turn)
    logits = row(llm)
    ask(llm, texts["b"])
    # the later turn is forgotten, so that it is the earlier one that is gone on from
    for entry in list(inside(llm).prefixes._memory._texts):
        if entry.length > 1509:
            inside(llm).prefixes._memory.drop(entry)
    again = ask(llm, turn)
    assert again == straight
    assert same_bits(row(llm), logits)


def test_a_beginning_that_a_folder_has_from_another_reading(make: Any, llama: Any, texts: Any, tmp_path: Path) -> None:
    """Another text has read it, in other steps. That is rounding where prompts are read exactly; the pool has had other
    chunks resident.
    """
    whole, off = texts["system"] + texts["a"], {}
    for reading in ("exact", "pool"):
        alone = llama(**POOL | {"kvflash_reading": reading})
        ask(alone, whole, 1)
        other = make(kvflash_reading=reading)
        ask(other, whole[:777] + texts["b"], 1)
        other.close()
        after = make(kvflash_reading=reading)
        assert ask(after, whole, 1).read == 1500 - 768
        off[reading] = np.abs(row(after) - row(alone)).max()
        after.close()
        shutil.rmtree(tmp_path / "cache")
    assert off["exact"] < off["pool"] / 4, off


def test_a_pool_that_holds_the_whole_context(make: Any, texts: Any) -> None:
    for where in ("memory", "disk"):
        llm = make("hybrid", where=where, kvflash=4096)
        first = ask(llm, texts["system"] + texts["a"])
        ask(llm, texts["b"])
        settle(llm)
        turn = texts["system"] + texts["a"] + first.tokens + texts["more"]
        again = ask(llm, turn)
        assert again.read == len(turn) - 1509
        llm.set_cache(None)
        llm.reset()
        assert ask(llm, turn).read == len(turn)


def test_the_needle_is_found_after_a_restore(make: Any, llama: Any) -> None:
    """By the default policy, among chunks that were never in the pool of this process."""
    llm = make()
    tokenize = lambda text: llm.tokenize(text.encode(), add_bos=False)  # noqa: E731
    task = needle_task(TEXT.read_text(), tokenize, n_tokens=2400, depth=0.2, seed=3)
    document = tokenize(task.document)
    ask(llm, document)
    settle(llm)
    llm.close()

    llm = make()
    prompt = tokenize(task.prompt)
    answer = ask(llm, prompt, 12)
    assert answer.read < 100
    assert llm.kvflash.page_ins > 0
    assert task.is_correct(llm.detokenize(answer.tokens).decode())


# --- what is damaged


def damage(tmp_path: Path, at: int) -> tuple[Path, bytes]:
    """Change a bit of the largest run. Returns it, and what it holds now."""
    run = max(cache_files(tmp_path, "segment"), key=lambda path: path.stat().st_size)
    data = bytearray(run.read_bytes())
    data[at] ^= 1
    run.write_bytes(data)
    return run, bytes(data)


def evicted(tmp_path: Path) -> list[int]:
    """The chunks that are not in the pool at any end of a prompt or an answer."""
    tails = [Container(FileSource(path)).section("ledger").array(LEDGER) for path in cache_files(tmp_path, "tail")]
    ends = [tail["block"] for tail in tails if (tail["block"] >= 0).any()]
    return [c for c in range(4, 20) if all(blocks[c] == ABSENT for blocks in ends)]


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_lost_page_is_noticed_when_it_is_needed(
    kind: str, make: Any, llama: Any, texts: Any, tmp_path: Path, caplog: Any
) -> None:
    """Everything is read again with a fresh state, the log says so, and the next process is spared that."""
    prompt = texts["system"] + texts["a"]
    turn = prompt + texts["more"] + texts["c"]
    llm = make(kind)
    ask(llm, prompt)
    settle(llm)
    page_bytes = inside(llm).session.engine.info.page_bytes
    llm.close()
    run, data = damage(tmp_path, evicted(tmp_path)[0] * page_bytes + page_bytes // 2)

    llm = make(kind)
    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        again = ask(llm, turn)
    assert "the whole text is read again" in caplog.text
    assert "a file of the prefix cache is deleted" in caplog.text
    assert again.read == len(turn)
    assert not run.exists() or run.read_bytes() != data
    fresh = llama(kind, **POOL)
    assert ask(fresh, turn).tokens == again.tokens
    assert same_bits(row(llm), row(fresh))
    settle(llm)
    llm.close()

    caplog.clear()
    llm = make(kind)
    assert ask(llm, turn) == Asked(again.tokens, 0)
    assert not caplog.text


@pytest.mark.parametrize("what", ["segment", "tail"])
def test_a_damaged_file_is_as_none(what: str, make: Any, texts: Any, tmp_path: Path, caplog: Any) -> None:
    prompt = texts["system"] + texts["a"]
    llm = make("hybrid")
    first = ask(llm, prompt)
    llm.close()
    for path in cache_files(tmp_path, what):
        path.write_bytes(path.read_bytes()[:-100])
    llm = make("hybrid")
    assert ask(llm, prompt) == Asked(first.tokens, 1500)
    assert "deleted" in caplog.text


def test_a_damaged_resident_page_is_seen_before_anything_changes(
    make: Any, texts: Any, tmp_path: Path, caplog: Any
) -> None:
    prompt = texts["system"] + texts["a"]
    llm = make()
    first = ask(llm, prompt)
    llm.close()
    damage(tmp_path, 1000)  # in the first chunk, which is never evicted
    llm = make()
    assert ask(llm, prompt) == Asked(first.tokens, 1500)
    assert caplog.text.count("cannot be used") == 1
    assert caplog.text.count("deleted") == 1


def test_a_lost_page_is_lost_to_all_texts_that_have_it(
    make: Any, llama: Any, texts: Any, tmp_path: Path, caplog: Any
) -> None:
    prompt = texts["system"] + texts["a"]
    llm = make()
    first = ask(llm, prompt)
    page_bytes = inside(llm).session.engine.info.page_bytes
    llm.close()
    for chunk in evicted(tmp_path):  # the answer asks for one of them
        damage(tmp_path, chunk * page_bytes + page_bytes // 2)
    llm = llama("dense", **POOL, kvflash_cache=PrefixCache(folder=tmp_path / "cache"))
    ask(llm, prompt, 40)  # restored as a whole and kept in memory; the page is missed while the answer is made
    assert "the whole text is read again" in caplog.text
    caplog.clear()
    ask(llm, texts["b"])
    assert ask(llm, prompt).tokens[0] == first.tokens[0]
    assert not caplog.text


def test_a_full_disk_is_one_warning(
    make: Any, llama: Any, texts: Any, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    prompts = [texts["system"] + texts[name] for name in ("a", "b", "a")]
    bare = llama("dense", **POOL)
    want = [ask(bare, prompt).tokens for prompt in prompts]
    llm = make()
    with monkeypatch.context() as patch:

        def full(fd: int) -> None:
            raise OSError(28, "No space left on device")

        patch.setattr("kvflash_ggml.files.os.fsync", full)
        assert [ask(llm, prompt).tokens for prompt in prompts[:2]] == want[:2]
        settle(llm)
    assert caplog.text.count("could not be written") == 1
    assert "No space left on device: name a folder that can be written and has room for" in caplog.text
    assert not list((tmp_path / "cache").glob("*/*")), "something unfinished is left"
    assert ask(llm, prompts[2]) == Asked(want[2], 600), "from the text at hand, as without a cache"
    settle(llm)
    assert cache_files(tmp_path, "segment")


# --- room


def test_a_ceiling_on_host_memory(make: Any, texts: Any) -> None:
    """Texts that are only kept for later go before the one at hand runs out of memory."""
    probe = make(where="memory")
    page = inside(probe).session.engine.info.page_bytes
    llm = make(where="memory", kvflash_host_limit=40 * page)
    assert inside(llm).session.bounded
    for name in ("a", "b", "c", "a"):
        ask(llm, texts["system"] + texts[name])
        assert llm.kvflash.host_bytes <= 40 * page
    assert len(inside(llm).prefixes._memory) > 0
    assert ask(llm, texts["system"] + texts["a"]).read == 0


def test_a_ceiling_on_host_memory_and_a_folder(make: Any, texts: Any, monkeypatch: Any) -> None:
    """What waits to be written has pages too."""
    sync = os.fsync
    monkeypatch.setattr("kvflash_ggml.files.os.fsync", lambda handle: (time.sleep(0.2), sync(handle)))
    probe = make(where="memory")
    page = inside(probe).session.engine.info.page_bytes
    probe.close()
    llm = make("dense", kvflash_host_limit=28 * page)
    first = ask(llm, texts["system"] + texts["a"])
    ask(llm, texts["b"] + texts["c"] + texts["a"])
    ask(llm, texts["system"] + texts["b"])
    assert ask(llm, texts["system"] + texts["a"]) == Asked(first.tokens, 0)


def test_memory_keeps_to_its_size(make: Any, llama: Any, texts: Any) -> None:
    llm = llama("hybrid", **POOL, kvflash_cache=PrefixCache(memory_bytes=8 << 20))
    for name in ("a", "b", "c", "a", "b"):
        ask(llm, texts["system"] + texts[name])
        assert inside(llm).prefixes._memory.size <= 8 << 20
    memory = inside(llm).prefixes._memory
    assert len(memory) > 1
    llm.set_cache(None)
    assert len(memory) == 0
    assert llm.kvflash.host_bytes == len(list(inside(llm).session.store)) * inside(llm).session.engine.info.page_bytes


# --- settings and lifetimes


def test_without_a_pool_it_is_refused(llama: Any, tmp_path: Path) -> None:
    with pytest.raises(KVFlashError, match="make the Llama with kvflash="):
        llama(kvflash_cache=tmp_path)
    llm = llama()
    with pytest.raises(KVFlashError, match="make the Llama with kvflash="):
        llm.set_cache(PrefixCache())


@pytest.mark.parametrize("settings", [{"disk_bytes": -1}, {"memory_bytes": 1.5}, {"least": True}])
def test_bad_settings_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(KVFlashError, match="whole number"):
        PrefixCache(**settings)


def test_a_folder_that_cannot_be_used_is_refused(llama: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(KVFlashError, match="name a folder"):
        llama(**POOL, kvflash_cache=tmp_path / "file")


def test_caches_take_turns(make: Any, texts: Any, tmp_path: Path) -> None:
    from llama_cpp import LlamaRAMCache

    llm = make(where="memory")
    ask(llm, texts["system"] + texts["a"])
    llm.set_cache(PrefixCache(folder=tmp_path / "cache"))
    assert ask(llm, texts["system"] + texts["b"]).read == 400
    llm.set_cache(LlamaRAMCache())
    assert inside(llm).prefixes is None
    assert not inside(llm).session.paging.heap._reclaimers
    prompt = llm.detokenize(texts["system"]).decode()
    one = llm.create_completion(prompt, max_tokens=4, temperature=0.0)
    llm.create_completion("Something else", max_tokens=1)
    two = llm.create_completion(prompt, max_tokens=4, temperature=0.0)
    assert one["choices"] == two["choices"]
    llm.set_cache(None)
    assert llm.cache is None
    assert cache_files(tmp_path, "segment"), "what was under way when the cache was changed has been written"


def test_closing_waits_for_what_is_being_written(make: Any, texts: Any) -> None:
    llm = make()
    first = ask(llm, texts["system"] + texts["a"])
    llm.close()
    llm.close()
    llm = make()
    assert ask(llm, texts["system"] + texts["a"]) == Asked(first.tokens, 0)


def test_a_model_that_is_deleted_has_written_its_texts(make: Any, model: Any, texts: Any, tmp_path: Path) -> None:
    from kvflash_ggml import Llama

    cache = PrefixCache(folder=tmp_path / "cache", memory_bytes=0)
    llm = Llama(str(model("dense")), n_batch=256, n_ubatch=256, verbose=False, kvflash_cache=cache, **POOL)
    list(zip(range(3), llm.generate(texts["system"], temp=0.0), strict=False))
    del llm
    gc.collect()
    assert cache_files(tmp_path, "tail")


def test_a_generator_that_outlives_its_model(make: Any, texts: Any) -> None:
    llm = make(where="memory")
    generator = llm.generate(texts["system"], temp=0.0)
    next(generator)
    llm.close()
    generator.close()


def test_a_generator_that_is_closed_late_keeps_the_text_at_hand(make: Any, texts: Any) -> None:
    llm = make(where="memory")
    generator = llm.generate(texts["system"] + texts["a"], temp=0.0)
    next(generator)
    second = ask(llm, texts["system"] + texts["b"])
    generator.close()
    assert ask(llm, texts["system"] + texts["b"]) == Asked(second.tokens, 0)
    assert ask(llm, texts["system"] + texts["a"]).read == 0


def test_an_exception_in_the_middle_of_a_prompt(make: Any, texts: Any) -> None:
    llm = make("hybrid", where="memory")
    first = ask(llm, texts["system"] + texts["a"])

    def stop(done: int, total: int) -> None:
        if done >= 256:
            raise KeyboardInterrupt

    llm.kvflash_progress = stop
    with pytest.raises(KeyboardInterrupt):
        next(llm.generate(texts["c"] + texts["b"], temp=0.0))
    assert ask(llm, texts["system"] + texts["a"]) == Asked(first.tokens, 0)


def test_chat_turns_read_only_what_is_new(make: Any) -> None:
    """Through the public API, with two users who take turns."""
    llm = make(least=64)
    system = {"role": "system", "content": "You are terse. " * 60}
    users: dict[str, list[dict[str, str]]] = {"a": [system], "b": [system]}
    read: list[int] = []
    for turn in range(3):
        for name, messages in users.items():
            messages.append({"role": "user", "content": f"{name} asks for the {turn}th time about the sea."})
            totals = [0]
            llm.kvflash_progress = lambda done, total, totals=totals: totals.append(total)
            reply = llm.create_chat_completion(messages, max_tokens=8, temperature=0.0)
            messages.append({"role": "assistant", "content": reply["choices"][0]["message"]["content"] or "?"})
            settle(llm)
            read.append(totals[-1])
    assert read[0] > 200
    assert max(read[1:]) < 120


def test_short_texts_are_not_kept(make: Any, texts: Any, tmp_path: Path) -> None:
    llm = make()
    ask(llm, texts["system"][:200])
    ask(llm, texts["b"][:200])
    settle(llm)
    assert not cache_files(tmp_path, "*")
