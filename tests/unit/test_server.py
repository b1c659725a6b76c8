"""The server's endpoints, on a model made of a few lines."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import itertools
import json
import logging
import re
import sys
import threading
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_model import TEMPLATE, FakeModel, FakePrompts, Hold
from support.fake_server import Server

from kvflash_ggml.batching.scheduler import Limits
from kvflash_ggml.errors import HostMemoryError
from kvflash_ggml.logs import Formatter
from kvflash_ggml.server import exchange

HELLO = [{"role": "user", "content": "hello"}]


def chat(data: dict[str, Any] | None = None, *, server: Server | None = None, **more: Any) -> Reply:
    return (server or Server()).post("/v1/chat/completions", {"messages": HELLO, **(data or {}), **more})


def deltas(reply: Reply) -> list[dict[str, Any]]:
    return [frame["choices"][0]["delta"] for frame in reply.frames[:-1] if frame["choices"]]


# --- answers


def test_a_chat() -> None:
    reply = chat(max_tokens=20)
    assert reply.status == 200
    (choice,) = reply.json["choices"]
    assert choice["message"] == {"role": "assistant", "content": "an answer"}
    assert choice["finish_reason"] == "stop"
    said = len("user: hello\nassistant: ")
    assert reply.json["usage"] == {
        "prompt_tokens": said, "completion_tokens": 9, "total_tokens": said + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert reply.json["id"].startswith("chatcmpl-")
    assert reply.json["timings"]["predicted_n"] == 9


def test_a_stream() -> None:
    reply = chat(stream=True, stream_options={"include_usage": True})
    assert reply.headers["content-type"].startswith("text/event-stream")
    assert reply.ended
    assert deltas(reply)[0] == {"role": "assistant", "content": ""}
    assert "".join(delta.get("content", "") for delta in deltas(reply)) == "an answer"
    reasons = [frame["choices"][0]["finish_reason"] for frame in reply.frames[:-1] if frame["choices"]]
    assert reasons[-1] == "stop"
    assert set(reasons[:-1]) == {None}
    assert reply.frames[-2]["usage"]["completion_tokens"] == 9
    assert reply.frames[-1] == "[DONE]"
    assert {frame["id"] for frame in reply.frames[:-1]} == {reply.frames[0]["id"]}


def test_a_completion() -> None:
    for prompt in ("hello", ["hello"], list(b"hello"), [list(b"hello")]):
        reply = Server().post("/v1/completions", {"prompt": prompt, "max_tokens": 4, "echo": True})
        assert reply.json["choices"][0] == {
            "index": 0, "text": "helloan a", "logprobs": None, "finish_reason": "length",
        }  # fmt: skip


def test_the_log_probabilities_of_a_prompt() -> None:
    """The first token follows nothing; a client that measures cuts off the last one, which is the answer's."""
    asked = {"prompt": [list(b"h\xc3\xa9llo"), "abc"], "echo": True, "logprobs": 2}
    for most, answer in ((0, []), (1, ["a"])):
        first, second = Server().post("/v1/completions", {**asked, "max_tokens": most}).json["choices"]
        told = first["logprobs"]
        assert (first["text"], first["finish_reason"]) == ("héllo" + "".join(answer), "length")
        assert told["tokens"] == ["h", "\ufffd", "\ufffd", "l", "l", "o", *answer]
        assert told["token_logprobs"] == [None, *[-0.5] * (5 + most)]
        assert told["text_offset"] == [0, 1, 1, 2, 3, 4, *[5] * most]
        assert told["top_logprobs"][:2] == [None, {"\ufffd": -0.5}], "two texts that are one have the likelier's value"
        assert told["top_logprobs"][3] == {"l": -0.5, "m": -1.5}
        assert second["logprobs"]["tokens"] == ["a", "b", "c", *answer]


def test_a_prompt_that_is_measured_is_read_as_a_whole_and_exactly() -> None:
    server, requests = Server(), []
    begin = server.model.begin

    def spy(request: Any, **more: Any) -> Any:
        requests.append(request)
        return begin(request, **more)

    server.model.begin = spy  # type: ignore[method-assign]
    asked = {"prompt": "x" * 200, "echo": True, "logprobs": 0, "max_tokens": 0}
    pool = {**asked, "kvflash": {"reading": "pool"}}

    async def work(client: Client) -> list[Reply]:
        return [await client.post("/v1/completions", data) for data in (asked, asked, pool)]

    replies = server.run(work)
    assert [len(one.json["choices"][0]["logprobs"]["tokens"]) for one in replies] == [200, 200, 200]
    assert [(one.reading, one.reuse) for one in requests] == [("exact", False), ("exact", False), ("pool", False)]


