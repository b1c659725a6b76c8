"""Templates of strangers: what they may cost, how deep they may be, and what is told of one that cannot be read."""

from __future__ import annotations

import gc
import json
import re
import resource
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from support.families import template as upstreams

from kvflash_ggml.chat.templates import MOST_OPEN, ChatTemplate
from kvflash_ggml.chat.values import ChatInput
from kvflash_ggml.errors import ConfigError
from kvflash_ggml.native import chat as native

HELLO = ChatInput(messages=[{"role": "user", "content": "hi"}])


def test_a_template_by_its_name() -> None:
    prompt = ChatTemplate("chatml").render(HELLO).prompt
    assert prompt == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


TOOL = {
    "type": "function",
    "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {"type": "string"}}}},
}

CALLING = """\
{%- for message in messages %}{{ '<|' + message.role + '|>' + (message.content or '') }}
{%- for call in message.tool_calls or [] %}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>\\n' }}
{%- endfor %}{{- '<|end|>' }}{%- endfor %}
{%- if tools %}{{ '<|tools|>' + (tools | tojson) }}{% endif %}
{%- if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""

NAMESPACE = "{% set ns = namespace(a=[], s='aaaa') %}"

LONG = "{% set s = '" + "a" * 1000 + "' * 1000 %}" + NAMESPACE + "{% set ns.a = [s] %}"
TWICE = "{{% set ns = namespace(a=[s]) %}}{{% for i in range({1}) %}}{{% set ns.a = {0} %}}{{% endfor %}}"

COSTLY = {
    "range": "{% for i in range(300000000) %}{% endfor %}",
    "loops": "{% for i in range(30000) %}{% for j in range(30000) %}x{% endfor %}{% endfor %}",
    "texts": NAMESPACE + "{% for i in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "blocks": "{% set s='aaaa' %}" + "{% set s %}{{s}}{{s}}{% endset %}" * 60,
    "repetition": "{{ 'aaaa' * 3000000000 }}",
    "lists": NAMESPACE + "{% set ns.a = [1] %}{% for i in range(60) %}{% set ns.a = ns.a + ns.a %}{% endfor %}",
    "replace": NAMESPACE + "{% for i in range(60) %}{% set ns.s = ns.s.replace('a', ns.s) %}{% endfor %}",
    "join": "{% set s = 'a' * 1000000 %}{{ range(100000) | join(s) }}",
    "indent": "{{ 'a\\nb' | indent(4000000000) }}",
    "recursion": "{% macro f(x) %}{% for i in [1] %}{% if 1 %}{{ f(x) | upper }}{% endif %}{% endfor %}{% endmacro %}"
    "{{ f(1) }}",
    "callers": "{% macro f(x) %}{% call f(1) %}a{% endcall %}{% endmacro %}{{ f(1) }}",
    "operators": "{{ " + "1 + " * 1900 + "1 }}",
    "one text": LONG + "{% for i in range(30000) %}{{ s }}{% endfor %}",
    "written texts": LONG + "{{ s }}" * 30000,
    "joined": LONG + TWICE.format("ns.a + ns.a", 15) + "{{ ns.a | join }}",
    "as JSON": TWICE.format("[ns.a, ns.a]", 60) + "{{ ns.a | tojson }}",
    "as text": TWICE.format("[ns.a, ns.a]", 60) + "{{ ns.a ~ '' }}",
    "written": TWICE.format("[ns.a, ns.a]", 60) + "{{ ns.a }}",
    "wide JSON": "{{ messages | tojson(indent=1000000000) }}",
    "variables": "".join(f"{{% set a{i} = 1 %}}" for i in range(20000)) + "{% for i in range(300000) %}{% endfor %}",
    "split": "{% set s = 'a,' * 4000 %}{% set s = s * 1000 %}{{ s.split(',') | length }}",
}


@pytest.mark.parametrize("name", COSTLY)
def test_what_would_cost_too_much(name: str) -> None:
    with pytest.raises(ConfigError, match="takes more than 8000000 steps"):
        ChatTemplate(COSTLY[name]).render(HELLO)


DEEP = {
    "brackets": "{{ " + "(" * 20000 + "1" + ")" * 20000 + " }}",
    "operators": "{{ " + "1 + " * 100000 + "1 }}",
    "negations": "{{ " + "not " * 100000 + "1 }}",
    "signs": "{{ " + "-" * 100000 + "1 }}",
    "conditions": "{{ " + "1 if 0 else " * 20000 + "1 }}",
    "statements": "{% if 1 %}" * 50000,
    "branches": "{% if 0 %}" + "{% elif 0 %}" * 50000 + "{% endif %}",
    "calls": "{{ f" + "()" * 100000 + " }}",
    "members": "{{ f" + ".a" * 100000 + " }}",
    "size": "x" * (1 << 21),
    "lists": NAMESPACE + "{% for i in range(100000) %}{% set ns.a = [ns.a] %}{% endfor %}",
    "objects": NAMESPACE + "{% for i in range(100000) %}{% set ns.a = {'a': ns.a} %}{% endfor %}",
    "itself": NAMESPACE + "{% set ns.a = ns %}{{ ns | string }}",
    "each other": NAMESPACE + "{% set b = namespace(a=ns) %}{% set ns.a = b %}{{ ns | tojson }}",
    "appended": "{% set ns = namespace(a=[]) %}{% set a = ns.a %}{% for i in range(100000) %}{% set b = [] %}"
    "{{ ns.a.append(b) and '' }}{% set ns.a = b %}{% endfor %}{{ a | tojson }}",
    "its own item": "{% set a = [1] %}{{ a.append([a]) }}{{ a | tojson }}",
}


@pytest.mark.parametrize("name", DEEP)
def test_what_is_nested_too_deep(name: str) -> None:
    """The main thread has the usual stack; so has the front's."""
    with pytest.raises(ConfigError):
        ChatTemplate(DEEP[name]).render(HELLO)


