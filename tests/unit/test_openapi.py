"""`/openapi.json`: has every route, with the schema that its requests are parsed by."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from starlette.routing import Route
from support.asgi import Client
from support.fake_server import Server

from kvflash_ggml import __version__
from kvflash_ggml.server import openapi
from kvflash_ggml.server.app import NOT_HERE, ROUTES

SAID = [{"role": "user", "content": "x"}]


def described(**settings: Any) -> dict[str, Any]:
    key = {"x_api_key": settings["keys"][0]} if "keys" in settings else {}
    reply = Server(**settings).get("/openapi.json", **key)
    assert reply.status == 200
    found = reply.json
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    return described()


def test_every_route_is_described(document: dict[str, Any]) -> None:
    served = {
        (method.lower(), re.sub(r":\w+\}", "}", route.path))
        for route in Server().app.routes
        if isinstance(route, Route) and route.path not in NOT_HERE
        for method in (route.methods or set()) - {"HEAD"}
    }
    assert {(method, path) for path, one in document["paths"].items() for method in one} == served
    assert len(served) > 50


def test_every_operation_says_what_it_does_and_takes(document: dict[str, Any]) -> None:
    for method, path, endpoint in ROUTES:
        one = document["paths"][re.sub(r":\w+\}", "}", path)][method.lower()]
        assert one["summary"].endswith("."), path
        assert set(one["responses"]) == {"200", "default"}
        named = {each["name"] for each in one.get("parameters", ()) if each["in"] == "path"}
        assert named == set(re.findall(r"\{(\w+)", path))
        kind = openapi.takes(endpoint)
        assert ("requestBody" in one) >= (kind is not None)
        if kind is not None:
            (body,) = one["requestBody"]["content"].values()
            assert body["schema"] == {"$ref": f"#/components/schemas/{kind.__name__}"}


@pytest.mark.parametrize(
    ("name", "body", "fits"),
    [
        ("ChatRequest", {"messages": SAID, "max_tokens": 3, "stop": "a", "top_k": -1}, True),
        ("ChatRequest", {"messages": SAID, "top_k": -2}, False),
        ("ChatRequest", {"messages": []}, False),
        ("ChatRequest", {}, False),
        ("CompletionRequest", {"prompt": ["a", 3], "n_predict": 1}, True),
        ("TokenizeRequest", {"content": "x"}, True),
        ("TokenizeRequest", {"prompt": "x"}, True),
        ("TokenizeRequest", {}, False),
        ("MessagesRequest", {"messages": SAID, "stop_sequences": ["a"]}, True),
        ("ResponsesRequest", {"input": "x", "kvflash": {"pins": [[0, 64]]}}, True),
        ("OllamaChatRequest", {"messages": [], "keep_alive": "5m"}, True),
    ],
)  # fmt: skip
def test_schemas_fit_what_is_taken(document: dict[str, Any], name: str, body: Any, fits: bool) -> None:
    schema = {"$ref": f"#/components/schemas/{name}", "components": document["components"]}
    assert jsonschema.Draft202012Validator(schema).is_valid(body) is fits


def test_keys_and_prefix_are_told() -> None:
    assert described()["security"] == []
    found = described(keys=("one",), api_prefix="")
    assert found["security"] == [{"bearer": []}, {"x-api-key": []}]
    free = {path for path, one in found["paths"].items() for each in one.values() if each.get("security") == []}
    assert free == {"/", "/health", "/v1/health", "/ping"}
    reply = Server(api_prefix="/llm").get("/llm/openapi.json")
    assert reply.json["servers"] == [{"url": "/llm"}]


def test_errors_have_the_shape_of_their_interface(document: dict[str, Any]) -> None:
    shapes = {
        path: document["paths"][path]["post"]["responses"]["default"]["content"]["application/json"]["schema"]["$ref"]
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat")
    }
    assert [shape.rpartition("/")[2] for shape in shapes.values()] == ["Error", "AnthropicsError", "OllamasError"]


def test_small_questions() -> None:
    assert Server().get("/version").json == {"version": __version__}
    assert Server(keys=("one",)).get("/version").status == 401
    for keys in ((), ("one",)):
        assert Server(keys=keys).get("/ping").status == Server(keys=keys).post("/ping", None).status == 200


def test_a_slash_behind_the_list_of_models_asks_for_no_model() -> None:
    assert Server().get("/v1/models/").json == Server().get("/v1/models").json


def page_of(name: str) -> str:
    return (Path(__file__).parents[2] / name).read_text(encoding="utf-8")


def test_the_page_of_the_server_has_every_route() -> None:
    """The table of docs/server.md has them as `GET /a`, `/b`; `POST /c`. Below /v1 it names one of two."""
    table = page_of("docs/server.md").partition("| endpoint | |")[2].partition("\n\n")[0]
    told = set()
    for cell in re.findall(r"^\| (`[A-Z]+ /[^|]*) \|", table, re.MULTILINE):
        for part in cell.split("; "):
            method, _, _ = part[1:].partition(" ")
            told |= {(method, path) for path in re.findall(r"(/[^`]*)`", part)}
    served = {(method, re.sub(r":\w+\}", "}", path)) for method, path, _ in ROUTES}
    assert told - {("HEAD", "/")} <= served
    assert {(method, path) for method, path in served - told if (method, f"/v1{path}") not in told} == set()


def rows() -> list[str]:
    page = page_of("docs/options.md")
    table = page.partition("## Paths that are not served")[2].partition("\n## ")[0]
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `/")]
    return [path for cell in cells for path in re.findall(r"`(/[^`]*)`", cell)]


def test_what_is_not_served_on_purpose() -> None:
    """The table of docs/options.md: by no method, and no path of it is described."""

    async def work(client: Client) -> dict[str, set[int]]:
        return {path: {(await client.call(m, path).done()).status for m in ("GET", "POST")} for path in rows()}

    found = Server().run(work)
    assert len(found) > 40
    assert {path: codes for path, codes in found.items() if not codes <= {404, 405, 501}} == {}
    assert set(NOT_HERE) <= found.keys()
    assert not found.keys() & {path for _, path, _ in ROUTES}
