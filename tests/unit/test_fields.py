"""Fields that the server does not know are ignored and told; with --strict they are refused."""

from __future__ import annotations

import json
import logging
from typing import Any

import pytest
from support.asgi import Client, Reply
from support.fake_model import FakeModel
from support.fake_server import Server

from kvflash_ggml.batching.messages import Request, Sampling
from kvflash_ggml.chat.reader import Rendered
from kvflash_ggml.chat.values import ChatInput
from kvflash_ggml.sampling import Samplers
from kvflash_ggml.server.fields import HEADER
from kvflash_ggml.server.requestlog import NAME
from kvflash_ggml.settings import settings

CHAT, TEXT, RAW = "/v1/chat/completions", "/v1/completions", "/completion"
HELLO = [{"role": "user", "content": "hello"}]
BODIES: dict[str, dict[str, Any]] = {CHAT: {"messages": HELLO}, TEXT: {"prompt": "hello"}, RAW: {"prompt": "hello"}}

OPENAI = {
    "audio": {"voice": "alloy", "format": "wav"}, "functions": [{"name": "f"}], "function_call": "auto",
    "modalities": ["text"], "moderation": None, "prediction": {"type": "content", "content": "x"},
    "prompt_cache_retention": "24h", "web_search_options": {},
}  # fmt: skip
LLAMA_SERVER = {
    "lora": [], "min_keep": 0, "n_keep": 0, "n_indent": 0, "post_sampling_probs": False, "reasoning_format": "auto",
    "return_progress": False, "speculative.n_max": 3, "speculative.n_min": 0,
    "speculative.p_min": 0.75, "t_max_predict_ms": 0,
    "tfs_z": 1.0, "thinking_forced_open": False, "top_a": 0, "typ": 1,
    "backend_sampling": True, "n_discard": 1, "n_prompt": 2, "image_data": [], "multimodal_data": [],
    "t_max_prompt_ms": 0,
}  # fmt: skip
VLLM = {
    "add_special_tokens": True, "allowed_token_ids": None, "bad_words": [], "guided_regex": None,
    "include_reasoning": True,
    "length_penalty": 1.0, "prompt_logprobs": None, "repetition_penalty": 1.0, "request_id": "x",
    "skip_special_tokens": True, "spaces_between_special_tokens": True, "stop_token_ids": [], "use_beam_search": False,
    "vllm_xargs": {},
}  # fmt: skip
OTHERS = {
    "draft_model": "x", "format": "json", "keep_alive": "5m", "options": {"num_ctx": 4096}, "raw": False, "think": True,
    "ttl": 60,
}  # fmt: skip
UNKNOWN = {**OPENAI, **LLAMA_SERVER, **VLLM, **OTHERS}


def named(reply: Reply) -> list[str]:
    value = reply.headers.get(HEADER.lower(), "")
    return value.split(", ") if value else []


def ask(path: str, *, server: Server | None = None, **more: Any) -> Reply:
    return (server or Server()).post(path, {**BODIES[path], **more})


def sent(monkeypatch: pytest.MonkeyPatch, path: str, *, server: Server | None = None, **more: Any) -> Request:
    """The request that the scheduler has of it."""
    server, requests = server or Server(), []
    submit = server.scheduler.submit_together
    monkeypatch.setattr(
        server.scheduler, "submit_together", lambda all: (requests.extend(one[0] for one in all), submit(all))[1]
    )
    reply = ask(path, server=server, **more)
    assert reply.status == 200, reply.message
    assert named(reply) == []
    return requests[0]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", BODIES)
def test_what_other_servers_know_is_ignored_and_told(path: str, stream: bool) -> None:
    assert len(UNKNOWN) >= 50
    reply = ask(path, stream=stream, **UNKNOWN)
    assert reply.status == 200
    told = named(reply)
    assert told[:2] == ["audio", "functions"]
    assert told[-1].endswith(" more")
    assert not {"tfs_z", "top_a", "modalities"} & set(told)


@pytest.mark.parametrize("path", BODIES)
def test_strict_refuses_them_by_name(path: str) -> None:
    for name in set(UNKNOWN) - {"reasoning_format", "repetition_penalty"}:
        if UNKNOWN[name] is not None:
            reply = ask(path, server=Server(strict=True), **{name: UNKNOWN[name]})
            assert (reply.status, f"{name}: this server does not know the field" in reply.message) == (400, True)
    assert ask(path, server=Server(strict=True), kvflash={"polcy": 1}).status == 400
    assert ask(path, server=Server(strict=True), temperature=0).status == 200


