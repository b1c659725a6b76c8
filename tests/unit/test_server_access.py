"""Who may see and touch what: the texts of keys, pages of other origins, and the log of what was refused."""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from pathlib import Path
from typing import Any

import pytest
from starlette.routing import Route
from support.asgi import Client, Reply
from support.fake_model import FakeModel, FakePrompts
from support.fake_server import Server
from support.posted import form

from kvflash_ggml.errors import HostMemoryError
from kvflash_ggml.server import requestlog
from kvflash_ggml.server.app import RERANK

KEYS = ("one", "two")

TEXT = "open sesame, " * 40

NAME = "treasure"

Asked = tuple[str, Any]
"""A path with its query, and a body."""

PROMPT, MESSAGES = {"prompt": TEXT}, {"messages": [{"role": "user", "content": TEXT}]}

UNKNOWN = "resp_0123456789abcdef01234567"

FORM = form(TEXT.encode())

GOES_ON = {"input": "go on", "previous_response_id": UNKNOWN}


COMPLETING: dict[str, list[Asked]] = {
    "/v1/chat/completions": [("/v1/chat/completions", MESSAGES)],
    "/chat/completions": [("/chat/completions", MESSAGES)],
    "/v1/completions": [("/v1/completions", PROMPT)],
    "/v1/messages": [("/v1/messages?beta=true", MESSAGES)],
    "/messages": [("/messages", MESSAGES)],
    "/v1/responses": [("/v1/responses", {"input": TEXT}), ("/v1/responses", GOES_ON)],
    "/api/chat": [("/api/chat", MESSAGES)],
    "/api/generate": [("/api/generate", PROMPT)],
    "/infill": [("/infill", {"input_prefix": TEXT, "input_suffix": ""})],
    "/responses": [("/responses", {"input": TEXT}), ("/responses", GOES_ON)],
    "/completion": [("/completion", PROMPT)],
    "/completions": [("/completions", PROMPT)],
    **{f"{front}/audio/transcriptions": [(f"{front}/audio/transcriptions", FORM)] for front in ("/v1", "")},
}

COUNTING = [
    f"{front}/{path}" for front in ("/v1", "") for path in ("chat/completions/input_tokens", "messages/count_tokens")
]

NOTHING = [
    "/version", "/ping", "/openapi.json", "/api/version", "/api/tags", "/api/ps", "/api/pull", "/tokenizer_info",
    "/v1/audio/speech", "/v1/audio/translations", "/v1/images/generations", "/v1/models", "/models",
    "/health", "/v1/health", "/metrics", "/props", "/", "/kvflash/state", "/kvflash/events", "/kvflash/conversations",
]  # fmt: skip


def asked(id: str) -> dict[str, list[Asked]]:
    """What to ask of each route; id: a conversation of somebody else, as UNKNOWN is a response."""
    return {
        **{path: [(path, None)] for path in NOTHING},
        "/v1/models/{model:path}": [("/v1/models/fake", None)],
        "/v1/embeddings": [("/v1/embeddings", {"input": TEXT})],
        "/embeddings": [("/embeddings", {"input": TEXT})],
        "/embedding": [("/embedding", {"content": TEXT})],
        **{path: [(path, {"query": TEXT, "documents": [TEXT]})] for path in RERANK},
        "/api/embed": [("/api/embed", {"input": TEXT})],
        "/api/embeddings": [("/api/embeddings", PROMPT)],
        "/api/show": [("/api/show", {"model": "fake"})],
        "/slots": [("/slots", None), ("/slots?fail_on_no_slot=1", None)],
        "/slots/{id}": [
            ("/slots/0?action=save", {"filename": "theirs"}),
            ("/slots/0?action=restore", {"filename": "theirs"}),
            ("/slots/0?action=restore", {"filename": "theirs.kvs"}),
            ("/slots/0?action=erase", None),
        ],
        **{path: [(path, MESSAGES)] for path in COUNTING},
        **{
            path: [(path, {"input": TEXT}), (path, GOES_ON)]
            for path in ("/v1/responses/input_tokens", "/responses/input_tokens")
        },
        **{f"{front}/responses/{{id}}": [(f"{front}/responses/{UNKNOWN}", None)] for front in ("/v1", "")},
        "/tokenize": [("/tokenize", {"content": "x"})],
        "/detokenize": [("/detokenize", {"tokens": [120]})],
        "/apply-template": [("/apply-template", {"messages": [{"role": "user", "content": "x"}]})],
        "/kvflash/markdown": [("/kvflash/markdown", {"text": "x"})],
        "/kvflash/pdf": [("/kvflash/pdf", None)],
        "/kvflash/words": [(f"/kvflash/words?conversation={NAME}&chunk=0", None)],
        "/kvflash/conversations/{id}": [(f"/kvflash/conversations/{id}", None)],
        "/kvflash/conversations/{id}/{action}": [
            (f"/kvflash/conversations/{id}/pin", {"lo": 0, "hi": 64}),
            (f"/kvflash/conversations/{id}/save", None),
            (f"/kvflash/conversations/{id}/park", None),
        ],
        **COMPLETING,
    }


