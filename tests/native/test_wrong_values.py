"""Values that a caller gets wrong: each is told what is wrong with it, and costs neither the process nor the text."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from support.harness import MODELS

from kvflash_ggml import Llama
from kvflash_ggml.errors import ConfigError, KVFlashError, SnapshotError
from kvflash_ggml.llama.fitting import without_loading

POOLS = pytest.mark.parametrize("pool", [None, 512, 4096])


@POOLS
@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"n_ctx": -1}, r"n_ctx=-1: a number of tokens from 0 to 2147483392"),
        ({"n_ctx": 99_999_999_999}, r"n_ctx=99999999999: .* to 2147483392"),
        ({"n_batch": 0}, "n_batch=0: a number of tokens from 1"),
        ({"n_batch": -5}, "n_batch=-5: a number of tokens from 1"),
        ({"n_ubatch": -5}, "n_ubatch=-5: a number of tokens from 0"),
        ({"n_ubatch": 1 << 32}, "n_ubatch=4294967296: a number of tokens from 0"),
        ({"n_threads": (1 << 32) + 1}, "n_threads=4294967297: at most 512 threads"),
        ({"n_threads_batch": 513}, "n_threads_batch=513: at most 512 threads"),
        ({"type_k": 99}, "type_k=99 is no type of ggml"),
        ({"type_v": 4}, "type_v=4 is no type of ggml"),  # was one once
    ],
)
def test_a_number_that_cannot_be(pool: int | None, settings: dict[str, Any], why: str, llama: Any) -> None:
    with pytest.raises(ConfigError, match=why):
        llama(kvflash=pool, **settings)


@pytest.mark.parametrize(
    ("name", "value", "kind"), [("type_k", 12, "q4_k"), ("type_k", 28, "f64"), ("type_v", 26, "i32")]
)
def test_a_type_that_ends_the_process_in_a_full_cache(name: str, value: int, kind: str, llama: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}={value} \({kind}\) is no type of a cache here: 1 is f16"):
        llama(kvflash=None, flash_attn=kind == "i32", **{name: value})


@pytest.mark.parametrize("opens", [Llama, lambda path, **settings: without_loading(path, settings)])
def test_a_replaced_value_that_would_end_the_process(opens: Any) -> None:
    path = str(MODELS / "recall-qwen3-q8_0.gguf")
    with pytest.raises(KVFlashError, match=r"kv_overrides .*rms_epsilon is -1\.0; wanted: 0 or more"):
        opens(path, n_ctx=512, kv_overrides={"qwen3.attention.layer_norm_rms_epsilon": -1.0})
    with pytest.raises(ConfigError, match=r"kv_overrides .*the key qwen3\.block_count\\x00; wanted: 1 to 127 bytes"):
        opens(path, n_ctx=512, kv_overrides={"qwen3.block_count\0": 0})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"n_ctx": "512"}, "n_ctx='512': a whole number"),
        ({"n_threads": 1.5}, r"n_threads=1\.5: a whole number"),
        ({"last_n_tokens_size": "64"}, "last_n_tokens_size='64': a whole number"),
        ({"n_cpu_moe": "2"}, "n_cpu_moe='2': a whole number"),
        ({"n_gpu_layers": "auto"}, "n_gpu_layers='auto': a whole number"),
        ({"lora_path": 5}, "lora_path=5: the path"),
        ({"override_tensor": [5]}, r"override_tensor=\[5\]: pairs of"),
        ({"mmproj": 5}, "mmproj=5: the path"),
        ({"kvflash_spill": 5}, "kvflash_spill=5: the path"),
        ({"kvflash_pins": 5}, "kvflash_pins=5: a list"),
        ({"device": 5}, "device=5: a list"),
        ({"override_tensor": 5}, "override_tensor=5: a list"),
        ({"rpc": 5}, "rpc=5: a list"),
        ({"rpc_servers": 5}, "rpc_servers=5: a list"),
        ({"rpc": ["localhost:50052", 5]}, r"rpc=\['localhost:50052', 5\]: a list of 'HOST:PORT'"),
        ({"kv_overrides": [5]}, r"kv_overrides=\[5\]: a dict"),
    ],
)
def test_a_value_of_another_kind(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        Llama("missing.gguf", kvflash=512, **settings)


@pytest.mark.parametrize("settings", [{}, {"fit": True}, {"type_k": 8, "type_v": 8, "flash_attn": True}])
def test_a_cache_that_no_machine_holds(settings: dict[str, Any], models: dict[str, Path]) -> None:
    """llama.cpp took minutes, and memory for what it knows of each cell, until it said bad_alloc."""
    asked = {"model_path": str(models["dense"]), "n_ctx": 2_147_000_000, "verbose": False, **settings}
    for ask in (lambda: Llama(**asked), lambda: without_loading(asked["model_path"], {**asked, "fit": True})):
        with pytest.raises(ConfigError, match=r"n_ctx=2147000000 \(-c\): a full cache takes [0-9,]+ MiB, and all"):
            ask()


@pytest.mark.parametrize("token", [-1, 1 << 20])
def test_a_bias_of_a_token_that_is_none(token: int, llama: Any) -> None:
    """It was printed as an ignored error, and the answer went on without any bias."""
    with pytest.raises(ConfigError, match=f"logit_bias of token {token}: this model has 0 to 4095"):
        llama().create_completion("a", max_tokens=1, logit_bias={5: 1.0, token: 1.0})


@pytest.mark.parametrize("token", [-1, 4096, 10**9, 10**20])
def test_a_token_that_is_none_has_no_text(token: int, models: dict[str, Path]) -> None:
    with closing(Llama(models["small"], vocab_only=True, verbose=False)) as llm:
        for write in (llm.detokenize, llm.tokenizer().detokenize, llm.tokenizer().decode, llm.tokenizer_.decode):
            with pytest.raises(ConfigError, match=f"token {token} has no text: this model has 0 to 4095"):
                write([token])
            assert write([5]) in (b"&", "&")


def test_a_model_by_its_path(models: dict[str, Path]) -> None:
    with closing(Llama(models["small"], vocab_only=True, verbose=False)) as llm:
        assert llm.model_path == str(models["small"])


def test_a_text_without_tokens_is_not_embedded(models: dict[str, Path]) -> None:
    """Upstream writes a byte before its batch, and the process ends when that is freed."""
    with closing(Llama(models["small"], embedding=True, n_ctx=256, verbose=False)) as llm:
        good = llm.embed("a")
        for texts in ("", [""], ["a", ""]):
            with pytest.raises(ConfigError, match="a text has no tokens"):
                llm.embed(texts)
        with pytest.raises(ConfigError, match=r"embed\(\[\]\): there is no text in it"):
            llm.embed([])
        assert llm.embed("a") == good


CHAT = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "get"}}


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"tools": "get"}, "a tool is"),
        ({"tools": [{"type": "function"}]}, "a tool is"),
        ({"tools": [TOOL], "tool_choice": {"type": "function"}}, r"tool_choice=\{'type': 'function'\}: 'auto'"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": ["get"]}}}, r"tool_choice=\{'function': .*: 'auto'"),
        ({"tools": [TOOL], "tool_choice": "sometimes"}, "tool_choice='sometimes': 'auto'"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "put"}}}, "tool_choice names 'put'"),
        (
            {"tools": [TOOL], "tool_choice": {"function": {"name": "p" * 9999}}},
            r"tool_choice names 'p{100}\.\.\.', which",
        ),
        ({"tools": [TOOL], "tool_choice": "p" * 9999}, r"tool_choice='p{99}\.\.\.: 'auto'"),
    ],
)
def test_tools_that_are_none(settings: dict[str, Any], why: str, llama: Any) -> None:
    with pytest.raises(ConfigError, match=why):
        llama().create_chat_completion(CHAT, **settings)


NAN, INF = float("nan"), float("inf")
NUMBERS = ("temperature", "top_p", "min_p", "typical_p", "repeat_penalty", "frequency_penalty", "presence_penalty")


@POOLS
def test_what_no_answer_can_be_asked_for_with(pool: int | None, llama: Any) -> None:
    llm = llama(kvflash=pool)
    none = lambda ids, scores: scores  # noqa: E731
    cases: list[tuple[str, Any, str]] = [
        *((name, value, "a finite number") for name in NUMBERS for value in ("hot", None, NAN, INF)),
        ("top_k", 2.5, "a whole number"),
        ("mirostat_mode", "2", "a whole number"),
        ("mirostat_tau", NAN, "a finite number"),
        ("max_tokens", "3", "a whole number, or None"),
        ("max_tokens", 2.5, "a whole number, or None"),
        ("seed", "x", "a whole number, or None"),
        ("suffix", 5, "a text, or None"),
        ("stopping_criteria", [none], "a StoppingCriteriaList"),
        ("logits_processor", none, "a LogitsProcessorList"),
        ("logits_processor", [5], "a LogitsProcessorList"),
        ("prompt", None, "a text, or a list of tokens"),
        ("prompt", b"a", "a text, or a list of tokens"),
        *(("grammar", value, "a LlamaGrammar, as of its from_string") for value in (5, 'root ::= "a"', {"a": 1})),
    ]
    for name, value, kind in cases:
        with pytest.raises(ConfigError, match=rf"^{name}=.*: it must be {kind}"):
            llm.create_completion(**{"prompt": "a", "max_tokens": 1, name: value})
    for name, value, kind in (("temp", NAN, "finite"), ("top_k", None, "whole"), ("grammar", 5, "LlamaGrammar")):
        with pytest.raises(ConfigError, match=f"it must be a {kind}"):
            next(llm.generate([1, 2], **{name: value}))
    for text in ("text", None, 5):
        with pytest.raises(ConfigError, match=r"^tokenize\(.*\): the text must be bytes, as of text.encode\(\)"):
            llm.tokenize(text)
    assert llm.create_completion("a", max_tokens=1)["choices"]


@pytest.mark.parametrize(
    ("bias", "why"),
    [
        ({1: NAN}, r"logit_bias of token 1 is nan: it must be a number up to 1e\+30, or -inf"),
        ({"1": INF}, r"logit_bias of token 1 is inf: it must be a number up to 1e\+30"),
        ({1: 1e308}, r"logit_bias of token 1 is 1e\+308: it must be"),
        ({1: "x"}, "logit_bias of token 1 is 'x': it must be"),
        ({1: None}, "logit_bias of token 1 is None: it must be"),
        ({"a": 1}, "logit_bias of token a: this model has 0 to"),
        ({1.5: 1}, r"logit_bias of token 1\.5: this model has 0 to"),
        ([5], r"logit_bias=\[5\]: it must be a dict of tokens and numbers"),
    ],
)
def test_a_bias_that_is_none(bias: Any, why: str, llama: Any) -> None:
    with pytest.raises(ConfigError, match=why):
        llama().create_completion("a", max_tokens=1, logit_bias=bias)


def test_a_bias_that_forbids_a_token(llama: Any) -> None:
    llm = llama()
    first = next(llm.generate(llm.tokenize(b"a"), temp=0.0))
    for least in (-INF, -1e308):
        told = llm.create_completion("a", max_tokens=1, temperature=0, logit_bias={first: least})
        assert told["choices"][0]["text"] != llm.detokenize([first]).decode("utf-8", "replace")


@POOLS
@pytest.mark.parametrize("tools", [None, [TOOL]])
@pytest.mark.parametrize(
    ("messages", "why"),
    [
        (5, r"messages=5: it must be a list of messages"),
        ("hi", r"messages='hi': it must be a list of messages"),
        (["hi"], r"messages\[0\]='hi': it must be a dict"),
        ([*CHAT, {"content": "hi"}], r"messages\[1\]\['role'\]=None: it must be a text"),
        ([{"role": "user", "content": 5}], r"messages\[0\]\['content'\]=5: it must be a text, or a list of parts"),
        ([{"role": "user", "content": [5]}], r"messages\[0\]\['content'\]=\[5\]: it must be a text"),
        ([{"role": "user", "content": b"hi"}], r"messages\[0\]\['content'\]=b'hi': it must be a text"),
        ([{"role": "user", "content": [{"type": "text"}]}], "the chat template refuses these messages: "),
    ],
)
def test_messages_that_are_none(messages: Any, why: str, tools: Any, pool: int | None, llama: Any) -> None:
    llm = llama("dense", kvflash=pool)
    for stream in (False, True):
        with pytest.raises(ConfigError, match=why):
            llm.create_chat_completion(messages, tools=tools, max_tokens=1, stream=stream)
    assert llm.create_chat_completion(CHAT, max_tokens=1)["choices"]


@pytest.mark.parametrize(
    ("template", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate: change them, or give another"),
        ("{{ messages[0].contents.text }}", "UndefinedError: .* has no attribute 'contents'"),
        ("{{ messages[0].content + 5 }}", "TypeError: can only concatenate str"),
        ("{{ 1 // 0 }}", "ZeroDivisionError: "),
        ("{{ messages[0].content.nothing() }}", "UndefinedError: "),
    ],
)
def test_a_template_that_fails_while_it_renders(template: str, why: str, llama: Any) -> None:
    from llama_cpp.llama_chat_format import Jinja2ChatFormatter

    llm = llama()
    llm.chat_handler = Jinja2ChatFormatter(template, "", "").to_chat_handler()
    with pytest.raises(ConfigError, match=f"the chat template refuses these messages: {why}"):
        llm.create_chat_completion(CHAT, max_tokens=1)


def test_a_keyword_that_a_chat_does_not_have(llama: Any) -> None:
    with pytest.raises(TypeError, match=r"Llama\.create_chat_completion\(\) got an unexpected keyword argument 'foo'"):
        llama().create_chat_completion(CHAT, foo=1)


@pytest.mark.parametrize("pool", [None, 512])
def test_a_state_that_is_none(pool: int | None, llama: Any) -> None:
    with pytest.raises(SnapshotError, match="a bytes is no state: give what save_state has returned"):
        llama(kvflash=pool).load_state(b"x")


def test_a_text_that_was_not_parked(llama: Any, tmp_path: Path) -> None:
    llm = llama(kvflash=512)
    for use in (llm.resume, lambda text: llm.write_parked(text, tmp_path / "text.kvs")):
        with pytest.raises(SnapshotError, match="a NoneType is no parked text: give what park or read_parked has"):
            use(None)


def test_objects_of_another_kind(llama: Any) -> None:
    llm = llama(kvflash=512)
    for none in (5, "folder"):
        with pytest.raises(ConfigError, match=r"set_cache\(.*\): a PrefixCache"):
            llm.set_cache(none)
    assert llm.create_completion("a", max_tokens=1)["choices"]
    with pytest.raises(ConfigError, match="kvflash_cache=5: a PrefixCache, or the folder of one"):
        llama(kvflash=512, kvflash_cache=5)
    with pytest.raises(ConfigError, match=r"kvflash_progress=5: what is called as \(done, total\)"):
        llama(kvflash=512, kvflash_progress=5)


def test_a_calibration_that_is_none_is_told_before_the_model_is_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for name in ("none.json", "pipe"):
        with pytest.raises(ConfigError, match="calibrate"):
            Llama("missing.gguf", kvflash=512, kvflash_calibrate=tmp_path / name)


def test_attention_to_what_comes_later(llama: Any) -> None:
    assert llama(attention_type=1).kvflash is None
    with pytest.raises(ConfigError, match=r"attention_type=1 \(non-causal\).*use kvflash=None"):
        llama(kvflash=512, attention_type=1)


@pytest.mark.parametrize("name", ["type_k", "type_v"])
@pytest.mark.parametrize("pool", [512, 4096])
def test_a_cache_whose_blocks_are_wider_than_heads(pool: int, name: str, llama: Any) -> None:
    with pytest.raises(ConfigError, match=rf"{name}=12 \(q4_K\) is stored in blocks of 256 values, and a head .* f16"):
        llama("narrow", kvflash=pool, **{name: 12})


@POOLS
@pytest.mark.parametrize("prompt", [[], [1, 2, -1], [1, 2, 10**6], [2**31]])
def test_a_prompt_that_cannot_be_read_leaves_the_text(
    pool: int | None, prompt: list[int], llama: Any, tokens: Any
) -> None:
    llm = llama(kvflash=pool)
    text = tokens[:100].tolist()
    llm.eval(text)
    last = len(prompt) - 1
    why = f"token {prompt[last]} at {last} of {len(prompt)}: this model has 0 to" if prompt else "no tokens"
    with pytest.raises(ConfigError, match=why):
        next(llm.generate(prompt))
    with pytest.raises(ConfigError, match=why):
        llm.eval(prompt) if prompt else next(llama(kvflash=pool).generate([], reset=False))
    assert llm.input_ids[: llm.n_tokens].tolist() == text
    assert next(llm.generate([], reset=False, temp=0.0)) == next(llama(kvflash=pool).generate(text, temp=0.0))


def test_places_of_an_image_have_no_tokens(llama: Any, tokens: Any) -> None:
    """A chat handler evaluates it behind the text's back, and asks for what follows: `input_ids` has anything there."""
    llm = llama(kvflash=None)
    text = tokens[:100].tolist()
    first = next(llm.generate(text, temp=0.0))
    llm.input_ids[40:60] = 10**9
    prompt = llm.input_ids[: llm.n_tokens].tolist()
    assert next(llm.generate(prompt, temp=0.0)) == first
    with pytest.raises(ConfigError, match=f"token -1 at {len(prompt)} of"):
        next(llm.generate([*prompt, -1]))


