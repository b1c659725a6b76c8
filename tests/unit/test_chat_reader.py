"""An answer is read as it is written, and nothing of it is lost, whatever its parser makes of it."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import count

import pytest
from support.fake_model import marked_calls

from kvflash_ggml.chat.reader import PAUSE_S, AnswerReader, Parsed, ParsedCall, words
from kvflash_ggml.chat.values import Call
from kvflash_ggml.chat.words import plain_call

MARKS = words("tool_call name arguments")
CALL = '<tool_call>\n{"name": "clock", "arguments": {"zone": "CET"}}\n</tool_call>'


def always() -> Callable[[], float]:
    """A clock that has moved on at each push."""
    return (float(n // 2) for n in count()).__next__


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def calls(reader: AnswerReader) -> list[tuple[str, str]]:
    return [(call.name, call.arguments) for call in reader.said.calls]


def test_without_a_parser_all_is_content() -> None:
    reader = AnswerReader()
    assert [delta.content for delta in reader.push(CALL)] == [CALL]
    assert reader.push("", end=True) == []
    assert (reader.said.content, reader.said.calls, reader.odd) == (CALL, (), False)


def test_an_answer_is_not_parsed_at_each_token() -> None:
    texts: list[str] = []
    clock = Clock()

    def parse(text: str) -> Parsed:
        texts.append(text)
        clock.now += 0.02  # a reading takes its time
        return Parsed(content=text, read=len(text), plain=len(text), first=len(text))

    reader = AnswerReader(parse, clock=clock)
    texts.clear()
    for _ in range(100):
        reader.push("x")
        clock.now += PAUSE_S / 5
    assert 4 <= len(texts) <= 6, "ten times as long as a reading takes"
    reader.push("", end=True)
    assert (texts[-1], reader.said.content) == ("x" * 100, "x" * 100)


@pytest.mark.parametrize(
    ("text", "content", "number", "odd"),
    [
        (f"Yes.{CALL}", "Yes.", 1, False),
        (f"{CALL}\n{CALL}", "", 2, False),
        (f"Yes.{CALL}<tool_call>no", "Yes.<tool_call>no", 1, True),
        ("<tool_call>[1]</tool_call>", "<tool_call>[1]</tool_call>", 0, True),
        (f"{CALL} and more", " and more", 1, True),
        (CALL.replace('{"zone": "CET"}', "[1]"), CALL.replace('{"zone": "CET"}', "[1]"), 0, True),
        (CALL.replace("CET", "\\ud83d"), CALL.replace("CET", "\\ud83d"), 0, True),
        (CALL.replace('{"zone', '{"deep": ' + "[" * 5000 + '"zone'), None, 0, True),
    ],
)
def test_what_is_not_understood_is_content(text: str, content: str | None, number: int, odd: bool) -> None:
    for size in (len(text), 1, 7):
        reader = AnswerReader(marked_calls, marks=MARKS, clock=always())
        deltas = [delta for i in range(0, len(text), size) for delta in reader.push(text[i : i + size])]
        deltas += reader.push("", end=True)
        assert reader.said.content == (text if content is None else content)
        assert (len(reader.said.calls), reader.odd) == (number, odd)
        assert "".join(delta.content for delta in deltas) == reader.said.content


def test_a_call_that_loses_words_is_content() -> None:
    """A parser may drop what it has no place for."""

    def parse(text: str) -> Parsed:
        made = (ParsedCall(name="clock", arguments="{}"),)
        return Parsed(content="Yes.", calls=made, read=len(text), first=4) if text else Parsed()

    reader = AnswerReader(parse, marks=MARKS)
    reader.push('Yes.<tool_call>{"name": "clock", "arguments": {}, "reason": "asked"}</tool_call>', end=True)
    assert reader.said.content.startswith("Yes.<tool_call>")
    assert reader.said.calls == ()
    assert reader.odd


def test_text_goes_on_when_a_parser_has_given_up() -> None:
    """A client does not wait for the end of a long answer that nobody can read."""
    reader = AnswerReader(lambda text: marked_calls(text) if len(text) < 10 else None, marks=MARKS, clock=always())
    told = [[delta.content for delta in reader.push("word ")] for _ in range(8)]
    assert "".join(text for texts in told for text in texts) == "word " * 8
    assert told[-1] == ["word "]
    assert reader.odd


def test_arguments_are_told_while_they_grow() -> None:
    parts = ['{"a"', '{"a": "b"}', '{"a": "b", "c": 1}']  # braces and quotes may be the parser's

    def parse(text: str) -> Parsed:
        part = parts[min(len(text), 3) - 1] if text else ""
        made = (ParsedCall(name="f", arguments=part, closed=len(text) > 2),) if text else ()
        return Parsed(calls=made, read=len(text))

    reader = AnswerReader(parse, marks=words("xyz x y z xy"), clock=always())
    told = [[delta.arguments for delta in reader.push(char)] for char in "xyz"]
    assert told == [['{"a'], ['": "b'], ['", "c": 1}']]
    assert calls(reader) == [("f", parts[-1])]
    assert isinstance(reader.said.calls[0], Call)
    assert len(reader.said.calls[0].id) == 9


@pytest.mark.parametrize("written", ['{"x": 1e999}', '{"x": NaN}', '{"x": -Infinity}', f'{{"x": {"9" * 400}}}'])
def test_arguments_that_llama_cpp_would_refuse_are_sent_as_text(written: str) -> None:
    """A model may have written them, and its conversation goes on."""
    made = plain_call({"id": "a", "function": {"name": "f", "arguments": written}})
    assert json.loads(made["function"]["arguments"]) == {"arguments": written}


def half_call(text: str) -> Parsed:
    """A parser that tells a call from its name on, as those of llama.cpp do."""
    begin, mark, body = text.partition("<call>")
    size = len(begin)
    if not mark:
        return Parsed(content=begin, read=size, plain=size, first=size)
    call = ParsedCall(name="clock", arguments=body.removesuffix("</call>"), closed=body.endswith("</call>"))
    return Parsed(content=begin, calls=(call,), read=len(text), plain=size, first=size)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_call_that_is_cut_off(stopped: bool) -> None:
    """At a limit it is a call, as clients expect; at a stop string it would be executed."""
    text = 'Yes.<call>{"zone": "CE'
    reader = AnswerReader(half_call, marks=words("call"), clock=always())
    reader.push(text, end=True, stopped=stopped)
    assert (reader.said.content, len(reader.said.calls)) == ((text, 0) if stopped else ("Yes.", 1))
    assert reader.called is not stopped


def test_a_call_that_is_cut_off_behind_what_was_told() -> None:
    """What has been told stays a call, and the answer does not end by it."""
    reader = AnswerReader(half_call, marks=words("call"), clock=always())
    for piece in ("Yes.", '<call>{"zone', '": "CE'):
        reader.push(piece)
    reader.push("", end=True, stopped=True)
    assert calls(reader) == [("clock", '{"zone": "CE')]
    assert not reader.called


def test_a_whole_call_without_its_last_mark_is_a_call() -> None:
    """Some programs have that mark as a stop string."""
    reader = AnswerReader(half_call, marks=words("call"), clock=always())
    reader.push('<call>{"zone": "CET"}', end=True, stopped=True)
    assert (calls(reader), reader.called) == ([("clock", '{"zone": "CET"}')], True)


def test_half_of_a_surrogate_pair_in_an_earlier_call() -> None:
    call = plain_call({"function": {"name": "f", "arguments": '{"a": "\\ud83d", "b": "\\ud83d\\ude00"}'}})
    assert json.loads(call["function"]["arguments"].encode()) == {"a": "\ufffd", "b": "\U0001f600"}
