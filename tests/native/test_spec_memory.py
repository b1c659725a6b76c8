"""What a drafter knows of a text is put aside with the text, and comes back with it."""

from __future__ import annotations

import json
import logging
import subprocess
from collections.abc import Callable
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import MODELS
from support.inside import inside
from support.resume import TESTS
from support.resume_drafting import COMMAND, go_on

from kvflash_ggml.config import SpecConfig
from kvflash_ggml.errors import SnapshotError
from kvflash_ggml.state.blob import Bytes

KINDS: dict[str, tuple[str, str, Path | None]] = {
    "dflash": ("dense", "draft-dflash", MODELS / "recall-dflash.gguf"),
    "trees": ("dense", "draft-dflash", MODELS / "recall-dflash.gguf"),
    "eagle3": ("dense", "draft-eagle3", MODELS / "recall-eagle3-q8_0.gguf"),
    "mtp": ("hybrid", "draft-mtp", MODELS / "mtp-recall-qwen35-q8_0.gguf"),
    "headed": ("headed", "draft-mtp", None),
    "small": ("dense", "draft-simple", MODELS / "scorer-qwen3-q8_0.gguf"),
    "ngram": ("dense", "ngram", None),
}
WIDTH, COUNT = 4, 40
SETTINGS = {
    "n_ctx": 1024, "n_batch": 256, "kvflash": 1024, "kvflash_policy": "lru", "kvflash_calibrate": False,
    "kvflash_reading": "pool", "n_threads": 1, "n_threads_batch": 1, "seed": 7,
}  # fmt: skip
WINDOW = 512

every_kind = pytest.mark.parametrize("kind", list(KINDS))
with_memory = pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ngram"])


def rows(kind: str) -> dict[str, int]:
    """One row at a time, so that drafts change no bit, where neither recurrent state nor trees need them together."""
    return {"n_ubatch": 1 if KINDS[kind][0] == "dense" and kind != "trees" else 128}


def spec(kind: str, **settings: Any) -> SpecConfig:
    _, name, file = KINDS[kind]
    shape: dict[str, Any] = {"width": 9, "tree": True} if kind == "trees" else {"width": WIDTH}
    return SpecConfig(**{"types": (name,), "draft": file, "window": WINDOW} | shape | settings)


@pytest.fixture
def drafting(llama: Any) -> Callable[..., Any]:
    """Makes a model with a drafter of a kind."""

    def make(kind: str, **settings: Any) -> Any:
        return llama(KINDS[kind][0], **SETTINGS | rows(kind) | {"kvflash_spec": spec(kind)} | settings)

    return make


@pytest.fixture
def prompt(tokens: Any) -> list[int]:
    """Longer than the window, and easy to go on with."""
    text: list[int] = np.tile(tokens[:220], 3)[:620].tolist()
    return text


def within_a_block(llm: Any, prompt: list[int]) -> Any:
    """A stream that was told some of the rows of a step, and not the others."""
    stream = llm.generate(prompt, temp=0.0)
    for _ in islice(stream, 120):
        ahead = inside(llm).session.draft_rows
        if ahead is not None and 2 <= ahead.kept < len(ahead.tokens):
            return stream
    raise AssertionError("no draft was accepted")


def drafter_of(llm: Any) -> Any:
    return inside(llm).speculator.active[0].drafter


