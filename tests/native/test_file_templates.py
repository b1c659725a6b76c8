"""Chat templates of model files in `Llama`: written as Jinja writes them, and within bounds when they are hostile."""

from __future__ import annotations

import json
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import jinja2
import pytest
from llama_cpp import llama_chat_format
from llama_cpp.llama_chat_format import Jinja2ChatFormatter
from support.checkpoints import rewritten
from support.families import TOOLS, template_source
from vendoring import source
from vendoring.pin import VendorError

from kvflash_ggml import Llama
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.gguf.reader import Field
from kvflash_ggml.llama.formatting import rendered, takes_parts

CHAT = [{"role": "user", "content": "hi"}]
NAME = "tokenizer.chat_template"
MANY = r"takes more than 8000000 steps, or 1000 within each other: change them, or give another chat_format"
UNKNOWN = "the chat template (cannot be read|refuses these messages): "

HOSTILE = {
    "power": ("{{ 10 ** 1000 }}", UNKNOWN),
    "repetition": ("{{ 'a' * 9000000 }}", MANY),
    "center": ("{{ 'x' | center(1000000) }}", UNKNOWN),
    "ljust": ("{{ 'x'.ljust(1000000) }}", UNKNOWN),
    "replace": ("{{ ('a' * 100000).replace('a', 'b' * 10240) | length }}", MANY),
    "range": ("{{ range(1000001) | length }}", MANY),
    "loops": ("{% for i in range(3000) %}{% for j in range(3000) %}{% endfor %}{% endfor %}", MANY),
    "recursion": ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", MANY),
    "brackets": ("{{ " + "(" * 9999 + "1" + ")" * 9999 + " }}", "cannot be read: .*nested too deep"),
    "size": ("x" * (1 << 21), "cannot be read: it has 2097152 bytes, and 1048576 is the most: give a chat_format"),
    "braces": ("{{" * 8, "cannot be read: .*: give a chat_format"),
    "statement": ("{%", "cannot be read: .*: give a chat_format"),
}


def _with(model: Path, path: Path, **templates: str) -> Path:
    """Write a copy of a model whose file has these templates, by the ends of their names."""

    def change(fields: dict[str, Field]) -> None:
        for end, text in templates.items():
            name = NAME + end
            fields[name] = Field.of(name, text)

    return rewritten(model, path, change)


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Templates that Jinja has been given to compile. It computes constants then."""
    given, stock = [], jinja2.Environment.from_string

    def seen(self: Any, text: Any, *args: Any, **settings: Any) -> Any:
        given.append(text)
        return stock(self, "" if len(text) > 9000 else text, *args, **settings)

    monkeypatch.setattr(jinja2.Environment, "from_string", seen)
    return given


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_template_costs_little(
    name: str, models: dict[str, Path], tmp_path: Path, compiled: list[Any]
) -> None:
    """Jinja computed constants while the model was opened, and loops of a chat had no bounds."""
    text, why = HOSTILE[name]
    path = _with(models["small"], tmp_path / "model.gguf", **{"": text, ".other": text})
    with closing(Llama(path, n_ctx=256, verbose=False)) as llm:
        with pytest.raises(ConfigError, match=why):
            llm.create_chat_completion(CHAT, max_tokens=1)
        llm.chat_format = "chat_template.other"
        with pytest.raises(ConfigError, match=why):
            llm.create_chat_completion(CHAT, max_tokens=1)
        assert llm.create_completion("a", max_tokens=1)["choices"], "a model still completes texts"
        llm.chat_format = "chatml"
        assert llm.create_chat_completion(CHAT, max_tokens=1)["choices"]
    assert text not in compiled


def test_a_format_with_a_width_writes_little() -> None:
    for text in ("{{ '%01000000d' | format(1) }}", "{{ '{:01000000d}' | format(1) }}"):
        try:
            assert len(rendered(text, {"messages": CHAT})) < 100
        except ConfigError as err:
            assert "refuses these messages" in str(err)  # noqa: PT017


def test_formats_of_a_file_are_upstreams(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The names, the stop string, and the module are as before."""
    text = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}{{ add_generation_prompt }}"
    path = _with(models["small"], tmp_path / "model.gguf", **{"": text, ".tool_use": "Tool" + text})
    with closing(Llama(path, n_ctx=256, verbose=False)) as llm:
        assert set(llm._chat_handlers) == {"chat_template.default", "chat_template.tool_use"}
        assert llm.chat_format == "chat_template.default"
        assert llm.metadata[NAME] == text
        asked: list[dict[str, Any]] = []
        done: dict[str, Any] = {"id": "a", "created": 1, "model": "m", "usage": {}}
        done["choices"] = [{"text": "", "finish_reason": "stop", "logprobs": None}]
        monkeypatch.setattr(llm, "create_completion", lambda **given: asked.append(given) or done)
        eos = llm._model.token_get_text(llm.token_eos())
        for llm.chat_format, start in (("chat_template.default", ""), ("chat_template.tool_use", "Tool")):
            llm.create_chat_completion(CHAT)
            prompt = f"{start}hi{eos}True"
            assert asked[-1]["prompt"] == llm.tokenize(prompt.encode(), add_bos=False, special=True)
            assert asked[-1]["stop"][-1] == eos
            (criterion,) = asked[-1]["stopping_criteria"]
            assert criterion([5, llm.token_eos()], None)
            assert not criterion([llm.token_eos(), 5], None)
    assert llama_chat_format.Jinja2ChatFormatter is Jinja2ChatFormatter


