"""DFlash beside its target: it accepts what the measuring child says, whatever is cut, forgotten or moved meanwhile."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from support.harness import MODELS
from support.rounding import BLOCK, ON_GPU

from kvflash_ggml.arrays import Floats
from kvflash_ggml.sequence.prefill import extend

DRAFT = MODELS / "recall-dflash.gguf"
TARGET = MODELS / "recall-qwen3-q8_0.gguf"


@pytest.fixture(scope="module")
def known() -> Iterator[tuple[Any, list[Any]]]:
    """The target, and texts that it has gone on with."""
    from kvflash_ggml.native import library

    library.load()
    from kvflash_ggml.speculation import acceptance

    with ExitStack() as stack:
        target = acceptance.TargetModel(TARGET, (2, 4, 5), stack)
        yield target, [target.go_on(text, 48) for text in acceptance.TEXTS]


@pytest.fixture
def dflash(known: tuple[Any, list[Any]]) -> Iterator[Callable[..., Any]]:
    from kvflash_ggml.speculation.base import Target
    from kvflash_ggml.speculation.dflash import DFlash

    model = known[0]
    target = Target(
        path=TARGET, model=model.model, context=model.ctx, n_embd=model.width, n_vocab=model.n_vocab, n_ctx=4096
    )
    with ExitStack() as stack:

        def make(path: Path = DRAFT, **settings: Any) -> Any:
            drafter = DFlash(path, target, **settings)
            stack.callback(drafter.close)
            return drafter

        yield make


def accepted(drafter: Any, text: Any, between: Callable[[Any, int], None] = lambda drafter, root: None) -> list[int]:
    """How many drafts are the target's own at each place where it would be asked. between: done before each."""
    tokens, found = np.array(text.tokens, np.int32), []
    read, root = 0, text.prompt
    while root < len(tokens) - 1:
        drafter.observe(read, tokens[read:root], text.features[read:root])
        between(drafter, root)
        rest = tokens[root + 1 :]
        guess = drafter.propose(int(tokens[root]), 15).tokens[: len(rest)]
        same = int(np.logical_and.accumulate(guess == rest[: len(guess)]).sum())
        if same < len(rest):  # a block that the text ends in tells of no rejection
            found.append(same)
        read, root = root, root + same + 1
    return found


def test_it_accepts_what_another_program_does(dflash: Any, known: Any) -> None:
    """Beside the script that measured the drafter when it was trained."""
    import llama_cpp
    from train_recall.eval_dflash import Draft

    target, texts = known
    other = Draft(str(DRAFT), SimpleNamespace(ctx=target.ctx, n_vocab=4096), n_ctx=1024, threads=1)
    drafter = dflash()
    assert drafter.wants.layers == (2, 4, 5)
    total = []
    for text in texts:
        found = accepted(drafter, text)
        llama_cpp.llama_memory_clear(other.mem, True)
        wanted, read, root = [], 0, text.prompt
        while root < len(text.tokens) - 1:
            other.inject(text.features[read:root], read)
            rest = np.array(text.tokens[root + 1 :])
            guess = other.draft(text.tokens[root], root, n=15).argmax(1)[: len(rest)]
            same = int((guess == rest[: len(guess)]).cumprod().sum())
            wanted += [same] if same < len(rest) else []
            read, root = root, root + same + 1
        assert abs(np.mean(found) - np.mean(wanted)) < BLOCK.here if ON_GPU else found == wanted
        total += found
    assert np.mean(total) > 0.2


def test_the_child_that_measures(known: Any) -> None:
    from kvflash_ggml.speculation import acceptance
    from kvflash_ggml.speculation.dflash import DFlash

    target, texts = known
    drafter = DFlash(DRAFT, target.facts)
    answer = acceptance.answer(drafter, texts, drafter.size)
    found = [n for text in texts for n in accepted(drafter, text)]
    drafter.close()
    assert answer == {"accepted": pytest.approx(np.mean(found)), "steps": len(found), "block": 15}


def proposals(drafter: Any, text: Any, *, first: int, every: int = 5) -> list[list[int]]:
    """What is drafted at several places of a text, the rows between handed over as they come."""
    tokens, found, read = np.array(text.tokens, np.int32), [], 0
    for root in range(first, len(tokens) - 1, every):
        drafter.observe(read, tokens[read:root], text.features[read:root])
        found.append(drafter.propose(int(tokens[root]), 15).tokens.tolist())
        read = root
    return found


def test_rows_may_come_in_any_pieces(dflash: Any, known: Any) -> None:
    text = known[1][0]
    tokens, wanted = np.array(text.tokens, np.int32), proposals(dflash(), text, first=text.prompt)
    drafter, found = dflash(), []
    for at in range(len(tokens) - 1):
        if at >= text.prompt and (at - text.prompt) % 5 == 0:
            found.append(drafter.propose(int(tokens[at]), 15).tokens.tolist())
        rows = text.features[at : at + 1].copy()
        drafter.observe(at, tokens[at : at + 1], rows)
        rows[:] = np.nan  # the buffer is the caller's
    assert found == wanted