@pytest.mark.parametrize(
    ("more", "told"),
    [
        ({"smoothing_factor": 2, "smoothing_curve": 5.0}, ["smoothing_factor=2"]),
        ({"tfs_z": 0.5}, ["tfs_z=0.5"]),
        ({"modalities": ["text", "audio"]}, ["modalities=..."]),
        ({"n_discard": 3}, ["n_discard"]),
        ({"kvflash": {"polcy": 1}, "stream_options": {"x": 1}}, ["stream_options.x", "kvflash.polcy"]),
        ({"response_format": {"type": "text", "x": 1}}, ["response_format.x"]),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": {}, "x": 1}}},
            ["response_format.json_schema.x"],
        ),
        (
            {"tools": [{"type": "function", "cache": 1, "function": {"name": "f", "strict": True, "returns": {}}}]},
            ["tools.0.cache", "tools.0.function.returns"],
        ),
        ({"a, b": 1}, ["a%2C%20b"]),
        ({"é\r\nX: y": 1}, ["%C3%A9%0D%0AX:%20y"]),
        ({"x" * 5000: 1}, ["x" * 48]),
        ({"x": 1, "": 1}, ["x", "%22%22"]),
        ({"model_dump": 1, "__class__": 2, "stops": 3}, ["model_dump", "__class__", "stops"]),
        ({"max_tokens": 3, "max_completion_tokens": 2}, ["max_tokens"]),
    ],
)
def test_how_they_are_told(more: dict[str, Any], told: list[str]) -> None:
    reply = ask(CHAT, **more)
    assert (reply.status, named(reply)) == (200, told)


def test_the_log_names_them_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, NAME):
        ask(CHAT, somebody=[], nobody="secret")
        ask(CHAT, top_a=2)
    said = [(r.levelname, json.loads(r.getMessage())) for r in caplog.records if "ignored" in r.getMessage()]
    assert said == [
        ("INFO", {"path": CHAT, "model": "fake", "ignored": ["somebody", "nobody"], "count": 2}),
        ("WARNING", {"path": CHAT, "model": "fake", "ignored": ["top_a=2"], "count": 1}),
    ]


def test_many_names_are_a_short_header() -> None:
    raw = ('{"prompt":"x",' + ",".join(f'"k{i}":0' for i in range(4095)) + "}").encode()  # as many as may be
    reply = Server().run(lambda client: client.call("POST", TEXT, raw=raw).done())
    assert (reply.status, named(reply)[-1]) == (200, "and 4079 more")
    assert len(reply.headers[HEADER.lower()]) < 1000


@pytest.mark.parametrize("path", ["/tokenize", "/detokenize", "/apply-template"])
def test_other_endpoints_tell_them_too(path: str) -> None:
    data = {"content": "x", "tokens": [97], "messages": HELLO}
    known = {"/tokenize": "content", "/detokenize": "tokens", "/apply-template": "messages"}[path]
    reply = Server().post(path, {**data, "model": "any"})
    assert (reply.status, sorted(named(reply))) == (200, sorted(data.keys() - {known}))


# --- what is served under other names