def test_a_long_template_and_a_long_chat_are_rendered() -> None:
    """The bounds are far above what templates of models take."""
    source = "{% if messages %}" * 50 + CALLING + "{% endif %}" * 50 + "{# x #}" * 50000
    messages = [{"role": role, "content": "x" * 500} for role in ("user", "assistant")] * 5000
    assert len(ChatTemplate(source).render(ChatInput(messages=messages, tools=[TOOL])).prompt) > 5_000_000


@pytest.mark.parametrize("source", ["{{ 'a", "{% for x in messages %}", "{% no %}", "{{ ( }}", ""])
def test_why_a_template_cannot_be_read(source: str, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError) as failed:
        ChatTemplate(source)
    assert "std::exception" not in str(failed.value)
    assert capfd.readouterr() == ("", ""), "what goes to the terminal is ours to say"


def test_nothing_is_printed_while_a_chat_is_rendered_and_read(capfd: pytest.CaptureFixture[str]) -> None:
    template = ChatTemplate(CALLING)
    reader = template.render(ChatInput(messages=HELLO.messages, tools=[TOOL])).reader()
    reader.push("<tool_call>\n{]", end=True)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("cut", range(1, 25))
def test_a_call_that_a_stop_string_cuts_off_is_content(cut: int) -> None:
    text = 'Yes.\n<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'
    mark = len("}\n</tool_call>")
    text = text[: len(text) - mark - cut]
    reader = ChatTemplate(CALLING).render(ChatInput(messages=HELLO.messages, tools=[TOOL])).reader()
    reader.push(text, end=True, stopped=True)
    assert (reader.said.content, reader.said.calls, reader.called) == (text, (), False)


ANY = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object", "properties": {"zone": {}}}}}

BRACKETS = ["[", '{"a":', "[{}, "]


def test_a_call_may_write_thousands_of_open_brackets() -> None:
    """A coloured log has one in each of its codes."""
    colours = "\x1b[31mred\x1b[0m " * 2000
    call = json.dumps({"name": "clock", "arguments": {"zone": colours}})
    reader = ChatTemplate(CALLING).render(ChatInput(messages=HELLO.messages, tools=[TOOL])).reader()
    reader.push(f"<tool_call>\n{call}\n</tool_call>", end=True)
    assert reader.called
    assert json.loads(reader.said.calls[0].arguments) == {"zone": colours}