def test_a_measured_prompt_whose_answer_ends_at_once() -> None:
    server = Server(FakeModel(reply=lambda prompt: b""))
    asked = {"prompt": "abc", "echo": True, "logprobs": 0, "max_tokens": 1}
    (choice,) = server.post("/v1/completions", asked).json["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("abc", "stop")
    assert choice["logprobs"]["tokens"] == ["a", "b", "c", ""], "the end is told: one token of the answer, as always"


def test_a_server_that_cannot_read_exactly_measures_no_prompt() -> None:
    asked = {"prompt": "a", "echo": True, "logprobs": 1}

    def post(data: dict[str, Any]) -> Reply:
        return Server(FakeModel(readings=("pool",))).post("/v1/completions", data)

    reply = post(asked)
    assert (reply.status, "--kvflash-reading exact" in reply.message) == (501, True)
    assert post({**asked, "kvflash": {"reading": "pool"}}).status == 200


def test_a_completion_streams() -> None:
    reply = Server().post("/v1/completions", {"prompt": "hello", "stream": True, "echo": True})
    text = "".join(frame["choices"][0]["text"] for frame in reply.frames[:-1])
    assert text == "helloan answer"
    frames = Server().post("/v1/completions", {"prompt": "hi", "stream": True, "echo": True, "logprobs": 0}).frames
    told = [frame["choices"][0]["logprobs"] for frame in frames[:-1]]
    assert [token for one in told if one is not None for token in one["tokens"]] == [*"hian answer", ""]


def test_several_answers() -> None:
    """One after the other, to a prompt that is read once; each draws numbers of its own."""
    server, seeds = Server(), []
    server.model.reply = lambda prompt: b"x" * (1 + len(seeds))
    begin = server.model.begin

    def spy(request: Any, **more: Any) -> Any:
        seeds.append(request.sampling.seed)
        return begin(request, **more)

    server.model.begin = spy  # type: ignore[method-assign]
    asked = {"messages": [{"role": "user", "content": "x" * 400}], "n": 3, "seed": 2**32 - 2}

    async def work(client: Client) -> tuple[Reply, Reply]:
        whole = await client.post("/v1/chat/completions", asked)
        more = {"stream": True, "stream_options": {"include_usage": True}}
        return whole, await client.post("/v1/chat/completions", {**asked, **more})

    whole, stream = server.run(work)
    assert seeds == [2**32 - 2, 2**32 - 1, 0] * 2
    answers = [(one["index"], one["message"]["content"], one["finish_reason"]) for one in whole.json["choices"]]
    assert answers == [(0, "xx", "stop"), (1, "xxx", "stop"), (2, "xxxx", "stop")]
    size = len("user: \nassistant: ") + 400
    assert whole.json["usage"] == {
        "prompt_tokens": size, "completion_tokens": 9, "total_tokens": size + 9,
        "prompt_tokens_details": {"cached_tokens": 0},
    }  # fmt: skip
    assert server.model.read_tokens == size + 5, "and its last token for each other answer"
    assert stream.frames.count("[DONE]") == 1
    choices = [frame["choices"][0] for frame in stream.frames[:-2]]
    assert [one["index"] for one in choices if "role" in one["delta"]] == [0, 1, 2]
    assert [one["index"] for one in choices if one["finish_reason"]] == [0, 1, 2]
    texts = ["".join(one["delta"].get("content", "") for one in choices if one["index"] == i) for i in range(3)]
    assert texts == ["x" * 5, "x" * 6, "x" * 7]
    assert stream.frames[-2]["usage"]["completion_tokens"] == 18


@pytest.mark.parametrize("stream", [False, True])
def test_several_answers_find_room_together_or_not_at_all(stream: bool) -> None:
    async def work(client: Client) -> Reply:
        before = [client.call("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 99}) for prompt in "ab"]
        while len(server.scheduler.waiting) != 1 or not server.scheduler.running:
            await asyncio.sleep(0.001)
        reply = await client.post("/v1/completions", {"prompt": "hello", "n": 4, "stream": stream})
        hold.set()
        assert [(await call.done()).status for call in before] == [200, 200]
        return reply

    hold = Hold()
    server = Server(FakeModel(on_step=hold, reply=lambda prompt: b"x" * 99), limits=Limits(most=4))
    assert server.run(work).status == 429
    assert server.scheduler.outcomes.totals.finished == {"length": 2}


@pytest.mark.parametrize(
    ("limits", "remedy"), [(Limits(most=4), "--max-queue"), (Limits(most_tokens=24), "--max-queued-tokens")]
)
def test_more_answers_than_can_ever_wait(limits: Limits, remedy: str) -> None:
    """Nobody is told to come again for nothing."""
    reply = Server(limits=limits).post("/v1/completions", {"prompt": "hello", "n": 5})
    assert (reply.status, reply.json["error"]["param"]) == (400, "n")
    assert reply.json["error"]["message"].endswith(f"a larger {remedy}")


def test_several_answers_do_not_wait_too_long_for_each_other() -> None:
    now = itertools.count()  # each look at the clock takes a second
    server = Server(queue_timeout_s=60, clock=lambda: float(next(now)))
    reply = server.post("/v1/completions", {"prompt": "hello", "n": 4})
    assert [one["text"] for one in reply.json["choices"]] == ["an answer"] * 4


@pytest.mark.parametrize("stream", [False, True])
def test_one_of_several_answers_fails(stream: bool) -> None:
    """The client is told, and nobody makes the others."""
    server = Server()
    begin = server.model.begin

    def second_fails(request: Any, **more: Any) -> Any:
        if request.id.endswith("-1"):
            raise HostMemoryError("no memory")
        return begin(request, **more)

    server.model.begin = second_fails  # type: ignore[method-assign]
    reply = server.post("/v1/completions", {"prompt": "hello", "n": 3, "stream": stream})
    told = reply.frames[-2] if stream else reply.json
    assert told["error"]["message"] == "no memory"
    assert (reply.status, reply.frames[-1:]) == ((200, ["[DONE]"]) if stream else (500, []))
    assert server.scheduler.outcomes.totals.finished["internal_error"] == 1


def test_several_prompts() -> None:
    data = {"prompt": ["one", "two"], "n": 2, "echo": True, "max_tokens": 2}
    reply = Server().post("/v1/completions", data)
    texts = [(one["index"], one["text"]) for one in reply.json["choices"]]
    assert texts == [(0, "onean"), (1, "onean"), (2, "twoan"), (3, "twoan")]
    assert reply.json["usage"]["prompt_tokens"] == 6
    assert reply.json["usage"]["completion_tokens"] == 8


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_the_timings_of_a_stream(path: str) -> None:
    asked = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "max_tokens": 2, "stream": True}
    last = Server().post(path, {**asked, "timings_per_token": True}).frames[-2]
    assert (last["choices"], last["timings"]["predicted_n"]) == ([], 2)
    assert {"prompt_per_token_ms", "predicted_per_token_ms"} <= set(last["timings"])
    assert (last["timings"]["draft_n"], last["timings"]["draft_n_accepted"]) == (2, 1)
    both = Server().post(path, {**asked, "timings_per_token": True, "n": 2}).frames[-2]["timings"]
    assert (both["draft_n"], both["draft_n_accepted"]) == (4, 2), "of both answers"
    assert Server().post(path, asked).frames[-2]["choices"] != []


def test_llama_servers_own_shape() -> None:
    data = {"prompt": "hello", "n_predict": 30, "stop": ["swe"], "return_tokens": True}
    reply = Server().post("/completion", data)
    assert reply.json["content"] == "an an"
    assert (reply.json["stop_type"], reply.json["stopping_word"]) == ("word", "swe")
    frames = Server().post("/completion", {**data, "stream": True}).frames
    assert "".join(frame["content"] for frame in frames) == "an an"
    assert frames[-1]["stop"] is True
    assert (frames[-1]["has_new_line"], frames[-1]["generation_settings"]["stop"]) == (False, ["swe"])


@pytest.mark.parametrize("stream", [False, True])
def test_fields_that_llama_servers_clients_choose(stream: bool) -> None:
    """llama.vim asks for `timings/prompt_n`, and reads it under that name."""
    fields = ["content", "prompt", "timings/prompt_n", "generation_settings/seed", "has_new_line", "no/such"]
    data = {"prompt": "hello", "n_predict": 3, "seed": 7, "response_fields": fields, "stream": stream}
    reply = Server(FakeModel(reply=lambda prompt: b"a\nb")).post("/completion", data)
    assert (reply.frames[-1] if stream else reply.json) == {
        "content": "" if stream else "a\nb", "prompt": "hello", "timings/prompt_n": 5, "generation_settings/seed": 7,
        "has_new_line": True,
    }  # fmt: skip
    reply = Server().post("/completion", {**data, "response_fields": []})
    assert "prompt" not in (reply.frames[-1] if stream else reply.json), "unasked it would double the traffic"


@pytest.mark.parametrize(
    "several",
    [
        {"prompt": ["one", "two"]},
        {"prompt": [[1, 2, 3], [4, 5, 6]]},
        {"prompt": "one", "n": 2},
        {"prompt": [[1, 2, 3], {"prompt_string": "two"}]},
        {"prompt": ["one", [1, "w", 3]]},
    ],
)
def test_several_answers_in_llama_servers_own_shape(several: dict[str, Any]) -> None:
    reply = Server().post("/completion", {**several, "n_predict": 2})
    found = [(one["index"], one["content"], one["tokens_evaluated"]) for one in reply.json]
    assert found == [(0, "an", 3), (1, "an", 3)]
    frames = Server().post("/completion", {**several, "n_predict": 2, "stream": True}).frames
    for index in range(2):
        assert "".join(frame["content"] for frame in frames if frame["index"] == index) == "an"
    refused = Server().post("/completion", {**several, "n": 17})
    assert (refused.status, "16" in refused.message) == (400, True)


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        ([1, "ab", 2], 4),
        ({"prompt_string": "abc"}, 3),
        ({"prompt_string": "abc", "multimodal_data": []}, 3),
        ({"prompt_string": "a", "multimodal_data": ["x"]}, "send a chat"),
        ({"text": "a"}, "it is null, and must be a text or a list"),
        (["a", None], "element 1 is null"),
        ([1, [2]], "element 1 is a list, and must be a token or a text"),
        ([1, "a", 300], "300 is no token"),
        ([True], "element 0 is true"),
        ([], "empty"),
    ],
)
def test_prompts_of_texts_and_tokens(prompt: Any, said: int | str) -> None:
    reply = Server().post("/completion", {"prompt": prompt, "n_predict": 1})
    if isinstance(said, str):
        assert (reply.status, said in reply.message) == (400, True), reply.message
    else:
        assert reply.json["tokens_evaluated"] == said


