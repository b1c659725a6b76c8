"""A server of several models: who gets the turn, what is listed, and what goes on to a model's process."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from support.asgi import Client
from support.posted import form
from support.shelf import Visit, settle, shelved

from kvflash_ggml.server.app import ANSWERS, ROUTES
from kvflash_ggml.server.errors import ApiError
from kvflash_ggml.server.settings import ServerSettings
from kvflash_router import model_folder
from kvflash_router.engines import FAILED_S, Engines, LoadError, Plan
from kvflash_router.model_folder import FolderModel
from kvflash_router.router import Router, make_router

MODELS = Path(__file__).parents[1] / "models"


A, B, C = map(shelved, "abc")


@dataclass
class Fake:
    """Engines of a fake machine. told: what was loaded and unloaded. gate: loading waits for it. port: of all."""

    told: list[str] = field(default_factory=list)
    broken: set[str] = field(default_factory=set)
    odd: set[str] = field(default_factory=set)
    gate: asyncio.Event = field(default_factory=asyncio.Event)
    time: float = 0.0
    took: float = 0.0
    port: int = 0
    engines: dict[str, Any] = field(default_factory=dict)

    async def start(self, model: FolderModel, left: Any = None) -> Any:
        fake, name = self, model.name
        self.told.append(f"load {name}")
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.told.append(f"kill {name}")
            raise
        if name in self.broken:
            raise LoadError("it is no model")
        if name in self.odd:
            raise ValueError("it says nothing that can be read")
        self.time += self.took

        class Running:
            port, n_ctx, alive = self.port, 4096, True

            async def stop(self) -> None:
                fake.told.append(f"unload {name}")
                self.alive = False

        self.engines[name] = Running()
        return self.engines[name]


def on_engines(test: Callable[[Fake, Engines], Awaitable[None]], **more: Any) -> Fake:
    fake = Fake()

    async def whole() -> None:
        fake.gate.set()
        given = {"most": 8, "wait_s": 30, "idle_s": 100, **more}
        engines = Engines(fake.start, clock=lambda: fake.time, **given)
        try:
            await asyncio.wait_for(test(fake, engines), 60)
        finally:
            await engines.close()

    asyncio.run(whole())
    return fake


def test_running_answers_end_before_another_model_is_loaded() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        one, two = Visit(engines, A), Visit(engines, A)
        await one.began.wait()
        await two.began.wait()
        other = Visit(engines, B)
        late = Visit(engines, A)
        await settle()
        await one.end()
        await settle()
        assert fake.told == ["load a"]
        assert not late.began.is_set(), "the other model has waited longer"
        await two.end()
        await other.began.wait()
        assert fake.told == ["load a", "unload a", "load b"]
        assert not late.began.is_set()
        await other.end()
        await late.began.wait()
        await late.end()

    assert on_engines(test).told == ["load a", "unload a", "load b", "unload b", "load a", "unload a"]


def test_a_model_stays_for_as_long_as_the_change_took() -> None:
    """Two clients that ask for two models in turn do not make the server load one for each request."""

    async def test(fake: Fake, engines: Engines) -> None:
        fake.took = 10
        first = Visit(engines, A)
        await first.began.wait()
        other = Visit(engines, B)
        await settle()
        await first.end()
        for _ in range(3):
            again = Visit(engines, A)
            await again.began.wait()
            await again.end()
        assert fake.told == ["load a"]
        fake.time += 10
        engines.wake()
        await other.began.wait()
        late, further = Visit(engines, A), Visit(engines, B)
        await further.began.wait()
        assert fake.told == ["load a", "unload a", "load b"]
        fake.time += 10
        queued = Visit(engines, B)
        await settle()
        assert not queued.began.is_set(), "its time is over, and another model waits"
        await other.end()
        await further.end()
        await late.began.wait()
        await late.end()
        fake.time += 10
        engines.wake()
        await queued.end()

    assert on_engines(test).told[-1] == "unload b"


def test_who_leaves_loads_nothing() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        first = Visit(engines, A)
        await first.began.wait()
        for _ in range(20):
            other = Visit(engines, B)
            await settle()
            other.task.cancel()
            with suppress(asyncio.CancelledError):
                await other.task
        await first.end()
        await settle()
        assert fake.told == ["load a"]

    on_engines(test)


def test_a_model_that_cannot_be_loaded_is_not_tried_at_once_again() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        fake.broken.add("b")
        for _ in range(3):
            with pytest.raises(ApiError, match="'b' could not be loaded: it is no model") as refused:
                await Visit(engines, B).end()
            assert refused.value.status == 503
        assert fake.told == ["load b"]
        assert engines.status("b") == {"value": "unloaded", "failed": True}
        await Visit(engines, A).end()
        with pytest.raises(ApiError):
            await Visit(engines, B).end()
        assert fake.told == ["load b", "load a"], "it cost no other model its place"
        fake.broken.clear()
        await Visit(engines, shelved("b", changed=1)).end()
        fake.broken.add("a")
        with pytest.raises(ApiError):
            await Visit(engines, A).end()
        fake.broken.clear()
        fake.time += FAILED_S
        await Visit(engines, A).end()
        assert engines.status("a") == {"value": "loaded"}

    on_engines(test)


def test_an_odd_failure_costs_one_model_only() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        fake.odd.add("b")
        with pytest.raises(ApiError, match="'b' could not be loaded: it says nothing"):
            await Visit(engines, B).end()
        await Visit(engines, A).end()
        assert engines.status("a") == {"value": "loaded"}

    on_engines(test)


def test_an_idle_model_is_unloaded() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        visit = Visit(engines, A)
        await visit.began.wait()
        fake.time += 1000
        engines.wake()
        await settle()
        (loaded,) = engines.all_loaded
        assert engines.left(loaded) is None
        await visit.end()
        assert engines.left(loaded) == 100
        fake.time += 99
        engines.wake()
        await settle()
        assert fake.told == ["load a"]
        fake.time += 1
        engines.wake()
        await settle()
        assert fake.told == ["load a", "unload a"]
        await Visit(engines, A).end()

    on_engines(test)
    assert on_engines(lambda _fake, engines: Visit(engines, A).end(), idle_s=None).told == ["load a", "unload a"]


def test_a_model_is_unloaded_on_request_once_its_answers_have_ended() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        visit = Visit(engines, A)
        await visit.began.wait()
        assert not engines.unload("b")
        assert engines.unload("a")
        await settle()
        assert fake.told == ["load a"]
        await visit.end()
        await settle()
        assert fake.told == ["load a", "unload a"]

    on_engines(test)


def test_a_process_that_has_ended_is_started_again() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        visit = Visit(engines, A)
        await visit.began.wait()
        fake.engines["a"].alive = False
        assert engines.all_loaded == []
        again = Visit(engines, A)
        await again.began.wait()
        assert fake.told == ["load a", "load a"]
        await visit.end()
        await settle()
        (loaded,) = engines.all_loaded
        assert loaded.answers == 1, "the answer that ended was of the other process"
        await again.end()

    on_engines(test)


def test_the_end_of_the_server() -> None:
    async def loading(fake: Fake, engines: Engines) -> None:
        fake.gate.clear()
        visit = Visit(engines, A)
        await settle()
        assert engines.status("a") == {"value": "loading"}
        await engines.close()
        for one in (visit, Visit(engines, A)):
            with pytest.raises(ApiError, match="shutting down"):
                await one.end()

    assert on_engines(loading).told == ["load a", "kill a"]

    async def answering(fake: Fake, engines: Engines) -> None:
        visit, waiting = Visit(engines, A), Visit(engines, B)
        await visit.began.wait()
        await engines.close()
        with pytest.raises(ApiError, match="shutting down"):
            await waiting.end()
        await visit.end()

    assert on_engines(answering).told == ["load a", "unload a"]


def test_the_line_is_bounded() -> None:
    async def test(fake: Fake, engines: Engines) -> None:
        fake.gate.clear()
        visits = [Visit(engines, one) for one in (A, B)]
        await settle()
        with pytest.raises(ApiError) as full:
            await Visit(engines, C).end()
        assert full.value.status == 429
        fake.gate.set()
        for visit in visits:
            await visit.end()

    on_engines(test, most=2)

    async def slow(fake: Fake, engines: Engines) -> None:
        fake.gate.clear()
        with pytest.raises(ApiError) as late:
            await Visit(engines, A).end()
        assert (late.value.status, late.value.code) == (503, "queue_timeout")

    on_engines(slow, wait_s=0.01)


# --- the folder


def test_names_of_a_folder(tmp_path: Path) -> None:
    for name in (
        "a.gguf", "B c.gguf", "notes.txt", ".hidden.gguf", "mmproj-a.gguf", "big-00001-of-00002.gguf",
        "big-00002-of-00002.gguf", "one/x.gguf", "one/mmproj-y.gguf", "two/x.gguf", "two/y.gguf", "a/z.gguf",
        "two/mmproj-y.gguf",
        "split/s-00001-of-00002.gguf", "split/s-00002-of-00002.gguf", ".git/x.gguf", "deep/er/x.gguf",
    ):  # fmt: skip
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    (tmp_path / "folder.gguf").mkdir()
    (tmp_path / "lost.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "one" / "mmproj-lost.gguf").symlink_to(tmp_path / "nowhere")
    (tmp_path / "one" / "mmproj-folder.gguf").mkdir()
    with suppress(OSError, UnicodeEncodeError):
        (tmp_path / "bad\udcff.gguf").touch()
    found = model_folder.models(tmp_path)
    assert sorted(found) == ["B c", "a", "a/z", "big", "one", "split", "two/x", "two/y"]
    assert found["big"].path.name == "big-00001-of-00002.gguf"
    seen = {name: one.projector.name for name, one in found.items() if one.projector is not None}
    assert seen == {"a": "mmproj-a.gguf", "one": "mmproj-y.gguf", "two/y": "mmproj-y.gguf"}
    assert model_folder.head(found["a"]).facts == {}


def test_a_folder_that_cannot_be_read_hides_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "a.gguf").touch()
    whole = Path.iterdir

    def iterdir(path: Path) -> Any:
        if path.name == "lost+found":
            raise PermissionError(13, "Permission denied")
        return whole(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    assert set(model_folder.models(tmp_path)) == {"a"}


def test_drafters_are_no_models() -> None:
    found = model_folder.models(MODELS)
    assert {"recall-qwen3-q8_0", "recall-qwen35-q8_0"} <= set(found)
    assert not {"recall-dflash", "recall-eagle3-q8_0"} & set(found)
    head = model_folder.head(found["recall-qwen3-q8_0"])
    assert (head.facts["architecture"], head.n_ctx, bool(head.template)) == ("qwen3", 131072, True)


# --- requests


@dataclass
class Upstream:
    """A model's process: it keeps what it was asked, and answers with these pieces."""

    port: int = 0
    heads: list[bytes] = field(default_factory=list)
    asked: list[bytes] = field(default_factory=list)
    answer: list[bytes] = field(default_factory=list)
    go_on: asyncio.Event = field(default_factory=asyncio.Event)
    left: asyncio.Event = field(default_factory=asyncio.Event)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        size = next(int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
        self.heads.append(head)
        self.asked.append(await reader.readexactly(size))
        for piece in self.answer:
            writer.write(piece)
            await writer.drain()
            if piece is not self.answer[-1]:
                waits = [asyncio.ensure_future(self.go_on.wait()), asyncio.ensure_future(reader.read())]
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                if waits[1].done():
                    self.left.set()
                for wait in waits:
                    wait.cancel()
        writer.close()


STREAM = [
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\nx-own: 1\r\n\r\n"
    b"6\r\none\n\n\n\r\n",
    b"6\r\ntwo\n\n\n\r\n0\r\n\r\n",
]


def on_router(folder: Path, test: Callable[[Client, Upstream, Fake], Awaitable[None]], **settings: Any) -> None:
    async def whole() -> None:
        async with served(folder, **settings) as (client, upstream, fake):
            await asyncio.wait_for(test(client, upstream, fake), 60)

    asyncio.run(whole())


@asynccontextmanager
async def served(
    folder: Path, n_ctx: int = 0, at_once: int = 1, **settings: Any
) -> AsyncIterator[tuple[Client, Upstream, Fake]]:
    async def plan(model: FolderModel, room: Any) -> Plan:
        return Plan(needs={}, room={"CPU": 1})

    upstream, fake = Upstream(answer=STREAM), Fake()
    fake.gate.set()
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(await asyncio.start_server(upstream.serve, "127.0.0.1", 0))
        fake.port = server.sockets[0].getsockname()[1]
        room: Any = {"plan": plan, "at_once": at_once} if at_once > 1 else {}
        engines = Engines(fake.start, most=8, wait_s=30, idle_s=100, clock=lambda: fake.time, **room)
        stack.push_async_callback(engines.close)
        router = Router(folder, ServerSettings(alias="", **settings), engines, n_ctx)
        stack.callback(router.close)
        yield Client(make_router(router)), upstream, fake


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a", "b"):
        (tmp_path / f"{name}.gguf").touch()
    return tmp_path


def test_a_stream_goes_on_as_it_comes(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        sent = {"model": "a", "stream": True}
        call = client.call(
            "POST", "/v1/chat/completions?x=1", sent, origin="http://127.0.0.1:8080", sec_fetch_site="same-origin"
        )
        reply = await call.until(lambda reply: b"one" in reply.body)
        assert not reply.ended
        upstream.go_on.set()
        await call.done()
        assert (reply.status, bytes(reply.body), reply.ended) == (200, b"one\n\n\ntwo\n\n\n", True)
        assert reply.headers["x-own"] == "1"
        assert "transfer-encoding" not in reply.headers
        (head,), (body,) = upstream.heads, upstream.asked
        assert json.loads(body) == sent
        assert head.startswith(b"POST /v1/chat/completions?x=1 HTTP/1.1\r\n")
        assert f"host: 127.0.0.1:{fake.port}".encode() in head.lower()
        assert b"x-forwarded-for: 127.0.0.1" in head.lower()
        assert b"origin" not in head.lower()
        assert b"sec-fetch" not in head.lower()

    on_router(folder, test)


def test_a_client_that_leaves_leaves_the_process_too(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        call = client.call("POST", "/v1/completions", {"model": "a"})
        await call.until(lambda reply: b"one" in reply.body)
        call.leave()
        await call.done()
        await upstream.left.wait()
        other = client.call("POST", "/v1/completions", {"model": "b"})
        await other.until(lambda reply: b"one" in reply.body)
        assert fake.told == ["load a", "unload a", "load b"], "the turn was given back"
        upstream.go_on.set()
        await other.done()

    on_router(folder, test)


def test_a_process_that_ends_costs_its_answers_only(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        upstream.answer = [STREAM[0]]
        reply = await client.post("/v1/completions", {"model": "a"})
        assert (bytes(reply.body), reply.ended) == (b"one\n\n\n", False), "the client sees that the end is missing"
        upstream.answer = [b""]
        reply = await client.post("/v1/completions", {"model": "a"})
        assert (reply.status, "has ended" in reply.message) == (503, True)
        fake.engines["a"].port = 1
        assert (await client.post("/v1/completions", {"model": "a"})).status == 503
        fake.engines["a"].alive = False
        upstream.answer, _ = STREAM, upstream.go_on.set()
        assert (await client.post("/v1/completions", {"model": "a"})).ended

    on_router(folder, test)


@pytest.mark.parametrize(
    ("model", "status"),
    [
        ("nope", 404), ("../a", 404), ("a.gguf", 404), ("/etc/passwd", 404), ("x" * 5000, 404), ("a\x00", 404),
        ("\udcff", 404), (" a", 404), ("A", 404), (":latest", 404), (7, 400), (["a"], 400), ({"a": 1}, 400),
        (True, 400),
    ],
)  # fmt: skip
def test_names_that_are_none(folder: Path, model: Any, status: int) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/models/load", "/api/show"):
            reply = await client.post(path, {"model": model})
            assert reply.status == status, bytes(reply.body)
            assert len(reply.body) < 400
        assert fake.told == upstream.heads == []

    on_router(folder, test)


def test_bodies_that_are_none(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        for raw, status in ((b"{", 400), (b"[" * 200, 400), (b"x" * 2000, 413)):
            assert (await client.post("/v1/completions", raw=raw)).status == status
        assert (await client.post("/v1/completions", raw=b"{}", content_type="text/plain")).status == 415
        assert (await client.post("/v1/nothing", {"model": "a"})).status == 503
        assert fake.told == []

    on_router(folder, test, max_body=1000)


def test_without_a_name_it_is_the_model_at_hand(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        upstream.go_on.set()
        for asked, told in (
            ({}, "load a"),
            ({"model": "b:latest"}, "load b"),
            ({"model": ""}, "load b"),
            ([], "load b"),
        ):
            assert (await client.post("/v1/completions", asked)).status == 200
            assert fake.told[-1] == told
        assert (await client.post("/models/unload", {"model": "b"})).json == {"success": True}
        await settle()
        assert fake.told[-1] == "unload b"
        assert (await client.post("/api/generate", {"model": "a", "prompt": "x", "keep_alive": 0})).ended
        for name, told in (("b", "load a"), ("a", "unload a")):
            reply = await client.post("/api/generate", {"model": name, "keep_alive": 0})
            assert (reply.json["done_reason"], reply.json["response"]) == ("unload", "")
            await settle()
            assert fake.told[-1] == told
        reply = await client.post("/api/chat", {"model": "a", "messages": [], "keep_alive": 0})
        assert reply.json["message"] == {"role": "assistant", "content": ""}
        assert (reply.json["done_reason"], "created_at" in reply.json) == ("unload", True)
        assert (await client.post("/v1/completions", {"model": "b"})).status == 200
        fake.engines["b"].alive = False
        assert (await client.post("/v1/completions", {"model": None})).status == 200
        assert fake.told[-1] == "load b", "the one that was there last"

    on_router(folder, test)


def test_without_a_name_it_is_no_model_that_cannot_be_loaded(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        upstream.go_on.set()
        fake.broken.add("a")
        refused = await client.post("/v1/completions", {})
        assert (refused.status, refused.json["error"]["code"]) == (503, "model_failed")
        assert (await client.post("/v1/completions", {})).status == 200
        assert fake.told == ["load a", "load b"]

    on_router(folder, test)


def test_what_is_listed(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        upstream.go_on.set()
        assert (await client.get("/api/ps")).json == {"models": []}
        assert (await client.post("/models/load", {"model": "b"})).json == {"success": True}
        found = {one["id"]: one for one in (await client.get("/v1/models")).json["data"]}
        assert [found[name]["status"]["value"] for name in "ab"] == ["unloaded", "loaded"]
        assert [found[name]["meta"]["n_ctx"] for name in "ab"] == [8192, 4096]
        assert (await client.get("/v1/models/a")).json["id"] == "a"
        assert (await client.get("/v1/models/c")).message == "there is no model 'c': 'a', 'b' are served"
        assert [one["name"] for one in (await client.get("/api/tags")).json["models"]] == ["a", "b"]
        (running,) = (await client.get("/api/ps")).json["models"]
        assert (running["name"], running["context_length"], running["expires_at"] > "2026") == ("b", 4096, True)
        assert (await client.post("/api/show", {"model": "a"})).json["capabilities"] == ["completion", "tools"]
        (folder / "c.gguf").touch()
        assert (await client.get("/v1/models/c")).status == 200
        for path in ("/health", "/ping", "/version"):
            assert (await client.get(path)).status == 200
        described = (await client.get("/openapi.json")).json["paths"]
        assert {"/models/load", "/v1/chat/completions", "/kvflash/state"} <= described.keys()
        page = (MODELS.parents[1] / "router/README.md").read_text(encoding="utf-8")
        own = described.keys() - {re.sub(r":\w+\}", "}", path) for _, path, _ in ROUTES}
        assert {path for path in own if f"`POST {path}`" not in page and f", `{path}`" not in page} == set()
        assert b"<html" in (await client.get("/")).body
        assert (await client.post("/kvflash/markdown", {"text": "*a*"})).json == {"html": "<p><em>a</em></p>\n"}
        assert fake.told == ["load b"]

    on_router(folder, test, n_ctx=8192)


def test_who_looks_on_loads_nothing_and_keeps_nothing(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        for path in ("/metrics", "/kvflash/events", "/props?model=a"):
            assert (await client.get(path)).json["error"]["code"] == "not_loaded"
        await client.post("/models/load", {"model": "a"})
        looking = client.call("GET", "/kvflash/events")
        await looking.until(lambda reply: b"one" in reply.body)
        assert (await client.get("/props?model=b")).status == 503
        await client.post("/models/load", {"model": "b"})
        assert fake.told == ["load a", "unload a", "load b"]
        upstream.go_on.set()
        await looking.done()

    on_router(folder, test)


KEPT = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nkept"
GONE = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\ngone"


def on_two(folder: Path, test: Callable[[Client, Upstream, Upstream, Fake], Awaitable[None]], **settings: Any) -> None:
    """Load both models, `a` first, with a process each. The first upstream is of `a`."""

    async def both(client: Client, upstream: Upstream, fake: Fake) -> None:
        upstream.answer, other = [KEPT], Upstream(answer=[GONE])
        async with await asyncio.start_server(other.serve, "127.0.0.1", 0) as server:
            await client.post("/models/load", {"model": "a"})
            fake.port = server.sockets[0].getsockname()[1]
            await client.post("/models/load", {"model": "b"})
            await test(client, upstream, other, fake)
            assert fake.told == ["load a", "load b"]

    on_router(folder, both, at_once=2, **settings)


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("DELETE", "/kvflash/conversations/c-1"),
        ("POST", "/kvflash/conversations/c-1/pin"),
        ("POST", "/slots/0?action=restore"),
    ],
)
def test_what_only_one_model_knows_is_found(method: str, path: str, folder: Path) -> None:
    """By its id alone, whichever model was used last; named, a model is asked alone."""

    async def test(client: Client, a: Upstream, b: Upstream, fake: Fake) -> None:
        async def asked(path: str) -> tuple[int, bytes]:
            reply = await client.call(method, path, raw=sent, content_length=str(len(sent))).done()
            assert reply.ended
            return reply.status, bytes(reply.body)

        sent = b'{"lo": 0, "hi": 64}' if method == "POST" else b""
        assert await asked(path) == (200, b"kept")
        assert a.asked == b.asked == [sent]
        assert await asked(f"{path}{'&' if '?' in path else '?'}model=b") == (404, b"gone")
        assert len(a.asked) == 1
        a.answer = [GONE]
        assert await asked(path) == (404, b"gone")
        a.answer, fake.engines["b"].port = [KEPT], 1
        assert await asked(path) == (200, b"kept"), "the other process has just ended"

    on_two(folder, test)


@pytest.mark.parametrize("path", ["/v1/responses", "/responses/input_tokens"])
def test_a_response_is_gone_on_from_where_it_is_kept(path: str, folder: Path) -> None:
    async def test(client: Client, a: Upstream, b: Upstream, fake: Fake) -> None:
        goes_on = {"input": "x", "previous_response_id": "resp_1"}
        reply = await client.post(path, goes_on, authorization="Bearer k")
        assert (reply.status, bytes(reply.body)) == (200, b"kept")
        assert [head.split(b" HTTP")[0] for head in a.heads] == [b"GET /v1/responses/resp_1", f"POST {path}".encode()]
        assert b"authorization: Bearer k" in a.heads[0], "a response of another key is not found"
        assert json.loads(a.asked[-1]) == goes_on
        for named in ({**goes_on, "model": "b"}, {**goes_on, "previous_response_id": "?/\udcff"}):
            a.answer = [GONE]
            assert bytes((await client.post(path, named)).body) == b"gone", "the one that was named, or used last"

    on_two(folder, test)


def test_the_guard_stands_before_it(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        assert (await client.post("/v1/completions", {"model": "a"})).status == 401
        assert (await client.get("/v1/models")).status == 401
        upstream.go_on.set()
        assert (await client.post("/v1/completions", {"model": "a"}, authorization="Bearer k")).status == 200
        assert b"authorization: Bearer k" in upstream.heads[0]

    on_router(folder, test, keys=("k",))


def test_public_metrics_tell_no_name(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        upstream.go_on.set()
        reply = await client.get("/metrics?model=c")
        assert (reply.status, reply.json["error"]["code"]) == (503, "not_loaded")
        key = {"authorization": "Bearer k"}
        await client.post("/models/load", {"model": "a"}, **key)
        assert (await client.get("/metrics?model=c", **key)).status == 404
        assert (await client.get("/metrics?model=c")).status == 200
        assert b"GET /metrics" in upstream.heads[-1]

    on_router(folder, test, keys=("k",), public_metrics=True)


def test_every_answer_of_a_server_is_one_of_the_router(folder: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        upstream.go_on.set()
        for path in ANSWERS:
            sent = form(model="a") if path.endswith("transcriptions") else {"data": {"model": "a"}}
            assert (await client.post(path, **sent)).ended, path
        assert len(upstream.heads) == len(ANSWERS) > 20
        assert fake.told == ["load a"]

    on_router(folder, test)


def test_a_folder_that_is_gone(tmp_path: Path) -> None:
    async def test(client: Client, upstream: Upstream, fake: Fake) -> None:
        reply = await client.get("/v1/models")
        assert (reply.status, "cannot be read" in reply.message) == (503, True)

    on_router(tmp_path / "gone", test)
    (tmp_path / "empty").mkdir()

    async def empty(client: Client, upstream: Upstream, fake: Fake) -> None:
        assert (await client.get("/v1/models")).json["data"] == []
        assert (await client.post("/v1/completions", {})).json["error"]["code"] == "no_models"
        assert (await client.post("/v1/completions", {"model": "a"})).status == 404

    on_router(tmp_path / "empty", empty)
