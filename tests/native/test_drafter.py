"""A small model beside the target finds what the target has paged out."""

from __future__ import annotations

import logging
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
import pytest
from support.checkpoints import rewritten, small_target
from support.drafter_models import not_finite, with_context, with_other_tokens
from support.harness import CHUNK, MODELS, TEXT, check, go_on
from support.inside import inside

from kvflash_bench.tasks import needle_task
from kvflash_ggml.drafter import model as drafter
from kvflash_ggml.errors import ConfigError, ConversionError
from kvflash_ggml.gguf.reader import Field
from kvflash_ggml.llama import fitting
from kvflash_ggml.native import vocabulary
from kvflash_ggml.policy.crosstok import TextReader
from kvflash_ggml.policy.drafter import QUERY_ROWS, TokenReader
from kvflash_ggml.policy.heads import over_chunks, split

SMALL = MODELS / "scorer-qwen3-q8_0.gguf"
POOLED = {"n_ctx": 5120, "n_batch": 512, "n_ubatch": 128, "kvflash": 512, "kvflash_policy": "drafter"}


def ask(llm: Any, *, seed: int, depth: float = 0.3, n_tokens: int = 4096) -> bool:
    """Put a question about a needle in a text, and say whether the answer is right."""

    def tokenize(text: str) -> Any:
        return llm.tokenize(text.encode(), add_bos=False, special=False)

    task = needle_task(TEXT.read_text(), tokenize, n_tokens=n_tokens, depth=depth, seed=seed)
    prompt = llm.tokenize(task.prompt.encode(), add_bos=False)
    reply = llm.create_completion(prompt, max_tokens=12, temperature=0)
    check(llm)
    return bool(task.is_correct(reply["choices"][0]["text"]))


def reader_of(llm: Any) -> Any:
    return inside(llm).drafter_reader


def load(path: Path, target: Any, n_ctx: int = 4096) -> Any:
    settings = llama_cpp.llama_context_default_params()
    settings.n_threads = settings.n_threads_batch = 1
    return drafter.load(path, beside=target._model, n_ctx=n_ctx, offload=False, repack=True, settings=settings)


@pytest.fixture
def target(llama: Any) -> Any:
    return llama(vocab_only=True)


@pytest.fixture(scope="module")
def other_tokens(tmp_path_factory: pytest.TempPathFactory, loaded: None) -> Path:
    return with_other_tokens(SMALL, tmp_path_factory.mktemp("drafter") / "other.gguf")


# --- end to end


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_needle_is_found(kind: str, llama: Any) -> None:
    llm = llama(kind, **POOLED)
    assert "policy drafter" in llm.kvflash.banner()
    assert reader_of(llm) is None
    found = [ask(llm, seed=seed) for seed in (1, 2, 3)]
    assert sum(found) >= 2
    assert llm.kvflash.page_ins > 0
    assert isinstance(reader_of(llm), TokenReader)


def test_a_needle_across_two_chunks_is_found(llama: Any) -> None:
    llm = llama(**(POOLED | {"kvflash": 1024}))
    assert all(ask(llm, seed=seed, depth=0.2) for seed in (1, 2))


def test_a_drafter_with_another_tokenizer(llama: Any, other_tokens: Path) -> None:
    llm = llama(**POOLED, kvflash_scorer=other_tokens)
    found = [ask(llm, seed=seed) for seed in (1, 2, 3)]
    assert sum(found) >= 2
    assert llm.kvflash.page_ins > 0
    reader = reader_of(llm)
    assert isinstance(reader, TextReader)
    text = llm.detokenize(llm.input_ids[: llm.n_tokens].tolist())
    assert text.startswith(bytes(reader.text))  # the answer was too short for another look


def test_each_token_goes_through_the_drafter_once(llama: Any, tokens: Any) -> None:
    llm = llama(**POOLED, kvflash_tau=64)
    if inside(llm).session.engine.info.asynchronous:
        pytest.skip("a look is used some steps later")
    llm.eval(tokens[:2000].tolist())
    window = reader_of(llm).window
    assert window.pushed == 2000
    for token in tokens[2000:2016].tolist():
        llm.eval([token])
    assert window.pushed == 2016
    llm.n_tokens = 1990
    llm.eval(tokens[3000:3050].tolist())
    assert window.pushed == 2016 + QUERY_ROWS + 50


def test_a_short_text_loads_nothing(llama: Any, tokens: Any) -> None:
    llm = llama(**(POOLED | {"kvflash": 1024}))
    llm.eval(tokens[:700].tolist())
    assert reader_of(llm) is None
    llm.eval(tokens[700:1200].tolist())
    assert reader_of(llm) is not None


def test_requests_do_not_add_up(llama: Any, tokens: Any) -> None:
    llm = llama(**POOLED)
    for first in (0, 3000, 6000):
        llm.reset()
        llm.eval(tokens[first : first + 1500].tolist())
        small = reader_of(llm)._drafter
        assert small.length == 1500
        assert len(list(inside(small).own_session.store)) == 1500 // CHUNK
    llm.close()
    assert small.model.model is None
    assert not inside(small).own_session.store.heap._slabs._slabs