def test_logprobs() -> None:
    told = chat(logprobs=True, top_logprobs=2, max_tokens=2).json["choices"][0]["logprobs"]["content"]
    assert [one["token"] for one in told] == ["a", "n"]
    assert told[0]["bytes"] == [97]
    assert [one["token"] for one in told[0]["top_logprobs"]] == ["a", "b"]
    reply = Server().post("/v1/completions", {"prompt": "x", "logprobs": 1, "max_tokens": 2})
    assert reply.json["choices"][0]["logprobs"] == {
        "tokens": ["a", "n"], "token_logprobs": [-0.5, -0.5], "top_logprobs": [{"a": -0.5}, {"n": -0.5}],
        "text_offset": [0, 1],
    }  # fmt: skip
    few = Server().post("/v1/completions", {"prompt": "x", "logprobs": 0, "max_tokens": 2}).json["choices"][0]
    assert few["logprobs"]["top_logprobs"] == [{"a": -0.5}, {"n": -0.5}], "the token that was drawn is always there"


def test_what_is_known_is_told() -> None:
    async def work(client: Client) -> tuple[Reply, Reply]:
        prompt = {"prompt": "x" * 400}
        first = await client.post("/v1/completions", prompt)
        return first, await client.post("/v1/completions", {**prompt, "kvflash": {"report": "summary"}})

    first, second = Server().run(work)
    assert first.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert second.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 399
    assert "kvflash" not in first.json
    assert second.json["kvflash"]["policy"] == "lru"
    assert (second.json["kvflash"]["drafted"], second.json["kvflash"]["accepted"]) == (2, 1), "of this answer alone"
    assert second.json["kvflash"]["queue_ms"] >= 0


def test_sampling_reaches_the_model() -> None:
    server, seen = Server(), []
    server.model.reply = lambda prompt: b"x"
    begin = server.model.begin

    def spy(request: Any, **more: Any) -> Any:
        seen.append(request)
        return begin(request, **more)

    server.model.begin = spy  # type: ignore[method-assign]
    chat(
        server=server, temperature=0.5, top_p=0.5, top_k=7, min_p=0.1, seed=11, frequency_penalty=0.5, stop="a",
        logit_bias={"5": -100}, max_completion_tokens=3, presence_penalty=1, repeat_penalty=1.2,
    )  # fmt: skip
    (request,) = seen
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p) == (0.5, 0.5, 7, 0.1)
    assert (sampling.seed, sampling.logit_bias, request.max_tokens, request.stop) == (11, {5: -100.0}, 3, ("a",))
    assert (sampling.frequency_penalty, sampling.presence_penalty, sampling.repeat_penalty) == (0.5, 1.0, 1.2)


@pytest.mark.parametrize("bias", [{"5": 1, "ab": -100}, [[5, 1], ["ab", False]]])
def test_biases_of_texts(bias: Any) -> None:
    """llama-server takes a text for the tokens that it has."""
    told = Server().post("/completion", {"prompt": "x", "n_predict": 1, "logit_bias": bias}).json
    assert told["generation_settings"]["logit_bias"] == [
        {"token": 5, "bias": 1}, {"token": 97, "bias": -100}, {"token": 98, "bias": -100},
    ]  # fmt: skip
    refused = Server().post("/completion", {"prompt": "x", "logit_bias": {"x" * 65: 1}})
    assert (refused.status, "64 is the most" in refused.message) == (400, True)


def test_no_limit_but_the_context() -> None:
    told = Server().post("/completion", {"prompt": "x", "response_fields": ["generation_settings"]})
    assert told.json["generation_settings"]["n_predict"] == FakeModel().n_ctx
    usual = Server().get("/props").json["default_generation_settings"]["params"]
    assert (usual["n_predict"], usual["max_tokens"]) == (-1, -1)


HI = {"messages": [{"role": "user", "content": "x"}]}


