"""`kvflash-run check`: how long a text the time allows, and what is said of what was found."""

from __future__ import annotations

import platform
import socket
import sys
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from kvflash_ggml.calibration import documents
from kvflash_ggml.cli import checking, main
from kvflash_ggml.cli.check import Comparison, Finding, lines, markdown
from kvflash_ggml.cli.checking import QUESTIONS, Arm, CacheSpeed, MachinePace, compose, is_right, lengths
from kvflash_ggml.errors import ConfigError

SPEEDS = [
    CacheSpeed(depth=depth, read=500.0, decode=rate) for depth, rate in ((2048, 20.0), (4096, 15.0), (8192, 10.0))
]
FULL = Arm(pool=None, speeds=SPEEDS, right=[True] * 20 + [False] * 4, memory=400 << 20)
POOLED = Arm(
    pool=1024, speeds=[replace(one, decode=21.0) for one in SPEEDS], right=[True] * 19 + [False] * 4 + [True],
    memory=100 << 20, pages=80 << 20,
)  # fmt: skip
FOUND = Finding(
    model="qwen3 Some Model", length=8192, full=FULL, pooled=POOLED, driver=True, apart=0.0, alike=3, seconds=99.0
)


@pytest.fixture(autouse=True)
def vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    """The vocabulary of a model is the model itself here, and no token ends a text."""
    known = SimpleNamespace(
        of=lambda model: model, is_end=lambda vocab, token: False,
        name=lambda vocab, token: "" if token == -1 else vocab.known[token],
    )  # fmt: skip
    monkeypatch.setattr(checking, "vocabulary", known)


def test_one_sentence_says_what_came_of_it() -> None:
    assert FOUND.sentence() == (
        "This pool of 1,024 tokens answers as the full cache on 22 of 24 questions (20 right, 20 by the full cache); "
        "at 8,192 tokens it decodes 2.1 times as fast."
    )
    assert FOUND.remarks() == []


def test_a_model_that_does_not_know_and_a_short_time_are_told() -> None:
    few = replace(FULL, right=[True, False, False])
    found = replace(FOUND, full=few, pooled=replace(POOLED, right=[True, True, False]))
    assert "on 2 of 3 questions" in found.sentence()
    unknown, time = found.remarks()
    assert unknown.startswith("The full cache itself answers 1 of 3:")
    assert unknown.endswith("A larger model says more.")
    assert time == f"The time was enough for 3 of {QUESTIONS} questions: give more --minutes."


def test_the_table_has_both_caches() -> None:
    rows = {what: (full, pool) for what, full, pool in FOUND.rows()}
    assert rows["answer at 8,192 tokens (tok/s)"] == ("10.0", "21.0")
    assert rows["device memory"] == ("400.0 MiB", "100.0 MiB")
    assert rows["right of 24 questions"] == ("20", "20")
    assert rows["logits after exact reading"] == ("-", "the same bits")
    apart = replace(FOUND, full=replace(FULL, logits=[0, 0, 0]), apart=0.0123, alike=2, driver=False)
    other = {what: pool for what, _, pool in apart.rows()}
    assert other["logits after exact reading"] == "0.012 apart at most; same next token 2 of 3 times"
    (why,) = apart.remarks()
    assert "shorter steps than the full cache" in why
    assert other["memory of the process"] == "100.0 MiB"
    assert lines(FOUND)[-1] == FOUND.sentence()


def test_a_report_names_no_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvflash_ggml.placement.memory.devices", lambda: ())
    machine = Comparison("/home/somebody/model.gguf", {}, seconds=1, quiet=True)._machine()
    text = markdown(FOUND, machine)
    assert text.startswith("### kvflash-run check\n\nThis pool of 1,024 tokens")
    assert "| answer at 8,192 tokens (tok/s) | 10.0 | 21.0 |" in text
    assert "- qwen3 Some Model\n" in text
    assert platform.machine() in text
    assert "somebody" not in text
    assert "model.gguf" not in text
    assert socket.gethostname() not in text


def test_the_document_has_every_figure() -> None:
    data = FOUND.document()
    assert (data["same"], data["faster"], data["length"]) == (22, 2.1, 8192)
    assert data["pool"]["speeds"][0] == {"depth": 2048, "read": 500.0, "decode": 21.0}
    assert "logits" not in data["full"]


# --- the length


def pace(*, token: float, seen: float = 0.0) -> MachinePace:
    made = MachinePace(step=0.01)
    for n in (512, 1024, 1536):
        made.reading.add(n, token * n + seen * n**2)
    return made


