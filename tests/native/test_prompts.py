"""What a server makes of texts and tokens: as upstream's class, and in linear work."""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from support.checkpoints import rewritten
from support.harness import TEXT

from kvflash_ggml.errors import ConfigError, ContextFull
from kvflash_ggml.gguf.reader import Field
from kvflash_ggml.runtime import samplers
from kvflash_ggml.server.prompts import MOST_BYTES, LlamaPrompts

NAMES = "tokenizer.ggml.tokens"
TEXTS = ["", "x", " x", "  two  spaces", "é😀\x00", "<|im_start|>user\n", TEXT.read_text(encoding="utf-8")[:20_000]]


@pytest.fixture(scope="module")
def llm(models: dict[str, Path], loaded: None) -> Iterator[Any]:
    from kvflash_ggml import Llama

    llm = Llama(str(models["dense"]), n_ctx=512, verbose=False)
    yield llm
    llm.close()


def counting(monkeypatch: pytest.MonkeyPatch, name: str) -> list[int]:
    """How often one of llama.cpp's functions is called, as the length of a list."""
    import llama_cpp

    calls: list[int] = []
    function: Callable[..., Any] = getattr(llama_cpp, name)
    monkeypatch.setattr(llama_cpp, name, lambda *args: (calls.append(1), function(*args))[1])
    return calls


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("special", [False, True])
def test_as_upstream(llm: Any, text: str, special: bool) -> None:
    prompts = LlamaPrompts(llm)
    tokens = prompts.tokenize(text, add_special=False, parse_special=special)
    assert tokens == llm._model.tokenize(text.encode(), add_bos=False, special=special)
    for part in (tokens, tokens[1:], [llm.token_bos(), *tokens]):
        known = [token for token in part if token >= 0]
        assert prompts.detokenize(known) == llm._model.detokenize(known, special=True)


@pytest.fixture(scope="module")
def wordy(models: dict[str, Path], loaded: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model whose tokenizer, of SentencePiece's kind, has no tokens of bytes."""
    from kvflash_ggml import Llama

    def change(fields: dict[str, Any]) -> None:
        texts = [token.replace("\u0120", "\u2581").encode() for token in fields[NAMES].value]
        raw = struct.pack("<IQ", 8, len(texts)) + b"".join(struct.pack("<Q", len(text)) + text for text in texts)
        fields[NAMES] = Field(NAMES, 9, raw)
        fields["tokenizer.ggml.model"] = Field.of("tokenizer.ggml.model", "llama")

    path = rewritten(models["dense"], tmp_path_factory.mktemp("model") / "wordy.gguf", change)
    llm = Llama(str(path), n_ctx=512, verbose=False)
    yield llm
    llm.close()


@pytest.mark.parametrize("text", ["\u4e2d", "a \u4e2d b", b"a\xff"])
def test_a_text_that_a_vocabulary_cannot_spell(text: Any, wordy: Any) -> None:
    """llama.cpp ends the process there."""
    data = text if isinstance(text, bytes) else text.encode()
    letter = ascii(data.strip(b"a b").decode("utf-8", "surrogateescape"))
    why = re.escape(f"has no token for {letter}, nor for its bytes")
    with pytest.raises(ConfigError, match=why):
        wordy.tokenize(data)
    if isinstance(text, str):
        for ask in (
            wordy.create_completion,
            partial(LlamaPrompts(wordy).tokenize, add_special=True, parse_special=True),
        ):
            with pytest.raises(ConfigError, match=why):
                ask(text)
    assert wordy.create_completion("Hello there", max_tokens=1)["choices"]


def test_a_long_piece_is_no_empty_one(models: dict[str, Path], tmp_path: Path) -> None:
    """Upstream leaves out what has more than 32 bytes: in code, the line ends before deep indents."""
    from kvflash_ggml import Llama

    def change(fields: dict[str, Field]) -> None:
        texts = [token.encode() for token in fields[NAMES].value]
        texts[400] = b"-" * 80
        raw = struct.pack("<IQ", 8, len(texts)) + b"".join(struct.pack("<Q", len(text)) + text for text in texts)
        fields[NAMES] = Field(NAMES, 9, raw)

    with closing(Llama(str(rewritten(models["dense"], tmp_path / "long.gguf", change)), vocab_only=True)) as llm:
        for tokens in ([400], [400] * 20):  # a short list is not remembered
            assert llm.detokenize(tokens) == b"-" * 80 * len(tokens) == LlamaPrompts(llm).detokenize(tokens)


def test_a_text_takes_no_more_room_than_it_has(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file that names a trained length of 2 G tokens takes upstream 8 GiB for each text."""
    monkeypatch.setattr(llm._model, "n_ctx_train", pytest.fail)
    assert llm.detokenize(llm.tokenize(b"a word", add_bos=False)) == b"a word"


def test_a_token_is_asked_for_once(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = LlamaPrompts(llm)
    tokens = prompts.tokenize(TEXTS[-1], add_special=False, parse_special=False)
    calls = counting(monkeypatch, "llama_token_to_piece")
    assert prompts.detokenize(tokens * 50) == TEXTS[-1].encode() * 50
    assert len(calls) == len(set(tokens))


def test_a_text_is_tokenised_once(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one with more tokens than the model was trained on, which upstream tokenises twice."""
    calls = counting(monkeypatch, "llama_tokenize")
    count = llm._model.n_ctx_train() + 100
    assert len(LlamaPrompts(llm).tokenize("1" * count, add_special=False, parse_special=False)) == count
    assert len(calls) == 1


def test_what_would_take_seconds_is_refused(llm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counting(monkeypatch, "llama_tokenize")
    with pytest.raises(ContextFull, match=rf"has {MOST_BYTES + 1} bytes, and {MOST_BYTES} is the most"):
        LlamaPrompts(llm).tokenize(" " * (MOST_BYTES + 1), add_special=False, parse_special=False)
    assert calls == []


def test_tokens_around_a_gap(models: dict[str, Path], loaded: None) -> None:
    from kvflash_ggml import Llama

    ids = {"pre": 5, "suf": 6, "mid": 7}
    given: dict[str, Any] = {f"tokenizer.ggml.fim_{name}_token_id": token for name, token in ids.items()}
    for overrides, wanted in ((given, ids), ({"tokenizer.ggml.fim_pre_token_id": 5}, {})):
        llm = Llama(str(models["dense"]), n_ctx=512, verbose=False, kv_overrides=overrides)
        assert LlamaPrompts(llm).gap == wanted
        llm.close()


def test_a_grammar_is_known_to_be_sound_to_its_salt_alone(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts, made = LlamaPrompts(llama(kvflash=512)), []
    stock = samplers.sampler_of
    monkeypatch.setattr(samplers, "sampler_of", lambda *args: (made.append(1), stock(*args))[1])
    for count, salt in ((1, ""), (1, ""), (2, "a"), (2, "a"), (3, "b")):
        prompts.check_grammar("root ::= [a-z]", salt)
        assert len(made) == count