# --- scores


def test_chunks_and_tokens_get_their_share(target: Any, tokens: Any) -> None:
    small = load(SMALL, target)._drafter
    small.push(tokens[:1000])
    chunks, each = small.score_chunks(), small.score_tokens().reshape(-1, CHUNK)
    assert chunks.shape == (1000 // CHUNK,)
    assert (each.max(axis=1) <= chunks + 1e-3).all()
    look = small._side.request(QUERY_ROWS)
    plain = over_chunks(small._keys.score_keys(range(look.n_chunks), look)).best
    follows = np.flatnonzero(chunks != plain)
    np.testing.assert_allclose(chunks[follows], chunks[follows - 1], atol=0.01)
    assert 0 < np.exp(chunks).max() <= 1
    small.close()


def test_queries_are_in_the_order_of_the_text(target: Any, tokens: Any) -> None:
    small = load(SMALL, target)._drafter
    small.push(tokens[:1000])
    before = split(small._side.request(QUERY_ROWS), small._keys.shapes)
    small.push(tokens[1000:1003])
    after = split(small._side.request(QUERY_ROWS), small._keys.shapes)
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old[3:], new[:-3])
        assert len({row.tobytes() for row in new}) == QUERY_ROWS
    small.close()


@pytest.mark.parametrize("cut", [600, 640, 3])
def test_a_cut_leaves_what_a_fresh_drafter_has(cut: int, target: Any, tokens: Any) -> None:
    small, fresh = load(SMALL, target)._drafter, load(SMALL, target)._drafter
    small.push(tokens[:1000])
    assert small.truncate(cut) == cut
    other = np.concatenate([tokens[:cut], tokens[5000 : 5000 + 900 - cut]])
    small.push(other[cut:])
    fresh.push(other)
    np.testing.assert_allclose(small.score_chunks(), fresh.score_chunks(), atol=0.05)
    small.close()
    fresh.close()


def test_a_shorter_context_slides(llama: Any, tokens: Any, tmp_path: Path) -> None:
    path = with_context(SMALL, tmp_path / "short.gguf", 1024)
    llm = llama(**POOLED, kvflash_scorer=path)
    llm.eval(tokens[:4000].tolist())
    window = reader_of(llm).window
    assert window.base > 2000
    assert reader_of(llm)._drafter.n_ctx == 1024
    assert window.pushed < 2 * 4000
    assert np.isfinite(inside(llm).session.relevance.ranking).all()
    check(llm)


# --- tokenizers


def test_tokenizers_are_compared(target: Any, other_tokens: Path) -> None:
    same, other = load(SMALL, target), load(other_tokens, target)
    assert isinstance(same, TokenReader)
    assert isinstance(other, TextReader)
    assert other.drafted == [other._drafter.model.token_bos()]
    same.close()
    other.close()


def test_pieces_spell_the_text(target: Any, other_tokens: Path) -> None:
    text = "Straße 東京 🚀 naïve\n\n  end".encode()
    reader = load(other_tokens, target)
    model = reader._drafter.model
    for vocab in (target._model, model):
        ids = vocab.tokenize(text, add_bos=False, special=True)
        assert b"".join(vocabulary.piece(vocab.vocab, token, special=False) for token in ids) == text
    assert vocabulary.piece(model.vocab, model.token_eos(), special=False) == b""
    reader.close()


def test_a_vocabulary_without_tokens_is_nobodys(loaded: None, tmp_path: Path) -> None:
    from kvflash_ggml.speculation.context import DraftModel

    def change(fields: dict[str, Field]) -> None:
        for name in [name for name in fields if name.startswith("tokenizer.")]:
            del fields[name]
        fields["model"] = Field.of("tokenizer.ggml.model", "no_vocab")
        fields["size"] = Field.of("qwen3.vocab_size", 4096)

    model = DraftModel(rewritten(SMALL, tmp_path / "numbers.gguf", change), offload=False)
    vocab = llama_cpp.llama_model_get_vocab(model.address)
    assert not drafter.same_vocabulary(vocab, vocab)
    model.close()


# --- finding and failing


def test_a_drafter_that_cannot_serve_is_reported(llama: Any, tokens: Any, tmp_path: Path, caplog: Any) -> None:
    def speechless(fields: dict[str, Field]) -> None:
        fields["tokenizer.ggml.model"] = Field.of("tokenizer.ggml.model", "rwkv")

    for path, why in (
        (
            rewritten(SMALL, tmp_path / "speechless.gguf", speechless),
            "ValueError: its tokenizer has no token for a part",
        ),
        (not_finite(SMALL, tmp_path / "nan.gguf"), "DecodeError: its attention is not finite"),
    ):
        llm = llama(**POOLED, kvflash_scorer=path)
        llm.eval(tokens[:900].tolist())
        go_on(llm, 8)
        assert f"{path} cannot be used ({why}" in caplog.text
        assert reader_of(llm) is None


