"""`/infill` and `suffix`: a model with FIM tokens fills a gap; any other is refused by name."""

from __future__ import annotations

from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_model import FakeModel, FakePrompts
from support.fake_server import Server

PLAIN = {"pre": 1, "suf": 2, "mid": 3}
REPOSITORY = {**PLAIN, "rep": 4, "sep": 5}

VIM = {
    "input_prefix": "def f(x):\n", "input_suffix": "\n    return y\n", "prompt": "    y",
    "input_extra": [{"text": "import re\n", "filename": "a.py", "time": 1}], "n_predict": 4, "n_indent": 4,
    "top_k": 40, "top_p": 0.99, "stream": False, "samplers": ["top_k", "top_p", "infill"], "cache_prompt": True,
    "t_max_prompt_ms": 500, "t_max_predict_ms": 1000,
    "response_fields": ["content", "tokens_predicted", "timings/cache_n"],
}  # fmt: skip
"""As llama.vim sends it."""


def ask(path: str, data: dict[str, Any], gap: dict[str, int]) -> tuple[Reply, bytes]:
    """The reply, and the prompt that the model has read."""
    seen = []
    model = FakeModel(reply=lambda prompt: seen.append(prompt) or b" = x")  # type: ignore[func-returns-value]
    reply = Server(model, FakePrompts(gap=gap)).post(path, data)
    return reply, seen[0] if seen else b""


def test_a_gap_in_a_file() -> None:
    reply, prompt = ask("/infill", VIM, PLAIN)
    assert (reply.status, reply.json["content"]) == (200, " = x")
    assert prompt == b"\n\n--- snippet ---\n\nimport re\n\x01def f(x):\n    y\x02\n    return y\n\x03"


def test_several_answers_for_a_gap() -> None:
    reply, _ = ask("/infill", {**VIM, "n": 2}, PLAIN)
    assert reply.json == [{"content": " = x", "tokens_predicted": 4, "timings/cache_n": cached} for cached in (0, 60)]


def test_a_gap_in_a_repository() -> None:
    _, prompt = ask("/infill", VIM, REPOSITORY)
    head = b"\x04myproject\n\x05a.py\nimport re\n\x05filename\n"
    assert prompt == head + b"\x01def f(x):\n    y\x02\n    return y\n\x03"


def test_other_files_leave_room() -> None:
    n_ctx = FakeModel().n_ctx
    files = [{"text": "a" * n_ctx}, {"text": "b" * (n_ctx // 2)}]
    reply, prompt = ask("/infill", {**VIM, "input_extra": files}, PLAIN)
    assert reply.status == 200
    assert (len(prompt), b"b" * (n_ctx // 2) in prompt, prompt[:1]) == (n_ctx - 1 - 4, True, b"a")
    assert prompt.endswith(b"\x01def f(x):\n    y\x02\n    return y\n\x03")


@pytest.mark.parametrize("given", [{}, {"n_predict": -1}, {"n_predict": None}], ids=["none", "-1", "null"])
def test_other_files_leave_room_for_an_answer_without_a_limit(given: dict[str, Any]) -> None:
    n_ctx = FakeModel().n_ctx
    asked = {name: value for name, value in VIM.items() if name != "n_predict"}
    reply, prompt = ask("/infill", {**asked, **given, "input_extra": [{"text": "a" * n_ctx}]}, PLAIN)
    assert (reply.status, len(prompt)) == (200, n_ctx - 1 - n_ctx // 4)


def test_files_that_have_no_room_take_no_time() -> None:
    server, read = Server(prompts=FakePrompts(gap=PLAIN)), []
    tokenize = server.prompts.tokenize
    server.prompts.tokenize = lambda text, **more: (read.append(text[:1]), tokenize(text, **more))[1]
    files = [{"text": letter * server.model.n_ctx} for letter in "abc"]
    assert server.post("/infill", {**VIM, "input_extra": files}).status == 200
    assert [letter for letter in read if letter in ("a", "b", "c")] == ["c"]


def test_an_editor_warms_up() -> None:
    """llama.vim sends the other files before anybody types, and wants no token: the next request has read them."""
    nothing = {"input_prefix": "", "input_suffix": "", "prompt": "", "n_predict": 0, "samplers": [], "temperature": 0.0}
    server = Server(FakeModel(), FakePrompts(gap=PLAIN))
    files = [{**file, "text": file["text"] * 40} for file in VIM["input_extra"]]

    async def work(client: Client) -> list[Reply]:
        return [await client.post("/infill", {**VIM, "input_extra": files, **more}) for more in (nothing, {})]

    warm, typed = server.run(work)
    assert (warm.status, warm.json["content"], warm.json["tokens_predicted"]) == (200, "", 0)
    assert typed.json["timings/cache_n"] >= len(files[0]["text"])


@pytest.mark.parametrize(
    ("path", "data"),
    [
        ("/v1/completions", {"prompt": "a", "suffix": "b"}),
        ("/api/generate", {"model": "fake", "prompt": "a", "suffix": "b", "stream": False}),
    ],
)
def test_a_suffix_of_other_interfaces(path: str, data: dict[str, Any]) -> None:
    reply, prompt = ask(path, data, PLAIN)
    assert (reply.status, prompt) == (200, b"\x01a\x02b\x03")
    refused, _ = ask(path, data, {})
    assert refused.status == 501
    assert "FIM" in str(refused.json["error"])


def test_what_cannot_be() -> None:
    refused, _ = ask("/infill", VIM, {})
    assert (refused.status, refused.json["error"]["code"]) == (501, "not_served")
    assert "'fake' has no FIM tokens" in refused.message
    assert refused.json["error"]["param"] is None, "a path is no field"
    for wrong in ({"input_prefix": None}, {"input_suffix": 1}, {"input_extra": [{"filename": "x"}]}, {"prompt": [1]}):
        assert ask("/infill", {**VIM, **wrong}, PLAIN)[0].status == 400
    assert ask("/v1/completions", {"prompt": [97], "suffix": "b"}, PLAIN)[0].status == 400


def test_ollama_says_who_can() -> None:
    for gap in (PLAIN, {}):
        reply = Server(prompts=FakePrompts(gap=gap)).post("/api/show", {})
        assert ("insert" in reply.json["capabilities"]) == bool(gap)
