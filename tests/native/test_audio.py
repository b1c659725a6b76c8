"""Sound in a pool, with a projector of random weights: rows as those of images are, but for how they are made."""

from __future__ import annotations

import base64
import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.harness import MODELS, TEXT
from support.rounding import GPU_LAYERS, ON_GPU, SAID, assert_same_answer
from support.sounds import RATE, flac, mp3, wav
from support.vision import png, write_mrope, write_projector

from kvflash_ggml import Llama
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.media import files

MODEL = MODELS / "recall-qwen3-q8_0.gguf"
WORDS = TEXT.read_text(encoding="utf-8")
SIZE: dict[str, Any] = {"n_ctx": 2048, "n_batch": 128, "n_ubatch": 96, "n_gpu_layers": GPU_LAYERS,
                        "flash_attn": True, "verbose": False, "n_threads": 1, "n_threads_batch": 1}  # fmt: skip
EXACT = {"kvflash_policy": "qk", "kvflash_reading": "exact", "kvflash_answer": "exact"}
ROWS, MOST = 150, 1 if ON_GPU else 4
TONE, OTHER = wav(ROWS), flac(100, 1000.0)


@pytest.fixture(scope="module")
def projectors(tmp_path_factory: pytest.TempPathFactory, loaded: None) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("audio")
    write_mrope(MODEL, folder / "mrope.gguf")
    return {
        "plain": write_projector(folder / "both.gguf", 256, hears=True),
        "mrope": write_projector(folder / "merger.gguf", 256, "qwen2vl_merger", hears=True),
        "blind": write_projector(folder / "blind.gguf", 256, "blind", hears=True),
        "deaf": write_projector(folder / "deaf.gguf", 256),
    }


class Chat:
    def __init__(self, llm: Any) -> None:
        self.llm = llm
        self.messages: list[dict[str, Any]] = []

    def ask(self, *parts: str | bytes) -> tuple[str, np.ndarray]:
        """The answer to text and files of sound, and its last logits: on a GPU those of its first token."""
        content = [{"type": "text", "text": part} if isinstance(part, str) else sound(part) for part in parts]
        self.messages.append({"role": "user", "content": content})
        settings = {"max_tokens": MOST, "temperature": 0.0, "repeat_penalty": 1.0}
        said = self.llm.create_chat_completion(self.messages, **settings)["choices"][0]["message"]["content"]
        self.messages.append({"role": "assistant", "content": SAID if ON_GPU else said})
        row = self.llm._ctx.get_logits_ith(-1)
        return said, np.ctypeslib.as_array(row, shape=(self.llm.n_vocab(),)).copy()


def sound(data: bytes) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


@pytest.fixture
def made(projectors: dict[str, Path]) -> Iterator[Callable[..., Chat]]:
    """Makes chats on a model with a projector of this name; stock: on llama_cpp's own class."""
    from llama_cpp.llama import Llama as Stock

    from kvflash_ggml.llama.vision import Projector

    with ExitStack() as stack:

        def made(name: str, *, stock: bool = False, **settings: Any) -> Chat:
            model = MODEL if name != "mrope" else projectors["mrope"].with_name("mrope.gguf")
            if stock:
                llm: Any = Stock(str(model), chat_handler=Projector(projectors[name]), **SIZE)
            else:
                ours = {"mmproj": projectors[name], "kvflash_calibrate": False}
                llm = Llama(str(model), **{**SIZE, **ours, **settings})
            stack.callback(llm.close)
            return Chat(llm)

        yield made


def test_samples_are_upstreams(made: Callable[..., Chat]) -> None:
    handler = made("plain", kvflash=512).llm.chat_handler
    mtmd = handler._mtmd_cpp
    for data in (TONE, OTHER, mp3(30)):
        buffer = (ctypes.c_uint8 * len(data)).from_buffer_copy(data)
        bitmap = mtmd.mtmd_helper_bitmap_init_from_buf(handler.mtmd_ctx, buffer, len(data), False)
        count, size = mtmd.mtmd_bitmap_get_nx(bitmap), mtmd.mtmd_bitmap_get_n_bytes(bitmap)
        theirs = bytes(mtmd.mtmd_bitmap_get_data(bitmap)[:size])
        mtmd.mtmd_bitmap_free(bitmap)
        assert files.decode(data, mtmd._libmtmd._name, rate=RATE) == files.Sound(count, theirs)