@pytest.mark.parametrize("name", ["Qwen3-Coder", "google-gemma-4-31B-it", "LFM2-8B-A1B", None])
@pytest.mark.parametrize("levels", [4090, 4096, 100000])
@pytest.mark.parametrize("bracket", BRACKETS)
def test_deep_arguments_end_no_process(name: str | None, levels: int, bracket: str) -> None:
    """The thread has a stack that is too small to read them on."""
    begun = {
        "Qwen3-Coder": "<tool_call>\n<function=clock>\n<parameter=zone>\n",
        "google-gemma-4-31B-it": "<|tool_call>call:clock{zone:",
        "LFM2-8B-A1B": "<|tool_call_start|>[clock(zone=",
    }.get(str(name), '<tool_call>\n{"name": "clock", "arguments": {"zone": ')
    text = begun + bracket * levels + '"here'
    chat = ChatInput(messages=HELLO.messages, tools=[ANY])
    said = []

    def work() -> None:
        reader = (upstreams(name) if name else ChatTemplate(CALLING)).render(chat).reader()
        reader.push(text, end=True)
        said.append(reader.said)

    before = threading.stack_size(1 << 20)
    try:
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    finally:
        threading.stack_size(before)
    assert "here" in said[0].content + "".join(call.arguments for call in said[0].calls)


def test_a_deep_answer_that_a_client_has_begun_ends_no_process() -> None:
    begun = '<tool_call>\n{"name": "clock", "arguments": {"zone": ' + "[" * 100000
    chat = [*HELLO.messages, {"role": "assistant", "content": begun}]
    reader = ChatTemplate(CALLING).render(ChatInput(messages=chat, tools=[ANY], continued=True)).reader()
    reader.push("[1]", end=True)
    assert (reader.said.content, reader.said.calls) == ("[1]", ())


@pytest.mark.parametrize("choice", ["required", "auto"])
def test_a_deep_answer_that_must_go_on_as_a_call_takes_no_minutes(choice: Any) -> None:
    """The grammar would read it before the first token is drawn."""
    template, begun = ChatTemplate(CALLING), '<tool_call>\n{"name": "clock", "arguments": {"zone": '
    few, many = (
        ChatInput(
            messages=[*HELLO.messages, {"role": "assistant", "content": begun + "[" * count}],
            tools=[ANY],
            choice=choice,
            continued=True,
        )
        for count in (MOST_OPEN - 2, MOST_OPEN - 1)
    )
    assert template.render(few).grammar is not None
    if choice == "auto":
        assert template.render(many).grammar is not None
        return
    with pytest.raises(ConfigError, match="more than 128 brackets open"):
        template.render(many)


def test_several_threads_render_and_read_at_once() -> None:
    template = ChatTemplate(CALLING)
    text = '<tool_call>\n{"name": "clock", "arguments": {"zone": "Z%d"}}\n</tool_call>'
    gate = threading.Barrier(4)

    def work(seed: int) -> list[tuple[str, str]]:
        gate.wait()
        out = []
        for i in range(8):
            number = 100 * seed + i
            chat = ChatInput(messages=[{"role": "user", "content": f"say {number}"}], tools=[TOOL])
            rendered = template.render(chat)
            reader = rendered.reader()
            reader.push(text % number, end=True)
            out.append((rendered.prompt, reader.said.calls[0].arguments))
        return out

    with ThreadPoolExecutor(4) as pool:
        for seed, found in enumerate(pool.map(work, range(4))):
            for i, (prompt, arguments) in enumerate(found):
                assert f"say {100 * seed + i}<" in prompt
                assert arguments == f'{{"zone": "Z{100 * seed + i}"}}'


@pytest.mark.skipif(sys.platform != "linux", reason="ru_maxrss is in kilobytes on Linux")
def test_opening_and_closing_keeps_no_memory() -> None:
    def work(count: int) -> int:
        for _ in range(count):
            rendered = ChatTemplate(CALLING).render(ChatInput(messages=HELLO.messages, tools=[TOOL]))
            rendered.reader().push("<tool_call>", end=True)
        gc.collect()
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = work(20)
    assert work(100) - before < 4096, "kilobytes"


SAID = [
    {"role": "user", "content": "go"},
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "clock", "arguments": '{"zone": "CET"}'}}],
    },
    {"role": "tool", "tool_call_id": "a", "content": "noon"},
    {"role": "user", "content": "so?"},
]