@pytest.mark.parametrize("path", BODIES)
def test_names_of_other_servers(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert sent(monkeypatch, path, repetition_penalty=1.5).sampling.repeat_penalty == 1.5
    assert sent(monkeypatch, path, top_k=-1).sampling.top_k == 0
    assert sent(monkeypatch, path, logit_bias=[[97, 1.5], [98, False]]).sampling.logit_bias == {97: 1.5, 98: -100}
    assert sent(monkeypatch, path, guided_json={"type": "object"}).sampling.grammar == "root ::= object"
    assert sent(monkeypatch, path, response_format={"type": "json_object"}).sampling.grammar == "root ::= object"
    for name in ("max_tokens", "n_predict", "max_completion_tokens"):
        assert sent(monkeypatch, path, **{name: 3}).max_tokens == 3
        for unset in (-1, None):
            assert sent(monkeypatch, path, **{name: unset}).max_tokens == 4096
        assert ask(path, **{name: -2}).status == 400
    assert sent(monkeypatch, path, max_tokens=3, n_predict=None, max_completion_tokens=None).max_tokens == 3


SAMPLERS = {
    "temperature": 0.5, "top_k": 7, "top_p": 0.5, "min_p": 0.1, "typical_p": 0.9, "top_n_sigma": 2.0,
    "dynatemp_range": 0.3, "dynatemp_exponent": 1.5, "xtc_probability": 0.5, "xtc_threshold": 0.2,
    "repeat_penalty": 1.1, "presence_penalty": 0.1, "frequency_penalty": 0.2, "repeat_last_n": 9,
    "dry_multiplier": 0.8, "dry_base": 2.0, "dry_allowed_length": 3, "dry_penalty_last_n": -1,
    "dry_sequence_breakers": ["\n", ";"], "mirostat": 2, "mirostat_tau": 4.0, "mirostat_eta": 0.2,
    "adaptive_target": 0.4, "adaptive_decay": 0.5,
    "samplers": ["dry", "top_k", "temperature"], "min_tokens": 5,
}  # fmt: skip


@pytest.mark.parametrize("path", BODIES)
def test_every_sampler_reaches_the_engine(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(SAMPLERS) == set(settings(Samplers))
    found = sent(monkeypatch, path, **SAMPLERS).sampling
    lists = ("dry_sequence_breakers", "samplers")
    assert {name: getattr(found, name) for name in SAMPLERS} == SAMPLERS | {n: tuple(SAMPLERS[n]) for n in lists}
    assert sent(monkeypatch, path, samplers="kt", dry_sequence_breakers=[]).sampling.samplers == (
        "top_k",
        "temperature",
    )


def test_the_server_has_defaults_of_samplers(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = Sampling(dry_multiplier=0.8, repeat_last_n=128, samplers=("top_k", "temperature"))
    assert Server(sampling=usual).settings.sampling == usual
    found = sent(monkeypatch, CHAT, server=Server(sampling=usual), repeat_last_n=7).sampling
    assert (found.dry_multiplier, found.repeat_last_n, found.samplers) == (0.8, 7, ("top_k", "temperature"))


@pytest.mark.parametrize("path", BODIES)
def test_a_penalty_that_divides_by_nothing_is_refused(path: str) -> None:
    assert ask(path, repeat_penalty=0).status == 400
    assert ask(path, repetition_penalty=0).status == 400


def test_null_is_as_good_as_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nothing = dict.fromkeys(("stream", "stop", "tools", "kvflash", "logit_bias", "ignore_eos", "n", "nobody", "seed"))
    assert sent(monkeypatch, CHAT, **nothing).stop == ()


@pytest.mark.parametrize("path", [CHAT, "/apply-template"])
def test_thinking_is_a_name_of_the_template(path: str) -> None:
    server, given = Server(), []
    render = server.prompts.chat

    def recording(asked: ChatInput) -> Rendered:
        given.append((asked.enable_thinking, dict(asked.kwargs)))
        return render(asked)

    server.prompts.chat = recording  # type: ignore[method-assign]

    async def work(client: Client) -> None:
        for more in ({"enable_thinking": False}, {"enable_thinking": False, "chat_template_kwargs": {"a": 1}}):
            assert (await client.post(path, {"messages": HELLO, **more})).status == 200

    server.run(work)
    assert given == [(False, {}), (False, {"a": 1})]


@pytest.mark.parametrize(
    "more",
    [
        {"temperature": "hot"}, {"temperature": [1]}, {"temperature": 11}, {"top_k": -2}, {"top_p": 1.1}, {"stop": 5},
        {"stop": ["x" * 257]}, {"logit_bias": 5}, {"logit_bias": {"97": 101}}, {"logit_bias": {"97": "x"}},
        {"logit_bias": [[1.5, 1]]}, {"logit_bias": [[97]]}, {"logit_bias": {"97": True}}, {"stream": "what"},
        {"stream_options": []}, {"stream_options": {"include_usage": "x"}}, {"kvflash": 1},
        {"kvflash": {"priority": 11}}, {"response_format": "json"}, {"response_format": {"type": "yaml"}},
        {"repetition_penalty": -1}, {"max_tokens": "many"}, {"n": 1.5}, {"seed": "x"}, {"json_schema": [1]},
        {"mirostat": 3}, {"typical_p": 2}, {"samplers": ["tfs_z"]}, {"samplers": 5}, {"samplers": ["top_k", "top_k"]},
        {"samplers": [1]}, {"samplers": "x" * 300}, {"dry_sequence_breakers": [""]},
        {"dry_sequence_breakers": ["x"] * 33},
        {"dry_sequence_breakers": ["x" * 41]}, {"dry_sequence_breakers": [1]}, {"dry_sequence_breakers": 1},
        {"repeat_last_n": -2}, {"xtc_probability": -1}, {"min_tokens": -1}, {"dry_base": 0},
        {"adaptive_target": 1.5}, {"adaptive_decay": 1.0},
        {"ignore_eos": 7}, {"grammar": 1}, {"min_p": -0.1}, {"presence_penalty": 3}, {"frequency_penalty": -3},
    ],
)  # fmt: skip
@pytest.mark.parametrize("path", BODIES)
def test_known_fields_are_still_checked(path: str, more: dict[str, Any]) -> None:
    reply = ask(path, **more)
    assert (reply.status, next(iter(more)) in reply.message) == (400, True), reply.message


def test_what_is_ignored_never_reaches_the_template() -> None:
    server = Server(FakeModel())
    tools = [{"type": "function", "x": 1, "function": {"name": "f", "y": 2}}]
    given: list[Any] = []
    render = server.prompts.chat
    server.prompts.chat = lambda asked: (given.append(asked.tools), render(asked))[1]  # type: ignore[method-assign]
    assert ask(CHAT, server=server, tools=tools).status == 200
    assert given == [[{"type": "function", "function": {"name": "f"}}]]


ODD = [
    None, True, 0, -1, 1, 10**25, -(10**25), 0.5, 1e308, "", "x", "\x00", "é" * 300, [], [None], [1], ["x"], [[]], [{}],
    {}, {"x": 1}, {"": None}, {"type": "text"}, {"type": "function", "function": {"name": "f"}},
    {"type": "json_schema"},
    {"type": "json_object", "schema": {"$ref": "#"}}, [{"type": "text", "text": 1}],
    [{"role": "user", "content": [{}]}],
]  # fmt: skip


@pytest.mark.parametrize("path", [*BODIES, "/tokenize", "/detokenize", "/apply-template"])
def test_no_value_of_a_field_fails_the_server(path: str) -> None:
    """The whole of a field's values: types that are wrong, numbers that are too large, texts that are odd."""
    from kvflash_ggml.server import schema

    kinds: dict[str, Any] = {
        CHAT: schema.ChatRequest, TEXT: schema.CompletionRequest, RAW: schema.RawRequest,
        "/tokenize": schema.TokenizeRequest, "/detokenize": schema.DetokenizeRequest,
        "/apply-template": schema.TemplateRequest,
    }  # fmt: skip
    least = {**BODIES, "/tokenize": {"content": "x"}, "/detokenize": {"tokens": [97]}, "/apply-template": BODIES[CHAT]}
    inner = [f"kvflash.{name}" for name in schema.PoolFields.model_fields] if path in BODIES else []
    names = [*kinds[path].model_fields, *inner, *(["message.tool_calls", "message.name"] if path == CHAT else [])]

    async def work(client: Client) -> None:
        for name in names:
            for value in ODD:
                outer, _, field = name.rpartition(".")
                more = {"kvflash": {field: value}} if outer == "kvflash" else {field: value}
                if outer == "message":
                    more = {"messages": [{**HELLO[0], field: value}]}
                reply = await client.post(path, {**least[path], **more})
                assert reply.status in (200, 400, 501), (name, value, reply.body)

    server = Server(FakeModel(reply=lambda prompt: b"x"))
    server.run(work)


@pytest.mark.parametrize("path", [CHAT, TEXT, RAW])
def test_a_slot_is_taken_by_its_text_and_not_by_its_number(path: str) -> None:
    """llama-server takes the number modulo the slots, so that any is one."""
    for slots, wanted, told in (
        (1, 0, []), (1, 5, []), (1, -1, []), (3, -1, []), (3, 0, ["id_slot=0"]), (3, 5, ["id_slot=5"]),
    ):  # fmt: skip
        reply = ask(path, server=Server(FakeModel(parallel=slots)), id_slot=wanted)
        assert (reply.status, named(reply)) == (200, told)
        assert path != RAW or reply.json["id_slot"] == (0 if slots == 1 else -1)


def test_a_tool_with_an_endless_name_makes_no_endless_header() -> None:
    """It would be in the log, and in what that remembers, too."""
    server = Server()
    tools = [{"type": "function", "function": {"name": f"{i}" + "f" * 100_000, "parameters": {}}} for i in range(20)]
    reply = ask(CHAT, server=server, tools=tools)
    assert reply.status == 200
    assert len(reply.headers[HEADER.lower()]) < 4096
    assert named(reply)[-1] == "and 4 more"