async def ask(client: Client, method: str, one: Asked, key: str, response: str) -> Reply:
    path, body = one
    body = {**GOES_ON, "previous_response_id": response} if body is GOES_ON else body
    sent = FORM if body is FORM else {"data": body}
    call = client.call(method, path.replace(UNKNOWN, response), x_api_key=key, **sent)
    if path == "/kvflash/events":
        reply = await call.until(lambda reply: bool(reply.frames) or reply.ended)
        call.leave()
        await call.done()
        return reply
    return await call.done()


async def walk(
    server: Server, client: Client, id: str, response: str, *, completing: bool
) -> dict[str, tuple[int, str]]:
    """The replies to key two of all routes of the application that complete, or of the others."""
    replies = {}
    for route in server.app.routes:
        assert isinstance(route, Route)
        if (route.path in COMPLETING) is not completing:
            continue
        assert route.path in asked(id), "a route is new: say in `asked` what to ask of it"
        for method in sorted((route.methods or set()) - {"HEAD"}):
            for one in asked(id)[route.path]:
                reply = await ask(client, method, one, "two", response)
                said = plain(one[0], bytes(reply.body).decode()).replace(id, "ID").replace(response, UNKNOWN)
                replies[f"{method} {one[0]} {one[1]}".replace(id, "ID")] = (reply.status, said)
    return replies


def plain(path: str, body: str) -> str:
    """Without times, random names and totals of the server, which is all of the metrics but for two."""
    if path == "/metrics":
        return "\n".join(line for line in body.splitlines() if "kv_cache_usage" in line or "evicted_mass" in line)
    varying = (
        r'"(?:id|seed|created|[a-z]*_at|[a-z_]*_ms|[a-z_]*_duration|[a-z_]*per_second|parks|resumes|forks|lost)": ?'
    )
    return re.sub(rf'({varying})("[^"]*"|[-+0-9.e]+)', r"\1_", body)


def walked(folder: Path, *, other: bool) -> dict[str, tuple[int, str]]:
    """What key two is told by all routes. other: key one has texts, and keeps them as they are."""

    async def own(client: Client) -> Any:
        known = (await client.get("/kvflash/conversations", x_api_key="one")).json["data"]
        words = await client.get(f"/kvflash/words?conversation={NAME}&chunk=0", x_api_key="one")
        files = {path.name: path.read_bytes() for path in folder.rglob("*.kvs")}
        return known, words.json, files, list(server.model.pins)

    async def work(client: Client) -> dict[str, tuple[int, str]]:
        ids, before = {"memory": "c-0123456789abcdef", "device": "c-fedcba9876543210"}, None
        response = UNKNOWN
        if other:
            said = await client.post("/v1/responses", {"input": "x"}, x_api_key="one")
            response = said.json["id"]
            texts = ({"prompt": "an earlier text " * 30}, {"prompt": TEXT, "kvflash": {"conversation": NAME}})
            for one in texts:
                assert (await client.post("/v1/completions", one, x_api_key="one")).status == 200
            saved = await client.post("/slots/0?action=save", {"filename": "theirs"}, x_api_key="one")
            assert saved.status == 200
            before = await own(client)
            ids = {one["where"]: one["id"] for one in before[0]}
            assert (sorted(ids), before[1]["text"]) == (["device", "memory"], TEXT[:64])
        told = {}
        for place, id in ids.items():
            replies = await walk(server, client, id, response, completing=False)
            told |= {f"{place}: {name}": reply for name, reply in replies.items()}
            if other:
                assert await own(client) == before
        return told | await walk(server, client, ids["device"], response, completing=True)

    server = Server(prompts=FakePrompts(hears=True), keys=KEYS, isolate_keys=True, folder=folder)
    server.front.speed = dict  # type: ignore[assignment]  # which goes by the clock
    replies = server.run(work)
    assert isinstance(replies, dict)
    return replies