@pytest.mark.parametrize(
    ("path", "data", "most"),
    [
        *[("/v1/chat/completions", {**HI, **more}, None) for more in ({}, {"max_tokens": None}, {"max_tokens": -1})],
        ("/v1/chat/completions", {**HI, "max_completion_tokens": None}, None),
        ("/v1/chat/completions", {**HI, "max_tokens": 7}, 7),
        ("/v1/completions", {"prompt": "x"}, 16),
        *[("/v1/completions", {"prompt": "x", "max_tokens": n}, None) for n in (None, -1)],
        *[("/completion", {"prompt": "x", **more}, None) for more in ({}, {"n_predict": None}, {"n_predict": -1})],
        ("/v1/messages", HI, None),
        ("/v1/messages", {**HI, "max_tokens": 32000}, 32000),
        ("/v1/responses", {"input": "x"}, None),
        ("/v1/responses", {"input": "x", "max_output_tokens": None}, None),
        ("/api/chat", {**HI, "stream": False}, None),
        *[("/api/generate", {"prompt": "x", "options": {"num_predict": n}}, None) for n in (-1, -2, None)],
        ("/api/generate", {"prompt": "x", "options": {"num_predict": 7}}, 7),
    ],
)
@pytest.mark.parametrize("usual", [-1, 99])
def test_who_names_no_limit_gets_the_servers(path: str, data: dict[str, Any], most: int | None, usual: int) -> None:
    """most: of the request; None for none. The server's is the context, unless -n names one."""
    server, seen = Server(default_tokens=usual), []
    begin = server.model.begin

    def spy(request: Any, **more: Any) -> Any:
        seen.append(request.max_tokens)
        return begin(request, **more)

    server.model.begin = spy  # type: ignore[method-assign]
    assert server.post(path, {"model": "fake", **data}).status == 200
    without = server.model.n_ctx if usual < 0 else usual
    assert seen == [without if most is None else most]


def test_models_as_anthropics_clients_want_them() -> None:
    """They say their version, and read other fields."""
    for path in ("/v1/models?limit=20", "/v1/models/fake"):
        said = Server().get(path, anthropic_version="2023-06-01").json
        (one,) = said.get("data", [said])
        assert datetime.fromisoformat(one.pop("created_at").replace("Z", "+00:00")).year > 2000
        bounds = {"max_input_tokens": FakeModel().n_ctx, "max_tokens": FakeModel().n_ctx}
        assert one == {"type": "model", "id": "fake", "display_name": "fake", **bounds}
        if "data" in said:
            assert (said["has_more"], said["first_id"], said["last_id"]) == (False, "fake", "fake")


def test_models_and_props() -> None:
    assert [m["id"] for m in Server().get("/v1/models").json["data"]] == ["fake"]
    assert Server().get("/v1/models/fake").json["id"] == "fake"
    assert Server().get("/v1/models/gpt").status == 404
    assert Server(aliases=("gpt",)).get("/v1/models/gpt").json["aliases"] == ["fake", "gpt"]
    assert Server(aliases=("gpt",)).post("/api/show", {"model": "gpt:latest"}).status == 200
    assert Server().get("/props").json["default_generation_settings"]["params"]["top_k"] == 40
    assert Server().get("/props").json["total_slots"] == 1
    assert Server(FakeModel(parallel=3)).get("/props").json["total_slots"] == 3
    assert Server().get("/health").json == {"status": "ok"}
    assert Server().get("/slots").json[0]["is_processing"] is False


def test_tokens_there_and_back() -> None:
    assert Server().post("/tokenize", {"content": "ab", "prompt": "ab"}).json == {"tokens": [97, 98]}
    pieces = Server().post("/tokenize", {"content": "é", "with_pieces": True}).json["tokens"]
    assert pieces == [{"id": 0xC3, "piece": [0xC3]}, {"id": 0xA9, "piece": [0xA9]}]
    assert Server().post("/detokenize", {"tokens": [97, 98]}).json == {"content": "ab", "prompt": "ab"}
    assert Server().post("/apply-template", {"messages": HELLO}).json == {"prompt": "user: hello\nassistant: "}


def test_a_tokenizer_for_programs_that_speak_to_vllm() -> None:
    """lm-eval asks for tokens in this way, and downloads no tokenizer then."""

    async def work(client: Client) -> list[Any]:
        info = await client.get("/tokenizer_info")
        tokens = await client.post("/tokenize", {"prompt": "ab", "add_special_tokens": False})
        return [info.json, tokens.json]

    info, tokens = Server().run(work)
    assert tokens == {"tokens": [97, 98]}
    assert {"eos_token", "bos_token", "chat_template"} <= info.keys()
    assert (info["bos_token"], info["chat_template"]) == (None, TEMPLATE)


def test_metrics() -> None:
    async def work(client: Client) -> str:
        await client.post("/v1/chat/completions", {"messages": HELLO})
        return bytes((await client.get("/metrics")).body).decode()

    lines = Server(FakeModel(parallel=2)).run(work).splitlines()
    assert "kvflash:generation_tokens_total 9.0" in lines
    assert 'kvflash:request_success_total{finished_reason="stop"} 1.0' in lines
    for never in ("internal_error", "numerical"):
        assert f'kvflash:request_success_total{{finished_reason="{never}"}} 0.0' in lines
    assert "kvflash:time_to_first_token_seconds_count 1.0" in lines
    assert "kvflash:num_requests_running 0.0" in lines
    assert "kvflash:spec_decode_num_draft_tokens_total 5.0" in lines
    assert "kvflash:spec_decode_num_accepted_tokens_total 4.0" in lines
    assert "kvflash:spec_decode_num_replaced_tokens_total 3.0" in lines
    assert 'kvflash:conversations{state="device"} 1.0' in lines
    gaps = [float(line.split()[1]) for line in lines if line.startswith("kvflash:inter_token_gap_seconds{")]
    assert 0 <= gaps[0] <= gaps[1]


def test_the_largest_evicted_mass_of_the_texts_is_a_metric() -> None:
    def told(*masses: float | None) -> list[str]:
        server = Server(FakeModel(parallel=len(masses)))
        for slot, mass in zip(server.scheduler.slots, masses, strict=True):
            slot.model.evicted_mass = mass
        lines = bytes(server.get("/metrics").body).decode().splitlines()
        return [line for line in lines if line.startswith("kvflash:evicted_mass")]

    assert told(None, 0.25, 0.75) == ["kvflash:evicted_mass 0.75"]
    assert told(None, None) == []


# --- errors