def test_a_cut_is_a_text_that_ends_there(dflash: Any, known: Any) -> None:
    one, other = known[1][0], known[1][3]
    length = one.prompt - 3
    drafter = dflash()
    proposals(drafter, one, first=one.prompt)
    drafter.truncate(length)
    tokens = np.array(one.tokens, np.int32)
    found = drafter.propose(int(tokens[length]), 15)
    fresh = dflash()
    fresh.observe(0, tokens[:length], one.features[:length])
    wanted = fresh.propose(int(tokens[length]), 15)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.logp == pytest.approx(wanted.logp, abs=0.1)

    drafter.truncate(0)
    assert drafter.propose(5, 15) is None
    assert proposals(drafter, other, first=other.prompt) == proposals(dflash(), other, first=other.prompt)


def test_without_rows_it_starts_anew(dflash: Any, known: Any) -> None:
    """A text that was put back: nothing is proposed until there are rows, and then from these."""
    text = known[1][0]
    tokens, late = np.array(text.tokens, np.int32), text.prompt + 8
    drafter = dflash()
    drafter.observe(0, tokens[: text.prompt], None)
    assert drafter.propose(int(tokens[text.prompt]), 15) is None
    drafter.observe(late, tokens[late : late + 20], text.features[late : late + 20])  # there may be a gap
    draft = drafter.propose(int(tokens[late + 20]), 15)
    fresh = dflash()
    fresh.observe(late, tokens[late : late + 20], text.features[late : late + 20])
    assert draft.tokens.tolist() == fresh.propose(int(tokens[late + 20]), 15).tokens.tolist()


def test_it_sees_a_window(dflash: Any, known: Any, tokens: Any) -> None:
    """Far behind the window a draft is that of a drafter which never saw what lies before it."""
    text = known[0].go_on("\n".join(f"{i} is the number before {i + 1}" for i in range(400)), 64)
    ids = np.array(text.tokens, np.int32)
    assert len(ids) > 3000
    drafter, read = dflash(window=512), 0
    for root in range(40, len(ids) - 1, 171):
        drafter.observe(read, ids[read:root], text.features[read:root])
        found, read = drafter.propose(int(ids[root]), 15), root
        assert drafter._context.end - drafter._context.first <= 512 + 256
    first = drafter._context.first
    assert read - first >= 512 - 16
    fresh = dflash(window=1024)
    fresh.observe(first, ids[first:read], text.features[first:read])
    wanted = fresh.propose(int(ids[read]), 15)
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.logp == pytest.approx(wanted.logp, abs=0.1)


def test_a_draft_is_as_long_as_asked(dflash: Any, known: Any) -> None:
    from kvflash_ggml.speculation.draft import checked

    text = known[1][1]
    drafter = dflash()
    drafter.observe(0, np.array(text.tokens[: text.prompt], np.int32), text.features[: text.prompt])
    for most in (1, 3, 15, 40):
        draft = drafter.propose(text.tokens[text.prompt], most)
        assert len(draft) == min(most, 15)
        assert draft.is_chain
        assert checked(draft, n_vocab=4096, max_tokens=most) is not draft
        assert (draft.logp <= 0).all()


def test_values_that_are_no_numbers(dflash: Any, known: Any) -> None:
    from kvflash_ggml.errors import DecodeError

    text = known[1][0]
    drafter, ids = dflash(), np.array(text.tokens, np.int32)
    drafter.observe(0, ids[:20], np.full((20, 768), np.nan, np.float32))
    with pytest.raises(DecodeError, match="not finite"):
        drafter.propose(int(ids[20]), 15)
    drafter.truncate(0)
    assert proposals(drafter, text, first=text.prompt) == proposals(dflash(), text, first=text.prompt)


def test_rows_of_another_width(dflash: Any, known: Any) -> None:
    from kvflash_ggml.errors import EngineError

    text = known[1][0]
    drafter, ids = dflash(), np.array(text.tokens, np.int32)
    drafter.observe(0, ids[:20], np.zeros((20, 512), np.float32))
    with pytest.raises(EngineError, match="rows of 512 values"):
        drafter.propose(int(ids[20]), 15)
    drafter.truncate(0)
    assert proposals(drafter, text, first=text.prompt) == proposals(dflash(), text, first=text.prompt)