@pytest.mark.parametrize(
    "name", ["microsoft-Phi-3.5-mini-instruct", "google-gemma-2-2b-it", "ibm-granite-granite-3.3-2B-Instruct"]
)
def test_a_template_without_calls_tells_of_calls_and_results(name: str) -> None:
    rendered = upstreams(name).render(ChatInput(messages=SAID, tools=[TOOL]))
    assert '{"name": "clock", "arguments": {"zone": "CET"}}' in rendered.prompt
    assert "<tool_response>\nnoon\n</tool_response>\n\nso?" in rendered.prompt
    assert rendered.grammar is not None


@pytest.mark.parametrize("tools", [[TOOL], []])
def test_a_template_that_only_tells_of_tools_is_told_of_calls(tools: list[dict[str, Any]]) -> None:
    """Granite 3.3 knows no calls. A later request without tools still has them in its history."""
    rendered = upstreams("ibm-granite-granite-3.3-2B-Instruct").render(ChatInput(messages=SAID, tools=tools))
    assert '{"name": "clock", "arguments": {"zone": "CET"}}' in rendered.prompt
    assert (rendered.grammar is None) == (not tools)


def called(id: Any, zone: str) -> dict[str, Any]:
    return {"id": id, "function": {"name": "clock", "arguments": json.dumps({"zone": zone}, ensure_ascii=False)}}


@pytest.mark.parametrize("name", ["LFM2-8B-A1B", "LFM2.5-Instruct"])
@pytest.mark.parametrize("tools", [[TOOL], []])
def test_calls_that_a_template_leaves_out_are_written_as_its_model_does(name: str, tools: list[dict[str, Any]]) -> None:
    zones = ["CET", 'a "b" \\ c\n[]()', "é, ='"]
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [called(zone, zone) for zone in zones]}
    rendered = upstreams(name).render(ChatInput(messages=[SAID[0], turn, *SAID[2:]], tools=tools))
    begin = rendered.prompt.index("<|tool_call_start|>[clock(zone=")
    end = rendered.prompt.index("<|im_end|>", begin)
    assert rendered.prompt[:begin].endswith("Let me see.")
    assert rendered.prompt.index("noon") < rendered.prompt.index("so?")
    reader = upstreams(name).render(ChatInput(messages=HELLO.messages, tools=[TOOL])).reader()
    reader.push(rendered.prompt[begin:end], end=True)
    assert [json.loads(call.arguments) for call in reader.said.calls] == [{"zone": zone} for zone in zones]


ONE_A_TURN = [
    "meta-llama-Llama-3.1-8B-Instruct",
    "meta-llama-Llama-3.2-3B-Instruct",
    "meta-llama-Llama-3.3-70B-Instruct",
    "openai-gpt-oss-120b",
    "GigaChat3-10B-A1.8B",
    "GigaChat3.1-10B-A1.8B",
]


@pytest.mark.parametrize("name", ONE_A_TURN)
@pytest.mark.parametrize(
    ("ids", "answered"),
    [("ab", "ab"), ("ab", "ba"), (["", ""], ["", ""]), (["", ""], "ab"), ("ab", [None, None]), ([[], {}], ["[]", "x"])],
    ids=["by id", "in another order", "no ids", "unknown ids", "no names", "hostile"],
)
def test_several_calls_in_a_turn_become_several_turns(name: str, ids: Any, answered: Any) -> None:
    """Llama's templates refuse such a turn, the others leave out all calls but one."""
    results = {"a": "noon", "b": "dusk"}
    turn = {"role": "assistant", "content": "", "tool_calls": [called(ids[0], "CET"), called(ids[1], "PST")]}
    told = [
        {"role": "tool", "tool_call_id": id, "content": results.get(str(id), list(results.values())[i])}
        for i, id in enumerate(answered)
    ]
    prompt = upstreams(name).render(ChatInput(messages=[SAID[0], turn, *told, SAID[3]], tools=[TOOL])).prompt
    places = [prompt.index(text) for text in ("CET", "noon", "PST", "dusk", "so?")]
    assert places == sorted(places)


