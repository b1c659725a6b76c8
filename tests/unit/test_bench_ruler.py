"""RULER's tasks: samples are the same each time, fit their length and hold their answers; scores are the paper's."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click
import pytest

from kvflash_bench import plot
from kvflash_bench.filler import read_text
from kvflash_bench.graded import Kept, Record, Sample, by_task, summary, ways
from kvflash_bench.outcomes import arms
from kvflash_bench.plans_texts import Ruler
from kvflash_bench.ruler_table import by_length
from kvflash_bench.tasks_ruler import (
    COMMON,
    FREQUENT,
    HOPS,
    NEEDLE,
    TASKS,
    Source,
    make,
    match_all,
    match_part,
    score,
)
from kvflash_ggml.errors import ConfigError

TEXT = read_text(sorted((Path(__file__).parents[1] / "text").glob("*.txt")))
PIECE = re.compile(r"[A-Za-z]{1,5}|\d| ?[^\sA-Za-z\d]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s")
SOURCE = Source(TEXT, lambda text: len(PIECE.findall(text)))
LENGTHS = (2048, 4096, 16384)
RECORD = Record(
    context=4096, way="full cache", task="vt", index=0, score=0.6, answers=("A", "B"), reply="A", tokens=9, seconds=1.5,
    gold=(3, 4), missing=(4,),
)  # fmt: skip


def sample(task: str, n_tokens: int = 4096, index: int = 0, **more: int) -> Sample:
    return make(task, SOURCE, n_tokens=n_tokens, seed=more.pop("seed", 0), index=index, **more)


def test_the_names_are_rulers() -> None:
    assert list(TASKS) == [
        "niah_single_1", "niah_single_2", "niah_single_3", "niah_multikey_1", "niah_multikey_2", "niah_multikey_3",
        "niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe", "qa_1", "qa_2",
    ]  # fmt: skip
    assert [most for _, most in TASKS.values()] == [128] * 8 + [30, 120, 50, 32, 32]


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_is_made_again_and_no_other_is_like_it(task: str) -> None:
    assert sample(task) == make(task, Source(TEXT, SOURCE.count), n_tokens=4096, seed=0, index=0)
    assert len({sample(task).body, sample(task, index=1).body, sample(task, seed=1).body}) == 3


@pytest.mark.parametrize("n_tokens", LENGTHS)
@pytest.mark.parametrize("task", TASKS)
def test_a_sample_fits_its_length_with_its_answer(task: str, n_tokens: int) -> None:
    made = sample(task, n_tokens, frame=20)
    used = SOURCE.count(made.body + made.lead) + 20 + made.most
    assert n_tokens - max(400, n_tokens // 20) < used <= n_tokens
    assert all(line in made.body for line in made.gold)
    assert all(answer in made.body for answer in made.answers)
    assert not any(answer in made.lead for answer in made.answers)


def test_a_length_that_is_too_short_is_refused() -> None:
    with pytest.raises(ConfigError, match="ask for a longer context"):
        sample("cwe", 500)
    with pytest.raises(ConfigError, match="there is no task 'niah': use some of niah_single_1, "):
        sample("niah")


@pytest.mark.parametrize(
    ("task", "needles", "answers", "value"),
    [
        ("niah_single_1", 1, 1, r"\d{7}"),
        ("niah_single_2", 1, 1, r"\d{7}"),
        ("niah_single_3", 1, 1, r"[0-9a-f-]{36}"),
        ("niah_multikey_1", 4, 1, r"\d{7}"),
        ("niah_multikey_2", None, 1, r"\d{7}"),
        ("niah_multikey_3", None, 1, r"[0-9a-f-]{36}"),
        ("niah_multivalue", 4, 4, r"\d{7}"),
        ("niah_multiquery", 4, 4, r"\d{7}"),
    ],
)
def test_needles(task: str, needles: int | None, answers: int, value: str) -> None:
    made = sample(task)
    found = re.findall(r"One of the special magic (?:numbers|uuids) for (\S+) is: (\S+)\.", made.body)
    assert len(found) == needles or (needles is None and len(found) > 40)
    asked = {key for key, one in found if one in made.answers}
    assert len(made.answers) == len(made.gold) == answers
    assert [one for key, one in found if key in asked].sort() == [*made.answers].sort()
    assert all(key in made.body.rpartition("What")[2] and key in made.lead for key in asked)
    assert all(re.fullmatch(value, one) for one in made.answers)
    kind = "uuids" if "uuids" in made.body else "numbers"
    assert made.gold[0] in {NEEDLE.format(kind=kind, key=key, value=made.answers[0]) for key in asked}


def test_variables_are_given_one_from_the_other() -> None:
    made = sample("vt")
    _, question = made.body.split("\n\nFollow the", 1)
    (asked,) = re.findall(r"have the value (\d{5}) in the text above\?$", made.body)
    given = dict(re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", question))
    chain = [asked]
    while after := [name for name, before in given.items() if before == chain[-1]]:
        chain += after
    assert tuple(chain[1:]) == made.answers
    assert len(made.answers) == HOPS + 1
    assert asked in made.lead


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_common_words_are_the_most_common(n_tokens: int) -> None:
    made = sample("cwe", n_tokens)
    listed = made.body.rpartition("Some words of")[2].partition("\nQuestion")[0]
    counts = Counter(re.findall(r"\d+\. (\w+)", listed))
    often, seldom = (30, 3) if n_tokens >= 4096 else (6, 1)
    assert {word for word, _ in counts.most_common(COMMON)} == set(made.answers)
    assert {*counts.values()} == {often, seldom}


def test_more_words_than_the_text_has_are_compounds() -> None:
    small = replace(SOURCE, text=" ".join(SOURCE.words[:30]))
    made = make("cwe", small, n_tokens=4096, seed=0, index=0)
    assert len(set(re.findall(r"\d+\. (\w+)", made.body))) > 30


@pytest.mark.parametrize("n_tokens", LENGTHS)
def test_coded_words_follow_the_zeta_distribution(n_tokens: int) -> None:
    made = sample("fwe", n_tokens)
    counts = Counter(made.body.partition("most often. ")[2].partition("\nQuestion")[0].split())
    (dots, most), *rest = counts.most_common(FREQUENT + 1)
    assert dots == "...."
    assert {word for word, _ in rest} == set(made.answers)
    assert [most / count for _, count in rest] == pytest.approx([4, 9, 16], rel=0.2)


@pytest.mark.parametrize("index", range(4))
def test_an_answer_is_in_one_of_many_documents(index: int) -> None:
    made = sample("qa_1", index=index)
    documents = re.split(r"Document \d+:\n", made.body)[1:]
    assert len(documents) >= 10
    assert sum(made.gold[0] in one for one in documents) == 1
    assert made.answers[0] in made.gold[0]
    assert made.answers[0] not in made.body.rpartition("Question")[2]


@pytest.mark.parametrize("index", range(4))
def test_two_documents_lead_to_an_answer(index: int) -> None:
    made = sample("qa_2", index=index)
    first, second = made.gold
    documents = re.split(r"Document \d+:\n", made.body)[1:]
    assert [sum(line in one for one in documents) for line in made.gold] == [1, 1]
    assert not any(first in one and second in one for one in documents)
    (who,) = set(re.findall(r"[A-Z][a-z]+", first)) & set(re.findall(r"[A-Z][a-z]+", second)) - {"The"}
    assert who not in made.body.rpartition("Question")[2]
    assert made.answers[0] in second
    assert made.answers[0] not in first


def test_scores_are_the_papers() -> None:
    assert match_all("They are 12 and 34.", ["12", "34"]) == 1
    assert match_all("they are ABC", ["abc", "34", "x", "56"]) == 0.25
    assert match_all("", ["12"]) == 0
    assert match_part("It is in Paris, France", ["paris", "Rome"]) == 1
    assert match_part("London", ["paris", "Rome"]) == 0
    assert score("qa_2", "a or b", ["b", "c"]) == 1
    assert score("niah_multiquery", "a or b", ["b", "c"]) == 0.5


# --- arms and tables


def test_every_answer_and_drafter_is_a_way() -> None:
    made = arms((4096,), (), ("qk:exact", "lru"), pools=(512,))
    assert [way.name for way in ways(made, ("pool", "lossless"), ("ngram",))] == [
        "full cache", "512 qk:exact", "512 qk:exact, ngram", "512 qk:exact, lossless", "512 qk:exact, lossless, ngram",
        "512 lru", "512 lru, ngram",
    ]  # fmt: skip


def test_finished_samples_are_read_again(tmp_path: Path) -> None:
    path = tmp_path / "samples.jsonl"
    Kept(path, {"seed": 0}).add(RECORD)
    with path.open("a") as file:
        file.write('{"context": 40')  # of a run that was killed
    kept = Kept(path, {"seed": 0})
    assert kept.records == {RECORD.key: RECORD}
    other = replace(RECORD, index=1)
    kept.add(other)
    assert Kept(path, {"seed": 0}).records == {RECORD.key: RECORD, other.key: other}
    with pytest.raises(
        ConfigError, match=r'has samples of other settings, \{"seed": 0\}: name another file with --out'
    ):
        Kept(path, {"seed": 1})
    assert json.loads(path.read_text().splitlines()[-1])["index"] == 1


def test_a_run_without_a_file_keeps_its_samples_in_memory() -> None:
    kept = Kept(None, {})
    kept.add(RECORD)
    assert list(kept.records.values()) == [RECORD]


def test_tables() -> None:
    full = [replace(RECORD, task=task, score=1.0) for task in TASKS]
    pool = [replace(one, way="512 qk", score=0.5 if one.task == "vt" else 1.0) for one in full]
    rows = summary([*full, *pool])
    assert [(row["way"], row["samples"], row["worse"], row["better"]) for row in rows] == [
        ("full cache", 13, None, None), ("512 qk", 13, 1, 0),
    ]  # fmt: skip
    assert rows[1]["tasks"]["vt"] == 50
    assert rows[1]["average"] == pytest.approx(100 * 12.5 / 13)
    header, cells = by_task(rows)
    assert header[3:-3] == list(TASKS)
    assert cells[1][header.index("vt")] == "50.0"
    header, cells = by_length(rows)
    assert header == ["cache", "4K"]
    assert cells == [
        ["Llama 3.1 8B, published", "95.5"], ["Phi-3-mini 3.8B, published", "92.2"],
        ["full cache", "100.0"], ["512 qk", "96.2"],
    ]  # fmt: skip


def test_an_average_of_some_tasks_stands_beside_nothing_published() -> None:
    _, cells = by_length(summary([RECORD]))
    assert cells == [["full cache", "60.0"]]


def test_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = summary([replace(RECORD, task=task, context=context) for task in TASKS for context in (4096, 8192)])
    plot.ruler(rows, tmp_path / "ruler.png", title="a model")
    assert (tmp_path / "ruler.png").read_bytes().startswith(b"\x89PNG")


def test_words_of_a_plan_are_known() -> None:
    Ruler(tasks=("vt",), answers=("lossless",)).check()
    with pytest.raises(click.BadParameter, match="'niah' is none of niah_single_1, "):
        Ruler(tasks=("vt", "niah")).check()
    with pytest.raises(click.BadParameter, match="'best' is none of pool, exact, lossless"):
        Ruler(answers=("best",)).check()
