"""What llama.cpp's own server is tested for (tools/server/tests/unit), asked of ours.

Its expected words belong to a model from a hub, so structure is asserted, on a model of ours. A case that is not in the
table below has its test here, or where the table says. What else can go wrong around a server: `FAULTS`.

| its file | here |
| --- | --- |
| test_basic | start, props, models, slots, no page: below; aliases: tests/unit/test_server.py. Split models: no |
| test_completion | below; lists of prompts, `response_fields`: tests/unit/test_server.py; `post_sampling_probs`: told |
| test_infill | tests/unit/test_server_infill.py, tests/native/test_prompts.py |
| test_chat_completion | below |
| test_stream, test_prefill | below; streams and errors in tests/unit/test_server.py |
| test_tokenize, test_template | below |
| test_security | below; ours wants the key for /v1/models too, and allows no origin unless told |
| test_slot_save | below, one slot; the file is ours |
| test_metrics | tests/unit/test_server.py: our names |
| test_tool_call | tests/native/test_server_process.py, tests/native/test_chat_families.py, tests/unit/test_server.py |
| test_kv_keep_only_active and its unified cache | tests/native/test_parking.py, the other way round: nobody is ended |
| test_ctx_shift | below: a prompt that does not fit is refused, and an answer ends at the limit |
| test_embedding, test_rerank | tests/native/test_embedding.py, tests/unit/test_server_embeddings.py |
| test_compat_* | tests/compat/README.md |
| router, LoRA, vision, audio, sleep, built-in tools, speculative | no |
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from support.serving import Served, serve

MEANING = "I believe the meaning of life is"
N_CTX = 2048


FAULTS = {
    "it is killed in the middle of a stream, and starts again on its folder": (
        "native/test_server_process::test_killed_in_the_middle",
    ),
    "SIGTERM under load": ("native/test_server_process::test_its_end_and_the_next_start",),
    "more than it can take": (
        "native/test_server_process::test_more_than_it_can_take",
        "unit/test_scheduler::test_overload_loses_nobody",
    ),
    "at several rates, and who counts tokens": (
        "native/test_server_process::test_load_that_is_measured",
        "unit/test_bench_load::test_how_each_ends",
    ),
    "thousands of connections that come and go": ("native/test_server_faults::test_a_flood_of_connections",),
    "clients that vanish": (
        "native/test_server_process::test_clients_that_vanish_at_any_moment",
        "unit/test_scheduler::test_a_thousand_cancels_leave_nothing_behind",
    ),
    "readers of a byte at a time, and of none": (
        "native/test_server_faults::test_readers_of_a_byte_at_a_time",
        "unit/test_server::test_a_client_that_reads_late",
        "unit/test_server::test_a_client_that_does_not_read",
    ),
    "half of a head, half of a body": (
        "native/test_server_process::test_half_requests_and_nonsense",
        "unit/test_connection::test_a_head_that_comes_slowly",
        "unit/test_connection::test_a_body_that_comes_slowly",
    ),
    "bodies that come late": (
        "unit/test_connection::test_idle_behind_a_late_body",
        "unit/test_connection::test_a_head_behind_a_late_body",
    ),
    "JSON that is none, or nested deeply": ("unit/test_server::test_bodies_that_are_no_requests",),
    "prompts of 10,000 lines": ("native/test_server_faults::test_prompts_of_ten_thousand_lines",),
    "prompts of control tokens": ("native/test_server_faults::test_a_prompt_of_control_tokens",),
    "tools of a megabyte": ("native/test_server_faults::test_tool_schemas_of_a_megabyte",),
    "schemas that refer to themselves": (
        "native/test_server_process::test_schemas_that_refer_to_themselves",
        "unit/test_schemas::test_what_is_refused",
    ),
    "grammars that cost too much": (
        "native/test_grammars::test_what_would_cost_too_much",
        "native/test_grammars::test_what_has_too_many_ways",
        "native/test_server_process::test_hostile_grammars_and_schemas",
    ),
    "stop strings across tokens, halves of characters": (
        "unit/test_text_stream::test_a_stop_string_across_tokens",
        "unit/test_text_stream::test_it_does_not_matter_how_the_bytes_are_cut",
    ),
    "answers of no token, and of one": (
        "native/test_server_faults::test_answers_of_no_token_and_of_one",
        "unit/test_scheduler::test_a_limit",
    ),
    "a full disk: folder, cache, spill file": (
        "native/test_server_disk::test_a_full_disk",
        "native/test_server_disk::test_room_comes_back",
        "unit/test_heap_disk::test_what_is_kept_for_later_is_let_go_of_while_a_disk_is_full",
    ),
    "a policy that raises, or returns what are no scores": (
        "native/test_parking::test_a_policy_that_raises",
        "unit/test_scores::test_what_are_no_scores_is_refused_by_name",
    ),
    "an engine that fails at any step": (
        "unit/test_scheduler::test_an_error_is_of_one_request",
        "native/test_faults::test_any_failure_in_a_prompt",
    ),
    "numbers that are none": ("native/test_parking::test_a_spoiled_text_harms_nobody",),
    "a clock that is set": ("unit/test_scheduler::test_a_clock_that_is_set",),
    "files that are damaged": (
        "unit/test_scheduler::test_a_damaged_file_is_read_again",
        "native/test_conformance::test_damaged_files_are_refused",
    ),
}
"""What can go wrong around a server, and where it is made to."""


@pytest.fixture(scope="module")
def served(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("sessions")
    options = ("--kvflash", "1024", "-c", str(N_CTX), "--kvflash-calibrate", "off", "-q", "--session-dir", str(folder))
    with serve(models["dense"], *options) as server:
        yield server


def complete(served: Served, **data: Any) -> dict[str, Any]:
    status, body = served.post("/completion", {"prompt": MEANING, "n_predict": 8, "ignore_eos": True, **data})
    assert status == 200, body
    assert isinstance(body, dict)
    return body


def chat(served: Served, **data: Any) -> tuple[int, dict[str, Any]]:
    messages = [{"role": "system", "content": "Book"}, {"role": "user", "content": "What is the best book"}]
    return served.post("/v1/chat/completions", {"messages": messages, "max_tokens": 8, **data})


def test_each_fault_has_its_tests() -> None:
    for names in FAULTS.values():
        for name in names:
            file, _, test = name.partition("::")
            assert f"def {test}(" in (Path(__file__).parents[1] / f"{file}.py").read_text(encoding="utf-8"), name


# --- basic


def test_what_it_tells_of_itself(served: Served) -> None:
    assert served.get("/health")[0] == 200
    props = served.get("/props")[1]
    assert props["default_generation_settings"]["n_ctx"] == N_CTX
    assert props["model_path"] == "recall-qwen3-q8_0.gguf", "and not the folder"
    assert props["n_embd"] == 256
    assert [model["id"] for model in served.get("/models")[1]["data"]] == ["recall-qwen3-q8_0"]
    slots = served.get("/slots")[1]
    assert [slot["n_ctx"] for slot in slots] == [N_CTX] * props["total_slots"]
    assert "<!doctype html>" in served.get("/")[1]


# --- completion


@pytest.mark.parametrize("return_tokens", [False, True])
def test_completion(return_tokens: bool, served: Served) -> None:
    body = complete(served, return_tokens=return_tokens, cache_prompt=False)
    count = len(served.post("/tokenize", {"content": MEANING, "add_special": True})[1]["tokens"])
    assert (body["timings"]["prompt_n"], body["timings"]["predicted_n"]) == (count, 8)
    assert body["truncated"] is False
    assert len(body["tokens"]) == (8 if return_tokens else 0)
    assert body["content"]


def test_a_stream_says_the_same(served: Served) -> None:
    given = {"temperature": 0, "cache_prompt": False}
    frames = list(served.frames("/completion", {"prompt": MEANING, "n_predict": 8, "ignore_eos": True, **given}))
    assert "".join(frame["content"] for frame in frames) == complete(served, **given)["content"]
    assert [frame["stop"] for frame in frames] == [False] * (len(frames) - 1) + [True]
    assert frames[-1]["stop_type"] == "limit"


def test_seeds(served: Served) -> None:
    def said(seed: int) -> str:
        return str(complete(served, seed=seed, temperature=1.0, n_predict=24, cache_prompt=False)["content"])

    assert said(42) == said(42)
    assert len({said(seed) for seed in range(4)}) > 1


def test_a_prompt_in_tokens(served: Served) -> None:
    tokens = served.post("/tokenize", {"content": MEANING, "add_special": True})[1]["tokens"]
    given = {"temperature": 0, "cache_prompt": False}
    assert complete(served, prompt=tokens, **given)["content"] == complete(served, **given)["content"]


def test_a_prompt_that_does_not_fit(served: Served) -> None:
    status, body = served.post("/completion", {"prompt": MEANING * 400, "cache_prompt": False})
    assert status == 400
    assert body["error"]["code"] == "context_length_exceeded"


def test_an_answer_ends_with_the_context(served: Served) -> None:
    tokens = served.post("/tokenize", {"content": MEANING * 300})[1]["tokens"][: N_CTX - 5]
    body = complete(served, prompt=tokens, n_predict=64)
    assert (body["tokens_predicted"], body["stop_type"], body["truncated"]) == (5, "limit", True)


def test_several_at_once(served: Served) -> None:
    with ThreadPoolExecutor(6) as threads:
        asked = [{"prompt": f"{MEANING} {i}", "n_predict": 16, "ignore_eos": True} for i in range(6)]
        replies = list(threads.map(lambda data: served.post("/completion", data), asked))
    assert [status for status, _ in replies] == [200] * 6
    assert all(body["tokens_predicted"] == 16 for _, body in replies)


@pytest.mark.parametrize("stream", [False, True])
def test_probabilities(stream: bool, served: Served) -> None:
    data = {"prompt": MEANING, "n_probs": 10, "temperature": 0, "n_predict": 5, "ignore_eos": True}
    frames = list(served.frames("/completion", data)) if stream else [served.post("/completion", data)[1]]
    told = [token for frame in frames for token in frame.get("completion_probabilities", ())]
    assert len(told) == 5
    for token in told:
        assert token["logprob"] <= 0
        assert len(token["top_logprobs"]) == 10
        assert token["top_logprobs"][0]["logprob"] == max(top["logprob"] for top in token["top_logprobs"])
        assert bytes(token["bytes"]).decode("utf-8", "replace") == token["token"]


def test_a_known_prompt_is_not_read_again(served: Served) -> None:
    prompt = "What is the capital of France? " * 12
    assert complete(served, prompt=prompt)["timings"]["cache_n"] < 20
    again = complete(served, prompt=prompt)
    assert again["timings"]["prompt_n"] == 1


# --- chat


def test_chat(served: Served) -> None:
    status, body = chat(served, ignore_eos=True)
    assert status == 200
    assert "cmpl" in body["id"]
    assert body["system_fingerprint"]
    assert body["usage"]["completion_tokens"] == 8
    (choice,) = body["choices"]
    assert (choice["message"]["role"], choice["finish_reason"]) == ("assistant", "length")


def test_content_in_parts(served: Served) -> None:
    parts = [{"type": "text", "text": text} for text in ("What is", "", "the best book")]
    same = {"temperature": 0, "cache_prompt": False}  # a known prompt's end is read in a step of another width
    whole = chat(served, messages=[{"role": "user", "content": "What is\nthe best book"}], **same)[1]
    assert chat(served, messages=[{"role": "user", "content": parts}], **same)[1]["choices"] == whole["choices"]


def test_an_answer_that_has_begun(served: Served) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Whill"}]
    assert served.post("/apply-template", {"messages": messages})[1]["prompt"] == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nWhill"
    )
    assert chat(served, messages=[*messages, {"role": "assistant", "content": "x"}])[0] == 400


@pytest.mark.parametrize(
    ("form", "pattern"),
    [
        ({"type": "json_object", "schema": {"const": "42"}}, '"42"'),
        ({"type": "json_object", "schema": {"items": [{"type": "integer"}]}}, r"\[ ?-?\d"),
        ({"type": "json_schema", "json_schema": {"schema": {"const": "foooooo"}}}, '"fooo'),
        ({"type": "json_object"}, r"\{"),
        ({"type": "sound"}, None),
        ({"type": "json_object", "schema": 123}, None),
        ({"type": "json_object", "schema": {"type": 123}}, None),
        ({"type": "json_object", "schema": {"type": "hiccup"}}, None),
    ],
)
def test_response_formats(form: dict[str, Any], pattern: str | None, served: Served) -> None:
    status, body = chat(served, response_format=form, max_tokens=20)
    if pattern is None:
        assert status == 400
        assert body["error"]["message"]
    else:
        assert re.match(pattern, body["choices"][0]["message"]["content"])


def test_grammars(served: Served) -> None:
    assert chat(served, grammar='root ::= "a"{5,5}')[1]["choices"][0]["message"]["content"] == "aaaaa"
    assert chat(served, json_schema={"const": "42"})[1]["choices"][0]["message"]["content"] == '"42"'


@pytest.mark.parametrize(
    "messages", [None, "string", [123], [{}], [{"role": 123}], [{"role": "system", "content": 123}]]
)
def test_messages_that_are_none(messages: Any, served: Served) -> None:
    assert chat(served, messages=messages)[0] == 400


@pytest.mark.parametrize("stream", [False, True])
def test_logprobs_make_up_the_text(stream: bool, served: Served) -> None:
    data = {"temperature": 0, "max_tokens": 5, "logprobs": True, "top_logprobs": 10, "ignore_eos": True}
    if stream:
        messages = [{"role": "user", "content": "What is the best book"}]
        frames = list(served.frames("/v1/chat/completions", {"messages": messages, **data}))
        choices = [frame["choices"][0] for frame in frames if frame["choices"]]
        text = "".join(choice["delta"].get("content") or "" for choice in choices)
        told = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["content"]]
    else:
        choice = chat(served, **data)[1]["choices"][0]
        text, told = choice["message"]["content"], choice["logprobs"]["content"]
    assert "".join(token["token"] for token in told) == text
    assert all(token["logprob"] <= 0 and len(token["top_logprobs"]) == 10 for token in told)


def test_logit_bias(served: Served) -> None:
    first = complete(served, temperature=0, n_predict=1, return_tokens=True)["tokens"][0]
    other = complete(served, temperature=0, n_predict=1, return_tokens=True, logit_bias={str(first): -100})["tokens"][0]
    assert other != first


# --- tokens and slots


def test_tokens(served: Served) -> None:
    text = "This is a test string with unicode 媽 and emoji 🤗"
    tokens = served.post("/tokenize", {"content": text})[1]["tokens"]
    assert served.post("/detokenize", {"tokens": tokens})[1]["content"].strip() == text
    pieces = served.post("/tokenize", {"content": text, "with_pieces": True})[1]["tokens"]
    assert [piece["id"] for piece in pieces] == tokens
    data = b"".join(bytes(p["piece"]) if isinstance(p["piece"], list) else p["piece"].encode() for p in pieces)
    assert data.decode().strip() == text


def test_slots_are_saved_and_restored(served: Served) -> None:
    prompt = "What is the capital of France? " * 20
    complete(served, prompt=prompt)
    status, saved = served.post("/slots/0?action=save", {"filename": "france"})
    assert status == 200
    complete(served, prompt="Another text altogether. " * 20)
    served.post("/slots/0?action=erase", {})
    status, restored = served.post("/slots/0?action=restore", {"filename": "france"})
    assert status == 200
    assert restored["n_restored"] == saved["n_saved"]
    assert complete(served, prompt=prompt)["timings"]["prompt_n"] == 1


@pytest.mark.parametrize("how", ["cut", "changed", "empty", "nonsense"])
def test_damaged_files_are_refused(how: str, served: Served) -> None:
    complete(served)
    assert served.post("/slots/0?action=save", {"filename": how})[0] == 200
    folder = Path(_folder(served))
    path = folder / f"{how}.kvs"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes({"cut": data[: len(data) // 3], "changed": data, "empty": b"", "nonsense": b"x" * 9999}[how])
    status, body = served.post("/slots/0?action=restore", {"filename": how})
    if how == "changed":  # perhaps a page, which is read when it is needed
        assert status in (200, 400)
    else:
        assert status == 400, body
    assert complete(served)["tokens_predicted"] == 8


def _folder(served: Served) -> str:
    options = served.process.args
    assert isinstance(options, list)
    return str(options[options.index("--session-dir") + 1])
