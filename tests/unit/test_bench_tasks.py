"""Kinds of recall tasks: what is asked stands in the document, where the task says."""

from __future__ import annotations

import random
import re
from itertools import pairwise
from pathlib import Path

import pytest
from train_recall import templates

from kvflash_bench.asks import Ask, Setting
from kvflash_bench.filler import read_text
from kvflash_bench.tasks_kinds import FREE, KINDS, make
from kvflash_ggml.errors import ConfigError

TEXT = (Path(__file__).parents[1] / "text" / "stdlib-docs.txt").read_text(encoding="utf-8")[:60_000]
PIECE = re.compile(r"[A-Za-z]{1,5}|\d| ?[^\sA-Za-z\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s")


def pieces(text: str) -> list[str]:
    return PIECE.findall(text)


SETTING = Setting(TEXT, pieces, 2000, (0.1, 0.5, 0.9))


@pytest.mark.parametrize("kind", sorted({*KINDS} - FREE))
def test_the_answer_stands_where_the_task_says(kind):
    for case in make(kind, SETTING, seed=3):
        for ask in case.asks:
            for lo, hi in ask.gold:
                inside = "".join(pieces(case.document)[lo:hi])
                assert ask.answer in inside or kind == "vartrack"
            assert bool(ask.gold) == (kind != "words")
            assert ask.is_correct(f" {ask.answer}.")
            assert not ask.is_correct(f" {ask.answer}0.")
            assert ask.answer not in ask.tail


@pytest.mark.parametrize("kind", KINDS)
def test_lengths(kind):
    for case in make(kind, SETTING, seed=1):
        assert len(pieces(case.document)) == pytest.approx(2000, abs=100)


@pytest.mark.parametrize("kind", sorted({*KINDS} - {"words", "vartrack"} - FREE))
def test_a_trial_asks_once_at_every_depth(kind):
    asks = [ask for case in make(kind, SETTING, seed=5) for ask in case.asks]
    assert sorted(ask.label for ask in asks) == ["10%", "50%", "90%"]
    assert len({ask.answer for ask in asks}) == 3
    for ask in asks:
        assert ask.gold[0][0] == pytest.approx(int(ask.label[:-1]) / 100 * 2000, abs=160)


@pytest.mark.parametrize("kind", KINDS)
def test_the_seed_decides(kind):
    assert make(kind, SETTING, seed=1) == make(kind, SETTING, seed=1)
    assert make(kind, SETTING, seed=1) != make(kind, SETTING, seed=2)


def test_a_chain_is_followed_to_its_number():
    (case,) = make("vartrack", SETTING, seed=2)
    names = [re.fullmatch(r"\nassert (\w+) ==", ask.tail).group(1) for ask in case.asks]
    lines = case.document.splitlines()
    assert f"{names[0]} = {case.asks[0].answer}" in lines
    for before, name in pairwise(names):
        assert f"{name} = {before}" in lines
    assert [len(ask.gold) for ask in case.asks] == [1, 2, 3]


def test_multikey_has_four_facts():
    (case,) = make("multikey4", SETTING, seed=2)
    asked = case.asks[0].tail.split(" for ")[0].split(" the ")[1]
    assert len(re.findall(rf"^The {asked} for \w+ \w+ is \d{{7}}\.$", case.document, re.M)) == 4


def test_chat_is_chatml():
    (case,) = make("chat", SETTING, seed=2)
    assert case.special
    assert case.document.startswith("<|im_start|>user\n")
    for ask in case.asks:
        assert re.fullmatch(r"What is the [\w ]+ for \w+ \w+\?<\|im_end\|>\n<\|im_start\|>assistant\n", ask.tail)


def test_reworded_is_in_no_template():
    (case,) = make("reworded", SETTING, seed=2)
    for template in templates.NEEDLES + templates.ASKS:
        parts = [re.escape(part) for part in re.split(r"{\w}", template)]
        assert not re.search(r"[\w ]+".join(parts), "\n".join(ask.tail for ask in case.asks))


def test_the_common_word_is_the_most_frequent():
    (case,) = make("words", SETTING, seed=2)
    counts = {word: case.document.split().count(word) for word in set(case.document.split())}
    assert max(counts, key=counts.__getitem__) == case.asks[0].answer


def test_words_are_compared_without_case():
    ask = Ask(tail="", answer="amber", label="all")
    assert ask.is_correct(" Amber, I think")
    assert not ask.is_correct(" not amber")
    assert not ask.is_correct("")


def test_unknown_kinds_are_refused():
    with pytest.raises(ConfigError, match="there is no task 'essay': use one of single"):
        make("essay", SETTING, seed=0)


def test_many_depths_need_several_documents():
    depths = tuple(i / 10 for i in range(10))
    cases = KINDS["multikey4"](Setting(TEXT, pieces, 2000, depths), random.Random(1))
    assert [len(case.asks) for case in cases] == [4, 4, 2]


def test_filler(tmp_path):
    assert len(read_text([])) > 400_000
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.txt").write_text("two")
    assert read_text([tmp_path / "a.txt", tmp_path / "b.txt"]) == "one\ntwo"
    (tmp_path / "c.txt").write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="cannot read the text"):
        read_text([tmp_path / "c.txt"])


def test_without_a_checkout_a_text_is_asked_for(monkeypatch, tmp_path):
    monkeypatch.setattr("kvflash_bench.filler.CHECKOUT", tmp_path)
    with pytest.raises(ConfigError, match="--text"):
        read_text([])


@pytest.mark.parametrize(
    ("answer", "reply", "settled"),
    [
        ("1234567", " 12345", False),
        ("1234567", " 1234567", False),
        ("1234567", " 1234567.", True),
        ("1234567", "The code is 99 or", True),
        ("1234567", "The code", False),
        ("amber", " am", False),
        ("amber", " amber is", True),
    ],
)
def test_an_answer_is_settled_once_it_has_ended(answer, reply, settled):
    assert Ask(tail="", answer=answer, label="all").is_settled(reply) is settled