def _call(arguments: Any) -> list[dict[str, Any]]:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "weather", "arguments": arguments}}
    turn = {"role": "assistant", "content": "", "tool_calls": [call]}
    answer = {"role": "tool", "tool_call_id": "abcdefghi", "name": "weather", "content": "sun"}
    return [{"role": "user", "content": "a"}, turn, answer, {"role": "user", "content": "b"}]


def _turns(*texts: Any, first: str = "user") -> list[dict[str, Any]]:
    roles = ["system"] * (first == "system") + ["user", "assistant"] * 2
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


CHATS: dict[str, dict[str, Any]] = {
    "text": {"messages": _turns("Hello <b>& é\n x")},
    "system": {"messages": _turns("Be brief.", "a", "b", "c", first="system")},
    "reasoning": {"messages": _turns("a", "<think>\nhm\n</think>\n\nb", "c")},
    "parts": {"messages": _turns([{"type": "text", "text": "one"}])},
    "tools": {"messages": _turns("a"), "tools": TOOLS, "tool_choice": "auto"},
    "functions": {"messages": _turns("a"), "functions": [TOOLS[0]["function"]]},
    "calls": {"messages": _call(json.dumps({"city": "Tokyo"})), "tools": TOOLS},
    "objects": {"messages": _call({"city": "Tokyo", "n": 1.5, "b": True}), "tools": TOOLS},
    "keyword": {"messages": _turns("a"), "enable_thinking": False},
}

ESCAPED = "meetkai-functionary-medium-v3.1"
"""Marks a text as safe, which makes Jinja write tools with HTML's entities; llama.cpp writes them as they are."""


REFUSING = ("fireworks-ai-llama-3-firefunction-v2", "CohereForAI-c4ai-command-r-plus-tool_use")
"""Jinja wants functions as a text there, or tools with more fields."""


def _names() -> list[str]:
    try:
        return sorted(p.stem for p in (source.pristine_tree() / source.LLAMA / "models/templates").glob("*.jinja"))
    except VendorError:
        return []


