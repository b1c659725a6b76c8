"""LongBench's files: what is read of them, how it is asked, and that replies score as its metrics say."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvflash_bench.longbench import by_kind, shortened
from kvflash_bench.tasks_longbench import (
    CHINESE_WORDS,
    DATA_SETS,
    Question,
    classification,
    code_similarity,
    count,
    qa_f1,
    qa_f1_zh,
    read,
    retrieval,
    rouge_l,
    score,
)
from kvflash_ggml.errors import ConfigError

LINE = {
    "input": "Who wrote the letter?", "context": "Ada wrote it {once}.", "answers": ["Ada", "Ada Byron"], "length": 4,
    "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "0",
}  # fmt: skip


def write(folder: Path, name: str, *lines: Any) -> None:
    (folder / f"{name}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines), encoding="utf-8")


# --- metrics; the figures of rouge_l and code_similarity are those of the packages rouge 1.0.1 and fuzzywuzzy 0.18.0


@pytest.mark.parametrize(
    ("metric", "reply", "answer", "right"),
    [
        (qa_f1, "The Eiffel Tower!", "eiffel tower", 1),
        (qa_f1, "it is the tower of Paris", "Eiffel Tower", 2 / 7),
        (qa_f1, "no idea", "Eiffel Tower", 0),
        (qa_f1, "", "Eiffel Tower", 0),
        (rouge_l, "the cat sat on the mat", "the cat sat on the mat", 1),
        (rouge_l, "a dog ran. the cat sat", "the cat sat on a mat", 8 / 12),
        (rouge_l, "", "the cat", 0),
        (rouge_l, "...", "the cat", 0),
        (count, "There are 12 of them", "12", 1),
        (count, "1. 12", "12", 0.5),
        (count, "none", "12", 0),
        (retrieval, "Paragraph 3", "Paragraph 3", 1),
        (retrieval, "Paragraph 30 or 3", "Paragraph 3", 0.5),
        (retrieval, "段落7", "段落7", 1),
        (code_similarity, "\n# a comment\nreturn x + 1\nmore", "return x + 1", 1),
        (code_similarity, "return x", "return x + 1", 0.8),
        (code_similarity, "# nothing else", "return x", 0),
    ],
)
def test_a_metric(metric: Any, reply: str, answer: str, right: float) -> None:
    assert metric(reply, answer) == pytest.approx(right)


def test_a_reply_that_names_several_classes_scores_less() -> None:
    classes = ["Date", "Individual", "Group", "Group or organization of person"]
    assert classification("Date", "Date", classes) == 1
    assert classification("Date or Individual", "Date", classes) == 0.5
    assert classification("Individual", "Date", classes) == 0
    assert classification("none", "Date", classes) == 0
    long = "Group or organization of person"
    assert classification(long, long, classes) == 1, "a part of the answer's name is no other class"


def test_words_of_chinese_are_jiebas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "jieba", SimpleNamespace(cut=lambda text, cut_all: text.split("|")))
    assert qa_f1_zh("北京|。", "北京") == 1
    assert qa_f1_zh("北京|上海", "北京") == pytest.approx(2 / 3)


def test_the_best_answer_counts_and_of_examples_the_first_line() -> None:
    def asked(**changes: Any) -> Question:
        return Question(**({"context": "", "input": "", "answers": ("red", "blue"), "classes": ()} | changes))

    assert score("hotpotqa", "Blue.", asked()) == 1
    assert score("triviaqa", "\nred\nPassage: another one", asked()) == 1
    assert score("hotpotqa", "red\nPassage", asked()) < 1
    assert score("trec", "Date\nIndividual", asked(answers=("Date",), classes=("Date", "Individual"))) == 1


# --- files


def test_all_of_longbench_is_known() -> None:
    assert len(DATA_SETS) == 21
    assert {one.kind for one in DATA_SETS.values()} == {"single", "multi", "summary", "examples", "synthetic", "code"}
    assert all("{context}" in one.prompt for one in DATA_SETS.values())
    assert [name for name, one in DATA_SETS.items() if "{input}" not in one.prompt] == [
        "gov_report", "multi_news", "vcsum", "passage_count", "lcc",
    ]  # fmt: skip
    assert [name for name, one in DATA_SETS.items() if one.plain] == [
        "trec", "triviaqa", "samsum", "lsht", "lcc", "repobench-p",
    ]  # fmt: skip


def test_files_are_read_by_their_names(tmp_path: Path) -> None:
    write(tmp_path, "hotpotqa", LINE, LINE | {"input": "When?"})
    write(tmp_path, "trec_e", LINE | {"all_classes": ["Date"], "answers": ["Date"]})
    write(tmp_path, "another", {"x": 1})
    found = read(tmp_path, (), None)
    assert {name: len(some) for name, some in found.items()} == {"hotpotqa": 2, "trec_e": 1}
    assert found["hotpotqa"][0].answers == ("Ada", "Ada Byron")
    assert found["trec_e"][0].classes == ("Date",)
    (first,) = read(tmp_path, ("hotpotqa",), 1)["hotpotqa"]
    body = DATA_SETS["hotpotqa"].prompt.format(context=first.context, input=first.input)
    assert "Ada wrote it {once}." in body
    assert body.endswith("Question: Who wrote the letter?\nAnswer:")


def test_what_is_none_of_longbench_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"has no file of LongBench, such as hotpotqa\.jsonl"):
        read(tmp_path, (), None)
    write(tmp_path, "hotpotqa", LINE, {"input": "x"})
    with pytest.raises(ConfigError, match="has no file of qasper: it has hotpotqa"):
        read(tmp_path, ("qasper",), None)
    with pytest.raises(ConfigError, match=r"line 2 of .*hotpotqa\.jsonl is none of LongBench: KeyError 'context'"):
        read(tmp_path, (), None)
    write(tmp_path, CHINESE_WORDS[0], LINE)
    monkeypatch.setattr("kvflash_bench.tasks_longbench.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="multifieldqa_zh is scored by words that jieba finds: pip install jieba, or"):
        read(tmp_path, (CHINESE_WORDS[0],), None)


def test_the_middle_of_a_long_prompt_is_left_out() -> None:
    class Letters:
        def tokenize(self, text: bytes, *, add_bos: bool, special: bool) -> list[int]:
            return list(text)

        def detokenize(self, tokens: list[int]) -> bytes:
            return bytes(tokens)

    llm: Any = Letters()
    assert shortened(llm, "abcdefgh", 8) == "abcdefgh"
    assert shortened(llm, "abcdefgh", 4) == "abgh"


def test_means_of_kinds() -> None:
    rows = [{"context": 8192, "way": "full cache", "tasks": {"hotpotqa": 40.0, "musique": 20.0, "lcc_e": 50.0}}]
    assert by_kind(rows) == (["tokens", "cache", "multi", "code"], [[8192, "full cache", "30.0", "50.0"]])
