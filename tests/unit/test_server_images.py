"""Images in requests of every interface: where they stand, what they count, and which are refused."""

from __future__ import annotations

import asyncio
import base64
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from starlette.requests import Request as HttpRequest
from support.asgi import Reply
from support.fake_model import FakeModel, FakePrompts, FakeTask
from support.fake_server import Server

from kvflash_ggml.batching.messages import Request
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.media.files import MediaLimits
from kvflash_ggml.server import fetch, images
from kvflash_ggml.server.errors import ApiError
from kvflash_ggml.server.images import RequestImages
from kvflash_ggml.server.intake import MAX_FETCHES

FILES = [b"\1\2\3", b"\4\5"]
"""The fake has a row for each byte, and a mark before and behind them."""
CODED = [base64.b64encode(file).decode() for file in FILES]
URLS = [f"data:image/png;base64,{text}" for text in CODED]
ROWS = [(60, -2, -3, -4, 62), (60, -5, -6, 62)]


def photo(url: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def said(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def user(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": list(parts)}


class Model(FakeModel):
    """Keeps the prompt of its newest request."""

    asked: Sequence[int] = ()

    def begin(self, request: Request, **more: Any) -> FakeTask:
        assert all(image.tokens for image in request.images)
        self.asked = request.tokens.tolist()
        return super().begin(request, **more)


def server(*, sees: bool = True, **settings: Any) -> Server:
    return Server(Model(), FakePrompts(sees=sees), **settings)


def chat(one: Server, *messages: dict[str, Any], **more: Any) -> Reply:
    return one.post("/v1/chat/completions", {"messages": list(messages), **more})


def read(one: Server) -> list[Any]:
    """The newest prompt: text, and the numbers of images between."""
    made: list[Any] = [""]
    assert isinstance(one.model, Model)
    for token in one.model.asked:
        if token < 0:
            made += [token, ""]
        else:
            made[-1] += chr(token)
    return made


def test_parts_of_text_are_lines_but_at_an_image() -> None:
    one = server()
    chat(one, user(said("a"), said(""), said("b"), photo(URLS[0]), said("c"), said("d")))
    texts = [part for part in read(one) if isinstance(part, str)]
    assert texts[0].startswith("user: a\nb<")
    assert ">c\nd\n" in texts[-1]


def test_an_image_stands_where_it_was_sent() -> None:
    one = server()
    reply = chat(one, user(said("a"), photo(URLS[0]), said("b")), user(photo(URLS[1]), said("c")))
    assert reply.status == 200, reply.message
    first, second = ROWS
    assert read(one) == [
        "user: a<", first[1], "", first[2], "", first[3], ">b\nuser: <", second[1], "", second[2],
        ">c\nassistant: ",
    ]  # fmt: skip
    assert one.prompts.seen == FILES
    assert reply.json["usage"]["prompt_tokens"] == len("user: ab\nuser: c\nassistant: ") + len(first) + len(second)


INTERFACES: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", {"messages": [user(photo(URLS[0]), said("b"))]}),
    ("/v1/chat/completions", {"messages": [user({"type": "input_image", "image_url": URLS[0]}, said("b"))]}),
    (
        "/v1/messages",
        {
            "max_tokens": 9,
            "messages": [
                user(
                    {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": CODED[0]}},
                    said("b"),
                )
            ],
        },
    ),
    (
        "/v1/responses",
        {"input": [user({"type": "input_image", "image_url": URLS[0]}, {"type": "input_text", "text": "b"})]},
    ),
    ("/api/chat", {"stream": False, "messages": [{"role": "user", "content": "b", "images": [CODED[0]]}]}),
    ("/api/generate", {"stream": False, "prompt": "b", "images": [CODED[0]]}),
]


@pytest.mark.parametrize(("path", "data"), INTERFACES)
def test_every_interface_has_images(path: str, data: dict[str, Any]) -> None:
    one = server()
    reply = one.post(path, data)
    assert reply.status == 200, reply.body
    assert read(one)[:3] == ["user: <", ROWS[0][1], ""]
    assert read(one)[-1] == ">b\nassistant: "


@pytest.mark.parametrize(("path", "data"), INTERFACES)
def test_without_a_projector_they_are_refused(path: str, data: dict[str, Any]) -> None:
    reply = Server().post(path, data)
    assert reply.status == 400
    assert b"--mmproj FILE" in reply.body


def test_a_tool_may_answer_with_an_image() -> None:
    """As Claude Code's reader of files does. A model without a projector is told that something was left out."""
    source = {"type": "base64", "media_type": "image/png", "data": CODED[1]}
    result = {"type": "tool_result", "tool_use_id": "t", "content": [said("x"), {"type": "image", "source": source}]}
    asked = {"max_tokens": 9, "messages": [user(said("a")), user(result)]}
    one = server()
    assert one.post("/v1/messages", asked).status == 200
    assert read(one)[0] == "user: a\ntool: x<"
    blind = server(sees=False)
    assert blind.post("/v1/messages", asked).status == 200
    assert "x\n[image: left out" in read(blind)[0]
    item = {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image", "image_url": URLS[1]}]}
    one = server()
    assert one.post("/v1/responses", {"input": [user(said("a")), item]}).status == 200
    assert read(one)[0] == "user: a\ntool: <"


def test_tokens_of_images_are_counted() -> None:
    for path, data, counted in (
        ("/v1/chat/completions", INTERFACES[0][1], "/v1/chat/completions/input_tokens"),
        ("/v1/messages", INTERFACES[2][1], "/v1/messages/count_tokens"),
        ("/v1/responses", INTERFACES[3][1], "/v1/responses/input_tokens"),
    ):
        reply = server().post(path, data).json["usage"]
        assert server().post(counted, data).json["input_tokens"] == reply.get(
            "prompt_tokens", reply.get("input_tokens")
        )


@pytest.mark.parametrize(
    ("url", "code", "why"),
    [
        ("https://example.com/a.png", "invalid_image", "no address or file is fetched"),
        ("file:///etc/passwd", "invalid_image", "no address or file is fetched"),
        (None, "invalid_image", "no address or file is fetched"),
        (7, "invalid_image", "no address or file is fetched"),
        ("data:image/png,abc", "invalid_image", "no data URL in base64"),
        ("data:image/png;base64,a?c=", "invalid_image", "no data URL in base64"),
        ("data:image/png;base64,", "", ""),
        (
            "data:image/png;base64," + "A" * 44,
            "image_too_large",
            "about 33 bytes, and 24 is the most: --max-image-size",
        ),
        ("data:image/png;base64," + base64.b64encode(b"bad").decode(), "invalid_image", "3 bytes cannot be decoded"),
    ],
)
def test_an_image_that_is_refused_is_an_error_of_its_request(url: Any, code: str, why: str) -> None:
    one = server(max_image_bytes=24)
    reply = chat(one, user(said("a")), user(photo(url)))
    if not code:  # the fake takes it
        assert reply.status == 200
        return
    assert (reply.status, reply.json["error"]["code"]) == (400, code)
    assert why in reply.message
    assert "messages.1.content" in reply.message
    assert read(one) == [""]


SEEN_AT = "https://photos.example/a.png"


@pytest.mark.parametrize(
    ("path", "part"),
    [
        ("/v1/chat/completions", photo(SEEN_AT)),
        ("/v1/messages", {"type": "image", "source": {"type": "url", "url": SEEN_AT}}),
    ],
)
def test_urls_are_fetched_where_the_server_says_so(
    path: str, part: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def fetched(url: str, most: int, seconds: float) -> bytes:
        asked.append((url, most))
        assert 0 < seconds <= fetch.SECONDS
        assert threading.current_thread().name.startswith("kvflash-fetch")
        if len(asked) > 1:
            raise ConfigError("its address is not a public one")
        return FILES[0]

    monkeypatch.setattr(fetch, "fetch", fetched)
    data = {"max_tokens": 9, "messages": [user(part, said("b"))]}
    refused = server().post(path, data)
    assert (refused.status, asked) == (400, [])
    assert b"no address or file is fetched" in refused.body
    assert b"or start the server with --media-urls" in refused.body
    one = server(media_urls=True, max_image_bytes=24)
    reply = one.post(path, data)
    assert reply.status == 200, reply.body
    assert read(one)[:3] == ["user: <", ROWS[0][1], ""]
    assert asked == [(SEEN_AT, 24)]
    reply = server(media_urls=True).post(path, data)
    assert reply.status == 400
    assert b"its address is not a public one" in reply.body
    template = server(media_urls=True).post("/apply-template", {"messages": [user(photo(SEEN_AT))]})
    assert (template.json["prompt"], len(asked)) == ("user: <__media__>\nassistant: ", 2)
    local = server(media_urls=True).post("/v1/chat/completions", {"messages": [user(photo("file:///etc/passwd"))]})
    assert (local.status, len(asked)) == (400, 2)


def test_the_files_of_a_request_have_one_time(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, asked = [0.0], []

    def fetched(url: str, most: int, seconds: float) -> bytes:
        asked.append(seconds)
        clock[0] += 6
        return FILES[0]

    monkeypatch.setattr(fetch, "fetch", fetched)
    monkeypatch.setattr(images.time, "monotonic", lambda: clock[0])
    one = RequestImages(server(media_urls=True).front, "")
    for _ in range(3):
        one.take(photo(SEEN_AT), "here")
    with pytest.raises(ApiError, match=r"here: .* the files of this request take longer than 10 seconds"):
        one._fetch()
    assert asked == [10, 4]


def test_slow_hosts_keep_no_other_work_waiting() -> None:
    """A client fetches for one request at a time, and all for two."""
    one, go_on, at = server(), threading.Event(), []

    def fetched(client: str) -> None:
        at.append(client)
        assert go_on.wait(30)

    async def work(_: Any) -> None:
        http = {name: HttpRequest({"type": "http", "client": (name, 1)}) for name in "abc"}
        asked = [asyncio.create_task(one.front.work(http[of], fetched, of, fetches=True)) for of in "aaaabbc"]
        while len(at) < 2:
            await asyncio.sleep(0.001)
        try:
            for of in http:
                assert await asyncio.wait_for(one.front.work(http[of], lambda: 7), 60) == 7
            assert at == ["a", "b"]
        finally:
            go_on.set()
            await asyncio.gather(*asked)

    one.run(work)
    assert sorted(at) == list("aaaabbc")


def test_few_requests_wait_for_files() -> None:
    """Each holds its body meanwhile."""
    one, go_on = server(), threading.Event()

    async def work(_: Any) -> None:
        http = [HttpRequest({"type": "http", "client": (f"{i}", 1)}) for i in range(6)]

        def ask(of: int) -> Any:
            return one.front.work(http[of], go_on.wait, 30, fetches=True)

        asked = [asyncio.create_task(ask(of)) for of in range(4) for _ in range(MAX_FETCHES)]
        await asyncio.sleep(0)
        for of, whose in ((0, "8 of this client's requests fetch files, and 8 is"), (5, "32 of all clients' requests")):
            with pytest.raises(ApiError, match=whose) as refused:
                await ask(of)
            assert refused.value.status == 429
        assert await one.front.work(http[0], lambda: 7) == 7, "other work goes on"
        go_on.set()
        assert all(await asyncio.gather(*asked))
        asked = [asyncio.create_task(ask(5)) for _ in range(MAX_FETCHES)]
        await asyncio.sleep(0)
        with pytest.raises(ApiError, match="8 of this client's requests"):
            await ask(5)
        assert await ask(0)
        assert all(await asyncio.gather(*asked))

    one.run(work)


def said_aloud(data: Any, format: Any = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": format}}


def test_a_sound_stands_where_it_was_sent() -> None:
    one = Server(Model(), FakePrompts(sees=True, hears=True), max_image_pixels=7, max_audio_seconds=5)
    reply = chat(one, user(said("a"), said_aloud(CODED[1], "mp3"), photo(URLS[0]), said("b")))
    assert reply.status == 200, reply.message
    assert read(one)[:3] == ["user: a<", ROWS[1][1], ""]
    assert read(one)[4] == "><"
    assert one.prompts.seen == [FILES[1], FILES[0]]
    assert one.prompts.limits == MediaLimits(pixels=7, seconds=5)


@pytest.mark.parametrize(
    ("part", "code", "why"),
    [
        (said_aloud(CODED[0], "opus"), "invalid_audio", "a sound is 'opus': send it as wav, mp3 or flac"),
        (said_aloud(CODED[0], []), "invalid_audio", "a sound is '[]'"),
        (said_aloud("a?c="), "invalid_audio", "as data in base64"),
        (said_aloud(7), "invalid_audio", "as data in base64"),
        ({"type": "input_audio", "input_audio": "A"}, "invalid_audio", "as data in base64"),
        (said_aloud("A" * 44), "audio_too_large", "about 33 bytes, and 24 is the most: --max-image-size"),
        (said_aloud(base64.b64encode(b"bad").decode()), "invalid_audio", "3 bytes cannot be decoded"),
    ],
)
def test_a_sound_that_is_refused_is_an_error_of_its_request(part: Any, code: str, why: str) -> None:
    one = Server(Model(), FakePrompts(hears=True), max_image_bytes=24)
    reply = chat(one, user(said("a")), user(part))
    assert (reply.status, reply.json["error"]["code"]) == (400, code)
    assert why in reply.message
    assert "messages.1.content" in reply.message
    assert read(one) == [""]


def test_a_projector_may_take_one_kind_alone() -> None:
    for taken, refused, why, prompts in (
        (said_aloud(CODED[0]), photo(URLS[0]), "a vision encoder", FakePrompts(hears=True)),
        (photo(URLS[0]), said_aloud(CODED[0]), "an audio encoder", FakePrompts(sees=True)),
    ):
        assert chat(Server(Model(), prompts), user(taken)).status == 200
        reply = chat(Server(Model(), prompts), user(refused))
        assert (reply.status, reply.json["error"]["code"]) == (400, "not_text")
        assert f"add --mmproj FILE where the server is started, a projector with {why}" in reply.message


def test_a_request_has_so_many_images() -> None:
    parts = [photo(URLS[0])] * 3
    assert chat(server(max_images=3), user(*parts)).status == 200
    reply = chat(server(max_images=2), user(*parts))
    assert (reply.status, reply.json["error"]["code"]) == (400, "too_many_images")
    assert "2 images and sounds: --max-images" in reply.message


def test_a_template_that_leaves_an_image_out_is_told() -> None:
    one = server()
    one.prompts.chat = lambda asked: FakePrompts.chat(FakePrompts(), type(asked)(messages=asked.messages[1:]))  # type: ignore[method-assign]
    reply = chat(one, user(photo(URLS[0])), user(said("b")))
    assert reply.status == 400
    assert "writes 0 of 1 images and sounds" in reply.message


def test_the_text_of_a_chat_has_llama_cpps_mark() -> None:
    one = server()
    reply = one.post("/apply-template", {"messages": [user(said("a"), photo(URLS[0]))]})
    assert reply.json["prompt"] == "user: a<__media__>\nassistant: "
    assert chat(server(), user(said("<__media__>"))).status == 200, "text of a user is text"


def test_clients_are_told_whether_it_sees() -> None:
    assert server().get("/props").json["modalities"] == {"vision": True, "audio": False}
    assert Server().get("/props").json["modalities"]["vision"] is False
    hearing = Server(Model(), FakePrompts(hears=True))
    assert hearing.get("/props").json["modalities"] == {"vision": False, "audio": True}