def test_a_token_without_text(llama: Any) -> None:
    llm = llama()
    for token in (-1, llm.n_vocab()):
        with pytest.raises(ConfigError, match=f"token {token} has no text: this model has 0 to {llm.n_vocab() - 1}"):
            llm.detokenize([1, token])


@pytest.mark.parametrize("pool", [None, 512])
@pytest.mark.parametrize(("kept", "why"), [(30, "and in the file"), (-1000, "behind the file's end")])
def test_a_file_that_is_cut_off_is_told(
    kept: int, why: str, pool: int | None, models: dict[str, Path], tmp_path: Path
) -> None:
    from kvflash_ggml import Llama

    path = tmp_path / "part.gguf"
    path.write_bytes(models["small"].read_bytes()[:kept])
    with pytest.raises(ValueError, match=rf"Failed to load model from file: {path}: .*{why}"):
        Llama(str(path), kvflash=pool, verbose=False)


@pytest.mark.parametrize("pool", [None, 512])
def test_an_adapter_that_is_none(pool: int | None, llama: Any, models: dict[str, Path], tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe.gguf")
    other = tmp_path / "adapter_model.safetensors"
    other.write_bytes(b"no GGUF file")
    for path in ("nowhere.gguf", str(models["small"]), str(tmp_path / "pipe.gguf"), str(other)):
        with pytest.raises(
            ConfigError, match=f"LoRA adapter from lora path: {path}: it is not there, or no adapter of"
        ):
            llama(kvflash=pool, lora_path=path)
        if path != str(models["small"]):  # a model is refused by llama.cpp, which no placement asks
            with pytest.raises(ConfigError, match=f"LoRA adapter from lora path: {path}: it is not there"):
                without_loading(str(models["small"]), {"kvflash": pool, "lora_path": path})
    with pytest.raises(ConfigError, match="lora_scale=nan: a finite number"):
        llama(kvflash=pool, lora_path=str(models["small"]), lora_scale=float("nan"))
    assert llama(kvflash=pool).n_ctx() == 1024


@POOLS
def test_what_is_no_token(pool: int | None, llama: Any) -> None:
    llm = llama(kvflash=pool)
    for strange in ([1.5], ["a"], "abc"):
        with pytest.raises(TypeError):
            llm.eval(strange)
    assert llm.n_tokens == 0


@POOLS
def test_nothing_can_be_asked_of_a_closed_model(pool: int | None, llama: Any) -> None:
    llm = llama(kvflash=pool)
    state = llm.save_state()
    stream = llm.create_completion("hello", max_tokens=9, stream=True)
    next(stream)
    llm.close()
    for ask in (
        lambda: next(stream),
        lambda: llm.create_completion("hello"),
        lambda: llm.create_chat_completion([{"role": "user", "content": "hello"}]),
        lambda: llm.tokenize(b"hello"),
        lambda: llm.detokenize([5]),
        lambda: llm.eval([5]),
        lambda: llm.sample(),
        lambda: llm.n_vocab(),
        lambda: llm.token_eos(),
        lambda: llm.save_state(),
        lambda: llm.load_state(state),
        lambda: llm.embed("hello"),
    ):
        with pytest.raises(KVFlashError, match="this model is closed: make a new Llama"):
            ask()
    llm.close()


@POOLS
def test_a_model_that_is_closed_within_its_answer(pool: int | None, llama: Any) -> None:
    llm = llama(kvflash=pool)

    def close(_ids: Any, _logits: Any) -> bool:
        llm.close()
        return False

    with pytest.raises(KVFlashError, match="this model is closed: make a new Llama"):
        llm.create_completion("hello", max_tokens=9, stopping_criteria=close)
