"""Chat with the template of the model's file, streamed and at once, and the tokenizer under it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.smollm import POOL

from kvflash_bench.filler import read_text
from kvflash_ggml.config import KVFlashConfig

SYSTEM = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
QUESTION = "What is the capital of France? Answer with its name."


def asked(llm: Any, content: str, **how: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return llm.create_chat_completion(messages, temperature=0.0, max_tokens=24, **how)


def streamed(llm: Any, content: str) -> str:
    chunks = list(asked(llm, content, stream=True))
    assert chunks[0]["choices"][0]["delta"] == {"role": "assistant"}
    assert chunks[-1]["choices"][0]["finish_reason"] in ("stop", "length")
    assert len(chunks) > 3
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks)


def test_an_answer_in_the_template_of_the_file(pooled: Any) -> None:
    answer = asked(pooled, QUESTION)
    text = answer["choices"][0]["message"]["content"]
    assert "Paris" in text
    prompt = pooled.detokenize(pooled.input_ids[: answer["usage"]["prompt_tokens"]].tolist(), special=True).decode()
    assert prompt == f"{SYSTEM}<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    assert "<|im_" not in text
    assert streamed(pooled, QUESTION) == text


def test_a_long_message_passes_through_the_pool(pooled: Any) -> None:
    llm = pooled
    page_outs = llm.kvflash.page_outs
    text = "The ferry to Ostrand leaves at 17:40.\n" + read_text(())[:3000]
    content = f"{text}\n\nQuestion: At what time does the ferry to Ostrand leave?"
    answer = streamed(llm, content)
    assert llm.kvflash.length > POOL == llm.kvflash.pool
    assert llm.kvflash.policy == KVFlashConfig().policy
    assert llm.kvflash.page_outs > page_outs
    assert "17:40" in answer


@pytest.mark.parametrize(
    "text",
    [
        "Plain words, and (punctuation)!",
        "  leading,   inner and trailing spaces  ",
        "tabs\tand\n\n\nnewlines\r\n",
        "def f(x: int) -> str:\n    return f'{x:>08.3f}'\n",
        "naïve café “quotes” … 你好世界 Привет 👩‍👩‍👧 \u0000",
        "1234567890 3.14159 0x7fff",
    ],
)
def test_text_is_itself_again(pooled: Any, text: str) -> None:
    ids = pooled.tokenize(text.encode(), add_bos=False)
    assert pooled.detokenize(ids).decode() == text
    for end in range(len(ids)):  # text that grows, as in a stream, is not built again
        assert pooled.detokenize(ids[:end]) + pooled.detokenize(ids[end:]) == text.encode()


def test_special_tokens(pooled: Any) -> None:
    mark = b"<|im_start|>"
    assert pooled.tokenize(mark, special=True) == [pooled.token_bos()] == [1]
    plain = pooled.tokenize(mark, special=False)
    assert len(plain) > 1
    assert pooled.detokenize(plain) == mark
    assert pooled.detokenize([1, *plain], special=True) == mark + mark
    assert pooled.tokenize(b"<|im_end|>", special=True) == [pooled.token_eos()] == [2]
    assert pooled.tokenize(b"word", add_bos=True) == pooled.tokenize(b"word", add_bos=False)  # it wants no bos


def test_a_question_of_the_bench_stands_in_the_template(smol: Callable[..., Any]) -> None:
    from kvflash_bench.asks import Frame
    from kvflash_bench.frame import frame_of

    llm = smol(vocab_only=True)
    frame = frame_of(llm)
    before = f"{SYSTEM}<|im_start|>user\n"
    assert frame == Frame(
        before_document=before,
        before_answer="<|im_end|>\n<|im_start|>assistant\n",
        special=True,
        size=len(llm.tokenize(before.encode(), special=True)),
    )
    llm.metadata.pop("tokenizer.chat_template")
    assert frame_of(llm) == Frame()


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('no users') }}", "the chat template of this model fails: no users"),
        ("{% for %}", "the chat template of this model fails"),
        ("always the same", "does not show the user's message once"),
        ("{{ messages[0].content }}{{ messages[0].content }}", "does not show the user's message once"),
    ],
)
def test_a_template_that_cannot_be_used_is_refused(smol: Callable[..., Any], template: str, message: str) -> None:
    from kvflash_bench.frame import frame_of
    from kvflash_ggml.errors import ConfigError

    llm = smol(vocab_only=True)
    llm.metadata["tokenizer.chat_template"] = template
    with pytest.raises(ConfigError, match=message):
        frame_of(llm)