def test_no_route_tells_or_touches_the_texts_of_another_key(tmp_path: Path) -> None:
    """Every route that the application has; one that is new has to be asked something in `asked`."""
    assert walked(tmp_path / "one", other=True) == walked(tmp_path / "none", other=False)


def test_a_key_has_the_use_of_its_own_texts(tmp_path: Path) -> None:
    """Its files keep their salt, lie beside those of the same name of another key, and only that salt goes on."""

    async def work(client: Client) -> None:
        async def cached(key: str, text: str, **more: Any) -> int:
            asked = {"prompt": text, "max_tokens": 1, "kvflash": more}
            reply = await client.post("/v1/completions", asked, x_api_key=key)
            return int(reply.json["usage"]["prompt_tokens_details"]["cached_tokens"])

        async def slot(key: str, action: str) -> Any:
            asked = {"filename": "mine"}
            return (await client.post(f"/slots/0?action={action}", asked, x_api_key=key)).json

        await cached("two", "y" * 300)
        assert (await slot("two", "save"))["n_saved"] == 300
        await cached("one", "x" * 400, cache_salt="inner", conversation=NAME)
        (known,) = (await client.get("/kvflash/conversations", x_api_key="one")).json["data"]
        assert (known["where"], known["prompt"]) == ("device", 400)
        state = (await client.get("/kvflash/state", x_api_key="one")).json
        assert (state["seat"]["conversation"], state["pool"]["length"]) == (known["id"], 400)
        assert state["conversations"]["memory"] == 0
        assert (await client.get("/slots", x_api_key="one")).json[0]["n_tokens"] == 400
        assert (await slot("one", "save"))["n_saved"] == 400
        assert (
            await client.call("DELETE", f"/kvflash/conversations/{known['id']}", x_api_key="one").done()
        ).status == 200
        assert (await slot("one", "restore"))["n_restored"] == 400
        assert await cached("one", "x" * 400) == 0
        assert await cached("one", "x" * 400, cache_salt="inner") == 399
        assert (await slot("one", "erase"))["n_erased"] == 400
        assert (await slot("two", "restore"))["n_restored"] == 300
        assert (await slot("one", "erase"))["n_erased"] == 0
        assert (await slot("two", "erase"))["n_erased"] == 300

    Server(keys=KEYS, isolate_keys=True, folder=tmp_path).run(work)
    assert len(list(tmp_path.glob("mine~*.kvs"))) == 2


def test_a_file_without_a_salt_belongs_to_no_key(tmp_path: Path) -> None:
    def restored(**settings: Any) -> int:
        server = Server(keys=KEYS, folder=tmp_path, **settings)
        return server.post("/slots/0?action=restore", {"filename": "old"}, x_api_key="one").status

    (tmp_path / "old.kvs").write_bytes(bytes(400))
    assert (restored(isolate_keys=True), restored()) == (404, 200)