def test_a_template_that_tells_calls_or_text_tells_both() -> None:
    turn = {"role": "assistant", "content": "Let me see.", "tool_calls": [called("a", "CET"), called("b", "PST")]}
    told = [{"role": "tool", "tool_call_id": id, "content": text} for id, text in (("a", "noon"), ("b", "dusk"))]
    prompt = upstreams("llama-cpp-deepseek-r1").render(ChatInput(messages=[SAID[0], turn, *told, SAID[3]])).prompt
    places = [prompt.index(text) for text in ("go", "Let me see.", "CET", "PST", "noon", "dusk", "so?")]
    assert places == sorted(places)


def test_more_results_than_calls_are_told() -> None:
    turn = {"role": "assistant", "content": "", "tool_calls": [called("a", "CET"), called("b", "PST")]}
    told = [{"role": "tool", "tool_call_id": "a", "content": text} for text in ("noon", "dusk", "dawn")]
    prompt = upstreams(ONE_A_TURN[0]).render(ChatInput(messages=[SAID[0], turn, *told, SAID[3]])).prompt
    assert all(text in prompt for text in ("CET", "PST", "noon", "dusk", "dawn", "so?"))


@pytest.mark.parametrize(
    "name",
    [
        "Qwen3-Coder",
        "Qwen3.5-4B",
        "LFM2-8B-A1B",
        "MiniMax-M3",
        "Kimi-K2-Instruct",
        "unsloth-mistral-Devstral-Small-2507",
    ],
)
def test_nothing_comes_before_a_call_that_must_be_made(name: str) -> None:
    """A model would else write prose until its limit."""
    asked = ChatInput(messages=HELLO.messages, tools=[TOOL], choice="required")
    grammar = upstreams(name).render(asked).grammar
    assert grammar is not None
    (root,) = (line for line in grammar.text.split("\n") if line.startswith("root ::= "))
    outside = root
    while (inner := re.sub(r"\([^()]*\)", "", outside)) != outside:  # reasoning is in brackets
        outside = inner
    assert "tool-call" in outside
    assert "until-" not in outside


@pytest.mark.parametrize("name", ["mistralai-Mistral-Nemo-Instruct-2407", "Mistral-Small-3.2-24B-Instruct-2506"])
def test_a_template_that_wants_an_answer_behind_each_result(name: str) -> None:
    """Claude Code writes a reminder behind the result of a tool."""
    call = {"id": "abcdefghi", "function": {"name": "clock", "arguments": "{}"}}
    messages = [SAID[0], {**SAID[1], "tool_calls": [call]}, {**SAID[2], "tool_call_id": "abcdefghi"}, SAID[3]]
    template = upstreams(name)
    prompt = template.render(ChatInput(messages=messages, tools=[TOOL])).prompt
    assert prompt.index("noon") < prompt.index("so?")
    with pytest.raises(ConfigError, match="refuses"):
        template.render(ChatInput(messages=[SAID[0], SAID[3]]))


def test_a_rendering_is_kept_for_its_salt_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    stock = native.render
    monkeypatch.setattr(native, "render", lambda *args: (made.append(""), stock(*args))[1])
    for template in (ChatTemplate("chatml"), ChatTemplate(CALLING)):
        made.clear()
        for count, salt in ((1, ""), (1, ""), (2, "a"), (2, "a"), (3, "b")):
            template.render(replace(HELLO, salt=salt))
            assert len(made) == count


@pytest.mark.parametrize("source", ["chatml", CALLING], ids=["in words", "calling"])
@pytest.mark.parametrize("choice", ["auto", "required"])
def test_fields_of_a_tool_that_are_null_are_not_set(source: str, choice: Any) -> None:
    """Some clients write null for what they leave out. A template that went through it was blamed."""
    bare: dict[str, Any] = {"type": "object", "properties": {"zone": {"type": "string"}, "at": {"const": None}}}
    zone = {"type": "string", "enum": None, "description": None, "properties": None}
    nulls = {**bare, "properties": {"zone": zone, "at": {"const": None}}, "required": None, "$defs": None}
    template = ChatTemplate(source)

    def rendered(parameters: Any) -> Any:
        tool = {"type": "function", "function": {"name": "clock", "description": "", "parameters": parameters}}
        return template.render(ChatInput(messages=HELLO.messages, tools=[tool], choice=choice))

    for parameters, same in ((nulls, bare), ({"type": "object", "properties": None}, {"type": "object"})):
        one, other = rendered(parameters), rendered(same)
        assert (one.prompt, one.grammar) == (other.prompt, other.grammar)
