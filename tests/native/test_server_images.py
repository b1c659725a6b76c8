"""A server on a real model with a projector: an image is encoded once, and a turn reads what is new."""

from __future__ import annotations

import asyncio
import base64
import gc
import threading
from collections.abc import Awaitable, Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.asgi import Client
from support.fake_server import Server
from support.harness import MODELS, TEXT
from support.posted import form
from support.rounding import GPU_LAYERS, IMAGE, LOGPROB, ON_GPU, SAID, near
from support.sounds import wav
from support.vision import JPEGS, ROWS, png, write_mrope, write_projector

from kvflash_ggml import KVFlashConfig, Llama
from kvflash_ggml.media import files

MODEL = MODELS / "recall-qwen3-q8_0.gguf"
WORDS = TEXT.read_text(encoding="utf-8")
SIZE: dict[str, Any] = {"n_ctx": 4096, "n_batch": 128, "n_ubatch": 96, "n_gpu_layers": GPU_LAYERS,
                        "n_threads": 1, "n_threads_batch": 1, "verbose": False}  # fmt: skip
LOGPROBS = {"logprobs": True, "top_logprobs": 5}
RED, BLUE, GREEN = (png(colour) for colour in ((250, 20, 20), (10, 30, 240), (10, 200, 30)))


@pytest.fixture(scope="module")
def projector(tmp_path_factory: pytest.TempPathFactory, loaded: None) -> Path:
    return write_projector(tmp_path_factory.mktemp("images") / "mmproj.gguf", 256, hears=True)


@pytest.fixture(scope="module")
def merger(projector: Path) -> Path:
    """The projector of the M-RoPE model beside it."""
    write_mrope(MODEL, projector.with_name("mrope.gguf"))
    return write_projector(projector.with_name("merger.gguf"), 256, "qwen2vl_merger")