@every_kind
def test_another_process_goes_on_alike(kind: str, drafting: Any, prompt: Any, model: Any, tmp_path: Path) -> None:
    """Saved in the middle of a block that was accepted: the same bits, in the same steps."""
    llm = drafting(kind)
    stream = within_a_block(llm, prompt)
    path = tmp_path / "session.kvs"
    llm.save_snapshot(path)
    stream.close()
    wanted = go_on(llm, COUNT)
    assert wanted["steps"][3] > 0
    one = spec(kind)
    plan = {
        "model": str(model(KINDS[kind][0])),
        "settings": SETTINGS | rows(kind),
        "spec": {
            "types": one.types, "draft": one.draft and str(one.draft), "width": one.width, "window": one.window,
            "tree": one.tree,
        },
        "path": str(path),
        "count": COUNT,
    }  # fmt: skip
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    done = subprocess.run([*COMMAND, str(tmp_path / "plan.json")], cwd=TESTS, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == wanted


def held_of(llm: Any) -> tuple[int, int, int]:
    """What its drafter holds: the first position, the end, and how many bytes."""
    context = drafter_of(llm)._context
    return context.first, context.end, len(context.state())


@with_memory
def test_a_text_that_was_saved_is_known(
    kind: str, drafting: Any, prompt: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """By a file, by a state, and parked: what the drafter holds is what it held."""
    llm = drafting(kind)
    within_a_block(llm, prompt).close()
    state, parked = llm.save_state(), llm.park()
    llm.save_snapshot(tmp_path / "session.kvs")
    held = held_of(llm)
    assert 0 < held[1] - held[0] < len(prompt)
    wanted = go_on(llm, COUNT)

    def back(how: Callable[[], object]) -> None:
        llm.reset()
        llm.eval(prompt[5:50])
        how()
        assert held_of(llm) == held
        assert go_on(llm, COUNT) == wanted

    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        back(lambda: llm.load_state(state))
        back(lambda: llm.resume(parked))
        back(lambda: llm.load_snapshot(tmp_path / "session.kvs"))
        back(lambda: llm.resume(parked))
    assert not caplog.records
    parked.release()


@pytest.mark.parametrize("other", ["dflash", "small", "ngram"])
def test_another_drafter_begins_anew(
    other: str, drafting: Any, prompt: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    llm = drafting("eagle3")
    within_a_block(llm, prompt).close()
    llm.save_snapshot(tmp_path / "session.kvs")
    wanted = go_on(llm, COUNT)
    taker = drafting(other)
    with caplog.at_level(logging.WARNING, "kvflash_ggml"):
        taker.load_snapshot(tmp_path / "session.kvs")
    found = go_on(taker, COUNT)
    assert (found["tokens"], found["digests"]) == (wanted["tokens"], wanted["digests"])
    told = [record.message for record in caplog.records]
    assert told == ([] if other == "ngram" else [told[0]])
    assert other == "ngram" or "starts anew behind the restored text" in told[0]


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "small"])
def test_another_window_or_file_begins_anew(
    kind: str, drafting: Any, prompt: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It drafts as one that was just made and has been given the same file without its part."""
    llm = drafting(kind)
    within_a_block(llm, prompt).close()
    llm.save_snapshot(tmp_path / "session.kvs")
    length, wanted = llm.n_tokens, go_on(llm, COUNT)
    file = KINDS[kind][2]
    assert file is not None
    copied = tmp_path / file.name
    copied.write_bytes(file.read_bytes())
    with copied.open("ab") as out:
        out.write(b"\0")
    for settings in (spec(kind, window=768), spec(kind, draft=copied)):
        taker = drafting(kind, kvflash_spec=settings)
        caplog.clear()
        with caplog.at_level(logging.WARNING, "kvflash_ggml"):
            taker.load_snapshot(tmp_path / "session.kvs")
        assert [record.message for record in caplog.records] == [
            f"{drafter_of(taker).name} starts anew behind the restored text: it was saved by another drafter file, or "
            "with another window"
        ]
        context = drafter_of(taker)._context
        assert context.first == context.end
        found = go_on(taker, COUNT)
        assert (found["tokens"], found["digests"]) == (wanted["tokens"], wanted["digests"])
        assert kind == "small" or context.first >= length - 1
        if settings.draft == copied:
            again = tmp_path / "again.gguf"
            again.write_bytes(copied.read_bytes())
            again.replace(copied)
            caplog.clear()
            taker.save_snapshot(tmp_path / "other.kvs")
            assert "is not saved" in caplog.text
            taker.load_snapshot(tmp_path / "other.kvs")


@with_memory
def test_nothing_of_another_text_is_left(kind: str, drafting: Any, prompt: Any, tokens: Any) -> None:
    """A text that comes back without what a drafter knew of it: that drafts as in a model that was just made."""
    llm = drafting(kind)
    llm.eval(prompt)
    saved = inside(llm).saved(None, drafts=False)
    llm.reset()
    list(islice(llm.generate(tokens[2000:2900].tolist(), temp=0.0), 20))
    llm.resume(saved)
    fresh = drafting(kind)
    fresh.load_state(state_of(llm, saved))
    assert go_on(llm, COUNT) == go_on(fresh, COUNT)
    assert held_of(llm) == held_of(fresh)
    saved.release()


def state_of(llm: Any, saved: Any) -> Any:
    import llama_cpp

    data = inside(llm).snapshot_store.dump(saved.share())
    return llama_cpp.LlamaState(
        scores=np.empty((0, 0)), input_ids=saved.tokens, n_tokens=saved.length, llama_state=data,
        llama_state_size=len(data), seed=7,
    )  # fmt: skip


def test_a_prefix_cache_does_not_keep_it(drafting: Any, prompt: Any) -> None:
    from kvflash_ggml import PrefixCache

    llm = drafting("eagle3")
    llm.set_cache(PrefixCache())
    list(islice(llm.generate(prompt, temp=0.0), 20))
    kept = list(inside(llm).prefixes._memory._texts)
    assert kept
    assert not any(one.drafts for one in kept)
    llm.eval([1])
    parked = llm.park()
    assert parked.drafts
    parked.release()


@with_memory
def test_hostile_bytes(kind: str, drafting: Any, prompt: Any, caplog: pytest.LogCaptureFixture) -> None:
    """Sizes and places that cannot be are refused, and the drafter goes on."""
    llm = drafting(kind)
    within_a_block(llm, prompt).close()
    (saved,) = inside(llm).speculator.state()
    drafter, rng = drafter_of(llm), np.random.default_rng(5)
    data, rows_ = bytes(saved.context.read()), bytes(saved.rows.read())
    wrong = [replace(saved, first=saved.first + 1), replace(saved, end=saved.end - 1), replace(saved, length=3)]
    wrong += [replace(saved, context=Bytes(part)) for part in (b"", data[:7], data[:-1], data + b"\0", data[:3000])]
    wrong += [replace(saved, rows=Bytes(rows_ + b"\0"))]
    if rows_:
        wrong += [replace(saved, rows=Bytes(np.full(len(rows_) // 4, np.nan, "<f4").tobytes()))]
    for one in wrong:
        with pytest.raises(SnapshotError):
            drafter.load(one)
        assert drafter._context.first == drafter._context.end
    for at in [*range(0, 80, 4), *rng.integers(20, 12 * (saved.end - saved.first), 60)]:
        for value in (0, 1, 0xFFFFFFFF, 0x7FFFFFFF, int(rng.integers(2**32))):
            changed = data[:at] + value.to_bytes(4, "little") + data[at + 4 :]
            try:
                drafter.load(replace(saved, context=Bytes(changed)))
            except SnapshotError:
                assert drafter._context.first == drafter._context.end
    everything = np.array(inside(llm).session.tokens)
    nothing = data[:-64] + b"\xff" * 64  # which are no numbers
    inside(llm).speculator.load([replace(saved, context=Bytes(nothing))], everything)
    assert "starts anew behind the restored text: " in caplog.text
    assert drafter._context.first == drafter._context.end
    inside(llm).speculator.load([saved], everything)
    assert inside(llm).speculator.off is None
    assert go_on(llm, 20)["steps"][0] > 0


@pytest.mark.parametrize("kind", ["dflash", "eagle3", "mtp"])
def test_what_is_left_out_of_a_long_prompt_changes_no_draft(kind: str, drafting: Any, tokens: Any) -> None:
    prompt = tokens[300:1200].tolist()

    def drafts(newest: int | None) -> tuple[list[Any], list[int], int]:
        llm = drafting(kind, n_ubatch=64, kvflash_spec=spec(kind, window=256))
        speculator, seen, reads = inside(llm).speculator, [], 0
        features, propose, read = speculator._features, drafter_of(llm).propose, speculator._features.read
        features.newest = newest or features.newest

        def proposed(root: int, most: int) -> Any:
            seen.append(propose(root, most))
            return seen[-1]

        def counted(count: int) -> Any:
            nonlocal reads
            reads += count
            return read(count)

        drafter_of(llm).propose, features.read = proposed, counted
        text = list(islice(llm.generate(prompt, temp=0.0), 20))
        return [None if one is None else one.tokens.tolist() for one in seen], text, reads

    whole, short = drafts(10_000), drafts(None)
    assert whole[:2] == short[:2]
    assert any(whole[0])
    assert whole[2] > len(prompt) > short[2]