def test_an_answer_of_another_key_is_not_told_of() -> None:
    async def work(client: Client) -> None:
        call = client.call("POST", "/v1/completions", {"prompt": TEXT, "stream": True}, x_api_key="one")
        await call.until(lambda reply: len(reply.frames) > 1)
        told = {}
        for key in KEYS:
            (slot,) = (await client.get("/slots", x_api_key=key)).json
            state = (await client.get("/kvflash/state", x_api_key=key)).json
            metrics = bytes((await client.get("/metrics", x_api_key=key)).body).decode()
            usage = "kv_cache_usage_perc" in metrics
            assert ("evicted_mass" in metrics) is usage
            told[key] = slot["id_task"], state["queue"]["running"], state["pool"]["length"] > 0, usage
        call.leave()
        await call.done()
        assert told["two"] == (None, None, False, False)
        assert told["one"] == (told["one"][0], told["one"][0], True, True)
        assert told["one"][0].startswith("cmpl-")

    model = FakeModel(reply=lambda prompt: b"x" * 4000, on_step=lambda: time.sleep(0.002))
    Server(model, keys=KEYS, isolate_keys=True).run(work)


# --- pages of other origins


OPEN = ("/", "/health", "/v1/health", "/ping")
"""What any page may ask for."""

REFUSED = [
    {"origin": "https://evil.example"},
    {"origin": "null"},
    {"origin": "http://127.0.0.1:9090"},
    {"origin": "http://127.0.0.1:8080", "sec_fetch_site": "same-site"},
    {"sec_fetch_site": "cross-site"},
    {"sec_fetch_site": "same-site"},
    {"sec_fetch_site": "cross-site,same-origin"},
    {"sec_fetch_site": "cross-site", "origin": "https://evil.example"},
]

LET_IN = [
    {},
    {"origin": "http://127.0.0.1:8080"},
    {"origin": "http://127.0.0.1:8080", "sec_fetch_site": "same-origin"},
    {"origin": "https://chat.example", "sec_fetch_site": "same-origin"},  # a proxy gave its own name as the host
    {"sec_fetch_site": "none"},
    {"origin": "http://localhost", "host": "localhost:80"},  # browsers leave these ports out, proxies need not
    {"origin": "https://localhost", "host": "localhost:443"},
    {"origin": "https://good.example"},
    {"origin": "https://good.example", "sec_fetch_site": "cross-site"},
]


@pytest.mark.parametrize("headers", REFUSED)
@pytest.mark.parametrize("keys", [(), KEYS])
def test_no_page_of_another_origin_is_answered(headers: dict[str, str], keys: tuple[str, ...]) -> None:
    """Whatever the route, the page and the health apart; a text is not erased by a form of another page."""

    async def work(client: Client) -> None:
        asked = {"prompt": TEXT, "max_tokens": 1}
        assert (await client.post("/v1/completions", asked, x_api_key="one")).status == 200
        for route in server.app.routes:
            assert isinstance(route, Route)
            path = {"/slots/{id}": "/slots/0?action=erase"}.get(route.path, route.path)
            for method in sorted((route.methods or set()) - {"HEAD"}):
                reply = await client.call(method, path, x_api_key="one", **headers).done()
                assert (reply.status == 403) is (route.path not in OPEN), (method, path)
        assert len(server.model.tokens) > 0

    server = Server(keys=keys, cors=("https://good.example",))
    server.run(work)


@pytest.mark.parametrize("headers", LET_IN)
def test_pages_that_may_ask(headers: dict[str, str]) -> None:
    server = Server(cors=("https://good.example",))
    reply = server.post("/v1/completions", {"prompt": "x", "max_tokens": 1}, **headers)
    assert reply.status == 200
    shown = reply.headers.get("access-control-expose-headers")
    assert (shown == "*") is (headers.get("origin") == "https://good.example"), "as Retry-After, X-KVFlash-Ignored"


def test_any_page_may_ask_where_all_are_allowed() -> None:
    for headers in REFUSED:
        assert Server(cors=("*",)).get("/v1/models", **headers).status == 200