@pytest.mark.parametrize(
    ("data", "status", "said"),
    [
        ({"messages": []}, 400, "messages"),
        ({"messages": "x"}, 400, "messages"),
        ({"temperature": -1}, 400, "temperature"),
        ({"temperature": "hot"}, 400, "temperature"),
        ({"kvflash": {"pins": [[5, 2]]}}, 400, "pins"),
        ({"kvflash": {"pins": [[0, 10**9]]}}, 400, "pins"),
        ({"kvflash": {"reading": "auto"}}, 400, "reading"),
        (
            {"kvflash": {"answer": "lossless"}},
            400,
            "pool or exact here, not 'lossless': start the server with --kvflash-answer lossless",
        ),
        ({"n": 17}, 400, "n: "),
        ({"n": 0}, 400, "n: "),
        ({"top_logprobs": 3}, 400, "needs logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs"),
        ({"logit_bias": {"1234567890": 1}}, 400, "no token"),
        ({"logit_bias": {"257": 1}}, 400, "no token"),
        ({"stop": ["a"] * 17}, 400, "stop"),
        ({"max_tokens": -2}, 400, "max_tokens"),
        ({"grammar": "what"}, 400, "no root"),
        ({"grammar": "root ::= x", "response_format": {"type": "json_object"}}, 400, "exclude"),
        ({"response_format": {"type": "json_schema"}}, 400, "has the type json_schema, and no schema"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "role"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "add --mmproj FILE"),
        ({"messages": [{"role": "user", "content": [{"type": "file"}]}]}, 501, "text, images and sound, not 'file'"),
        ({"messages": [{"role": "user", "content": [{"type": "input_audio"}]}]}, 400, "an audio encoder"),
        ({"messages": [{"role": "user", "content": "x" * 5000}]}, 400, "shorten it"),
        ({"tool_choice": "required"}, 400, "there are no tools"),
        ({"chat_template_kwargs": {"messages": []}}, 400, "cannot be given"),
    ],
)
def test_what_is_refused(data: dict[str, Any], status: int, said: str) -> None:
    reply = chat(data)
    assert (reply.status, said in reply.message) == (status, True), reply.message
    sizes = {"n_prompt_tokens", "n_ctx"} if reply.json["error"]["code"] == "context_length_exceeded" else set()
    assert set(reply.json["error"]) == {"message", "type", "param", "code", *sizes}


@pytest.mark.parametrize(
    ("data", "status"),
    [
        ({"prompt": ["a", ""]}, 400),
        ({"prompt": ["a", "b"], "n": 9}, 400),
        ({"prompt": "a", "suffix": "b"}, 501),
        ({"prompt": "a", "best_of": 2}, 501),
        ({"prompt": "a", "best_of": 2, "n": 3}, 501),
        ({"prompt": [257]}, 400),
        ({"prompt": [-1]}, 400),
        ({"prompt": []}, 400),
        ({"prompt": ""}, 400),
        ({}, 400),
    ],
)
def test_what_is_refused_of_completions(data: dict[str, Any], status: int) -> None:
    assert Server().post("/v1/completions", data).status == status


def test_prompts_of_many_texts_and_tokens() -> None:
    server, read = Server(), []
    tokenize = server.prompts.tokenize
    server.prompts.tokenize = lambda text, **more: (read.append(text), tokenize(text, **more))[1]

    async def work(client: Client) -> list[Reply]:
        prompts = (["x", 97] * 1024, ["x", 97] * 1025, ["x" * 5000, 97, "y" * 5000])
        return [await client.post("/v1/completions", {"prompt": prompt}) for prompt in prompts]

    most, many, long = server.run(work)
    assert (most.status, many.status, long.status) == (200, 400, 400)
    assert "1025 texts, and 1024 is the most" in many.message
    assert (long.json["error"]["code"], read[1024:]) == ("context_length_exceeded", ["x" * 5000])


def test_the_best_of_as_many_as_are_asked_for_are_all() -> None:
    assert len(Server().post("/v1/completions", {"prompt": "a", "best_of": 2, "n": 2}).json["choices"]) == 2


def test_too_long_names_its_code() -> None:
    reply = chat(messages=[{"role": "user", "content": "x" * 5000}])
    assert reply.json["error"]["code"] == "context_length_exceeded"
    assert (reply.json["error"]["n_prompt_tokens"], reply.json["error"]["n_ctx"]) == (5018, FakeModel().n_ctx)


@pytest.mark.parametrize(
    "raw", [b"{", b"[" * 100_000, b"\xff\xfe", b"null", b"[]", b'"x"', b"{}{}", b'{"messages": NaN}', b"{'a': 1}"]
)
def test_bodies_that_are_no_requests(raw: bytes) -> None:
    reply = Server().run(lambda client: client.call("POST", "/v1/chat/completions", raw=raw).done())
    assert reply.status == 400
    assert reply.json["error"]["type"] == "invalid_request_error"


def test_long_integers_are_refused_in_words_for_a_client() -> None:
    reply = Server().run(lambda client: client.call("POST", "/v1/completions", raw=b"9" * 4301).done())
    assert reply.json["error"]["message"] == "the body is refused: an integer has more than 4300 digits: shorten it"


def test_other_kinds_of_bodies() -> None:
    def post(raw: bytes, kind: str, size: int | None = None, **settings: Any) -> Reply:
        server, head = (
            Server(**settings),
            {"content_type": kind, "content_length": str(len(raw) if size is None else size)},
        )
        return server.run(  # type: ignore[no-any-return]
            lambda client: client.call("POST", "/v1/completions", raw=raw, **head).done()
        )

    assert post(b"{}", "text/plain").status == 415
    assert post(b"{}", "application/x-www-form-urlencoded").status == 415
    assert post(b'{"prompt": "' + b"x" * 999 + b'"}', "application/json", max_body=999).status == 413
    assert post(b"{", "application/json", 1000, max_body=999).status == 413, "nobody waits for the rest"
    assert post(b'{"prompt": "x"}', "application/json; charset=utf-8").status == 200


def test_where_nothing_is() -> None:
    assert Server().get("/nowhere").status == 404
    assert Server().get("/v1/chat/completions").status == 405
    refused = Server().post("/v1/images/generations", {"input": "x"})
    assert (refused.status, refused.json["error"]["code"]) == (501, "not_served")
    assert refused.headers["x-should-retry"] == "false"
    assert "/v1/images/generations is not served: this server makes text only" in refused.message


def test_an_error_of_the_model() -> None:
    def fail() -> None:
        raise RuntimeError("a secret path")

    reply = chat(server=Server(FakeModel(on_step=fail)))
    assert reply.status == 500
    assert "secret" not in reply.message
    frames = chat(server=Server(FakeModel(on_step=fail)), stream=True).frames
    assert frames[-2]["error"]["code"] == "internal_error"
    assert frames[-1] == "[DONE]"


def test_the_log_says_why() -> None:
    try:
        raise AttributeError("what it was")
    except AttributeError:
        record = logging.LogRecord("kvflash_ggml", logging.ERROR, "", 0, "request %s", ("r1",), sys.exc_info())
    told = Formatter().format(record).splitlines()
    assert (told[0], told[-1]) == ("kvflash: error: request r1", "AttributeError: what it was")
    assert "test_the_log_says_why" in "".join(told)


