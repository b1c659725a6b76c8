"""Chats that outgrow the context: an error that says what helps, or the oldest messages leave the prompt."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, strategies
from support.asgi import Client, Reply
from support.fake_model import FakeModel, FakePrompts
from support.fake_server import Server

from kvflash_ggml.errors import ContextFull
from kvflash_ggml.server import overflow, requestlog

N_CTX = 1000
SYSTEM = {"role": "system", "content": "be kind"}


def turns(count: int, size: int = 60) -> list[dict[str, Any]]:
    """Questions and answers, a question at the end."""
    return [
        {"role": ("user", "assistant")[i % 2], "content": f"{i:03} ".ljust(size, "x")} for i in range(2 * count + 1)
    ]


def server(**settings: Any) -> Server:
    prompts = FakePrompts(sees=True)
    return Server(FakeModel(n_ctx=N_CTX), prompts, **settings)


def ask(messages: Any, one: Server | None = None, path: str = "/v1/chat/completions", **more: Any) -> Reply:
    return (one or server(overflow="roll")).post(path, {"messages": messages, "max_tokens": 10, **more})


def numbers(one: Server) -> list[int]:
    """Which messages of `turns` the prompt has that was rendered last."""
    return [int(message["content"][:3]) for message in one.prompts.rendered[-1] if message["content"][:3].isdecimal()]


@pytest.mark.parametrize(("trained", "more"), [(0, "and --yarn"), (8192, "up to 8192, and beyond that with --yarn")])
def test_the_error_names_a_longer_context_first(trained: int, more: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakePrompts, "facts", {"n_ctx_train": trained})
    reply = ask([SYSTEM, *turns(20)], server())
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert f"start the server with a larger -c, {more}, or with --overflow roll; or shorten it" in reply.message
    raw = server(overflow="roll").post("/v1/completions", {"prompt": "x" * 2000})
    assert raw.status == 400, "a prompt has no messages"
    assert "--overflow" not in raw.message
    alone = ask([SYSTEM, {"role": "user", "content": "x" * 20000}])
    assert (alone.status, "--overflow" in alone.message) == (400, False)
    assert "the newest turn do not fit alone" in alone.message


def test_the_oldest_messages_leave() -> None:
    one, said = server(overflow="roll"), [SYSTEM, *turns(20)]
    reply = ask(said, one)
    assert reply.status == 200
    kept = numbers(one)
    assert kept == [*range(kept[0], 41)]
    assert kept[0] % 2 == 0, "what is kept begins with a question"
    assert one.prompts.rendered[-1][0] == SYSTEM
    assert reply.json["usage"]["prompt_tokens"] <= N_CTX - 10
    assert reply.json["kvflash"] == {"left_out": kept[0]}
    assert reply.headers["x-kvflash-overflow"] == f"left out the {kept[0]} oldest messages"


def test_a_chat_with_room_loses_nothing() -> None:
    one = server(overflow="roll")
    reply = ask([SYSTEM, *turns(4)], one)
    assert "kvflash" not in reply.json
    assert "x-kvflash-overflow" not in reply.headers
    assert len(one.prompts.rendered) == 1


def test_the_next_turns_begin_as_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Messages leave in pieces, so that most turns read what is new alone."""
    monkeypatch.setattr(overflow, "BYTES", 1)  # of this model's tokens
    one = Server(FakeModel(n_ctx=4000), overflow="roll")

    async def work(client: Client) -> list[tuple[int, int]]:
        found = []
        for count in range(5, 60):
            asked = {"messages": [SYSTEM, *turns(count, 150)], "max_tokens": 10}
            reply = await client.post("/v1/chat/completions", asked)
            usage, left_out = reply.json["usage"], reply.json.get("kvflash", {}).get("left_out", 0)
            found.append((left_out, usage["prompt_tokens"] - usage["prompt_tokens_details"]["cached_tokens"]))
        return found

    found = one.run(work)
    assert found[0][0] == 0 < found[-1][0]
    still = [read for (before, _), (now, read) in pairwise(found) if before == now]
    assert len(still) > 30
    assert max(still) < 400 < 2000 < max(read for _, read in found)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {}),
        ("/v1/messages", {"system": "be kind"}),
        ("/api/chat", {}),
        ("/v1/responses", {}),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
def test_every_chat_interface_says_so(path: str, body: dict[str, Any], stream: bool) -> None:
    one, said = server(overflow="roll"), turns(20)
    asked = {"input": said} if path == "/v1/responses" else {"messages": said, "max_tokens": 10}
    reply = one.post(path, {**asked, **body, "stream": stream})
    assert reply.status == 200
    told = re.fullmatch(r"left out the (\d+) oldest messages", reply.headers["x-kvflash-overflow"])
    assert told is not None
    assert f'"kvflash":{{"left_out":{told[1]}}}' in bytes(reply.body).decode().replace(" ", "")