@pytest.mark.parametrize(
    ("token", "seen", "most", "best"),
    [
        (0.0001, 0.0, 200_000, 65536),
        (0.0001, 0.0, 32768 + checking.ROOM, 32768),
        (0.001, 5e-7, 200_000, 8192),
        (1.0, 0.0, 200_000, 1024),
    ],
)
def test_the_text_is_as_long_as_time_and_model_allow(token: float, seen: float, most: int, best: int) -> None:
    made = pace(token=token, seen=seen)
    tries = lengths(made, 300, most=most, calibrates=True)
    assert tries[0] == best
    assert tries == sorted(tries, reverse=True)
    if best > 1024:
        assert made.seconds(best, calibrates=True) <= 300
        assert made.seconds(best, calibrates=False) < made.seconds(best, calibrates=True)


def test_a_model_for_short_texts_is_refused() -> None:
    with pytest.raises(ConfigError, match="was trained for 512 tokens, and a check takes 1280: use another model"):
        lengths(pace(token=0.001), 300, most=512, calibrates=True)


# --- the text


class Words:
    """A model with a token a word."""

    def __init__(self, template: str | None) -> None:
        self.metadata = {} if template is None else {"tokenizer.chat_template": template}
        self.known: list[str] = ["<s>"]
        self.model = self

    def tokenize(self, text: bytes, *, add_bos: bool, special: bool) -> list[int]:
        words = text.decode().split()
        self.known += [word for word in dict.fromkeys(words) if word not in self.known]
        return [0] * add_bos + [self.known.index(word) for word in words]

    def token_bos(self) -> int:
        return 0

    def token_eos(self) -> int:
        return -1

    def said(self, tokens: Any) -> str:
        return " ".join(self.known[token] for token in tokens)


def test_a_text_has_its_facts_and_two_questions_for_each() -> None:
    llm = Words(None)
    text = compose(llm, 2048)
    assert len(text.tokens) == pytest.approx(2048, rel=0.1)
    assert text.tokens[0] == 0
    assert len(text.asks) == QUESTIONS == 2 * len(documents.FORMS)
    said = llm.said(text.tokens)
    assert all(value in said for _, value in text.asks)
    for asked, _ in text.asks:
        assert llm.said(asked).startswith("Question: ")
        assert llm.said(asked).endswith("Answer:")
    assert text == compose(llm, 2048)


def test_a_chat_template_stands_around_text_and_question(monkeypatch: pytest.MonkeyPatch) -> None:
    rendered = f"<s> user {checking._MARK} assistant"
    template = SimpleNamespace(render=lambda request: SimpleNamespace(prompt=rendered))
    renders = SimpleNamespace(ChatTemplate=lambda source, bos, eos: template)
    monkeypatch.setitem(sys.modules, "kvflash_ggml.chat.templates", renders)  # llama.cpp's engine renders
    llm = Words("a template")
    text = compose(llm, 1024)
    assert llm.said(text.tokens[:2]) == "<s> user"
    assert text.tokens.count(0) == 1, "the template writes the token that begins a text"
    assert all(llm.said(asked).endswith("? assistant") for asked, _ in text.asks)


@pytest.mark.parametrize(
    ("reply", "right"),
    [("It is Pink.", True), ("pink", True), ("a pinkish door", False), ("", False), ("black, not pink", True)],
)
def test_a_reply_is_right_with_the_value_as_a_word(reply: str, right: bool) -> None:
    assert is_right(reply, "pink") is right


def test_questions_are_asked_while_there_is_time() -> None:
    class Model:
        kvflash = None
        model = None

        def generate(self, tokens: list[int], temp: float) -> Any:
            yield from range(1000)

        def newest_logits(self) -> Any:
            return np.zeros(3)

        def detokenize(self, ids: list[int]) -> bytes:
            return b"black"

    text = checking.FactText(tokens=list(range(1040)), asks=[([1], "black"), ([2], "pink"), ([3], "black")])
    arm = checking.measure(Model(), text, 1024, more=lambda done: done < 2, taken=lambda: 7)
    assert [speed.depth for speed in arm.speeds] == [256, 512, 1040]
    assert arm.right == [True, False]
    assert (arm.pool, arm.memory, arm.pages) == (None, 7, 0)
    assert len(arm.logits) == 3


def test_the_verb_is_there() -> None:
    text = CliRunner().invoke(main, ["check", "--help"]).stdout
    for word in ("--minutes", "--report", "--kvflash", "24 questions"):
        assert word in text