def test_a_full_queue() -> None:
    async def work(client: Client) -> list[Reply]:
        asked = [{"messages": [{"role": "user", "content": f"hello {i}"}]} for i in range(30)]
        calls = [client.call("POST", "/v1/chat/completions", data) for data in asked]
        while sum(call.reply.ended for call in calls) < 27:
            await asyncio.sleep(0.001)
        hold.set()
        return [await call.done() for call in calls]

    hold = Hold()
    server = Server(FakeModel(on_step=hold), limits=Limits(most=2), clock=lambda: 0.0)
    replies = server.run(work)
    counts = {status: sum(reply.status == status for reply in replies) for status in (200, 429)}
    assert counts[200] >= 2
    assert counts[429] >= 20
    assert counts[200] + counts[429] == 30
    refused = [reply for reply in replies if reply.status == 429]
    assert all(int(reply.headers["retry-after"]) >= 1 for reply in refused)
    again = [int(reply.headers["retry-after-ms"]) for reply in refused]
    assert len(set(again)) > len(again) / 2, "they would all come at once"
    assert refused[0].json["error"]["type"] == "rate_limit_error"


def test_draining() -> None:
    async def work(client: Client) -> tuple[Reply, Reply]:
        server.front.draining = True
        return await client.get("/health"), await client.post("/v1/chat/completions", {"messages": HELLO})

    server = Server()
    assert [reply.status for reply in server.run(work)] == [503, 503]


# --- who may ask


def test_keys() -> None:
    def status(path: str, **headers: str) -> int:
        return Server(keys=("one", "two")).get(path, **headers).status

    assert status("/v1/models") == 401
    assert status("/v1/models", authorization="Bearer three") == 401
    assert status("/v1/models", authorization="Bearer two") == 200
    assert status("/v1/models", x_api_key="one") == 200
    assert status("/v1/models", authorization="Bearer \u00ff") == 401
    assert status("/health") == 200
    assert status("/metrics") == 401
    assert status("/slots") == 401
    assert status("/kvflash/state") == 401
    assert Server(keys=("one",), public_metrics=True).get("/metrics").status == 200


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "", "127.0.0.1.evil.example"])
def test_names_that_lead_here(host: str) -> None:
    assert Server().get("/v1/models", host=host).status == 403
    assert Server(keys=("k",)).get("/v1/models", host=host, x_api_key="k").status == 200


@pytest.mark.parametrize("host", ["localhost", "localhost:8080", "127.0.0.1:1", "[::1]:8080", "LOCALHOST"])
def test_loopback_names(host: str) -> None:
    assert Server().get("/v1/models", host=host).status == 200


def test_origins() -> None:
    asked = "authorization,content-type,x-stainless-lang,x-stainless-os"

    def preflight(origin: str) -> Reply:
        server = Server(cors=("https://good.example",))
        return server.run(  # type: ignore[no-any-return]
            lambda client: client.call(
                "OPTIONS",
                "/v1/models",
                origin=origin,
                access_control_request_method="POST",
                access_control_request_headers=asked,
            ).done()
        )

    good, bad = preflight("https://good.example"), preflight("https://evil.example")
    assert good.headers["access-control-allow-origin"] == "https://good.example"
    assert good.headers["access-control-allow-headers"] == asked, "a client in a page sends headers of its own"
    assert (good.status, bad.status) == (204, 403)
    assert "access-control-allow-origin" not in bad.headers
    assert "access-control-allow-origin" not in Server().get("/v1/models", origin="https://x.example").headers


def test_isolated_keys_share_nothing() -> None:
    async def work(client: Client) -> list[int]:
        found = []
        for key in ("one", "two", "one"):
            reply = await client.post("/v1/completions", {"prompt": "x" * 400}, x_api_key=key)
            found.append(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])
        return found

    assert Server(keys=("one", "two"), isolate_keys=True).run(work) == [0, 0, 399]
    assert Server(keys=("one", "two")).run(work) == [0, 399, 399]


# --- clients that leave, or do not read