CHANGES: dict[str, tuple[dict[str, Any], str]] = {
    "another architecture": ({"general.architecture": "qwen3"}, "general.architecture"),
    "a block of one": ({"dflash.block_size": 1}, "block size is 1; wanted: 2 to 64"),
    "no mask": ({"tokenizer.ggml.mask_token_id": None}, "mask_token_id is not there"),
    "a mask that is none": ({"tokenizer.ggml.mask_token_id": 4096}, "mask token"),
    "no layers": ({"dflash.target_layers": None}, "target_layers"),
    "layers that the target has not": ({"dflash.target_layers": [2, 4, 9]}, r"inputs up to 5"),
    "what comes out of the last layer": ({"dflash.target_layers": [2, 4, 6]}, r"inputs up to 5"),
    "a window for no layer": (
        {"dflash.attention.sliding_window": 512, "dflash.attention.sliding_window_pattern": [False, False]},
        "wanted: a pattern with a layer that has the window",
    ),
    "an epsilon that is none": ({"dflash.attention.layer_norm_rms_epsilon": float("nan")}, "epsilon is nan"),
    "another width": ({"dflash.embedding_length": 128}, "hidden size is 128; wanted: 256"),
    "fewer tokens": ({"tokenizer.ggml.tokens": ["a", "b", "c"], "tokenizer.ggml.mask_token_id": 2}, "vocabulary"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_file_that_does_not_fit_is_refused(dflash: Any, tmp_path: Path, name: str) -> None:
    from support.checkpoints import array, rewritten, text

    from kvflash_ggml.errors import ConversionError
    from kvflash_ggml.gguf.reader import Field

    changes, why = CHANGES[name]

    def change(fields: dict[str, Field]) -> None:
        for key, value in changes.items():
            fields.pop(key, None)
            if isinstance(value, list) and isinstance(value[0], str):
                fields[key] = array(key, 8, [text(item) for item in value])
            elif value is not None:
                fields[key] = Field.of(key, value)

    file = rewritten(DRAFT, tmp_path / "draft.gguf", change)
    with pytest.raises(ConversionError, match=why) as refused:
        dflash(file)
    assert "draft.gguf" in str(refused.value) or TARGET.name in str(refused.value)


def test_what_llama_cpp_refuses(dflash: Any, tmp_path: Path) -> None:
    from kvflash_ggml.errors import ConversionError

    cut = tmp_path / "draft.gguf"
    cut.write_bytes(DRAFT.read_bytes()[:-5000])
    with pytest.raises(ConversionError):
        dflash(cut)
    (tmp_path / "none.gguf").write_bytes(b"")
    with pytest.raises(ConversionError):
        dflash(tmp_path / "none.gguf")


def test_closed_twice(dflash: Any) -> None:
    drafter = dflash()
    drafter.close()
    drafter.close()


def test_beside_a_pool(bare: Any, known: Any, model: Any) -> None:
    """The target's context and its rows are those of a pool: the same drafts, as the text fits."""
    from kvflash_ggml.speculation.base import Target
    from kvflash_ggml.speculation.dflash import DFlash

    text = known[1][0]
    ids = np.array(text.tokens, np.int32)
    one = bare(pool=512, n_ctx=512)
    engine, address = one.session.engine, ctypes.cast(one._ctx.ctx, ctypes.c_void_p).value
    target = Target(
        path=TARGET, model=ctypes.cast(one._ctx.model.model, ctypes.c_void_p).value, context=address,
        n_embd=256, n_vocab=4096, n_ctx=512,
    )  # fmt: skip
    drafter = DFlash(DRAFT, target)
    try:
        width = engine.open_features(drafter.wants.layers)

        def after(start: int, count: int) -> None:
            rows = np.empty((count, width), np.float32)
            engine.read_features(0, rows)
            drafter.observe(start, ids[start : start + count], rows)

        found = []
        for first, last in ((0, text.prompt), (text.prompt, text.prompt + 5), (text.prompt + 5, text.prompt + 6)):
            extend(one.session, ids[first:last], after=after)
            found.append(drafter.propose(int(ids[last]), 15))
    finally:
        drafter.close()
    fresh, read = DFlash(DRAFT, replace(target, model=known[0].model, context=known[0].ctx)), 0
    for draft, last in zip(found, (text.prompt, text.prompt + 5, text.prompt + 6), strict=True):
        fresh.observe(read, ids[read:last], text.features[read:last])
        wanted, read = fresh.propose(int(ids[last]), 15), last
        assert draft.tokens[:4].tolist() == wanted.tokens[:4].tolist()
        assert draft.logp[:4] == pytest.approx(wanted.logp[:4], abs=0.2)
    fresh.close()


# --- DFlash2 and DSpark: made of the plain one, so that what they add changes nothing


def with_more(out: Path, keys: dict[str, Any], arrays: dict[str, Floats]) -> Path:
    """The drafter with further fields and tensors."""
    from support.checkpoints import tensor_bytes, write_gguf

    from kvflash_ggml.gguf import reader
    from kvflash_ggml.gguf.reader import Field

    fields = dict(reader.read(DRAFT).fields) | {f"dflash.{k}": Field.of(f"dflash.{k}", v) for k, v in keys.items()}
    own = {
        name: np.frombuffer(raw, np.float32 if kind == "f32" else np.float16).reshape(shape[::-1])
        for name, (kind, shape, raw) in tensor_bytes(DRAFT).items()
    }
    return write_gguf(out, list(fields.values()), own | arrays)


def random(*shape: int) -> Floats:
    return np.random.default_rng(3).normal(size=shape).astype(np.float32)


def dflash2(out: Path, k: int = 8) -> Path:
    """Its convolutions are the identity, and no token is likelier after another."""
    rank, kernel, group, hidden = 16, 3, 64, 256
    arrays: dict[str, Floats] = {
        "selector_predecessor.weight": random(4096, rank),
        "selector_successor.weight": random(4096, rank),
        "selector_hidden.weight": np.zeros((rank, hidden), np.float32),
    }
    identity = np.zeros((2, kernel, hidden), np.float32)
    identity[:, 0] = 1
    for layer in range(2):
        for part in ("attn", "ffn"):
            arrays[f"blk.{layer}.{part}_conv_base"] = identity
            zeros = np.zeros((2 * kernel * (hidden // group), hidden), np.float32)
            arrays[f"blk.{layer}.{part}_conv_proj.weight"] = zeros
    keys = {"conv_kernel_size": kernel, "conv_group_size": group, "selector_rank": rank, "selector_top_k": k}
    return with_more(out, keys, arrays)


def dspark(out: Path, *, anchor: bool, confidence: float | None = None) -> Path:
    """Its Markov head adds nothing, and it is equally sure of all."""
    arrays = {"markov_w1.weight": random(4096, 8), "markov_w2.weight": np.zeros((4096, 8), np.float32)}
    if confidence is not None:
        arrays["conf_proj.weight"] = np.zeros((1, 256 + 8), np.float32)
        arrays["conf_proj.bias"] = np.array([confidence], np.float32)
    return with_more(out, {"sample_from_anchor": anchor}, arrays)


def drafts(drafter: Any, text: Any, most: int = 16) -> Any:
    ids = np.array(text.tokens, np.int32)
    drafter.observe(0, ids[: text.prompt], text.features[: text.prompt])
    return drafter.propose(int(ids[text.prompt]), most)


def test_dflash2_reads_its_lattice(dflash: Any, known: Any, tmp_path: Path) -> None:
    file = dflash2(tmp_path / "draft.gguf")
    for text in known[1]:
        plain, drafter = dflash(), dflash(file)
        wanted, found = drafts(plain, text), drafts(drafter, text)
        assert found.source == "dflash2"
        assert found.is_chain
        assert found.tokens.tolist() == wanted.tokens.tolist()
        # of the eight likeliest, where the plain one counts all tokens
        assert (found.logp >= wanted.logp - 1e-3).all()
        assert len(drafts(drafter, text, 3)) == 3
        tree = drafts(dflash(file, branches=4), text, 24)
        other = drafts(dflash(branches=8), text, 24)
        assert len(tree) == 24
        assert not tree.is_chain
        assert len({*zip(tree.parent.tolist(), tree.tokens.tolist(), strict=True)}) == 24
        assert tree.tokens[0] == wanted.tokens[0] == other.tokens[0]


@pytest.mark.parametrize("anchor", [True, False])
@pytest.mark.parametrize("confidence", [None, -1.0])
def test_dspark_reads_its_chain(
    dflash: Any, known: Any, tmp_path: Path, anchor: bool, confidence: float | None
) -> None:
    """The root's own row drafts too if the file says so; what it says of acceptance is its probability."""
    drafter = dflash(dspark(tmp_path / "draft.gguf", anchor=anchor, confidence=confidence))
    for text in known[1]:
        wanted, found = drafts(dflash(), text), drafts(drafter, text)
        assert found.source == "dspark"
        assert len(found) == 15 + anchor
        assert found.tokens[anchor:].tolist() == wanted.tokens.tolist()
        if confidence is None:
            assert found.logp[anchor:] == pytest.approx(wanted.logp, abs=1e-3)
        else:
            assert found.logp == pytest.approx(np.full(15 + anchor, -np.log1p(np.e)), abs=1e-5)
        assert len(drafts(drafter, text, 2)) == 2


def test_a_tree_of_a_plain_block(dflash: Any, known: Any) -> None:
    text = known[1][0]
    chain, tree = drafts(dflash(), text), drafts(dflash(branches=4), text, 24)
    assert tree.source == "dflash"
    assert len(tree) == 24
    depths = tree.depths()
    assert depths.max() <= 15
    assert tree.tokens[0] == chain.tokens[0]
    assert tree.first(1).parent.tolist() == [-1]