def test_viewers_of_one_key_do_not_lock_out_another() -> None:
    async def work(client: Client) -> list[int]:
        calls = [client.call("GET", "/kvflash/events", x_api_key="one") for _ in range(16)]
        calls.append(client.call("GET", "/kvflash/events", x_api_key="two"))
        for call in calls:
            await call.until(lambda reply: bool(reply.frames) or reply.ended)
        more = await client.get("/kvflash/events", x_api_key="one")
        for call in calls:
            call.leave()
            await call.done()
        return [calls[-1].reply.status, more.status]

    assert Server(keys=KEYS).run(work) == [200, 429]


def test_unfinished_bodies_of_one_client_are_bounded_together() -> None:
    """Also of requests that have been read and wait, which keep them."""

    async def work(client: Client) -> list[int]:
        asked = {"prompt": "x", "user": "u" * 900, "stream": True, "max_tokens": 1000}
        calls = [client.call("POST", "/v1/completions", asked, x_api_key="one") for _ in range(5)]
        for call in calls:
            await call.until(lambda reply: reply.status != 0)
        refused = [call.reply for call in calls if call.reply.status != 200]
        assert [(reply.status, reply.json["error"]["code"]) for reply in refused] == [(429, "bodies")]
        other = client.call("POST", "/v1/completions", asked, x_api_key="two")
        await other.until(lambda reply: reply.status != 0)
        for call in [*calls, other]:
            call.leave()
            await call.done()
        again = await client.post("/v1/completions", {**asked, "max_tokens": 1}, x_api_key="one")
        return [other.reply.status, again.status]

    model = FakeModel(reply=lambda prompt: b"x" * 4000, on_step=lambda: time.sleep(0.001))
    assert Server(model, keys=KEYS, max_body=1000).run(work) == [200, 200]


# --- the log of what was refused


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == requestlog.NAME]


@pytest.mark.parametrize(
    ("method", "path", "data", "headers", "status"),
    [
        ("POST", "/v1/completions", {"prompt": ""}, {}, 400),
        ("GET", "/v1/models", None, {"x_api_key": "wrong"}, 401),
        ("GET", "/v1/models", None, {"origin": "https://evil.example"}, 403),
        ("OPTIONS", "/v1/models", None, {"origin": "https://evil.example"}, 403),
        ("GET", "/nowhere", None, {}, 404),
        ("DELETE", "/v1/completions", None, {}, 405),
        ("POST", "/v1/completions", {"prompt": "x" * 3000}, {}, 413),
        ("POST", "/v1/completions", {"prompt": "x"}, {"content_type": "text/plain"}, 415),
        ("POST", "/v1/embeddings", {"input": "x"}, {}, 501),
    ],
)
def test_a_refused_request_leaves_one_line(
    method: str, path: str, data: Any, headers: dict[str, str], status: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger=requestlog.NAME)
    server = Server(keys=KEYS, max_body=2000)
    given = {"x_api_key": "one", **headers}
    reply = server.run(lambda client: client.call(method, path, data, **given).done())
    assert reply.status == status
    (line,) = lines(caplog)
    assert (line["method"], line["path"], line["model"], line["status"]) == (method, path, "fake", status)
    assert line["key"] == (hashlib.sha256(b"one").hexdigest()[:8] if status not in (401, 403) else "")


def test_an_answer_leaves_one_line_also_where_it_fails(caplog: pytest.LogCaptureFixture) -> None:
    """Its own line, with what it took."""

    def fail() -> None:
        raise HostMemoryError("no room")

    caplog.set_level(logging.INFO, logger=requestlog.NAME)
    for model in (FakeModel(), FakeModel(on_step=fail)):
        Server(model, on_end=requestlog.ended).post("/v1/completions", {"prompt": "x", "max_tokens": 1})
    assert [line["finish"] for line in lines(caplog)] == ["length", "internal_error"]
    assert [line["prompt"] for line in lines(caplog)] == [1, 1], "one that was not read has tokens too"