@pytest.mark.parametrize(
    ("path", "more", "usual", "status"),
    [
        ("/v1/chat/completions", {"kvflash": {"overflow": "roll"}}, "error", 200),
        ("/v1/chat/completions", {"kvflash": {"overflow": "error"}}, "roll", 400),
        ("/v1/messages", {"kvflash": {"overflow": "roll"}}, "error", 200),
        ("/v1/responses", {"truncation": "auto"}, "error", 200),
        ("/v1/responses", {}, "roll", 200),
        ("/v1/responses", {"truncation": "disabled"}, "roll", 400),
        ("/v1/responses", {"truncation": "some"}, "roll", 400),
        ("/api/chat", {"truncate": True}, "error", 200),
        ("/api/chat", {"truncate": False}, "roll", 400),
    ],
)
def test_a_request_may_say_it(path: str, more: dict[str, Any], usual: Any, status: int) -> None:
    asked = {"input": turns(20)} if path == "/v1/responses" else {"messages": turns(20), "max_tokens": 10}
    reply = server(overflow=usual).post(path, {**asked, "stream": False, **more})
    assert reply.status == status, bytes(reply.body)
    if path == "/v1/responses" and status == 200:
        assert reply.json["truncation"] == "auto"


def test_tokens_are_counted_of_the_whole_chat() -> None:
    said = {"messages": turns(20)}
    reply = server(overflow="roll").post("/v1/messages/count_tokens", said)
    assert reply.json["input_tokens"] > N_CTX


def test_room_for_the_answer_is_kept() -> None:
    for most, room in ((10, 10), (10_000, N_CTX // 4), (-1, N_CTX // 4)):
        reply = ask(turns(20), max_tokens=most)
        assert reply.json["usage"]["prompt_tokens"] <= N_CTX - room


def test_a_question_that_is_too_long_alone() -> None:
    reply = ask([SYSTEM, *turns(3)[:-1], {"role": "user", "content": "x" * 2000}])
    assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
    assert 2000 < int(reply.message.split()[4]) < 2100, "without the older messages"
    assert ask([{"role": "user", "content": "x" * 2000}]).status == 400


def test_a_text_that_is_not_tokenised_at_once() -> None:
    """Its whole chat is too large for the tokenizer, which says so; what is kept is not."""

    class Bounded(FakePrompts):
        def tokenize(self, text: str, **more: Any) -> list[int]:
            if len(text) > 1500:
                raise ContextFull("the text has too many bytes")
            return super().tokenize(text, **more)

    for usual, status in (("roll", 200), ("error", 400)):
        one = Server(FakeModel(n_ctx=N_CTX), Bounded(), overflow=usual)
        reply = ask(turns(60), one)
        assert (reply.status, "too many bytes" in str(reply.json)) == (status, status == 400)


def test_images_leave_with_their_messages() -> None:
    def seen(data: str, size: int) -> dict[str, Any]:
        image = {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}
        return {"role": "user", "content": [image, {"type": "text", "text": "x" * size}]}

    class Model(FakeModel):
        images = True

    prompts = FakePrompts(sees=True)
    one = Server(Model(n_ctx=N_CTX), prompts, overflow="roll")
    said = [seen("QUFB", 800), {"role": "assistant", "content": "yes"}, seen("QkJC", 100)]
    assert ask(said, one).status == 200
    assert prompts.seen[-1:] == [b"BBB"]


def test_the_log_warns(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger=requestlog.NAME)
    ask(turns(20), server(overflow="roll", on_end=requestlog.ended))
    (line,) = [one for one in caplog.records if "left_out" in one.getMessage()]
    assert line.levelname == "WARNING"
    assert "oldest messages: the context has no room for them" in json.loads(line.getMessage())["left_out"]


# --- what may leave


def roles(text: str, size: int = 10) -> list[dict[str, Any]]:
    names = {"s": "system", "u": "user", "a": "assistant", "t": "tool"}
    return [{"role": names[letter], "content": "x" * size} for letter in text]


@pytest.mark.parametrize(
    ("said", "kept"),
    [
        ("u", []),
        ("su", []),
        ("sua", []),
        ("suau", ["su"]),
        ("uauau", ["uau", "u"]),
        ("suatat", ["suat"]),
        ("uauatatat", ["uatatat", "uatat", "uat"]),
        ("auau", ["uau", "u"]),
        ("uaua", ["ua"]),
        ("s", []),
    ],
)
def test_borders(said: str, kept: list[str]) -> None:
    messages = roles(said)
    found = ["".join(messages[i]["role"][0] for i in one) for one in overflow.cuts(messages, 4)]
    assert found == kept


@given(strategies.text("uat", min_size=1, max_size=30), strategies.integers(4, 400))
def test_every_cut_is_shorter_and_keeps_the_end(said: str, n_ctx: int) -> None:
    messages = roles("s" + said)
    found = overflow.cuts(messages, n_ctx)
    assert all(len(a) > len(b) for a, b in pairwise(found))
    for one in found:
        assert one == sorted(set(one))
        assert (one[0], one[-1]) == (0, len(messages) - 1)
        assert messages[one[1]]["role"] == "user"
    longer = overflow.cuts([*messages, *roles("u")], n_ctx)
    assert longer[: len(found) - 1] == [[*one, len(messages)] for one in found[:-1]], "a longer chat has the same cuts"


def test_the_longest_that_fits_is_found() -> None:
    kept = [[*range(n)] for n in range(40, 0, -1)]
    for room in range(1, 45):
        asked = list[int]()

        def make(one: list[int], asked: list[int] = asked) -> int:
            asked.append(len(one))
            if len(one) > 30:
                raise ContextFull("too large")
            return len(one)

        assert overflow.longest(kept, make, lambda size, room=room: size <= room)[1] == min(room, 30)
        assert len(asked) <= 8
    assert overflow.longest(kept, len, lambda size: False) == ([0], 1)