@pytest.mark.parametrize("name", _names())
def test_real_templates_are_written_as_jinja_writes_them(name: str) -> None:
    text, same = template_source(name), 0
    jinja = Jinja2ChatFormatter(text, eos_token="</s>", bos_token="<s>")
    for kind, chat in CHATS.items():
        if name == ESCAPED and "tools" in chat:
            continue
        parts = kind == "parts" and not takes_parts(text)
        try:
            expected = jinja(**({"messages": _turns("one")} if parts else chat)).prompt
        except (TypeError, ValueError, jinja2.TemplateError):
            continue
        common: dict[str, Any] = dict.fromkeys(("functions", "function_call", "tools", "tool_choice"))
        common |= {"bos_token": "<s>", "eos_token": "</s>", "add_generation_prompt": True}
        assert rendered(text, {**common, **chat}) == expected, kind
        same += 1
    assert same >= 2 or name in REFUSING


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("{{ raise_exception('roles must alternate') }}", "Jinja Exception: roles must alternate"),
        ("{{ raise_exception('\x1b[2J' + 'a' * 9999) }}", r"Jinja Exception: \\x1b\[2Ja{70,}\.\.\."),
        ("{{ 'x' | center(5) }}", "Unknown \\(built-in\\) filter 'center'"),
        ("{% for m in messages %}{{ m.content.nothing() }}{% endfor %}", ".*nothing"),
    ],
)
def test_why_a_template_refuses(text: str, why: str) -> None:
    """In a line that is fit for a terminal."""
    end = ".*: change them, or give another chat_format$"
    with pytest.raises(ConfigError, match=f"^the chat template refuses these messages: {why}{end}"):
        rendered(text, {"messages": CHAT})


@pytest.mark.parametrize(
    ("text", "jinja", "here"),
    [
        ("a{{ none }}b", "aNoneb", "ab"),
        ("{{ 'a' + none }}", TypeError, "a"),
        ("{{ '<' | safe + '<&' }}", "<&lt;&amp;", "<<&"),
        ("{{ 'x' | center(5) }}", "  x  ", ConfigError),
        ("{{ 'x'.ljust(3) }}", "x  ", ConfigError),
        ("{{ 2 ** 3 }}", "8", ConfigError),
        ("{{ '%3d' | format(1) }}", "  1", "%3d"),
    ],
)
def test_where_a_text_differs_from_jinjas(text: str, jinja: Any, here: Any) -> None:
    """The table of docs/clients.md."""
    formatter = Jinja2ChatFormatter(text, eos_token="", bos_token="")
    for write, expected in (
        (lambda: formatter(messages=CHAT).prompt, jinja),
        (lambda: rendered(text, {"messages": CHAT}), here),
    ):
        with nullcontext() if isinstance(expected, str) else pytest.raises(expected):
            assert write() == expected


@pytest.mark.parametrize("block", ["{% if true %}y{% endif %}", "{# c #}y", "{%- if true %}y{% endif %}"])
@pytest.mark.parametrize("before", ["x", "x ", "\n", "\n ", " ", "", "xx", " x", "\u00e9"])
def test_what_stands_before_the_first_block(before: str, block: str) -> None:
    """llama.cpp left out a character in front of a block, and the spaces behind it."""
    text = before + block
    jinja = Jinja2ChatFormatter(text, eos_token="", bos_token="")
    assert rendered(text, {"messages": CHAT}) == jinja(messages=CHAT).prompt


def test_parts_that_a_template_cannot_write() -> None:
    """Jinja raised, or wrote Python's form of the list; llama.cpp's engine writes nothing."""
    text = "{% for m in messages %}{{ '<' + m.content + '>' }}{% endfor %}"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    assert rendered(text, {"messages": _turns(parts)}) == "<one\ntwo>"
    with pytest.raises(ConfigError, match=r"messages\[0\]\['content'\]\[1\]=.*image_url.*: give it parts"):
        rendered(text, {"messages": _turns([parts[0], {"type": "image_url", "image_url": "x"}])})


@pytest.mark.parametrize("value", [{1, 2}, b"x", float("nan"), object()])
def test_a_value_that_no_template_gets(value: Any) -> None:
    with pytest.raises(ConfigError, match="give texts, numbers, lists and dicts alone"):
        rendered("a", {"messages": CHAT, "more": value})