def test_a_failure_of_the_server_leaves_a_line(caplog: pytest.LogCaptureFixture) -> None:
    def render(asked: Any) -> Any:
        raise ZeroDivisionError

    caplog.set_level(logging.INFO, logger=requestlog.NAME)
    server = Server(cors=("https://good.example",))
    server.prompts.chat = render  # type: ignore[method-assign]
    data = {"messages": [{"role": "user", "content": TEXT}]}
    reply = server.post("/apply-template", data, origin="https://good.example")
    assert (reply.status, reply.json["error"]["code"]) == (500, "internal_error")
    assert reply.headers["access-control-allow-origin"] == "https://good.example", "its page can read that"
    assert "ZeroDivisionError" in caplog.text
    assert [(line["path"], line["status"]) for line in lines(caplog)] == [("/apply-template", 500)]


def test_what_is_logged_of_a_hostile_request(caplog: pytest.LogCaptureFixture) -> None:
    """One line of bounded length, in ASCII, whatever path and method say; no query, for keys are put there."""
    caplog.set_level(logging.INFO, logger=requestlog.NAME)
    paths = ["/a\n{}\r\x1b[2J\x7f\x9b\u202e\ud800", "/" + "x" * 10000, "/x?api_key=SECRET", "/\u00e9" * 5000]

    async def work(client: Client) -> None:
        for path in paths:
            call = client.call("M" * 5000, path.encode("utf-8", "replace").decode())
            await call.done()

    Server().run(work)
    said = [record.getMessage() for record in caplog.records if record.name == requestlog.NAME]
    assert len(said) == len(paths)
    for one in said:
        assert one.isascii()
        assert one.isprintable()
        assert len(one) < 2000
        assert "SECRET" not in one


IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,QUJD"}}
TOOLS = [{"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}]

KEEPING: list[tuple[Asked, int]] = [
    (("/v1/chat/completions", {"messages": [{"role": "user", "content": [IMAGE]}]}), 2),
    (("/v1/chat/completions", MESSAGES | {"tools": TOOLS, "tool_choice": "required"}), 2),
    (("/v1/chat/completions", MESSAGES | {"response_format": {"type": "json_object"}}), 2),
    (("/v1/chat/completions/input_tokens", MESSAGES), 1),
    (("/v1/completions", PROMPT | {"grammar": "root ::= [a-z]"}), 1),
    (("/completion", PROMPT | {"json_schema": {"type": "object"}}), 1),
    (("/v1/messages", MESSAGES), 1),
    (("/v1/messages/count_tokens", MESSAGES), 1),
    (("/v1/responses", {"input": TEXT}), 1),
    (("/api/chat", MESSAGES), 1),
    (("/apply-template", MESSAGES), 1),
]
"""What has a rendered chat, an image or a grammar, and how many of them: results that are kept, or may be."""


@pytest.mark.parametrize(("one", "count"), KEEPING, ids=[f"{path} {list(body)[-1]}" for (path, body), _ in KEEPING])
def test_what_is_kept_of_a_request_is_its_keys_alone(one: Asked, count: int) -> None:
    """The time of a request would tell another key that somebody has sent the same."""
    path, body = one

    async def work(client: Client) -> list[list[str]]:
        found = []
        for key in ("one", "two"):
            assert (await client.post(path, body, x_api_key=key)).status == 200
            found.append(prompts.salts.copy())
            prompts.salts.clear()
        return found

    for isolate in (True, False):
        prompts = FakePrompts(sees=True)
        mine, theirs = Server(FakeModel(), prompts, keys=KEYS, isolate_keys=isolate).run(work)
        assert len(mine) == len(theirs) >= count
        assert len(set(mine)) == len(set(theirs)) == 1
        assert (mine[0] != theirs[0]) == isolate
        assert bool(mine[0]) == isolate


def test_a_cache_salt_keeps_renderings_apart() -> None:
    async def work(client: Client) -> None:
        for salt in ("a", "b"):
            reply = await client.post("/v1/chat/completions", MESSAGES | {"kvflash": {"cache_salt": salt}})
            assert reply.status == 200

    prompts = FakePrompts()
    Server(prompts=prompts).run(work)
    assert len(set(prompts.salts)) == len(prompts.salts) == 2