def test_a_client_that_leaves_while_it_waits() -> None:
    async def work(client: Client) -> int:
        call = client.call("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True})
        await call.until(lambda reply: len(reply.frames) > 2)
        call.leave()
        await call.done()
        while not server.scheduler.idle:
            await asyncio.sleep(0.001)
        return server.model.steps

    server = Server(FakeModel(reply=lambda prompt: b"x" * 4000, on_step=lambda: time.sleep(0.001)))
    assert server.run(work) < 2000
    assert server.scheduler.outcomes.totals.finished == {"cancelled": 1}


def test_a_client_that_leaves_without_a_stream() -> None:
    async def work(client: Client) -> None:
        call = client.call("POST", "/v1/chat/completions", {"messages": HELLO})
        while not server.scheduler.running:
            await asyncio.sleep(0.001)
        call.leave()
        await call.done()
        while not server.scheduler.idle:
            await asyncio.sleep(0.001)

    server = Server(FakeModel(reply=lambda prompt: b"x" * 4000, on_step=lambda: time.sleep(0.001)))
    server.run(work)
    assert server.scheduler.outcomes.totals.finished == {"cancelled": 1}


def test_a_client_that_does_not_read() -> None:
    """It is given up, and others are answered meanwhile."""

    async def work(client: Client) -> Reply:
        stuck = client.call("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True})
        await stuck.until(lambda reply: len(reply.frames) > 0)
        stuck.reads.clear()
        other = await client.post("/v1/chat/completions", {"messages": HELLO})
        await stuck.done()
        assert not stuck.reply.ended
        return other

    model = FakeModel(on_step=lambda: time.sleep(0.005))
    assert Server(model, stall_timeout_s=0.5).run(work).status == 200


def test_a_client_that_reads_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not hold the slot, what is held for it is bounded, and it gets its whole answer in the end."""

    async def work(client: Client) -> Reply:
        late = client.call("POST", "/v1/completions", {"prompt": "late", "stream": True, "max_tokens": 400})
        await late.until(lambda reply: len(reply.frames) > 0)
        late.reads.clear()
        goes_on.set()
        assert (await client.post("/v1/completions", {"prompt": "other", "max_tokens": 3})).status == 200
        assert server.scheduler.stalls == 1
        state = (await client.get("/kvflash/state")).json
        assert state["queue"] == {"running": None, "waiting": 0, "put_aside": 1}
        assert server.scheduler.generated < 100
        late.reads.set()
        return await late.done()

    monkeypatch.setattr(exchange, "MAX_HELD", 1 << 14)
    goes_on = threading.Event()

    def step() -> None:
        if model.steps > 5:  # few enough until its client reads no more, however slow that is
            goes_on.wait(20)

    model = FakeModel(reply=lambda prompt: bytes(97 + i % 26 for i in range(500)), on_step=step)
    server = Server(model)
    frames = server.run(work).frames[:-1]
    made = "".join(frame["choices"][0]["text"] for frame in frames)
    assert made.encode() == model.reply(b"")[:400]


def test_a_client_that_leaves_while_it_does_not_read() -> None:
    """Its answer ends at once, not when it is given up for not reading."""

    async def work(client: Client) -> None:
        call = client.call("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True})
        await call.until(lambda reply: len(reply.frames) > 2)
        call.reads.clear()
        await asyncio.sleep(0.05)
        call.leave()
        while not server.scheduler.idle:
            await asyncio.sleep(0.001)
        call.reads.set()
        await call.done()

    server = Server(FakeModel(reply=lambda prompt: b"x" * 4000, on_step=lambda: time.sleep(0.001)))
    server.run(work)
    assert server.scheduler.outcomes.totals.finished == {"cancelled": 1}
    assert server.model.steps < 1000


def test_pings_while_it_waits() -> None:
    async def work(client: Client) -> bytes:
        call = client.call("POST", "/v1/chat/completions", {"messages": HELLO, "stream": True, "max_tokens": 3})
        return bytes((await call.done()).body)

    model = FakeModel(on_step=lambda: time.sleep(0.05))
    assert b": generating\n\n" in Server(model, ping_s=0.01).run(work)


def test_pings_say_what_it_waits_for() -> None:
    """The one is being read until both have said so."""
    goes_on = Hold(1)

    async def work(client: Client) -> None:
        asked = {"prompt": "x" * 2000, "stream": True, "max_tokens": 3}
        reads = client.call("POST", "/v1/completions", {**asked, "kvflash": {"conversation": "a"}})
        await reads.until(lambda reply: re.search(rb": reading \d+/2000\n\n", reply.body) is not None)
        waits = client.call("POST", "/v1/completions", {**asked, "kvflash": {"conversation": "b"}})
        await waits.until(lambda reply: b": queued\n\n" in reply.body)
        goes_on.set()
        assert (await reads.done()).frames[-1] == (await waits.done()).frames[-1] == "[DONE]"

    Server(FakeModel(on_step=goes_on), ping_s=0.01).run(work)


def test_an_answer_that_was_parked_says_that_it_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client has read all there is, and another answer has the slot."""

    async def work(client: Client) -> bytes:
        asked = {"prompt": "x" * 100, "stream": True, "max_tokens": 300}
        slow = client.call("POST", "/v1/completions", asked)
        await slow.until(lambda reply: len(reply.frames) > 2)
        slow.reads.clear()
        with monkeypatch.context() as patch:  # from here to there: no answer is parked whose client is only late
            patch.setattr(exchange, "MAX_HELD", 10000)
            goes_on["x"].set()
            while not server.scheduler.put_aside:
                await asyncio.sleep(0.001)
            other = client.call("POST", "/v1/completions", {**asked, "prompt": "y" * 100})
            await other.until(lambda reply: len(reply.frames) > 2)
            slow.reads.set()
            await slow.until(lambda reply: b": parked" in reply.body)
        goes_on["y"].set()
        other.leave()
        return bytes((await slow.done()).body)

    goes_on = {"x": threading.Event(), "y": threading.Event()}

    def step() -> None:
        if len(server.model.tokens) > 110:
            assert goes_on[chr(server.model.tokens[0])].wait(60)

    server = Server(FakeModel(reply=lambda prompt: b"z" * 300, on_step=step), ping_s=0.01)
    said = server.run(work)
    assert said.count(b": resumed\n\n") == 1
    parked, resumed = said.rindex(b": parked"), said.index(b": resumed")
    assert parked < resumed < said.rindex(b"data: {")
    assert server.scheduler.counts.resumes > 0


# --- slots and conversations


def test_slots_are_saved_and_restored(tmp_path: Path) -> None:
    async def work(client: Client) -> list[Reply]:
        await client.post("/v1/completions", {"prompt": "x" * 400, "max_tokens": 1})
        replies = [await client.post("/slots/0?action=save", {"filename": "mine"})]
        replies.append(await client.post("/slots/0?action=erase"))
        replies.append(await client.post("/slots/0?action=restore", {"filename": "mine.kvs"}))
        replies.append(await client.post("/v1/completions", {"prompt": "x" * 400}))
        return replies

    saved, erased, restored, last = Server(folder=tmp_path).run(work)
    assert saved.json["n_saved"] == 400
    assert erased.json["n_erased"] == 400
    assert restored.json["n_restored"] == 400
    assert last.json["usage"]["prompt_tokens_details"]["cached_tokens"] == 399
    assert (tmp_path / "mine.kvs").exists()


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "", ".hidden", "a/b", "x" * 200, "a\0b", "~"])
def test_names_of_files_are_no_paths(name: str, tmp_path: Path) -> None:
    reply = Server(folder=tmp_path / "in").post("/slots/0?action=save", {"filename": name})
    assert reply.status == 400
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == []


def test_errors_of_files_do_not_say_where_the_folder_is(tmp_path: Path) -> None:
    (tmp_path / "bad.kvs").write_bytes(b"abc")
    reply = Server(folder=tmp_path).post("/slots/0?action=restore", {"filename": "bad"})
    assert (reply.status, reply.message) == (400, "bad.kvs is damaged")


def test_slots_without_a_folder() -> None:
    assert Server().post("/slots/0?action=save", {"filename": "a"}).status == 501
    assert Server().post("/slots/1?action=save", {"filename": "a"}).status == 404
    assert Server().post("/slots/0?action=dance", {"filename": "a"}).status == 400


def test_conversations_are_listed_while_an_answer_is_made() -> None:
    """On a server for one answer at a time too: nothing changes by it, so nobody waits for the answer's end."""
    server, ended = Server(FakeModel(reply=lambda prompt: b"x" * 10_000, on_step=lambda: time.sleep(0.001))), []

    async def work(client: Client) -> Any:
        call = client.call("POST", "/v1/completions", {"prompt": "x" * 400, "max_tokens": 3000, "stream": True})
        await call.until(lambda reply: bool(reply.frames))
        listed = (await client.get("/kvflash/conversations")).json["data"]
        ended.append(len(server.scheduler.running))
        call.leave()
        return listed

    assert len(server.run(work)) == 1
    assert ended == [1]


def test_conversations(tmp_path: Path) -> None:
    async def work(client: Client) -> list[Any]:
        await client.post("/v1/completions", {"prompt": "x" * 400, "kvflash": {"conversation": "mine"}})
        (one,) = (await client.get("/kvflash/conversations")).json["data"]
        path = f"/kvflash/conversations/{one['id']}"
        done = [await client.post(f"{path}/pin", {"lo": lo, "hi": hi}) for lo, hi in ((False, True), (0, 64))]
        done += [await client.post(f"{path}/{what}") for what in ("park", "save", "dance")]
        done.append(await client.call("DELETE", path).done())
        done.append(await client.call("DELETE", path).done())
        state = (await client.get("/kvflash/state")).json
        return [one, [reply.status for reply in done], state]

    server = Server(folder=tmp_path)
    one, statuses, state = server.run(work)
    assert (one["where"], one["prompt"]) == ("device", 400)
    assert statuses == [400, 200, 200, 200, 404, 200, 404]
    assert server.model.pins == [(0, 64)]
    assert state["conversations"]["device"] == 0
    assert json.dumps(state)