@pytest.mark.parametrize("name", ["plain", "mrope", "blind"])
def test_a_pool_that_holds_everything_equals_stock(name: str, made: Callable[..., Chat]) -> None:
    """Of two sounds in a row, in steps that cut them; by a projector that sees nothing, too."""
    ours, theirs = made(name, kvflash=2048), made(name, stock=True)
    parts = (TONE, OTHER, "What is heard?")
    wanted = theirs.ask(*parts)
    assert_same_answer(ours.ask(*parts), wanted)
    text = ours.llm.input_ids[: ours.llm.n_tokens]
    assert (text < 0).sum() == ROWS + 100
    assert len(text) == theirs.llm.n_tokens
    ours.messages = []
    assert not np.array_equal(ours.ask(wav(ROWS, 200.0), *parts[1:])[1], wanted[1])


@pytest.mark.parametrize("name", ["plain", "mrope"])
def test_a_small_pool_equals_the_full_cache(
    name: str, made: Callable[..., Chat], encoded: list[int], tmp_path: Path
) -> None:
    """A sound in front, another one and a question far behind; after a restore the new one alone is encoded."""
    paged, full = made(name, kvflash=512, **EXACT), made(name, kvflash=2048, **EXACT)
    for chat in paged, full:
        chat.ask(TONE, WORDS[:1500])
    paged.llm.save_snapshot(tmp_path / "text.kvs")
    restored = made(name, kvflash=512, **EXACT)
    restored.llm.load_snapshot(tmp_path / "text.kvs")
    restored.messages = list(paged.messages)
    one, other, third = (chat.ask(WORDS[9000:9900], OTHER, "Which?") for chat in (paged, full, restored))
    assert_same_answer(one, other)
    assert_same_answer(third, other)
    assert restored.llm.n_tokens > paged.llm.kvflash.pool
    assert paged.llm.kvflash.streamed_steps > 5
    assert len(encoded) == 2 + 2 + 1


def test_the_pages_of_a_sound_come_back(made: Callable[..., Chat]) -> None:
    chat = made("plain", kvflash=512, kvflash_policy="qk", kvflash_reading="pool", n_batch=64, n_ubatch=64)
    chat.ask(TONE, WORDS[:2000])
    chat.ask(WORDS[9000:10000])
    llm = chat.llm
    assert llm.kvflash.page_ins > 0
    first = int(np.flatnonzero(llm.input_ids < 0)[0])
    text = llm.input_ids[: llm.n_tokens].copy()
    llm.n_tokens = first + 70
    llm.eval(text[first + 70 : first + ROWS + 50].tolist())
    np.testing.assert_array_equal(llm.input_ids[: llm.n_tokens], text[: first + ROWS + 50])


def test_ten_turns_encode_a_sound_once(made: Callable[..., Chat], encoded: list[int]) -> None:
    chat, read = made("plain", kvflash=2048), []
    for turn in range(10):
        chat.ask(*((TONE,) if turn == 0 else ()), f"Question {turn}: what is heard?")
        read.append(chat.llm.kvflash.last.read)
    assert len(encoded) == 1
    assert read[0] > ROWS > 3 * max(read[1:])


def test_what_a_projector_does_not_take_is_refused_by_name(made: Callable[..., Chat]) -> None:
    with pytest.raises(ConfigError, match=r"deaf.gguf takes no sound: load one with an audio encoder"):
        made("deaf", kvflash=512).ask(TONE, "What?")
    blind = made("blind", kvflash=512)
    photo = {"type": "image_url", "image_url": png((250, 20, 20))}
    with pytest.raises(ConfigError, match=r"blind.gguf takes no images: load one with a vision encoder"):
        blind.llm.create_chat_completion([{"role": "user", "content": [photo]}])
    with pytest.raises(ConfigError, match="a part input_audio has no sound"):
        blind.llm.create_chat_completion([{"role": "user", "content": [{"type": "input_audio"}]}])
    with pytest.raises(ConfigError, match="a sound of 44 bytes cannot be decoded"):
        blind.ask(wav(0), "What?")
    blind.messages = []
    said, settings = blind.ask(TONE, "What?")[0], {"max_tokens": MOST, "temperature": 0.0, "repeat_penalty": 1.0}
    again = blind.llm.create_chat_completion(blind.messages[:1], **settings)["choices"][0]["message"]["content"]
    assert again == said or ON_GPU
