"""The task for models from outside: its facts, its documents, and which free answers are right."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kvflash_bench import tasks_whole
from kvflash_bench.answers import finished, judge
from kvflash_bench.asks import Frame, Setting
from kvflash_bench.filler import read_text
from kvflash_bench.forms import SETS
from kvflash_bench.tasks_forms import PREAMBLE, text_of
from kvflash_bench.tasks_kinds import make
from kvflash_ggml.errors import ConfigError

TEXT = read_text(sorted((Path(__file__).parents[1] / "text").glob("*.txt")))
PIECE = re.compile(r"[A-Za-z]{1,5}|\d| ?[^\sA-Za-z\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s")
FORMS = [form for some in SETS.values() for form in some]
COMMON = "a and at by can does for from in is it must of on the to was what when which who with"


def pieces(text: str) -> list[str]:
    return PIECE.findall(text)


def spaced(text: str) -> list[str]:
    """A space belongs to the word after it, as in most vocabularies."""
    return re.findall(r" ?[A-Za-z]{1,6}|\d|\s|.", text)


def setting(**changes) -> Setting:
    return Setting(**({"text": TEXT, "tokenize": pieces, "n_tokens": 3000, "depths": ()} | changes))


def content(text: str) -> set[str]:
    return set(re.findall(r"\w+", text.lower())) - set(COMMON.split())


def test_the_sets_share_nothing():
    choose, confirm = SETS.values()
    assert len(choose) == len(confirm) == 12
    assert len({form.kind for form in FORMS}) == len({form.sentence for form in FORMS}) == 24
    values = [value for form in FORMS for value in form.values]
    assert len(values) == len(set(values))
    documents = [set(text_of(TEXT, name).split("\n\n")) for name in SETS]
    # the licences repeat a few paragraphs of each other
    assert len(documents[0] & documents[1]) < 0.01 * min(map(len, documents))
    assert sum(len(text_of(TEXT, name)) for name in SETS) == len(TEXT)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.kind)
def test_a_form(form):
    facts = content(form.sentence.replace("{v}", ""))
    assert len(facts & content(form.question)) >= 0.6 * len(facts)
    assert len(facts & content(form.reworded)) <= 3
    assert len(facts & content(form.reworded)) < len(facts & content(form.question))
    assert not set(form.values) & set(form.anchors)
    asked = f"{form.question} {form.lead} {form.reworded} {form.reworded_lead}"
    for value in form.values:
        assert judge(asked, value) is None
        assert not re.search(rf"\b{re.escape(value)}\b", TEXT, re.I), f"the filler says {value}"


@pytest.mark.parametrize("name", SETS)
@pytest.mark.parametrize("tokenize", [pieces, spaced])
@pytest.mark.parametrize("frame", [Frame(), Frame(before_document="<user>\n", before_answer="<model>\n", size=9)])
def test_a_document_holds_twelve_facts_each_asked_twice(name, tokenize, frame):
    (case,) = make("forms", setting(fact_set=name, frame=frame, tokenize=tokenize), seed=3)
    text = tokenize(case.document)
    begin = len(tokenize(frame.before_document))
    assert len(text) - begin + frame.size == pytest.approx(3000, abs=1)
    assert [ask.label for ask in case.asks] == ["verbatim", "reworded"] * 12
    places = sorted({ask.gold[0][0] for ask in case.asks})
    assert len(places) == 12
    assert places[0] == pytest.approx(0.04 * 3000, abs=150)
    assert places[-1] == pytest.approx(0.96 * 3000, abs=150)
    for ask in case.asks:
        ((lo, hi),) = ask.gold
        shift = frame.size - begin
        assert ask.answer in "".join(text[lo - shift : hi - shift])
        assert hi - lo < 16
        assert ask.answer not in ask.tail
        assert frame.before_answer in ask.tail
        assert ask.is_correct(f" {ask.answer}.")
        assert not any(ask.is_correct(f" {rival}.") for rival in ask.anchors)
    assert case.document.startswith(frame.before_document)


def test_a_late_answer_begins_with_something_else():
    ((late,), (plain,)) = (
        make(kind, setting(frame=Frame(before_answer="<model>\n")), seed=3) for kind in ("late", "forms")
    )
    leads = [lead for form in SETS["choose"] for lead in (form.lead, form.reworded_lead)]
    assert len(late.asks) == 24
    for ask in late.asks:
        assert ask.tail.endswith("<model>\n")
        assert ask.said.removeprefix(PREAMBLE) in leads
    for ask in plain.asks:
        assert ask.tail.rpartition("<model>\n")[2] in leads
        assert not ask.said


def test_a_seed_is_a_document_of_its_own():
    made = [make("forms", setting(), seed=seed)[0] for seed in range(4)]
    assert made[0] == make("forms", setting(), seed=0)[0]
    lines = [set(case.document.splitlines()) for case in made]
    for i, some in enumerate(lines):
        for other in lines[:i]:
            assert len(some & other) < 0.1 * len(some)
    assert len({tuple(ask.answer for ask in case.asks) for case in made}) == 4


def test_an_unknown_set_is_refused():
    with pytest.raises(ConfigError, match="there is no set 'all' of facts: use one of choose, confirm"):
        make("forms", setting(fact_set="all"), seed=0)


@pytest.mark.parametrize(
    ("reply", "answer", "verdict"),
    [
        (" Friday.", "Friday", True),
        (" on a FRIDAY, I think", "Friday", True),
        (' "friday"', "Friday", True),
        (" Monday, or Friday", "Friday", False),
        (" Friday or Monday", "Friday", True),
        (" not Friday", "Friday", False),
        (" a fair day", "Friday", None),
        ("", "Friday", None),
        (" 1,683 steps", "1683", True),
        (" 16830", "1683", False),
        (" 12 or 1683", "1683", False),
        (" 17:40.", "17:40", True),
        (" 17.40", "17:40", False),
        (" 17", "17:40", False),
        (" the label qx 4471", "QX-4471", True),
        (" QX4471", "QX-4471", True),
        (" 4471", "QX-4471", False),
        (" QX-4472", "QX-4471", False),
        (" Nora Pym", "Nora Pym", True),
        (" Nora Brandt", "Nora Pym", None),
        (" a cherry", "cherries", True),
    ],
)
def test_free_answers(reply, answer, verdict):
    assert judge(reply, answer, ("Monday", "Tuesday")) is verdict


@pytest.mark.parametrize(
    ("reply", "whole"), [(" 12", " "), (" 12.5", " "), (" 12. ", " 12. "), (" 12 steps", " 12 "), ("", "")]
)
def test_the_last_word_may_go_on(reply, whole):
    assert finished(reply) == whole


def test_an_answer_is_settled_by_whole_words():
    ask = next(ask for ask in make("forms", setting(), seed=1)[0].asks if ask.answer.isdigit())
    assert not ask.is_settled(f" {ask.answer[:-1]}")
    assert not ask.is_settled(f" {ask.answer}")
    assert ask.is_settled(f" {ask.answer}.\n")
    assert ask.is_settled(" 1 step")
    assert not ask.is_settled(" the answer is")


def test_questions_about_the_whole_document():
    answers = set()
    for seed in range(3):
        (case,) = make("whole", setting(), seed=seed)
        count, named, compare, follow = case.asks
        assert [ask.label for ask in case.asks] == ["count", "list", "compare", "follow"]
        facts = dict(re.findall(r"The bell tower of (\w+) is (\d+) metres", case.document))
        assert facts[compare.answer] == max(facts.values())
        assert compare.is_correct(f" {compare.answer}.")
        assert not compare.is_correct(f" {min(facts, key=facts.__getitem__)}.")
        members = re.findall(r"members of the chess club is (\w+)\.", case.document)
        assert sorted(named.answer.split(", ")) == sorted(members)
        assert count.answer == ("two", "three", "four", "five", "six")[len(members) - 2]
        other = re.search(r"members of the rowing club is (\w+)\.", case.document).group(1)
        assert named.is_correct(f" {' and '.join(members)}.")
        assert not named.is_correct(f" {', '.join(members[1:])}.")
        assert not named.is_correct(f" {', '.join([*members, other])}.")
        assert named.is_settled(f" {members[0]}.")
        assert not named.is_settled(f" {members[0]},")
        assert f"The harbour map lies in the {follow.answer} drawer." in case.document
        assert follow.answer not in follow.tail
        for ask, lines in zip(case.asks, (len(members), len(members), 2, 2), strict=True):
            assert len(ask.gold) == lines
            for lo, hi in ask.gold:
                assert "".join(pieces(case.document)[lo:hi]).strip().endswith(".")
        answers.add(tuple(ask.answer for ask in case.asks))
    assert len(answers) == 3


@pytest.mark.parametrize("value", sorted({*tasks_whole.PEOPLE, *tasks_whole.TOWNS, "silver whistle", "harbour map"}))
def test_the_filler_says_nothing_of_the_whole(value):
    assert value.lower() not in TEXT.lower()