class Chat:
    """A conversation with a server. read: tokens of each prompt that were not known. ours: fields for our server."""

    def __init__(self, client: Client, ours: dict[str, Any] | None = None) -> None:
        self.client = client
        self.ours = ours or {}
        self.messages: list[dict[str, Any]] = []
        self.read: list[int] = []
        self.prompts: list[int] = []

    async def ask(self, *parts: str, most: int = 4, **more: Any) -> tuple[str, list[Any]]:
        """The answer to texts and images, and its logarithms of probabilities: on a GPU its first token.

        more: other fields of the request.
        """
        content = [
            {"type": "image_url", "image_url": {"url": part}} if part.startswith("data:") else
            {"type": "text", "text": part} for part in parts
        ]  # fmt: skip
        self.messages.append({"role": "user", "content": content})
        asked = {"messages": self.messages, "temperature": 0, "max_tokens": 1 if ON_GPU else most, **LOGPROBS, **more}
        reply = await self.client.post("/v1/chat/completions", {**asked, "kvflash": self.ours})
        assert reply.status == 200, reply.message
        (choice,), usage = reply.json["choices"], reply.json["usage"]
        self.messages.append({"role": "assistant", "content": SAID if ON_GPU else choice["message"]["content"]})
        self.prompts.append(usage["prompt_tokens"])
        self.read.append(usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"])
        return choice["message"]["content"], choice["logprobs"]["content"]


def assert_same(mine: tuple[str, list[Any]], its: tuple[str, list[Any]]) -> None:
    """The same answer; on a GPU the likeliest tokens are as likely, up to rounding."""
    if not ON_GPU:
        assert mine == its
        return
    likely, others = ({one["token"]: one["logprob"] for one in said[1][0]["top_logprobs"]} for said in (mine, its))
    assert len(likely.keys() & others.keys()) >= 3
    assert all(abs(likely[token] - others[token]) < LOGPROB.here for token in likely.keys() & others.keys())


def model_of(projector: Path) -> Path:
    beside = projector.with_name("mrope.gguf")
    return beside if projector.stem == "merger" else MODEL


def serving(
    projector: Path, work: Callable[[Client], Awaitable[Any]], *, folder: Path | None = None, **settings: Any
) -> Any:
    """What comes of speaking to a server on this model. settings: of its pool."""
    from kvflash_ggml.batching.llama import LlamaModel
    from kvflash_ggml.server.prompts import LlamaPrompts

    config = KVFlashConfig(**{"pool": 2048, "calibrate": False, **settings})
    llm = Llama(str(model_of(projector)), kvflash=config, mmproj=projector, **SIZE)
    server = Server(LlamaModel(llm), LlamaPrompts(llm), folder=folder)
    server.seconds = 200.0
    return server.run(work)


def test_ten_turns_encode_an_image_once(projector: Path, encoded: list[int]) -> None:
    async def work(client: Client) -> Chat:
        chat = Chat(client, {"conversation": "ten"})
        await chat.ask(RED, "Question 0: which colour?")
        for turn in range(1, 10):
            await chat.ask(f"Question {turn}: which colour?")
        words = [await client.get(f"/kvflash/words?conversation=ten&chunk={chunk}") for chunk in range(4)]
        assert [reply.status for reply in words] == [200] * 4
        assert words[1].json["text"] == ""  # of rows alone
        assert "Question 0" in words[2].json["text"]
        return chat

    chat = serving(projector, work)
    assert len(encoded) == 1
    assert ROWS < chat.read[0] == chat.prompts[0]
    new = [b - a for a, b in zip(chat.prompts, chat.prompts[1:], strict=False)]
    assert all(0 < read <= more + 8 for read, more in zip(chat.read[1:], new, strict=True)), (chat.read, new)


@pytest.mark.parametrize("kind", ["projector", "merger"])
def test_the_prompt_is_that_of_the_library(kind: str, request: pytest.FixtureRequest) -> None:
    """The same tokens and the same answer as `Llama.create_chat_completion`, of images with places of their own too."""
    projector = request.getfixturevalue(kind)

    async def work(client: Client) -> tuple[str, int]:
        chat = Chat(client)
        return (await chat.ask(RED, "Which?", BLUE, "And?"))[0], chat.prompts[0]

    answer, count = serving(projector, work)
    llm = Llama(str(model_of(projector)), kvflash=2048, kvflash_calibrate=False, mmproj=projector, **SIZE)
    parts = [RED, "Which?", BLUE, "And?"]
    content = [{"type": "image_url", "image_url": part} if part.startswith("data:") else
               {"type": "text", "text": part} for part in parts]  # fmt: skip
    settings = {"max_tokens": 4, "temperature": 0.0, "repeat_penalty": 1.0}
    said = llm.create_chat_completion([{"role": "user", "content": content}], **settings)
    assert said["usage"]["prompt_tokens"] == count
    assert said["choices"][0]["message"]["content"] == answer or ON_GPU
    llm.close()


def test_conversations_with_images_are_put_aside_and_resumed(
    projector: Path, encoded: list[int], tmp_path: Path
) -> None:
    """Two take turns in a pool that is smaller than either, and go on in another server: bit for bit as alone."""
    small = {"pool": 256, "policy": "qk", "reading": "exact", "answer": "exact"}
    texts = (WORDS[:1200], WORDS[3000:4300])
    ending = f"{WORDS[9000:9400]} Which colour?"

    async def alone(client: Client) -> list[Any]:
        answers = []
        for image, text in zip((RED, BLUE), texts, strict=True):
            chat = Chat(client)
            await chat.ask(image, text)
            answers.append((await chat.ask("Which?"), await chat.ask(ending)))
        return answers

    chats: list[Chat] = []

    async def in_turns(client: Client) -> list[Any]:
        chats[:] = [Chat(client), Chat(client)]
        for chat, image, text in zip(chats, (RED, BLUE), texts, strict=True):
            await chat.ask(image, text)
        return [await chat.ask("Which?") for chat in chats]

    async def later(client: Client) -> list[Any]:
        answers = []
        for chat in chats:
            chat.client = client
            answers.append(await chat.ask(ending))
        return answers

    wanted = serving(projector, alone, **small)
    assert len(encoded) == 2
    first = serving(projector, in_turns, folder=tmp_path, **small)
    second = serving(projector, later, folder=tmp_path, **small)
    for found, its in zip(zip(first, second, strict=True), wanted, strict=True):
        for mine, alone_one in zip(found, its, strict=True):
            assert_same(mine, alone_one)
    assert len(encoded) == 4, "what the pages of a conversation hold is not encoded again"
    for chat in chats:
        assert chat.prompts[0] > ROWS + 256
        assert chat.read[0] == chat.prompts[0]
        assert max(chat.read[1:]) < ROWS + 150 < chat.prompts[-1] - 200


def test_answers_that_are_decoded_together_have_their_own_images(projector: Path) -> None:
    asked = [(RED, "Which?"), (BLUE, "Which?"), (GREEN, "Which?", RED), ("Which?",)]

    async def one_by_one(client: Client) -> list[Any]:
        return [await Chat(client).ask(*parts, most=8) for parts in asked]

    async def together(client: Client) -> list[Any]:
        return await asyncio.gather(*(Chat(client).ask(*parts, most=8) for parts in asked))

    wanted = serving(projector, one_by_one)
    for mine, its in zip(serving(projector, together, parallel=4, pool=4096), wanted, strict=True):
        if ON_GPU:
            assert_same(mine, its)
        else:  # beside others the logarithms are rounded otherwise
            assert mine[0] == its[0]
    assert len({text for text, _ in wanted}) > 1 or ON_GPU


def test_a_file_that_is_no_image_costs_one_request(projector: Path, encoded: list[int]) -> None:
    async def work(client: Client) -> list[Any]:
        first = await Chat(client).ask(RED, "Which?")
        for bad in ("iVBORw0KGgpub25l", "UklGRgAAAABXQVZFZm10IAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA"):
            content = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{bad}"}}]
            reply = await client.post("/v1/chat/completions", {"messages": [{"role": "user", "content": content}]})
            assert (reply.status, "cannot be decoded" in reply.message) == (400, True)
        return [first, await Chat(client).ask(RED, "Which?", cache_prompt=False)]

    first, again = serving(projector, work)
    assert_same(first, again)
    assert len(encoded) == 1


def test_sound_is_heard_once_and_a_hostile_one_costs_one_request(projector: Path, encoded: list[int]) -> None:
    """Beside an image; and it is another sound if one sample is another."""
    good = wav(80)
    text, photo = {"type": "text", "text": "What?"}, {"type": "image_url", "image_url": {"url": RED}}

    def sound(data: bytes, format: str = "wav") -> dict[str, Any]:
        return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": format}}

    async def work(client: Client) -> list[Any]:
        async def ask(*parts: dict[str, Any]) -> Any:
            asked = {"messages": [{"role": "user", "content": [*parts, text]}], "temperature": 0, "max_tokens": 4}
            asked |= LOGPROBS
            return await client.post("/v1/chat/completions", asked)

        first = await ask(photo, sound(good))
        assert first.status == 200, first.message
        assert first.json["usage"]["prompt_tokens"] > ROWS + 80
        assert len(encoded) == 2
        for bad in (good[:40], b"fLaC" + bytes(50), b"\xff\xfb" + bytes(90), b"ID3" + good):
            reply = await ask(sound(bad))
            assert (reply.status, reply.json["error"]["code"]) == (400, "invalid_audio"), reply.body
            assert "cannot be decoded" in reply.message
        again = await ask(photo, sound(good))
        assert len(encoded) == 2
        assert (await ask(photo, sound(good[:-1] + b"\1"))).status == 200
        assert len(encoded) == 3
        choices = [reply.json["choices"][0] for reply in (first, again)]
        return [(choice["message"]["content"], choice["logprobs"]["content"]) for choice in choices]

    first, again = serving(projector, work)
    assert_same(first, again)


def test_a_transcription_is_the_answer_to_the_same_chat(projector: Path) -> None:
    """A form's file and a chat's base64 are one sound, and one prompt."""
    data = wav(80)

    async def work(client: Client) -> tuple[Any, Any]:
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode()}}
        content = [{"type": "text", "text": "What is heard?"}, part]
        asked = {"messages": [{"role": "user", "content": content}], "temperature": 0, "enable_thinking": False}
        chat = await client.post("/v1/chat/completions", {**asked, "max_tokens": 4})
        sent = form(data, prompt="What is heard?", max_tokens="4")
        return chat, await client.call("POST", "/v1/audio/transcriptions", **sent).done()

    chat, heard = serving(projector, work)
    assert heard.status == 200, heard.message
    assert heard.json["usage"]["input_tokens"] == chat.json["usage"]["prompt_tokens"]
    if not ON_GPU:
        assert heard.json["text"] == chat.json["choices"][0]["message"]["content"].strip()