# --- the page


def test_the_page_carries_everything() -> None:
    reply = Server().get("/")
    text, policy = bytes(reply.body).decode(), reply.headers["content-security-policy"]
    assert reply.status == 200
    assert "http://" not in text
    assert "https://" not in text
    assert "unsafe" not in policy
    for kind in ("script", "style"):
        (part,) = re.findall(rf"<{kind}>(.*?)</{kind}>", text, re.DOTALL)
        assert base64.b64encode(hashlib.sha256(part.encode()).digest()).decode() in policy
    assert Server(page=False).get("/").status == 404
    assert Server(keys=("k",)).get("/").status == 200


def test_events() -> None:
    async def work(client: Client) -> Any:
        await client.post("/v1/completions", {"prompt": "x" * 200, "kvflash": {"conversation": "mine"}})
        call = client.call("GET", "/kvflash/events")
        reply = await call.until(lambda reply: len(reply.frames) > 0)
        state = reply.frames[0]
        assert server.model.explains
        call.leave()
        await call.done()
        assert not server.model.explains, "nobody looks on"
        words = await client.get("/kvflash/words?conversation=mine&chunk=1")
        others = [
            (await client.get(f"/kvflash/words?{query}")).status
            for query in ("conversation=yours&chunk=1", "conversation=mine&chunk=x", "chunk=1", "conversation=")
        ]
        return state, words.json, others, bytes(reply.body)

    server = Server()
    state, words, others, body = server.run(work)
    assert state["map"]["chunks"] == 4
    assert base64.b64decode(state["map"]["resident"]) == bytes([0b11110000])
    assert state["map"]["recalled"] == [[0, 1, 2, 3, 0.25, 0], [1]]
    assert state["seat"]["name_digest"] == hashlib.sha256(b"mine").hexdigest()[:16]
    assert words == {"chunk": 1, "text": "x" * 64}
    assert others == [404] * 4
    assert b"xxx" not in body
    assert server.front.viewers.total() == 0


def test_too_many_look_on() -> None:
    async def work(client: Client) -> int:
        calls = [client.call("GET", "/kvflash/events") for _ in range(16)]
        for call in calls:
            await call.until(lambda reply: len(reply.frames) > 0)
        status = (await client.get("/kvflash/events")).status
        for call in calls:
            call.leave()
            await call.done()
        return status

    assert Server().run(work) == 429


# --- tools


TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in ("weather", "clock")
]


def test_a_tool_that_is_none_is_named_in_brief() -> None:
    reply = chat(tools=TOOLS, tool_choice={"type": "function", "function": {"name": "x" * 9999}})
    assert (reply.status, f"it names '{'x' * 100}...', which is no tool" in reply.message) == (400, True)


def replying(text: str, template: str | None = TEMPLATE) -> Server:
    return Server(FakeModel(reply=lambda prompt: text.encode()), FakePrompts(template=template))


CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'


@pytest.mark.parametrize("stream", [False, True])
def test_calls_are_read_from_the_text(stream: bool) -> None:
    reply = chat(server=replying(f"Let me see.\n{CALL}\n{CALL}"), tools=TOOLS, stream=stream, max_tokens=500)
    if stream:
        calls = [call for delta in deltas(reply) for call in delta.get("tool_calls", ())]
        text = "".join(delta.get("content") or "" for delta in deltas(reply))
        reason = next(f["choices"][0]["finish_reason"] for f in reversed(reply.frames[:-1]) if f["choices"])
        assert [call["index"] for call in calls] == [0, 1]
    else:
        message = reply.json["choices"][0]["message"]
        calls, text, reason = message["tool_calls"], message["content"], reply.json["choices"][0]["finish_reason"]
    assert [call["function"] for call in calls] == [{"name": "clock", "arguments": '{"zone": "CET"}'}] * 2
    assert text.strip() == "Let me see."
    assert reason == "tool_calls"


@pytest.mark.parametrize(
    "text", ["<tool_call>no json</tool_call>", "<tool_call>", "a < b", "<tool_call>[1]</tool_call>x"]
)
def test_what_is_no_call_is_text(text: str) -> None:
    for stream in (False, True):
        reply = chat(server=replying(text), tools=TOOLS, stream=stream, max_tokens=500)
        found = (
            "".join(delta.get("content") or "" for delta in deltas(reply))
            if stream
            else reply.json["choices"][0]["message"]["content"]
        )
        assert found == text


@pytest.mark.parametrize("stream", [False, True])
def test_a_named_call(stream: bool) -> None:
    choice = {"type": "function", "function": {"name": "clock"}}
    reply = chat(server=replying('{"a": 1}', "x"), tools=TOOLS, tool_choice=choice, stream=stream)
    if stream:
        calls = [call for delta in deltas(reply) for call in delta.get("tool_calls", ())]
        assert calls[0]["function"]["name"] == "clock"
        assert "".join(call["function"]["arguments"] for call in calls) == '{"a": 1}'
    else:
        (call,) = reply.json["choices"][0]["message"]["tool_calls"]
        assert call["function"] == {"name": "clock", "arguments": '{"a": 1}'}


def test_a_model_that_knows_no_tools_is_told_in_words() -> None:
    server = replying("x", "{% messages only %}")
    history = [
        {"role": "user", "content": "what time?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "a", "type": "function", "function": {"name": "clock", "arguments": '{"z": 1}'}}],
        },
        {"role": "tool", "tool_call_id": "a", "content": [{"type": "text", "text": "noon"}]},
    ]
    chat(server=server, messages=history, tools=TOOLS)
    system, _, call, result = server.prompts.rendered[0]
    assert '"name": "clock"' in system["content"]
    assert call["content"] == '<tool_call>\n{"name": "clock", "arguments": {"z": 1}}\n</tool_call>'
    assert result == {"role": "user", "content": "<tool_response>\nnoon\n</tool_response>"}


@pytest.mark.parametrize(
    "data",
    [
        {"tools": [{"type": "retrieval"}]},
        {"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "other"}}},
        {"tools": TOOLS * 65},
        {"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": ["x"]}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": "x"}]},
        {"messages": [{"role": "assistant", "content": "", "tool_calls": 5}]},
    ],
)
def test_tools_that_are_refused(data: dict[str, Any]) -> None:
    assert chat(data).status == 400