def test_where_a_drafter_is_looked_for(tmp_path: Path) -> None:
    model = tmp_path / "My-draft-model.gguf"
    model.touch()
    with pytest.raises(ConfigError, match=r"none was found beside My-draft-model\.gguf.*kvflash_scorer"):
        drafter.find(model, None)
    found = []
    for name in ("draft/a-draft.gguf", "drafter/x-SCORER.GGUF", "b-draft.gguf", "a-drafter.gguf", "z-scorer.gguf"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
        (path.parent / "notes-scorer.txt").touch()
        found.append(drafter.find(model, None).relative_to(tmp_path).as_posix())
    assert found[:3] == ["draft/a-draft.gguf", "drafter/x-SCORER.GGUF", "b-draft.gguf"]
    assert found[3:] == ["a-drafter.gguf", "z-scorer.gguf"]
    assert drafter.find(model, tmp_path / "b-draft.gguf") == tmp_path / "b-draft.gguf"
    with pytest.raises(ConfigError, match="there is no drafter"):
        drafter.find(model, tmp_path / "missing.gguf")


def test_a_draft_that_reads_its_targets_memory_is_passed_over(tmp_path: Path) -> None:
    model = tmp_path / "model.gguf"
    model.touch()
    shutil.copy(MODELS / "recall-dflash.gguf", tmp_path / "a-draft.gguf")
    with pytest.raises(ConfigError, match="none was found"):
        drafter.find(model, None)
    small = shutil.copy(SMALL, tmp_path / "b-draft.gguf")
    assert drafter.find(model, None) == small
    assert drafter.find(model, tmp_path / "a-draft.gguf") == tmp_path / "a-draft.gguf"


def test_without_a_drafter_the_policy_is_refused(models: Any, tmp_path: Path) -> None:
    from kvflash_ggml import Llama

    alone = shutil.copy(models["dense"], tmp_path / "alone.gguf")
    with pytest.raises(ConfigError, match="needs a small model"):
        Llama(str(alone), kvflash=512, kvflash_policy="drafter", verbose=False)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("recall-dflash.gguf", "a DFlash drafter; the policy 'drafter' needs a small model"),
        ("mtp-recall-qwen35-q8_0.gguf", "a head for further tokens"),
        ("missing.gguf", "there is no drafter"),
    ],
)
def test_a_file_that_cannot_read_alone_is_refused_at_the_start(llama: Any, tmp_path: Path, name: str, why: str) -> None:
    with pytest.raises(ConfigError, match=f"{name}.*{why}|{why}.*{name}"):
        llama(**POOLED, kvflash_scorer=MODELS / name)


def test_a_damaged_drafter_is_refused_at_the_start(llama: Any, tmp_path: Path) -> None:
    broken = tmp_path / "broken.gguf"
    for data in (b"GGUF, but not really" * 100, SMALL.read_bytes()[:200000], b"", b"a text"):
        broken.write_bytes(data)
        with pytest.raises(ConversionError, match=r"broken\.gguf"):
            llama(**POOLED, kvflash_scorer=broken)


def test_a_drafter_that_llama_cpp_cannot_run_is_refused_with_its_reason(llama: Any, tmp_path: Path) -> None:
    odd = small_target(tmp_path / "odd.gguf", architecture="no-such", whole=True)
    with pytest.raises(ConfigError, match=r"odd\.gguf cannot serve: .*unknown model architecture: 'no-such'"):
        llama(**POOLED, kvflash_scorer=odd)
    for fit in (False, True):
        with pytest.raises(ConfigError, match=r"odd\.gguf cannot serve"):
            fitting.without_loading(
                str(MODELS / "recall-qwen3-q8_0.gguf"), {**POOLED, "kvflash_scorer": odd, "fit": fit or None}
            )


def test_a_head_beside_the_model_is_passed_over(models: Any, tmp_path: Path) -> None:
    from kvflash_ggml import Llama

    model = shutil.copy(models["dense"], tmp_path / "model.gguf")
    shutil.copy(models["mtp"], tmp_path / "a-draft.gguf")
    with pytest.raises(ConfigError, match="needs a small model"):
        Llama(str(model), **POOLED, verbose=False)


def test_a_broken_drafter_beside_the_model_is_reported_once(models: Any, tmp_path: Path, caplog: Any) -> None:
    from kvflash_ggml import Llama

    model = shutil.copy(models["dense"], tmp_path / "model.gguf")
    broken = tmp_path / "broken-draft.gguf"
    broken.write_bytes(b"GGUF, but not really" * 100)
    with (
        caplog.at_level(logging.WARNING, "kvflash_ggml"),
        closing(Llama(str(model), **POOLED, kvflash_reading="pool", n_threads=1, verbose=False)) as llm,
    ):
        for seed in (1, 2):
            ask(llm, seed=seed, n_tokens=1500)
        reports = [record for record in caplog.records if "broken-draft.gguf" in record.getMessage()]
        assert len(reports) == 1
        assert reader_of(llm) is None
        shutil.copy(SMALL, broken)  # repaired, it is taken from the next text on
        assert ask(llm, seed=3, n_tokens=1500)
        assert reader_of(llm) is not None