def test_a_model_that_hears_nothing_says_what_to_load(merger: Path) -> None:
    async def work(client: Client) -> Any:
        part = {"type": "input_audio", "input_audio": {"data": base64.b64encode(wav(5)).decode(), "format": "wav"}}
        told = await client.get("/props")
        return told, await client.post(
            "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}], "max_tokens": 1}
        )

    told, reply = serving(merger, work)
    assert told.json["modalities"] == {"vision": True, "audio": False}
    assert reply.status == 400
    assert "hears no sound: leave the sound out, or add --mmproj FILE" in reply.message
    assert "with an audio encoder" in reply.message


def test_images_that_were_dropped_are_read_again(
    projector: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their embeddings and pixels are not kept, nor is the text used. No other request waits while one is decoded."""
    monkeypatch.setattr("kvflash_ggml.media.rows.MediaRows.__init__.__defaults__", (1,))
    stock, threads = files.decode, []

    def decode(*args: Any, **more: Any) -> Any:
        threads.append(threading.current_thread().name)
        return stock(*args, **more)

    monkeypatch.setattr(files, "decode", decode)

    async def work(client: Client) -> list[Any]:
        first = await Chat(client).ask(RED, "Which?")
        await Chat(client).ask(BLUE, "Which?")
        return [first, await Chat(client).ask(RED, "Which?", cache_prompt=False)]

    first, again = serving(projector, work)
    assert_same(first, again)
    assert len(encoded) == len(threads) == 3
    assert not any("engine" in name for name in threads), threads


@pytest.mark.parametrize("room", [None, 0])
def test_an_image_that_is_dropped_while_it_waits(
    projector: Path, room: int | None, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was known when its request came, so nobody decoded it. room: bytes for embeddings of requests that wait."""
    from kvflash_ggml.llama import image_reader, serving

    if room is not None:
        monkeypatch.setattr(image_reader, "LENT", room)
    monkeypatch.setattr("kvflash_ggml.media.rows.MediaRows.__init__.__defaults__", (1,))
    stock, decoded = files.decode, []
    monkeypatch.setattr(files, "decode", lambda *args, **more: (decoded.append(1), stock(*args, **more))[1])
    red, blue = (base64.b64decode(url.partition(",")[2]) for url in (RED, BLUE))
    config = KVFlashConfig(pool=2048, calibrate=False)
    with closing(Llama(str(MODEL), kvflash=config, mmproj=projector, logits_all=True, **SIZE)) as llm:
        reader = serving.image_reader_of(llm)
        media = reader.encoder.media

        def read(image: Any) -> Any:
            media.begin()
            image.load()
            llm.reset()
            llm.eval(image.tokens)
            return llm.scores[: llm.n_tokens].copy()

        first = read(reader.read(red, files.MediaLimits()))
        waits = reader.read(red, files.MediaLimits())
        read(reader.read(blue, files.MediaLimits()))
        assert len(decoded) == len(encoded) == 2
        assert near(read(waits), first, IMAGE)
        assert len(decoded) == len(encoded) == (2 if room is None else 3)
        del waits
        gc.collect()
        assert (reader._held, reader._lent) == (0, 0)


def test_too_many_images_wait(projector: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from kvflash_ggml.llama import image_reader

    async def work(client: Client) -> list[int]:
        content = [{"type": "image_url", "image_url": {"url": RED}}]
        asked = {"messages": [{"role": "user", "content": content}], "max_tokens": 1}
        statuses = [(await client.post("/v1/chat/completions", asked)).status for _ in range(2)]
        monkeypatch.setattr(image_reader, "HELD", 10)
        statuses.append((await client.post("/v1/chat/completions", asked)).status)
        return statuses

    assert serving(projector, work) == [200, 200, 503]


def test_a_photo_is_read(projector: Path) -> None:
    url = "data:image/jpeg;base64," + base64.b64encode(JPEGS[1]).decode()

    async def work(client: Client) -> int:
        chat = Chat(client)
        await chat.ask(url, "Which?")
        return chat.prompts[0]

    assert serving(projector, work) > ROWS


def test_an_image_is_kept_for_its_salt_alone(
    projector: Path, encoded: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither what stands for it nor its embeddings: the time would tell who has sent it."""
    from kvflash_ggml.llama import serving

    stock, decoded = files.decode, []
    monkeypatch.setattr(files, "decode", lambda *args, **more: (decoded.append(1), stock(*args, **more))[1])
    red = base64.b64decode(RED.partition(",")[2])
    config = KVFlashConfig(pool=2048, calibrate=False)
    with closing(Llama(str(MODEL), kvflash=config, mmproj=projector, logits_all=True, **SIZE)) as llm:
        reader = serving.image_reader_of(llm)
        scores = []
        for count, salt in ((1, ""), (1, ""), (2, "a"), (2, "a"), (3, "b")):
            image = reader.read(red, files.MediaLimits(), salt)
            reader.encoder.media.begin()
            image.load()
            llm.reset()
            llm.eval(image.tokens)
            scores.append(llm.scores[: llm.n_tokens].copy())
            assert len(decoded) == len(encoded) == count
        assert all(near(one, scores[0], IMAGE) for one in scores)
